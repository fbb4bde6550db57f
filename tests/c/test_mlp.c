/* SPDX-License-Identifier: Apache-2.0
 *
 * test_mlp.c - a norm and an MLP from C alone, forward, backward and late weight gradients, with
 * and without recompute. Inputs are +-1, whose RMS norm is exact, and all else small integers that
 * FP8 holds at scale 1: every result must be exact, whatever lies in the scratch memory before and
 * whichever of its buffers share their place.
 */
#include "plans.h"

enum { MOST = 40, HIDDEN = 32, FFN = 24, SLOTS = 256, HISTORY = 4, PADDED = 48 };
enum { FORWARD_SLOT = 5, BACKWARD_SLOT = 7 };
enum { GRADIENTS = TE_LINEAR_DGRAD | TE_LINEAR_WGRAD_NEEDED };

typedef struct results {
    float output[MOST * HIDDEN], grad_input[MOST * HIDDEN], grad_gamma[HIDDEN];
    float grad_w1[FFN * HIDDEN], grad_b1[FFN], grad_w2[HIDDEN * FFN], grad_b2[HIDDEN];
} results;

typedef struct mlp {
    int64_t rows;
    float input[MOST * HIDDEN], gamma[HIDDEN], w1[FFN * HIDDEN], b1[FFN], w2[HIDDEN * FFN];
    float b2[HIDDEN], grad_output[MOST * HIDDEN];
    results found, exact;
    float forward_scale[SLOTS], forward_history[HISTORY * SLOTS];
    float backward_scale[SLOTS], backward_history[HISTORY * SLOTS];
    float grad_wide[MOST * FFN]; /* what a deferred plan is handed on */
    unsigned char columns[2][HIDDEN * PADDED];
    float pairs[2][2];
    void *saved;
} mlp;

/* A quarter of the elements are not 0: no sum leaves what FP8 holds exactly. */
static void fill_sparse(float *values, int rows, int columns, unsigned seed)
{
    plan_fill_integers(values, (int64_t)rows * columns, 1, seed);
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < columns; c++) {
            if ((r + c) % 4 != 0) values[r * columns + c] = 0;
        }
    }
}

static void fill(mlp *m, int64_t rows, unsigned seed)
{
    m->rows = rows;
    plan_fill_integers(m->input, rows * HIDDEN, 1, seed);
    for (int64_t i = 0; i < rows * HIDDEN; i++) m->input[i] = m->input[i] < 0 ? -1.0F : 1.0F;
    plan_fill_integers(m->gamma, HIDDEN, 1, seed + 1);
    fill_sparse(m->w1, FFN, HIDDEN, seed + 2);
    plan_fill_integers(m->b1, FFN, 2, seed + 3);
    fill_sparse(m->w2, HIDDEN, FFN, seed + 4);
    plan_fill_integers(m->b2, HIDDEN, 8, seed + 5);
    plan_fill_integers(m->grad_output, rows * HIDDEN, 1, seed + 6);
    memset(m->forward_history, 0, sizeof m->forward_history);
    memset(m->backward_history, 0, sizeof m->backward_history);
    for (int i = 0; i < SLOTS; i++) m->forward_scale[i] = m->backward_scale[i] = 1.0F;
}

