/* SPDX-License-Identifier: Apache-2.0
 *
 * test_linear.c - an FP8 linear layer from C alone: plans for forward and backward, the memory that
 * they ask for, and the update of the scales. Inputs are small integers, which FP8 holds exactly at
 * scale 1, so every result must be exact.
 */
#include "plans.h"

enum { TOKENS = 9, IN = 40, OUT = 24, SLOTS = 256, HISTORY = 4 };
enum { FORWARD_SLOT = 5, BACKWARD_SLOT = 7 };

typedef struct layer {
    float input[TOKENS * IN], weight[OUT * IN], bias[OUT], grad_output[TOKENS * OUT];
    float output[TOKENS * OUT], grad_input[TOKENS * IN], grad_weight[OUT * IN], grad_bias[OUT];
    float forward_scale[SLOTS], forward_history[HISTORY * SLOTS];
    float backward_scale[SLOTS], backward_history[HISTORY * SLOTS];
    void *saved;
} layer;

static void run_layer(te_context *context, layer *l, int64_t plan, int backward)
{
    const plan_tensor table[] = {
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
        {NULL, NULL, 0, 0},
    };
    const int32_t slots[2] = {FORWARD_SLOT, BACKWARD_SLOT};
    plan_run(context, plan, TOKENS, table, &l->saved, slots);
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
    args.scale = (te_tensor){scale, TE_DTYPE_F32, plan_cpu, 1, {SLOTS}, {1}};
    args.history = (te_tensor){history, TE_DTYPE_F32, plan_cpu, 2, {HISTORY, SLOTS}, {SLOTS, 1}};
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
    plan_fill_integers(l.input, TOKENS * IN, 4, 1);
    plan_fill_integers(l.weight, OUT * IN, 2, 2);
    plan_fill_integers(l.bias, OUT, 8, 3);
    plan_fill_integers(l.grad_output, TOKENS * OUT, 3, 4);
    for (int i = 0; i < SLOTS; i++) l.forward_scale[i] = l.backward_scale[i] = 1.0F;

    OK(te_context_create(plan_cpu, &context));
    OK(te_plan_linear(&desc, &forward));
    OK(te_plan_linear(&desc, &again));
    EXPECT(forward == again, "one description, two ids");
    desc.direction = TE_LINEAR_BACKWARD;
    OK(te_plan_linear(&desc, &backward));
    run_layer(context, &l, forward, 0);
    run_layer(context, &l, backward, 1);
    check_products(&l);
    check_scaling(context, &l);
    EXPECT(plan_count("gemm.cpu.e4m3.e4m3") == 1, "forward GEMMs");
    EXPECT(plan_count("gemm.cpu.e5m2.e4m3") == 2, "backward GEMMs");

    desc.in_features = 0;
    EXPECT(te_plan_linear(&desc, &again) == TE_ERROR_INVALID, "no features");
    EXPECT(strstr(te_last_error(), "in_features = 0") != NULL, "%s", te_last_error());
    te_context_destroy(context);
    te_context_destroy(NULL);
    free(l.saved);
    (void)puts("linear: ok");
    return 0;
}
