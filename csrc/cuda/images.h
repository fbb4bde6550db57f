/* SPDX-License-Identifier: Apache-2.0
 *
 * images.h - the device code that the build embeds, one entry per kernel family.
 *
 * setup.py generates the table (build/obj-cuda/images/te_images.c) from csrc/cuda/kernels.
 * The fat binary is there when nvcc was. The source always is: where a driver refuses the binary,
 * the process's NVRTC compiles it at first use.
 */
#ifndef TE_CUDA_IMAGES_H
#define TE_CUDA_IMAGES_H

#include <stddef.h>

typedef struct te_device_image {
    const char *name;   /* the family: "quantize" for csrc/cuda/kernels/quantize.cu */
    const void *fatbin; /* 64-byte aligned, for cuLibraryLoadData; NULL when built without nvcc */
    size_t fatbin_size; /* bytes; 0 when built without nvcc */
    const char *source; /* CUDA C for NVRTC, zero-terminated. Its own includes ("...") are pasted in
                         * where first met, once each; system headers (<...>) remain. */
    size_t source_size; /* bytes, without the terminating zero */
} te_device_image;

/* te_device_image_count entries, then one with a NULL name */
extern const te_device_image te_device_images[];
extern const int te_device_image_count;

#endif
