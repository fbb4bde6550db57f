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

/* A call of some stages: the arguments of the direct run with leading dims 2 x 3, scaling state of
 * its own, and what calls of other stages have left. */
typedef struct plan_part {
    fake_call call;
    te_plan_info info;
    unsigned char ports[FAKE_BUFFERS];
    float history[PLAN_HISTORY * PLAN_SLOTS];
    void *held[FAKE_BUFFERS]; /* what calls have made, by buffer */
} plan_part;

static int32_t dtype_in_xla(te_dtype dtype)
{
    static const int32_t dtypes[] = {[TE_DTYPE_F32] = TE_XLA_F32,
                                     [TE_DTYPE_BF16] = TE_XLA_BF16,
                                     [TE_DTYPE_E4M3] = TE_XLA_F8E4M3FN,
                                     [TE_DTYPE_E5M2] = TE_XLA_F8E5M2};
    return dtypes[dtype];
}

/* Where a buffer lies that a call is given. */
static void *given_data(plan_part *part, int32_t at, int backward)
{
    const te_buffer_info *buffer = &part->info.buffers[at];
    int64_t offsets[FAKE_BUFFERS];
    te_plan_sizes sizes;
    if (part->held[at] != NULL) return part->held[at];
    if (buffer->written) return part->history;
    if (buffer->role <= TE_ROLE_STATE) return plan_view(&direct, buffer, backward).data;
    EXPECT(backward && buffer->role == TE_ROLE_SAVED, "%s: nobody has made it", buffer->name);
    OK(te_plan_infer(linear.plans[1], &direct.sizes, &sizes, offsets));
    return (char *)direct.saved + offsets[at];
}

static void add_buffer(plan_part *part, int32_t at, fake_buffers *to, void *data, int apart)
{
    const te_buffer_info *buffer = &part->info.buffers[at];
    const te_tensor view = plan_dense(&direct, buffer);
    const int leads = !apart && buffer->leading && view.ndim == 2;
    const int64_t dims[FAKE_DIMS] = {2, TOKENS / 2, view.shape[1]};
    (void)fake_add(to, dtype_in_xla(buffer->dtype), bytes_of(&view), data, view.ndim + leads,
                   leads ? dims : view.shape);
}

static void plan_start(plan_part *part, te_context *context, int backward, int32_t first,
                       int32_t end)
{
    fake_call *call = &part->call;
    size_t scratch = 0;
    int apart;
    memset(call, 0, sizeof *call);
    OK(te_plan_describe(linear.plans[backward], &part->info));
    OK(te_plan_ports(linear.plans[backward], first, end, part->ports));
    OK(te_plan_scratch(context, linear.plans[backward], &direct.sizes, &scratch));
    apart = first > 0 || end < part->info.stage_count;
    for (int32_t i = 0; i < part->info.buffer_count; i++) {
        void *data = NULL;
        if (part->ports[i] & TE_PORT_GIVEN) {
            data = given_data(part, i, backward);
            add_buffer(part, i, &call->arguments, data, apart);
        }
        if ((part->ports[i] & TE_PORT_MADE) == 0) continue;
        if (data == NULL) {
            const te_tensor view = plan_dense(&direct, &part->info.buffers[i]);
            data = part->held[i] = plan_allocate(bytes_of(&view));
        }
        add_buffer(part, i, &call->results, data, apart);
    }
    fake_scratch(call, scratch);
    fake_text(&call->attributes, "graph", texts[backward]);
    fake_integer(&call->attributes, "id", part->info.id);
    fake_integer(&call->attributes, "first", first);
    fake_integer(&call->attributes, "end", end);
    fake_integer(&call->attributes, "rows", apart ? TOKENS : -1);
    fake_array(&call->attributes, "slots", slots, 1);
}

static void plan_end(plan_part *part)
{
    fake_end(&part->call);
    for (int i = 0; i < FAKE_BUFFERS; i++) free(part->held[i]);
    memset(part->held, 0, sizeof part->held);
    memset(part->history, 0, sizeof part->history);
}

