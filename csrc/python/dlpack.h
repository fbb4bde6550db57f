/* SPDX-License-Identifier: Apache-2.0
 *
 * dlpack.h - the part of the DLPack 1.3 ABI that crosses the boundary, declared by ourselves so
 * that no framework header is needed. Layouts follow the public specification (dlpack.org); the
 * _Static_asserts below pin them for 64-bit machines.
 *
 * A framework publishes one function table per tensor type: the attribute __dlpack_c_exchange_api__
 * of the type is a capsule named "dlpack_exchange_api". All functions are called with the GIL held;
 * those that return int give 0, or -1 with a Python exception set.
 */
#ifndef TE_PYTHON_DLPACK_H
#define TE_PYTHON_DLPACK_H

#include <stddef.h>
#include <stdint.h>

enum { TEPY_DL_BOOL = 6 }; /* dtype code of 8-bit booleans, which no te_dtype stands for */

typedef struct tepy_dl_version {
    uint32_t major, minor;
} tepy_dl_version;

typedef struct tepy_dl_device {
    int32_t type; /* te_device_type_of_dlpack says which it is */
    int32_t index;
} tepy_dl_device;

typedef struct tepy_dl_dtype {
    uint8_t code; /* column 4 of TE_DTYPES */
    uint8_t bits;
    uint16_t lanes;
} tepy_dl_dtype;

typedef struct tepy_dl_tensor {
    void *data;
    tepy_dl_device device;
    int32_t ndim;
    tepy_dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* elements; NULL: dense row-major */
    uint64_t byte_offset;
} tepy_dl_tensor;

static inline int64_t tepy_dl_elements(const tepy_dl_tensor *dl)
{
    int64_t count = 1;
    for (int32_t i = 0; i < dl->ndim; i++) count *= dl->shape[i];
    return count;
}

static inline int64_t tepy_dl_stride(const tepy_dl_tensor *dl, int32_t dim)
{
    int64_t stride = 1;
    if (dl->strides != NULL) return dl->strides[dim];
    for (int32_t i = dim + 1; i < dl->ndim; i++) stride *= dl->shape[i];
    return stride;
}

static inline int tepy_dl_is_dense(const tepy_dl_tensor *dl)
{
    int64_t dense = 1;
    if (dl->strides == NULL) return 1;
    for (int32_t i = dl->ndim - 1; i >= 0; i--) {
        if (dl->shape[i] > 1 && dl->strides[i] != dense) return 0;
        dense *= dl->shape[i];
    }
    return 1;
}

typedef struct tepy_dl_managed {
    tepy_dl_version version;
    void *owner;
    void (*deleter)(struct tepy_dl_managed *self); /* NULL: nothing to release */
    uint64_t flags;
    tepy_dl_tensor tensor;
} tepy_dl_managed;

typedef void (*tepy_dl_set_error)(void *context, const char *kind, const char *message);

typedef struct tepy_dl_exchange {
    tepy_dl_version version;
    struct tepy_dl_exchange *previous; /* table of an older major version, or NULL */
    /* Allocates like `prototype` (its data is ignored). Errors go to set_error, not to Python. */
    int (*allocate)(tepy_dl_tensor *prototype, tepy_dl_managed **out, void *context,
                    tepy_dl_set_error set_error);
    int (*managed_from_object)(void *object, tepy_dl_managed **out);
    int (*object_from_managed)(tepy_dl_managed *managed, void **object); /* takes managed over */
    /* Borrowed: valid while the object lives and is not resized. NULL where a table lacks it. */
    int (*view)(void *object, tepy_dl_tensor *out);
    int (*current_stream)(int32_t device_type, int32_t index, void **stream);
} tepy_dl_exchange;

_Static_assert(sizeof(void *) != 8 || sizeof(tepy_dl_tensor) == 48, "DLTensor");
_Static_assert(sizeof(void *) != 8 || offsetof(tepy_dl_managed, tensor) == 32,
               "DLManagedTensorVersioned");
_Static_assert(sizeof(void *) != 8 || offsetof(tepy_dl_exchange, view) == 40, "DLPackExchangeAPI");

#endif
