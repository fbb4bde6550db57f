/* SPDX-License-Identifier: Apache-2.0 */
#include "core/tensor.h"

typedef struct dtype_facts {
    const char *name;
    int32_t bits;
    float max;
} dtype_facts;

static const dtype_facts facts[TE_DTYPE_COUNT] = {
#define X(NAME, name, bits, dlpack, cuda, max) [TE_DTYPE_##NAME] = {#name, bits, max},
    TE_DTYPES(X)
#undef X
};

static int valid(te_dtype dtype)
{
    return (int)dtype >= 0 && dtype < TE_DTYPE_COUNT;
}

const char *te_dtype_name(te_dtype dtype)
{
    return valid(dtype) ? facts[dtype].name : "invalid";
}

int32_t te_dtype_bits(te_dtype dtype)
{
    return valid(dtype) ? facts[dtype].bits : 0;
}

size_t te_dtype_bytes(te_dtype dtype)
{
    return (size_t)te_dtype_bits(dtype) / 8;
}

size_t te_dtype_size(te_dtype dtype, int64_t elements)
{
    return ((size_t)elements * (size_t)te_dtype_bits(dtype) + 7) / 8;
}

float te_dtype_max(te_dtype dtype)
{
    return valid(dtype) ? facts[dtype].max : 0.0F;
}

int te_dtype_is_fp8(te_dtype dtype)
{
    return dtype == TE_DTYPE_E4M3 || dtype == TE_DTYPE_E5M2;
}

int te_dtype_is_high_precision(te_dtype dtype)
{
    return dtype == TE_DTYPE_F32 || dtype == TE_DTYPE_F16 || dtype == TE_DTYPE_BF16;
}

te_tensor te_matrix(void *data, te_dtype dtype, te_device device, int64_t rows, int64_t columns)
{
    return (te_tensor){.data = data,
                       .dtype = dtype,
                       .device = device,
                       .ndim = 2,
                       .shape = {rows, columns},
                       .strides = {columns, 1}};
}

te_tensor te_vector(void *data, te_dtype dtype, te_device device, int64_t length)
{
    return (te_tensor){.data = data,
                       .dtype = dtype,
                       .device = device,
                       .ndim = 1,
                       .shape = {length},
                       .strides = {1}};
}

te_dtype te_operand_dtype(const te_operand *operand)
{
    if (operand->mode == TE_SCALING_NONE) return TE_DTYPE_F32;
    if (te_tensor_present(&operand->row)) return operand->row.dtype;
    if (te_tensor_present(&operand->column)) return operand->column.dtype;
    return te_dtype_is_fp8(operand->row.dtype) ? operand->row.dtype : operand->column.dtype;
}

int64_t te_tensor_numel(const te_tensor *tensor)
{
    int64_t count = 1;
    for (int32_t i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] == 0) return 0;
    }
    for (int32_t i = 0; i < tensor->ndim; i++) {
        if (__builtin_mul_overflow(count, tensor->shape[i], &count)) return INT64_MAX;
    }
    return count;
}

te_tensor te_tensor_rows(const te_tensor *tensor)
{
    const int32_t last = tensor->ndim - 1;
    te_tensor rows = *tensor;
    int64_t count = 1, stride;
    if (last < 0) return rows;
    stride = tensor->shape[last];
    for (int32_t i = last - 1; i >= 0; i--) {
        if (tensor->shape[i] != 1 && stride != TE_NO_STRIDE) {
            if (count == 1) {
                stride = tensor->strides[i];
            } else if (tensor->strides[i] != stride * count) {
                stride = TE_NO_STRIDE;
            }
        }
        count *= tensor->shape[i];
    }
    rows.ndim = 2;
    rows.shape[0] = count;
    rows.shape[1] = tensor->shape[last];
    rows.strides[0] = count > 1 ? stride : rows.shape[1];
    rows.strides[1] = 1;
    return rows;
}

const char *te_op_name(te_op op)
{
    static const char *const names[TE_OP_COUNT] = {
#define X(NAME, name) #name,
        TE_OPS(X)
#undef X
    };
    return (unsigned)op < TE_OP_COUNT ? names[op] : "invalid";
}

const char *te_activation_name(te_activation_kind kind)
{
    static const char *const names[TE_ACTIVATION_COUNT] = {
#define X(NAME, name, gated) #name,
        TE_ACTIVATIONS(X)
#undef X
    };
    return (unsigned)kind < TE_ACTIVATION_COUNT ? names[kind] : "invalid";
}

int te_activation_is_gated(te_activation_kind kind)
{
    static const int is_gated[TE_ACTIVATION_COUNT] = {
#define X(NAME, name, gated) gated,
        TE_ACTIVATIONS(X)
#undef X
    };
    return (unsigned)kind < TE_ACTIVATION_COUNT && is_gated[kind];
}
