/* SPDX-License-Identifier: Apache-2.0
 *
 * test_xla.c - the custom calls of csrc/xla, driven as XLA drives them: the handshake, plans and
 * operators against direct calls, bits equal, and what is refused.
 */
#include <pthread.h>

#include "xla_frame.h"

enum { TOKENS = 6, IN = 40, OUT = 24, SLOT = 5, THREADS = 4, TEXT_BYTES = 1 << 14 };

static const te_xla_handler handlers[] = {
#define X(name, platform, type) te_xla_##name##_##platform,
    TE_XLA_HANDLERS(X)
#undef X
};

static void check_metadata(void)
{
    for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++) {
        te_xla_metadata metadata = {.struct_size = 36, .state_type = 77};
        te_xla_metadata_extension extension = {{32, TE_XLA_EXTENSION_METADATA, NULL}, &metadata};
        te_xla_extension other = {24, 99, &extension.base};
        te_xla_frame frame = {.struct_size = 168, .extension_start = &other};
        EXPECT(handlers[i](&frame) == NULL, "handler %zu", i);
        EXPECT(metadata.version.major == 0 && metadata.version.minor == 3, "version %d.%d",
               (int)metadata.version.major, (int)metadata.version.minor);
        EXPECT(metadata.traits == TE_XLA_COMMAND_BUFFER_COMPATIBLE && metadata.state_type == 77,
               "traits %u", metadata.traits);
    }
}

/* ---- operators ---- */

static void operator_start(fake_call *call, const char *name, int64_t given, int64_t made)
{
    memset(call, 0, sizeof *call);
    fake_text(&call->attributes, "operator", name);
    fake_integer(&call->attributes, "given", given);
    fake_integer(&call->attributes, "made", made);
    fake_dictionary(&call->attributes, "numbers", &call->numbers);
}

static int64_t bit_of(te_op op, const char *name)
{
    const te_op_info *info = te_op_describe(op);
    for (int32_t i = 0; i < info->field_count; i++) {
        if (strcmp(info->fields[i].name, name) == 0) return INT64_C(1) << i;
    }
    EXPECT(0, "no field %s", name);
    return 0;
}

/* A cast with a scale: an optional result, one that is changed, elements by pointer, numbers. */
static void quantize_start(fake_call *call, float *scale, float *amax)
{
    const te_op op = TE_OP_QUANTIZE;
    const int64_t dims[3] = {2, 2, 3};
    const int64_t given = bit_of(op, "input") | bit_of(op, "scale") | bit_of(op, "amax");
    const int64_t made = bit_of(op, "row") | bit_of(op, "row_scales") | bit_of(op, "amax");
    float *input;
    operator_start(call, "quantize", given, made);
    input = fake_add(&call->arguments, TE_XLA_F32, 12 * sizeof(float), NULL, 3, dims);
    for (int i = 0; i < 12; i++) input[i] = (float)(i - 9);
    fake_integer(&call->numbers, "mode", TE_SCALING_TENSOR);
    fake_real(&call->numbers, "amax_epsilon", 0.0);
    (void)fake_matrix(&call->results, TE_XLA_F8E4M3FN, NULL, 4, 3, 1);
    (void)fake_vector(&call->results, TE_XLA_F32, NULL, TE_TENSOR_SCALES, sizeof(float));
    (void)fake_vector(&call->arguments, TE_XLA_F32, scale, 1, sizeof *scale);
    (void)fake_vector(&call->arguments, TE_XLA_F32, amax, 1, sizeof *amax);
    (void)fake_vector(&call->results, TE_XLA_F32, amax, 1, sizeof *amax);
    fake_scratch(call, 0);
}

static void check_quantize(te_context *context)
{
    static fake_call call;
    float scale = 4.0F, amax = 2.0F, direct_amax = 2.0F, scales[2];
    unsigned char row[12];
    te_quantize_args args;
    quantize_start(&call, &scale, &amax);
    fake_stage(&call, te_xla_operator_cpu, TE_XLA_INSTANTIATE);
    EXPECT(call.error == NULL, "%s", call.error->text);
    fake_run(&call, te_xla_operator_cpu);
    te_op_initial(TE_OP_QUANTIZE, &args);
    args.input = (te_tensor){call.arguments.all[0].data, TE_DTYPE_F32, plan_cpu, 2, {4, 3}, {3, 1}};
    args.cast.result.mode = TE_SCALING_TENSOR;
    args.cast.result.row = (te_tensor){row, TE_DTYPE_E4M3, plan_cpu, 2, {4, 3}, {3, 1}};
    args.cast.result.row_scales = (te_tensor){scales, TE_DTYPE_F32, plan_cpu, 1, {2}, {1}};
    args.cast.scale = &scale;
    args.cast.amax = &direct_amax;
    OK(te_quantize(context, &args, NULL));
    EXPECT(memcmp(row, call.results.all[0].data, 12) == 0, "data");
    EXPECT(memcmp(scales, call.results.all[1].data, sizeof scales) == 0, "scales");
    EXPECT(amax == 9.0F && direct_amax == 9.0F, "amax %g, %g", (double)amax, (double)direct_amax);
    fake_end(&call);
}

