/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/cublaslt_library.h"

#include <pthread.h>
#include <stdlib.h>

#include "core/fork.h"
#include "core/status.h"
#include "cuda/library.h"

te_cublaslt_api te_cublaslt_functions;

typedef struct context_handle {
    CUcontext context;
    cublasLtHandle_t handle;
    struct context_handle *next;
} context_handle;

TE_PROCESS_LOCK(lock);
static int ready;               /* guarded by lock, as what follows */
static context_handle *handles; /* of the devices' contexts */

/* Under lock. */
static te_status load(void)
{
    static const char *const sonames[] = {"libcublasLt.so.13", "libcublasLt.so.12", NULL};
    static const te_library_symbol symbols[] = {
#define X(name) TE_LIBRARY_SYMBOL(name, te_cublaslt_api)
        TE_CUBLASLT_SYMBOLS(X)
#undef X
    };
    te_cublaslt_api api;
    void *library = NULL;
    if (ready) return TE_OK;
    TE_TRY(te_library_open(sonames, symbols, sizeof symbols / sizeof *symbols, &api, &library));
    te_cublaslt_functions = api;
    ready = 1;
    return TE_OK;
}

te_status te_cublaslt_handle(CUcontext context, cublasLtHandle_t *handle)
{
    te_status st = TE_OK;
    context_handle *at = NULL;
    *handle = NULL;
    (void)pthread_mutex_lock(&lock);
    TE_TRY_DONE(load());
    for (at = handles; at != NULL && at->context != context; at = at->next) continue;
    if (at == NULL) {
        context_handle *made = calloc(1, sizeof *made);
        if (made == NULL) {
            st = TE_FAIL(TE_ERROR_MEMORY, "no memory for a cuBLASLt handle");
            goto done;
        }
        st = TE_CUBLASLT(cublasLtCreate, &made->handle);
        if (st != TE_OK) {
            free(made);
            goto done;
        }
        made->context = context;
        made->next = handles;
        handles = at = made;
    }
    *handle = at->handle;
done:
    (void)pthread_mutex_unlock(&lock);
    return st;
}

te_status te_cublaslt_check(cublasStatus_t status, const char *call, const char *file, int line)
{
    if (status == CUBLAS_STATUS_SUCCESS) return TE_OK;
    return te_fail(TE_ERROR_DEVICE, file, line, "%s: %s (%d)", call,
                   te_cublaslt_functions.cublasLtGetStatusName(status), (int)status);
}
