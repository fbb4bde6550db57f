/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_twins.h - cases of ops_gpu.c for the operators of attention, whose tensors have four
 * dims: softmax, rotary embeddings, caches of keys and values, merges. As in layer_twins.h, results
 * are close and not the same.
 */
#ifndef TE_TESTS_ATTENTION_TWINS_H
#define TE_TESTS_ATTENTION_TWINS_H

#include "layer_twins.h"

/* ---- four dims ---- */

typedef struct dims {
    int64_t size[4];
} dims;

/* A tensor of its own: unit last stride, the others in either order of the middle dims, with gaps.
 */
static te_tensor new_dims(te_dtype dtype, dims shape, buffer_kind kind)
{
    const int swapped = pick(2) == 0;
    const int inner = swapped ? 1 : 2, outer = swapped ? 2 : 1;
    te_tensor tensor;
    int64_t row = shape.size[3] + (pick(3) == 0 ? pick(9) : 0);
    int64_t rows = shape.size[0] * shape.size[1] * shape.size[2];
    tensor = new_matrix(dtype, rows, shape.size[3],
                        (layout){row - shape.size[3], pick(4) == 0 ? pick(9) : 0}, kind);
    tensor.ndim = 4;
    memcpy(tensor.shape, shape.size, sizeof shape.size);
    tensor.strides[3] = 1;
    tensor.strides[inner] = row;
    tensor.strides[outer] = row * shape.size[inner];
    tensor.strides[0] = row * shape.size[1] * shape.size[2];
    return tensor;
}

static te_tensor input_dims(te_dtype dtype, dims shape)
{
    te_tensor tensor = new_dims(dtype, shape, BITS);
    fill_numbers(&buffers[buffer_count - 1], 0, dtype, 0);
    return tensor;
}

static te_tensor result_dims(te_dtype dtype, dims shape)
{
    te_tensor tensor = new_dims(dtype, shape, CLOSE);
    make_result(dtype);
    return tensor;
}

static const dims attention_shapes[] = {{{2, 3, 4, 5}},    {{1, 1, 1, 1}},   {{2, 2, 33, 64}},
                                        {{1, 2, 7, 1030}}, {{3, 1, 65, 63}}, {{1, 1, 2, 5000}},
                                        {{0, 2, 3, 4}},    {{2, 2, 3, 0}},   {{2, 4, 128, 128}}};
#define ATTENTION_SHAPES ((int)(sizeof attention_shapes / sizeof *attention_shapes))

/* Each dim that of the scores, or 1. */
static dims broadcast(dims shape)
{
    for (int i = 0; i < 4; i++) {
        if (pick(3) == 0) shape.size[i] = 1;
    }
    return shape;
}

static void softmax_case(dims shape, int variant)
{
    const te_dtype dtype = high[variant % 3];
    const int64_t windows[][2] = {{-1, -1}, {-1, 0}, {4, 2}};
    const int64_t *window = windows[pick(3)];
    any_args any = {0};
    te_softmax_args *args = &any.softmax;
    args->size = sizeof *args;
    args->scale = 0.7F;
    args->window_left = window[0];
    args->window_right = window[1];
    args->diagonal = pick(2) == 0 ? 0 : shape.size[3] - shape.size[2];
    args->input = input_dims(dtype, shape);
    if (pick(2) == 0) {
        args->mask = new_dims(TE_DTYPE_U8, broadcast(shape), BITS);
        for (size_t i = 0; i < buffers[buffer_count - 1].bytes; i++) {
            buffers[buffer_count - 1].initial[i] = pick(3) == 0;
        }
    }
    if (pick(2) == 0) args->bias = input_dims(high[pick(3)], broadcast(shape));
    args->output = result_dims(dtype, shape);
    if (pick(2) == 0) args->probabilities = result_dims(dtype, shape);
    if (pick(2) == 0) {
        args->dropout = 0.3F;
        args->rng = new_rng();
    }
    (void)snprintf(case_name, sizeof case_name, "softmax %s, %lld x %lld x %lld x %lld, variant %d",
                   te_dtype_name(dtype), (long long)shape.size[0], (long long)shape.size[1],
                   (long long)shape.size[2], (long long)shape.size[3], variant);
    run_case(TE_OP_SOFTMAX, &any);
}

