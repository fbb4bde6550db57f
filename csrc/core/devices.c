/* SPDX-License-Identifier: Apache-2.0
 *
 * devices.c - the types of devices: those with a driver of ours, and those that a program adds,
 * whose operators are backends' alone.
 */
#include <ctype.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "core/context.h"
#include "core/fork.h"
#include "core/status.h"

#define NAME_SIZE 16

/* DLDeviceType numbers of DLPack. */
enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3 };

typedef struct device_type {
    char name[NAME_SIZE];
    int32_t dlpack;
} device_type;

TE_PROCESS_LOCK(lock);
static device_type types[TE_DEVICE_COUNT] = {
    [TE_DEVICE_CPU] = {"cpu", DL_CPU}, [TE_DEVICE_CUDA] = {"cuda", DL_CUDA}};
/* Entries below it do not change any more. */
static _Atomic int count = TE_DEVICE_OTHER;

static int is_there(te_device_type type)
{
    return (int)type >= 0 && (int)type < atomic_load_explicit(&count, memory_order_acquire);
}

static int is_name(const char *name)
{
    const size_t length = strlen(name);
    if (length == 0 || length >= NAME_SIZE) return 0;
    for (size_t i = 0; i < length; i++) {
        if (name[i] != '_' && !isalnum((unsigned char)name[i])) return 0;
    }
    return 1;
}

/* With the lock. */
static te_status add(const char *name, int32_t dlpack, te_device_type *type)
{
    const int known = atomic_load_explicit(&count, memory_order_relaxed);
    for (int i = 0; i < known; i++) {
        const int same_name = strcmp(types[i].name, name) == 0, same = types[i].dlpack == dlpack;
        if (!same_name && !same) continue;
        TE_FAIL_IF(!same_name || !same, TE_ERROR_INVALID,
                   "device type %s of DLPack number %d: %s has number %d already", name,
                   (int)dlpack, types[i].name, (int)types[i].dlpack);
        *type = (te_device_type)i;
        return TE_OK;
    }
    TE_FAIL_IF(known == TE_DEVICE_COUNT, TE_ERROR_STATE,
               "device type %s: there are %d types already, no more fit", name, known);
    memcpy(types[known].name, name, strlen(name) + 1);
    types[known].dlpack = dlpack;
    *type = (te_device_type)known;
    atomic_store_explicit(&count, known + 1, memory_order_release);
    return TE_OK;
}

te_status te_device_type_add(const char *name, int32_t dlpack, te_device_type *type)
{
    te_status st;
    TE_FAIL_IF(type == NULL, TE_ERROR_INVALID, "type is NULL");
    *type = (te_device_type)-1;
    TE_FAIL_IF(name == NULL || !is_name(name), TE_ERROR_INVALID,
               "device type: the name is %s, expected 1 to %d letters, digits and _",
               name == NULL ? "NULL" : name, NAME_SIZE - 1);
    TE_FAIL_IF(dlpack <= 0 || dlpack == DL_CUDA_HOST, TE_ERROR_INVALID,
               "device type %s: DLPack number %d is that of no device of its own", name,
               (int)dlpack);
    (void)pthread_mutex_lock(&lock);
    st = add(name, dlpack, type);
    (void)pthread_mutex_unlock(&lock);
    return st;
}

const char *te_device_type_name(te_device_type type)
{
    return is_there(type) ? types[type].name : "invalid";
}

int32_t te_device_type_dlpack(te_device_type type)
{
    return is_there(type) ? types[type].dlpack : 0;
}

int32_t te_device_type_of_dlpack(int32_t dlpack)
{
    const int known = atomic_load_explicit(&count, memory_order_acquire);
    if (dlpack == DL_CUDA_HOST) return TE_DEVICE_CPU;
    for (int i = 0; i < known; i++) {
        if (types[i].dlpack == dlpack) return i;
    }
    return -1;
}

static te_status open_nothing(int32_t index, void **state)
{
    (void)index;
    *state = NULL;
    return TE_OK;
}

static void close_nothing(void *state)
{
    (void)state;
}

#ifndef TE_WITH_CUDA
const te_device_driver *te_cuda_driver(void)
{
    return NULL;
}

te_status te_cuda_configure(int force_source, const char *cache_dir)
{
    (void)force_source, (void)cache_dir;
    return TE_FAIL(TE_ERROR_UNSUPPORTED, "this build has no CUDA backend");
}
#endif

const te_device_driver *te_driver_of(te_device_type type)
{
    static const te_device_driver other = {.open = open_nothing, .close = close_nothing};
    if (type == TE_DEVICE_CPU) return te_cpu_driver();
    if (type == TE_DEVICE_CUDA) return te_cuda_driver();
    return is_there(type) ? &other : NULL;
}

te_status te_device_current(te_device_type type, te_device *device)
{
    const te_device_driver *driver = te_driver_of(type);
    TE_FAIL_IF(driver == NULL || driver->current == NULL, TE_ERROR_UNSUPPORTED,
               "devices of type %s: this build can not say which one a thread works on",
               te_device_type_name(type));
    device->type = type;
    return driver->current(&device->index);
}
