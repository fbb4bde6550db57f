/* SPDX-License-Identifier: Apache-2.0
 *
 * fields.h - the one list of each operator's fields.
 *
 * X(op, name, member, required, access, form, dtypes, count, initial): `name` is the keyword in
 * Python, the key of a plug-in's view and, through te_at_<op>_<name>, the position by which a stage
 * of a plan speaks of the field. The kind follows from the type of the member. Required fields come
 * first in a Python signature, in this order. TE_SUMMARY_<op> is the operator in one sentence.
 */
#ifndef TE_CORE_FIELDS_H
#define TE_CORE_FIELDS_H

#include "transformer_engine.h"

/* Rows of the lists. IN, OUT: a tensor that must be there; the others may be left out. */
#define TE_IN(X, op, name, form, dtypes) X(op, name, name, 1, READ, form, dtypes, 0, 0)
#define TE_OPT(X, op, name, form, dtypes) X(op, name, name, 0, READ, form, dtypes, 0, 0)
#define TE_OUT(X, op, name, form, dtypes) X(op, name, name, 1, WRITE, form, dtypes, 0, 0)
#define TE_OPT_OUT(X, op, name, form, dtypes) X(op, name, name, 0, WRITE, form, dtypes, 0, 0)
#define TE_NUMBER(X, op, name, initial) X(op, name, name, 0, READ, NONE, ANY, 0, initial)
#define TE_BIT(X, op, name, bit) X(op, name, flags, 0, READ, NONE, ANY, bit, 0)

