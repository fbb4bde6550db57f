/* SPDX-License-Identifier: Apache-2.0
 *
 * sdpa_graphs.c - writes the graphs of attention and has cuDNN compile them for an H200, which it
 * is told of: no GPU takes part. Over a stub of the driver the last step, loading what was
 * compiled, fails; that is as far as a machine without a GPU gets. Exits with 77 where cuDNN is not
 * there.
 */
#include <stdio.h>
#include <string.h>

#include "cuda/sdpa_graph.h"

static const char device_text[] =
    "{\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],"
    "\"regsPerBlock\":65536,\"multiProcessorCount\":132,\"warpSize\":32,"
    "\"maxSharedMemoryPerBlock\":49152,\"maxSharedMemoryPerBlockOptin\":232448,"
    "\"reservedSharedMemoryPerBlock\":1024,\"maxRegistersPerSM\":65536,\"maxCtasPerSM\":32,"
    "\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":2048,\"pciDeviceId\":0,\"isTccDriver\":0,"
    "\"supportCoopLaunch\":1,\"totalGlobalMem\":150754820096,\"smClockRateKHz\":1980000,"
    "\"memClockRateKHz\":3201000,\"l2CacheSize\":62914560,\"cudaDeviceId\":0,\"deviceVer\":900,"
    "\"driverVer\":13000,\"deviceName\":\"NVIDIA H200\"}";

static te_cudnn_target target;
static int failures;

/* ---- problems ---- */

static te_sdpa_strides dense(int64_t heads, int64_t tokens, int64_t channels)
{
    return (te_sdpa_strides){heads * tokens * channels, channels, heads * channels};
}

static te_sdpa_key problem(int64_t heads, int64_t kv_heads, int64_t queries, int64_t keys,
                           int64_t d_k, int64_t d_v)
{
    te_sdpa_key key;
    memset(&key, 0, sizeof key);
    key.batch = 3;
    key.heads = heads;
    key.kv_heads = kv_heads;
    key.queries = queries;
    key.keys = keys;
    key.d_k = d_k;
    key.d_v = d_v;
    key.query = key.grad_query = dense(heads, queries, d_k);
    key.key = key.grad_key = dense(kv_heads, keys, d_k);
    key.value = key.grad_value = dense(kv_heads, keys, d_v);
    key.output = key.grad_output = dense(heads, queries, d_v);
    key.window_left = key.window_right = -1;
    key.scale = 0.1F;
    key.dtype = TE_DTYPE_BF16;
    key.keeps_statistics = 1;
    return key;
}

/* Of packed sequences; gradients and inputs lie in one projection, or apart. */
static te_sdpa_key packed(int64_t heads, int64_t kv_heads, int64_t d_k, int64_t d_v, int together)
{
    te_sdpa_key key = problem(heads, kv_heads, 256, 384, d_k, d_v);
    key.is_packed = key.has_lengths = 1;
    if (!together) return key;
    key.query.token = heads * d_k + kv_heads * (d_k + d_v);
    key.query.batch = key.query.token * 256;
    key.key.token = key.value.token = key.query.token;
    key.key.batch = key.value.batch = key.query.token * 384;
    key.grad_query = key.query;
    key.grad_key = key.key;
    key.grad_value = key.value;
    return key;
}

static te_sdpa_key small(void)
{
    return problem(4, 4, 256, 256, 64, 64);
}

static void add_bias(te_sdpa_key *key, int64_t batch, int64_t heads, te_dtype dtype)
{
    const int64_t shape[4] = {batch, heads, key->queries, key->keys};
    int64_t stride = 1;
    key->has_bias = 1;
    key->bias_dtype = (uint8_t)dtype;
    for (int i = 3; i >= 0; i--) {
        key->bias_shape[i] = shape[i];
        key->bias_strides[i] = stride;
        stride *= shape[i];
    }
}

/* ---- the check ---- */

static void compile(const char *name, te_sdpa_key key, int backward)
{
    static te_cudnn_graph graph;
    te_cudnn_plan plan;
    const char *said;
    te_status st;
    memset(&graph, 0, sizeof graph);
    key.backward = (uint8_t)backward;
    te_sdpa_write(&graph, &key);
    st = te_cudnn_plan_make(&graph, &target, &plan);
    said = te_last_error();
    if (st == TE_OK) {
        te_cudnn_plan_clear(&plan);
    } else if (strstr(said, "cuLibraryLoadData") == NULL) {
        (void)printf("%s, %s: %s\n", name, backward ? "backward" : "forward", said);
        failures++;
    }
    te_cudnn_graph_clear(&graph);
}

