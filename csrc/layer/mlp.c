/* SPDX-License-Identifier: Apache-2.0
 *
 * mlp.c - y = fc2(activation(fc1(norm(x)))) as plans, of two parts: the first one's input is made
 * by the norm, the second one's by the activation, and the first one's output gradient by the
 * activation's derivative.
 */
#include "core/status.h"
#include "layer/linear_desc.h"
#include "layer/part.h"

#include <string.h>

typedef struct mlp {
    te_plan plan;
    const te_mlp_desc *desc;
    te_part parts[2];
    te_part *fc1, *fc2;
    int16_t input;
    int16_t before; /* fc1's output, before the activation */
} mlp;

static int recomputes(const mlp *m)
{
    return (m->desc->flags & TE_MLP_RECOMPUTE) != 0;
}

/* The GEMM's epilogue applies it where the result is 16-bit and not cast to FP8 anyway. cuBLASLt's
 * tanh is not as accurate as fp32 results would show. */
static int in_epilogue(const mlp *m)
{
    return !te_part_is_fp8(m->fc1) && m->desc->activation == TE_ACTIVATION_GELU &&
           m->fc1->desc->output_dtype != TE_DTYPE_F32;
}

static int needs_backward(const mlp *m)
{
    return te_part_needs_dgrad(m->fc2);
}

/* The backward of a recompute needs what fc1 made: for its own gradient, or for fc2's weight. */
static int repeats(const mlp *m)
{
    return recomputes(m) && (needs_backward(m) || te_part_has(m->fc2, TE_LINEAR_WGRAD_NEEDED));
}

static int16_t add_leading(mlp *m, const char *name, te_buffer_role role)
{
    return te_plan_leading(&m->plan, name, role, (te_dtype)m->fc1->desc->output_dtype, 1,
                           m->fc1->desc->in_features);
}

static int16_t add_wide(mlp *m, const char *name, te_buffer_role role, int64_t columns)
{
    return te_plan_matrix(&m->plan, name, role, (te_dtype)m->fc1->desc->output_dtype, te_rows(1, 1),
                          te_constant(columns));
}

static te_producer activation(const mlp *m, te_op op)
{
    te_producer producer = te_plain_producer(m->before);
    producer.op = op;
    producer.kind = m->desc->activation;
    producer.params = m->desc->params;
    return producer;
}

/* What the backward needs of the forward, in one order for all plans. */
static void add_saved(mlp *m)
{
    if (needs_backward(m) || repeats(m)) te_part_add_statistics(m->fc1, TE_ROLE_SAVED);
    m->fc1->input = te_norm_producer(m->fc1, m->input);
    m->fc2->input = activation(m, TE_OP_ACTIVATION);
    if (!needs_backward(m) && !te_part_has(m->fc2, TE_LINEAR_WGRAD_NEEDED)) return;
    if (recomputes(m)) {
        te_part_add_saved_scales(m->fc1);
        te_part_add_saved_scales(m->fc2);
        return;
    }
    te_part_add_saved(m->fc1);
    if (needs_backward(m)) {
        m->before = add_wide(m, "fc1_output", TE_ROLE_SAVED, m->fc1->desc->out_features);
    }
    m->fc2->input.input = m->before;
    te_part_add_saved(m->fc2);
}

/* fc1's GEMM: with the activation in its epilogue it writes what fc2 reads. */
static te_part_output fc1_output(mlp *m)
{
    te_part_output output = {m->before, TE_NO_BUFFER, TE_EPILOGUE_NONE};
    if (!in_epilogue(m)) return output;
    if (m->fc2->input_wide == TE_NO_BUFFER) {
        m->fc2->input_wide =
            add_wide(m, "fc2_input_wide", TE_ROLE_SCRATCH, m->fc2->desc->in_features);
    }
    output.d = m->fc2->input_wide;
    output.aux = m->before; /* absent where no backward reads it */
    output.epilogue = TE_EPILOGUE_GELU;
    m->fc2->input = te_plain_producer(m->fc2->input_wide);
    return output;
}

static void add_fc1_output(mlp *m)
{
    if (m->before != TE_NO_BUFFER) return;
    m->before = add_wide(m, "fc1_output", TE_ROLE_SCRATCH, m->fc1->desc->out_features);
    m->fc2->input.input = m->before;
}

