/* SPDX-License-Identifier: Apache-2.0 */
#include "core/check.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/status.h"
#include "core/tensor.h"

te_status te_check_fail(const te_check_site *site, const char *name, te_status kind,
                        const char *file, int line, const char *format, ...)
{
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return te_fail(kind, file, line, "%s: %s: %s", te_op_name(site->op), name, text);
}

/* ---- what checks share -------------------------------------------------------------------- */

te_status te_check_sizes(const te_check_site *site, const char *name, const te_tensor *tensor,
                         const te_tensor *like, int or_1)
{
    INVALID_IF(tensor->ndim != like->ndim, name, "ndim = %d, expected %d", (int)tensor->ndim,
               (int)like->ndim);
    for (int32_t i = 0; i < like->ndim; i++) {
        if (tensor->shape[i] == like->shape[i] || (or_1 && tensor->shape[i] == 1)) continue;
        INVALID_IF(like->ndim == 2, name, "shape [%lld, %lld], expected [%lld, %lld]",
                   LL(tensor->shape[0]), LL(tensor->shape[1]), LL(like->shape[0]),
                   LL(like->shape[1]));
        return INVALID(name, "dim %d: size %lld, expected %s%lld", (int)i, LL(tensor->shape[i]),
                       or_1 ? "1 or " : "", LL(like->shape[i]));
    }
    return TE_OK;
}

te_status te_check_length(const te_check_site *site, const char *name, const te_tensor *tensor,
                          int64_t length)
{
    if (!te_tensor_requested(tensor) || tensor->shape[0] == length) return TE_OK;
    return INVALID(name, "ndim %d and length %lld, expected a vector of %lld", (int)tensor->ndim,
                   LL(tensor->shape[0]), LL(length));
}

te_status te_check_dtype(const te_check_site *site, const char *name, te_dtype dtype,
                         te_dtype expected)
{
    if (dtype == expected) return TE_OK;
    return WRONG_TYPE(name, "dtype %s, expected %s", te_dtype_name(dtype), te_dtype_name(expected));
}
te_status te_check_missing(const te_check_site *site, const char *name, const te_tensor *tensor,
                           const char *why)
{
    return te_tensor_present(tensor) ? TE_OK : INVALID(name, "is missing: %s", why);
}
/* ---- one field ---------------------------------------------------------------------------- */

#define BIT(NAME) (1U << TE_DTYPE_##NAME)
#define NUMBERS (BIT(F32) | BIT(F16) | BIT(BF16))
#define FP8 (BIT(E4M3) | BIT(E5M2))

static te_status check_dtype(const te_check_site *site, const te_field *field, te_dtype dtype)
{
    static const struct {
        uint32_t legal;
        const char *names;
    } expected[] = {
        [TE_DTYPES_ANY] = {(1U << TE_DTYPE_COUNT) - 1U, "a dtype"},
        [TE_DTYPES_NUMBERS] = {NUMBERS, "f32, f16 or bf16"},
        [TE_DTYPES_CODES] = {FP8 | BIT(U8), "e4m3 or e5m2 (nvfp4: u8)"},
        [TE_DTYPES_SCALES] = {BIT(F32) | BIT(U8), "f32 or u8"},
        [TE_DTYPES_F32] = {BIT(F32), "f32"},
        [TE_DTYPES_I32] = {BIT(I32), "i32"},
        [TE_DTYPES_MASK] = {BIT(U8), "u8"},
        [TE_DTYPES_FLOATS] = {NUMBERS | FP8, "f32, f16 or bf16, or FP8"},
    };
    if ((unsigned)dtype < TE_DTYPE_COUNT && (expected[field->dtypes].legal >> dtype & 1U) != 0U)
        return TE_OK;
    return WRONG_TYPE(field->name, "dtype %s, expected %s", te_dtype_name(dtype),
                      expected[field->dtypes].names);
}

/* No element is written twice: seen from the smallest stride up, every dim steps over the whole of
 * those before it. */