static void check_refused_operators(void)
{
    const int32_t invalid = TE_XLA_INVALID_ARGUMENT;
    const te_xla_handler run = te_xla_operator_cpu;
    static fake_call call;
    float scale = 1.0F, amax = 0.0F, other = 0.0F;
    quantize_start(&call, &scale, &amax);
    fake_text(&call.attributes, "operator", "quantizer");
    fake_refused(&call, run, TE_XLA_INSTANTIATE, invalid, "there is no operator quantizer");
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "there is no operator quantizer");
    fake_integer(&call.attributes, "operator", 1);
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "expected the attributes operator");
    fake_text(&call.attributes, "operator", "quantize");
    fake_refused(&call, run, TE_XLA_PREPARE, invalid, "stage 1");
    fake_integer(&call.numbers, "margins", 1);
    fake_refused(&call, run, TE_XLA_INSTANTIATE, invalid, "1 of 3 numbers");
    call.numbers.own.size--;
    fake_real(&call.attributes, "given", 1.0);
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "attribute given: there is no such integer");
    fake_integer(&call.attributes, "given", 1);
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "amax is changed, and was not given");
    fake_end(&call);

    quantize_start(&call, &scale, &amax);
    fake_integer(&call.attributes, "made", bit_of(TE_OP_QUANTIZE, "scale"));
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "scale is read alone");
    fake_integer(&call.attributes, "made", 0);
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "amax is written, and was not given as a");
    fake_integer(&call.attributes, "made", bit_of(TE_OP_QUANTIZE, "mode"));
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "mode is no tensor");
    fake_end(&call);

    quantize_start(&call, &scale, &amax);
    call.results.all[2].data = &other;
    fake_refused(&call, run, TE_XLA_EXECUTE, TE_XLA_FAILED_PRECONDITION, "must share memory");
    call.results.all[2].data = &amax;
    call.arguments.all[1].dtype = TE_XLA_BF16;
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "scale: dtype bf16, expected f32");
    call.arguments.all[1].dtype = TE_XLA_F64;
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "scale: XLA's dtype 12");
    call.arguments.all[1].dtype = TE_XLA_F32;
    call.arguments.dims[1][0] = 0;
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "scale: 0 elements, expected 1");
    call.arguments.dims[1][0] = 1;
    call.arguments.count--;
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "2 arguments, expected one more for amax");
    call.arguments.count += 2;
    call.arguments.all[3] = call.arguments.all[2];
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "4 arguments, expected 3");
    call.arguments.count--;
    call.arguments.types[0] = 2;
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "input: argument 0 is no buffer");
    call.arguments.types[0] = TE_XLA_ARGUMENT_BUFFER;
    call.results.dims[3][0]--;
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "scratch: expected at least 256 bytes");
    call.results.dims[3][0]++;
    call.results.count++;
    call.results.all[4] = call.results.all[0];
    call.results.pointers[4] = &call.results.all[4];
    call.results.types[4] = TE_XLA_ARGUMENT_BUFFER;
    call.results.owned[4] = 0;
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "5 results, expected 4");
    call.results.count--;
    call.results.all[0].dtype = TE_XLA_BF16;
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "quantize");
    EXPECT(amax == 0.0F, "a call that is refused writes nothing");
    call.results.all[0].dtype = TE_XLA_F8E4M3FN;
    fake_refused(&call, te_xla_operator_CUDA, TE_XLA_EXECUTE, TE_XLA_UNIMPLEMENTED,
                 "a fake stream");
    fake_run(&call, run);
    fake_end(&call);
}

