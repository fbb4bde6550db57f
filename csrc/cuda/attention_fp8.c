/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/attention_fp8.h"

#include <string.h>

#include "core/attention.h"
#include "core/status.h"
#include "cuda/launch.h"

/* Where each number of a workspace lies. */
enum { WEIGHTS = 0, SCORES = TE_TENSOR_SCALES, FOUND = 2 * TE_TENSOR_SCALES };

static float *scales_of(const te_tensor *scales, int which)
{
    return scales->data == NULL ? NULL : (float *)scales->data + which;
}

static void *at(float *floats, int which)
{
    return floats == NULL ? NULL : floats + which;
}

static void place_operands(const te_attention_problem *p, void **places)
{
    places[TE_SDPA_QUERY_INVERSE] = scales_of(&p->query_scales, TE_SCALES_INVERSE);
    places[TE_SDPA_KEY_INVERSE] = scales_of(&p->key_scales, TE_SCALES_INVERSE);
    places[TE_SDPA_VALUE_INVERSE] = scales_of(&p->value_scales, TE_SCALES_INVERSE);
}

/* The scale *source (NULL: 1) times a factor, with its inverse; and where a graph reads them. */
static void add_scale(te_attention_fp8 *fp8, const float *source, float factor, float *pair,
                      void **scale, void **inverse)
{
    te_attention_fp8_begin_params *begin = &fp8->begin;
    if (scale != NULL) *scale = at(pair, TE_SCALES_SCALE);
    if (inverse != NULL) *inverse = at(pair, TE_SCALES_INVERSE);
    begin->scales[begin->count++] = (te_attention_fp8_scale){source, factor, pair};
}

/* What a graph writes to a place of its own raises an amax. */
static void add_amax(te_attention_fp8 *fp8, float *found, void **place, float *amax)
{
    te_attention_fp8_end_params *end = &fp8->end;
    *place = found;
    if (amax == NULL || found == NULL) return;
    end->amaxes[end->count++] = (te_attention_fp8_amax){found, amax};
}

void te_cuda_attention_fp8_forward(const te_attention_args *args, float *floats, void **places,
                                   te_attention_fp8 *fp8)
{
    const te_attention_problem *p = &args->problem;
    const float *values = scales_of(&p->value_scales, TE_SCALES_SCALE);
    const int given = args->output_scale != NULL;
    memset(fp8, 0, sizeof *fp8);
    place_operands(p, places);
    add_scale(fp8, NULL, te_attention_weights_scale(p->dropout), at(floats, WEIGHTS),
              &places[TE_SDPA_WEIGHTS_SCALE], &places[TE_SDPA_WEIGHTS_INVERSE]);
    add_scale(fp8, given ? args->output_scale : values,
              given ? 1.0F : te_attention_kept(p->dropout), args->output_scales.data,
              &places[TE_SDPA_OUTPUT_SCALE], NULL);
    add_amax(fp8, at(floats, FOUND), &places[TE_SDPA_WEIGHTS_AMAX], args->weights_amax);
    add_amax(fp8, at(floats, FOUND + 1), &places[TE_SDPA_OUTPUT_AMAX], args->output_amax);
}

void te_cuda_attention_fp8_backward(const te_attention_backward_args *args, float *floats,
                                    void **places, te_attention_fp8 *fp8)
{
    const te_attention_problem *p = &args->problem;
    memset(fp8, 0, sizeof *fp8);
    place_operands(p, places);
    places[TE_SDPA_OUTPUT_INVERSE] = scales_of(&args->output_scales, TE_SCALES_INVERSE);
    places[TE_SDPA_GRAD_OUTPUT_INVERSE] = scales_of(&args->grad_output_scales, TE_SCALES_INVERSE);
    add_scale(fp8, NULL, te_attention_weights_scale(p->dropout), at(floats, WEIGHTS),
              &places[TE_SDPA_WEIGHTS_SCALE], &places[TE_SDPA_WEIGHTS_INVERSE]);
    add_scale(fp8, args->grad_scores_scale, 1.0F, at(floats, SCORES),
              &places[TE_SDPA_GRAD_SCORES_SCALE], &places[TE_SDPA_GRAD_SCORES_INVERSE]);
    add_scale(fp8, args->grads_scale, 1.0F, args->grads_scales.data, &places[TE_SDPA_GRADS_SCALE],
              NULL);
    add_amax(fp8, at(floats, FOUND), &places[TE_SDPA_GRAD_SCORES_AMAX], args->grad_scores_amax);
    add_amax(fp8, at(floats, FOUND + 1), &places[TE_SDPA_GRAD_QUERY_AMAX], args->grads_amax);
    add_amax(fp8, at(floats, FOUND + 2), &places[TE_SDPA_GRAD_KEY_AMAX], args->grads_amax);
    add_amax(fp8, at(floats, FOUND + 3), &places[TE_SDPA_GRAD_VALUE_AMAX], args->grads_amax);
}

te_status te_cuda_attention_fp8_begin(te_cuda_state *cuda, const te_attention_fp8 *fp8,
                                      void *stream)
{
    const te_cuda_call launch = {"attention",
                                 "te_attention_fp8_begin",
                                 {1, 1, 1, TE_ATTENTION_THREADS, 1, 1, 0},
                                 &fp8->begin,
                                 sizeof fp8->begin};
    return te_cuda_run(cuda, &launch, 1, stream);
}

te_status te_cuda_attention_fp8_end(te_cuda_state *cuda, const te_attention_fp8 *fp8, void *stream)
{
    const te_cuda_call launch = {"attention",
                                 "te_attention_fp8_end",
                                 {1, 1, 1, TE_ATTENTION_THREADS, 1, 1, 0},
                                 &fp8->end,
                                 sizeof fp8->end};
    return fp8->end.count == 0 ? TE_OK : te_cuda_run(cuda, &launch, 1, stream);
}
