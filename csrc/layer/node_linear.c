/* SPDX-License-Identifier: Apache-2.0
 *
 * node_linear.c - y = x W^T + b as a node: three GEMMs, and the casts of what they multiply.
 *
 * With a recipe the forward casts input and weight row-wise for its GEMM and, in the same pass, the
 * input column-wise for the weight gradient; the scales of both are saved, so that the backward
 * reads what the forward used and the state may move on. The weight is cast again, column-wise, in
 * the backward, to the same bits. An operand that arrives quantized is read as it comes.
 */
#include "core/status.h"
#include "layer/build.h"
#include "layer/recipe.h"

static const char *const stage_names[] = {
#define X(NAME, name) [TE_LINEAR_STAGE_##NAME] = #name,
    TE_LINEAR_STAGES(X)
#undef X
};

static int is_external(const te_build *build, int32_t k, te_linear_stage number)
{
    return (te_node(build, k)->external >> number & 1U) != 0;
}

static te_stage *mark_stage(te_build *build, int32_t k, te_linear_stage number, te_stage *stage)
{
    stage->external = is_external(build, k, number);
    stage->node = k;
    stage->step = (int32_t)number;
    return stage;
}

/* A stage of the node; the caller's, where the graph says so. */
static te_stage *add_stage(te_build *build, int32_t k, te_linear_stage number, te_op op)
{
    te_stage *stage = te_add(build, k, te_node(build, k)->name, stage_names[number], op);
    return mark_stage(build, k, number, stage);
}

/* A stage that is the caller's alone, over one buffer; none where the graph does not ask for it. */
static void add_external(te_build *build, int32_t k, te_linear_stage number, int32_t buffer)
{
    te_stage *stage;
    if (!is_external(build, k, number)) return;
    stage = add_stage(build, k, number, TE_OP_QUANTIZE);
    te_stage_use(&build->plan, stage, 0, buffer);
}

static int is_quantized(const te_build *build, int32_t k)
{
    return te_is_quantized(&te_node(build, k)->quantization);
}

static const te_recipe_rule *rule_of(const te_build *build, int32_t k, te_operand_role role)
{
    return te_recipe_rule_of(&te_node(build, k)->quantization, role);
}

static int32_t form(te_build *build, int32_t k, te_operand_role role, te_link link)
{
    return te_get(build, link, te_operand_of(k, role));
}

static const te_form_rule *form_rule(const te_build *build, int32_t k, te_operand_role role,
                                     te_link form)
{
    const te_recipe_rule *rule = rule_of(build, k, role);
    return form == TE_LINK_ROW ? &rule->row : &rule->column;
}

/* The link of the scales of a form. */
static te_link scales_of(const te_build *build, int32_t k, te_operand_role role, te_link form)
{
    return form_rule(build, k, role, form)->scales;
}

static int arrives(const te_build *build, int32_t k, te_operand_role role)
{
    return te_operand_arrives(build, te_operand_of(k, role));
}

/* Sets of forms. */
enum { ROW = 1, COLUMN = 2 };

static int set_of(te_link form)
{
    return form == TE_LINK_ROW ? ROW : form == TE_LINK_COLUMN ? COLUMN : 0;
}

static int32_t weight_of(const te_build *build, int32_t k)
{
    return te_node(build, k)->inputs[1];
}

static int32_t bias_of(const te_build *build, int32_t k)
{
    return te_node(build, k)->inputs[2];
}

static int wants(const te_build *build, int32_t value, uint32_t flag)
{
    return value >= 0 && (te_value(build, value)->flags & flag) != 0;
}

static int needs_grad_input(const te_build *build, int32_t k)
{
    return build->values[te_node(build, k)->inputs[0]].needs_grad;
}

static int needs_grad_weight(const te_build *build, int32_t k)
{
    return wants(build, weight_of(build, k), TE_VALUE_GRADIENT);
}

/* GEMMs of a backward, as a set. */
static uint32_t gradients_of(const te_build *build, int32_t k)
{
    return (needs_grad_input(build, k) ? 1U << TE_GEMM_GRAD_INPUT : 0) |
           (needs_grad_weight(build, k) ? 1U << TE_GEMM_GRAD_WEIGHT : 0);
}