/* One token: its output, and what it adds to the gradients. xhat is the input itself. */
static void expect_token(mlp *m, const float *x, const float *dy, float *y, float *dx)
{
    float before[FFN], grad[FFN], dz[HIDDEN];
    float mean = 0;
    results *e = &m->exact;
    for (int f = 0; f < FFN; f++) {
        before[f] = m->b1[f];
        grad[f] = 0;
        for (int h = 0; h < HIDDEN; h++) before[f] += x[h] * m->gamma[h] * m->w1[f * HIDDEN + h];
    }
    for (int h = 0; h < HIDDEN; h++) {
        y[h] = m->b2[h];
        e->grad_b2[h] += dy[h];
        for (int f = 0; f < FFN; f++) {
            float active = before[f] > 0 ? before[f] : 0;
            y[h] += active * m->w2[h * FFN + f];
            e->grad_w2[h * FFN + f] += dy[h] * active;
            if (before[f] > 0) grad[f] += dy[h] * m->w2[h * FFN + f];
        }
    }
    for (int f = 0; f < FFN; f++) {
        e->grad_b1[f] += grad[f];
        for (int h = 0; h < HIDDEN; h++) {
            e->grad_w1[f * HIDDEN + h] += grad[f] * x[h] * m->gamma[h];
        }
    }
    for (int h = 0; h < HIDDEN; h++) {
        dz[h] = 0;
        for (int f = 0; f < FFN; f++) dz[h] += grad[f] * m->w1[f * HIDDEN + h];
        e->grad_gamma[h] += dz[h] * x[h];
        mean += dz[h] * m->gamma[h] * x[h] / HIDDEN; /* exact: HIDDEN is a power of two */
    }
    for (int h = 0; h < HIDDEN; h++) dx[h] = dz[h] * m->gamma[h] - x[h] * mean;
}

static void expect(mlp *m)
{
    memset(&m->exact, 0, sizeof m->exact);
    for (int64_t t = 0; t < m->rows; t++) {
        int64_t at = t * HIDDEN;
        expect_token(m, m->input + at, m->grad_output + at, m->exact.output + at,
                     m->exact.grad_input + at);
    }
}

static void compare(const float *found, const float *exact, int64_t count, const char *what)
{
    for (int64_t i = 0; i < count; i++) {
        EXPECT(found[i] == exact[i], "%s[%d]: %g, expected %g", what, (int)i, found[i], exact[i]);
    }
}

static void check(const mlp *m)
{
    const results *f = &m->found;
    const results *e = &m->exact;
    compare(f->output, e->output, m->rows * HIDDEN, "output");
    compare(f->grad_input, e->grad_input, m->rows * HIDDEN, "grad_input");
    compare(f->grad_gamma, e->grad_gamma, HIDDEN, "grad_gamma");
    compare(f->grad_w1, e->grad_w1, (int64_t)FFN * HIDDEN, "fc1_grad_weight");
    compare(f->grad_b1, e->grad_b1, FFN, "fc1_grad_bias");
    compare(f->grad_w2, e->grad_w2, (int64_t)HIDDEN * FFN, "fc2_grad_weight");
    compare(f->grad_b2, e->grad_b2, HIDDEN, "fc2_grad_bias");
}

static te_linear_desc describe_part(te_recipe recipe, int64_t in, int64_t out, uint32_t flags)
{
    te_linear_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.size = sizeof desc;
    desc.in_features = in;
    desc.out_features = out;
    desc.input_dtype = desc.weight_dtype = desc.bias_dtype = TE_DTYPE_F32;
    desc.output_dtype = desc.grad_weight_dtype = TE_DTYPE_F32;
    desc.recipe = recipe;
    desc.forward_fp8 = TE_DTYPE_E4M3;
    desc.backward_fp8 = recipe == TE_RECIPE_NONE ? TE_DTYPE_E4M3 : TE_DTYPE_E5M2;
    desc.flags = flags | TE_LINEAR_BIAS;
    desc.gather = 1;
    return desc;
}

static te_mlp_desc describe(te_recipe recipe, uint32_t flags, uint32_t mlp_flags)
{
    te_mlp_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.size = sizeof desc;
    desc.activation = TE_ACTIVATION_RELU;
    desc.flags = mlp_flags;
    desc.fc1 = describe_part(recipe, HIDDEN, FFN, flags | TE_LINEAR_GRAD_GAMMA);
    desc.fc1.norm = 1 + TE_NORM_RMSNORM;
    desc.fc1.norm_dtype = TE_DTYPE_F32;
    desc.fc2 = describe_part(recipe, FFN, HIDDEN, flags);
    return desc;
}