/* Dropout by a pair of 64-bit numbers: as such, and as four of 32 bits. */
static void check_pairs(void)
{
    const int64_t bits = bit_of(TE_OP_DROPOUT_ADD, "input") | bit_of(TE_OP_DROPOUT_ADD, "rng");
    int64_t pair[2] = {INT64_C(0x123456789abcdef), 3};
    unsigned char made[2][IN * OUT * sizeof(float)];
    for (int wide = 0; wide < 2; wide++) {
        static fake_call call;
        float *input;
        operator_start(&call, "dropout_add", bits, bit_of(TE_OP_DROPOUT_ADD, "output"));
        input = fake_matrix(&call.arguments, TE_XLA_F32, NULL, IN, OUT, sizeof(float));
        for (int i = 0; i < IN * OUT; i++) input[i] = 1.0F;
        fake_real(&call.numbers, "dropout", 0.5);
        (void)fake_vector(&call.arguments, wide ? TE_XLA_S64 : TE_XLA_U32, pair, wide ? 2 : 4, 4);
        (void)fake_matrix(&call.results, TE_XLA_F32, NULL, IN, OUT, sizeof(float));
        fake_scratch(&call, 0);
        fake_run(&call, te_xla_operator_cpu);
        memcpy(made[wide], call.results.all[0].data, sizeof made[wide]);
        call.arguments.dims[1][0]--;
        fake_refused(&call, te_xla_operator_cpu, TE_XLA_EXECUTE, TE_XLA_INVALID_ARGUMENT,
                     wide ? "1 elements, expected 2" : "3 numbers of 32 bits, expected pairs");
        fake_end(&call);
    }
    EXPECT(memcmp(made[0], made[1], sizeof made[0]) == 0, "the same numbers");
}

/* ---- plans ---- */

static graph linear;
static plan_memory direct;
static char texts[2][TEXT_BYTES];
static const int32_t slots[1] = {SLOT};

static void linear_start(te_context *context)
{
    const te_sizes tokens = te_sizes_of_rows(TOKENS);
    size_t length = 0;
    int32_t x, y;
    graph_start(&linear, TE_RECIPE_DELAYED, 0);
    x = graph_input(&linear, "input", IN);
    y = graph_value(&linear, "output", TE_VALUE_RESULT, 0, OUT);
    (void)graph_linear(&linear, "", x, y, 0);
    graph_make(&linear);
    plan_memory_start(&direct, &tokens);
    direct.slots[0] = direct.slots[1] = SLOT;
    graph_fill_integers(&linear, &direct, TE_LINK_VALUE, x, 4);
    graph_fill_integers(&linear, &direct, TE_LINK_VALUE, linear.inputs[0][1], 2);
    graph_fill_integers(&linear, &direct, TE_LINK_VALUE, linear.inputs[0][2], 8);
    graph_fill_integers(&linear, &direct, TE_LINK_GRADIENT, y, 3);
    for (int d = 0; d < 2; d++) {
        OK(te_graph_write(&linear.desc, (te_direction)d, texts[d], TEXT_BYTES, &length));
        plan_run(context, linear.plans[d], &direct);
    }
}

static size_t bytes_of(const te_tensor *tensor)
{
    size_t bytes = te_dtype_bytes(tensor->dtype);
    for (int32_t d = 0; d < tensor->ndim; d++) bytes *= (size_t)tensor->shape[d];
    return bytes;
}

/* A call with the arguments of the run, scaling state of its own, and leading dims 2 x 3. */
static void plan_start(fake_call *call, te_context *context, int backward, float *history)
{
    static const int32_t dtypes[] = {
        [TE_DTYPE_F32] = TE_XLA_F32, [TE_DTYPE_E4M3] = TE_XLA_F8E4M3FN, [TE_DTYPE_U8] = TE_XLA_U8};
    te_plan_info info;
    te_plan_sizes sizes;
    size_t scratch = 0;
    memset(call, 0, sizeof *call);
    OK(te_plan_describe(linear.plans[backward], &info));
    OK(te_plan_infer(linear.plans[backward], &direct.sizes, &sizes, NULL));
    OK(te_plan_scratch(context, linear.plans[backward], &direct.sizes, &scratch));
    for (int32_t i = 0; i < info.argument_count + info.output_count; i++) {
        const te_buffer_info *buffer = &info.buffers[i];
        const int output = buffer->role == TE_ROLE_OUTPUT;
        te_tensor view = plan_dense(&direct, buffer);
        int64_t dims[FAKE_DIMS] = {2, TOKENS / 2, view.shape[1]};
        void *data = NULL;
        if (!output) data = plan_view(&direct, buffer, backward).data;
        if (buffer->written) {
            memset(history, 0, bytes_of(&view));
            data = history;
        }
        (void)fake_add(output ? &call->results : &call->arguments, dtypes[buffer->dtype],
                       bytes_of(&view), data, view.ndim + (buffer->leading && view.ndim == 2),
                       buffer->leading && view.ndim == 2 ? dims : view.shape);
    }
    for (int32_t i = 0; i < info.argument_count; i++) {
        if (!info.buffers[i].written) continue;
        (void)fake_add(&call->results, TE_XLA_F32, 0, history, 2, call->arguments.dims[i]);
    }
    EXPECT(info.has_saved && sizes.saved_bytes > 0, "something is saved");
    (void)fake_vector(backward ? &call->arguments : &call->results, TE_XLA_U8,
                      backward ? direct.saved : NULL, sizes.saved_bytes, 1);
    fake_scratch(call, scratch);
    fake_text(&call->attributes, "graph", texts[backward]);
    fake_integer(&call->attributes, "id", info.id);
    fake_integer(&call->attributes, "rows", -1);
    fake_array(&call->attributes, "slots", slots, 1);
}

