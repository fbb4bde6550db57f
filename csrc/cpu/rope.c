/* SPDX-License-Identifier: Apache-2.0
 *
 * rope.c - rotary position embedding of strided or packed sequences.
 *
 * The work is distributed by the index in the sequence: its cosines and sines are made once and
 * serve all heads, and all batch entries that share the position. They are made for PIECE pairs of
 * channels at a time, so that any head size fits on the stack.
 */
#include <math.h>
#include <string.h>

#include "core/status.h"
#include "cpu/isa.h"
#include "cpu/matrix.h"
#include "cpu/ops.h"

enum { PIECE = 256 };

#define LL(value) ((long long)(value))

/* [batch, sequence, heads, dim]; packed tokens are one batch entry. Strides in bytes. */
typedef struct rope_view {
    unsigned char *data;
    int64_t batch_stride, sequence_stride, head_stride;
} rope_view;

typedef struct rope_job {
    const te_cpu_kernels *kernels;
    rope_view input, output;
    te_dtype dtype;
    int64_t bytes; /* of an element */
    int64_t batch, sequence, heads, dim, rotary;
    const float *freqs;                /* [positions, rotary] */
    const int32_t *cu_seqlens, *start; /* NULL: not packed; from 0 */
    int64_t packed;                    /* number of packed sequences */
    int interleaved, backward, in_place;
} rope_job;

/* Of the pairs [first, first + n) at one position. */
typedef struct rope_angles {
    float cos_a[PIECE], sin_a[PIECE], cos_b[PIECE], sin_b[PIECE];
} rope_angles;

static rope_view view(const te_tensor *tensor)
{
    int64_t bytes = (int64_t)te_dtype_bytes(tensor->dtype);
    int first = tensor->ndim - 3; /* the dim of tokens */
    rope_view x = {.data = tensor->data,
                   .sequence_stride = tensor->strides[first] * bytes,
                   .head_stride = tensor->strides[first + 1] * bytes};
    if (first > 0) x.batch_stride = tensor->strides[0] * bytes;
    return x;
}

static unsigned char *head_of(const rope_view *x, int64_t b, int64_t s, int64_t h)
{
    return x->data + b * x->batch_stride + s * x->sequence_stride + h * x->head_stride;
}

static rope_job describe(const te_rope_args *args)
{
    const te_tensor *input = &args->input;
    int first = input->ndim - 3;
    rope_job job = {.kernels = te_cpu_kernels_get(),
                    .input = view(input),
                    .output = view(&args->output),
                    .dtype = input->dtype,
                    .bytes = (int64_t)te_dtype_bytes(input->dtype),
                    .batch = first > 0 ? input->shape[0] : 1,
                    .sequence = input->shape[first],
                    .heads = input->shape[first + 1],
                    .dim = input->shape[first + 2],
                    .rotary = args->freqs.shape[1],
                    .freqs = args->freqs.data,
                    .cu_seqlens = args->cu_seqlens.data,
                    .start = args->start_positions.data,
                    .interleaved = args->interleaved != 0,
                    .backward = args->backward != 0};
    if (job.cu_seqlens != NULL) job.packed = args->cu_seqlens.shape[0] - 1;
    job.in_place = memcmp(&job.input, &job.output, sizeof job.input) == 0;
    return job;
}

/* What only the CPU can see: every position is one of freqs, and packed sequences are in order. */
static te_status check_positions(const rope_job *job, int64_t positions)
{
    int64_t count = job->cu_seqlens != NULL ? job->packed : job->batch;
    for (int64_t b = 0; b < count; b++) {
        int64_t length = job->sequence, start = job->start == NULL ? 0 : job->start[b];
        if (job->cu_seqlens != NULL) {
            int64_t begin = job->cu_seqlens[b], end = job->cu_seqlens[b + 1];
            if (begin < 0 || end < begin || end > job->sequence) {
                return TE_FAIL(TE_ERROR_INVALID,
                               "rope: cu_seqlens: sequence %lld is [%lld, %lld) of %lld tokens",
                               LL(b), LL(begin), LL(end), LL(job->sequence));
            }
            length = end - begin;
        }
        if (length > 0 && (start < 0 || start + length > positions)) {
            return TE_FAIL(TE_ERROR_INVALID,
                           "rope: freqs: batch entry %lld has positions %lld to %lld, freqs %lld",
                           LL(b), LL(start), LL(start + length - 1), LL(positions));
        }
    }
    return TE_OK;
}

