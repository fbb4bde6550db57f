/* SPDX-License-Identifier: Apache-2.0
 *
 * attention.c - attention and its gradient on CUDA: what cuDNN's fused kernels are given of a
 * problem, and what is done around them.
 *
 * A mask becomes a bias. A backward over keys that are no multiple of 128, or of one query, is
 * given lengths, full ones where the caller has none: without them cuDNN's gradients are NaN where
 * scores are very negative. One over one query with a bias is given statistics without -Inf: its
 * engine makes NaN of a row without keys. A gradient that nobody wants goes to the workspace.
 * A sink is part of the forward's graph where the fast engine takes it, else it joins afterwards;
 * a backward needs it for its own gradient alone, since the statistics have it. What FP8 needs
 * besides is in attention_fp8.c.
 */
#include "cuda/kernels/attention.h"

#include <string.h>

#include "core/attention.h"
#include "core/check.h"
#include "core/counters.h"
#include "core/status.h"
#include "cuda/api.h"
#include "cuda/attention_fp8.h"
#include "cuda/attention_packed.h"
#include "cuda/attention_rows.h"
#include "cuda/launch.h"
#include "cuda/ops.h"
#include "cuda/sdpa_plans.h"

#define VECTOR TE_CUDA_ATTENTION_VECTOR
#define MAX_BLOCKS 65536
#define CLEAR_BLOCKS 64 /* of a sequence */
#define WHOLE_KEYS 128  /* a backward over a multiple of these needs no lengths */

/* A call, laid out. */
typedef struct sdpa_call {
    const te_attention_problem *problem;
    te_op op;
    te_sdpa_key key;
    void *places[TE_SDPA_PLACES];
    char *base;            /* of the workspace; NULL: sizes alone are asked */
    size_t used;           /* bytes taken */
    int has_given_lengths; /* of the caller, of which one may be 0 or wrong */
    int makes_bias, joins_sink;
    const float *unraised; /* statistics in whose place cuDNN is given others; NULL: it is not */
    te_attention_begin_params begin; /* of sequences with lengths */
    te_attention_fp8 fp8;
} sdpa_call;

static void *take(sdpa_call *call, int64_t elements, size_t bytes)
{
    char *piece = call->base == NULL ? NULL : call->base + call->used;
    call->used += ((size_t)elements * bytes + 255) / 256 * 256;
    return piece;
}

/* ---- the problem for cuDNN ---- */

/* Heads [batch, tokens, heads, channels]; a stride along a dim of 1 means nothing. */
static te_sdpa_strides strides_of(const te_tensor *heads)
{
    const int64_t *n = heads->shape, *s = heads->strides;
    te_sdpa_strides of = {s[0], s[2], s[1]};
    if (n[2] <= 1) of.head = n[3];
    if (n[1] <= 1) of.token = n[2] * n[3];
    if (n[0] <= 1) of.batch = n[1] * n[2] * n[3];
    return of;
}

/* Where packed sequences begin in a tensor whose tokens are `stride` elements apart. */
static void place_starts(sdpa_call *call, int32_t place, int64_t stride)
{
    const te_sdpa_key *key = &call->key;
    te_attention_starts *of = &call->begin.starts[call->begin.count];
    if (!key->is_packed) return;
    of->starts = take(call, key->batch + 1, sizeof(int64_t));
    of->stride = stride;
    of->side = te_sdpa_is_of_keys(place);
    call->places[TE_SDPA_OFFSETS + place] = of->starts;
    call->begin.count++;
}

/* The batch stride of packed tensors means nothing, and is what the others' is. */
static void place_strides(sdpa_call *call, int32_t place, te_sdpa_strides *of)
{
    const te_sdpa_key *key = &call->key;
    if (!key->is_packed) return;
    of->batch = of->token * (te_sdpa_is_of_keys(place) ? key->keys : key->queries);
    place_starts(call, place, of->token);
}

