/* SPDX-License-Identifier: Apache-2.0
 *
 * activation.h - parameters of the activations and of their gradients. Device pointers are borrowed
 * for the launch. Read by gcc, nvcc and NVRTC.
 */
#ifndef TE_CUDA_KERNELS_ACTIVATION_H
#define TE_CUDA_KERNELS_ACTIVATION_H

#include "cuda/device/types.h"

/* The function of one number a. s is the logistic function. */
enum {
    TE_SHAPE_GELU,  /* tanh GELU */
    TE_SHAPE_SWISH, /* a s(alpha a) */
    TE_SHAPE_RELU,
    TE_SHAPE_SRELU,
    TE_SHAPE_GLU,    /* s(a); gated ones alone, as is what follows */
    TE_SHAPE_CLAMPED /* swish of min(a, limit), times clamp(b, -limit, limit) + offset */
};

/* A kernel on tiles, see te_tile_params; the gradient of a gated activation has two outputs. */
typedef struct te_activation_kernel_params {
    te_tile_params tile;
    te_view grad;               /* [rows, columns] gradient of the result; gradients alone */
    te_view input;              /* [rows, columns]: a */
    te_view gate;               /* [rows, columns]: b; gated ones alone */
    int aligned;                /* every row of these begins at 16 bytes */
    int shape;                  /* TE_SHAPE_* */
    float alpha, limit, offset; /* of softcap: limit is the cap */
} te_activation_kernel_params;

#endif
