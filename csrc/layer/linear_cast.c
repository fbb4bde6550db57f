/* SPDX-License-Identifier: Apache-2.0 */
#include "layer/linear_cast.h"

static const char *const stage_names[] = {
#define X(NAME, name) [TE_LINEAR_STAGE_##NAME] = #name,
    TE_LINEAR_STAGES(X)
#undef X
};

int te_linear_is_external(const te_build *build, int32_t k, te_linear_stage number)
{
    return te_is_external(te_node(build, k), (int32_t)number);
}

static te_stage *mark_stage(te_build *build, int32_t k, te_linear_stage number, te_stage *stage)
{
    stage->external = te_linear_is_external(build, k, number);
    stage->halved = te_is_halved(te_node(build, k), (int32_t)number);
    stage->node = k;
    stage->step = (int32_t)number;
    return stage;
}

te_stage *te_linear_add(te_build *build, int32_t k, te_linear_stage number, te_op op)
{
    te_stage *stage = te_add(build, k, te_node(build, k)->name, stage_names[number], op);
    return mark_stage(build, k, number, stage);
}

int te_linear_read_by(const te_build *build, int32_t k, te_operand_role role, uint32_t gemms)
{
    int forms = 0;
    for (int gemm = 0; gemm < TE_LINEAR_GEMMS; gemm++) {
        if ((gemms >> gemm & 1U) == 0) continue;
        forms |= te_form_set(te_linear_usage(build, k, role, (te_linear_gemm)gemm));
    }
    return forms;
}

#define ALL_GEMMS ((1U << TE_LINEAR_GEMMS) - 1U)

/* ---- operands of which each rank has a part ----------------------------------------------- */

static int has_one_scale(const te_build *build, int32_t k, te_operand_role role)
{
    return te_linear_rule(build, k, role)->mode == TE_SCALING_TENSOR;
}

te_operand_role te_linear_read_as(const te_build *build, int32_t k, te_operand_role role,
                                  te_link form)
{
    const te_form_rule *row = &te_linear_rule(build, k, role)->row;
    const te_form_rule *column = &te_linear_rule(build, k, role)->column;
    const int by_rows = te_cast_has(&te_node(build, k)->quantization, role, TE_CAST_ROW_SCALED);
    const int is_amax =
        form != TE_LINK_VALUE && ((form == row->amax && !by_rows) || form == column->amax);
    const int is_scale = te_form_set(form) == 0 && form != TE_LINK_WIDE;
    if (!te_linear_is_part(build, k, role) || is_amax ||
        (is_scale && has_one_scale(build, k, role))) {
        return role; /* all ranks have the same */
    }
    return role == TE_GRAD_OPERAND ? TE_WHOLE_GRAD_OPERAND : TE_WHOLE_INPUT_OPERAND;
}

/* Forms of its part that a rank makes where GEMMs read these. */
static int forms_of_part(const te_build *build, int32_t k, te_operand_role role, int forms)
{
    if (forms == 0 || !te_linear_is_part(build, k, role) || !has_one_scale(build, k, role)) {
        return forms;
    }
    return TE_FORM_ROW;
}

static void hand_pair(te_build *build, te_stage *stage, int32_t k, te_operand_role role,
                      te_link link)
{
    const te_operand_role whole = te_linear_read_as(build, k, role, link);
    int32_t part;
    if (link == TE_LINK_VALUE || whole == role) return;
    part = te_get(build, link, te_operand_of(k, role));
    if (build->plan.status == TE_OK) build->plan.buffers[part].joins = 1;
    te_stage_hand(&build->plan, stage, part, 0);
    te_stage_hand(&build->plan, stage, te_get(build, link, te_operand_of(k, whole)), 1);
}