static int64_t plan_of(te_mlp_desc *desc, int32_t direction)
{
    int64_t id = 0;
    desc->direction = desc->fc1.direction = desc->fc2.direction = direction;
    if (direction == TE_LINEAR_WGRAD) {
        desc->fc1.flags &= ~(uint32_t)(TE_LINEAR_BIAS | TE_LINEAR_DEFER_WGRAD);
        desc->fc2.flags &= ~(uint32_t)(TE_LINEAR_BIAS | TE_LINEAR_DEFER_WGRAD);
    }
    OK(te_plan_mlp(desc, &id));
    return id;
}

static void run(te_context *context, mlp *m, int64_t plan, int backward)
{
    int64_t rows = m->rows, padded = (m->rows + 15) / 16 * 16;
    results *f = &m->found;
    const plan_tensor table[] = {
        {"input", m->input, rows, HIDDEN},
        {"gamma", m->gamma, 0, HIDDEN},
        {"fc1_weight", m->w1, FFN, HIDDEN},
        {"fc1_bias", m->b1, 0, FFN},
        {"fc2_weight", m->w2, HIDDEN, FFN},
        {"fc2_bias", m->b2, 0, HIDDEN},
        {"output", f->output, rows, HIDDEN},
        {"grad_output", m->grad_output, rows, HIDDEN},
        {"grad_input", f->grad_input, rows, HIDDEN},
        {"grad_gamma", f->grad_gamma, 0, HIDDEN},
        {"fc1_grad_weight", f->grad_w1, FFN, HIDDEN},
        {"fc1_grad_bias", f->grad_b1, 0, FFN},
        {"fc2_grad_weight", f->grad_w2, HIDDEN, FFN},
        {"fc2_grad_bias", f->grad_b2, 0, HIDDEN},
        {"fc1_grad_output_wide", m->grad_wide, rows, FFN},
        {"fc1_grad_output_column", m->columns[0], FFN, padded},
        {"fc1_grad_output_pair", m->pairs[0], 0, 2},
        {"fc2_grad_output_column", m->columns[1], HIDDEN, padded},
        {"fc2_grad_output_pair", m->pairs[1], 0, 2},
        {"scale", backward ? m->backward_scale : m->forward_scale, 0, SLOTS},
        {"history", backward ? m->backward_history : m->forward_history, HISTORY, SLOTS},
        {NULL, NULL, 0, 0},
    };
    const int32_t slots[2] = {FORWARD_SLOT, BACKWARD_SLOT};
    plan_run(context, plan, rows, table, &m->saved, slots);
}

/* Every slot has the amax of its tensor; each is at least 1, and 0 where there is no tensor. */
static void check_history(const mlp *m)
{
    static const int forward[] = {1, 1, 0, 1, 1, 0, 0};
    static const int backward[] = {1, 0, 1, 0, 0};
    float largest = 0;
    for (int64_t i = 0; i < m->rows * HIDDEN; i++) {
        float magnitude = m->grad_output[i] < 0 ? -m->grad_output[i] : m->grad_output[i];
        if (magnitude > largest) largest = magnitude;
    }
    for (int i = 0; i < 7; i++) {
        float amax = m->forward_history[FORWARD_SLOT + i];
        EXPECT((amax >= 1) == forward[i], "forward slot %d: %g", i, amax);
    }
    for (int i = 0; i < 5; i++) {
        float amax = m->backward_history[BACKWARD_SLOT + i];
        EXPECT((amax >= 1) == backward[i], "backward slot %d: %g", i, amax);
    }
    EXPECT(m->forward_history[FORWARD_SLOT + 1] == 1, "amax of fc1_weight");
    EXPECT(m->forward_history[FORWARD_SLOT + 4] == 1, "amax of fc2_weight");
    EXPECT(m->backward_history[BACKWARD_SLOT + 2] == largest, "amax of grad_output");
}