static void place_heads(sdpa_call *call, int32_t place, const te_tensor *heads, te_sdpa_strides *of)
{
    *of = strides_of(heads);
    call->places[place] = heads->data;
    place_strides(call, place, of);
}

static void place_statistics(sdpa_call *call, const te_tensor *statistics)
{
    call->places[TE_SDPA_STATISTICS] = statistics->data;
    place_starts(call, TE_SDPA_STATISTICS, call->key.heads);
}

/* Numbers of all queries, as the statistics lie. */
static int64_t rows_of(const sdpa_call *call)
{
    const te_sdpa_key *key = &call->key;
    if (key->is_packed) return call->problem->query.shape[1] * key->heads;
    return key->batch * key->heads * key->queries;
}

/* The engine for one query subtracts statistics from scores of which both are -Inf. */
static void raise_statistics(sdpa_call *call)
{
    if (call->key.queries != 1 || !call->key.has_bias) return;
    call->unraised = call->places[TE_SDPA_STATISTICS];
    call->places[TE_SDPA_STATISTICS] = take(call, rows_of(call), sizeof(float));
}

/* Whether lines of a bias have memory of their own, in a dtype that goes with the queries'. */
static int is_plain(const te_tensor *bias, te_dtype dtype)
{
    int plain = bias->dtype == dtype || bias->dtype == TE_DTYPE_F32;
    for (int i = 0; i < 4; i++) plain &= bias->shape[i] <= 1 || bias->strides[i] > 0;
    return plain && (bias->shape[3] <= 1 || bias->strides[3] == 1);
}

/* The bias as it is; or one made of mask and bias, where there is a mask, or the bias is not plain,
 * or keys share a line (what all keys have cuDNN takes for nothing, -Inf too), or in a backward
 * queries do, whose gradients cuDNN gets wrong. */
static void place_bias(sdpa_call *call)
{
    const te_tensor *mask = &call->problem->mask, *bias = &call->problem->bias;
    te_sdpa_key *key = &call->key;
    const int64_t scores[4] = {1, 1, key->queries, key->keys};
    const int has_mask = te_tensor_requested(mask), has_bias = te_tensor_requested(bias);
    int64_t dense = 1;
    if (!has_bias && !has_mask) return;
    key->has_bias = 1;
    key->bias_dtype = key->dtype;
    if (has_bias && bias->dtype != (te_dtype)key->dtype) key->bias_dtype = TE_DTYPE_F32;
    call->makes_bias = has_mask || !is_plain(bias, (te_dtype)key->dtype);
    for (int i = 0; i < 4; i++) {
        const int64_t of_bias = has_bias ? bias->shape[i] : 1,
                      of_mask = has_mask ? mask->shape[i] : 1;
        key->bias_shape[i] = of_bias > of_mask ? of_bias : of_mask;
        if ((key->backward || i == 3) && key->bias_shape[i] < scores[i]) {
            key->bias_shape[i] = scores[i];
        }
        call->makes_bias |= key->bias_shape[i] != of_bias;
    }
    for (int i = 3; i >= 0; i--) {
        const int one = key->bias_shape[i] == 1;
        key->bias_strides[i] = call->makes_bias || one ? dense : bias->strides[i];
        dense *= key->bias_shape[i];
    }
    call->places[TE_SDPA_BIAS] = call->makes_bias
                                     ? take(call, dense, te_dtype_bytes((te_dtype)key->bias_dtype))
                                     : bias->data;
}

