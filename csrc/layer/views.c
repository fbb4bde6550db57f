/* SPDX-License-Identifier: Apache-2.0
 *
 * views.c - parts of buffers: heads of a matrix of rows, or a buffer of heads in another order.
 */
#include <stdarg.h>
#include <stdio.h>

#include "layer/build.h"

/* Whether all extents of two buffers are the same. */
static int are_alike(const te_extent *a, const te_extent *b)
{
    for (int d = 0; d < TE_MAX_DIMS; d++) {
        if (!te_is_alike(&a[d], &b[d])) return 0;
    }
    return 1;
}

int32_t te_view(te_build *build, const te_buffer_info *view, const char *format, ...)
{
    const te_buffer_info *base = &te_buffer_of(build, view->base)->info;
    te_buffer_info info = *view;
    char name[2 * TE_NAME_BYTES];
    va_list args;
    if (build->plan.status != TE_OK) return 0;
    va_start(args, format);
    (void)vsnprintf(name, sizeof name, format, args);
    va_end(args);
    info.name = name;
    info.role = TE_ROLE_VIEW;
    info.link = base->link;
    info.of = base->of;
    info.dtype = base->dtype;
    for (int32_t i = 0; i < build->plan.buffer_count; i++) {
        const te_buffer_info *known = &build->plan.buffers[i].info;
        if (known->role == TE_ROLE_VIEW && known->base == info.base && known->view == info.view &&
            te_is_alike(&known->offset, &info.offset) && known->ndim == info.ndim &&
            are_alike(known->shape, info.shape) && are_alike(known->strides, info.strides)) {
            return i;
        }
    }
    return te_plan_add_buffer(&build->plan, &info);
}

int32_t te_rows_of_ranks(te_build *build, int32_t matrix, int32_t ranks, int32_t from,
                         int32_t count)
{
    const te_buffer *base = te_buffer_of(build, matrix);
    const te_extent *rows = &base->info.shape[0];
    const int64_t columns = base->info.shape[1].add, of_rank = rows->multiply / ranks;
    const te_buffer_info view = {
        .ndim = 2,
        .base = matrix,
        .offset = te_multiple(rows->symbol, of_rank * from * columns),
        .shape = {te_multiple(rows->symbol, of_rank * count), te_constant(columns)},
        .strides = {te_constant(columns), te_constant(1)}};
    return te_view(build, &view, "%.24s_from_%d", base->name, from);
}

int32_t te_rows_of_heads(te_build *build, int32_t matrix, const te_slice *slice, const char *name)
{
    const te_extent *rows = &te_buffer_of(build, matrix)->info.shape[0];
    const te_buffer_info view = {.ndim = 2,
                                 .base = matrix,
                                 .shape = {te_multiple(rows->symbol, rows->multiply * slice->heads),
                                           te_constant(slice->channels)},
                                 .strides = {te_constant(slice->channels), te_constant(1)}};
    return te_view(build, &view, "%s", name);
}

/* Of a buffer of heads: itself, or as the node's order of memory has it. */
static int32_t whole_heads_of(te_build *build, int32_t n, int32_t base)
{
    const te_buffer *heads = te_buffer_of(build, base);
    const te_extent *shape = heads->info.shape;
    const uint32_t flags = te_node(build, n)->flags;
    const te_buffer_info batch = {.ndim = 4,
                                  .base = base,
                                  .view = TE_VIEW_BATCH,
                                  .shape = {te_constant(1), shape[0], shape[1], shape[2]}};
    const te_buffer_info exchanged = {.ndim = 4,
                                      .base = base,
                                      .view = TE_VIEW_EXCHANGED,
                                      .shape = {shape[1], shape[0], shape[2], shape[3]}};
    const int packed = (flags & TE_NODE_PACKED) != 0;
    if (!packed && (flags & TE_NODE_SEQUENCE_FIRST) == 0) return base;
    return te_view(build, packed ? &batch : &exchanged, "%.24s_heads", heads->name);
}

int32_t te_heads_of(te_build *build, int32_t n, int32_t matrix, const te_slice *slice)
{
    const te_buffer *base = te_buffer_of(build, matrix);
    const te_node_desc *node = te_node(build, n);
    const int packed = (node->flags & TE_NODE_PACKED) != 0, dims = packed ? 1 : 2;
    const int outer =
        (node->flags & TE_NODE_SEQUENCE_FIRST) != 0;            /* dim of the first leading one */
    const int lone = packed && node->kind == TE_NODE_ATTENTION; /* a batch of 1 before them */
    const int32_t rows = base->info.shape[0].symbol;
    const int64_t ranks = base->info.shape[0].multiply; /* whose rows lie behind each other */
    const int64_t columns = base->info.shape[1].add;
    te_buffer_info info = {
        .ndim = lone + dims + 2, .base = matrix, .offset = te_constant(slice->offset)};
    te_extent *shape = &info.shape[lone], *strides = &info.strides[lone];
    if (base->info.ndim > 2) return whole_heads_of(build, n, matrix);
    if (lone) {
        info.shape[0] = te_constant(1);
        info.strides[0] = te_multiple(rows, ranks * columns);
    }
    if (packed) {
        shape[0] = te_multiple(rows, ranks);
        strides[0] = te_constant(columns);
    } else {
        shape[outer] = te_multiple(rows + 1, ranks);
        shape[1 - outer] = te_multiple(rows + 2, 1);
        strides[outer] = te_multiple(rows + 2, columns);
        strides[1 - outer] = te_constant(columns);
    }
    shape[dims] = te_constant(te_slice_blocks(slice));
    shape[dims + 1] = te_constant(te_slice_width(slice));
    strides[dims] = te_constant(slice->stride);
    strides[dims + 1] = te_constant(1);
    return te_view(build, &info, "%.24s_at_%lld", base->name, (long long)slice->offset);
}
