/* SPDX-License-Identifier: Apache-2.0
 *
 * layout.c - shapes and offsets of a plan's buffers for given sizes, without a device.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "core/tensor.h"
#include "layer/plan.h"

/* Layouts that are kept with a plan: those of training. A generating model meets other sizes at
 * each call, and works them out again. */
#define KEPT 16

/* Of one buffer, so that no sum of them leaves 64 bits. */
#define MOST_BYTES ((int64_t)1 << 46)

static int64_t bytes_of(const te_tensor *tensor)
{
    return te_tensor_numel(tensor) * (int64_t)te_dtype_bytes(tensor->dtype);
}

static int64_t offset_of(const te_tensor *tensor)
{
    return (int64_t)(uintptr_t)tensor->data;
}

/* Whether two packed buffers of a plan, the first one scratch, are needed at the same stage. What
 * is saved is there from the beginning. */
static int meet(const te_buffer *scratch, const te_buffer *other)
{
    return other->last_use >= scratch->first_use &&
           (other->info.role == TE_ROLE_SAVED || other->first_use <= scratch->last_use);
}

/* The lowest place for scratch buffer i that no buffer needed at the same time has, among those
 * that lie in the saved buffer or among the others. */
static int64_t place_scratch(const te_plan *plan, const te_layout *layout, int32_t i, int in_saved)
{
    int64_t bytes = bytes_of(&layout->tensors[i]);
    int64_t place = 0;
    int moved = 1;
    while (moved) { /* ends: `place` only grows, past one buffer at a time */
        moved = 0;
        for (int32_t other = 0; other < i; other++) {
            const te_buffer *buffer = &plan->buffers[other];
            int64_t begin, end;
            if (!te_is_packed(buffer->info.role) || layout->in_saved[other] != in_saved ||
                !meet(&plan->buffers[i], buffer)) {
                continue;
            }
            begin = offset_of(&layout->tensors[other]);
            end = begin + bytes_of(&layout->tensors[other]);
            if (end <= place || begin >= place + bytes) continue;
            place = te_round_up(end, TE_MEMBER_ALIGN);
            moved = 1;
        }
    }
    return place;
}

static int is_rounded_up(const te_extent *extent, const te_sizes *sizes)
{
    return extent->symbol != TE_SYMBOL_NONE &&
           extent->multiply * sizes->of[extent->symbol] % extent->align != 0;
}

/* Dense, but for a view; what has any length is the caller's, and so are its strides. */
static te_status shape_tensor(const te_buffer *buffer, const te_sizes *sizes, te_tensor *tensor)
{
    const te_buffer_info *info = &buffer->info;
    int64_t stride = 1;
    tensor->dtype = info->dtype;
    tensor->ndim = info->ndim;
    for (int32_t d = info->ndim - 1; d >= 0; d--) {
        int64_t length = te_extent_value(&info->shape[d], sizes);
        int view = info->role == TE_ROLE_VIEW;
        TE_FAIL_IF(buffer->joins && is_rounded_up(&info->shape[d], sizes), TE_ERROR_INVALID,
                   "plan: %s: those of all ranks are put together, which takes rows in a multiple "
                   "of %lld on each",
                   buffer->name, (long long)info->shape[d].align);
        tensor->shape[d] = length;
        tensor->strides[d] = view ? te_extent_value(&info->strides[d], sizes) : stride;
        if (view || length == TE_ANY_LENGTH) continue;
        TE_FAIL_IF(length > 0 && stride > MOST_BYTES / (int64_t)sizeof(float) / length,
                   TE_ERROR_INVALID, "plan: %s: too large for %lld rows", buffer->name,
                   (long long)sizes->of[TE_SYMBOL_ROWS]);
        stride *= length;
    }
    return TE_OK;
}

/* Places a packed buffer behind those before it; `ends` are those of saved buffer and scratch. */
static void place_packed(const te_plan *plan, te_layout *layout, int32_t i, int64_t ends[2])
{
    te_tensor *tensor = &layout->tensors[i];
    int in_saved = plan->buffers[i].info.role == TE_ROLE_SAVED;
    int64_t bytes = te_round_up(bytes_of(tensor), TE_MEMBER_ALIGN), offset = ends[0];
    if (!in_saved && layout->consumes_saved) {
        offset = place_scratch(plan, layout, i, 1);
        in_saved = offset + bytes_of(tensor) <= layout->saved_bytes;
    }
    if (!in_saved) offset = place_scratch(plan, layout, i, 0);
    layout->in_saved[i] = (unsigned char)in_saved;
    tensor->data = (void *)(uintptr_t)offset; /* NOLINT(performance-no-int-to-ptr) */
    if (offset + bytes > ends[!in_saved]) ends[!in_saved] = offset + bytes;
}