static void place_lengths(sdpa_call *call, int makes)
{
    const te_attention_problem *p = call->problem;
    te_sdpa_key *key = &call->key;
    const te_tensor *given[] = {&p->query_lengths, &p->key_lengths};
    const int64_t longest[] = {key->queries, key->keys};
    te_attention_begin_params *begin = &call->begin;
    call->has_given_lengths =
        key->is_packed || te_tensor_requested(given[0]) || te_tensor_requested(given[1]);
    key->has_lengths = makes || call->has_given_lengths;
    if (!key->has_lengths) return;
    if (!key->is_packed) begin->batch = begin->entries = key->batch;
    for (int i = 0; i < 2; i++) {
        if (!key->is_packed) {
            begin->sides[i] = (te_attention_side){NULL, given[i]->data, longest[i], longest[i]};
        }
        begin->lengths[i] = take(call, key->batch, sizeof(int32_t));
        call->places[TE_SDPA_QUERY_LENGTHS + i] = begin->lengths[i];
    }
}

/* The diagonal and the window, where something counts from it. The graph has 32-bit numbers: to a
 * window what is further away than all tokens together is as near as that. */
static void place_window(sdpa_call *call)
{
    const te_attention_problem *p = call->problem;
    te_sdpa_key *key = &call->key;
    const int64_t all = key->queries + key->keys;
    const int64_t first = p->diagonal - p->window_left, last = p->diagonal + p->window_right;
    const int has_first = p->window_left >= 0 && first > -all;
    const int has_last = p->window_right >= 0 && last < all;
    key->window_left = key->window_right = -1;
    if (!has_first && !has_last) return;
    key->diagonal = p->diagonal < -all ? -all : p->diagonal > all ? all : p->diagonal;
    key->bottom_right = p->bottom_right != 0;
    if (has_first) key->window_left = key->diagonal - (first < all ? first : all);
    if (has_last) key->window_right = (last > -all ? last : -all) - key->diagonal;
}

static void place_slopes(sdpa_call *call)
{
    const te_tensor *slopes = &call->problem->slopes;
    if (!te_tensor_requested(slopes)) return;
    call->key.has_slopes = 1;
    call->places[TE_SDPA_SLOPES] = slopes->data;
}

static void lay_out(sdpa_call *call, int is_exact)
{
    const te_attention_problem *p = call->problem;
    te_sdpa_key *key = &call->key;
    key->batch = p->query.shape[0];
    key->queries = p->query.shape[1];
    key->heads = p->query.shape[2];
    key->d_k = p->query.shape[3];
    key->keys = p->key.shape[1];
    place_slopes(call);
    if (te_attention_is_packed(p)) te_cuda_attention_bound(p, is_exact, key, &call->begin);
    key->kv_heads = p->key.shape[2];
    key->d_v = p->value.shape[3];
    key->dtype = (uint8_t)p->query.dtype;
    key->scale = p->scale;
    place_window(call);
    if (p->dropout > 0.0F && p->dropout < 1.0F) {
        key->dropout = p->dropout;
        call->places[TE_SDPA_SEED] = (void *)(uintptr_t)p->rng;
        call->places[TE_SDPA_OFFSET] = (void *)(uintptr_t)(p->rng == NULL ? NULL : p->rng + 1);
    }
    place_heads(call, TE_SDPA_QUERY, &p->query, &key->query);
    place_heads(call, TE_SDPA_KEY, &p->key, &key->key);
    place_heads(call, TE_SDPA_VALUE, &p->value, &key->value);
    place_bias(call);
}