/* The forms of an operand that these GEMMs read. */
static int read_by(const te_build *build, int32_t k, te_operand_role role, uint32_t gemms)
{
    int forms = 0;
    for (int gemm = 0; gemm < TE_LINEAR_GEMMS; gemm++) {
        if ((gemms >> gemm & 1U) != 0) forms |= set_of(rule_of(build, k, role)->usage[gemm]);
    }
    return forms;
}

/* ---- casts -------------------------------------------------------------------------------- */

/* Stages of an operand's cast. */
static const struct cast_stages {
    te_linear_stage produce, amax, reduce, quantize, again;
} stages_of[] = {
    [TE_INPUT_OPERAND] = {TE_LINEAR_STAGE_PRODUCE_INPUT, TE_LINEAR_STAGE_AMAX_INPUT,
                          TE_LINEAR_STAGE_REDUCE_AMAX_INPUT, TE_LINEAR_STAGE_QUANTIZE_INPUT,
                          TE_LINEAR_STAGE_REQUANTIZE_INPUT},
    [TE_WEIGHT_OPERAND] = {TE_LINEAR_STAGE_QUANTIZE_WEIGHT, TE_LINEAR_STAGE_AMAX_WEIGHT,
                           TE_LINEAR_STAGE_REDUCE_AMAX_WEIGHT, TE_LINEAR_STAGE_QUANTIZE_WEIGHT,
                           TE_LINEAR_STAGE_REQUANTIZE_WEIGHT},
    [TE_GRAD_OPERAND] = {TE_LINEAR_STAGE_PRODUCE_GRAD_OUTPUT, TE_LINEAR_STAGE_AMAX_GRAD_OUTPUT,
                         TE_LINEAR_STAGE_REDUCE_AMAX_GRAD_OUTPUT,
                         TE_LINEAR_STAGE_QUANTIZE_GRAD_OUTPUT,
                         TE_LINEAR_STAGE_QUANTIZE_GRAD_OUTPUT},
};

/* Where an operand comes from: a buffer in high precision, or an operator that has not run yet. */
typedef struct source {
    te_operand_role role;
    int32_t value;
    int32_t pending; /* node whose operator makes it; TE_NOBODY: it is in `wide` */
    int32_t wide;
} source;

static source source_of(te_build *build, int32_t k, te_operand_role role)
{
    const te_node_desc *node = te_node(build, k);
    int gradient = role == TE_GRAD_OPERAND;
    source from = {role, gradient ? node->output : node->inputs[role], TE_NOBODY, TE_NO_BUFFER};
    const te_value_state *state = &build->values[from.value];
    if (gradient) {
        from.pending = state->grad_pending;
        if (from.pending == TE_NOBODY) from.wide = te_grad(build, from.value);
        return from;
    }
    if (build->direction != TE_DIRECTION_FORWARD) te_make_again(build, from.value);
    from.pending = state->pending;
    if (from.pending == TE_NOBODY) {
        from.wide = te_wide(build, from.value, node->name, stage_names[stages_of[role].produce]);
    }
    return from;
}

/* A stage that reads the source, to cast or to measure it: by `plain`, or by its operator, which
 * finds its statistics in a second pass. */
static te_stage *stage_over(te_build *build, int32_t k, te_linear_stage number, const source *from,
                            te_op plain, int second)
{
    const te_node_rules *rules;
    const char *prefix = te_node(build, k)->name;
    te_stage *stage;
    if (from->pending == TE_NOBODY) {
        stage = add_stage(build, k, number, plain);
        te_use_as(build, stage, "input", from->wide);
        return stage;
    }
    rules = te_rules_of(build, from->pending);
    stage = from->role == TE_GRAD_OPERAND
                ? rules->produce_grad(build, from->pending, prefix, stage_names[number])
                : rules->produce(build, from->pending, prefix, stage_names[number],
                                 second || build->values[from->value].again);
    return mark_stage(build, k, number, stage);
}