static void build_forward(mlp *m)
{
    te_part_output first;
    te_part_output second = {TE_NO_BUFFER, TE_NO_BUFFER, TE_EPILOGUE_NONE};
    m->plan.kind = "mlp_forward";
    m->input = te_part_add_input(m->fc1);
    te_part_add_norm_parameters(m->fc1);
    for (int i = 0; i < 2; i++) {
        te_part_add_weight(&m->parts[i]);
        te_part_add_bias(&m->parts[i]);
    }
    te_part_add_state(m->parts, 2);
    second.d = te_plan_leading(&m->plan, "output", TE_ROLE_OUTPUT,
                               (te_dtype)m->fc2->desc->output_dtype, 1, m->fc2->desc->out_features);
    if (te_part_has(m->fc1, TE_LINEAR_RETURN_NORM)) {
        m->fc1->norm_output = add_leading(m, "norm_output", TE_ROLE_OUTPUT);
    }
    for (int i = 0; i < 2; i++) te_part_add_weight_cache(&m->parts[i]);
    if (!needs_backward(m) && !repeats(m)) te_part_add_statistics(m->fc1, TE_ROLE_SCRATCH);
    add_saved(m);
    if (!in_epilogue(m)) add_fc1_output(m);
    first = fc1_output(m);
    te_part_forward(m->fc1, &first);
    te_part_forward(m->fc2, &second);
}

/* Arguments of a backward besides the gradients, in the order of the forward's. */
static void add_backward_arguments(mlp *m)
{
    int norm = m->fc1->desc->norm != 0 && te_part_needs_dgrad(m->fc1);
    int again = repeats(m);
    int plain_wgrad =
        !te_part_is_fp8(m->fc1) && m->fc1->desc->norm == 0 && te_part_wgrad_now(m->fc1);
    if (norm || again || plain_wgrad) m->input = te_part_add_input(m->fc1);
    if (norm || again) te_part_add_norm_parameters(m->fc1);
    if (again) {
        te_part_add_weight(m->fc1);
        te_part_add_bias(m->fc1);
    }
    if (te_part_needs_dgrad(m->fc1)) te_part_add_weight_for_dgrad(m->fc1);
    if (needs_backward(m)) te_part_add_weight_for_dgrad(m->fc2);
    if (te_part_has(m->fc1, TE_LINEAR_RETURN_NORM) && !te_part_is_fp8(m->fc1) && !again &&
        te_part_wgrad_now(m->fc1)) {
        m->fc1->norm_output = m->fc1->input_wide = add_leading(m, "norm_output", TE_ROLE_INPUT);
    }
    if (needs_backward(m) || te_part_has(m->fc2, TE_LINEAR_WGRAD_NEEDED)) {
        te_part_add_state(m->parts, 2);
    }
}

/* Norm, fc1 and activation once more, with the scales of the forward: the same bits. */
static void forward_again(mlp *m)
{
    te_part_output first;
    m->before = add_wide(m, "fc1_output", TE_ROLE_SCRATCH, m->fc1->desc->out_features);
    m->fc2->input.input = m->before;
    m->fc1->input.flags |= TE_NORM_STATISTICS_GIVEN;
    m->fc1->input.output = TE_NO_BUFFER;
    first = fc1_output(m);
    te_part_forward_again(m->fc1, &first);
    if (!in_epilogue(m) && te_part_has(m->fc2, TE_LINEAR_WGRAD_NEEDED)) {
        te_part_input_again(m->fc2);
    }
}

