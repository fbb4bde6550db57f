/* SPDX-License-Identifier: Apache-2.0
 *
 * rope.c - rotary position embedding of strided or packed sequences.
 *
 * The work is distributed by the index in the sequence: its cosines and sines are made once and
 * serve all heads of all parts, and all batch entries that share the position. They are made for
 * PIECE pairs of channels at a time, so that any head size fits on the stack.
 */
#include <math.h>
#include <string.h>

#include "core/status.h"
#include "cpu/isa.h"
#include "cpu/matrix.h"
#include "cpu/ops.h"

enum { PIECE = 256 };

#define LL(value) ((long long)(value))

typedef struct rope_part {
    te_cpu_tensor4 input, output; /* [batch, sequence, heads, dim]; packed: without the first */
    int64_t lines, width;         /* of a token: [heads, dim] as the tensors have them */
    int64_t per_line, dim;        /* heads of a line, channels of a head */
    int64_t rotary, positions;    /* of freqs */
    const float *freqs;           /* [positions, rotary]; NULL: rotary is 0 */
    int in_place;
} rope_part;

typedef struct rope_job {
    const te_cpu_kernels *kernels;
    rope_part parts[TE_ROPE_PARTS];
    int count;
    te_dtype dtype;
    int64_t bytes;                     /* of an element */
    int64_t batch, sequence, rotary;   /* rotary: the most of the parts */
    const int32_t *cu_seqlens, *start; /* NULL: not packed; from 0 */
    int64_t packed;                    /* number of packed sequences */
    int64_t ranks, rank;               /* of context parallelism */
    int interleaved, backward;
} rope_job;

/* Of the pairs [first, first + n) at one position. */
typedef struct rope_angles {
    const float *freqs; /* row that they were made of; NULL: of none yet */
    int64_t rotary;     /* length of the row */
    float cos_a[PIECE], sin_a[PIECE], cos_b[PIECE], sin_b[PIECE];
} rope_angles;

static rope_part describe_part(const te_rope_part *given, int64_t channels)
{
    const te_tensor *input = &given->input;
    rope_part part = {.input = te_cpu_tensor4_of(input),
                      .output = te_cpu_tensor4_of(&given->output),
                      .lines = input->shape[input->ndim - 2],
                      .width = input->shape[input->ndim - 1],
                      .per_line = 1};
    part.dim = part.width;
    if (given->freqs.data != NULL) {
        part.freqs = given->freqs.data;
        part.positions = given->freqs.shape[0];
        part.rotary = given->freqs.shape[1];
        if (channels > 0) part.dim = channels;
        if (part.dim > 0) part.per_line = part.width / part.dim;
    }
    part.in_place = part.input.data == part.output.data &&
                    memcmp(part.input.strides, part.output.strides, sizeof part.input.strides) == 0;
    return part;
}

static rope_job describe(const te_rope_args *args)
{
    const te_tensor *input = &args->parts[0].input;
    int first = input->ndim - 3;
    rope_job job = {.kernels = te_cpu_kernels_get(),
                    .dtype = input->dtype,
                    .bytes = (int64_t)te_dtype_bytes(input->dtype),
                    .batch = first > 0 ? input->shape[0] : 1,
                    .sequence = input->shape[first],
                    .cu_seqlens = args->cu_seqlens.data,
                    .start = args->start_positions.data,
                    .ranks = args->cp_size > 1 ? args->cp_size : 1,
                    .rank = args->cp_rank,
                    .interleaved = args->interleaved != 0,
                    .backward = args->backward != 0};
    for (int i = 0; i < TE_ROPE_PARTS; i++) {
        rope_part part;
        if (args->parts[i].input.data == NULL) continue;
        part = describe_part(&args->parts[i], args->channels);
        if (part.rotary > job.rotary) job.rotary = part.rotary;
        job.parts[job.count++] = part;
    }
    if (job.cu_seqlens != NULL) job.packed = args->cu_seqlens.shape[0] - 1;
    return job;
}

/* What only the CPU can see: every position is one of freqs, and packed sequences are in order. */
static te_status check_positions(const rope_job *job, int64_t positions)
{
    int64_t count = job->cu_seqlens != NULL ? job->packed : job->batch;
    for (int64_t b = 0; b < count; b++) {
        int64_t length = job->sequence * job->ranks, start = job->start == NULL ? 0 : job->start[b];
        if (job->cu_seqlens != NULL) {
            int64_t begin = job->cu_seqlens[b], end = job->cu_seqlens[b + 1];
            TE_FAIL_IF(begin < 0 || end < begin || end > length, TE_ERROR_INVALID,
                       "rope: cu_seqlens: sequence %lld is [%lld, %lld) of %lld tokens", LL(b),
                       LL(begin), LL(end), LL(length));
            TE_FAIL_IF(job->ranks > 1 &&
                           (begin % (2 * job->ranks) != 0 || end % (2 * job->ranks) != 0),
                       TE_ERROR_INVALID,
                       "rope: cu_seqlens: sequence %lld is [%lld, %lld), expected multiples "
                       "of 2 cp_size = %lld",
                       LL(b), LL(begin), LL(end), LL(2 * job->ranks));
            length = end - begin;
        }
        TE_FAIL_IF(length > 0 && (start < 0 || start + length > positions), TE_ERROR_INVALID,
                   "rope: batch entry %lld has positions %lld to %lld, but freqs has %lld rows",
                   LL(b), LL(start), LL(start + length - 1), LL(positions));
    }
    return TE_OK;
}

