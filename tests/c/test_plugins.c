/* SPDX-License-Identifier: Apache-2.0
 *
 * test_plugins.c - plug-ins that are linked with the program: what is refused, versions of structs
 * on either side, slots, selections, threads.
 */
#define _POSIX_C_SOURCE 200809L /* nanosleep */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include <transformer_engine_plugin.h>

#include "cpu_device.h"
#include "testing.h"

static const te_host_api *host;

/* What the next te_plugin_init does. */
static struct {
    te_plugin_backend backend;
    te_plugin_operator operators[3];
    size_t workspace; /* bytes that it asks for */
    te_status after;  /* what it returns where registration was well */
    int times;        /* backends, of the names below */
} plan;
static const char *const names[] = {"one", "two", "three"};
static int released;

static void release(void *self)
{
    ++*(int *)self;
}

static te_status supports(void *self, te_context *context, const void *args)
{
    const te_fill_args *a = args;
    (void)self, (void)context;
    return a->value >= 0.0 ? TE_OK : TE_HOST_FAIL(host, TE_ERROR_UNSUPPORTED, "it is negative");
}

static te_status workspace(void *self, te_context *context, const void *args, size_t *bytes)
{
    (void)self, (void)context, (void)args;
    if (plan.workspace > 0) *bytes = plan.workspace; /* else it forgets to: none */
    return TE_OK;
}

static te_status fill(void *self, te_context *context, const void *args, void *stream)
{
    const te_fill_args *a = args;
    const float value = (float)a->value + *(const float *)self;
    (void)stream;
    if (host->context_device(context).type != TE_DEVICE_CPU) return TE_ERROR_STATE;
    if (a->value > 99.0) return TE_HOST_FAIL(host, TE_ERROR_DEVICE, "no power for %g", a->value);
    for (int64_t i = 0; i < host->tensor_elements(&a->output); i++) {
        ((float *)a->output.data)[i] = value;
    }
    return TE_OK;
}

static te_status init(const te_host_api *api, uint32_t abi)
{
    te_status st = TE_OK;
    TE_PLUGIN_REQUIRE(api, abi);
    host = api;
    for (int i = 0; i < plan.times && st == TE_OK; i++) {
        if (plan.times > 1) plan.backend.name = names[i];
        st = api->register_backend(&plan.backend);
    }
    return st == TE_OK ? plan.after : st;
}

/* The plan of a plug-in that is right. */
static void good(void)
{
    static float added = 0.25F;
    const te_plugin_operator operator= TE_PLUGIN_OPERATOR(fill, fill, supports, workspace, &added);
    memset(&plan, 0, sizeof plan);
    plan.times = 1;
    plan.workspace = 100;
    plan.operators[0] = operator;
    plan.backend = (te_plugin_backend){.size = sizeof plan.backend,
                                       .abi = TE_PLUGIN_ABI,
                                       .name = "one",
                                       .vendor = "acme",
                                       .priority = 3,
                                       .operators = plan.operators,
                                       .operator_count = 1,
                                       .release = release,
                                       .self = &released};
    released = 0;
}

/* ---- registration ------------------------------------------------------------------------- */

static void refused(test_device *t, te_status expected, const char *text, int releases)
{
    te_plugin *plugin = (te_plugin *)&plan;
    te_status st = te_plugin_add(init, "the plug-in", &plugin);
    TEST_CHECK(t, st == expected && plugin == NULL, "%d, expected %d", (int)st, (int)expected);
    TEST_CHECK(t, strstr(te_last_error(), text) != NULL, "%s", te_last_error());
    TEST_CHECK(t, strstr(te_last_error(), "the plug-in") != NULL, "%s", te_last_error());
    TEST_CHECK(t, released == releases, "released %d times", released);
}

