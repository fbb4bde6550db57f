/* SPDX-License-Identifier: Apache-2.0
 *
 * views.c - parts of buffers: heads of a matrix of rows, or a buffer of heads in another order.
 */
#include <stdio.h>
#include <string.h>

#include "layer/build.h"

int32_t te_view(te_build *build, const te_buffer_info *view)
{
    te_buffer_info info = *view;
    const te_buffer_info *base;
    if (build->plan.status != TE_OK) return 0;
    base = &build->plan.buffers[view->base].info;
    info.role = TE_ROLE_VIEW;
    info.link = base->link;
    info.of = base->of;
    info.dtype = base->dtype;
    for (int32_t i = 0; i < build->plan.buffer_count; i++) {
        const te_buffer_info *known = &build->plan.buffers[i].info;
        if (known->role == TE_ROLE_VIEW && known->base == info.base && known->view == info.view &&
            known->offset == info.offset && known->ndim == info.ndim &&
            memcmp(known->shape, info.shape, sizeof info.shape) == 0 &&
            memcmp(known->strides, info.strides, sizeof info.strides) == 0) {
            return i;
        }
    }
    return te_plan_add_buffer(&build->plan, &info);
}

/* Of packed sequences: [1, tokens, heads, channels] for attention, else without the 1. */
static int32_t packed_heads_of(te_build *build, int32_t n, te_buffer_info *info,
                               const te_slice *slice)
{
    const te_buffer_info *matrix = &build->plan.buffers[info->base].info;
    const int attends = te_node(build, n)->kind == TE_NODE_ATTENTION;
    te_extent *shape = &info->shape[attends], *strides = &info->strides[attends];
    const int32_t rows = matrix->shape[0].symbol;
    const int64_t columns = matrix->shape[1].add;
    info->ndim = 3 + attends;
    info->shape[0] = te_constant(1);
    info->strides[0] = te_multiple(rows, columns);
    shape[0] = te_multiple(rows, 1);
    shape[1] = te_constant(te_slice_blocks(slice));
    shape[2] = te_constant(te_slice_width(slice));
    strides[0] = te_constant(columns);
    strides[1] = te_constant(slice->stride);
    strides[2] = te_constant(1);
    return te_view(build, info);
}

/* Of a buffer of heads: itself, or as the node's order of memory has it. */
static int32_t whole_heads_of(te_build *build, int32_t n, int32_t base)
{
    const te_buffer_info *heads = &build->plan.buffers[base].info;
    const uint32_t flags = te_node(build, n)->flags;
    te_buffer_info info = {.ndim = 4, .base = base, .view = TE_VIEW_EXCHANGED};
    char name[2 * TE_NAME_BYTES];
    (void)snprintf(name, sizeof name, "%.24s_heads", build->plan.buffers[base].name);
    info.name = name;
    if ((flags & TE_NODE_PACKED) != 0) {
        info.view = TE_VIEW_BATCH;
        info.shape[0] = te_constant(1);
        memcpy(&info.shape[1], heads->shape, 3 * sizeof info.shape[0]);
        return te_view(build, &info);
    }
    if ((flags & TE_NODE_SEQUENCE_FIRST) == 0) return base;
    memcpy(info.shape, heads->shape, sizeof info.shape);
    info.shape[0] = heads->shape[1];
    info.shape[1] = heads->shape[0];
    return te_view(build, &info);
}

int32_t te_heads_of(te_build *build, int32_t n, int32_t matrix, const te_slice *slice)
{
    te_buffer_info info = {.ndim = 4, .base = matrix, .offset = slice->offset};
    const te_node_desc *node = te_node(build, n);
    int first = (node->flags & TE_NODE_SEQUENCE_FIRST) != 0;
    char name[2 * TE_NAME_BYTES];
    int64_t columns;
    int32_t rows, outer = first ? 1 : 0; /* the dim of the first leading one */
    if (build->plan.status != TE_OK) return 0;
    if (build->plan.buffers[matrix].info.ndim > 2) return whole_heads_of(build, n, matrix);
    columns = build->plan.buffers[matrix].info.shape[1].add;
    rows = build->plan.buffers[matrix].info.shape[0].symbol;
    (void)snprintf(name, sizeof name, "%.24s_at_%lld", build->plan.buffers[matrix].name,
                   (long long)slice->offset);
    info.name = name;
    if ((node->flags & TE_NODE_PACKED) != 0) return packed_heads_of(build, n, &info, slice);
    info.shape[outer] = te_multiple(rows + 1, 1);
    info.shape[1 - outer] = te_multiple(rows + 2, 1);
    info.shape[2] = te_constant(te_slice_blocks(slice));
    info.shape[3] = te_constant(te_slice_width(slice));
    info.strides[outer] = te_multiple(rows + 2, columns);
    info.strides[1 - outer] = te_constant(columns);
    info.strides[2] = te_constant(slice->stride);
    info.strides[3] = te_constant(1);
    return te_view(build, &info);
}