/* The source in high precision, written by its operator alone, which sums its columns too. */
static void write_source(te_build *build, int32_t k, source *from, int32_t bias_grad)
{
    int gradient = from->role == TE_GRAD_OPERAND;
    te_link link = gradient ? TE_LINK_GRADIENT : TE_LINK_VALUE;
    te_cast_to only = te_cast_nothing();
    te_stage *stage;
    if (from->pending == TE_NOBODY) return;
    only.wide = gradient ? TE_NO_BUFFER : te_find(build, link, from->value);
    if (only.wide == TE_NO_BUFFER) {
        stage = stage_over(build, k, stages_of[from->role].produce, from, TE_OP_QUANTIZE, 0);
        only.wide = te_get(build, link, from->value);
        only.bias_grad = bias_grad;
        te_ask_cast(build, stage, &only);
    }
    if (gradient) build->values[from->value].grad_pending = TE_NOBODY;
    from->pending = TE_NOBODY;
    from->wide = only.wide;
}

/* The input in high precision. */
static int32_t wide_input(te_build *build, int32_t k)
{
    const te_node_desc *node = te_node(build, k);
    int32_t x = node->inputs[0];
    source from = {TE_INPUT_OPERAND, x, build->values[x].pending, TE_NO_BUFFER};
    if (from.pending == TE_NOBODY || build->direction != TE_DIRECTION_FORWARD) {
        return te_wide(build, x, node->name, stage_names[TE_LINEAR_STAGE_PRODUCE_INPUT]);
    }
    write_source(build, k, &from, TE_NO_BUFFER);
    return from.wide;
}

/* The high-precision form, where somebody reads it besides this cast: written in the first pass. */
static int32_t wide_besides(te_build *build, const source *from)
{
    if (from->pending == TE_NOBODY || from->role == TE_GRAD_OPERAND) return TE_NO_BUFFER;
    if (!te_wide_wanted(build, from->value)) return TE_NO_BUFFER;
    return te_get(build, TE_LINK_VALUE, from->value);
}

/* A pass that finds the largest magnitude; `transformed`: of the
 * columns as the Hadamard transform makes them. */
static int32_t measure(te_build *build, int32_t k, const source *from, int32_t wide,
                       int transformed)
{
    const struct cast_stages *stages = &stages_of[from->role];
    int32_t partials = te_get(build, TE_LINK_PARTIALS, transformed);
    te_stage *stage = stage_over(build, k, stages->amax, from, TE_OP_AMAX, 0);
    te_cast_to cast = te_cast_nothing();
    if (from->pending == TE_NOBODY) {
        te_use_as(build, stage, "partials", partials);
        te_set_number(build, stage, "hadamard", transformed);
    } else {
        cast.wide = wide;
        cast.amax_partials = partials;
        te_ask_cast(build, stage, &cast);
    }
    add_external(build, k, stages->reduce, partials);
    return partials;
}

/* Measures for a cast to these forms. */
static void measure_for(te_build *build, int32_t k, const source *from, int32_t wide, int forms,
                        te_cast_to *cast)
{
    uint32_t transformed = te_node(build, k)->quantization.hadamard >> from->role & 1U;
    int apart = transformed != 0 && (forms & COLUMN) != 0;
    if (!apart || (forms & ROW) != 0) cast->partials = measure(build, k, from, wide, 0);
    if (apart) cast->column_partials = measure(build, k, from, wide, 1);
}

/* What a cast of an operand to these forms is asked for. */
static te_cast_to cast_to(te_build *build, int32_t k, te_operand_role role, int forms)
{
    te_cast_to cast = te_cast_nothing();
    cast.mode = rule_of(build, k, role)->mode;
    if ((forms & ROW) != 0) cast.row = form(build, k, role, TE_LINK_ROW);
    if ((forms & COLUMN) != 0) cast.column = form(build, k, role, TE_LINK_COLUMN);
    return cast;
}

/* Lets a cast make the scales of these forms. */
static void write_scales(te_build *build, int32_t k, te_operand_role role, int forms,
                         te_cast_to *cast)
{
    const te_quantization *q = &te_node(build, k)->quantization;
    const te_recipe_rule *rule = rule_of(build, k, role);
    int shared = rule->row.scales == rule->column.scales;
    cast->amax_epsilon = q->amax_epsilon[role];
    cast->power_2 = (int32_t)(q->power_2 >> role & 1U);
    cast->square = rule->square;
    cast->hadamard = (int32_t)(q->hadamard >> role & 1U);
    if ((q->stochastic >> role & 1U) != 0) {
        cast->rng = te_get(build, TE_LINK_VALUE, te_node(build, k)->inputs[3]);
    }
    if (shared || (forms & ROW) != 0) cast->row_scales = form(build, k, role, rule->row.scales);
    if (shared || (forms & COLUMN) != 0) {
        cast->column_scales = form(build, k, role, rule->column.scales);
    }
    if (rule->row.amax == TE_LINK_VALUE) return;
    if ((forms & ROW) != 0) cast->row_amax = form(build, k, role, rule->row.amax);
    if ((forms & COLUMN) != 0) cast->column_amax = form(build, k, role, rule->column.amax);
}

