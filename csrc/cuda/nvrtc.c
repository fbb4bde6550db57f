/* SPDX-License-Identifier: Apache-2.0
 *
 * nvrtc.c - compiles embedded device source with the NVRTC of the process and keeps the result on
 * disk.
 *
 * NVRTC is needed only where no embedded image fits the driver. The few prototypes are written out:
 * its header is often absent where cuda.h is there.
 */
#define _GNU_SOURCE /* dladdr */
#include "cuda/nvrtc.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/fork.h"
#include "core/status.h"
#include "core/disk_cache.h"

#define PATH_BYTES 4096
#define LOG_BYTES 1024

/* X(member, symbol, arguments) */
#define NVRTC_SYMBOLS(X)                                                                           \
    X(version, nvrtcVersion, (int *major, int *minor))                                             \
    X(arch_count, nvrtcGetNumSupportedArchs, (int *count))                                         \
    X(archs, nvrtcGetSupportedArchs, (int *archs))                                                 \
    X(create, nvrtcCreateProgram,                                                                  \
      (void **program, const char *text, const char *name, int headers, const char *const *texts,  \
       const char *const *names))                                                                  \
    X(destroy, nvrtcDestroyProgram, (void **program))                                              \
    X(compile, nvrtcCompileProgram, (void *program, int options, const char *const *texts))        \
    X(log_size, nvrtcGetProgramLogSize, (void *program, size_t *size))                             \
    X(log, nvrtcGetProgramLog, (void *program, char *log))                                         \
    X(cubin_size, nvrtcGetCUBINSize, (void *program, size_t *size))                                \
    X(cubin, nvrtcGetCUBIN, (void *program, char *code))                                           \
    X(ptx_size, nvrtcGetPTXSize, (void *program, size_t *size))                                    \
    X(ptx, nvrtcGetPTX, (void *program, char *code))

typedef struct nvrtc_api {
    void *library;
    int major, minor;
#define X(member, symbol, arguments) int(*member) arguments;
    NVRTC_SYMBOLS(X)
#undef X
} nvrtc_api;

/* How to compile for a device: machine code where NVRTC knows it, else PTX for the driver. */
typedef struct target {
    char option[48]; /* "--gpu-architecture=sm_90a" */
    int is_ptx;
} target;

TE_PROCESS_LOCK(settings_lock);
static int settings_forced; /* guarded by settings_lock */

te_status te_cuda_configure(int force_source, const char *cache_dir)
{
    (void)pthread_mutex_lock(&settings_lock);
    settings_forced = force_source != 0;
    (void)pthread_mutex_unlock(&settings_lock);
    return te_cache_set_folder(cache_dir);
}

int te_cuda_source_forced(void)
{
    int forced;
    (void)pthread_mutex_lock(&settings_lock);
    forced = settings_forced;
    (void)pthread_mutex_unlock(&settings_lock);
    return forced;
}

/* ---- the library ---- */

/* NVRTC beside a cuBLASLt that is loaded: wheels keep them in one folder (CUDA 13) or in sister
 * folders (CUDA 12), neither of which the linker searches. */
static void *open_beside_cublaslt(void)
{
    static const struct {
        const char *loaded, *beside;
    } pairs[] = {
        {"libcublasLt.so.13", "libnvrtc.so.13"},
        {"libcublasLt.so.12", "libnvrtc.so.12"},
        {"libcublasLt.so.12", "../../cuda_nvrtc/lib/libnvrtc.so.12"},
    };
    void *found = NULL;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs && found == NULL; i++) {
        Dl_info info;
        char path[PATH_BYTES];
        void *loaded = dlopen(pairs[i].loaded, RTLD_LAZY | RTLD_NOLOAD);
        void *symbol = loaded != NULL ? dlsym(loaded, "cublasLtCreate") : NULL;
        if (symbol != NULL && dladdr(symbol, &info) != 0 && strrchr(info.dli_fname, '/') != NULL) {
            int folder = (int)(strrchr(info.dli_fname, '/') - info.dli_fname);
            int length =
                snprintf(path, sizeof path, "%.*s/%s", folder, info.dli_fname, pairs[i].beside);
            if (length > 0 && (size_t)length < sizeof path)
                found = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
        }
        if (loaded != NULL) (void)dlclose(loaded);
    }
    return found;
}

static void *open_library(void)
{
    static const char *const names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};
    const int count = (int)(sizeof names / sizeof *names);
    void *library = NULL;
    for (int i = 0; i < count && library == NULL; i++)
        library = dlopen(names[i], RTLD_LAZY | RTLD_NOLOAD);
    if (library == NULL) library = open_beside_cublaslt();
    for (int i = 0; i < count && library == NULL; i++)
        library = dlopen(names[i], RTLD_LAZY | RTLD_LOCAL);
    return library;
}