static void cases_softmax(void)
{
    for (int i = 0; i < 12 * ATTENTION_SHAPES; i++) {
        softmax_case(attention_shapes[i % ATTENTION_SHAPES], i / ATTENTION_SHAPES);
    }
}

static double number_at(const te_tensor *tensor, const int64_t at[4])
{
    int64_t offset = 0;
    for (int i = 0; i < 4; i++) offset += at[i] * tensor->strides[i];
    return test_load(tensor->dtype, (unsigned char *)tensor->data +
                                        (size_t)offset * te_dtype_bytes(tensor->dtype));
}

/* Norm of |p| (|dp| + sum over keys of |dp p|), the terms of a gradient without their signs. */
static double terms_of_softmax_gradient(const te_softmax_backward_args *args)
{
    const te_tensor *dp = &args->grad_output, *p = &args->probabilities;
    double norm = 0.0;
    int64_t at[4];
    for (at[0] = 0; at[0] < p->shape[0]; at[0]++)
        for (at[1] = 0; at[1] < p->shape[1]; at[1]++)
            for (at[2] = 0; at[2] < p->shape[2]; at[2]++) {
                double sum = 0.0;
                for (at[3] = 0; at[3] < p->shape[3]; at[3]++)
                    sum += fabs(number_at(dp, at) * number_at(p, at));
                for (at[3] = 0; at[3] < p->shape[3]; at[3]++) {
                    double term = number_at(p, at) * (fabs(number_at(dp, at)) + sum);
                    norm += term * term;
                }
            }
    return sqrt(norm);
}

static void softmax_backward_case(dims shape, int variant)
{
    const te_dtype dtype = high[variant % 3];
    any_args any = {0};
    te_softmax_backward_args *args = &any.softmax_backward;
    args->size = sizeof *args;
    args->scale = 0.7F;
    args->grad_output = input_dims(dtype, shape);
    args->probabilities = input_dims(dtype, shape);
    args->grad_input = result_dims(dtype, shape);
    /* The two terms of a gradient cancel: errors are of the size of the terms. */
    buffers[buffer_count - 1].norm = terms_of_softmax_gradient(args);
    if (pick(2) == 0) {
        args->dropout = 0.3F;
        args->rng = new_rng();
    }
    (void)snprintf(case_name, sizeof case_name,
                   "softmax_backward %s, %lld x %lld x %lld x %lld, variant %d",
                   te_dtype_name(dtype), (long long)shape.size[0], (long long)shape.size[1],
                   (long long)shape.size[2], (long long)shape.size[3], variant);
    run_case(TE_OP_SOFTMAX_BACKWARD, &any);
}

static void cases_softmax_backward(void)
{
    for (int i = 0; i < 6 * ATTENTION_SHAPES; i++) {
        softmax_backward_case(attention_shapes[i % ATTENTION_SHAPES], i / ATTENTION_SHAPES);
    }
}

/* ---- attention: the CPU alone has it ---- */

static void refused_case(te_op op, const any_args *args)
{
    any_args call = moved(op, args, 1);
    size_t bytes = 0;
    (void)snprintf(case_name, sizeof case_name, "%s on a device that lacks it", te_op_name(op));
    if (te_op_run(contexts[1], op, &call, NULL) != TE_ERROR_UNSUPPORTED ||
        te_op_workspace(contexts[1], op, &call, &bytes) != TE_ERROR_UNSUPPORTED) {
        REPORT("expected UNSUPPORTED, not \"%s\"", te_last_error());
    }
    free_buffers();
}

static te_attention_problem new_problem(te_tensor *output, te_tensor *statistics)
{
    const dims shape = {{2, 3, 4, 8}};
    te_attention_problem problem = {.query = input_dims(TE_DTYPE_BF16, shape),
                                    .key = input_dims(TE_DTYPE_BF16, shape),
                                    .value = input_dims(TE_DTYPE_BF16, shape),
                                    .scale = 1.0F,
                                    .window_left = -1,
                                    .window_right = -1};
    *output = input_dims(TE_DTYPE_BF16, shape);
    *statistics = input_matrix(TE_DTYPE_F32, (extent){2 * 4 * 3, 1});
    statistics->ndim = 3;
    memcpy(statistics->shape, (int64_t[]){2, 4, 3}, 3 * sizeof *statistics->shape);
    memcpy(statistics->strides, (int64_t[]){12, 3, 1}, 3 * sizeof *statistics->strides);
    return problem;
}