/* Casts an operand to these forms with the recipe's scales. */
static void quantize(te_build *build, int32_t k, te_operand_role role, int forms, int32_t bias_grad)
{
    const te_node_desc *node = te_node(build, k);
    const te_recipe_rule *rule = rule_of(build, k, role);
    const struct cast_stages *stages = &stages_of[role];
    int measured = te_is_measured(node, role);
    int32_t of = te_operand_of(k, role), wide;
    source from = source_of(build, k, role);
    te_cast_to cast;
    te_stage *stage;
    if (te_operand_is_kept(build, of)) forms = ROW | COLUMN;
    if (te_links_has(&build->saved, TE_LINK_ROW, of)) forms |= ROW;
    if (te_links_has(&build->saved, TE_LINK_COLUMN, of)) forms |= COLUMN;
    cast = cast_to(build, k, role, forms);
    if (rule->separate || is_external(build, k, stages->quantize) ||
        (measured && is_external(build, k, stages->amax))) {
        write_source(build, k, &from, TE_NO_BUFFER);
    }
    wide = wide_besides(build, &from);
    if (measured) {
        measure_for(build, k, &from, wide, forms, &cast);
    } else {
        cast.wide = wide;
    }
    if (rule->scale == TE_SCALE_STATE) {
        cast.scale = te_get(build, TE_LINK_SCALE, node->owner);
        if (role == TE_GRAD_OPERAND || (node->flags & TE_LINEAR_NO_AMAX) == 0)
            cast.history = te_get(build, TE_LINK_HISTORY, node->owner);
    }
    cast.bias_grad = bias_grad;
    cast.chunk = 2 * node->owner + (role == TE_GRAD_OPERAND);
    cast.slot = node->slots[role == TE_GRAD_OPERAND] + (role == TE_WEIGHT_OPERAND);
    write_scales(build, k, role, forms, &cast);
    stage = stage_over(build, k, stages->quantize, &from, TE_OP_QUANTIZE, measured);
    te_ask_cast(build, stage, &cast);
}

/* A second cast makes the scales anew instead of reading those of the first. */
static int makes_scales_again(const te_recipe_rule *rule)
{
    return rule->scale == TE_SCALE_OWN || rule->row.amax != TE_LINK_VALUE;
}

/* Casts an operand with the scales of the forward, or to those that it makes of the same values:
 * the same bits, no amax. */
static void quantize_again(te_build *build, int32_t k, te_operand_role role, int forms)
{
    const te_recipe_rule *rule = rule_of(build, k, role);
    source from = source_of(build, k, role);
    te_cast_to cast = cast_to(build, k, role, forms);
    te_stage *stage;
    if (rule->separate) write_source(build, k, &from, TE_NO_BUFFER);
    if (makes_scales_again(rule)) {
        if (rule->scale == TE_SCALE_MEASURED) {
            measure_for(build, k, &from, TE_NO_BUFFER, forms, &cast);
        }
        write_scales(build, k, role, forms, &cast);
    } else {
        cast.given = te_need(build, rule->row.scales, te_operand_of(k, role));
    }
    stage = stage_over(build, k, stages_of[role].again, &from, TE_OP_QUANTIZE, 0);
    te_ask_cast(build, stage, &cast);
}

/* ---- forward ------------------------------------------------------------------------------ */

/* Its operands a and b, as they are in the product. */
static const struct {
    te_linear_stage stage;
    uint32_t fast;
    te_operand_role roles[2];
    int transposed[2];
} gemms[] = {[TE_GEMM_OUTPUT] = {TE_LINEAR_STAGE_GEMM_OUTPUT,
                                 TE_LINEAR_FAST_OUTPUT,
                                 {TE_INPUT_OPERAND, TE_WEIGHT_OPERAND},
                                 {0, 1}},
             [TE_GEMM_GRAD_INPUT] = {TE_LINEAR_STAGE_GEMM_GRAD_INPUT,
                                     TE_LINEAR_FAST_GRAD_INPUT,
                                     {TE_GRAD_OPERAND, TE_WEIGHT_OPERAND},
                                     {0, 0}},
             [TE_GEMM_GRAD_WEIGHT] = {TE_LINEAR_STAGE_GEMM_GRAD_WEIGHT,
                                      TE_LINEAR_FAST_GRAD_WEIGHT,
                                      {TE_GRAD_OPERAND, TE_INPUT_OPERAND},
                                      {1, 0}}};

