/* SPDX-License-Identifier: Apache-2.0
 *
 * test_linear.c - an FP8 linear layer from C alone: plans for forward and backward, the memory that
 * they ask for, and the update of the scales. Inputs are small integers, which FP8 holds exactly at
 * scale 1, so every result must be exact.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <transformer_engine.h>

enum { TOKENS = 9, IN = 40, OUT = 24, SLOTS = 256, HISTORY = 4, MAX_BUFFERS = 32 };
enum { FORWARD_SLOT = 5, BACKWARD_SLOT = 7 };

#define EXPECT(condition, ...)                                                                     \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                  \
            (void)fprintf(stderr, __VA_ARGS__);                                                    \
            (void)fputc('\n', stderr);                                                             \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
#define OK(call) EXPECT((call) == TE_OK, "%s", te_last_error())

typedef struct layer {
    float input[TOKENS * IN], weight[OUT * IN], bias[OUT], grad_output[TOKENS * OUT];
    float output[TOKENS * OUT], grad_input[TOKENS * IN], grad_weight[OUT * IN], grad_bias[OUT];
    float forward_scale[SLOTS], forward_history[HISTORY * SLOTS];
    float backward_scale[SLOTS], backward_history[HISTORY * SLOTS];
    void *saved;
} layer;

static const te_device cpu = {TE_DEVICE_CPU, 0};

static void fill_integers(float *values, int count, int largest, unsigned seed)
{
    for (int i = 0; i < count; i++) {
        seed = seed * 1664525U + 1013904223U;
        values[i] = (float)((int)(seed >> 16) % (2 * largest + 1) - largest);
    }
}

/* The tensor behind a plan's buffer, by its name. */
static te_tensor find_buffer(layer *l, const char *name, int backward)
{
    const struct {
        const char *name;
        float *data;
        int rows, columns; /* 0 rows: a vector */
    } table[] = {
        {"input", l->input, TOKENS, IN},
        {"weight", l->weight, OUT, IN},
        {"bias", l->bias, 0, OUT},
        {"output", l->output, TOKENS, OUT},
        {"grad_output", l->grad_output, TOKENS, OUT},
        {"grad_input", l->grad_input, TOKENS, IN},
        {"grad_weight", l->grad_weight, OUT, IN},
        {"grad_bias", l->grad_bias, 0, OUT},
        {"scale", backward ? l->backward_scale : l->forward_scale, 0, SLOTS},
        {"history", backward ? l->backward_history : l->forward_history, HISTORY, SLOTS},
    };
    te_tensor tensor;
    memset(&tensor, 0, sizeof tensor);
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (strcmp(table[i].name, name) != 0) continue;
        tensor.data = table[i].data;
        tensor.dtype = TE_DTYPE_F32;
        tensor.device = cpu;
        tensor.ndim = table[i].rows > 0 ? 2 : 1;
        tensor.shape[0] = table[i].rows > 0 ? table[i].rows : table[i].columns;
        tensor.strides[0] = table[i].rows > 0 ? table[i].columns : 1;
        tensor.shape[1] = table[i].rows > 0 ? table[i].columns : 0;
        tensor.strides[1] = 1;
        return tensor;
    }
    EXPECT(0, "the plan wants a buffer %s", name);
    return tensor;
}

static void run_plan(te_context *context, layer *l, int64_t plan, int backward)
{
    te_tensor buffers[MAX_BUFFERS];
    te_plan_info info;
    te_plan_sizes sizes;
    te_plan_call call;
    size_t scratch_bytes = 0;
    int32_t next = 0;
    memset(buffers, 0, sizeof buffers);
    memset(&call, 0, sizeof call);
    OK(te_plan_describe(plan, &info));
    OK(te_plan_infer(plan, TOKENS, &sizes, NULL));
    OK(te_plan_scratch(context, plan, TOKENS, &scratch_bytes));
    for (int i = 0; i < info.buffer_count; i++) {
        te_buffer_role role = info.buffers[i].role;
        if (role == TE_ROLE_SAVED || role == TE_ROLE_SCRATCH) continue;
        buffers[i] = find_buffer(l, info.buffers[i].name, backward);
    }
    if (!backward) l->saved = aligned_alloc(256, ((size_t)sizes.saved_bytes + 255) / 256 * 256);
    call.size = sizeof call;
    call.plan = plan;
    call.rows = TOKENS;
    call.last = -1;
    call.buffers = buffers;
    call.saved = l->saved;
    call.scratch_size = (scratch_bytes + 255) / 256 * 256;
    call.scratch = aligned_alloc(256, call.scratch_size);
    call.slots[0] = FORWARD_SLOT;
    call.slots[1] = BACKWARD_SLOT;
    EXPECT(call.saved != NULL && call.scratch != NULL, "no memory");
    OK(te_plan_run(context, &call, &next, NULL));
    EXPECT(next == info.stage_count, "stopped at stage %d of %d", next, info.stage_count);
    free(call.scratch);
}

