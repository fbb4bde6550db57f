/* SPDX-License-Identifier: Apache-2.0
 *
 * plugin_slot.c - slots of plug-ins: they never see a call that uses what they were built without,
 * and an error of theirs says whose it is and of which call.
 */
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/plugin.h"
#include "core/status.h"
#include "core/tensor.h"

enum { REASON_BYTES = 512, SHAPES_BYTES = 512 };
/* More workspace than any process has: sums of sizes do not overflow below. */
#define MOST_WORKSPACE ((size_t)1 << 62)

/* The failure of a function of a plug-in, with the text that it has left, if it has. */
static te_status tell(const te_plugin_record *record, const void *args, te_status st,
                      uint64_t failures)
{
    const te_plugin_slot *slot = &record->slot;
    char reason[REASON_BYTES], shapes[SHAPES_BYTES];
    int known = st < TE_OK && st >= TE_ERROR_INTERRUPTED;
    if (!known) {
        (void)snprintf(reason, sizeof reason, "it returned %d, which is no te_status", (int)st);
    } else {
        (void)snprintf(reason, sizeof reason, "%s",
                       te_failure_count() == failures ? "it gave no reason" : te_last_error());
    }
    te_op_shapes(slot->op, args, shapes, sizeof shapes);
    return TE_FAIL(known ? st : TE_ERROR_STATE, "%s: backend %s: %s (%s)", te_op_name(slot->op),
                   slot->backend, reason, shapes);
}

/* Whether a field has the value that it has where nobody gives one. */
static int is_initial(const te_field *field, const void *args)
{
    const void *member = te_field_member(field, args);
    switch (field->kind) {
    case TE_FIELD_TENSOR:
        return !te_tensor_requested(member);
    case TE_FIELD_FLOATS:
    case TE_FIELD_INT64S:
        return *(void *const *)member == NULL;
    case TE_FIELD_WORKSPACE:
        return 1;
    default:
        return te_field_number(field, args) == field->initial;
    }
}

/* Refuses a call that uses a field which the plug-in was built without. */
static te_status check_known(const te_plugin_record *record, const void *args)
{
    const te_op_info *info = te_op_describe(record->slot.op);
    for (int32_t i = 0; i < info->field_count; i++) {
        const te_field *field = &info->fields[i];
        if (field->offset + field->size <= record->given.args_size) continue;
        if (is_initial(field, args)) continue;
        return TE_FAIL(TE_ERROR_UNSUPPORTED, "%s: backend %s was built without %s",
                       te_op_name(record->slot.op), record->slot.backend, field->name);
    }
    return TE_OK;
}

static te_status supports(void *self, te_context *context, const void *args)
{
    const te_plugin_record *record = self;
    const uint64_t failures = te_failure_count();
    te_status st;
    if (record->given.args_size < te_op_describe(record->slot.op)->size) {
        TE_TRY(check_known(record, args));
    }
    if (record->given.supports == NULL) return TE_OK;
    st = record->given.supports(record->given.self, context, args);
    return st == TE_OK ? st : tell(record, args, st, failures);
}

static te_status workspace(void *self, te_context *context, const void *args, size_t *bytes)
{
    const te_plugin_record *record = self;
    const uint64_t failures = te_failure_count();
    te_status st;
    *bytes = 0;
    st = record->given.workspace(record->given.self, context, args, bytes);
    if (st != TE_OK) return tell(record, args, st, failures);
    if (*bytes <= MOST_WORKSPACE) return TE_OK;
    return TE_FAIL(TE_ERROR_MEMORY, "%s: backend %s: it asks for %zu bytes of workspace",
                   te_op_name(record->slot.op), record->slot.backend, *bytes);
}

/* What a plug-in asks for it finds in args, whoever calls, and whatever it has said before. */
static te_status check_workspace(te_plugin_record *record, te_context *context, const void *args)
{
    const te_op_info *info = te_op_describe(record->slot.op);
    const char *member = (const char *)args + info->fields[info->field_count - 1].offset;
    const void *given = *(void *const *)(const void *)member;
    const size_t size = *(const size_t *)(const void *)(member + sizeof(void *));
    size_t need;
    TE_TRY(workspace(record, context, args, &need));
    if (need == 0 || (given != NULL && size >= need)) return TE_OK;
    return TE_FAIL(TE_ERROR_INVALID, "%s: backend %s: workspace of %zu bytes, %zu are needed",
                   te_op_name(record->slot.op), record->slot.backend, given == NULL ? 0 : size,
                   need);
}

static te_status run(void *self, te_context *context, const void *args, void *stream)
{
    te_plugin_record *record = self;
    uint64_t failures;
    te_status st;
    if (record->given.workspace != NULL) TE_TRY(check_workspace(record, context, args));
    failures = te_failure_count();
    st = record->given.function(record->given.self, context, args, stream);
    if (st != TE_OK) return tell(record, args, st, failures);
    (void)atomic_fetch_add_explicit(&record->calls, 1, memory_order_relaxed);
    return TE_OK;
}

int32_t te_op_find(const char *name)
{
    for (int32_t op = 0; name != NULL && op < TE_OP_COUNT; op++) {
        if (strcmp(name, te_op_name((te_op)op)) == 0) return op;
    }
    return -1;
}

te_status te_plugin_record_make(const te_plugin_backend *backend, const te_plugin_operator *given,
                                te_plugin_record *record)
{
    const int32_t op = te_op_find(given->name);
    const te_op_info *info;
    size_t size, workspace_end;
    TE_FAIL_IF(op < 0, TE_ERROR_INVALID, "backend %s: there is no operator %s", backend->name,
               given->name == NULL ? "without a name" : given->name);
    info = te_op_describe((te_op)op);
    size = info->size;
    TE_FAIL_IF(given->function == NULL, TE_ERROR_INVALID, "backend %s: %s has no function",
               backend->name, given->name);
    TE_FAIL_IF(given->args_size > size, TE_ERROR_UNSUPPORTED,
               "backend %s: %s reads %zu bytes of its args, this library (%s) has %zu: it "
               "was built for a later one",
               backend->name, given->name, given->args_size, TE_VERSION, size);
    workspace_end = info->fields[info->field_count - 1].offset + sizeof(void *) + sizeof(size_t);
    TE_FAIL_IF(given->workspace != NULL && given->args_size < workspace_end, TE_ERROR_INVALID,
               "backend %s: %s has a workspace function, and its args end before the "
               "workspace: args_size = %zu, expected at least %zu",
               backend->name, given->name, given->args_size, workspace_end);
    TE_FAIL_IF(given->args_size < sizeof(size_t), TE_ERROR_INVALID,
               "backend %s: %s: args_size = %zu, expected %zu", backend->name, given->name,
               given->args_size, size);
    record->given = *given;
    record->given.name = te_op_name((te_op)op); /* the other one may go */
    atomic_init(&record->calls, 0);
    record->slot = (te_plugin_slot){
        .size = sizeof record->slot,
        .op = (te_op)op,
        .device = backend->device,
        .kind = backend->kind,
        .priority = backend->priority,
        .backend = backend->name,
        .vendor = backend->vendor,
        .slot = {.function = run,
                 .supports = supports,
                 .workspace = given->workspace == NULL ? NULL : workspace,
                 .self = record},
    };
    return TE_OK;
}

int64_t te_plugin_slot_calls(const te_plugin_slot *slot)
{
    return atomic_load_explicit(&((const te_plugin_record *)slot)->calls, memory_order_relaxed);
}