/* Lets a GEMM read an operand: `data`, or where that is TE_NO_BUFFER the form that it reads, or the
 * weight. */
static void use_operand(te_build *build, te_stage *stage, int32_t k, te_linear_gemm gemm,
                        int second, int32_t data)
{
    static const char *const names[2][9] = {
        {"a", "a_mode", "a_row", "a_column", "a_row_scales", "a_column_scales", "a_transposed",
         "a_row_amax", "a_column_amax"},
        {"b", "b_mode", "b_row", "b_column", "b_row_scales", "b_column_scales", "b_transposed",
         "b_row_amax", "b_column_amax"}};
    const char *const *name = names[second];
    te_operand_role role = gemms[gemm].roles[second];
    te_link read = rule_of(build, k, role)->usage[gemm];
    te_set_number(build, stage, name[6], gemms[gemm].transposed[second]);
    if (read == TE_LINK_VALUE) {
        if (data == TE_NO_BUFFER) data = te_get(build, read, weight_of(build, k));
        te_use_as(build, stage, name[0], data);
        return;
    }
    if (data == TE_NO_BUFFER) data = form(build, k, role, read);
    te_set_number(build, stage, name[1], rule_of(build, k, role)->mode);
    te_use_as(build, stage, name[read == TE_LINK_ROW ? 2 : 3], data);
    te_use_as(build, stage, name[read == TE_LINK_ROW ? 4 : 5],
              form(build, k, role, scales_of(build, k, role, read)));
    if (form_rule(build, k, role, read)->amax == TE_LINK_VALUE) return;
    te_use_as(build, stage, name[read == TE_LINK_ROW ? 7 : 8],
              form(build, k, role, form_rule(build, k, role, read)->amax));
}

static te_stage *add_gemm(te_build *build, int32_t k, te_linear_gemm gemm, int32_t a, int32_t b)
{
    const te_node_desc *node = te_node(build, k);
    te_stage *stage = add_stage(build, k, gemms[gemm].stage, TE_OP_GEMM);
    te_set_number(build, stage, "fast_accumulation",
                  (node->flags & gemms[gemm].fast) != 0 && is_quantized(build, k));
    te_set_number(build, stage, "allow_tf32", (node->flags & TE_LINEAR_ALLOW_TF32) != 0);
    use_operand(build, stage, k, gemm, 0, a);
    use_operand(build, stage, k, gemm, 1, b);
    return stage;
}

/* The activation that the GEMM's epilogue applies: where the result is 16-bit and nobody casts it
 * to FP8 anyway. cuBLASLt's tanh is not as accurate as fp32 results would show. */
static int32_t activation_in_epilogue(const te_build *build, int32_t k)
{
    int32_t y = te_node(build, k)->output;
    if (is_quantized(build, k) || te_value(build, y)->dtype == TE_DTYPE_F32 ||
        te_value_is_shared(build, y) || is_external(build, k, TE_LINEAR_STAGE_GEMM_OUTPUT) ||
        is_external(build, k, TE_LINEAR_STAGE_REDUCE_OUTPUT)) {
        return TE_NOBODY;
    }
    for (int32_t n = k + 1; n < build->graph->node_count; n++) {
        const te_node_desc *reader = te_node(build, n);
        if (reader->inputs[0] != y) continue;
        return reader->kind == TE_NODE_ACTIVATION && reader->variant == TE_ACTIVATION_GELU &&
                       !te_is_read(build, reader->output, 1)
                   ? n
                   : TE_NOBODY;
    }
    return TE_NOBODY;
}

