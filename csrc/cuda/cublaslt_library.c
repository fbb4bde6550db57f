/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* RTLD_NOLOAD */
#include "cuda/cublaslt_library.h"

#include <dlfcn.h>
#include <string.h>

#include "core/status.h"

/* Newest first. What is loaded already wins whatever its version: two of them in one process would
 * each load their kernels. */
static const char *const sonames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
#define SONAME_COUNT (sizeof sonames / sizeof sonames[0])

static void *open_library(void)
{
    void *library = NULL;
    for (size_t i = 0; i < SONAME_COUNT && library == NULL; ++i)
        library = dlopen(sonames[i], RTLD_LAZY | RTLD_NOLOAD);
    for (size_t i = 0; i < SONAME_COUNT && library == NULL; ++i)
        library = dlopen(sonames[i], RTLD_LAZY | RTLD_LOCAL);
    return library;
}

te_status te_cublaslt_load(te_cublaslt_api *api)
{
    te_status st = TE_OK;
    const char *missing = NULL;
    memset(api, 0, sizeof *api);
    api->library = open_library();
    if (api->library == NULL) {
        const char *why = dlerror();
        return TE_FAIL(TE_ERROR_DEVICE, "cuBLASLt (%s or %s) can not be opened: %s", sonames[0],
                       sonames[1], why != NULL ? why : "not found");
    }
#define X(name)                                                                                    \
    *(void **)&api->name = dlsym(api->library, #name);                                             \
    if (api->name == NULL) missing = #name;
    TE_CUBLASLT_SYMBOLS(X)
#undef X
    if (missing != NULL) {
        st = TE_FAIL(TE_ERROR_DEVICE, "the cuBLASLt of this process has no %s: it is too old",
                     missing);
        te_cublaslt_unload(api);
    }
    return st;
}

void te_cublaslt_unload(te_cublaslt_api *api)
{
    if (api->library != NULL) (void)dlclose(api->library);
    memset(api, 0, sizeof *api);
}

te_status te_cublaslt_check(const te_cublaslt_api *api, cublasStatus_t status, const char *call,
                            const char *file, int line)
{
    if (status == CUBLAS_STATUS_SUCCESS) return TE_OK;
    return te_fail(TE_ERROR_DEVICE, file, line, "%s: %s (%d)", call,
                   api->cublasLtGetStatusName(status), (int)status);
}