static void test_refusals(test_device *t)
{
    t->running = "refusals";
#define REFUSED(change, status, text)                                                              \
    do {                                                                                           \
        good();                                                                                    \
        change;                                                                                    \
        refused(t, status, text, 0);                                                               \
    } while (0)
    REFUSED(plan.backend.size = 0, TE_ERROR_INVALID, "size = 0");
    REFUSED(plan.backend.size -= 8, TE_ERROR_INVALID, "backend: size = ");
    REFUSED(plan.backend.abi = 0, TE_ERROR_UNSUPPORTED, "built for version 0");
    REFUSED(plan.backend.abi += 1U << 16, TE_ERROR_UNSUPPORTED, "built for version 2");
    REFUSED(plan.backend.name = NULL, TE_ERROR_INVALID, "it has no name");
    REFUSED(plan.backend.vendor = "", TE_ERROR_INVALID, "backend one: it has no vendor");
    REFUSED(plan.backend.name = "a\nb", TE_ERROR_INVALID, "its name has byte 10 at 1");
    REFUSED(plan.backend.name = "abc\xe9", TE_ERROR_INVALID, "its name has byte 233 at 3");
    REFUSED(plan.backend.name = " a", TE_ERROR_INVALID, "its name has byte 32 at 0");
    REFUSED(plan.backend.vendor = "a|b", TE_ERROR_INVALID, "its vendor has byte 124 at 1");
    REFUSED(plan.backend.vendor = "a ", TE_ERROR_INVALID, "its vendor has byte 32 at 1");
    REFUSED((plan.backend.kind = TE_PLUGIN_REFERENCE, plan.backend.vendor = "a,b"),
            TE_ERROR_INVALID, "its vendor has byte 44 at 1");
    REFUSED(plan.backend.kind = (te_plugin_kind)3, TE_ERROR_INVALID, "kind = 3");
    REFUSED(plan.backend.device = (te_device_type)-1, TE_ERROR_INVALID, "device = -1");
    REFUSED(plan.backend.operators = NULL, TE_ERROR_INVALID, "it has no operators");
    REFUSED(plan.backend.operator_count = 0, TE_ERROR_INVALID, "it has no operators");
    REFUSED(plan.backend.operator_count = SIZE_MAX / 4, TE_ERROR_INVALID, "operators, there are");
    REFUSED(plan.operators[0].size = 8, TE_ERROR_INVALID, "operator: size = 8");
    REFUSED(plan.operators[0].size += 1, TE_ERROR_INVALID, "no multiple of 8");
    REFUSED(plan.operators[0].args_size = offsetof(te_fill_args, workspace), TE_ERROR_INVALID,
            "fill has a workspace function, and its args end before");
    REFUSED(plan.operators[0].name = "fil", TE_ERROR_INVALID, "there is no operator fil");
    REFUSED(plan.operators[0].name = NULL, TE_ERROR_INVALID, "there is no operator");
    REFUSED(plan.operators[0].function = NULL, TE_ERROR_INVALID, "fill has no function");
    REFUSED(plan.operators[0].args_size = 0, TE_ERROR_INVALID, "args_size = 0");
    REFUSED(plan.operators[0].args_size += 8, TE_ERROR_UNSUPPORTED, "built for a later one");
    REFUSED((plan.operators[1] = plan.operators[0], plan.backend.operator_count = 2),
            TE_ERROR_INVALID, "it has fill twice");
    REFUSED(plan.backend.operator_count = 2, TE_ERROR_INVALID, "operators have sizes");
#undef REFUSED
    good();
    plan.after = TE_ERROR_MEMORY;
    refused(t, TE_ERROR_MEMORY, "it gave no reason", 1);
    good();
    plan.after = (te_status)5;
    refused(t, TE_ERROR_STATE, "te_plugin_init returned 5", 1);
    good();
    plan.times = 3;
    plan.operators[0].name = "gemm"; /* args_size is smaller: that is an older plug-in */
    plan.operators[0].workspace = NULL;
    plan.after = TE_ERROR_DEVICE;
    refused(t, TE_ERROR_DEVICE, "it gave no reason", 3);
}

static void test_names_are_used_once(test_device *t)
{
    te_plugin *plugin = NULL;
    t->running = "names";
    good();
    plan.backend.name = "one";
    plan.times = 1;
    TEST_OK(t, te_plugin_add(init, "p", &plugin));
    TEST_CHECK(t, host->register_backend(&plan.backend) == TE_ERROR_STATE, "%s", te_last_error());
    TEST_CHECK(t, te_plugin_slot_count(plugin) == 1, "slots");
    te_plugin_release(plugin);
    TEST_CHECK(t, released == 1, "%d", released);
    te_plugin_release(NULL);
}