static int32_t cast_bias(te_build *build, int32_t k)
{
    const te_node_desc *node = te_node(build, k);
    int32_t bias = bias_of(build, k);
    te_stage *stage;
    if (bias < 0) return TE_NO_BUFFER;
    if (te_bias_dtype(&node->quantization, (te_dtype)te_value(build, node->output)->dtype) ==
        (te_dtype)te_value(build, bias)->dtype) {
        return te_get(build, TE_LINK_VALUE, bias);
    }
    stage = add_stage(build, k, TE_LINEAR_STAGE_CAST_BIAS, TE_OP_CAST);
    te_use_as(build, stage, "input", te_get(build, TE_LINK_VALUE, bias));
    te_use_as(build, stage, "output", te_get(build, TE_LINK_BIAS_CAST, k));
    return te_get(build, TE_LINK_BIAS_CAST, k);
}

/* Row-wise input of the GEMM: the local one, or what the caller gathers from every rank. */
static int32_t gathered_input(te_build *build, int32_t k)
{
    int32_t local = form(build, k, TE_INPUT_OPERAND,
                         rule_of(build, k, TE_INPUT_OPERAND)->usage[TE_GEMM_OUTPUT]);
    te_stage *stage;
    if (te_node(build, k)->gather <= 1) return local;
    stage = add_stage(build, k, TE_LINEAR_STAGE_GATHER_INPUT, TE_OP_QUANTIZE);
    te_stage_use(&build->plan, stage, 0, local);
    te_stage_use(&build->plan, stage, 0, te_get(build, TE_LINK_GATHERED, k));
    return te_get(build, TE_LINK_GATHERED, k);
}

static void multiply(te_build *build, int32_t k, int32_t input, int32_t bias)
{
    const te_node_desc *node = te_node(build, k);
    int32_t activation = activation_in_epilogue(build, k);
    int32_t d = te_get(build, TE_LINK_VALUE,
                       activation < 0 ? node->output : te_node(build, activation)->output);
    te_stage *gemm = add_gemm(build, k, TE_GEMM_OUTPUT, input, TE_NO_BUFFER);
    te_use_as(build, gemm, "d", d);
    te_use_as(build, gemm, "bias", bias);
    if (activation >= 0) {
        te_set_number(build, gemm, "epilogue", TE_EPILOGUE_GELU);
        if (build->direction != TE_DIRECTION_FORWARD ||
            te_links_has(&build->saved, TE_LINK_VALUE, node->output)) {
            te_use_as(build, gemm, "aux", te_get(build, TE_LINK_VALUE, node->output));
        }
    }
    add_external(build, k, TE_LINEAR_STAGE_REDUCE_OUTPUT, d);
}

static void forward(te_build *build, int32_t k)
{
    int32_t bias;
    if (!is_quantized(build, k)) {
        int32_t wide = wide_input(build, k);
        multiply(build, k, wide, cast_bias(build, k));
        return;
    }
    for (te_operand_role role = TE_INPUT_OPERAND; role <= TE_WEIGHT_OPERAND; role++) {
        if (arrives(build, k, role)) continue;
        quantize(build, k, role, read_by(build, k, role, 1U << TE_GEMM_OUTPUT), TE_NO_BUFFER);
    }
    bias = cast_bias(build, k);
    multiply(build, k, gathered_input(build, k), bias);
}

static void again(te_build *build, int32_t k)
{
    uint32_t gemms = 1U << TE_GEMM_OUTPUT | gradients_of(build, k);
    int32_t input = is_quantized(build, k) ? TE_NO_BUFFER : wide_input(build, k);
    for (te_operand_role role = TE_INPUT_OPERAND; role <= TE_WEIGHT_OPERAND; role++) {
        if (!is_quantized(build, k) || arrives(build, k, role)) continue;
        quantize_again(build, k, role, read_by(build, k, role, gemms));
    }
    multiply(build, k, input, cast_bias(build, k));
}

/* ---- backward ----------------------------------------------------------------------------- */

static void multiply_grad_input(te_build *build, int32_t k, int32_t grad)
{
    int32_t x = te_node(build, k)->inputs[0];
    te_stage *gemm = add_gemm(build, k, TE_GEMM_GRAD_INPUT, grad, TE_NO_BUFFER);
    int32_t d = te_grad_target(build, x);
    te_use_as(build, gemm, "d", d);
    add_external(build, k, TE_LINEAR_STAGE_REDUCE_GRAD_INPUT, d);
}

/* Sums of the gradient over the rows by the GEMM itself, in high precision, where the gradient is
 * read as it lies. */