static void check_plan(te_context *context, int backward)
{
    static _Thread_local fake_call call;
    float history[PLAN_HISTORY * PLAN_SLOTS];
    te_plan_info info;
    OK(te_plan_describe(linear.plans[backward], &info));
    plan_start(&call, context, backward, history);
    fake_stage(&call, te_xla_plan_cpu, TE_XLA_INSTANTIATE);
    EXPECT(call.error == NULL, "%s", call.error->text);
    for (int again = 0; again < 3; again++) fake_run(&call, te_xla_plan_cpu);
    for (int32_t i = 0; i < info.output_count; i++) {
        const te_buffer_info *buffer = &info.buffers[info.argument_count + i];
        const plan_member *member = plan_find(&direct, buffer->link, buffer->of);
        EXPECT(memcmp(member->data, call.results.all[i].data, member->bytes) == 0, "%s",
               buffer->name);
    }
    EXPECT(memcmp(history, direct.history[0][backward], sizeof history) == 0, "history");
    EXPECT(history[SLOT] > 0.0F, "an amax");
    fake_end(&call);
}

static void *check_both(void *context)
{
    check_plan(context, 0);
    check_plan(context, 1);
    return NULL;
}

static void check_threads(te_context *context)
{
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        EXPECT(pthread_create(&threads[i], NULL, check_both, context) == 0, "thread %d", i);
    }
    for (int i = 0; i < THREADS; i++) (void)pthread_join(threads[i], NULL);
}

static void check_refused_plans(te_context *context)
{
    const int32_t invalid = TE_XLA_INVALID_ARGUMENT;
    const te_xla_handler run = te_xla_plan_cpu;
    static fake_call call;
    static float history[PLAN_HISTORY * PLAN_SLOTS];
    char damaged[TEXT_BYTES];
    plan_start(&call, context, 0, history);
    memcpy(damaged, texts[0], sizeof damaged);
    damaged[strlen(damaged) - 1] = '\0';
    fake_text(&call.attributes, "graph", damaged);
    fake_refused(&call, run, TE_XLA_INSTANTIATE, invalid, "graph");
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "graph");
    fake_integer(&call.attributes, "graph", 1);
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "expected the attribute graph");
    fake_text(&call.attributes, "graph", texts[0]);
    fake_array(&call.attributes, "slots", slots, 0);
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "slots: expected 1");
    fake_array(&call.attributes, "slots", slots, 1);
    call.arguments.dims[0][2]++;
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid,
                 "plan: input: dim 1 has size 41, expected 40");
    call.arguments.dims[0][2]--;
    call.arguments.dims[1][0]++;
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "plan: weight: dim 0");
    call.arguments.dims[1][0]--;
    call.arguments.all[1].dtype = TE_XLA_BF16;
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "plan: weight: dtype bf16, expected f32");
    call.arguments.all[1].dtype = TE_XLA_F32;
    call.results.all[0].rank = 1;
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "plan: output: dim 0 has size 1");
    call.results.all[0].rank = 3;
    call.results.dims[2][0]--;
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "saved: expected a vector of");
    call.results.dims[2][0]++;
    call.results.all[1].data = call.results.all[2].data;
    fake_refused(&call, run, TE_XLA_EXECUTE, TE_XLA_FAILED_PRECONDITION, "must share memory");
    call.results.all[1].data = history;
    call.arguments.count--;
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "arguments, expected one more");
    call.arguments.count++;
    for (int i = 0; i < PLAN_HISTORY * PLAN_SLOTS; i++) EXPECT(history[i] == 0.0F, "history");
    fake_refused(&call, te_xla_plan_CUDA, TE_XLA_EXECUTE, TE_XLA_UNIMPLEMENTED, "a fake stream");
    fake_run(&call, run);
    call.results.dims[3][0]--; /* so it may be a later stage that has too little */
    fake_refused(&call, run, TE_XLA_EXECUTE, invalid, "bytes");
    fake_end(&call);
}

int main(void)
{
    te_context *context = NULL;
    OK(te_context_create(plan_cpu, &context));
    check_metadata();
    check_quantize(context);
    check_refused_operators();
    check_pairs();
    linear_start(context);
    check_threads(context); /* first: so threads make the plans */
    check_refused_plans(context);
    plan_memory_end(&direct);
    te_context_destroy(context);
    (void)puts("xla: ok");
    return 0;
}