/* First token of a packed sequence on this rank. */
static int64_t limit(const rope_job *job, int64_t sequence)
{
    return job->cu_seqlens[sequence] / job->ranks;
}

/* Position of an element; -1 for a token of no sequence. */
static int64_t position_of(const rope_job *job, int64_t b, int64_t s)
{
    int64_t sequence = b, index = s, length = job->sequence;
    if (job->cu_seqlens != NULL) {
        int64_t low = -1, high = job->packed + 1; /* the last that begins at or before s */
        while (high - low > 1) {
            int64_t middle = low + (high - low) / 2;
            if (limit(job, middle) <= s) {
                low = middle;
            } else {
                high = middle;
            }
        }
        if (low < 0 || low == job->packed) return -1;
        sequence = low;
        index = s - limit(job, low);
        length = limit(job, low + 1) - limit(job, low);
    }
    if (job->ranks > 1) { /* chunk `rank`, then its counterpart */
        int64_t chunk = length / 2, counterpart = 2 * (job->ranks - 1) - job->rank;
        index += index < chunk ? job->rank * chunk : counterpart * chunk;
    }
    return index + (job->start == NULL ? 0 : job->start[sequence]);
}

static void make_angles(const rope_job *job, const rope_part *part, int64_t position, int64_t first,
                        int64_t n, rope_angles *angles)
{
    const float *row = part->freqs + position * part->rotary;
    const float *a = job->interleaved ? row + 2 * first : row + first;
    const float *b = job->interleaved ? a + 1 : a + part->rotary / 2;
    int64_t step = job->interleaved ? 2 : 1;
    if (angles->freqs == row && angles->rotary == part->rotary) return; /* of a part before */
    angles->freqs = row;
    angles->rotary = part->rotary;
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
static void rotate_head(const rope_job *job, const rope_part *part, const te_cpu_angles *angles,
                        int64_t first, int64_t n, const unsigned char *x, unsigned char *y)
{
    const te_cpu_kernels *kernels = job->kernels;
    float values[2 * PIECE];
    int64_t half = part->rotary / 2 * job->bytes;
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
static void copy_rest(const rope_job *job, const rope_part *part, int64_t b, int64_t s,
                      int64_t first)
{
    size_t size = (size_t)((part->dim - first) * job->bytes);
    if (part->in_place || size == 0) return;
    for (int64_t line = 0; line < part->lines; line++) {
        unsigned char *to = te_cpu_at4(&part->output, b, s, line);
        const unsigned char *from = te_cpu_at4(&part->input, b, s, line);
        for (int64_t h = 0; h < part->per_line; h++) {
            int64_t at = (h * part->dim + first) * job->bytes;
            memcpy(to + at, from + at, size);
        }
    }
}

/* n pairs of all heads of a token, from a pair on. */
static void rotate_token(const rope_job *job, const rope_part *part, const rope_angles *made,
                         int64_t first, int64_t n, int64_t b, int64_t s)
{
    const te_cpu_angles angles = {made->cos_a, made->sin_a, made->cos_b, made->sin_b};
    for (int64_t line = 0; line < part->lines; line++) {
        const unsigned char *from = te_cpu_at4(&part->input, b, s, line);
        unsigned char *to = te_cpu_at4(&part->output, b, s, line);
        for (int64_t h = 0; h < part->per_line; h++) {
            int64_t at = h * part->dim * job->bytes;
            rotate_head(job, part, &angles, first, n, from + at, to + at);
        }
    }
}

/* All batch entries and heads at one index of the sequence. */
static void rotate_index(const rope_job *job, int64_t s)
{
    rope_angles made;
    for (int64_t first = 0; first < job->rotary / 2; first += PIECE) {
        made.freqs = NULL;
        for (int64_t b = 0; b < job->batch; b++) {
            int64_t position = position_of(job, b, s);
            if (position < 0) continue;
            for (int i = 0; i < job->count; i++) {
                const rope_part *part = &job->parts[i];
                int64_t n = te_cpu_min(PIECE, part->rotary / 2 - first);
                if (n <= 0) continue;
                make_angles(job, part, position, first, n, &made);
                rotate_token(job, part, &made, first, n, b, s);
            }
        }
    }
    for (int64_t b = 0; b < job->batch; b++) {
        int64_t position = position_of(job, b, s);
        for (int i = 0; i < job->count; i++) {
            copy_rest(job, &job->parts[i], b, s, position < 0 ? 0 : job->parts[i].rotary);
        }
    }
}

te_status te_cpu_rope(const te_rope_args *args)
{
    rope_job job = describe(args);
    int64_t elements = 0, positions = INT64_MAX;
    for (int i = 0; i < job.count; i++) {
        const rope_part *part = &job.parts[i];
        elements += part->lines * part->width;
        if (part->freqs != NULL && part->positions < positions) positions = part->positions;
    }
    if (job.batch == 0 || elements == 0) return TE_OK;
    TE_TRY(check_positions(&job, positions));
#pragma omp parallel for num_threads(te_cpu_threads(job.batch *job.sequence, elements))
    for (int64_t s = 0; s < job.sequence; s++) {
        rotate_index(&job, s);
    }
    return TE_OK;
}
