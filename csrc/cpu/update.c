/* SPDX-License-Identifier: Apache-2.0
 *
 * update.c - one pass over lists of tensors: Adam, gradient descent, and products with a number.
 */
#include <string.h>

#include "core/fp8.h"
#include "core/status.h"
#include "core/update.h"
#include "cpu/isa.h"
#include "cpu/matrix.h"
#include "cpu/ops.h"

enum { PIECE = 512 }; /* elements at a time, so that the fp32 between stays in the cache */

typedef struct piece {
    int64_t begin, count;
    float number[TE_UPDATE_LIST_COUNT][PIECE]; /* of each list, in fp32 */
    uint16_t high[PIECE], low[PIECE];          /* of values with remainders */
} piece;

/* The elements of a list that a piece begins with. */
static unsigned char *elements_of(const te_update_args *args, int list, int64_t i, int64_t begin)
{
    const te_tensor *tensor = &args->lists[list][i];
    return (unsigned char *)tensor->data + begin * (int64_t)te_dtype_bytes(tensor->dtype);
}

static void load(const te_update_args *args, int list, int64_t i, piece *at)
{
    if (args->lists[list] == NULL) return;
    te_cpu_kernels_get()->to_f32[args->lists[list][i].dtype](elements_of(args, list, i, at->begin),
                                                             at->number[list], at->count);
}

static void store(const te_update_args *args, int list, const float *numbers, int64_t i,
                  const piece *at)
{
    if (args->lists[list] == NULL) return;
    te_cpu_kernels_get()->from_f32[args->lists[list][i].dtype](
        numbers, elements_of(args, list, i, at->begin), at->count);
}

static void load_value(const te_update_args *args, int64_t i, piece *at)
{
    const size_t bytes = (size_t)at->count * sizeof(uint16_t);
    if (args->lists[TE_UPDATE_REMAINDER] == NULL) {
        load(args, TE_UPDATE_VALUE, i, at);
        return;
    }
    memcpy(at->high, elements_of(args, TE_UPDATE_VALUE, i, at->begin), bytes);
    memcpy(at->low, elements_of(args, TE_UPDATE_REMAINDER, i, at->begin), bytes);
    for (int64_t j = 0; j < at->count; j++) {
        at->number[TE_UPDATE_VALUE][j] = te_update_join(at->high[j], at->low[j]);
    }
}

static void store_value(const te_update_args *args, int64_t i, piece *at)
{
    const size_t bytes = (size_t)at->count * sizeof(uint16_t);
    const float *values = at->number[TE_UPDATE_VALUE];
    store(args, TE_UPDATE_ROUNDED, values, i, at);
    if (args->lists[TE_UPDATE_REMAINDER] == NULL) {
        store(args, TE_UPDATE_VALUE, values, i, at);
        return;
    }
    for (int64_t j = 0; j < at->count; j++) {
        at->high[j] = (uint16_t)te_update_high(values[j]);
        at->low[j] = (uint16_t)te_float_bits(values[j]);
    }
    memcpy(elements_of(args, TE_UPDATE_VALUE, i, at->begin), at->high, bytes);
    memcpy(elements_of(args, TE_UPDATE_REMAINDER, i, at->begin), at->low, bytes);
}

/* Whether an element of a gradient is Inf or NaN, where that is asked. */
static int update_piece(const te_update_args *args, const te_update_numbers *numbers, int64_t i,
                        piece *at)
{
    float *grad = at->number[TE_UPDATE_GRAD], *value = at->number[TE_UPDATE_VALUE];
    float *mean = at->number[TE_UPDATE_MEAN], *square = at->number[TE_UPDATE_SQUARE];
    int infinite = 0;
    load(args, TE_UPDATE_GRAD, i, at);
    for (int64_t j = 0; j < at->count; j++) {
        infinite |= !te_is_finite(grad[j]);
        grad[j] *= numbers->grad_scale;
    }
    if (args->kind == TE_UPDATE_SCALE) {
        store(args, TE_UPDATE_VALUE, grad, i, at);
        return infinite;
    }
    if (args->kind == TE_UPDATE_RESCALE) {
        for (int64_t j = 0; j < at->count; j++) {
            value[j] = te_update_rescale(numbers, grad[j], &mean[j]);
        }
        store(args, TE_UPDATE_VALUE, value, i, at);
        store(args, TE_UPDATE_MEAN, mean, i, at);
        return 0;
    }
    load_value(args, i, at);
    load(args, TE_UPDATE_MEAN, i, at);
    load(args, TE_UPDATE_SQUARE, i, at);
    for (int64_t j = 0; j < at->count; j++) {
        value[j] = args->kind == TE_UPDATE_ADAM
                       ? te_update_adam(numbers, grad[j], value[j], &mean[j], &square[j])
                       : te_update_sgd(numbers, grad[j], value[j], &mean[j]);
    }
    store_value(args, i, at);
    if (args->kind == TE_UPDATE_ADAM || numbers->momentum != 0.0F) {
        store(args, TE_UPDATE_MEAN, mean, i, at);
    }
    store(args, TE_UPDATE_SQUARE, square, i, at);
    if (te_update_writes_grad(numbers)) store(args, TE_UPDATE_GRAD, grad, i, at);
    return 0;
}

te_status te_cpu_update(te_context *context, const te_update_args *args, void *stream)
{
    te_update_numbers numbers = te_update_numbers_of(args);
    int infinite = 0;
    (void)context, (void)stream;
    if (args->kind != TE_UPDATE_SCALE && args->flag != NULL && *args->flag != 0) return TE_OK;
    if (args->lr_at != NULL) numbers.lr = *args->lr_at;
    if (args->grad_scale_at != NULL) numbers.grad_scale = *args->grad_scale_at;
    if (args->step_at != NULL && (numbers.flags & TE_STEP_CORRECTED) != 0) {
        numbers.correction1 = te_update_correction(args->beta1, *args->step_at);
        numbers.correction2 = te_update_correction(args->beta2, *args->step_at);
    }
    for (int64_t i = 0; i < args->count; i++) {
        const int64_t count = te_tensor_numel(&args->lists[TE_UPDATE_GRAD][i]);
        const int64_t pieces = te_ceil_div(count, PIECE);
#pragma omp parallel for num_threads(te_cpu_threads(count, 1)) reduction(| : infinite)
        for (int64_t k = 0; k < pieces; k++) {
            piece at;
            at.begin = k * PIECE;
            at.count = te_cpu_min(PIECE, count - at.begin);
            infinite |= update_piece(args, &numbers, i, &at);
        }
        if (args->casts != NULL) TE_TRY(te_cpu_quantize(&args->casts[i]));
    }
    if (infinite && args->flag != NULL) *args->flag = 1;
    return TE_OK;
}
