/* SPDX-License-Identifier: Apache-2.0
 *
 * isa_table.h - TABLE, the inner loops compiled for one instruction set. Included once, at the end,
 * by each isa_*.c, which has a gemm_tile of ROWS x COLUMNS.
 */
#include "cpu/rows.h"
#include "cpu/rows_activation.h"
#include "cpu/rows_layer.h"

#define TO_F32(NAME, name, storage, load, store) [TE_DTYPE_##NAME] = to_f32_##name,
#define FROM_F32(NAME, name, storage, load, store) [TE_DTYPE_##NAME] = from_f32_##name,
#define NORM(NAME, name, storage, load, store) [TE_DTYPE_##NAME] = norm_##name,
#define QUANTIZE(NAME, name, storage, load, store)                                                 \
    [TE_DTYPE_##NAME] = {{amax_##name, amax_sum_##name},                                           \
                         {e4m3_##name, e4m3_sum_##name},                                           \
                         {e5m2_##name, e5m2_sum_##name}},
#define PLAIN(NAME, name) [TE_ACTIVATION_##NAME] = {plain_##name, plain_##name##_gradient, NULL},
#define GATED(NAME, name)                                                                          \
    [TE_ACTIVATION_##NAME] = {gated_##name, gated_##name##_gradient, gated_##name##_gate},

const te_cpu_kernels TABLE = {
    .quantize = {TE_CPU_INPUT_TYPES(QUANTIZE)},
    .to_f32 = {TE_CPU_FLOAT_TYPES(TO_F32)},
    .from_f32 = {TE_CPU_FLOAT_TYPES(FROM_F32)},
    .multiply = multiply,
    .add = add,
    .add_squares = add_squares,
    .gelu = gelu,
    .largest = largest,
    .exponentials = exponentials,
    .normalize = normalize,
    .forbid = forbid,
    .dot = dot,
    .cap = soft_cap,
    .follow = follow,
    .softmax_backward = softmax_backward,
    .attention_backward = attention_backward,
    .decide = decide,
    .keep = keep_some,
    .rotate = {rotate_halves, rotate_pairs},
    .row_sum = row_sum,
    .row_moments = row_moments,
    .norm = {TE_CPU_INPUT_TYPES(NORM)},
    .norm_gradient_sums = norm_gradient_sums,
    .norm_gradient = norm_gradient,
    .activation = {TE_CPU_PLAIN_ACTIVATIONS(PLAIN) TE_CPU_GATED_ACTIVATIONS(
                       GATED)[TE_ACTIVATION_CLAMPED_SWIGLU] = {clamped, clamped_gradient,
                                                               clamped_gate_gradient}},
    .gemm_tile = gemm_tile,
    .tile_rows = ROWS,
    .tile_columns = COLUMNS};
