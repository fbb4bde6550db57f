/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* RTLD_NOLOAD */
#include "cuda/library.h"

#include <dlfcn.h>
#include <string.h>

#include "core/status.h"

static void *open_any(const char *const *sonames, int mode)
{
    void *library = NULL;
    for (; *sonames != NULL && library == NULL; sonames++) library = dlopen(*sonames, mode);
    return library;
}

te_status te_library_open(const char *const *sonames, const te_library_symbol *symbols, int count,
                          void *table, void **library)
{
    *library = open_any(sonames, RTLD_LAZY | RTLD_NOLOAD);
    if (*library == NULL) *library = open_any(sonames, RTLD_LAZY | RTLD_LOCAL);
    if (*library == NULL) {
        const char *why = dlerror();
        return TE_FAIL(TE_ERROR_DEVICE, "%s can not be opened: %s", sonames[0],
                       why != NULL ? why : "not found");
    }
    for (int i = 0; i < count; i++) {
        void *address = dlsym(*library, symbols[i].name);
        if (address == NULL) {
            (void)dlclose(*library);
            *library = NULL;
            return TE_FAIL(TE_ERROR_DEVICE, "the %s of this process has no %s: it is too old",
                           sonames[0], symbols[i].name);
        }
        /* A function pointer travels by its bytes: ISO C has no such cast. */
        memcpy((char *)table + symbols[i].offset, &address, sizeof address);
    }
    return TE_OK;
}