void te_linear_gather(te_build *build, int32_t k, te_operand_role role, int forms)
{
    const int32_t n = te_linear_gatherer(build->graph, k, role);
    const int gradient = role == TE_GRAD_OPERAND;
    const char *name = gradient                                   ? "gather_grad_output"
                       : build->direction == TE_DIRECTION_FORWARD ? "gather_input"
                                                                  : "gather_input_again";
    te_stage *stage;
    forms = forms_of_part(build, k, role, forms);
    if (n == TE_NOBODY || forms == 0) return;
    stage = te_add_outside(build, n, te_node(build, k)->name, name,
                           gradient ? TE_COLLECTIVE_BACKWARD : TE_COLLECTIVE_FORWARD);
    for (te_link form = TE_LINK_ROW; form <= TE_LINK_COLUMN; form++) {
        if ((forms & te_form_set(form)) == 0) continue;
        hand_pair(build, stage, k, role, form);
        hand_pair(build, stage, k, role, te_linear_scales(build, k, role, form));
        hand_pair(build, stage, k, role, te_linear_form_rule(build, k, role, form)->amax);
    }
}

void te_linear_gather_again(te_build *build, int32_t k, te_link form)
{
    const int32_t whole = te_operand_of(k, TE_WHOLE_INPUT_OPERAND);
    if (has_one_scale(build, k, TE_INPUT_OPERAND)) form = TE_LINK_ROW;
    if (te_find(build, form, whole) != TE_NO_BUFFER) return;
    (void)te_linear_form_again(build, k, TE_INPUT_OPERAND, form);
    te_linear_gather(build, k, TE_INPUT_OPERAND, te_form_set(form));
}

int32_t te_linear_gathered(te_build *build, int32_t k, te_operand_role role, te_link form)
{
    const te_operand_role whole = te_linear_read_as(build, k, role, form);
    if (form == TE_LINK_COLUMN && has_one_scale(build, k, role)) {
        te_linear_transpose(build, k, whole);
    }
    return te_get(build, form, te_operand_of(k, whole));
}

/* ---- casts -------------------------------------------------------------------------------- */

/* Stages of an operand's cast: `produce` writes it in high precision, `again` is the cast in a
 * later plan; roles without such a stage have that of the cast there. And the slot that its scale
 * is in, among those of the node in a chunk. */
#define CAST_STAGES(NAME, PRODUCE, AGAIN, number)                                                  \
    {                                                                                              \
        TE_LINEAR_STAGE_##PRODUCE, TE_LINEAR_STAGE_AMAX_##NAME,                                    \
            TE_LINEAR_STAGE_REDUCE_AMAX_##NAME, TE_LINEAR_STAGE_QUANTIZE_##NAME,                   \
            TE_LINEAR_STAGE_##AGAIN, (number)                                                      \
    }
static const struct cast_stages {
    te_linear_stage produce, amax, reduce, quantize, again;
    int32_t slot;
} stages_of[] = {
    [TE_INPUT_OPERAND] = CAST_STAGES(INPUT, PRODUCE_INPUT, REQUANTIZE_INPUT, 0),
    [TE_WEIGHT_OPERAND] = CAST_STAGES(WEIGHT, QUANTIZE_WEIGHT, REQUANTIZE_WEIGHT, 1),
    [TE_GRAD_OPERAND] = CAST_STAGES(GRAD_OUTPUT, PRODUCE_GRAD_OUTPUT, TRANSPOSE_GRAD_OUTPUT, 0),
    [TE_OUTPUT_OPERAND] = CAST_STAGES(OUTPUT, QUANTIZE_OUTPUT, QUANTIZE_OUTPUT, 2),
    [TE_GRAD_INPUT_OPERAND] = CAST_STAGES(GRAD_INPUT, QUANTIZE_GRAD_INPUT, QUANTIZE_GRAD_INPUT, 1),
    [TE_WHOLE_INPUT_OPERAND] = CAST_STAGES(INPUT, PRODUCE_INPUT, TRANSPOSE_INPUT, 0),
    [TE_WHOLE_GRAD_OPERAND] =
        CAST_STAGES(GRAD_OUTPUT, PRODUCE_GRAD_OUTPUT, TRANSPOSE_GRAD_OUTPUT, 0),
};