static te_status fill(const te_plan *plan, te_layout *layout)
{
    const te_sizes *sizes = &layout->sizes;
    int64_t ends[2] = {0, 0};
    for (int s = 0; s < TE_SEQUENCES; s++) { /* first: no scratch lies behind that many */
        layout->saved_bytes += te_extent_value(&plan->saved_bytes[s], sizes);
    }
    for (int32_t i = 0; i < plan->buffer_count; i++) {
        const te_buffer_info *info = &plan->buffers[i].info;
        te_tensor *tensor = &layout->tensors[i];
        tensor->device = layout->device;
        TE_TRY(shape_tensor(&plan->buffers[i], sizes, tensor));
        if (info->role == TE_ROLE_VIEW) {
            int64_t offset =
                te_extent_value(&info->offset, sizes) * (int64_t)te_dtype_bytes(info->dtype);
            tensor->data = (void *)(uintptr_t)offset; /* NOLINT(performance-no-int-to-ptr) */
        }
        if (te_is_packed(info->role)) place_packed(plan, layout, i, ends);
    }
    layout->scratch_bytes = ends[1];
    return TE_OK;
}

/* Numbers that the plan names are in range, and dims make up the rows. */
static te_status check_sizes(const te_plan *plan, const te_sizes *sizes)
{
    for (int s = TE_SYMBOL_ROWS; s < TE_SYMBOL_COUNT; s++) {
        if ((plan->symbols >> s & 1U) == 0 || (sizes->of[s] >= 0 && sizes->of[s] <= INT32_MAX)) {
            continue;
        }
        return TE_FAIL(TE_ERROR_INVALID, "rows = %lld, expected 0 to %d", (long long)sizes->of[s],
                       INT32_MAX);
    }
    for (int rows = TE_SYMBOL_ROWS; rows <= TE_SYMBOL_SOURCE_ROWS;
         rows += TE_SYMBOL_SOURCE_ROWS - TE_SYMBOL_ROWS) {
        const int64_t *of = &sizes->of[rows];
        if ((plan->symbols >> rows & 2U) == 0 || of[1] * of[2] == of[0]) continue;
        return TE_FAIL(TE_ERROR_INVALID, "leading dims %lld x %lld, expected the %lld rows",
                       (long long)of[1], (long long)of[2], (long long)of[0]);
    }
    return TE_OK;
}

te_status te_plan_layout(const te_plan *plan, te_device device, const te_sizes *sizes,
                         int consumes_saved, const te_layout **layout, te_layout **own)
{
    _Atomic(te_layout *) *head = (_Atomic(te_layout *) *)&plan->layouts;
    te_layout *first = atomic_load_explicit(head, memory_order_acquire);
    size_t buffers = (size_t)plan->buffer_count + 1;
    te_layout *made;
    te_status st;
    int count = 0;
    *own = NULL;
    for (te_layout *known = first; known != NULL; known = known->next, count++) {
        if (known->device.type == device.type && known->device.index == device.index &&
            known->consumes_saved == consumes_saved &&
            memcmp(&known->sizes, sizes, sizeof *sizes) == 0) {
            *layout = known;
            return TE_OK;
        }
    }
    TE_TRY(check_sizes(plan, sizes));
    TE_FAIL_IF(consumes_saved && plan->direction == TE_DIRECTION_FORWARD, TE_ERROR_INVALID,
               "plan: a forward consumes nothing that was saved");
    made = calloc(1, sizeof *made + buffers * (sizeof made->tensors[0] + 1));
    TE_FAIL_IF(made == NULL, TE_ERROR_MEMORY, "no memory for a layout");
    made->in_saved = (unsigned char *)&made->tensors[buffers];
    made->device = device;
    made->sizes = *sizes;
    made->consumes_saved = consumes_saved;
    st = fill(plan, made);
    if (st != TE_OK) {
        free(made);
        return st;
    }
    made->next = first;
    *layout = made;
    if (count >= KEPT || !atomic_compare_exchange_strong(head, &first, made)) *own = made;
    return TE_OK;
}

te_status te_plan_infer(const te_plan *plan, const te_sizes *given, te_plan_sizes *sizes,
                        int64_t *offsets)
{
    const te_layout *layout = NULL;
    te_layout *own = NULL;
    te_device device = {TE_DEVICE_CPU, 0};
    TE_TRY(te_plan_check(plan));
    TE_TRY(te_plan_layout(plan, device, given, 0, &layout, &own));
    sizes->size = sizeof *sizes;
    sizes->saved_bytes = layout->saved_bytes;
    sizes->scratch_bytes = layout->scratch_bytes;
    for (int32_t i = 0; offsets != NULL && i < plan->buffer_count; i++) {
        offsets[i] = te_is_packed(plan->buffers[i].info.role) ? offset_of(&layout->tensors[i]) : -1;
    }
    free(own);
    return TE_OK;
}