static te_status init_twice(const te_host_api *api, uint32_t abi)
{
    te_plugin *other = NULL;
    (void)abi;
    host = api;
    if (api->register_backend(&plan.backend) != TE_OK) return TE_ERROR_STATE;
    if (api->register_backend(&plan.backend) != TE_ERROR_INVALID) return TE_ERROR_MEMORY;
    if (strstr(api->last_error(), "registered already") == NULL) return TE_ERROR_DEVICE;
    return te_plugin_add(init, "inner", &other) == TE_ERROR_STATE ? TE_OK : TE_ERROR_TYPE;
}

static void test_inside_of_an_init(test_device *t)
{
    te_plugin *plugin = NULL;
    t->running = "inside of an init";
    good();
    TEST_OK(t, te_plugin_add(init_twice, "p", &plugin));
    TEST_CHECK(t, te_plugin_slot_count(plugin) == 1, "slots");
    te_plugin_release(plugin);
}

/* Operators of a later version: as far apart as they say, and nothing set that is not known. */
static void test_larger_operators(test_device *t)
{
    struct {
        te_plugin_operator known;
        uint64_t appended;
    } later[2];
    te_plugin *plugin = NULL;
    t->running = "larger operators";
    good();
    memset(later, 0, sizeof later);
    for (int i = 0; i < 2; i++) {
        later[i].known = plan.operators[0];
        later[i].known.size = sizeof later[i];
    }
    later[1].known.name = "norm";
    later[1].known.args_size = sizeof(te_norm_args);
    plan.backend.operators = &later[0].known;
    plan.backend.operator_count = 2;
    TEST_OK(t, te_plugin_add(init, "the plug-in", &plugin));
    TEST_CHECK(t, te_plugin_slot_count(plugin) == 2, "slots");
    TEST_CHECK(t, te_plugin_slot_at(plugin, 1)->op == TE_OP_NORM, "the second one");
    te_plugin_release(plugin);
    released = 0;
    later[1].appended = 1;
    refused(t, TE_ERROR_UNSUPPORTED, "operator: it sets what this library", 0);
    later[1].appended = 0;
    later[1].known.size -= sizeof later[1].appended;
    refused(t, TE_ERROR_INVALID, "operators have sizes", 0);
    later[0].known.size = SIZE_MAX - 7;
    refused(t, TE_ERROR_UNSUPPORTED, "operator: it sets what this library", 0);
}

/* ---- what a plug-in is handed -------------------------------------------------------------- */

static void test_the_table(test_device *t)
{
    const float numbers[4] = {1.0F, -2.5F, 1e9F, 0.1F};
    float back[4] = {0};
    unsigned char elements[16] = {0};
    te_plugin *plugin = NULL;
    te_tensor cube = {.ndim = 3, .shape = {2, 3, 4}, .strides = {24, 8, 1}};
    te_fill_args args;
    t->running = "the table";
    good();
    TEST_OK(t, te_plugin_add(init, "p", &plugin));
    TEST_CHECK(t, host->size == sizeof *host && host->abi == TE_PLUGIN_ABI, "size, abi");
    TEST_CHECK(t, TE_HOST_HAS(host, counters_read), "it lacks its own member");
    TEST_CHECK(t, strcmp(host->version, TE_VERSION) == 0, "%s", host->version);
    TEST_CHECK(t, host->op_find("norm") == TE_OP_NORM, "%d", (int)host->op_find("norm"));
    TEST_CHECK(t, host->op_find("nor") == -1 && host->op_find(NULL) == -1, "op_find");
    TEST_CHECK(t, host->tensor_elements(&cube) == 24, "elements");
    TEST_CHECK(t, host->tensor_rows(&cube).strides[0] == 8, "rows");
    TEST_CHECK(t, host->tensor_rows(&(te_tensor){.ndim = 0}).ndim == 0, "rows of nothing");
    TEST_CHECK(t, host->dtype_size(TE_DTYPE_BF16, 3) == 6, "dtype_size");
    for (int wrong = -1; wrong < 100; wrong += 100) {
        const te_op op = (te_op)wrong;
        const te_dtype dtype = (te_dtype)wrong;
        size_t bytes = 7;
        TEST_CHECK(t, strcmp(host->op_name(op), "invalid") == 0, "op_name(%d)", wrong);
        TEST_CHECK(t, host->op_describe(op) == NULL, "op_describe(%d)", wrong);
        host->op_initial(op, NULL); /* nothing to write */
        TEST_CHECK(t, host->op_run(t->context, op, &args, NULL) == TE_ERROR_INVALID, "op_run");
        TEST_CHECK(t, host->op_workspace(t->context, op, &args, &bytes) == TE_ERROR_INVALID,
                   "op_workspace");
        TEST_CHECK(t, strcmp(host->dtype_name(dtype), "invalid") == 0, "dtype_name");
        TEST_CHECK(t, host->dtype_bits(dtype) == 0 && host->dtype_max(dtype) == 0.0F, "dtype");
        TEST_CHECK(t, host->to_f32(dtype, elements, back, 1) == TE_ERROR_INVALID, "to_f32");
    }
    TEST_CHECK(t, host->interrupted() == 0, "interrupted");
    for (int dtype = 0; dtype < TE_DTYPE_COUNT; dtype++) {
        const te_dtype at = (te_dtype)dtype;
        const int floats = te_dtype_is_high_precision(at) || te_dtype_is_fp8(at);
        te_status st = host->from_f32(at, numbers, elements, 4);
        TEST_CHECK(t, (st == TE_OK) == floats, "%s", te_dtype_name(at));
        st = host->to_f32(at, elements, back, 4);
        TEST_CHECK(t, (st == TE_OK) == floats, "%s", te_dtype_name(at));
        if (!floats) continue;
        TEST_CHECK(t, back[0] == 1.0F && back[1] == -2.5F, "%s", te_dtype_name(at));
        for (int i = 0; i < 4; i++) {
            unsigned char single[8];
            test_store(at, single, (double)numbers[i]);
            TEST_CHECK(t, (double)back[i] == test_load(at, single), "%s", te_dtype_name(at));
        }
    }
    host->op_initial(TE_OP_FILL, &args);
    TEST_CHECK(t, args.size == sizeof args && args.value == 0.0, "op_initial");
    te_plugin_release(plugin);
}

