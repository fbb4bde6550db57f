/* SPDX-License-Identifier: Apache-2.0
 *
 * merge.c - outputs and statistics of two attentions to different keys as those of one, and plain
 * sums of gradients.
 */
#include <math.h>

#include "core/status.h"
#include "cpu/isa.h"
#include "cpu/matrix.h"
#include "cpu/ops.h"

#define TOTAL 0
#define STEP 1
#define CHUNK 512 /* channels at once */

typedef struct merge_job {
    const te_cpu_kernels *kernels;
    te_cpu_tensor4 parts[2], output;
    te_cpu_tensor4 part_statistics[2], statistics; /* data NULL: a sum */
    int64_t tokens, heads, channels;
} merge_job;

/* What both parts are multiplied with; returns the statistic of both. */
static float weigh(const float statistics[2], float weights[2])
{
    const int larger = statistics[STEP] > statistics[TOTAL] ? STEP : TOTAL;
    const float ratio = expf(-fabsf(statistics[TOTAL] - statistics[STEP]));
    if (statistics[TOTAL] == -INFINITY && statistics[STEP] == -INFINITY) {
        weights[TOTAL] = weights[STEP] = 0.0F;
        return -INFINITY;
    }
    weights[larger] = 1.0F / (1.0F + ratio);
    weights[1 - larger] = ratio / (1.0F + ratio);
    return statistics[larger] + log1pf(ratio);
}

/* The channels from `first` on of one head. */
static void merge_channels(const merge_job *job, const int64_t at[3], const float weights[2],
                           int64_t first)
{
    const int64_t count = te_cpu_min(CHUNK, job->channels - first);
    const te_cpu_tensor4 *to = &job->output;
    float sum[CHUNK], values[CHUNK];
    /* -0 + -0 is -0 */
    for (int64_t j = 0; j < count; j++) sum[j] = weights[TOTAL] == 0.0F ? 0.0F : -0.0F;
    for (int i = TOTAL; i <= STEP; i++) {
        const te_cpu_tensor4 *part = &job->parts[i];
        const unsigned char *line = te_cpu_at4(part, at[0], at[1], at[2]);
        if (weights[i] == 0.0F) continue;
        job->kernels->to_f32[part->dtype](line + first * part->bytes, values, count);
        for (int64_t j = 0; j < count; j++) sum[j] += weights[i] * values[j];
    }
    job->kernels->from_f32[to->dtype](sum, te_cpu_at4(to, at[0], at[1], at[2]) + first * to->bytes,
                                      count);
}

static void merge_head(const merge_job *job, int64_t row)
{
    const int64_t token = row / job->heads;
    const int64_t at[3] = {token / job->tokens, token % job->tokens, row % job->heads};
    float weights[2] = {1.0F, 1.0F};
    if (job->statistics.data != NULL) {
        float found[2];
        for (int i = TOTAL; i <= STEP; i++) {
            found[i] = *(const float *)(const void *)te_cpu_at4(&job->part_statistics[i], at[0],
                                                                at[1], at[2]);
        }
        *(float *)(void *)te_cpu_at4(&job->statistics, at[0], at[1], at[2]) = weigh(found, weights);
    }
    for (int64_t first = 0; first < job->channels; first += CHUNK) {
        merge_channels(job, at, weights, first);
    }
}

te_status te_cpu_attention_merge(const te_attention_merge_args *args)
{
    const int64_t *shape = args->total.shape;
    const int64_t rows = shape[0] * shape[1] * shape[2];
    const merge_job job = {
        .kernels = te_cpu_kernels_get(),
        .parts = {te_cpu_tensor4_of(&args->total), te_cpu_tensor4_of(&args->step)},
        .output = te_cpu_tensor4_of(&args->output),
        .part_statistics = {te_cpu_tensor4_of(&args->total_statistics),
                            te_cpu_tensor4_of(&args->step_statistics)},
        .statistics = te_cpu_tensor4_of(&args->statistics),
        .tokens = shape[1],
        .heads = shape[2],
        .channels = shape[3]};
#pragma omp parallel for num_threads(te_cpu_threads(rows, job.channels))
    for (int64_t row = 0; row < rows; row++) merge_head(&job, row);
    return TE_OK;
}