static te_status check_no_overlap(const te_check_site *site, const char *name,
                                  const te_tensor *tensor)
{
    int64_t extent = 1; /* elements from the first to the last of the dims seen, inclusive */
    uint32_t seen = 0;
    for (int32_t step = 0; step < tensor->ndim; step++) {
        int32_t next = -1;
        for (int32_t i = 0; i < tensor->ndim; i++) {
            if ((seen >> i & 1U) != 0U || tensor->shape[i] == 1) continue;
            if (next < 0 || tensor->strides[i] < tensor->strides[next]) next = i;
        }
        if (next < 0) return TE_OK;
        INVALID_IF(tensor->strides[next] < extent, name,
                   "dim %d: stride %lld is less than the %lld elements within: they overlap",
                   (int)next, LL(tensor->strides[next]), LL(extent));
        seen |= 1U << next;
        extent += (tensor->shape[next] - 1) * tensor->strides[next];
    }
    return TE_OK;
}

/* Whether the product of a size, at least 1, and a number is more than `most`: of small ones
 * without a division, which takes as long as the other checks of a tensor. */
static int is_more(int64_t size, int64_t number, int64_t most)
{
    const int64_t small = INT64_C(1) << 27;
    return !(size < small && number < small && most >= small * small) && number > most / size;
}

/* From the first element to the last one TE_MOST_ELEMENTS; empty tensors too, by their other sizes,
 * and strides that no element is read by. */
static te_status check_extent(const te_check_site *site, const char *name, const te_tensor *tensor)
{
    const int64_t most = TE_MOST_ELEMENTS;
    int64_t count = 1, extent = 1;
    for (int32_t i = 0; i < tensor->ndim; i++) {
        const int64_t size = tensor->shape[i] > 1 ? tensor->shape[i] : 1;
        const int64_t stride = tensor->strides[i];
        INVALID_IF(is_more(count, size, most), name,
                   "dim %d: size %lld, which makes more than 2^56 elements", (int)i, LL(size));
        count *= size;
        INVALID_IF(stride < -most || stride > most ||
                       (size > 1 && is_more(size - 1, stride, most - extent)),
                   name, "dim %d: stride %lld, which reaches beyond 2^56 elements", (int)i,
                   LL(stride));
        extent += (size - 1) * stride;
    }
    return TE_OK;
}

/* Number of dims, sizes and strides. */
static te_status check_layout(const te_check_site *site, const te_field *field,
                              const te_tensor *tensor)
{
    const int32_t ndim = tensor->ndim, last = ndim - 1;
    const int32_t limit = field->form == TE_FORM_DIMS     ? TE_MAX_DIMS
                          : field->form == TE_FORM_MATRIX ? 2
                                                          : 1;
    INVALID_IF(ndim > limit || ndim < (field->form == TE_FORM_MATRIX ? 2 : 1), field->name,
               "ndim = %d, expected %s", (int)ndim,
               field->form == TE_FORM_DIMS     ? "1 to 4"
               : field->form == TE_FORM_MATRIX ? "a matrix (2)"
                                               : "a vector (1)");
    for (int32_t i = 0; i < ndim; i++) {
        INVALID_IF(tensor->shape[i] < 0 || (tensor->shape[i] > 1 && tensor->strides[i] < 0),
                   field->name, "dim %d: size %lld and stride %lld, expected none negative", (int)i,
                   LL(tensor->shape[i]), LL(tensor->strides[i]));
    }
    TE_TRY(check_extent(site, field->name, tensor));
    INVALID_IF(tensor->shape[last] > 1 && tensor->strides[last] != 1, field->name,
               "last stride %lld, expected 1: make it contiguous", LL(tensor->strides[last]));
    INVALID_IF(field->form == TE_FORM_MATRIX && tensor->shape[0] > 1 &&
                   tensor->strides[0] < tensor->shape[1],
               field->name, "row stride %lld is less than the %lld columns: rows overlap",
               LL(tensor->strides[0]), LL(tensor->shape[1]));
    if (field->form != TE_FORM_DIMS || field->access == TE_ACCESS_READ) return TE_OK;
    return te_tensor_numel(tensor) == 0 ? TE_OK : check_no_overlap(site, field->name, tensor);
}