/* ---- slots --------------------------------------------------------------------------------- */

static void test_slots(test_device *t)
{
    te_plugin *plugin = NULL, *again = NULL;
    const te_plugin_slot *slot;
    test_matrix m = test_matrix_new(t, TE_DTYPE_F32, 2, 3, 0);
    char memory[100];
    te_fill_args args = {.size = sizeof args,
                         .output = m.tensor,
                         .value = 1.0,
                         .workspace = memory,
                         .workspace_size = sizeof memory};
    size_t bytes = 0;
    t->running = "slots";
    good();
    TEST_OK(t, te_plugin_add(init, "p", &plugin));
    TEST_OK(t, te_plugin_add(init, "p", &again));
    TEST_CHECK(t, plugin == again && te_plugin_slot_at(plugin, 1) == NULL, "slots");
    te_plugin_release(again);
    plan.operators[0].name = plan.backend.name = plan.backend.vendor = "gone"; /* it has copies */
    slot = te_plugin_slot_at(plugin, 0);
    TEST_CHECK(t, slot->op == TE_OP_FILL && slot->priority == 3, "slot");
    TEST_CHECK(t, strcmp(slot->backend, "one") == 0 && strcmp(slot->vendor, "acme") == 0, "names");
    TEST_OK(t, te_slot_run(&slot->slot, t->context, TE_OP_FILL, &args, NULL));
    test_fetch(t, &m);
    TEST_CHECK(t, test_get(&m, 1, 2) == 1.25, "%g", test_get(&m, 1, 2));
    TEST_OK(t, te_slot_workspace(&slot->slot, t->context, TE_OP_FILL, &args, &bytes));
    TEST_CHECK(t, bytes == 100, "%zu", bytes);
    TEST_CHECK(t, te_plugin_slot_calls(slot) == 1, "calls");
    args.value = -1.0;
    TEST_CHECK(t,
               te_slot_supports(&slot->slot, t->context, TE_OP_FILL, &args) == TE_ERROR_UNSUPPORTED,
               "supports");
    TEST_CHECK(t, strstr(te_last_error(), "backend one: ") != NULL, "%s", te_last_error());
    TEST_CHECK(
        t, te_slot_run(&slot->slot, t->context, TE_OP_FILL, &args, NULL) == TE_ERROR_UNSUPPORTED,
        "run");
    args.value = 100.0;
    TEST_CHECK(t, te_slot_run(&slot->slot, t->context, TE_OP_FILL, &args, NULL) == TE_ERROR_DEVICE,
               "run");
    TEST_CHECK(t, strstr(te_last_error(), "no power for 100 (output f32 [2, 3])") != NULL, "%s",
               te_last_error());
    args.output.dtype = TE_DTYPE_COUNT; /* which the core's checks refuse before */
    TEST_CHECK(t, te_slot_run(&slot->slot, t->context, TE_OP_FILL, &args, NULL) != TE_OK, "run");
    TEST_CHECK(t, strstr(te_last_error(), "backend one") == NULL, "%s", te_last_error());
    TEST_CHECK(t,
               te_slot_run(&(te_op_slot){.self = NULL}, t->context, TE_OP_FILL, &args, NULL) ==
                   TE_ERROR_INVALID,
               "run");
    TEST_CHECK(t, te_plugin_slot_calls(slot) == 1, "calls");
    te_plugin_release(plugin);
    TEST_CHECK(t, released == 1, "%d", released);
    test_release(t);
}