static void check(const char *name, te_sdpa_key key)
{
    compile(name, key, 0);
    compile(name, key, 1);
}

static void check_masks(void)
{
    te_sdpa_key key = small();
    check("no mask", key);
    key.window_right = 0;
    check("causal", key);
    key.window_right = 16;
    key.window_left = 64;
    key.diagonal = 3;
    check("window", key);
    key = problem(4, 4, 200, 256, 64, 64);
    key.window_right = 0;
    key.bottom_right = 1;
    check("bottom right", key);
    key.window_left = 31;
    key.has_lengths = 1;
    check("lengths, window, bottom right", key);
}

static void check_shapes(void)
{
    te_sdpa_key key = problem(8, 2, 256, 256, 128, 128);
    check("groups", key);
    check("192 and 128 channels", problem(4, 4, 256, 256, 192, 128));
    check("8 channels", problem(4, 4, 256, 256, 8, 8));
    key = problem(4, 4, 1, 77, 64, 64);
    key.has_lengths = 1;
    check("one query", key);
    key = small();
    key.grad_query = key.grad_key = key.grad_value = dense(3 * 4, 256, 64);
    key.dtype = TE_DTYPE_F16;
    check("packed gradients, f16", key);
}

static void check_extras(void)
{
    te_sdpa_key key = small();
    key.dropout = 0.1F;
    key.window_right = 0;
    check("dropout", key);
    key = small();
    add_bias(&key, 1, 4, TE_DTYPE_BF16);
    key.wants_bias_grad = 1;
    check("bias and its gradient", key);
    add_bias(&key, 3, 4, TE_DTYPE_BF16);
    key.bias_grad_sums = 1;
    compile("a bias whose gradient sequences share", key, 1);
    key = small();
    add_bias(&key, 3, 1, TE_DTYPE_F32);
    key.dropout = 0.1F;
    key.has_lengths = 1;
    check("bias in f32, lengths, dropout", key);
    key = small();
    key.deterministic = 1;
    compile("deterministic", key, 1);
    key.keeps_statistics = 0;
    compile("no statistics", key, 0);
}

/* With scratch for whole sequences, and with what lies as the gradients do. */
static void check_both(const char *name, te_sdpa_key key)
{
    char label[80];
    check(name, key);
    key.packs_scratch = 1;
    (void)snprintf(label, sizeof label, "%s, scratch too", name);
    compile(label, key, 1);
}

static void check_packed(void)
{
    te_sdpa_key key = packed(4, 4, 64, 64, 0);
    check_both("packed", key);
    key.window_right = 0;
    check_both("packed, causal", key);
    key.bottom_right = 1;
    key.window_left = 100;
    check_both("packed, window, bottom right", key);
    key = packed(4, 4, 64, 64, 1);
    key.dropout = 0.1F;
    check_both("packed in one projection, dropout", key);
    check_both("packed, groups", packed(8, 2, 128, 128, 0));
    check_both("packed in one projection, groups", packed(8, 2, 128, 64, 1));
    check_both("packed, 256 channels", packed(2, 1, 256, 256, 0));
    check("packed, 40 channels", packed(4, 2, 40, 24, 0));
    key = packed(4, 2, 64, 64, 0);
    key.grad_query.token *= 2;
    key.grad_output.token *= 2;
    check_both("packed, gradients that lie otherwise", key);
    key = packed(4, 2, 64, 64, 1);
    key.deterministic = 1;
    compile("packed, deterministic", key, 1);
    key.window_right = 0;
    key.dropout = 0.1F;
    compile("packed, deterministic, causal, dropout", key, 1);
    key.keeps_statistics = 0;
    compile("packed, no statistics", key, 0);
}

/* Slopes with everything; a sink where no lengths are. */
static void check_softmax(void)
{
    te_sdpa_key key = small();
    key.has_sink = 1;
    compile("sink", key, 0);
    key.window_right = 0;
    key.dropout = 0.1F;
    key.has_slopes = 1;
    compile("sink, slopes, dropout, causal", key, 0);
    key = small();
    key.has_slopes = 1;
    check("slopes", key);
    key = problem(8, 2, 200, 256, 128, 128);
    key.has_slopes = 1;
    key.window_right = 0;
    key.window_left = 31;
    key.has_lengths = 1;
    check("slopes, lengths, window", key);
    key = problem(4, 4, 1, 77, 64, 64);
    key.has_slopes = key.has_lengths = 1;
    check("slopes, one query", key);
    key = packed(8, 2, 128, 64, 1);
    key.has_slopes = 1;
    key.window_right = 0;
    check_both("packed, slopes", key);
}