static void step(te_context *context, mlp *m, te_recipe recipe, uint32_t flags, uint32_t mlp_flags)
{
    te_mlp_desc desc = describe(recipe, flags, mlp_flags);
    int64_t forward = plan_of(&desc, TE_LINEAR_FORWARD);
    int64_t backward = plan_of(&desc, TE_LINEAR_BACKWARD);
    int64_t gemms;
    int64_t expected = (mlp_flags & TE_MLP_RECOMPUTE) != 0 ? 7 : 6;
    te_counters_reset();
    memset(&m->found, 0xff, sizeof m->found);
    run(context, m, forward, 0);
    run(context, m, backward, 1);
    if ((flags & TE_LINEAR_DEFER_WGRAD) != 0) {
        run(context, m, plan_of(&desc, TE_LINEAR_WGRAD), 1);
    }
    free(m->saved);
    m->saved = NULL;
    check(m);
    if (recipe == TE_RECIPE_DELAYED) check_history(m);
    gemms = recipe == TE_RECIPE_NONE
                ? plan_count("gemm.cpu.f32.f32")
                : plan_count("gemm.cpu.e4m3.e4m3") + plan_count("gemm.cpu.e5m2.e4m3");
    EXPECT(gemms == expected, "%d GEMMs, expected %d", (int)gemms, (int)expected);
}

/* Members lie within the packed memory, apart from each other where they must, aligned; and the
 * saved memory is no larger than its members with a member's alignment for each. */
static void check_layout(int64_t plan, int64_t rows)
{
    te_plan_info info;
    te_plan_sizes sizes;
    int64_t offsets[PLAN_MAX_BUFFERS];
    int64_t members = 0, largest = 0, end = 0, count = 0;
    OK(te_plan_describe(plan, &info));
    OK(te_plan_infer(plan, rows, &sizes, offsets));
    for (int i = 0; i < info.buffer_count; i++) {
        const te_buffer_info *b = &info.buffers[i];
        int64_t bytes = (int64_t)te_dtype_bytes(b->dtype);
        if (b->role != TE_ROLE_SCRATCH && b->role != TE_ROLE_SAVED) {
            EXPECT(offsets[i] == -1, "%s", b->name);
            continue; /* chunks of state have no size that could be multiplied */
        }
        for (int d = 0; d < 2; d++) {
            const te_extent *e = &b->shape[d];
            int64_t padded = (rows + e->align - 1) / e->align * e->align;
            bytes *= e->multiply * padded + e->add;
        }
        if (b->role == TE_ROLE_SCRATCH) {
            EXPECT(offsets[i] >= 0 && offsets[i] % PLAN_ALIGN == 0, "%s", b->name);
            EXPECT(offsets[i] + bytes <= sizes.scratch_bytes, "%s", b->name);
            if (offsets[i] + bytes > largest) largest = offsets[i] + bytes;
        } else {
            int64_t aligned = (bytes + PLAN_ALIGN - 1) / PLAN_ALIGN * PLAN_ALIGN;
            EXPECT(offsets[i] >= end && offsets[i] % PLAN_ALIGN == 0, "%s", b->name);
            end = offsets[i] + bytes;
            members += aligned;
            count++;
        }
    }
    EXPECT(end <= sizes.saved_bytes, "%s saves %d bytes in %d", info.kind, (int)end,
           (int)sizes.saved_bytes);
    /* Every member may be rounded up to the padding of another and aligned once more. */
    EXPECT(sizes.saved_bytes <= members + count * (PLAN_ALIGN + 15 * 4 * FFN), "%s saves %d bytes",
           info.kind, (int)sizes.saved_bytes);
    EXPECT(sizes.scratch_bytes < largest + PLAN_ALIGN, "%s", info.kind);
}