/* A call lends what a plug-in has asked for, or does not reach it. */
static void test_workspaces(test_device *t)
{
    te_plugin *plugin = NULL;
    const te_plugin_slot *slot;
    char memory[100];
    test_matrix m = test_matrix_new(t, TE_DTYPE_F32, 2, 3, 0);
    te_fill_args args = {.size = sizeof args, .output = m.tensor, .value = 1.0};
    size_t bytes = 7;
    t->running = "workspaces";
    good();
    TEST_OK(t, te_plugin_add(init, "p", &plugin));
    slot = te_plugin_slot_at(plugin, 0);
    for (size_t given = 0; given <= sizeof memory; given += sizeof memory - 1) {
        args.workspace = given == 0 ? NULL : memory;
        args.workspace_size = given;
        TEST_CHECK(
            t, te_slot_run(&slot->slot, t->context, TE_OP_FILL, &args, NULL) == TE_ERROR_INVALID,
            "%zu bytes", given);
        TEST_CHECK(t, strstr(te_last_error(), "backend one: workspace of") != NULL, "%s",
                   te_last_error());
    }
    args.size = offsetof(te_fill_args, workspace); /* a caller of an earlier version lends none */
    TEST_CHECK(t, te_slot_run(&slot->slot, t->context, TE_OP_FILL, &args, NULL) == TE_ERROR_INVALID,
               "an older caller");
    args.size = sizeof args;
    TEST_CHECK(t, te_plugin_slot_calls(slot) == 0, "calls");
    plan.workspace = SIZE_MAX - 100;
    TEST_CHECK(
        t, te_slot_workspace(&slot->slot, t->context, TE_OP_FILL, &args, &bytes) == TE_ERROR_MEMORY,
        "a size that overflows");
    TEST_CHECK(t, strstr(te_last_error(), "backend one: it asks for") != NULL, "%s",
               te_last_error());
    plan.workspace = 0;
    TEST_OK(t, te_slot_workspace(&slot->slot, t->context, TE_OP_FILL, &args, &bytes));
    TEST_CHECK(t, bytes == 0, "%zu", bytes);
    args.workspace = NULL;
    TEST_OK(t, te_slot_run(&slot->slot, t->context, TE_OP_FILL, &args, NULL));
    te_plugin_release(plugin);
    test_release(t);
}

/* One that was built before `value` came does not get calls that have one. */
static void test_older_plugins(test_device *t)
{
    te_plugin *plugin = NULL;
    const te_plugin_slot *slot;
    test_matrix m = test_matrix_new(t, TE_DTYPE_F32, 2, 3, 0);
    te_fill_args args = {.size = sizeof args, .output = m.tensor, .value = 0.0};
    t->running = "older plug-ins";
    good();
    plan.operators[0].args_size = offsetof(te_fill_args, value);
    plan.operators[0].supports = NULL;
    plan.operators[0].workspace = NULL;
    TEST_OK(t, te_plugin_add(init, "p", &plugin));
    slot = te_plugin_slot_at(plugin, 0);
    TEST_OK(t, te_slot_run(&slot->slot, t->context, TE_OP_FILL, &args, NULL));
    args.value = 2.0;
    TEST_CHECK(
        t, te_slot_run(&slot->slot, t->context, TE_OP_FILL, &args, NULL) == TE_ERROR_UNSUPPORTED,
        "run");
    TEST_CHECK(t, strstr(te_last_error(), "was built without value") != NULL, "%s",
               te_last_error());
    te_plugin_release(plugin);
    test_release(t);
}