/* The forms of an operand that is read; `prefix` is part of the names. */
#define TE_OPERAND(X, op, prefix, member)                                                          \
    X(op, prefix##mode, member.mode, 0, READ, NONE, ANY, 0, 0)                                     \
    X(op, prefix##row, member.row, 0, READ, MATRIX, CODES, 0, 0)                                   \
    X(op, prefix##row_scales, member.row_scales, 0, READ, DIMS, SCALES, 0, 0)                      \
    X(op, prefix##column, member.column, 0, READ, MATRIX, CODES, 0, 0)                             \
    X(op, prefix##column_scales, member.column_scales, 0, READ, DIMS, SCALES, 0, 0)                \
    X(op, prefix##row_amax, member.row_amax, 0, READ, VECTOR, F32, 0, 0)                           \
    X(op, prefix##column_amax, member.column_amax, 0, READ, VECTOR, F32, 0, 0)                     \
    X(op, prefix##scales_to_256, member.scales_to_256, 0, READ, NONE, ANY, 0, 0)

/* What a casting operator is asked for. */
#define TE_CAST_TO_FP8(X, op)                                                                      \
    X(op, mode, cast.result.mode, 0, READ, NONE, ANY, 0, 0)                                        \
    X(op, row, cast.result.row, 0, WRITE, MATRIX, CODES, 0, 0)                                     \
    X(op, row_scales, cast.result.row_scales, 0, WRITE, DIMS, SCALES, 0, 0)                        \
    X(op, column, cast.result.column, 0, WRITE, MATRIX, CODES, 0, 0)                               \
    X(op, column_scales, cast.result.column_scales, 0, WRITE, DIMS, SCALES, 0, 0)                  \
    X(op, scale, cast.scale, 0, READ, NONE, F32, 1, 0)                                             \
    X(op, amax, cast.amax, 0, UPDATE, NONE, F32, 1, 0)                                             \
    X(op, partials, cast.partials, 0, READ, NONE, F32, TE_AMAX_PARTIALS, 0)                        \
    X(op, amax_epsilon, cast.amax_epsilon, 0, READ, NONE, ANY, 0, 0)                               \
    X(op, power_2_scale, cast.power_2_scale, 0, READ, NONE, ANY, 0, 0)
/* What MXFP8 and NVFP4 need besides. */
#define TE_CAST_MICRO(X, op)                                                                       \
    X(op, row_amax, cast.result.row_amax, 0, WRITE, VECTOR, F32, 0, 0)                             \
    X(op, column_amax, cast.result.column_amax, 0, WRITE, VECTOR, F32, 0, 0)                       \
    X(op, column_partials, cast.column_partials, 0, READ, NONE, F32, TE_AMAX_PARTIALS, 0)          \
    X(op, rng, cast.rng, 0, READ, NONE, ANY, 2, 0)                                                 \
    X(op, square, cast.square, 0, READ, NONE, ANY, 0, 0)                                           \
    X(op, hadamard, cast.hadamard, 0, READ, NONE, ANY, 0, 0)                                       \
    X(op, margin, cast.margin, 0, READ, NONE, ANY, 0, 0)                                           \
    X(op, four_over_six, cast.four_over_six, 0, READ, NONE, ANY, 0, 0)                             \
    X(op, scales_to_256, cast.result.scales_to_256, 0, READ, NONE, ANY, 0, 0)                      \
    X(op, row_scaled, cast.row_scaled, 0, READ, NONE, ANY, 0, 0)

#define TE_CAST_ANY(X, op)                                                                         \
    X(op, wide, cast.result.wide, 0, WRITE, MATRIX, NUMBERS, 0, 0)                                 \
    TE_CAST_TO_FP8(X, op)                                                                          \
    X(op, amax_partials, cast.amax_partials, 0, WRITE, NONE, F32, TE_AMAX_PARTIALS, 0)             \
    TE_CAST_MICRO(X, op)

#define TE_ACTIVATION_PARAMS(X, op)                                                                \
    X(op, limit, params.limit, 0, READ, NONE, ANY, 0, 7.0)                                         \
    X(op, alpha, params.alpha, 0, READ, NONE, ANY, 0, 1.702)                                       \
    X(op, linear_offset, params.linear_offset, 0, READ, NONE, ANY, 0, 1.0)
#define TE_KIND(X, op) X(op, kind, kind, 1, READ, NONE, ANY, 0, 0)
#define TE_RNG(X, op) X(op, rng, rng, 0, READ, NONE, ANY, 2, 0)
#define TE_DROPS(X, op)                                                                            \
    TE_RNG(X, op)                                                                                  \
    TE_NUMBER(X, op, dropout, 0) TE_NUMBER(X, op, drop_path, 0) TE_NUMBER(X, op, samples, 1)

#define TE_SUMMARY_quantize                                                                        \
    "Cast a matrix to FP8, row-wise and (or) transposed; its amax and column sums."
#define TE_FIELDS_quantize(X)                                                                      \
    TE_IN(X, quantize, input, MATRIX, NUMBERS)                                                     \
    TE_CAST_TO_FP8(X, quantize)                                                                    \
    TE_CAST_MICRO(X, quantize)                                                                     \
    TE_OPT_OUT(X, quantize, bias_grad, VECTOR, NUMBERS)                                            \
    X(quantize, noop, noop, 0, READ, NONE, F32, 1, 0)

#define TE_SUMMARY_dequantize                                                                      \
    "output = data / scale, from `row`, or from `column` where that is None."
#define TE_FIELDS_dequantize(X)                                                                    \
    TE_OUT(X, dequantize, output, MATRIX, NUMBERS)                                                 \
    TE_OPERAND(X, dequantize, , input)

#define TE_SUMMARY_amax "Write AMAX_PARTIALS partial maxima of |input|."
#define TE_FIELDS_amax(X)                                                                          \
    TE_IN(X, amax, input, MATRIX, NUMBERS)                                                         \
    X(amax, partials, partials, 1, WRITE, NONE, F32, TE_AMAX_PARTIALS, 0)                          \
    TE_NUMBER(X, amax, hadamard, 0)

#define TE_SUMMARY_transpose "Transpose one-byte elements."
#define TE_FIELDS_transpose(X)                                                                     \
    TE_IN(X, transpose, input, MATRIX, ANY)                                                        \
    TE_OUT(X, transpose, output, MATRIX, ANY)

#define TE_SUMMARY_gemm                                                                            \
    "d = epilogue(a b + bias), in FP8 from `a_row`, `b_row`, ... or in high precision."
#define TE_FIELDS_gemm(X)                                                                          \
    TE_OUT(X, gemm, d, MATRIX, ANY)                                                                \
    X(gemm, a, a.wide, 0, READ, MATRIX, NUMBERS, 0, 0)                                             \
    TE_OPERAND(X, gemm, a_, a)                                                                     \
    X(gemm, b, b.wide, 0, READ, MATRIX, NUMBERS, 0, 0)                                             \
    TE_OPERAND(X, gemm, b_, b)                                                                     \
    TE_NUMBER(X, gemm, a_transposed, 0)                                                            \
    TE_NUMBER(X, gemm, b_transposed, 0)                                                            \
    TE_OPT(X, gemm, bias, VECTOR, NUMBERS)                                                         \
    TE_OPT_OUT(X, gemm, bias_grad, VECTOR, NUMBERS)                                                \
    TE_OPT_OUT(X, gemm, aux, MATRIX, NUMBERS)                                                      \
    X(gemm, d_scale, d_scale, 0, READ, NONE, F32, 1, 0)                                            \
    X(gemm, d_amax, d_amax, 0, UPDATE, NONE, F32, 1, 0)                                            \
    TE_NUMBER(X, gemm, epilogue, 0)                                                                \
    TE_BIT(X, gemm, accumulate, TE_GEMM_ACCUMULATE)                                                \
    TE_BIT(X, gemm, fast_accumulation, TE_GEMM_FAST_ACCUMULATION)                                  \
    TE_BIT(X, gemm, allow_tf32, TE_GEMM_ALLOW_TF32)                                                \
    TE_BIT(X, gemm, multiplied_out, TE_GEMM_MULTIPLIED_OUT)

#define TE_SUMMARY_scaling_update "Update a chunk of delayed-scaling slots in place."
#define TE_FIELDS_scaling_update(X)                                                                \
    X(scaling_update, scale, scale, 1, UPDATE, VECTOR, F32, 0, 0)                                  \
    X(scaling_update, history, history, 1, UPDATE, MATRIX, F32, 0, 0)                              \
    X(scaling_update, fp8_max, fp8_max, 1, READ, NONE, ANY, 0, 0)                                  \
    TE_NUMBER(X, scaling_update, algo, TE_AMAX_MAX)

#define TE_SUMMARY_fill "Set every element."
#define TE_FIELDS_fill(X)                                                                          \
    TE_OUT(X, fill, output, MATRIX, ANY)                                                           \
    X(fill, value, value, 1, READ, NONE, ANY, 0, 0)

#define TE_SUMMARY_cast "Convert and copy between strided matrices."
#define TE_FIELDS_cast(X) TE_IN(X, cast, input, MATRIX, ANY) TE_OUT(X, cast, output, MATRIX, ANY)

#define TE_SUMMARY_norm "Normalize rows, times gamma plus beta; to high precision and (or) FP8."
#define TE_FIELDS_norm(X)                                                                          \
    TE_IN(X, norm, input, DIMS, NUMBERS)                                                           \
    TE_KIND(X, norm)                                                                               \
    TE_OPT(X, norm, gamma, VECTOR, NUMBERS)                                                        \
    TE_OPT(X, norm, beta, VECTOR, NUMBERS)                                                         \
    X(norm, mean, mean, 0, UPDATE, VECTOR, F32, 0, 0)                                              \
    X(norm, rsigma, rsigma, 0, UPDATE, VECTOR, F32, 0, 0)                                          \
    TE_CAST_ANY(X, norm)                                                                           \
    TE_NUMBER(X, norm, eps, 1e-5)                                                                  \
    TE_BIT(X, norm, zero_centered, TE_NORM_ZERO_CENTERED)                                          \
    TE_BIT(X, norm, statistics_given, TE_NORM_STATISTICS_GIVEN)

#define TE_SUMMARY_norm_backward "Gradients of norm."
#define TE_FIELDS_norm_backward(X)                                                                 \
    TE_IN(X, norm_backward, grad_output, MATRIX, NUMBERS)                                          \
    TE_IN(X, norm_backward, input, DIMS, NUMBERS)                                                  \
    TE_KIND(X, norm_backward)                                                                      \
    TE_IN(X, norm_backward, rsigma, VECTOR, F32)                                                   \
    TE_OPT(X, norm_backward, mean, VECTOR, F32)                                                    \
    TE_OPT(X, norm_backward, gamma, VECTOR, NUMBERS)                                               \
    TE_OPT(X, norm_backward, grad_add, MATRIX, NUMBERS)                                            \
    TE_OPT(X, norm_backward, grad_residual, MATRIX, NUMBERS)                                       \
    TE_OPT_OUT(X, norm_backward, grad_input, DIMS, NUMBERS)                                        \
    TE_OPT_OUT(X, norm_backward, gamma_grad, VECTOR, NUMBERS)                                      \
    TE_OPT_OUT(X, norm_backward, beta_grad, VECTOR, NUMBERS)                                       \
    TE_BIT(X, norm_backward, zero_centered, TE_NORM_ZERO_CENTERED)

#define TE_SUMMARY_activation                                                                      \
    "Activate rows (gated: two halves to one); to high precision and (or) FP8."
#define TE_FIELDS_activation(X)                                                                    \
    TE_IN(X, activation, input, MATRIX, NUMBERS)                                                   \
    TE_KIND(X, activation)                                                                         \
    TE_CAST_ANY(X, activation)                                                                     \
    TE_ACTIVATION_PARAMS(X, activation)

#define TE_SUMMARY_activation_backward                                                             \
    "Gradient of activation, to high precision and (or) FP8, and its column sums."
#define TE_FIELDS_activation_backward(X)                                                           \
    TE_IN(X, activation_backward, grad_output, MATRIX, NUMBERS)                                    \
    TE_IN(X, activation_backward, input, MATRIX, NUMBERS)                                          \
    TE_KIND(X, activation_backward)                                                                \
    TE_CAST_ANY(X, activation_backward)                                                            \
    TE_OPT_OUT(X, activation_backward, bias_grad, VECTOR, NUMBERS)                                 \
    TE_ACTIVATION_PARAMS(X, activation_backward)

#define TE_SUMMARY_softcap                                                                         \
    "cap tanh(input / cap), or its gradient from grad_output; to high precision and (or) FP8."
#define TE_FIELDS_softcap(X)                                                                       \
    TE_IN(X, softcap, input, MATRIX, NUMBERS)                                                      \
    X(softcap, cap, cap, 1, READ, NONE, ANY, 0, 0)                                                 \
    TE_OPT(X, softcap, grad_output, MATRIX, NUMBERS)                                               \
    TE_CAST_ANY(X, softcap)

#define TE_SUMMARY_softmax                                                                         \
    "Softmax of scale * input + bias over the keys that a query may attend, with dropout."
#define TE_FIELDS_softmax(X)                                                                       \
    TE_IN(X, softmax, input, DIMS, NUMBERS)                                                        \
    TE_OUT(X, softmax, output, DIMS, NUMBERS)                                                      \
    TE_OPT(X, softmax, mask, DIMS, MASK)                                                           \
    TE_OPT(X, softmax, bias, DIMS, NUMBERS)                                                        \
    TE_OPT(X, softmax, sink, VECTOR, F32)                                                          \
    TE_OPT_OUT(X, softmax, probabilities, DIMS, NUMBERS)                                           \
    TE_OPT_OUT(X, softmax, log_sum, VECTOR, F32)                                                   \
    TE_RNG(X, softmax)                                                                             \
    TE_NUMBER(X, softmax, scale, 1)                                                                \
    TE_NUMBER(X, softmax, dropout, 0)                                                              \
    TE_NUMBER(X, softmax, window_left, -1)                                                         \
    TE_NUMBER(X, softmax, window_right, -1)                                                        \
    TE_NUMBER(X, softmax, diagonal, 0)

#define TE_SUMMARY_softmax_backward "Gradient of softmax."
#define TE_FIELDS_softmax_backward(X)                                                              \
    TE_IN(X, softmax_backward, grad_output, DIMS, NUMBERS)                                         \
    TE_IN(X, softmax_backward, probabilities, DIMS, NUMBERS)                                       \
    TE_OUT(X, softmax_backward, grad_input, DIMS, NUMBERS)                                         \
    TE_OPT(X, softmax_backward, sink, VECTOR, F32)                                                 \
    TE_OPT(X, softmax_backward, log_sum, VECTOR, F32)                                              \
    TE_OPT_OUT(X, softmax_backward, grad_sinks, VECTOR, F32)                                       \
    TE_RNG(X, softmax_backward)                                                                    \
    TE_NUMBER(X, softmax_backward, scale, 1)                                                       \
    TE_NUMBER(X, softmax_backward, dropout, 0)

/* What attention and its gradient read. */
#define TE_ATTENDED(X, op, name) X(op, name, problem.name, 1, READ, DIMS, FLOATS, 0, 0)
#define TE_AMAX_OF(X, op, name) X(op, name, name, 0, UPDATE, NONE, F32, 1, 0)
#define TE_SCALE_OF(X, op, name) X(op, name, name, 0, READ, NONE, F32, 1, 0)
#define TE_PROBLEM(X, op)                                                                          \
    X(op, mask, problem.mask, 0, READ, DIMS, MASK, 0, 0)                                           \
    X(op, bias, problem.bias, 0, READ, DIMS, NUMBERS, 0, 0)                                        \
    X(op, sink, problem.sink, 0, READ, VECTOR, F32, 0, 0)                                          \
    X(op, slopes, problem.slopes, 0, READ, DIMS, F32, 0, 0)                                        \
    X(op, query_lengths, problem.query_lengths, 0, READ, VECTOR, I32, 0, 0)                        \
    X(op, key_lengths, problem.key_lengths, 0, READ, VECTOR, I32, 0, 0)                            \
    X(op, query_offsets, problem.query_offsets, 0, READ, VECTOR, I32, 0, 0)                        \
    X(op, key_offsets, problem.key_offsets, 0, READ, VECTOR, I32, 0, 0)                            \
    X(op, rng, problem.rng, 0, READ, NONE, ANY, 2, 0)                                              \
    X(op, scale, problem.scale, 0, READ, NONE, ANY, 0, 1)                                          \
    X(op, dropout, problem.dropout, 0, READ, NONE, ANY, 0, 0)                                      \
    X(op, window_left, problem.window_left, 0, READ, NONE, ANY, 0, -1)                             \
    X(op, window_right, problem.window_right, 0, READ, NONE, ANY, 0, -1)                           \
    X(op, diagonal, problem.diagonal, 0, READ, NONE, ANY, 0, 0)                                    \
    X(op, bottom_right, problem.bottom_right, 0, READ, NONE, ANY, 0, 0)                            \
    X(op, max_queries, problem.max_queries, 0, READ, NONE, ANY, 0, 0)                              \
    X(op, max_keys, problem.max_keys, 0, READ, NONE, ANY, 0, 0)                                    \
    X(op, query_scales, problem.query_scales, 0, READ, VECTOR, F32, 0, 0)                          \
    X(op, key_scales, problem.key_scales, 0, READ, VECTOR, F32, 0, 0)                              \
    X(op, value_scales, problem.value_scales, 0, READ, VECTOR, F32, 0, 0)

#define TE_SUMMARY_attention                                                                       \
    "dropout(softmax(softcap(scale * query key) + bias)) value, without a matrix of scores."
#define TE_FIELDS_attention(X)                                                                     \
    TE_ATTENDED(X, attention, query)                                                               \
    TE_ATTENDED(X, attention, key)                                                                 \
    TE_ATTENDED(X, attention, value)                                                               \
    TE_OUT(X, attention, output, DIMS, FLOATS)                                                     \
    TE_OPT_OUT(X, attention, statistics, DIMS, F32)                                                \
    TE_OPT_OUT(X, attention, top, VECTOR, F32)                                                     \
    TE_PROBLEM(X, attention)                                                                       \
    TE_OPT_OUT(X, attention, output_scales, VECTOR, F32)                                           \
    TE_SCALE_OF(X, attention, output_scale)                                                        \
    TE_AMAX_OF(X, attention, output_amax)                                                          \
    TE_AMAX_OF(X, attention, weights_amax)                                                         \
    TE_NUMBER(X, attention, softcap, 0)

#define TE_SUMMARY_attention_backward "Gradients of attention."
#define TE_FIELDS_attention_backward(X)                                                            \
    TE_IN(X, attention_backward, grad_output, DIMS, FLOATS)                                        \
    TE_ATTENDED(X, attention_backward, query)                                                      \
    TE_ATTENDED(X, attention_backward, key)                                                        \
    TE_ATTENDED(X, attention_backward, value)                                                      \
    TE_IN(X, attention_backward, output, DIMS, FLOATS)                                             \
    TE_IN(X, attention_backward, statistics, DIMS, F32)                                            \
    TE_OPT_OUT(X, attention_backward, grad_query, DIMS, FLOATS)                                    \
    TE_OPT_OUT(X, attention_backward, grad_key, DIMS, FLOATS)                                      \
    TE_OPT_OUT(X, attention_backward, grad_value, DIMS, FLOATS)                                    \
    TE_OPT_OUT(X, attention_backward, grad_bias, DIMS, NUMBERS)                                    \
    TE_OPT_OUT(X, attention_backward, grad_sink, VECTOR, F32)                                      \
    TE_PROBLEM(X, attention_backward)                                                              \
    TE_NUMBER(X, attention_backward, deterministic, 0)                                             \
    TE_OPT(X, attention_backward, output_scales, VECTOR, F32)                                      \
    TE_OPT(X, attention_backward, grad_output_scales, VECTOR, F32)                                 \
    TE_OPT_OUT(X, attention_backward, grads_scales, VECTOR, F32)                                   \
    TE_SCALE_OF(X, attention_backward, grad_scores_scale)                                          \
    TE_SCALE_OF(X, attention_backward, grads_scale)                                                \
    TE_AMAX_OF(X, attention_backward, grad_scores_amax)                                            \
    TE_AMAX_OF(X, attention_backward, grads_amax)                                                  \
    TE_NUMBER(X, attention_backward, softcap, 0)

#define TE_SUMMARY_attention_merge                                                                 \
    "Join outputs and statistics of two attentions to different keys, or add up gradients."
#define TE_FIELDS_attention_merge(X)                                                               \
    TE_IN(X, attention_merge, total, DIMS, NUMBERS)                                                \
    TE_IN(X, attention_merge, step, DIMS, NUMBERS)                                                 \
    TE_OUT(X, attention_merge, output, DIMS, NUMBERS)                                              \
    TE_OPT(X, attention_merge, total_statistics, DIMS, F32)                                        \
    TE_OPT(X, attention_merge, step_statistics, DIMS, F32)                                         \
    TE_OPT_OUT(X, attention_merge, statistics, DIMS, F32)

#define TE_SUMMARY_dropout_add "output = residual + drop_path(dropout(input + bias))."
#define TE_FIELDS_dropout_add(X)                                                                   \
    TE_IN(X, dropout_add, input, MATRIX, NUMBERS)                                                  \
    TE_OUT(X, dropout_add, output, MATRIX, NUMBERS)                                                \
    TE_OPT(X, dropout_add, bias, VECTOR, NUMBERS)                                                  \
    TE_OPT(X, dropout_add, residual, MATRIX, NUMBERS)                                              \
    TE_DROPS(X, dropout_add)

#define TE_SUMMARY_dropout_backward "Gradients of dropout_add with respect to input and bias."
#define TE_FIELDS_dropout_backward(X)                                                              \
    TE_IN(X, dropout_backward, grad_output, MATRIX, NUMBERS)                                       \
    TE_OPT_OUT(X, dropout_backward, grad_input, MATRIX, NUMBERS)                                   \
    TE_OPT_OUT(X, dropout_backward, bias_grad, VECTOR, NUMBERS)                                    \
    TE_DROPS(X, dropout_backward)

#define TE_SUMMARY_rope "Rotary position embedding, or its transposed map, of up to three tensors."
#define TE_ROPE_PART(X, name, i)                                                                   \
    X(rope, name, parts[i].input, 0, READ, DIMS, NUMBERS, 0, 0)                                    \
    X(rope, name##_output, parts[i].output, 0, WRITE, DIMS, NUMBERS, 0, 0)                         \
    X(rope, name##_freqs, parts[i].freqs, 0, READ, MATRIX, F32, 0, 0)
#define TE_FIELDS_rope(X)                                                                          \
    X(rope, input, parts[0].input, 1, READ, DIMS, NUMBERS, 0, 0)                                   \
    X(rope, output, parts[0].output, 1, WRITE, DIMS, NUMBERS, 0, 0)                                \
    X(rope, freqs, parts[0].freqs, 0, READ, MATRIX, F32, 0, 0)                                     \
    TE_ROPE_PART(X, key, 1)                                                                        \
    TE_ROPE_PART(X, value, 2)                                                                      \
    TE_OPT(X, rope, cu_seqlens, VECTOR, I32)                                                       \
    TE_OPT(X, rope, start_positions, VECTOR, I32)                                                  \
    TE_NUMBER(X, rope, channels, 0)                                                                \
    TE_NUMBER(X, rope, cp_size, 1)                                                                 \
    TE_NUMBER(X, rope, cp_rank, 0)                                                                 \
    TE_NUMBER(X, rope, interleaved, 0)                                                             \
    TE_NUMBER(X, rope, backward, 0)

#define TE_CACHE(X, op, access)                                                                    \
    X(op, key_cache, cache.key, 1, access, DIMS, NUMBERS, 0, 0)                                    \
    X(op, value_cache, cache.value, 1, access, DIMS, NUMBERS, 0, 0)

#define TE_SUMMARY_cache_append "Put keys and values of new tokens into a cache, paged or not."
#define TE_FIELDS_cache_append(X)                                                                  \
    TE_IN(X, cache_append, key, DIMS, NUMBERS)                                                     \
    TE_IN(X, cache_append, value, DIMS, NUMBERS)                                                   \
    TE_CACHE(X, cache_append, UPDATE)                                                              \
    TE_IN(X, cache_append, starts, VECTOR, I32)                                                    \
    TE_OPT(X, cache_append, counts, VECTOR, I32)                                                   \
    TE_OPT(X, cache_append, cu_seqlens, VECTOR, I32)                                               \
    X(cache_append, page_table, cache.page_table, 0, READ, MATRIX, I32, 0, 0)

#define TE_SUMMARY_cache_gather "The keys and values in a cache, each sequence's in a row."
#define TE_FIELDS_cache_gather(X)                                                                  \
    TE_CACHE(X, cache_gather, READ)                                                                \
    TE_IN(X, cache_gather, lengths, VECTOR, I32)                                                   \
    TE_OUT(X, cache_gather, key, DIMS, NUMBERS)                                                    \
    TE_OUT(X, cache_gather, value, DIMS, NUMBERS)                                                  \
    X(cache_gather, page_table, cache.page_table, 0, READ, MATRIX, I32, 0, 0)

/* All fields of an operator: the last one is its workspace. */
#define TE_ALL_FIELDS(X, op)                                                                       \
    TE_FIELDS_##op(X) X(op, workspace, workspace, 0, WRITE, NONE, ANY, 0, 0)

/* Positions in the lists: te_at_norm_gamma, ... */
#define X_AT(op, name, ...) te_at_##op##_##name,
#define X(NAME, op) enum { TE_ALL_FIELDS(X_AT, op) te_field_count_##op };
TE_OPS(X)
#undef X

#endif