/* What is done before cuDNN's kernels. */
static te_status prepare(sdpa_call *call, te_cuda_state *cuda, void *stream)
{
    static const char *const kernels[TE_DTYPE_COUNT] = TE_CUDA_NAMES("te_attention_bias_");
    const te_attention_problem *p = call->problem;
    te_sdpa_key *key = &call->key;
    if (key->has_lengths) TE_TRY(te_cuda_attention_begin(cuda, &call->begin, stream));
    if (te_sdpa_is_fp8(key)) TE_TRY(te_cuda_attention_fp8_begin(cuda, &call->fp8, stream));
    if (call->unraised != NULL) {
        TE_TRY(te_cuda_attention_raise(cuda, call->unraised, call->places[TE_SDPA_STATISTICS],
                                       rows_of(call), stream));
    }
    if (call->makes_bias) {
        const int64_t *n = key->bias_shape, lines = n[0] * n[1] * n[2];
        te_attention_bias_params params = {.mask = te_cuda_view4(&p->mask),
                                           .output = call->places[TE_SDPA_BIAS],
                                           .shape = {n[0], n[1], n[2], n[3]}};
        const te_cuda_call bias = {"attention",
                                   kernels[key->bias_dtype],
                                   {(uint32_t)(lines < MAX_BLOCKS ? lines : MAX_BLOCKS), 1, 1,
                                    TE_ATTENTION_THREADS, 1, 1, 0},
                                   &params,
                                   sizeof params};
        if (te_tensor_requested(&p->bias)) {
            params.bias = te_cuda_view4(&p->bias);
            params.bias_dtype = te_cuda_store(p->bias.dtype);
        }
        TE_TRY(te_cuda_run(cuda, &bias, 1, stream));
    }
    return TE_OK;
}

/* Clears heads (absent ones are passed over) and statistics (NULL: none): all, or where `call` has
 * lengths of its caller, the sequences of which cuDNN writes nothing: those without a query or a
 * key, and wrong ones, which become NaN. */
static te_status clear(te_cuda_state *cuda, const sdpa_call *call, const te_tensor *const heads[3],
                       const te_tensor *statistics, void *stream)
{
    te_attention_clear_params params = {.sides = {call->begin.sides[0], call->begin.sides[1]},
                                        .batch = call->problem->query.shape[0],
                                        .all = !call->has_given_lengths};
    const te_cuda_call launch = {
        "attention",
        "te_attention_clear",
        {CLEAR_BLOCKS,
         (uint32_t)(params.batch < TE_CUDA_MAX_GRID_Y ? params.batch : TE_CUDA_MAX_GRID_Y), 4,
         TE_ATTENTION_THREADS, 1, 1, 0},
        &params,
        sizeof params};
    if (params.batch == 0) return TE_OK;
    if (call->key.is_packed) {
        return te_cuda_attention_gaps(cuda, &call->begin, heads, statistics, stream);
    }
    for (int i = 0; i < 3; i++) {
        if (heads[i] == NULL || !te_tensor_present(heads[i])) continue;
        params.heads[i] = te_cuda_attention_heads(heads[i]);
    }
    if (statistics != NULL && te_tensor_present(statistics)) {
        params.statistics = statistics->data;
        params.rows = statistics->shape[1] * statistics->shape[2];
    }
    return te_cuda_run(cuda, &launch, 1, stream);
}

/* The gradient of a bias is summed from scores in cuDNN's workspace, of which sequences without a
 * query or a key write none. */
static te_status clear_scores(const sdpa_call *call, te_sdpa_plans *plans, void *workspace,
                              size_t size, void *stream)
{
    size_t own = 0;
    TE_TRY(te_sdpa_workspace(plans, &call->key, &own));
    TE_TRY(te_check_workspace(call->op, workspace, size, own));
    if (own == 0) return TE_OK;
    return TE_CU(cuMemsetD8Async, (CUdeviceptr)workspace, 0, own, (CUstream)stream);
}

/* Lays out what cuDNN needs of the workspace, behind what was taken; runs, where there is one. */
static te_status finish(sdpa_call *call, te_cuda_state *cuda, size_t size, void *stream,
                        size_t *bytes)
{
    te_status st = TE_OK;
    te_cuda_scope scope;
    te_sdpa_plans *plans = NULL;
    size_t own = 0;
    void *workspace;
    TE_TRY(te_cuda_enter(cuda, &scope));
    TE_TRY_DONE(te_sdpa_open(cuda, &plans));
    if (bytes != NULL) {
        TE_TRY_DONE(te_sdpa_workspace(plans, &call->key, &own));
        (void)take(call, (int64_t)own, 1);
        *bytes = call->used;
        goto done;
    }
    TE_TRY_DONE(te_check_workspace(call->op, call->base, size, call->used));
    workspace = call->base == NULL ? NULL : call->base + call->used;
    TE_TRY_DONE(prepare(call, cuda, stream));
    if (call->key.wants_bias_grad && call->has_given_lengths) {
        TE_TRY_DONE(clear_scores(call, plans, workspace, size - call->used, stream));
    }
    te_count_attention(TE_DEVICE_CUDA, (te_dtype)call->key.dtype, call->key.backward);
    TE_TRY_DONE(te_sdpa_run(plans, &call->key, call->places, workspace, size - call->used, stream));
    if (te_sdpa_is_fp8(&call->key)) st = te_cuda_attention_fp8_end(cuda, &call->fp8, stream);
done:
    te_cuda_leave(cuda, &scope);
    return st;
}