static te_status open_nvrtc(const char *name, nvrtc_api *api)
{
    void *address;
    api->library = open_library();
    TE_FAIL_IF(api->library == NULL, TE_ERROR_DEVICE,
               "the driver takes no embedded image of %s, and libnvrtc, which would compile its "
               "source, is not found: update the driver or install CUDA's nvrtc",
               name);
#define X(member, symbol, arguments)                                                               \
    address = dlsym(api->library, #symbol);                                                        \
    if (address == NULL) return TE_FAIL(TE_ERROR_DEVICE, "libnvrtc lacks %s", #symbol);            \
    memcpy(&api->member, &address, sizeof address);
    NVRTC_SYMBOLS(X)
#undef X
    TE_FAIL_IF(api->version(&api->major, &api->minor) != 0, TE_ERROR_DEVICE,
               "nvrtcVersion failed for %s", name);
    return TE_OK;
}

static te_status choose_target(const nvrtc_api *api, const te_cuda_source *source, target *target)
{
    te_status st = TE_OK;
    const int required = source->major * 10 + source->minor;
    int count = 0, best = 0, *archs = NULL;
    if (api->arch_count(&count) != 0 || count <= 0) {
        st = TE_FAIL(TE_ERROR_DEVICE, "nvrtcGetNumSupportedArchs gave %d", count);
        goto done;
    }
    archs = calloc((size_t)count, sizeof *archs);
    if (archs == NULL || api->archs(archs) != 0) {
        st = TE_FAIL(TE_ERROR_DEVICE, "the %d targets of NVRTC can not be listed", count);
        goto done;
    }
    for (int i = 0; i < count; i++) {
        if (archs[i] <= required && archs[i] > best) best = archs[i];
    }
    if (best < 80) {
        st = TE_FAIL(TE_ERROR_DEVICE, "NVRTC %d.%d can not compile for compute capability %d.%d",
                     api->major, api->minor, source->major, source->minor);
        goto done;
    }
    target->is_ptx = best != required;
    (void)snprintf(target->option, sizeof target->option, "--gpu-architecture=%s_%d%s",
                   target->is_ptx ? "compute" : "sm", best,
                   required == 90 && best == 90 ? "a" : "");
done:
    free(archs);
    return st;
}

static te_status compile(const nvrtc_api *api, const te_cuda_source *source, const target *target,
                         te_cuda_code *code)
{
    te_status st = TE_OK;
    void *program = NULL;
    const char *options[] = {target->option, "--std=c++17"};
    int result = api->create(&program, source->text, source->name, 0, NULL, NULL);
    if (result == 0) result = api->compile(program, 2, options);
    if (result != 0) {
        char *log = NULL;
        size_t size = 0;
        if (program != NULL && api->log_size(program, &size) == 0) log = calloc(size + 1, 1);
        if (log != NULL) (void)api->log(program, log);
        st = TE_FAIL(TE_ERROR_DEVICE, "NVRTC %d.%d, %s, %s: error %d: %.*s", api->major, api->minor,
                     source->name, target->option, result, LOG_BYTES, log != NULL ? log : "");
        free(log);
        goto done;
    }
    result = target->is_ptx ? api->ptx_size(program, &code->size)
                            : api->cubin_size(program, &code->size);
    if (result == 0 && code->size > 0) code->data = malloc(code->size);
    if (code->data == NULL) {
        st = TE_FAIL(TE_ERROR_MEMORY, "no memory for %zu bytes of device code of %s (error %d)",
                     code->size, source->name, result);
        goto done;
    }
    result = target->is_ptx ? api->ptx(program, code->data) : api->cubin(program, code->data);
    if (result != 0) {
        te_cuda_code_free(code);
        st = TE_FAIL(TE_ERROR_DEVICE, "NVRTC gave no code for %s: error %d", source->name, result);
    }
done:
    if (program != NULL) (void)api->destroy(&program);
    return st;
}

/* All that the code depends on. */
static te_cache_key key_of(const nvrtc_api *api, const te_cuda_source *source, const target *target)
{
    const int version[2] = {api->major, api->minor};
    te_cache_key key = te_cache_key_of(source->name);
    te_cache_key_add(&key, source->text, source->size);
    te_cache_key_add(&key, target->option, strlen(target->option));
    te_cache_key_add(&key, version, sizeof version);
    return key;
}

te_status te_cuda_compile(const te_cuda_source *source, int use_cache, te_cuda_code *code)
{
    nvrtc_api api = {0};
    target target;
    te_cache_key key;
    memset(code, 0, sizeof *code);
    TE_TRY(open_nvrtc(source->name, &api));
    TE_TRY(choose_target(&api, source, &target));
    key = key_of(&api, source, &target);
    code->cached = use_cache && te_cache_read(&key, &code->data, &code->size);
    if (code->cached) return TE_OK;
    TE_TRY(compile(&api, source, &target, code));
    te_cache_write(&key, code->data, code->size);
    return TE_OK; /* the library stays open: other families follow, and unloading it gains nothing
                   */
}

void te_cuda_code_free(te_cuda_code *code)
{
    free(code->data);
    memset(code, 0, sizeof *code);
}