te_status te_check_tensor(const te_check_site *site, const te_field *field, const te_tensor *tensor,
                          int required)
{
    if (!te_tensor_present(tensor) && tensor->ndim == 0) {
        return required ? INVALID(field->name, "is missing") : TE_OK;
    }
    TE_TRY(check_layout(site, field, tensor));
    INVALID_IF(!te_tensor_present(tensor) && (required || field->access == TE_ACCESS_READ) &&
                   te_tensor_numel(tensor) > 0,
               field->name, "data is NULL for %lld elements", LL(te_tensor_numel(tensor)));
    INVALID_IF(tensor->device.type != site->device.type ||
                   tensor->device.index != site->device.index,
               field->name, "device (%d, %d) is not the context's (%d, %d): move the tensor",
               (int)tensor->device.type, (int)tensor->device.index, (int)site->device.type,
               (int)site->device.index);
    return check_dtype(site, field, tensor->dtype);
}

te_status te_check_fields(const te_check_site *site, const void *args)
{
    const te_op_info *info = te_op_describe(site->op);
    const uint32_t *flags = NULL;
    uint32_t known = 0;
    for (int32_t i = 0; i < info->field_count; i++) {
        const te_field *field = &info->fields[i];
        const void *member = te_field_member(field, args);
        if (field->kind == TE_FIELD_TENSOR) {
            TE_TRY(te_check_tensor(site, field, member, field->required));
        } else if (field->kind == TE_FIELD_BIT) {
            flags = member;
            known |= (uint32_t)field->count;
        } else if (field->kind <= TE_FIELD_INT64S && field->required &&
                   *(const void *const *)member == NULL) {
            return INVALID(field->name, "is NULL, expected %lld elements", LL(field->count));
        }
    }
    INVALID_IF(flags != NULL && (*flags & ~known) != 0U, "flags", "0x%x, expected bits of 0x%x",
               (unsigned)*flags, (unsigned)known);
    return TE_OK;
}

/* ---- the size of args --------------------------------------------------------------------- */

te_status te_check_size(te_op op, const void *args, te_any_args *buffer, const void **whole)
{
    const te_op_info *info = te_op_describe(op);
    size_t size;
    TE_FAIL_IF(info == NULL, TE_ERROR_INVALID, "operator %d does not exist", (int)op);
    TE_FAIL_IF(args == NULL, TE_ERROR_INVALID, "%s: args is NULL", te_op_name(op));
    *whole = args;
    size = *(const size_t *)args;
    if (size == info->size) return TE_OK;
    for (size_t i = info->size; i < size; i++) {
        if (size < 2 * info->size && ((const char *)args)[i] == 0) continue;
        return TE_FAIL(TE_ERROR_INVALID, "%s: args->size = %zu, expected %zu, or only zeros beyond",
                       te_op_name(op), size, info->size);
    }
    if (size > info->size) return TE_OK;
    for (int32_t i = 0; i < info->field_count; i++) {
        const te_field *field = &info->fields[i];
        TE_FAIL_IF(size < sizeof(size_t) ||
                       (field->offset < size && field->offset + field->size > size),
                   TE_ERROR_INVALID, "%s: args->size = %zu ends within %s, expected %zu",
                   te_op_name(op), size, field->name, info->size);
    }
    te_op_initial(op, buffer);
    memcpy((char *)buffer + sizeof(size_t), (const char *)args + sizeof(size_t),
           size - sizeof(size_t));
    *whole = buffer;
    return TE_OK;
}

te_status te_check_workspace(te_op op, const void *workspace, size_t size, size_t needed)
{
    if (needed == 0 || (workspace != NULL && size >= needed)) return TE_OK;
    return TE_FAIL(TE_ERROR_INVALID, "%s: workspace of %zu bytes, %zu are needed", te_op_name(op),
                   workspace != NULL ? size : 0, needed);
}

/* ---- memory that is written --------------------------------------------------------------- */

/* Bytes [begin, end) that a field certainly occupies: all of a dense tensor, else its first element
 * alone. Empty where nothing is given. */
typedef struct extent {
    uintptr_t begin, end;
} extent;