static void check_softcap(void)
{
    te_sdpa_key key = small();
    key.softcap = 20.0F;
    check("softcap", key);
    key.window_right = 0;
    check("softcap, causal", key);
    key.dropout = 0.1F;
    check("softcap, causal, dropout", key);
    key.deterministic = 1;
    compile("softcap, deterministic", key, 1);
    key = small();
    key.softcap = 20.0F;
    add_bias(&key, 1, 4, TE_DTYPE_BF16);
    check("softcap, bias", key);
    key = small();
    key.softcap = 20.0F;
    key.has_slopes = key.has_sink = 1;
    check("softcap, slopes, sink", key);
    key = problem(8, 2, 200, 256, 128, 128);
    key.softcap = 50.0F;
    key.window_left = 31;
    key.window_right = 0;
    key.bottom_right = key.has_lengths = 1;
    check("softcap, groups, lengths, window, bottom right", key);
    key = problem(8, 4, 256, 256, 256, 256);
    key.softcap = 50.0F;
    check("softcap, 256 channels", key);
    key = problem(4, 4, 1, 77, 64, 64);
    key.softcap = 50.0F;
    key.has_lengths = 1;
    check("softcap, one query", key);
    key = packed(8, 2, 128, 128, 1);
    key.softcap = 50.0F;
    key.window_right = 0;
    check_both("softcap, packed", key);
}

static te_sdpa_key fp8(int64_t heads, int64_t kv_heads, int64_t channels, te_dtype grads)
{
    te_sdpa_key key = problem(heads, kv_heads, 256, 384, channels, channels);
    key.dtype = TE_DTYPE_E4M3;
    key.grad_dtype = (uint8_t)grads;
    return key;
}

static void check_fp8(void)
{
    te_sdpa_key key = fp8(4, 4, 128, TE_DTYPE_E4M3);
    check("fp8", key);
    key.window_right = 0;
    check("fp8, causal", key);
    key.bottom_right = 1;
    key.window_left = 60;
    key.has_lengths = 1;
    check("fp8, lengths, window, bottom right", key);
    check("fp8, gradients in e5m2", fp8(4, 4, 128, TE_DTYPE_E5M2));
    check("fp8, groups", fp8(8, 2, 128, TE_DTYPE_E5M2));
    key = fp8(8, 2, 128, TE_DTYPE_E5M2);
    key.has_lengths = 1;
    check("fp8, groups, lengths", key);
    key = fp8(4, 4, 64, TE_DTYPE_E4M3);
    compile("fp8, 64 channels", key, 0);
    key.dropout = 0.1F;
    compile("fp8, dropout", key, 0);
    compile("fp8, 256 channels", fp8(4, 4, 256, TE_DTYPE_E4M3), 0);
    compile("fp8, 80 channels", fp8(4, 4, 80, TE_DTYPE_E4M3), 0);
    compile("fp8, 16 channels", fp8(4, 4, 16, TE_DTYPE_E4M3), 0);
    key = problem(4, 2, 256, 384, 32, 48);
    key.dtype = TE_DTYPE_E4M3;
    compile("fp8, 32 and 48 channels", key, 0);
    key = fp8(4, 4, 128, TE_DTYPE_E4M3);
    key.queries = 201;
    key.keys = 333;
    compile("fp8, odd lengths", key, 0);
    key.has_lengths = 1;
    compile("fp8, odd lengths, all of them", key, 1);
    key = packed(8, 2, 128, 128, 1);
    key.dtype = TE_DTYPE_E4M3;
    key.window_right = 0;
    compile("fp8, packed, groups", key, 0);
    key = fp8(4, 4, 128, TE_DTYPE_E4M3);
    key.keeps_statistics = 0;
    compile("fp8, no statistics", key, 0);
}

int main(void)
{
    if (te_cudnn_load() != TE_OK) {
        (void)puts(te_last_error());
        return 77;
    }
    if (te_cudnn.cudnnBackendCreateDescriptor(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR,
                                              &target.device) != CUDNN_STATUS_SUCCESS ||
        te_cudnn.cudnnBackendSetAttribute(target.device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION,
                                          CUDNN_TYPE_CHAR, (int64_t)sizeof device_text - 1,
                                          device_text) != CUDNN_STATUS_SUCCESS ||
        te_cudnn.cudnnBackendFinalize(target.device) != CUDNN_STATUS_SUCCESS) {
        (void)puts("cuDNN takes no description of a device");
        return 1;
    }
    check_masks();
    check_shapes();
    check_extras();
    check_softmax();
    check_packed();
    check_softcap();
    check_fp8();
    (void)te_cudnn.cudnnBackendDestroyDescriptor(target.device);
    return failures != 0;
}