static void cases_attention(void)
{
    any_args any = {0};
    any.attention.size = sizeof any.attention;
    any.attention.problem = new_problem(&any.attention.output, &any.attention.statistics);
    refused_case(TE_OP_ATTENTION, &any);
}

static void cases_attention_backward(void)
{
    any_args any = {0};
    te_attention_backward_args *args = &any.attention_backward;
    args->size = sizeof *args;
    args->problem = new_problem(&args->output, &args->statistics);
    args->grad_output = args->output;
    refused_case(TE_OP_ATTENTION_BACKWARD, &any);
}

/* ---- rotary position embedding ---- */

static te_tensor new_ints(const int32_t *values, int64_t count)
{
    te_tensor tensor = new_vector(TE_DTYPE_I32, count, BITS);
    memcpy(tensor.data, values, (size_t)count * sizeof *values);
    return tensor;
}

/* The batch is no dim of packed tokens. */
static void pack_dims(te_tensor *tensor)
{
    tensor->ndim = 3;
    memmove(tensor->shape, tensor->shape + 1, 3 * sizeof(int64_t));
    memmove(tensor->strides, tensor->strides + 1, 3 * sizeof(int64_t));
}

/* Up to three parts, whose lines hold up to three heads. */
static void rope_case(dims shape, int variant)
{
    const te_dtype dtype = high[variant % 3];
    const int32_t limits[] = {0, 4, 4, (int32_t)shape.size[1] / 4 * 4 * 2}, starts[] = {2, 0, 5};
    const int packed = shape.size[0] == 1 && shape.size[1] > 3 && pick(2) == 0;
    const int64_t width = shape.size[3], count = 1 + pick(3), together = 1 + pick(3);
    any_args any = {0};
    te_rope_args *args = &any.rope;
    args->size = sizeof *args;
    args->cp_size = shape.size[1] % 2 == 0 || packed ? 1 + (int32_t)pick(2) : 0;
    args->cp_rank = args->cp_size > 0 ? (int32_t)pick(args->cp_size) : 0;
    args->channels = together > 1 ? width : 0;
    for (int64_t i = 0; i < count; i++) {
        te_rope_part *part = &args->parts[i];
        const int64_t rotary = width / 2 * (pick(2) == 0 ? 2 : 1) / 2 * 2;
        shape.size[2] = i == 0 ? shape.size[2] : 1 + pick(3);
        shape.size[3] = width * together;
        part->input = input_dims(dtype, shape);
        part->output = result_dims(dtype, shape);
        if (packed) pack_dims(&part->input);
        if (packed) pack_dims(&part->output);
        if (pick(4) == 0) continue;
        if (i > 0 && pick(2) == 0) {
            part->freqs = args->parts[i - 1].freqs;
            continue;
        }
        part->freqs = new_matrix(TE_DTYPE_F32, 2 * shape.size[1] + 5, rotary, (layout){0, 0}, BITS);
        fill_numbers(&buffers[buffer_count - 1], 0, TE_DTYPE_F32, 0);
    }
    args->interleaved = pick(2) == 0;
    args->backward = pick(2) == 0;
    if (packed) {
        int32_t own[4];
        for (int i = 0; i < 4; i++) own[i] = args->cp_size == 2 ? limits[i] : limits[i] / 2;
        args->cu_seqlens = new_ints(own, 4);
    }
    if (pick(2) == 0 && (packed || shape.size[0] <= 3)) {
        args->start_positions = new_ints(starts, packed ? 3 : shape.size[0]);
    }
    (void)snprintf(case_name, sizeof case_name, "rope %s, %lld x %lld x %lld x %lld, variant %d",
                   te_dtype_name(dtype), (long long)shape.size[0], (long long)shape.size[1],
                   (long long)shape.size[2], (long long)width, variant);
    run_case(TE_OP_ROPE, &any);
}

static void cases_rope(void)
{
    static const dims shapes[] = {{{2, 6, 3, 8}},  {{1, 9, 2, 64}},   {{3, 5, 1, 7}},
                                  {{1, 1, 1, 2}},  {{2, 33, 4, 128}}, {{1, 70, 3, 80}},
                                  {{0, 4, 2, 16}}, {{2, 0, 2, 16}},   {{1, 12, 5, 10}}};
    for (int i = 0; i < 12 * 9; i++) rope_case(shapes[i % 9], i / 9);
}

/* ---- caches of keys and values ---- */