static void multiply_grad_weight(te_build *build, int32_t k, int32_t grad, int32_t input,
                                 int32_t bias_grad)
{
    int32_t weight = weight_of(build, k);
    te_stage *gemm = add_gemm(build, k, TE_GEMM_GRAD_WEIGHT, grad, input);
    te_use_as(build, gemm, "d", te_parameter_grad(build, weight));
    te_use_as(build, gemm, "bias_grad", bias_grad);
    te_set_number(build, gemm, "accumulate", wants(build, weight, TE_VALUE_ACCUMULATE));
}

/* The input as the weight gradient reads it: given, saved, or cast again from what the forward was
 * given. */
static int32_t input_of_weight(te_build *build, int32_t k)
{
    te_link read = rule_of(build, k, TE_INPUT_OPERAND)->usage[TE_GEMM_GRAD_WEIGHT];
    int32_t of = te_operand_of(k, TE_INPUT_OPERAND), found;
    int repeat = (te_node(build, k)->flags & TE_LINEAR_SAVE_INPUT) != 0 ||
                 (build->graph->flags & TE_GRAPH_RECOMPUTE) != 0;
    int casts = repeat && !arrives(build, k, TE_INPUT_OPERAND);
    if (!makes_scales_again(rule_of(build, k, TE_INPUT_OPERAND)) || !casts) {
        te_link amax = form_rule(build, k, TE_INPUT_OPERAND, read)->amax;
        (void)te_need(build, scales_of(build, k, TE_INPUT_OPERAND, read), of);
        if (amax != TE_LINK_VALUE) (void)te_need(build, amax, of);
    }
    found = te_find(build, read, of);
    if (found != TE_NO_BUFFER) return found;
    if (!casts) return te_need(build, read, of);
    quantize_again(build, k, TE_INPUT_OPERAND, set_of(read));
    return te_find(build, read, of);
}

/* The bias gradient by itself. */
static void sum_grad(te_build *build, int32_t k, const source *from, int32_t bias_grad)
{
    te_cast_to cast = te_cast_nothing();
    te_stage *stage;
    if (bias_grad == TE_NO_BUFFER) return;
    stage = stage_over(build, k, TE_LINEAR_STAGE_QUANTIZE_GRAD_OUTPUT, from, TE_OP_QUANTIZE, 0);
    cast.bias_grad = bias_grad;
    te_ask_cast(build, stage, &cast);
}

/* Whether the gradient of the weight is computed first: its operands can be freed before the
 * gradient of the input has memory. Not where ranks add up the latter, which can go on meanwhile.
 */
static int weight_goes_first(const te_build *build, int32_t k)
{
    return !is_external(build, k, TE_LINEAR_STAGE_REDUCE_GRAD_INPUT);
}

/* The weight as the gradient of the input reads it, made of the row-wise one that arrived. */
static void transpose_weight(te_build *build, int32_t k)
{
    te_stage *stage = add_stage(build, k, TE_LINEAR_STAGE_REQUANTIZE_WEIGHT, TE_OP_TRANSPOSE);
    te_use_as(build, stage, "input", form(build, k, TE_WEIGHT_OPERAND, TE_LINK_ROW));
    te_use_as(build, stage, "output", form(build, k, TE_WEIGHT_OPERAND, TE_LINK_COLUMN));
}

static void grad_input_quantized(te_build *build, int32_t k)
{
    te_link read = rule_of(build, k, TE_WEIGHT_OPERAND)->usage[TE_GEMM_GRAD_INPUT];
    int32_t of = te_operand_of(k, TE_WEIGHT_OPERAND);
    if (!needs_grad_input(build, k)) return;
    if (te_operand_is_transposed(build, of)) {
        transpose_weight(build, k);
    } else if (!arrives(build, k, TE_WEIGHT_OPERAND) && te_find(build, read, of) == TE_NO_BUFFER) {
        quantize_again(build, k, TE_WEIGHT_OPERAND, set_of(read));
    }
    multiply_grad_input(build, k, TE_NO_BUFFER);
}