static extent extent_of(const te_field *field, const void *member)
{
    const te_tensor *tensor = member;
    extent found = {(uintptr_t) * (void *const *)member, 0}; /* data is the first of a tensor */
    int64_t dense = 1;
    found.end = found.begin;
    if (found.begin == 0) return found;
    if (field->kind != TE_FIELD_TENSOR) {
        size_t element = field->kind == TE_FIELD_FLOATS ? sizeof(float) : sizeof(int64_t);
        found.end += (size_t)field->count * element;
        return found;
    }
    for (int32_t i = tensor->ndim - 1; i >= 0 && dense > 0; i--) {
        if (tensor->shape[i] > 1 && tensor->strides[i] != dense) dense = -1;
        dense *= tensor->shape[i];
    }
    if (te_tensor_numel(tensor) > 0) {
        found.end += te_dtype_size(tensor->dtype, dense > 0 ? dense : 1);
    }
    return found;
}

/* Fields that the documentation of an operator lets be one memory: X(ENUM, name, written, read). */
#define IN_PLACE(X)                                                                                \
    X(NORM_BACKWARD, norm_backward, grad_input, grad_residual)                                     \
    X(ACTIVATION_BACKWARD, activation_backward, wide, grad_output)                                 \
    X(SOFTCAP, softcap, wide, input)                                                               \
    X(SOFTCAP, softcap, wide, grad_output)                                                         \
    X(SOFTMAX_BACKWARD, softmax_backward, grad_input, grad_output)                                 \
    X(ATTENTION_MERGE, attention_merge, output, total)                                             \
    X(ATTENTION_MERGE, attention_merge, output, step)                                              \
    X(ATTENTION_MERGE, attention_merge, statistics, total_statistics)                              \
    X(DROPOUT_ADD, dropout_add, output, input)                                                     \
    X(DROPOUT_BACKWARD, dropout_backward, grad_input, grad_output)                                 \
    X(ROPE, rope, output, input)                                                                   \
    X(ROPE, rope, key_output, key)                                                                 \
    X(ROPE, rope, value_output, value)

/* Both forms of a cast may have the same scales. */
#define SCALES_APART (offsetof(te_operand, column_scales) - offsetof(te_operand, row_scales))

static int may_share(te_op op, const te_field *fields, int32_t written, int32_t other)
{
    size_t low = fields[written].offset, high = fields[other].offset;
    if (low > high) {
        low = fields[other].offset;
        high = fields[written].offset;
    }
    if (high - low == SCALES_APART && fields[written].access == TE_ACCESS_WRITE &&
        fields[other].access == TE_ACCESS_WRITE && fields[written].dtypes == TE_DTYPES_SCALES) {
        return 1;
    }
#define X(NAME, name, to, from)                                                                    \
    if (op == TE_OP_##NAME && written == te_at_##name##_##to && other == te_at_##name##_##from) {  \
        return 1;                                                                                  \
    }
    IN_PLACE(X)
#undef X
    return 0;
}

/* Two views of the same elements. */
static int is_same_view(const te_tensor *a, const te_tensor *b)
{
    if (a->data != b->data || a->dtype != b->dtype || a->ndim != b->ndim) return 0;
    for (int32_t i = 0; i < a->ndim; i++) {
        if (a->shape[i] != b->shape[i]) return 0;
        if (a->shape[i] > 1 && a->strides[i] != b->strides[i]) return 0;
    }
    return 1;
}

te_status te_check_memory(te_op op, const void *args)
{
    const te_op_info *info = te_op_describe(op);
    const te_field *fields = info->fields;
    for (int32_t i = 0; i < info->field_count; i++) {
        const void *written = (const char *)args + fields[i].offset;
        extent mine;
        if (fields[i].access == TE_ACCESS_READ || fields[i].kind > TE_FIELD_INT64S) continue;
        mine = extent_of(&fields[i], written);
        if (mine.begin == mine.end) continue;
        for (int32_t j = 0; j < info->field_count; j++) {
            const void *other = (const char *)args + fields[j].offset;
            extent its;
            if (j == i || fields[j].kind > TE_FIELD_INT64S) continue;
            its = extent_of(&fields[j], other);
            if (its.begin >= mine.end || its.end <= mine.begin || its.begin == its.end) continue;
            if (fields[i].kind == TE_FIELD_TENSOR && fields[j].kind == TE_FIELD_TENSOR &&
                may_share(op, fields, i, j) && is_same_view(written, other)) {
                continue;
            }
            return TE_FAIL(TE_ERROR_INVALID,
                           "%s: %s shares memory with %s: give it a buffer of its own",
                           te_op_name(op), fields[i].name, fields[j].name);
        }
    }
    return TE_OK;
}