/* Zeros in a dense result; absent ones are passed over. */
static te_status zero(te_cuda_state *cuda, const te_tensor *result, void *stream)
{
    const size_t bytes = te_dtype_size(result->dtype, te_tensor_numel(result));
    te_status st;
    te_cuda_scope scope;
    if (!te_tensor_present(result) || bytes == 0) return TE_OK;
    TE_TRY(te_cuda_enter(cuda, &scope));
    st = TE_CU(cuMemsetD8Async, (CUdeviceptr)result->data, 0, bytes, (CUstream)stream);
    te_cuda_leave(cuda, &scope);
    return st;
}

/* ---- forward ---- */

static int is_empty(const te_attention_problem *p)
{
    return te_tensor_numel(&p->query) == 0 || te_tensor_numel(&p->key) == 0 ||
           te_attention_batch(p) == 0;
}

/* With lengths, and for one query, the fast engine takes no sink: it joins the results without one,
 * of which statistics have to be known. */
static void place_sink(sdpa_call *call)
{
    const te_tensor *sink = &call->problem->sink;
    te_sdpa_key *key = &call->key;
    if (!te_tensor_requested(sink)) return;
    call->places[TE_SDPA_SINK] = sink->data;
    key->has_sink = !key->has_lengths && key->queries > 1;
    call->joins_sink = !key->has_sink;
    if (!call->joins_sink) return;
    key->keeps_statistics = 1;
    call->places[TE_SDPA_STATISTICS] = take(call, rows_of(call), sizeof(float));
}

static float *take_fp8(sdpa_call *call)
{
    return take(call, TE_ATTENTION_FP8_FLOATS, sizeof(float));
}

static void lay_out_forward(const te_attention_args *args, void *workspace, sdpa_call *call)
{
    te_sdpa_key *key = &call->key;
    memset(call, 0, sizeof *call);
    call->problem = &args->problem;
    call->op = TE_OP_ATTENTION;
    call->base = workspace;
    lay_out(call, 0);
    key->softcap = args->softcap;
    place_heads(call, TE_SDPA_OUTPUT, &args->output, &key->output);
    key->keeps_statistics = te_tensor_requested(&args->statistics);
    place_statistics(call, &args->statistics);
    place_lengths(call, 0);
    place_sink(call);
    if (te_sdpa_is_fp8(key)) {
        te_cuda_attention_fp8_forward(args, take_fp8(call), call->places, &call->fp8);
    }
}

te_status te_cuda_attention_workspace(void *self, te_context *context, const void *args_,
                                      size_t *bytes)
{
    const te_attention_args *args = args_;
    sdpa_call call;
    (void)self;
    *bytes = 0;
    if (is_empty(&args->problem)) return TE_OK;
    lay_out_forward(args, NULL, &call);
    return finish(&call, te_context_state(context), 0, NULL, bytes);
}