static void backward_quantized(te_build *build, int32_t k)
{
    int put_off = wants(build, weight_of(build, k), TE_VALUE_DEFER);
    int weight_first = weight_goes_first(build, k);
    int forms = read_by(build, k, TE_GRAD_OPERAND, gradients_of(build, k));
    int32_t bias_grad = te_parameter_grad(build, bias_of(build, k));
    if (forms == 0 && bias_grad != TE_NO_BUFFER) {
        source from = source_of(build, k, TE_GRAD_OPERAND);
        sum_grad(build, k, &from, bias_grad);
    }
    if (forms != 0 && !arrives(build, k, TE_GRAD_OPERAND)) {
        quantize(build, k, TE_GRAD_OPERAND, forms, bias_grad);
    }
    if (!weight_first) grad_input_quantized(build, k);
    if (needs_grad_weight(build, k) && !put_off) {
        multiply_grad_weight(build, k, TE_NO_BUFFER, input_of_weight(build, k), TE_NO_BUFFER);
    }
    if (weight_first) grad_input_quantized(build, k);
}

static void backward_wide(te_build *build, int32_t k)
{
    int put_off = wants(build, weight_of(build, k), TE_VALUE_DEFER);
    int input_first = needs_grad_input(build, k) && !weight_goes_first(build, k);
    int32_t bias_grad = te_parameter_grad(build, bias_of(build, k));
    source from = source_of(build, k, TE_GRAD_OPERAND);
    if (!needs_grad_input(build, k) && !needs_grad_weight(build, k)) {
        sum_grad(build, k, &from, bias_grad);
        return;
    }
    if (from.pending != TE_NOBODY) {
        write_source(build, k, &from, bias_grad);
        bias_grad = TE_NO_BUFFER;
    }
    if (input_first) multiply_grad_input(build, k, from.wide);
    if (needs_grad_weight(build, k) && !put_off) {
        int32_t input = wide_input(build, k);
        multiply_grad_weight(build, k, from.wide, input, bias_grad);
    } else {
        sum_grad(build, k, &from, bias_grad);
    }
    if (needs_grad_input(build, k) && !input_first) multiply_grad_input(build, k, from.wide);
}

static void backward(te_build *build, int32_t k)
{
    if (!te_has_grad(build, te_node(build, k)->output)) return;
    if (te_node(build, k)->gather > 1 && build->values[te_node(build, k)->output].needs_grad) {
        build->plan.status = TE_FAIL(TE_ERROR_UNSUPPORTED, "linear: gradients of a gathered input");
        return;
    }
    if (is_quantized(build, k)) {
        backward_quantized(build, k);
    } else {
        backward_wide(build, k);
    }
}

/* The weight gradient that an earlier backward put off. */
static void deferred(te_build *build, int32_t k)
{
    const te_node_desc *node = te_node(build, k);
    int32_t grad, input;
    if (!needs_grad_weight(build, k) || !wants(build, weight_of(build, k), TE_VALUE_DEFER)) return;
    if (is_quantized(build, k)) {
        te_link read = rule_of(build, k, TE_GRAD_OPERAND)->usage[TE_GEMM_GRAD_WEIGHT];
        int32_t of = te_operand_of(k, TE_GRAD_OPERAND);
        grad = te_defer(build, read, of);
        (void)te_defer(build, scales_of(build, k, TE_GRAD_OPERAND, read), of);
        if (form_rule(build, k, TE_GRAD_OPERAND, read)->amax != TE_LINK_VALUE) {
            (void)te_defer(build, form_rule(build, k, TE_GRAD_OPERAND, read)->amax, of);
        }
        input = input_of_weight(build, k);
    } else {
        grad = te_defer(build, te_grad_link(build, node->output), node->output);
        input = wide_input(build, k);
    }
    multiply_grad_weight(build, k, grad, input, TE_NO_BUFFER);
}

const te_node_rules te_linear_rules = {
    .name = "gemm",
    .inputs = 4,
    .flags = TE_LINEAR_SAVE_INPUT | TE_LINEAR_NO_AMAX | TE_LINEAR_ALLOW_TF32 |
             TE_LINEAR_FAST_OUTPUT | TE_LINEAR_FAST_GRAD_INPUT | TE_LINEAR_FAST_GRAD_WEIGHT |
             TE_LINEAR_MEASURE_OPERANDS | TE_LINEAR_MEASURE_GRAD,
    .external = (1U << TE_LINEAR_STAGE_COUNT) - 1,
    .casts = 1,
    .check = te_check_linear,
    .forward = forward,
    .backward = backward,
    .deferred = deferred,
    .again = again};