te_linear_source te_linear_source_of(te_build *build, int32_t k, te_operand_role role)
{
    const te_node_desc *node = te_node(build, k);
    int gradient = role == TE_GRAD_OPERAND;
    te_linear_source from = {role, te_linear_value(build->graph, k, role), TE_NOBODY, TE_NO_BUFFER};
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
static te_stage *stage_over(te_build *build, int32_t k, te_linear_stage number,
                            const te_linear_source *from, te_op plain, int second)
{
    const te_node_rules *rules;
    const char *prefix = te_node(build, k)->name;
    te_stage *stage;
    if (from->pending == TE_NOBODY) {
        stage = te_linear_add(build, k, number, plain);
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

void te_linear_write_source(te_build *build, int32_t k, te_linear_source *from, int32_t bias_grad)
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

int32_t te_linear_wide_input(te_build *build, int32_t k)
{
    const te_node_desc *node = te_node(build, k);
    const int copies = te_collective_is_copy(build->graph, te_collective_before(build->graph, k));
    int32_t x = copies ? te_linear_value(build->graph, k, TE_INPUT_OPERAND) : node->inputs[0];
    te_linear_source from = {TE_INPUT_OPERAND, x, build->values[x].pending, TE_NO_BUFFER};
    if (from.pending == TE_NOBODY || build->direction != TE_DIRECTION_FORWARD) {
        return te_wide(build, x, node->name, stage_names[TE_LINEAR_STAGE_PRODUCE_INPUT]);
    }
    te_linear_write_source(build, k, &from, TE_NO_BUFFER);
    return from.wide;
}

void te_linear_sum_grad(te_build *build, int32_t k, const te_linear_source *from, int32_t bias_grad)
{
    te_cast_to cast = te_cast_nothing();
    te_stage *stage;
    if (bias_grad == TE_NO_BUFFER) return;
    stage = stage_over(build, k,
                       te_is_made_outside(&te_node(build, k)->quantization, TE_GRAD_OPERAND)
                           ? TE_LINEAR_STAGE_PRODUCE_GRAD_OUTPUT
                           : TE_LINEAR_STAGE_QUANTIZE_GRAD_OUTPUT,
                       from, TE_OP_QUANTIZE, 0);
    cast.bias_grad = bias_grad;
    te_ask_cast(build, stage, &cast);
}

/* The high-precision form, where a forward has it not yet and somebody reads it besides this cast:
 * written in the first pass. */
static int32_t wide_besides(te_build *build, const te_linear_source *from)
{
    const int32_t value = from->value;
    if (from->pending == TE_NOBODY || from->role == TE_GRAD_OPERAND ||
        build->direction != TE_DIRECTION_FORWARD ||
        te_find(build, TE_LINK_VALUE, value) != TE_NO_BUFFER) {
        return TE_NO_BUFFER;
    }
    return (te_value(build, value)->flags & TE_VALUE_RESULT) != 0 || te_is_read(build, value, 0) ||
                   te_links_has(&build->saved, TE_LINK_VALUE, value)
               ? te_get(build, TE_LINK_VALUE, value)
               : TE_NO_BUFFER;
}

/* A pass that finds the largest magnitude; `transformed`: of the columns as the Hadamard transform
 * makes them. */
static int32_t measure(te_build *build, int32_t k, const te_linear_source *from, int32_t wide,
                       int transformed)
{
    const te_operand_role as = te_cast_as(from->role);
    int32_t partials = te_get(build, TE_LINK_PARTIALS, transformed);
    te_stage *stage = stage_over(build, k, stages_of[from->role].amax, from, TE_OP_AMAX, 0);
    te_cast_to cast = te_cast_nothing();
    if (from->pending == TE_NOBODY) {
        te_use_as(build, stage, "partials", partials);
        te_set_number(build, stage, "hadamard",
                      transformed
                          ? te_hadamard_of(te_node(build, k)->quantization.casts[as].options)
                          : TE_HADAMARD_NONE);
    } else {
        cast.wide = wide;
        cast.amax_partials = partials;
        te_ask_cast(build, stage, &cast);
    }
    return partials;
}

/* The caller's stage behind the passes of a cast, which it makes common to ranks. */
static void reduce_amaxes(te_build *build, int32_t k, te_operand_role role, const te_cast_to *cast)
{
    const te_linear_stage number = stages_of[role].reduce;
    const int32_t found[] = {cast->partials, cast->column_partials};
    te_stage *stage;
    if (!te_linear_is_external(build, k, number)) return;
    stage = te_linear_add(build, k, number, TE_OP_QUANTIZE);
    for (size_t i = 0; i < sizeof found / sizeof *found; i++) {
        if (found[i] != TE_NO_BUFFER) te_stage_hand(&build->plan, stage, found[i], 1);
    }
}

/* Measures for a cast to these forms. */
static void measure_for(te_build *build, int32_t k, const te_linear_source *from, int32_t wide,
                        int forms, te_cast_to *cast)
{
    const te_quantization *q = &te_node(build, k)->quantization;
    int by_rows = te_cast_has(q, from->role, TE_CAST_ROW_SCALED);
    int columns = (forms & TE_FORM_COLUMN) != 0, rows = (forms & TE_FORM_ROW) != 0;
    int apart = te_cast_has(q, from->role, TE_CAST_HADAMARD) && columns;
    if ((rows && !by_rows) || (columns && !apart)) {
        cast->partials = measure(build, k, from, wide, 0);
    }
    if (apart) cast->column_partials = measure(build, k, from, wide, 1);
    if (cast->partials != TE_NO_BUFFER || apart) reduce_amaxes(build, k, from->role, cast);
}

static int32_t form_if(te_build *build, int32_t k, te_operand_role role, te_link link, int wanted)
{
    return wanted ? te_linear_form(build, k, role, link) : TE_NO_BUFFER;
}

/* What a cast of an operand to these forms is asked for. */
static te_cast_to cast_to(te_build *build, int32_t k, te_operand_role role, int forms)
{
    te_cast_to cast = te_cast_nothing();
    cast.mode = te_linear_rule(build, k, role)->mode;
    cast.row = form_if(build, k, role, TE_LINK_ROW, forms & TE_FORM_ROW);
    cast.column = form_if(build, k, role, TE_LINK_COLUMN, forms & TE_FORM_COLUMN);
    return cast;
}

/* The input of the node that a stochastic cast rounds by. The gradient of the input is made of what
 * that of the output was rounded to: the same numbers would round it to one side. */
static int pair_of(te_operand_role role)
{
    return role == TE_GRAD_INPUT_OPERAND ? 4 : 3;
}

/* Lets a cast make the scales of these forms. */
static void write_scales(te_build *build, int32_t k, te_operand_role role, int forms,
                         te_cast_to *cast)
{
    const te_quantization *q = &te_node(build, k)->quantization;
    const te_recipe_rule *rule = te_linear_rule(build, k, role);
    const te_operand_role as = te_cast_as(role);
    const int row = forms & TE_FORM_ROW, column = forms & TE_FORM_COLUMN;
    const int shared = rule->row.scales == rule->column.scales;
    cast->amax_epsilon = q->casts[as].amax_epsilon;
    cast->options = q->casts[as].options;
    cast->margin = q->casts[as].margin;
    cast->square = rule->square;
    if (te_cast_has(q, role, TE_CAST_STOCHASTIC)) {
        cast->rng = te_get(build, TE_LINK_VALUE, te_node(build, k)->inputs[pair_of(role)]);
    }
    cast->row_scales = form_if(build, k, role, rule->row.scales, shared || row);
    cast->column_scales = form_if(build, k, role, rule->column.scales, shared || column);
    cast->row_amax = form_if(build, k, role, rule->row.amax, row);
    cast->column_amax = form_if(build, k, role, rule->column.amax, column);
}

/* The caller's stage, which writes these forms, in high precision. */
static void make_outside(te_build *build, int32_t k, te_operand_role role, int forms,
                         int32_t bias_grad)
{
    te_linear_source from = te_linear_source_of(build, k, role);
    te_stage *stage;
    if (from.pending == TE_NOBODY) te_linear_sum_grad(build, k, &from, bias_grad);
    te_linear_write_source(build, k, &from, bias_grad);
    stage = te_linear_add(build, k, stages_of[role].quantize, TE_OP_QUANTIZE);
    te_stage_hand(&build->plan, stage, from.wide, 0);
    for (te_link form = TE_LINK_ROW; form <= TE_LINK_COLUMN; form++) {
        if ((forms & te_form_set(form)) == 0) continue;
        te_stage_hand(&build->plan, stage, te_linear_form(build, k, role, form), 1);
    }
}

/* Casts a source to these forms with the recipe's scales. */
static void cast_source(te_build *build, int32_t k, te_linear_source from, int forms,
                        int32_t bias_grad)
{
    const te_node_desc *node = te_node(build, k);
    const te_operand_role role = from.role;
    const te_recipe_rule *rule = te_linear_rule(build, k, role);
    const struct cast_stages *stages = &stages_of[role];
    const int gradient = te_is_gradient(role);
    int measured = te_is_measured(node, role);
    int32_t wide;
    te_cast_to cast = cast_to(build, k, role, forms);
    te_stage *stage;
    if (te_is_cast_apart(&node->quantization, role) ||
        te_linear_is_external(build, k, stages->quantize) ||
        (measured && te_linear_is_external(build, k, stages->amax))) {
        te_linear_write_source(build, k, &from, TE_NO_BUFFER);
    }
    wide = wide_besides(build, &from);
    if (measured) {
        measure_for(build, k, &from, wide, forms, &cast);
    } else {
        cast.wide = wide;
    }
    if (rule->scale == TE_SCALE_STATE) {
        cast.scale = te_get(build, TE_LINK_SCALE, node->owner);
        if (gradient || (node->flags & TE_LINEAR_NO_AMAX) == 0) {
            cast.history = te_get(build, TE_LINK_HISTORY, node->owner);
        }
    }
    cast.bias_grad = bias_grad;
    cast.chunk = 2 * node->owner + gradient;
    cast.slot = node->slots[gradient] + stages->slot;
    write_scales(build, k, role, forms, &cast);
    stage = stage_over(build, k, stages->quantize, &from, TE_OP_QUANTIZE, measured);
    te_ask_cast(build, stage, &cast);
}

void te_linear_quantize(te_build *build, int32_t k, te_operand_role role, int forms,
                        int32_t bias_grad)
{
    const int32_t of = te_operand_of(k, role);
    if (te_operand_is_kept(build, of)) forms = te_linear_read_by(build, k, role, ALL_GEMMS);
    if (te_links_has(&build->saved, TE_LINK_ROW, of)) forms |= TE_FORM_ROW;
    if (te_links_has(&build->saved, TE_LINK_COLUMN, of)) forms |= TE_FORM_COLUMN;
    forms = forms_of_part(build, k, role, forms);
    if (te_is_made_outside(&te_node(build, k)->quantization, role)) {
        make_outside(build, k, role, forms, bias_grad);
        return;
    }
    cast_source(build, k, te_linear_source_of(build, k, role), forms, bias_grad);
}

int32_t te_caster_of(const te_graph_desc *graph, int32_t value)
{
    const int result = (graph->values[value].flags & TE_VALUE_RESULT) != 0;
    for (int32_t n = 0; n < graph->node_count; n++) {
        const te_node_desc *node = &graph->nodes[n];
        if ((result ? node->output : node->inputs[0]) != value) continue;
        if (node->kind == TE_NODE_LINEAR) return n;
        if (result || node->kind != TE_NODE_NORM) return TE_NOBODY;
        value = node->output;
    }
    return TE_NOBODY;
}

void te_linear_return(te_build *build, int32_t k, te_operand_role role, int32_t value, int32_t wide)
{
    const te_linear_source from = {role, value, TE_NOBODY, wide};
    int forms = TE_FORM_ROW;
    if ((te_value(build, value)->flags & TE_VALUE_ROW_WISE) == 0) forms |= TE_FORM_COLUMN;
    cast_source(build, k, from, forms, TE_NO_BUFFER);
}

void te_linear_transpose(te_build *build, int32_t k, te_operand_role role)
{
    te_stage *stage;
    if (te_find(build, TE_LINK_COLUMN, te_operand_of(k, role)) != TE_NO_BUFFER) return;
    stage = te_linear_add(build, k, stages_of[role].again, TE_OP_TRANSPOSE);
    te_use_as(build, stage, "input", te_need(build, TE_LINK_ROW, te_operand_of(k, role)));
    te_use_as(build, stage, "output", te_linear_form(build, k, role, TE_LINK_COLUMN));
}

/* A second cast makes the scales anew instead of reading those of the first. */
static int makes_scales_again(const te_recipe_rule *rule)
{
    return rule->scale == TE_SCALE_OWN || rule->row.amax != TE_LINK_VALUE;
}

void te_linear_quantize_again(te_build *build, int32_t k, te_operand_role role, int forms)
{
    const te_recipe_rule *rule = te_linear_rule(build, k, role);
    te_linear_source from = te_linear_source_of(build, k, role);
    te_cast_to cast;
    te_stage *stage;
    forms = forms_of_part(build, k, role, forms);
    cast = cast_to(build, k, role, forms);
    if (te_is_cast_apart(&te_node(build, k)->quantization, role)) {
        te_linear_write_source(build, k, &from, TE_NO_BUFFER);
    }
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

/* ---- what a backward reads ---------------------------------------------------------------- */

int32_t te_linear_form_again(te_build *build, int32_t k, te_operand_role role, te_link form)
{
    int32_t of = te_operand_of(k, role), found;
    int saves_input =
        role == TE_INPUT_OPERAND && (te_node(build, k)->flags & TE_LINEAR_SAVE_INPUT) != 0;
    int repeat = saves_input || (build->graph->flags & TE_GRAPH_RECOMPUTE) != 0;
    int outside = te_is_made_outside(&te_node(build, k)->quantization, role);
    int casts = repeat && !outside && !te_linear_arrives(build, k, role);
    if (!outside && (!makes_scales_again(te_linear_rule(build, k, role)) || !casts)) {
        te_link amax = te_linear_form_rule(build, k, role, form)->amax;
        (void)te_need(build, te_linear_scales(build, k, role, form), of);
        if (amax != TE_LINK_VALUE) (void)te_need(build, amax, of);
    }
    if (form == TE_LINK_COLUMN && te_operand_is_transposed(build, of)) {
        te_linear_transpose(build, k, role);
    }
    found = te_find(build, form, of);
    if (found != TE_NO_BUFFER) return found;
    if (!casts) return te_need(build, form, of);
    te_linear_quantize_again(build, k, role, te_form_set(form));
    return te_find(build, form, of);
}

/* Stages that make the high precision of an operand. */
static const struct wide_stages {
    te_linear_stage dequantize, cast;
} wide_stages_of[] = {
    [TE_INPUT_OPERAND] = {TE_LINEAR_STAGE_DEQUANTIZE_INPUT, TE_LINEAR_STAGE_CAST_INPUT},
    [TE_WEIGHT_OPERAND] = {TE_LINEAR_STAGE_DEQUANTIZE_WEIGHT, TE_LINEAR_STAGE_CAST_WEIGHT},
    [TE_GRAD_OPERAND] = {TE_LINEAR_STAGE_DEQUANTIZE_GRAD_OUTPUT, TE_LINEAR_STAGE_COUNT},
};

/* Whether the high precision of an operand is that of its row-wise form. */
static int is_dequantized(const te_build *build, int32_t k, te_operand_role role)
{
    const te_node_desc *node = te_node(build, k);
    uint32_t flags;
    if (te_linear_rule(build, k, role)->mode == TE_SCALING_NONE) return 0;
    if (role == TE_GRAD_OPERAND) return te_linear_arrives(build, k, role);
    flags = te_value(build, node->inputs[role])->flags;
    return node->quantization.backward == TE_BACKWARD_DEQUANTIZED ||
           ((flags & TE_VALUE_QUANTIZED) != 0 && (flags & TE_VALUE_ALSO_WIDE) == 0);
}

static void dequantize(te_build *build, int32_t k, te_operand_role role, int32_t output)
{
    const te_recipe_rule *rule = te_linear_rule(build, k, role);
    int32_t row = te_linear_form_again(build, k, role, TE_LINK_ROW), of;
    te_stage *stage;
    if (te_linear_is_part(build, k, role)) { /* an input */
        te_linear_gather_again(build, k, TE_LINK_ROW);
        row = te_linear_gathered(build, k, role, TE_LINK_ROW);
    }
    of = te_operand_of(k, te_linear_read_as(build, k, role, rule->row.scales));
    stage = te_linear_add(build, k, wide_stages_of[role].dequantize, TE_OP_DEQUANTIZE);
    te_set_number(build, stage, "mode", rule->mode);
    te_set_number(build, stage, "scales_to_256",
                  te_cast_has(&te_node(build, k)->quantization, role, TE_CAST_TO_256));
    te_use_as(build, stage, "row", row);
    te_use_as(build, stage, "row_scales", te_get(build, rule->row.scales, of));
    te_use_as(build, stage, "row_amax",
              te_linear_form(build, k, te_linear_read_as(build, k, role, rule->row.amax),
                             rule->row.amax));
    te_use_as(build, stage, "output", output);
}

int32_t te_linear_wide(te_build *build, int32_t k, te_operand_role role)
{
    const te_node_desc *node = te_node(build, k);
    int32_t of = te_operand_of(k, te_linear_read_as(build, k, role, TE_LINK_WIDE));
    int32_t value, given, wide;
    te_stage *stage;
    if (te_is_made_outside(&node->quantization, role) &&
        node->quantization.backward == TE_BACKWARD_DEQUANTIZED) {
        return te_linear_form_again(build, k, role, TE_LINK_ROW);
    }
    if (is_dequantized(build, k, role)) {
        wide = te_get(build, TE_LINK_WIDE, of);
        dequantize(build, k, role, wide);
        return wide;
    }
    value = node->inputs[role];
    given = role == TE_INPUT_OPERAND ? te_linear_wide_input(build, k)
                                     : te_get(build, TE_LINK_VALUE, value);
    if (te_value(build, value)->dtype == te_value(build, node->output)->dtype) return given;
    wide = te_get(build, TE_LINK_WIDE, of);
    stage = te_linear_add(build, k, wide_stages_of[role].cast, TE_OP_CAST);
    te_use_as(build, stage, "input", given);
    te_use_as(build, stage, "output", wide);
    return wide;
}

void te_linear_sum_arrived(te_build *build, int32_t k, int32_t bias_grad)
{
    te_linear_source from = {TE_GRAD_OPERAND, te_node(build, k)->output, TE_NOBODY, TE_NO_BUFFER};
    if (bias_grad == TE_NO_BUFFER) return;
    from.wide = te_linear_wide(build, k, TE_GRAD_OPERAND);
    te_linear_sum_grad(build, k, &from, bias_grad);
}
