/* SPDX-License-Identifier: Apache-2.0
 *
 * operator_call.c - the custom call te_operator: any operator of the table, by its list of fields.
 *
 * Attributes: `operator`, its name; `numbers`, a dictionary of its numbers by field, as far as they
 * are not the initial ones; `given` and `made`, which of its fields are arguments and which
 * results, a bit each by place in the list: how a call says which optional tensors are there. In
 * the order of the list come the arguments, then the results; a field that is both is changed, and
 * its result shares the argument's memory. Behind them comes the workspace.
 */
#include "xla/frame.h"

#include <string.h>

#include "core/status.h"
#include "core/tensor.h"

static int is_number(const te_field *field)
{
    return field->kind >= TE_FIELD_FLOAT && field->kind <= TE_FIELD_BIT;
}

/* Which operator, with its numbers in `args`. */
static te_status read_attributes(const te_xla_attributes *attributes, te_op *op, te_any_args *args)
{
    static const char *const names[] = {
#define X(NAME, name) #name,
        TE_OPS(X)
#undef X
    };
    const te_xla_span *name = te_xla_find(attributes, "operator", TE_XLA_ATTRIBUTE_STRING);
    const te_xla_attributes *numbers =
        te_xla_find(attributes, "numbers", TE_XLA_ATTRIBUTE_DICTIONARY);
    const te_op_info *info;
    int64_t found = 0;
    int number = 0;
    TE_FAIL_IF(name == NULL || numbers == NULL, TE_ERROR_INVALID,
               "custom call: expected the attributes operator and numbers");
    while (number < TE_OP_COUNT && (strlen(names[number]) != name->length ||
                                    memcmp(names[number], name->text, name->length) != 0)) {
        number++;
    }
    TE_FAIL_IF(number == TE_OP_COUNT, TE_ERROR_INVALID, "custom call: there is no operator %.*s",
               (int)(name->length < 64 ? name->length : 64), name->text);
    *op = (te_op)number;
    info = te_op_describe(*op);
    te_op_initial(*op, args);
    for (int32_t i = 0; i < info->field_count; i++) {
        const te_field *field = &info->fields[i];
        double value = 0.0;
        if (!is_number(field) ||
            te_xla_find(numbers, field->name, TE_XLA_ATTRIBUTE_SCALAR) == NULL) {
            continue;
        }
        TE_TRY(te_xla_number(numbers, field->name, &value));
        te_field_set_number(field, args, value);
        found++;
    }
    TE_FAIL_IF(found != numbers->size, TE_ERROR_INVALID,
               "custom call: %s: %lld of %lld numbers are no fields of it", names[number],
               (long long)(numbers->size - found), (long long)numbers->size);
    return TE_OK;
}

static te_status check(const te_xla_attributes *attributes)
{
    te_any_args args;
    te_op op;
    return read_attributes(attributes, &op, &args);
}

/* Puts a view where its field is. */
static te_status put(const te_field *field, const te_tensor *view, te_any_args *args)
{
    void *member = (char *)args + field->offset;
    const te_dtype expected = field->kind == TE_FIELD_INT64S ? TE_DTYPE_I64 : TE_DTYPE_F32;
    if (field->kind == TE_FIELD_TENSOR) {
        *(te_tensor *)member = *view;
        return TE_OK;
    }
    TE_FAIL_IF(view->dtype != expected, TE_ERROR_TYPE, "custom call: %s: dtype %s, expected %s",
               field->name, te_dtype_name(view->dtype), te_dtype_name(expected));
    TE_FAIL_IF(te_tensor_numel(view) < field->count, TE_ERROR_INVALID,
               "custom call: %s: %lld elements, expected %lld", field->name,
               (long long)te_tensor_numel(view), (long long)field->count);
    *(void **)member = view->data;
    return TE_OK;
}

static te_status take_field(const te_field *field, te_any_args *args, te_xla_cursor *arguments,
                            te_xla_cursor *results)
{
    const int32_t ndim = field->form == TE_FORM_MATRIX ? 2 : 0;
    te_tensor view;
    TE_FAIL_IF(results != NULL && field->access == TE_ACCESS_READ, TE_ERROR_INVALID,
               "custom call: %s is read alone, and was given as a result", field->name);
    TE_FAIL_IF(results == NULL && field->access != TE_ACCESS_READ, TE_ERROR_INVALID,
               "custom call: %s is written, and was not given as a result", field->name);
    TE_TRY(te_xla_take(arguments != NULL ? arguments : results, field->name, ndim, &view, NULL));
    if (arguments != NULL && results != NULL) {
        TE_TRY(te_xla_take_updated(results, field->name, &view));
    }
    TE_FAIL_IF(arguments == NULL && field->access == TE_ACCESS_UPDATE, TE_ERROR_INVALID,
               "custom call: %s is changed, and was not given as an argument", field->name);
    return put(field, &view, args);
}

static te_status run(const te_xla_call *call)
{
    const te_xla_attributes *attributes = &call->frame->attributes;
    te_xla_cursor arguments = te_xla_arguments(call), results = te_xla_results(call);
    const te_op_info *info;
    const te_field *last;
    te_any_args args;
    int64_t given = 0, made = 0;
    te_op op;
    TE_TRY(read_attributes(attributes, &op, &args));
    TE_TRY(te_xla_integer(attributes, "given", &given));
    TE_TRY(te_xla_integer(attributes, "made", &made));
    info = te_op_describe(op);
    for (int32_t i = 0; i < info->field_count; i++) {
        const int is_given = (int)(given >> i & 1), is_made = (int)(made >> i & 1);
        if (!is_given && !is_made) continue;
        TE_FAIL_IF(is_number(&info->fields[i]) || info->fields[i].kind == TE_FIELD_WORKSPACE,
                   TE_ERROR_TYPE, "custom call: %s is no tensor", info->fields[i].name);
        TE_TRY(take_field(&info->fields[i], &args, is_given ? &arguments : NULL,
                          is_made ? &results : NULL));
    }
    last = &info->fields[info->field_count - 1];
    TE_TRY(te_xla_take_scratch(&results, (void **)(void *)((char *)&args + last->offset),
                               (size_t *)(void *)((char *)&args + last->offset + sizeof(void *))));
    TE_TRY(te_xla_no_more(&arguments));
    TE_TRY(te_xla_no_more(&results));
    return te_op_run(call->context, op, &args, call->stream);
}

static const te_xla_kind operator_call = {check, run};

te_xla_error *te_xla_operator_cpu(te_xla_frame *frame)
{
    return te_xla_handle(frame, TE_DEVICE_CPU, &operator_call);
}

te_xla_error *te_xla_operator_CUDA(te_xla_frame *frame)
{
    return te_xla_handle(frame, TE_DEVICE_CUDA, &operator_call);
}