te_status te_cuda_attention(void *self, te_context *context, const void *args_, void *stream)
{
    const te_attention_args *args = args_;
    te_cuda_state *cuda = te_context_state(context);
    const te_tensor *const heads[3] = {&args->output};
    sdpa_call call = {.problem = &args->problem};
    (void)self;
    if (is_empty(&args->problem)) {
        if (te_attention_is_fp8(call.problem)) {
            te_cuda_attention_fp8_forward(args, NULL, call.places, &call.fp8);
            TE_TRY(te_cuda_attention_fp8_begin(cuda, &call.fp8, stream));
        }
        return clear(cuda, &call, heads, &args->statistics, stream);
    }
    lay_out_forward(args, args->workspace, &call);
    TE_TRY(finish(&call, cuda, args->workspace_size, stream, NULL));
    if (call.joins_sink) {
        TE_TRY(te_cuda_attention_join_sink(cuda, &call.key, call.places, &args->output,
                                           args->statistics.data, stream));
    }
    if (call.has_given_lengths) {
        TE_TRY(clear(cuda, &call, heads, &args->statistics, stream));
    }
    if (args->problem.dropout < 1.0F) return TE_OK;
    call = (sdpa_call){.problem = &args->problem};
    return clear(cuda, &call, heads, NULL, stream);
}

/* ---- backward ---- */

static int has_no_gradient(const te_attention_problem *p)
{
    return is_empty(p) || p->dropout >= 1.0F;
}

/* A gradient, or scratch for one that nobody wants. */
static void place_gradient(sdpa_call *call, int32_t place, const te_tensor *grad,
                           const te_tensor *like, te_sdpa_strides *of)
{
    if (te_tensor_requested(grad)) {
        place_heads(call, place, grad, of);
        return;
    }
    call->places[place] = take(call, te_tensor_numel(like), te_dtype_bytes(like->dtype));
    of->head = like->shape[3];
    of->token = of->head * like->shape[2];
    of->batch = of->token * like->shape[1];
    place_strides(call, place, of);
}

/* A mask may give the bias that cuDNN reads more batch entries and heads. */
static void place_bias_gradient(sdpa_call *call, const te_tensor *grad)
{
    te_sdpa_key *key = &call->key;
    key->wants_bias_grad = 1;
    for (int i = 0; i < 4; i++) {
        if (grad->shape[i] < key->bias_shape[i]) key->bias_grad_sums |= (uint8_t)(1 << i);
    }
    call->places[TE_SDPA_GRAD_BIAS] = grad->data;
}

/* What a backward sums: of whole sequences, or of packed tokens as their gradients lie, whichever
 * is less. The latter cuDNN takes for multiples of 16 channels, and goes by the queries: where
 * these lie otherwise than their gradients it writes sums elsewhere, past their end too. */
static void place_scratch(sdpa_call *call)
{
    const te_attention_problem *p = call->problem;
    te_sdpa_key *key = &call->key;
    const int alike =
        key->query.token == key->grad_query.token && key->query.head == key->grad_query.head;
    const int64_t rows = key->batch * key->heads * key->queries, group = key->heads / key->kv_heads;
    const int64_t tokens = p->query.shape[1], key_tokens = p->key.shape[1];
    const int64_t of_keys = key_tokens * key->grad_key.token * group;
    const int64_t of_values = key_tokens * key->grad_value.token * group;
    const int64_t whole = 4 * rows * (key->d_k + 1) + 2 * (group > 1) * key->batch * key->heads *
                                                          key->keys * (key->d_k + key->d_v);
    const int64_t packed =
        4 * tokens * (key->grad_query.token + key->heads) + 2 * (group > 1) * (of_keys + of_values);
    key->packs_scratch = key->is_packed && alike && te_sdpa_sums_queries(key) &&
                         key->d_k % 16 == 0 && key->d_v % 16 == 0 && packed < whole;
    call->places[TE_SDPA_ROW_SUM] =
        take(call, key->packs_scratch ? tokens * key->heads : rows, sizeof(float));
    if (te_sdpa_sums_queries(key)) {
        call->places[TE_SDPA_QUERY_SUM] =
            take(call, key->packs_scratch ? tokens * key->grad_query.token : rows * key->d_k,
                 sizeof(float));
    }
    if (te_sdpa_fills_heads(key)) {
        call->places[TE_SDPA_FULL_KEY] = take(call, of_keys, sizeof(uint16_t));
        call->places[TE_SDPA_FULL_VALUE] = take(call, of_values, sizeof(uint16_t));
    }
}