static te_status attend(void *self, te_context *context, const void *args, void *stream)
{
    (void)self, (void)context, (void)stream;
    return ((const te_attention_args *)args)->softcap == 0.0F ? TE_OK : TE_ERROR_STATE;
}

static te_tensor two_tokens(test_device *t)
{
    te_tensor x = test_matrix_new(t, TE_DTYPE_F32, 2, 4, 0).tensor;
    x.ndim = 4;
    memcpy(x.shape, (int64_t[4]){1, 2, 1, 4}, 4 * sizeof(int64_t));
    memcpy(x.strides, (int64_t[4]){8, 4, 4, 1}, 4 * sizeof(int64_t));
    for (int i = 0; i < 8; i++) ((float *)x.data)[i] = (float)(i * i % 7);
    return x;
}

/* A field that was appended behind the workspace: older plug-ins get no call that has one, and what
 * stands there in memory of an older caller is not read. */
static void test_fields_behind_the_workspace(test_device *t)
{
    static const te_plugin_operator operator=
        TE_PLUGIN_OPERATOR(attention, attend, NULL, NULL, NULL);
    te_plugin *plugin = NULL;
    const te_plugin_slot *slot;
    float found[3][8];
    te_attention_args args = {.problem = {.query = two_tokens(t),
                                          .key = two_tokens(t),
                                          .value = two_tokens(t),
                                          .scale = 1.0F,
                                          .window_left = -1,
                                          .window_right = -1},
                              .output = two_tokens(t)};
    t->running = "fields behind the workspace";
    good();
    plan.operators[0] = operator;
    plan.operators[0].args_size = offsetof(te_attention_args, softcap);
    TEST_OK(t, te_plugin_add(init, "p", &plugin));
    slot = te_plugin_slot_at(plugin, 0);
    args.size = sizeof args;
    args.workspace = test_workspace(t, TE_OP_ATTENTION, &args, &args.workspace_size);
    for (int i = 0; i < 3; i++) { /* none, a cap, and the same behind the struct of older callers */
        const te_status expected = i == 1 ? TE_ERROR_UNSUPPORTED : TE_OK;
        te_status st;
        args.softcap = i == 0 ? 0.0F : 0.5F;
        args.size = i == 2 ? offsetof(te_attention_args, softcap) : sizeof args;
        st = te_slot_run(&slot->slot, t->context, TE_OP_ATTENTION, &args, NULL);
        TEST_CHECK(t, st == expected, "case %d: %d, %s", i, (int)st, te_last_error());
        if (i == 1) TEST_CHECK(t, strstr(te_last_error(), "without softcap") != NULL, "no reason");
        TEST_OK(t, te_attention(t->context, &args, NULL));
        memcpy(found[i], args.output.data, sizeof found[i]);
    }
    TEST_CHECK(t, memcmp(found[0], found[1], sizeof found[0]) != 0, "a cap changes nothing");
    TEST_CHECK(t, memcmp(found[0], found[2], sizeof found[0]) == 0, "a cap of no field is read");
    te_plugin_release(plugin);
    test_release(t);
}

/* ---- threads ------------------------------------------------------------------------------- */

enum { THREADS = 16, CALLS = 200 };

static void *work(void *opaque)
{
    test_device *t = opaque;
    int64_t failures = 0;
    for (int i = 0; i < CALLS; i++) {
        te_plugin *plugin = NULL;
        float numbers[6];
        char memory[100];
        te_fill_args args = {.size = sizeof args,
                             .output = {.data = numbers,
                                        .dtype = TE_DTYPE_F32,
                                        .ndim = 2,
                                        .shape = {2, 3},
                                        .strides = {3, 1}},
                             .value = (double)i,
                             .workspace = memory,
                             .workspace_size = sizeof memory};
        te_status st = te_plugin_add(init, "p", &plugin);
        if (st == TE_OK) {
            st = te_slot_run(&te_plugin_slot_at(plugin, 0)->slot, t->context, TE_OP_FILL, &args,
                             NULL);
        }
        if (i < 100 ? st != TE_OK || numbers[5] != (float)i + 0.25F : st != TE_ERROR_DEVICE) {
            failures++;
        }
        te_plugin_release(plugin);
    }
    return (void *)(intptr_t)failures;
}

