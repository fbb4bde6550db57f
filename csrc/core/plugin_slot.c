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

/* "input f32 [4, 16], gamma f32 [16]": the tensors of a call. */
static void write_shapes(te_op op, const void *args, char *text)
{
    const te_op_info *info = te_op_describe(op);
    int length = 0;
    text[0] = '\0';
    for (int32_t i = 0; i < info->field_count && length < SHAPES_BYTES - 1; i++) {
        const te_tensor *tensor = te_field_member(&info->fields[i], args);
        if (info->fields[i].kind != TE_FIELD_TENSOR || !te_tensor_present(tensor)) continue;
        length +=
            snprintf(text + length, (size_t)(SHAPES_BYTES - length), "%s%s %s [",
                     length == 0 ? "" : ", ", info->fields[i].name, te_dtype_name(tensor->dtype));
        for (int32_t d = 0; d < tensor->ndim && length < SHAPES_BYTES - 1; d++) {
            length += snprintf(text + length, (size_t)(SHAPES_BYTES - length), "%s%lld",
                               d > 0 ? ", " : "", (long long)tensor->shape[d]);
        }
        if (length < SHAPES_BYTES - 1) {
            length += snprintf(text + length, (size_t)(SHAPES_BYTES - length), "]");
        }
    }
}

/* The failure of a function of a plug-in, with the text that it has left, if it has. */
static te_status tell(const te_plugin_record *record, const void *args, te_status st,
                      uint64_t failures)
{
    const te_plugin_slot *slot = &record->slot;
    char reason[REASON_BYTES], shapes[SHAPES_BYTES];
    int known = st < TE_OK && st >= TE_ERROR_INTERRUPTED;
    if (st == TE_ERROR_CALLBACK || st == TE_ERROR_INTERRUPTED)
        return st; /* the caller's business */
    if (!known) {
        (void)snprintf(reason, sizeof reason, "it returned %d, which is no te_status", (int)st);
    } else {
        (void)snprintf(reason, sizeof reason, "%s",
                       te_failure_count() == failures ? "it gave no reason" : te_last_error());
    }
    write_shapes(slot->op, args, shapes);
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
    te_status st = record->given.workspace(record->given.self, context, args, bytes);
    return st == TE_OK ? st : tell(record, args, st, failures);
}

static te_status run(void *self, te_context *context, const void *args, void *stream)
{
    te_plugin_record *record = self;
    const uint64_t failures = te_failure_count();
    te_status st = record->given.function(record->given.self, context, args, stream);
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
    size_t size;
    if (op < 0) {
        return TE_FAIL(TE_ERROR_INVALID, "backend %s: there is no operator %s", backend->name,
                       given->name == NULL ? "without a name" : given->name);
    }
    size = te_op_describe((te_op)op)->size;
    if (given->function == NULL) {
        return TE_FAIL(TE_ERROR_INVALID, "backend %s: %s has no function", backend->name,
                       given->name);
    }
    if (given->args_size > size) {
        return TE_FAIL(TE_ERROR_UNSUPPORTED,
                       "backend %s: %s reads %zu bytes of its args, this library (%s) has %zu: it "
                       "was built for a later one",
                       backend->name, given->name, given->args_size, TE_VERSION, size);
    }
    if (given->args_size < sizeof(size_t)) {
        return TE_FAIL(TE_ERROR_INVALID, "backend %s: %s: args_size = %zu, expected %zu",
                       backend->name, given->name, given->args_size, size);
    }
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
