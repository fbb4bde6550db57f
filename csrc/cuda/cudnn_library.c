/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/cudnn_library.h"

#include <pthread.h>

#include "core/fork.h"
#include "core/status.h"
#include "cuda/library.h"

/* The oldest that was tested. Before 9.18, gradients of odd and packed lengths are known to be
 * wrong on Hopper. */
#define OLDEST 91900

te_cudnn_api te_cudnn;

TE_PROCESS_LOCK(lock);
static int ready; /* guarded by lock */

te_status te_cudnn_load(void)
{
    static const char *const sonames[] = {"libcudnn.so.9", NULL};
    static const te_library_symbol symbols[] = {
#define X(name) TE_LIBRARY_SYMBOL(name, te_cudnn_api)
        TE_CUDNN_SYMBOLS(X)
#undef X
    };
    te_status st = TE_OK;
    te_cudnn_api api;
    void *library = NULL;
    size_t version;
    (void)pthread_mutex_lock(&lock);
    if (ready) goto done;
    TE_TRY_DONE(
        te_library_open(sonames, symbols, sizeof symbols / sizeof *symbols, &api, &library));
    version = api.cudnnGetVersion();
    if (version < OLDEST) {
        st = TE_FAIL(TE_ERROR_DEVICE, "cuDNN %zu, expected at least %d", version, OLDEST);
        goto done;
    }
    te_cudnn = api;
    ready = 1;
done:
    (void)pthread_mutex_unlock(&lock);
    return st;
}

te_status te_cudnn_check(cudnnStatus_t status, const char *call, const char *file, int line)
{
    char text[256] = "";
    te_status kind = TE_ERROR_DEVICE;
    if (status == CUDNN_STATUS_SUCCESS) return TE_OK;
    te_cudnn.cudnnGetLastErrorString(text, sizeof text);
    if (status >= CUDNN_STATUS_NOT_SUPPORTED && status < CUDNN_STATUS_INTERNAL_ERROR) {
        kind = TE_ERROR_UNSUPPORTED;
    } else if (status == CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED) {
        kind = TE_ERROR_MEMORY;
    }
    return te_fail(kind, file, line, "%s: %s (%d)%s%s", call, te_cudnn.cudnnGetErrorString(status),
                   (int)status, text[0] != '\0' ? ": " : "", text);
}
