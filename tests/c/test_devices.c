/* SPDX-License-Identifier: Apache-2.0
 *
 * test_devices.c - types of devices that a program adds: their names and numbers, and operators
 * that backends alone run there.
 */
#include <pthread.h>

#include "cpu_device.h"

enum { EXTERNAL = 12, WORKERS = 4, ROWS = 3, COLUMNS = 5 };

static te_device_type npu = TE_DEVICE_ANY;

static void check_refused(test_device *t)
{
    static const struct {
        const char *name;
        int32_t dlpack;
        te_status status;
        const char *text;
    } cases[] = {
        {NULL, EXTERNAL, TE_ERROR_INVALID, "the name is NULL"},
        {"", EXTERNAL, TE_ERROR_INVALID, "1 to 15 letters"},
        {"a_name_too_long_", EXTERNAL, TE_ERROR_INVALID, "a_name_too_long_"},
        {"n-pu", EXTERNAL, TE_ERROR_INVALID, "n-pu"},
        {"npu", 0, TE_ERROR_INVALID, "number 0"},
        {"npu", -1, TE_ERROR_INVALID, "number -1"},
        {"npu", 3, TE_ERROR_INVALID, "number 3"}, /* CUDA's memory of the host */
        {"cuda", EXTERNAL, TE_ERROR_INVALID, "cuda has number 2"},
        {"gpu", 2, TE_ERROR_INVALID, "cuda has number 2"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        te_device_type type = TE_DEVICE_CPU;
        const te_status st = te_device_type_add(cases[i].name, cases[i].dlpack, &type);
        TEST_CHECK(t, st == cases[i].status && type == TE_DEVICE_ANY, "case %zu: %d", i, (int)st);
        TEST_CHECK(t, strstr(te_last_error(), cases[i].text) != NULL, "case %zu: %s", i,
                   te_last_error());
    }
    TEST_CHECK(t, te_device_type_add("npu", EXTERNAL, NULL) == TE_ERROR_INVALID, "no place");
    TEST_CHECK(t, te_device_type_of_dlpack(EXTERNAL) == -1, "nothing was added");
}

static void *add(void *found)
{
    return te_device_type_add("npu", EXTERNAL, found) == TE_OK ? found : NULL;
}

static void check_added(test_device *t)
{
    te_device_type found[WORKERS];
    te_device current;
    pthread_t threads[WORKERS];
    for (int i = 0; i < WORKERS; i++) {
        TEST_CHECK(t, pthread_create(&threads[i], NULL, add, &found[i]) == 0, "thread %d", i);
    }
    for (int i = 0; i < WORKERS; i++) {
        void *result = NULL;
        (void)pthread_join(threads[i], &result);
        TEST_CHECK(t, result == &found[i] && found[i] == TE_DEVICE_OTHER, "thread %d: %d", i,
                   (int)found[i]);
    }
    npu = found[0];
    TEST_CHECK(t, strcmp(te_device_type_name(npu), "npu") == 0, "%s", te_device_type_name(npu));
    TEST_CHECK(t, strcmp(te_device_type_name(TE_DEVICE_CUDA), "cuda") == 0, "cuda");
    TEST_CHECK(t, strcmp(te_device_type_name(TE_DEVICE_ANY), "invalid") == 0, "any");
    TEST_CHECK(t, strcmp(te_device_type_name((te_device_type)3), "invalid") == 0, "not there");
    TEST_CHECK(t, te_device_type_dlpack(npu) == EXTERNAL, "its number");
    TEST_CHECK(t, te_device_type_dlpack((te_device_type)3) == 0, "none");
    TEST_CHECK(t, te_device_type_of_dlpack(EXTERNAL) == (int32_t)npu, "its type");
    TEST_CHECK(t, te_device_type_of_dlpack(1) == TE_DEVICE_CPU, "the CPU");
    TEST_CHECK(t, te_device_type_of_dlpack(3) == TE_DEVICE_CPU, "CUDA's memory of the host");
    TEST_OK(t, te_device_current(TE_DEVICE_CPU, &current));
    TEST_CHECK(t, current.type == TE_DEVICE_CPU && current.index == 0, "the one CPU");
    TEST_CHECK(t, te_device_current(npu, &current) == TE_ERROR_UNSUPPORTED, "no driver of ours");
}

static te_status fill(void *self, te_context *context, const void *args, void *stream)
{
    const te_fill_args *a = args;
    float *elements = a->output.data;
    if (strcmp(te_device_type_name(te_context_device(context).type), "npu") != 0 ||
        stream != self) {
        return TE_ERROR_STATE;
    }
    for (int i = 0; i < ROWS * COLUMNS; i++) elements[i] = (float)a->value;
    return TE_OK;
}

static int64_t counted(const char *name)
{
    te_counter counters[64];
    size_t count = 0;
    if (te_counters_read(counters, 64, &count) != TE_OK) return -1;
    for (size_t i = 0; i < count && i < 64; i++) {
        if (strcmp(counters[i].name, name) == 0) return counters[i].value;
    }
    return 0;
}

static void check_operators(test_device *t)
{
    float values[ROWS * COLUMNS] = {0}, other[1] = {0};
    int stream = 0;
    te_context *context = NULL;
    te_fill_args args = {.size = sizeof args, .value = 2.5};
    te_backend backend = {.size = sizeof backend, .name = "of npu", .device = npu};
    te_update_args update = {.size = sizeof update};
    te_l2norm_args norm = {.size = sizeof norm, .total = other};
    backend.slots[TE_OP_FILL] = (te_op_slot){.function = fill, .self = &stream};
    args.output = (te_tensor){values, TE_DTYPE_F32, {npu, 1}, 2, {ROWS, COLUMNS}, {COLUMNS, 1}};
    TEST_CHECK(t, te_context_create((te_device){npu, TE_DEVICE_INDICES}, &context) != TE_OK,
               "an index too large");
    TEST_CHECK(t, te_context_create((te_device){(te_device_type)3, 0}, &context) != TE_OK,
               "a type that was not added");
    TEST_CHECK(t, te_context_create((te_device){npu, 1}, &context) == TE_OK, "%s", te_last_error());
    TEST_CHECK(t, te_fill(context, &args, &stream) == TE_ERROR_UNSUPPORTED, "nobody has it");
    TEST_CHECK(t, strstr(te_last_error(), "fill: no backend of npu") != NULL, "%s",
               te_last_error());
    TEST_CHECK(t, te_backend_register(&backend) == TE_OK, "%s", te_last_error());
    te_counters_reset();
    TEST_CHECK(t, te_fill(context, &args, &stream) == TE_OK, "%s", te_last_error());
    for (int i = 0; i < ROWS * COLUMNS; i++) TEST_CHECK(t, values[i] == 2.5F, "element %d", i);
    TEST_CHECK(t, counted("op.npu.fill") == 1 && counted("op.cpu.fill") == 0, "op.npu.fill");
    te_count_gemm(npu, TE_DTYPE_BF16, TE_DTYPE_E4M3);
    te_count_attention(npu, TE_DTYPE_F16, 1);
    TEST_CHECK(t, counted("gemm.npu.bf16.e4m3") == 1, "gemm");
    TEST_CHECK(t, counted("attention_backward.npu.f16") == 1, "attention");
    TEST_CHECK(t, te_fill(t->context, &args, NULL) == TE_ERROR_INVALID, "a context of the CPU");
    TEST_CHECK(t, te_l2norm(context, &norm, NULL) == TE_ERROR_UNSUPPORTED, "%s", te_last_error());
    update.kind = TE_UPDATE_SCALE;
    TEST_CHECK(t, te_update(context, &update, NULL) == TE_OK, "an update of nothing: %s",
               te_last_error());
    TEST_CHECK(t, te_context_tune_gemm(context, 1, NULL) == TE_ERROR_UNSUPPORTED, "tune_gemm");
    TEST_CHECK(t, te_backend_unregister("of npu") == TE_OK, "%s", te_last_error());
    TEST_CHECK(t, te_fill(context, &args, &stream) == TE_ERROR_UNSUPPORTED, "nobody any more");
    te_context_destroy(context);
    backend.device = TE_DEVICE_ANY;
    TEST_CHECK(t, te_backend_register(&backend) == TE_ERROR_INVALID, "of every device");
    backend.device = (te_device_type)3;
    TEST_CHECK(t, te_backend_register(&backend) == TE_ERROR_INVALID, "of a type not there");
}

/* As many as fit; then one more. */
static void check_full(test_device *t)
{
    char name[] = "type_0";
    te_device_type type;
    for (int i = (int)npu + 1; i < TE_DEVICE_COUNT; i++) {
        name[5] = (char)('0' + i);
        TEST_CHECK(t, te_device_type_add(name, 100 + i, &type) == TE_OK && (int)type == i, "%s",
                   te_last_error());
    }
    TEST_CHECK(t, te_device_type_add("more", 99, &type) == TE_ERROR_STATE, "no more fit");
    TEST_CHECK(t, te_device_type_add("npu", EXTERNAL, &type) == TE_OK && type == npu, "again");
}

static void check_all(test_device *t)
{
    check_refused(t);
    check_added(t);
    check_operators(t);
    check_full(t);
}

int main(void)
{
    return test_on_cpu("devices", check_all);
}
