/* SPDX-License-Identifier: Apache-2.0
 *
 * linear_gemm.c - the GEMMs of a linear node: which form of each operand they read, and those that
 * run in pieces beside a collective.
 */
#include "layer/linear_gemm.h"

/* A GEMM: its stage, the flag for fast accumulation, its operands a and b and whether each is
 * transposed. */
struct gemm {
    te_linear_stage stage;
    uint32_t fast;
    te_operand_role roles[2];
    int transposed[2];
};
/* output = input weight^T, grad_input = grad weight, grad_weight = grad^T input; and for a weight
 * that is transposed input weight, grad weight^T, input^T grad. */
static const struct gemm gemms_of[2][TE_LINEAR_GEMMS] = {
#define X(NAME, a, b, a_transposed, b_transposed)                                                  \
    [TE_GEMM_##NAME] = {TE_LINEAR_STAGE_GEMM_##NAME,                                               \
                        TE_LINEAR_FAST_##NAME,                                                     \
                        {TE_##a##_OPERAND, TE_##b##_OPERAND},                                      \
                        {a_transposed, b_transposed}}
    {X(OUTPUT, INPUT, WEIGHT, 0, 1), X(GRAD_INPUT, GRAD, WEIGHT, 0, 0),
     X(GRAD_WEIGHT, GRAD, INPUT, 1, 0)},
    {X(OUTPUT, INPUT, WEIGHT, 0, 0), X(GRAD_INPUT, GRAD, WEIGHT, 0, 1),
     X(GRAD_WEIGHT, INPUT, GRAD, 1, 0)},
#undef X
};

static const struct gemm *gemm_of(const te_build *build, int32_t k, te_linear_gemm gemm)
{
    return &gemms_of[te_linear_is_transposed(build, k)][gemm];
}

/* Fields of te_gemm_args by which a GEMM reads its operand a, or b. The arrays are indexed by
 * whether the form is the column-wise one. */
static const struct {
    const char *data, *mode, *transposed, *scales_to_256;
    const char *forms[2], *scales[2], *amaxes[2];
} fields_of[2] = {
#define X(x)                                                                                       \
    {                                                                                              \
#x, #x "_mode", #x "_transposed", #x "_scales_to_256",                                     \
            {#x "_row", #x "_column" }, {#x "_row_scales", #x "_column_scales" },                  \
        {                                                                                          \
#x "_row_amax", #x "_column_amax"                                                      \
        }                                                                                          \
    }
    X(a), X(b)
#undef X
};

/* A form of an operand, its scales or its amax, as GEMMs find it. */
static int32_t form_read(te_build *build, int32_t k, te_operand_role role, te_link link)
{
    return te_linear_form(build, k, te_linear_read_as(build, k, role, link), link);
}

/* Lets a GEMM read its operand a, or b where `second`. `data` is the buffer; with TE_NO_BUFFER it
 * is the form that the GEMM reads or, in high precision, the weight. `scales` likewise. */
static void use_operand(te_build *build, te_stage *stage, int32_t k, te_linear_gemm gemm,
                        int second, int32_t data, int32_t scales)
{
    const struct gemm *of = gemm_of(build, k, gemm);
    const te_operand_role role = of->roles[second];
    const te_link read = te_linear_usage(build, k, role, gemm);
    const int column = read == TE_LINK_COLUMN;
    te_set_number(build, stage, fields_of[second].transposed, of->transposed[second]);
    if (read == TE_LINK_VALUE) {
        if (data == TE_NO_BUFFER) data = te_get(build, read, te_node(build, k)->inputs[1]);
        te_use_as(build, stage, fields_of[second].data, data);
        return;
    }
    if (data == TE_NO_BUFFER) data = form_read(build, k, role, read);
    if (te_is_made_outside(&te_node(build, k)->quantization, role)) {
        te_use_as(build, stage, fields_of[second].data, data);
        te_set_number(build, stage, "multiplied_out", 1);
        return;
    }
    te_set_number(build, stage, fields_of[second].mode, te_linear_rule(build, k, role)->mode);
    te_use_as(build, stage, fields_of[second].forms[column], data);
    if (scales == TE_NO_BUFFER) {
        scales = form_read(build, k, role, te_linear_scales(build, k, role, read));
    }
    te_use_as(build, stage, fields_of[second].scales[column], scales);
    te_set_number(build, stage, fields_of[second].scales_to_256,
                  te_cast_has(&te_node(build, k)->quantization, role, TE_CAST_TO_256));
    te_use_as(build, stage, fields_of[second].amaxes[column],
              form_read(build, k, role, te_linear_form_rule(build, k, role, read)->amax));
}

/* Whether a GEMM reads an operand that is cast. */
static int is_narrow(const te_build *build, int32_t k, te_linear_gemm gemm, int second)
{
    te_operand_role role = gemm_of(build, k, gemm)->roles[second];
    return te_linear_usage(build, k, role, gemm) != TE_LINK_VALUE &&
           te_linear_rule(build, k, role)->mode != TE_SCALING_NONE;
}

static te_stage *add_gemm(te_build *build, int32_t k, te_linear_gemm gemm, int32_t a,
                          int32_t a_scales, int32_t b)
{
    const te_node_desc *node = te_node(build, k);
    int wide = !is_narrow(build, k, gemm, 0) || !is_narrow(build, k, gemm, 1);
    const struct gemm *of = gemm_of(build, k, gemm);
    te_stage *stage = te_linear_add(build, k, of->stage, TE_OP_GEMM);
    te_set_number(build, stage, "fast_accumulation", (node->flags & of->fast) != 0 && !wide);
    te_set_number(build, stage, "allow_tf32", (node->flags & TE_LINEAR_ALLOW_TF32) != 0);
    use_operand(build, stage, k, gemm, 0, a, a_scales);
    use_operand(build, stage, k, gemm, 1, b, TE_NO_BUFFER);
    return stage;
}

te_stage *te_linear_add_gemm(te_build *build, int32_t k, te_linear_gemm gemm, int32_t a, int32_t b)
{
    return add_gemm(build, k, gemm, a, TE_NO_BUFFER, b);
}

/* ---- GEMMs in pieces ---------------------------------------------------------------------- */

void te_linear_add_product(te_build *build, int32_t k, const te_linear_product *of)
{
    te_stage *stage = add_gemm(build, k, of->gemm, of->a, of->a_scales, of->b);
    te_use_as(build, stage, "d", of->d);
    te_use_as(build, stage, "bias", of->bias);
    if (!of->gelu) return;
    te_set_number(build, stage, "epilogue", TE_EPILOGUE_GELU);
    te_use_as(build, stage, "aux", of->aux);
}

/* The direction of a collective beside a GEMM. */
static te_collective_step step_beside(te_linear_gemm gemm)
{
    return gemm == TE_GEMM_OUTPUT ? TE_COLLECTIVE_FORWARD : TE_COLLECTIVE_BACKWARD;
}

static int is_matrix_of_ranks(const te_value_desc *value, int32_t ranks)
{
    const te_extent *rows = &value->shape[0];
    return value->ndim == 2 && rows->symbol != TE_SYMBOL_NONE && rows->align == 1 &&
           rows->divide <= 1 && rows->multiply % ranks == 0;
}

/* Whether some rows of a form, with their scales, are a form too: those of one rank of the
 * collective n, which are whole tiles where forms of tiles travel. */
static int can_be_cut(const te_build *build, int32_t k, te_operand_role role, int32_t n)
{
    const te_scaling_mode mode = te_linear_rule(build, k, role)->mode;
    return mode == TE_SCALING_TENSOR ||
           (mode == TE_SCALING_BLOCK_1D && (te_node(build, n)->flags & TE_COLLECTIVE_FORMS) != 0);
}

int32_t te_linear_collective_beside(const te_build *build, int32_t k, te_linear_gemm gemm)
{
    const te_graph_desc *graph = build->graph;
    const te_operand_role role = gemm_of(build, k, gemm)->roles[0];
    const te_link read = te_linear_usage(build, k, role, gemm);
    const te_collective_step step = step_beside(gemm);
    const int part = te_linear_is_part(build, k, role);
    int32_t n = te_only_reader_of(graph, te_node(build, k)->output);
    int fits;
    if (gemm == TE_GEMM_OUTPUT && te_collective_does(graph, n, step) != TE_DOES_REDUCE_SCATTER) {
        n = te_collective_before(graph, k);
    }
    if (!te_collective_in_pieces(graph, n, step) ||
        te_linear_is_external(build, k, gemm_of(build, k, gemm)->stage) ||
        !is_matrix_of_ranks(te_value(build, te_node(build, k)->inputs[0]), graph->nodes[n].ranks)) {
        return TE_NOBODY;
    }
    fits = read == TE_LINK_VALUE
               ? !part
               : read == TE_LINK_ROW && can_be_cut(build, k, role, n) &&
                     !te_is_made_outside(&te_node(build, k)->quantization, role) &&
                     (part || te_collective_does(graph, n, step) != TE_DOES_GATHER);
    return fits ? n : TE_NOBODY;
}

static int has_scales_of_rows(const te_build *build, int32_t k, te_operand_role role,
                              te_linear_gemm gemm)
{
    return te_linear_usage(build, k, role, gemm) != TE_LINK_VALUE &&
           te_linear_rule(build, k, role)->mode == TE_SCALING_BLOCK_1D;
}

/* The scales of the rows of `count` ranks from one on, [tiles of a row, rows], copied from those of
 * all rows. GEMMs read dense ones. */
static int32_t scales_of_ranks(te_build *build, int32_t k, te_operand_role role, int32_t ranks,
                               int32_t from, int32_t count)
{
    const te_link link = te_linear_scales(build, k, role, TE_LINK_ROW);
    const int32_t of = te_operand_of(k, te_linear_read_as(build, k, role, link));
    const int32_t all = te_get(build, link, of), pieces = te_get(build, TE_LINK_PIECE_SCALES, of);
    const te_extent tiles = te_buffer_of(build, all)->info.shape[0];
    const te_extent rows = te_buffer_of(build, all)->info.shape[1];
    const int64_t of_rank = rows.multiply / ranks;
    const te_extent length = te_multiple(rows.symbol, of_rank * count);
    const te_buffer_info view = {.ndim = 2,
                                 .base = all,
                                 .offset = te_multiple(rows.symbol, of_rank * from),
                                 .shape = {tiles, length},
                                 .strides = {rows, te_constant(1)}};
    const te_buffer_info dense = {.ndim = 2,
                                  .base = pieces,
                                  .offset = te_multiple(rows.symbol, tiles.add * of_rank * from),
                                  .shape = {tiles, length},
                                  .strides = {length, te_constant(1)}};
    const int32_t given =
        te_view(build, &view, "%.24s_from_%d", te_buffer_of(build, all)->name, from);
    const int32_t into =
        te_view(build, &dense, "%.24s_from_%d", te_buffer_of(build, pieces)->name, from);
    te_stage *stage = te_add(build, k, te_node(build, k)->name, "copy_scales", TE_OP_DROPOUT_ADD);
    te_use_as(build, stage, "input", given);
    te_use_as(build, stage, "output", into);
    return into;
}

/* The product of rows of `count` of so many ranks from one on, written to `d`. */
static void add_rows(te_build *build, int32_t k, const te_linear_product *whole, int32_t ranks,
                     int32_t from, int32_t count, int32_t d)
{
    te_linear_product rows = *whole;
    const te_operand_role role = gemm_of(build, k, whole->gemm)->roles[0];
    rows.a = te_rows_of_ranks(build, whole->a, ranks, from, count);
    if (has_scales_of_rows(build, k, role, whole->gemm)) {
        rows.a_scales = scales_of_ranks(build, k, role, ranks, from, count);
    }
    rows.d = d;
    if (whole->aux != TE_NO_BUFFER) {
        rows.aux = te_rows_of_ranks(build, whole->aux, ranks, from, count);
    }
    te_linear_add_product(build, k, &rows);
}

/* The products of the others' rows, those before and those behind rank `rank`. They are written to
 * their places in `d`, which has the rows of all ranks, or with `apart` of the others alone. */
static void add_others(te_build *build, int32_t k, const te_linear_product *whole, int32_t n,
                       int32_t d, int apart)
{
    const int32_t ranks = te_node(build, n)->ranks, rank = te_node(build, n)->rank;
    const int32_t behind = ranks - rank - 1, places = ranks - apart;
    if (rank > 0) {
        add_rows(build, k, whole, ranks, 0, rank, te_rows_of_ranks(build, d, places, 0, rank));
    }
    if (behind > 0) {
        add_rows(build, k, whole, ranks, rank + 1, behind,
                 te_rows_of_ranks(build, d, places, rank + 1 - apart, behind));
    }
}

/* A product of gathered rows: those of this rank, `part`, while the others arrive. */
static void multiply_gathered(te_build *build, int32_t k, const te_linear_product *whole, int32_t n,
                              int32_t part)
{
    const int32_t ranks = te_node(build, n)->ranks, rank = te_node(build, n)->rank;
    const te_operand_role role = gemm_of(build, k, whole->gemm)->roles[0];
    te_linear_product own = *whole;
    own.a = part;
    if (has_scales_of_rows(build, k, role, whole->gemm)) {
        own.a_scales =
            te_linear_form(build, k, role, te_linear_scales(build, k, role, TE_LINK_ROW));
    }
    own.d = te_rows_of_ranks(build, whole->d, ranks, rank, 1);
    if (own.aux != TE_NO_BUFFER) own.aux = te_rows_of_ranks(build, own.aux, ranks, rank, 1);
    te_linear_add_product(build, k, &own);
    add_others(build, k, whole, n, whole->d, 0);
}

/* A product whose rows are summed by the collective n: those of the others first, which are sent
 * while this rank's are multiplied. */
static void multiply_exchanged(te_build *build, int32_t k, const te_linear_product *whole,
                               int32_t n)
{
    const te_node_desc *sum = te_node(build, n);
    add_others(build, k, whole, n, te_get(build, TE_LINK_SENT, n), 1);
    te_collective_exchange(build, n);
    add_rows(build, k, whole, sum->ranks, sum->rank, 1, te_get(build, TE_LINK_VALUE, sum->output));
}

int te_linear_is_beside_gather(const te_build *build, int32_t n, te_linear_gemm gemm)
{
    return te_collective_does(build->graph, n, step_beside(gemm)) == TE_DOES_GATHER;
}

void te_linear_multiply_pieces(te_build *build, int32_t k, te_linear_product *of, int32_t n,
                               int32_t wide)
{
    const te_operand_role role = gemm_of(build, k, of->gemm)->roles[0];
    const te_link read = te_linear_usage(build, k, role, of->gemm);
    if (read != TE_LINK_VALUE) {
        wide = te_linear_form(build, k, role, read);
        of->a = form_read(build, k, role, read);
    }
    if (te_linear_is_beside_gather(build, n, of->gemm)) {
        multiply_gathered(build, k, of, n, wide);
    } else {
        multiply_exchanged(build, k, of, n);
    }
}