/* Keys and values of `heads`, with other channels. */
static void two_tensors(te_tensor *key, te_tensor *value, te_dtype dtype, dims shape)
{
    *key = input_dims(dtype, shape);
    shape.size[3] += 3;
    *value = input_dims(dtype, shape);
}

static te_cache cache_of(te_dtype dtype, int64_t channels, int paged)
{
    const int32_t table[] = {4, 0, 2, 1, 5, 3};
    const dims pages = paged ? (dims){{6, 4, 2, channels}} : (dims){{3, 12, 2, channels}};
    te_cache cache = {0};
    two_tensors(&cache.key, &cache.value, dtype, pages);
    if (paged) {
        cache.page_table = new_ints(table, 6);
        cache.page_table.ndim = 2;
        memcpy(cache.page_table.shape, (int64_t[]){3, 2}, 2 * sizeof(int64_t));
        memcpy(cache.page_table.strides, (int64_t[]){2, 1}, 2 * sizeof(int64_t));
    }
    return cache;
}

static void cases_cache_append(void)
{
    const int32_t starts[] = {0, 5, 3}, counts[] = {3, 0, 2}, limits[] = {0, 3, 3, 5};
    for (int i = 0; i < 48; i++) {
        const te_dtype dtype = high[i % 3];
        const int64_t channels = i / 3 % 2 ? 64 : 10;
        const int packed = i / 6 % 2, paged = i / 12 % 2;
        any_args any = {0};
        te_cache_append_args *args = &any.cache_append;
        args->size = sizeof *args;
        args->cache = cache_of(dtype, channels, paged);
        two_tensors(&args->key, &args->value, dtype,
                    (dims){{packed ? 1 : 3, 6 - packed, 2, channels}});
        args->starts = new_ints(starts, 3);
        if (packed) {
            te_tensor *both[] = {&args->key, &args->value};
            for (int k = 0; k < 2; k++) {
                both[k]->ndim = 3;
                memmove(both[k]->shape, both[k]->shape + 1, 3 * sizeof(int64_t));
                memmove(both[k]->strides, both[k]->strides + 1, 3 * sizeof(int64_t));
            }
            args->cu_seqlens = new_ints(limits, 4);
        }
        if (!packed || pick(2) == 0) args->counts = new_ints(counts, 3);
        (void)snprintf(case_name, sizeof case_name, "cache_append %s, variant %d",
                       te_dtype_name(dtype), i);
        run_case(TE_OP_CACHE_APPEND, &any);
    }
}

static void cases_cache_gather(void)
{
    const int32_t lengths[] = {8, 0, 5};
    for (int i = 0; i < 24; i++) {
        const te_dtype dtype = high[i % 3];
        const int64_t channels = i / 3 % 2 ? 64 : 10;
        any_args any = {0};
        te_cache_gather_args *args = &any.cache_gather;
        args->size = sizeof *args;
        args->cache = cache_of(dtype, channels, i / 6 % 2);
        two_tensors(&args->key, &args->value, dtype, (dims){{3, 8, 2, channels}});
        args->lengths = new_ints(lengths, 3);
        (void)snprintf(case_name, sizeof case_name, "cache_gather %s, variant %d",
                       te_dtype_name(dtype), i);
        run_case(TE_OP_CACHE_GATHER, &any);
    }
}

/* ---- several attentions ---- */

static void cases_attention_merge(void)
{
    for (int i = 0; i < 54; i++) {
        const dims shape = {{2, 9, 3, pick(2) == 0 ? 128 : 1 + pick(300)}};
        const dims one = {{shape.size[0], shape.size[1], shape.size[2], 1}};
        any_args any = {0};
        te_attention_merge_args *args = &any.attention_merge;
        args->size = sizeof *args;
        args->total = input_dims(high[i % 3], shape);
        args->step = input_dims(high[i / 3 % 3], shape);
        args->output = result_dims(high[i / 9 % 3], shape);
        if (i / 27 % 2) {
            args->total_statistics = input_dims(TE_DTYPE_F32, one);
            args->step_statistics = input_dims(TE_DTYPE_F32, one);
            args->statistics = result_dims(TE_DTYPE_F32, one);
        }
        (void)snprintf(case_name, sizeof case_name, "attention_merge to %s, variant %d",
                       te_dtype_name(args->output.dtype), i);
        run_case(TE_OP_ATTENTION_MERGE, &any);
    }
}

#endif