/* Position of an element; -1 for a token of no sequence. */
static int64_t position_of(const rope_job *job, int64_t b, int64_t s)
{
    if (job->cu_seqlens == NULL) return s + (job->start == NULL ? 0 : job->start[b]);
    int64_t low = -1, high = job->packed + 1; /* the last sequence that begins at or before s */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (job->cu_seqlens[middle] <= s) {
            low = middle;
        } else {
            high = middle;
        }
    }
    if (low < 0 || low == job->packed) return -1;
    return s - job->cu_seqlens[low] + (job->start == NULL ? 0 : job->start[low]);
}

static void make_angles(const rope_job *job, int64_t position, int64_t first, int64_t n,
                        rope_angles *angles)
{
    const float *row = job->freqs + position * job->rotary;
    const float *a = job->interleaved ? row + 2 * first : row + first;
    const float *b = job->interleaved ? a + 1 : a + job->rotary / 2;
    int64_t step = job->interleaved ? 2 : 1;
    for (int64_t i = 0; i < n; i++) {
        float angle_a = a[i * step], angle_b = b[i * step];
        angles->cos_a[i] = angles->cos_b[i] = cosf(angle_a);
        angles->sin_a[i] = angles->sin_b[i] = sinf(angle_a);
        if (angle_b != angle_a) { /* as a rule both channels of a pair turn by the same angle */
            angles->cos_b[i] = cosf(angle_b);
            angles->sin_b[i] = sinf(angle_b);
        }
        if (job->backward) { /* the transposed map turns back, and each sine goes to its partner */
            float sin_a = angles->sin_a[i];
            angles->sin_a[i] = -angles->sin_b[i];
            angles->sin_b[i] = -sin_a;
        }
    }
}

/* n pairs of one head, from a pair on. */
static void rotate_head(const rope_job *job, const te_cpu_angles *angles, int64_t first, int64_t n,
                        const unsigned char *x, unsigned char *y)
{
    const te_cpu_kernels *kernels = job->kernels;
    float values[2 * PIECE];
    int64_t half = job->rotary / 2 * job->bytes;
    if (job->interleaved) {
        kernels->to_f32[job->dtype](x + 2 * first * job->bytes, values, 2 * n);
        kernels->rotate[1](values, angles, n);
        kernels->from_f32[job->dtype](values, y + 2 * first * job->bytes, 2 * n);
    } else {
        kernels->to_f32[job->dtype](x + first * job->bytes, values, n);
        kernels->to_f32[job->dtype](x + half + first * job->bytes, values + n, n);
        kernels->rotate[0](values, angles, n);
        kernels->from_f32[job->dtype](values, y + first * job->bytes, n);
        kernels->from_f32[job->dtype](values + n, y + half + first * job->bytes, n);
    }
}

/* The channels from `first` on, in all heads. */
static void copy_rest(const rope_job *job, int64_t b, int64_t s, int64_t first)
{
    size_t size = (size_t)((job->dim - first) * job->bytes);
    if (job->in_place || size == 0) return;
    for (int64_t h = 0; h < job->heads; h++) {
        memcpy(head_of(&job->output, b, s, h) + first * job->bytes,
               head_of(&job->input, b, s, h) + first * job->bytes, size);
    }
}

/* All batch entries and heads at one index of the sequence. */
static void rotate_index(const rope_job *job, int64_t s)
{
    rope_angles made;
    const te_cpu_angles angles = {made.cos_a, made.sin_a, made.cos_b, made.sin_b};
    for (int64_t first = 0; first < job->rotary / 2; first += PIECE) {
        int64_t n = te_cpu_min(PIECE, job->rotary / 2 - first), current = -1;
        for (int64_t b = 0; b < job->batch; b++) {
            int64_t position = position_of(job, b, s);
            if (position < 0) continue;
            if (position != current) make_angles(job, position, first, n, &made);
            current = position;
            for (int64_t h = 0; h < job->heads; h++) {
                rotate_head(job, &angles, first, n, head_of(&job->input, b, s, h),
                            head_of(&job->output, b, s, h));
            }
        }
    }
    for (int64_t b = 0; b < job->batch; b++) {
        copy_rest(job, b, s, position_of(job, b, s) < 0 ? 0 : job->rotary);
    }
}

te_status te_cpu_rope(const te_rope_args *args)
{
    rope_job job = describe(args);
    int threads = te_cpu_threads(job.batch * job.sequence, job.heads * job.dim);
    (void)threads;
    if (job.batch == 0 || job.heads == 0 || job.dim == 0) return TE_OK;
    TE_TRY(check_positions(&job, args->freqs.shape[0]));
#pragma omp parallel for num_threads(threads)
    for (int64_t s = 0; s < job.sequence; s++) {
        rotate_index(&job, s);
    }
    return TE_OK;
}