static void check_products(const layer *l)
{
    for (int t = 0; t < TOKENS; t++) {
        for (int o = 0; o < OUT; o++) {
            float sum = l->bias[o];
            for (int i = 0; i < IN; i++) sum += l->input[t * IN + i] * l->weight[o * IN + i];
            EXPECT(l->output[t * OUT + o] == sum, "output[%d][%d]", t, o);
        }
        for (int i = 0; i < IN; i++) {
            float sum = 0;
            for (int o = 0; o < OUT; o++)
                sum += l->grad_output[t * OUT + o] * l->weight[o * IN + i];
            EXPECT(l->grad_input[t * IN + i] == sum, "grad_input[%d][%d]", t, i);
        }
    }
    for (int o = 0; o < OUT; o++) {
        float bias = 0;
        for (int t = 0; t < TOKENS; t++) bias += l->grad_output[t * OUT + o];
        EXPECT(l->grad_bias[o] == bias, "grad_bias[%d]", o);
        for (int i = 0; i < IN; i++) {
            float sum = 0;
            for (int t = 0; t < TOKENS; t++)
                sum += l->grad_output[t * OUT + o] * l->input[t * IN + i];
            EXPECT(l->grad_weight[o * IN + i] == sum, "grad_weight[%d][%d]", o, i);
        }
    }
}

static float largest(const float *values, int count)
{
    float amax = 0;
    for (int i = 0; i < count; i++) {
        float magnitude = values[i] < 0 ? -values[i] : values[i];
        if (magnitude > amax) amax = magnitude;
    }
    return amax;
}

static void update(te_context *context, float *scale, float *history, float fp8_max)
{
    te_scaling_update_args args;
    memset(&args, 0, sizeof args);
    args.size = sizeof args;
    args.scale = (te_tensor){scale, TE_DTYPE_F32, cpu, 1, {SLOTS}, {1}};
    args.history = (te_tensor){history, TE_DTYPE_F32, cpu, 2, {HISTORY, SLOTS}, {SLOTS, 1}};
    args.fp8_max = fp8_max;
    args.algo = TE_AMAX_MAX;
    OK(te_scaling_update(context, &args, NULL));
}

static void check_scaling(te_context *context, layer *l)
{
    const float amax[3] = {largest(l->input, TOKENS * IN), largest(l->weight, OUT * IN),
                           largest(l->grad_output, TOKENS * OUT)};
    EXPECT(l->forward_history[FORWARD_SLOT] == amax[0], "amax of the input");
    EXPECT(l->forward_history[FORWARD_SLOT + 1] == amax[1], "amax of the weight");
    EXPECT(l->backward_history[BACKWARD_SLOT] == amax[2], "amax of the gradient");
    update(context, l->forward_scale, l->forward_history, 448.0F);
    update(context, l->backward_scale, l->backward_history, 57344.0F);
    EXPECT(l->forward_scale[FORWARD_SLOT] == 448.0F / amax[0], "scale of the input");
    EXPECT(l->forward_scale[FORWARD_SLOT + 1] == 448.0F / amax[1], "scale of the weight");
    EXPECT(l->backward_scale[BACKWARD_SLOT] == 57344.0F / amax[2], "scale of the gradient");
    EXPECT(l->forward_scale[0] == 1.0F, "an unused slot");
}

static void check_counters(void)
{
    te_counter counters[64];
    size_t count = 0;
    int64_t forward = 0;
    int64_t backward = 0;
    OK(te_counters_read(counters, 64, &count));
    for (size_t i = 0; i < count; i++) {
        if (strcmp(counters[i].name, "gemm.cpu.e4m3.e4m3") == 0) forward = counters[i].value;
        if (strcmp(counters[i].name, "gemm.cpu.e5m2.e4m3") == 0) backward = counters[i].value;
    }
    EXPECT(forward == 1 && backward == 2, "FP8 GEMMs: %d and %d", (int)forward, (int)backward);
}

int main(void)
{
    static layer l;
    te_context *context = NULL;
    te_linear_desc desc;
    int64_t forward = 0;
    int64_t backward = 0;
    int64_t again = 0;
    memset(&desc, 0, sizeof desc);
    desc.size = sizeof desc;
    desc.direction = TE_LINEAR_FORWARD;
    desc.in_features = IN;
    desc.out_features = OUT;
    desc.input_dtype = desc.weight_dtype = desc.bias_dtype = TE_DTYPE_F32;
    desc.output_dtype = desc.grad_weight_dtype = TE_DTYPE_F32;
    desc.recipe = TE_RECIPE_DELAYED;
    desc.forward_fp8 = TE_DTYPE_E4M3;
    desc.backward_fp8 = TE_DTYPE_E5M2;
    desc.flags = TE_LINEAR_BIAS | TE_LINEAR_DGRAD | TE_LINEAR_WGRAD_NEEDED;
    desc.gather = 1;
    fill_integers(l.input, TOKENS * IN, 4, 1);
    fill_integers(l.weight, OUT * IN, 2, 2);
    fill_integers(l.bias, OUT, 8, 3);
    fill_integers(l.grad_output, TOKENS * OUT, 3, 4);
    for (int i = 0; i < SLOTS; i++) l.forward_scale[i] = l.backward_scale[i] = 1.0F;

    OK(te_context_create(cpu, &context));
    OK(te_plan_linear(&desc, &forward));
    OK(te_plan_linear(&desc, &again));
    EXPECT(forward == again, "one description, two ids");
    desc.direction = TE_LINEAR_BACKWARD;
    OK(te_plan_linear(&desc, &backward));
    run_plan(context, &l, forward, 0);
    run_plan(context, &l, backward, 1);
    check_products(&l);
    check_scaling(context, &l);
    check_counters();

    desc.in_features = 0;
    EXPECT(te_plan_linear(&desc, &again) == TE_ERROR_INVALID, "no features");
    EXPECT(strstr(te_last_error(), "in_features = 0") != NULL, "%s", te_last_error());
    te_context_destroy(context);
    te_context_destroy(NULL);
    free(l.saved);
    (void)puts("linear: ok");
    return 0;
}