/* What calls have made is what the direct run has. */
static void check_results(plan_part *part, int backward)
{
    int64_t offsets[FAKE_BUFFERS];
    te_plan_sizes sizes;
    OK(te_plan_infer(linear.plans[backward], &direct.sizes, &sizes, offsets));
    for (int32_t i = 0; i < part->info.buffer_count; i++) {
        const te_buffer_info *buffer = &part->info.buffers[i];
        const te_tensor view = plan_dense(&direct, buffer);
        const void *wanted = NULL;
        if (buffer->role == TE_ROLE_OUTPUT) {
            wanted = plan_find(&direct, buffer->link, buffer->of)->data;
        } else if (buffer->role == TE_ROLE_SAVED && !backward) {
            wanted = (const char *)direct.saved + offsets[i];
        }
        if (wanted == NULL) continue;
        EXPECT(memcmp(wanted, part->held[i], bytes_of(&view)) == 0, "%s", buffer->name);
        plan_check_guard(part->held[i], bytes_of(&view), buffer->name);
    }
    EXPECT(memcmp(part->history, direct.history[0][backward], sizeof part->history) == 0,
           "history");
    EXPECT(part->history[SLOT] > 0.0F, "an amax");
}

static _Thread_local plan_part part;

static void check_plan(te_context *context, int backward)
{
    te_plan_info info;
    OK(te_plan_describe(linear.plans[backward], &info));
    plan_start(&part, context, backward, 0, info.stage_count);
    fake_stage(&part.call, te_xla_plan_cpu, TE_XLA_INSTANTIATE);
    EXPECT(part.call.error == NULL, "%s", part.call.error->text);
    for (int again = 0; again < 3; again++) fake_run(&part.call, te_xla_plan_cpu);
    check_results(&part, backward);
    plan_end(&part);
}

/* A plan in two calls, cut at each of its stages; each has what it is given, and no more. */
static void check_parts(te_context *context, int backward)
{
    te_plan_info info;
    OK(te_plan_describe(linear.plans[backward], &info));
    EXPECT(info.stage_count >= 3, "%d stages", info.stage_count);
    for (int32_t cut = 1; cut < info.stage_count; cut++) {
        for (int second = 0; second < 2; second++) {
            plan_start(&part, context, backward, second ? cut : 0, second ? info.stage_count : cut);
            fake_run(&part.call, te_xla_plan_cpu);
            if (second == 0) fake_end(&part.call);
        }
        check_results(&part, backward);
        plan_end(&part);
    }
}

/* Ports of a range: bits of each buffer by what the stages say of it. */
static void check_ports(void)
{
    unsigned char ports[FAKE_BUFFERS], parts[2][FAKE_BUFFERS];
    for (int backward = 0; backward < 2; backward++) {
        const te_plan *plan = linear.plans[backward];
        te_plan_info info;
        OK(te_plan_describe(plan, &info));
        OK(te_plan_ports(plan, 0, info.stage_count, ports));
        OK(te_plan_ports(plan, 0, 1, parts[0]));
        OK(te_plan_ports(plan, 1, info.stage_count, parts[1]));
        for (int32_t i = 0; i < info.buffer_count; i++) {
            const te_buffer_role role = info.buffers[i].role;
            const int saved = role == TE_ROLE_SAVED;
            const int given = role <= TE_ROLE_STATE || (saved && backward);
            const int made = role == TE_ROLE_OUTPUT || (saved && !backward) ||
                             (role == TE_ROLE_STATE && info.buffers[i].written);
            EXPECT(ports[i] == given * TE_PORT_GIVEN + made * TE_PORT_MADE, "%s: %d",
                   info.buffers[i].name, ports[i]);
            EXPECT((parts[0][i] & TE_PORT_MADE) || !(parts[1][i] & TE_PORT_GIVEN) || given,
                   "%s is given to a part, and none makes it", info.buffers[i].name);
        }
        EXPECT(te_plan_ports(plan, 2, 1, ports) == TE_ERROR_INVALID, "2 to 1");
        EXPECT(te_plan_ports(plan, -1, 1, ports) == TE_ERROR_INVALID, "-1 to 1");
        EXPECT(te_plan_ports(plan, 0, info.stage_count + 1, ports) == TE_ERROR_INVALID, "too many");
    }
    EXPECT(te_plan_ports(NULL, 0, 0, ports) == TE_ERROR_INVALID, "NULL");
}

