/* SPDX-License-Identifier: Apache-2.0
 *
 * view4.cuh - addresses within tensors of four dims.
 */
#ifndef TE_DEVICE_VIEW4_CUH
#define TE_DEVICE_VIEW4_CUH

#include "cuda/device/types.h"

/* The line (a, b, c) of a view of elements of `bytes`; NULL where the view is absent. */
__device__ __forceinline__ unsigned char *te_line(const te_view4 &view, int bytes, te_index a,
                                                  te_index b, te_index c)
{
    if (view.data == nullptr) return nullptr;
    return view.data + (a * view.strides[0] + b * view.strides[1] + c * view.strides[2]) * bytes;
}

/* value / divisor, the rest in *rest; neither is negative. A 64-bit division is slow. */
__device__ __forceinline__ te_index te_divide(te_index value, te_index divisor, te_index *rest)
{
    if ((value | divisor) <= 0x7fffffff) {
        const unsigned quotient = (unsigned)value / (unsigned)divisor;
        *rest = (unsigned)value - quotient * (unsigned)divisor;
        return quotient;
    }
    const te_index quotient = value / divisor;
    *rest = value - quotient * divisor;
    return quotient;
}

#endif
