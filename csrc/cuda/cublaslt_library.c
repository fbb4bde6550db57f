/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/cublaslt_library.h"

#include <dlfcn.h>
#include <string.h>

#include "core/status.h"
#include "cuda/library.h"

te_status te_cublaslt_load(te_cublaslt_api *api)
{
    static const char *const sonames[] = {"libcublasLt.so.13", "libcublasLt.so.12", NULL};
    static const te_library_symbol symbols[] = {
#define X(name) TE_LIBRARY_SYMBOL(name, te_cublaslt_api)
        TE_CUBLASLT_SYMBOLS(X)
#undef X
    };
    memset(api, 0, sizeof *api);
    return te_library_open(sonames, symbols, sizeof symbols / sizeof *symbols, api, &api->library);
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