static void check_memory(void)
{
    static const te_recipe recipes[] = {TE_RECIPE_NONE, TE_RECIPE_DELAYED, TE_RECIPE_CURRENT};
    te_plan_sizes keeps, repeats;
    for (int r = 0; r < 3; r++) {
        for (uint32_t again = 0; again < 2; again++) {
            te_mlp_desc desc = describe(recipes[r], GRADIENTS, again);
            int64_t forward = plan_of(&desc, TE_LINEAR_FORWARD);
            int64_t backward = plan_of(&desc, TE_LINEAR_BACKWARD);
            for (int64_t rows = 0; rows < 70; rows++) {
                check_layout(forward, rows);
                check_layout(backward, rows);
            }
            OK(te_plan_infer(forward, MOST, again != 0 ? &repeats : &keeps, NULL));
        }
        EXPECT(repeats.saved_bytes < keeps.saved_bytes, "recompute saves %d bytes, else %d",
               (int)repeats.saved_bytes, (int)keeps.saved_bytes);
    }
}

static void refuse(const te_mlp_desc *desc, te_status status, const char *text)
{
    int64_t id = 0;
    EXPECT(te_plan_mlp(desc, &id) == status, "%s", te_last_error());
    EXPECT(strstr(te_last_error(), text) != NULL, "%s", te_last_error());
}

static void check_errors(void)
{
    te_mlp_desc desc = describe(TE_RECIPE_DELAYED, GRADIENTS, 0);
    desc.fc1.out_features = FFN + 1;
    refuse(&desc, TE_ERROR_INVALID, "fc1 has 25 outputs, relu of 24 needs 24");
    desc = describe(TE_RECIPE_DELAYED, GRADIENTS, 0);
    desc.activation = TE_ACTIVATION_SWIGLU;
    refuse(&desc, TE_ERROR_INVALID, "swiglu of 24 needs 48");
    desc = describe(TE_RECIPE_DELAYED, GRADIENTS, 0);
    desc.activation = TE_ACTIVATION_COUNT;
    refuse(&desc, TE_ERROR_INVALID, "activation = 12");
    desc = describe(TE_RECIPE_DELAYED, GRADIENTS, 2);
    refuse(&desc, TE_ERROR_INVALID, "flags = 0x2");
    desc = describe(TE_RECIPE_DELAYED, GRADIENTS, 0);
    desc.fc2.recipe = TE_RECIPE_CURRENT;
    refuse(&desc, TE_ERROR_INVALID, "recipes 1 and 2");
    desc = describe(TE_RECIPE_DELAYED, GRADIENTS, TE_MLP_RECOMPUTE);
    desc.direction = desc.fc1.direction = desc.fc2.direction = TE_LINEAR_WGRAD;
    refuse(&desc, TE_ERROR_UNSUPPORTED, "deferred weight gradient with recompute");
    desc = describe(TE_RECIPE_DELAYED, GRADIENTS, 0);
    desc.size = 8;
    refuse(&desc, TE_ERROR_INVALID, "size = 8");
    EXPECT(te_plan_mlp(NULL, &(int64_t){0}) == TE_ERROR_INVALID, "%s", te_last_error());
}

int main(void)
{
    static mlp m;
    static const int64_t rows[] = {1, 9, 16, 33, MOST};
    te_context *context = NULL;
    OK(te_context_create(plan_cpu, &context));
    for (unsigned i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        static const te_recipe recipes[] = {TE_RECIPE_NONE, TE_RECIPE_DELAYED};
        for (int r = 0; r < 2; r++) {
            fill(&m, rows[i], 10 * i + 1);
            expect(&m);
            step(context, &m, recipes[r], GRADIENTS, 0);
            step(context, &m, recipes[r], GRADIENTS, TE_MLP_RECOMPUTE);
            step(context, &m, recipes[r], GRADIENTS | TE_LINEAR_DEFER_WGRAD, 0);
        }
    }
    check_memory();
    check_errors();
    te_context_destroy(context);
    (void)puts("mlp: ok");
    return 0;
}