static void test_threads(test_device *t)
{
    pthread_t threads[THREADS];
    te_plugin *plugin = NULL;
    t->running = "threads";
    good();
    TEST_OK(t, te_plugin_add(init, "p", &plugin)); /* its init writes to this file's `host` */
    for (int i = 0; i < THREADS; i++) {
        TEST_CHECK(t, pthread_create(&threads[i], NULL, work, t) == 0, "pthread_create");
    }
    for (int i = 0; i < THREADS; i++) {
        void *failures = NULL;
        TEST_CHECK(t, pthread_join(threads[i], &failures) == 0 && failures == NULL, "%d failures",
                   (int)(intptr_t)failures);
    }
    TEST_CHECK(t, te_plugin_slot_calls(te_plugin_slot_at(plugin, 0)) == THREADS * 100, "calls");
    te_plugin_release(plugin);
}

/* ---- releasing and registering anew -------------------------------------------------------- */

static _Atomic int in_release, overlapped;

static void slow_release(void *self)
{
    te_plugin *other = NULL;
    const struct timespec while_others_load = {.tv_nsec = 2000000};
    atomic_fetch_add(&in_release, 1);
    (void)nanosleep(&while_others_load, NULL);
    if (te_plugin_add(init, "inner", &other) != TE_ERROR_STATE) ++*(int *)self;
    atomic_fetch_sub(&in_release, 1);
}

static te_status slow_init(const te_host_api *api, uint32_t abi)
{
    (void)abi;
    if (atomic_load(&in_release) != 0) atomic_fetch_add(&overlapped, 1);
    host = api;
    return api->register_backend(&plan.backend);
}

static void *load_and_leave(void *unused)
{
    int64_t failures = 0;
    (void)unused;
    for (int i = 0; i < 20; i++) {
        te_plugin *plugin = NULL;
        if (te_plugin_add(slow_init, "p", &plugin) != TE_OK) failures++;
        te_plugin_release(plugin);
    }
    return (void *)(intptr_t)failures;
}

/* Its te_plugin_init never runs beside its release: both use its static variables. */
static void test_registering_anew(test_device *t)
{
    pthread_t threads[4];
    te_plugin *plugin = NULL;
    t->running = "registering anew";
    good();
    plan.backend.release = slow_release;
    for (int i = 0; i < 4; i++) {
        TEST_CHECK(t, pthread_create(&threads[i], NULL, load_and_leave, NULL) == 0, "thread");
    }
    for (int i = 0; i < 4; i++) {
        void *failures = NULL;
        TEST_CHECK(t, pthread_join(threads[i], &failures) == 0 && failures == NULL, "%d failures",
                   (int)(intptr_t)failures);
    }
    TEST_CHECK(t, atomic_load(&overlapped) == 0, "%d times", atomic_load(&overlapped));
    TEST_CHECK(t, released == 0, "it loaded another one when it was released");
    plan.after = TE_ERROR_MEMORY; /* what fails is released under the lock of those that register */
    TEST_CHECK(t, te_plugin_add(init, "p", &plugin) == TE_ERROR_MEMORY, "%s", te_last_error());
    TEST_CHECK(t, released == 0, "it loaded another one when it failed");
}

static void check_all(test_device *t)
{
    te_plugin *plugin = NULL;
    test_refusals(t);
    test_names_are_used_once(t);
    test_inside_of_an_init(t);
    test_larger_operators(t);
    test_the_table(t);
    test_slots(t);
    test_workspaces(t);
    test_older_plugins(t);
    test_fields_behind_the_workspace(t);
    test_threads(t);
    test_registering_anew(t);
    t->running = "files";
    TEST_CHECK(t, te_plugin_load("/no/such/file.so", &plugin) == TE_ERROR_INVALID, "load");
    TEST_CHECK(t, strstr(te_last_error(), "/no/such/file.so") != NULL, "%s", te_last_error());
    TEST_CHECK(t, te_plugin_load(NULL, &plugin) == TE_ERROR_INVALID, "load");
}

int main(void)
{
    return test_on_cpu("plug-ins", check_all);
}