static void build_backward(mlp *m)
{
    te_part_gradients first = {TE_NO_BUFFER, TE_NO_BUFFER, TE_NO_BUFFER};
    te_part_gradients second = {TE_NO_BUFFER, TE_NO_BUFFER, TE_NO_BUFFER};
    te_norm_gradients norm = {TE_NO_BUFFER, TE_NO_BUFFER, TE_NO_BUFFER, TE_NO_BUFFER, TE_NO_BUFFER};
    int with_norm = m->fc1->desc->norm != 0 && te_part_needs_dgrad(m->fc1);
    m->plan.kind = "mlp_backward";
    m->fc2->grad = te_plain_producer(te_part_add_grad_output(m->fc2));
    if (with_norm && te_part_has(m->fc1, TE_LINEAR_RETURN_NORM)) {
        norm.grad_add = add_leading(m, "grad_norm_output", TE_ROLE_INPUT);
    }
    add_backward_arguments(m);
    te_part_add_norm_gradients(m->fc1, &norm);
    if (te_part_wgrad_now(m->fc1)) first.weight = te_part_add_grad_weight(m->fc1);
    first.bias = te_part_add_grad_bias(m->fc1);
    if (te_part_wgrad_now(m->fc2)) second.weight = te_part_add_grad_weight(m->fc2);
    second.bias = te_part_add_grad_bias(m->fc2);
    add_saved(m);
    if (repeats(m)) forward_again(m);
    if (in_epilogue(m) && m->fc2->input_wide != TE_NO_BUFFER) {
        m->fc2->input = te_plain_producer(m->fc2->input_wide);
    }
    if (needs_backward(m)) {
        second.input = add_wide(m, "grad_activation", TE_ROLE_SCRATCH, m->fc2->desc->in_features);
    }
    te_part_backward(m->fc2, &second);
    if (!needs_backward(m)) return;
    m->fc1->grad = activation(m, TE_OP_ACTIVATION_BACKWARD);
    m->fc1->grad.grad_output = second.input;
    if (!te_part_is_fp8(m->fc1) &&
        !te_activation_is_gated((te_activation_kind)m->desc->activation)) {
        m->fc1->grad.output = second.input; /* in place */
    }
    first.input = norm.input;
    if (with_norm) {
        norm.grad_output = first.input =
            add_wide(m, "grad_norm", TE_ROLE_SCRATCH, m->fc1->desc->in_features);
    }
    te_part_backward(m->fc1, &first);
    if (with_norm) te_part_norm_backward(m->fc1, m->input, &norm);
}

/* The weight gradients that an earlier backward put off. */
static void build_wgrad(mlp *m)
{
    int16_t grad_weight[2] = {TE_NO_BUFFER, TE_NO_BUFFER};
    m->plan.kind = "mlp_wgrad";
    m->fc1->grad.op = TE_OP_ACTIVATION_BACKWARD; /* what the backward left of it is an input */
    for (int i = 0; i < 2; i++) {
        if (te_part_has(&m->parts[i], TE_LINEAR_WGRAD_NEEDED)) te_part_add_deferred(&m->parts[i]);
    }
    if (te_part_has(m->fc1, TE_LINEAR_WGRAD_NEEDED) && !te_part_is_fp8(m->fc1)) {
        if (m->fc1->desc->norm == 0) {
            m->input = te_part_add_input(m->fc1);
        } else if (te_part_has(m->fc1, TE_LINEAR_RETURN_NORM)) {
            m->fc1->norm_output = m->fc1->input_wide = add_leading(m, "norm_output", TE_ROLE_INPUT);
        }
    }
    for (int i = 0; i < 2; i++) {
        if (!te_part_has(&m->parts[i], TE_LINEAR_WGRAD_NEEDED)) continue;
        grad_weight[i] = te_part_add_grad_weight(&m->parts[i]);
    }
    add_saved(m);
    for (int i = 1; i >= 0; i--) {
        if (grad_weight[i] != TE_NO_BUFFER) {
            te_part_wgrad(&m->parts[i], grad_weight[i], TE_NO_BUFFER);
        }
    }
}

te_status te_plan_mlp(const te_mlp_desc *desc, int64_t *id)
{
    mlp m;
    const te_plan *found = NULL;
    TE_TRY(te_mlp_check(desc));
    TE_TRY(te_plan_find_desc("mlp", desc, sizeof *desc, id, &found));
    if (found != NULL) return TE_OK;
    memset(&m, 0, sizeof m);
    m.desc = desc;
    m.fc1 = &m.parts[0];
    m.fc2 = &m.parts[1];
    m.input = m.before = TE_NO_BUFFER;
    te_part_init(m.fc1, &m.plan, &desc->fc1, TE_PART_FC1);
    te_part_init(m.fc2, &m.plan, &desc->fc2, TE_PART_FC2);
    switch (desc->direction) {
    case TE_LINEAR_FORWARD:
        build_forward(&m);
        break;
    case TE_LINEAR_BACKWARD:
        build_backward(&m);
        break;
    default:
        build_wgrad(&m);
        break;
    }
    return te_plan_intern(&m.plan, "mlp", desc, sizeof *desc);
}