/* What is not handed over is named. */
static void check_missing(te_context *context)
{
    te_tensor none[FAKE_BUFFERS];
    te_plan_call call = {.size = sizeof call, .plan = linear.plans[0], .buffers = none};
    memset(none, 0, sizeof none);
    call.sizes = direct.sizes;
    call.slots = direct.slots;
    call.apart = 1;
    call.end_stage = 1;
    OK(te_plan_scratch(context, call.plan, &call.sizes, &call.scratch_size));
    call.scratch = plan_allocate(call.scratch_size);
    EXPECT(te_plan_run(context, &call, NULL) == TE_ERROR_INVALID, "nothing was given");
    EXPECT(strstr(te_last_error(), "uses it, and it was not given") != NULL, "%s", te_last_error());
    call.end_stage = 99;
    EXPECT(te_plan_run(context, &call, NULL) == TE_ERROR_INVALID, "stages to 99");
    EXPECT(strstr(te_last_error(), "stages 0 to 99") != NULL, "%s", te_last_error());
    free(call.scratch);
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
    fake_call *call = &part.call;
    char damaged[TEXT_BYTES];
    te_plan_info info;
    OK(te_plan_describe(linear.plans[0], &info));
    plan_start(&part, context, 0, 0, info.stage_count);
    memcpy(damaged, texts[0], sizeof damaged);
    damaged[strlen(damaged) - 1] = '\0';
    fake_text(&call->attributes, "graph", damaged);
    fake_refused(call, run, TE_XLA_INSTANTIATE, invalid, "graph");
    fake_refused(call, run, TE_XLA_EXECUTE, invalid, "graph");
    fake_integer(&call->attributes, "graph", 1);
    fake_refused(call, run, TE_XLA_EXECUTE, invalid, "expected the attribute graph");
    fake_text(&call->attributes, "graph", texts[0]);
    fake_integer(&call->attributes, "end", info.stage_count + 1);
    fake_refused(call, run, TE_XLA_INSTANTIATE, invalid, "custom call: stages 0 to");
    fake_refused(call, run, TE_XLA_EXECUTE, invalid, "custom call: stages 0 to");
    fake_integer(&call->attributes, "end", info.stage_count);
    fake_array(&call->attributes, "slots", slots, 0);
    fake_refused(call, run, TE_XLA_EXECUTE, invalid, "slots: expected 1");
    fake_array(&call->attributes, "slots", slots, 1);
    call->arguments.dims[0][2]++;
    fake_refused(call, run, TE_XLA_EXECUTE, invalid, "plan: input: dim 1 has size 41, expected 40");
    call->arguments.dims[0][2]--;
    call->arguments.dims[1][0]++;
    fake_refused(call, run, TE_XLA_EXECUTE, invalid, "plan: weight: dim 0");
    call->arguments.dims[1][0]--;
    call->arguments.all[1].dtype = TE_XLA_BF16;
    fake_refused(call, run, TE_XLA_EXECUTE, invalid, "plan: weight: dtype bf16, expected f32");
    call->arguments.all[1].dtype = TE_XLA_F32;
    /* Results: the history, the output, what is saved, scratch. */
    call->results.all[1].rank = 1;
    fake_refused(call, run, TE_XLA_EXECUTE, invalid, "plan: output: dim 0 has size 1");
    call->results.all[1].rank = 3;
    call->results.dims[2][0]--;
    fake_refused(call, run, TE_XLA_EXECUTE, invalid, "plan: input_scales: dim 0 has size 1");
    call->results.dims[2][0]++;
    call->results.all[0].data = call->results.all[2].data;
    fake_refused(call, run, TE_XLA_EXECUTE, TE_XLA_FAILED_PRECONDITION, "must share memory");
    call->results.all[0].data = part.history;
    call->arguments.count--;
    fake_refused(call, run, TE_XLA_EXECUTE, invalid, "arguments, expected one more");
    call->arguments.count++;
    for (int i = 0; i < PLAN_HISTORY * PLAN_SLOTS; i++) EXPECT(part.history[i] == 0.0F, "history");
    fake_refused(call, te_xla_plan_CUDA, TE_XLA_EXECUTE, TE_XLA_UNIMPLEMENTED, "a fake stream");
    fake_run(call, run);
    call->results.dims[call->results.count - 1][0]--; /* so a later stage may have too little */
    fake_refused(call, run, TE_XLA_EXECUTE, invalid, "bytes");
    plan_end(&part);
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
    check_ports();
    for (int backward = 0; backward < 2; backward++) check_parts(context, backward);
    check_missing(context);
    check_refused_plans(context);
    plan_memory_end(&direct);
    te_context_destroy(context);
    (void)puts("xla: ok");
    return 0;
}