static void lay_out_backward(const te_attention_backward_args *args, void *workspace,
                             sdpa_call *call)
{
    const te_attention_problem *p = &args->problem;
    te_sdpa_key *key = &call->key;
    memset(call, 0, sizeof *call);
    call->problem = p;
    call->op = TE_OP_ATTENTION_BACKWARD;
    call->base = workspace;
    key->backward = 1;
    lay_out(call, args->deterministic != 0);
    key->softcap = args->softcap;
    if (te_tensor_requested(&args->grad_bias)) place_bias_gradient(call, &args->grad_bias);
    key->deterministic = args->deterministic != 0;
    key->grad_dtype = te_sdpa_is_fp8(key) ? (uint8_t)args->grad_output.dtype : 0;
    place_heads(call, TE_SDPA_OUTPUT, &args->output, &key->output);
    place_heads(call, TE_SDPA_GRAD_OUTPUT, &args->grad_output, &key->grad_output);
    place_statistics(call, &args->statistics);
    raise_statistics(call);
    place_gradient(call, TE_SDPA_GRAD_QUERY, &args->grad_query, &p->query, &key->grad_query);
    place_gradient(call, TE_SDPA_GRAD_KEY, &args->grad_key, &p->key, &key->grad_key);
    place_gradient(call, TE_SDPA_GRAD_VALUE, &args->grad_value, &p->value, &key->grad_value);
    place_lengths(call, key->keys % WHOLE_KEYS != 0 || key->queries == 1);
    if (te_sdpa_is_fp8(key)) {
        te_cuda_attention_fp8_backward(args, take_fp8(call), call->places, &call->fp8);
    } else {
        place_scratch(call);
    }
}

te_status te_cuda_attention_backward_workspace(void *self, te_context *context, const void *args_,
                                               size_t *bytes)
{
    const te_attention_backward_args *args = args_;
    sdpa_call call;
    (void)self;
    *bytes = 0;
    if (has_no_gradient(&args->problem)) return TE_OK;
    lay_out_backward(args, NULL, &call);
    return finish(&call, te_context_state(context), 0, NULL, bytes);
}

te_status te_cuda_attention_backward(void *self, te_context *context, const void *args_,
                                     void *stream)
{
    const te_attention_backward_args *args = args_;
    te_cuda_state *cuda = te_context_state(context);
    const te_tensor *const grads[3] = {&args->grad_query, &args->grad_key, &args->grad_value};
    sdpa_call call = {.problem = &args->problem};
    (void)self;
    if (has_no_gradient(&args->problem)) {
        if (te_attention_is_fp8(call.problem)) {
            te_cuda_attention_fp8_backward(args, NULL, call.places, &call.fp8);
            TE_TRY(te_cuda_attention_fp8_begin(cuda, &call.fp8, stream));
        }
        TE_TRY(zero(cuda, &args->grad_bias, stream));
        TE_TRY(zero(cuda, &args->grad_sink, stream));
        return clear(cuda, &call, grads, NULL, stream);
    }
    lay_out_backward(args, args->workspace, &call);
    TE_TRY(finish(&call, cuda, args->workspace_size, stream, NULL));
    if (te_tensor_requested(&args->grad_sink)) {
        call.places[TE_SDPA_SINK] = args->problem.sink.data;
        call.places[TE_SDPA_STATISTICS] = args->statistics.data;
        TE_TRY(te_cuda_attention_sink_grad(cuda, &call.key, call.places, args->grad_sink.data,
                                           stream));
    }
    return call.has_given_lengths ? clear(cuda, &call, grads, NULL, stream) : TE_OK;
}
