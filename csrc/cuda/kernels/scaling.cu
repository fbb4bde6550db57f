/* SPDX-License-Identifier: Apache-2.0
 *
 * scaling.cu - one update of a chunk of delayed-scaling slots: the largest amax of the window, the
 * new scale, and the history rolled in place.
 *
 * A block owns 32 slots for all rows. Rolling moves row i + 1 to row i, so the block goes up in
 * bands: a band is read into registers, and after a barrier written one row lower. What a band
 * overwrites has been read by then, by itself or by the band before.
 */
#include "scaling.h"
#include "core/scaling_math.h"

extern "C" __global__ void __launch_bounds__(TE_SCALING_SLOTS *TE_SCALING_LINES)
    te_scaling_update(const __grid_constant__ te_scaling_params p)
{
    constexpr int band = TE_SCALING_LINES * TE_SCALING_UNROLL;
    __shared__ float largest[TE_SCALING_LINES][TE_SCALING_SLOTS];
    const int lane = threadIdx.x, line = threadIdx.y;
    const te_index slot = (te_index)blockIdx.x * TE_SCALING_SLOTS + lane;
    const bool valid = slot < p.slots;
    float *history = p.history + slot;
    const float current = valid ? history[0] : 0.0F;
    const bool rolls = valid && !te_is_idle(current);
    float amax = 0.0F;

    for (te_index first = 1; first < p.length; first += band) {
        float row[TE_SCALING_UNROLL];
#pragma unroll
        for (int i = 0; i < TE_SCALING_UNROLL; i++) {
            const te_index from = first + i * TE_SCALING_LINES + line;
            row[i] = valid && from < p.length ? history[from * p.stride] : 0.0F;
        }
#pragma unroll
        for (int i = 0; i < TE_SCALING_UNROLL; i++) amax = te_max_ignoring_nan(amax, row[i]);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TE_SCALING_UNROLL; i++) {
            const te_index from = first + i * TE_SCALING_LINES + line;
            if (rolls && from < p.length && from > 1) history[(from - 1) * p.stride] = row[i];
        }
    }
    largest[line][lane] = amax;
    __syncthreads(); /* also: every thread has read row 0, and written row length - 2 at most */
    if (line != 0 || !rolls) return;
#pragma unroll
    for (int i = 1; i < TE_SCALING_LINES; i++) amax = te_max_ignoring_nan(amax, largest[i][lane]);
    amax = p.most_recent ? current : te_max_ignoring_nan(current, amax);
    p.scale[slot] = te_delayed_scale(amax, p.scale[slot], p.fp8_max);
    history[(p.length - 1) * p.stride] = current;
    history[0] = 0.0F;
}
