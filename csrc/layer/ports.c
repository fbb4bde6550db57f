/* SPDX-License-Identifier: Apache-2.0
 *
 * ports.c - what every front end has to know of a plan to hand its tensors over, so that it does
 * nothing but marshal: which buffers a call gives, which it makes, and which sizes the shapes of
 * the given ones say.
 */
#include "core/status.h"
#include "layer/plan.h"

void te_plan_count_ports(te_plan_info *info)
{
    for (int s = 0; s < TE_SEQUENCES; s++) info->sized_by[s] = -1;
    for (int32_t i = 0; i < info->stage_count; i++) info->external |= info->stages[i].external;
    for (int32_t i = 0; i < info->buffer_count; i++) {
        const te_buffer_info *buffer = &info->buffers[i];
        const int sequence = te_sequence_of(buffer);
        info->has_saved |= buffer->role == TE_ROLE_SAVED;
        info->output_count += buffer->role == TE_ROLE_OUTPUT;
        info->argument_count += buffer->role <= TE_ROLE_STATE;
        if (buffer->role == TE_ROLE_INPUT && buffer->leading && info->sized_by[sequence] < 0) {
            info->sized_by[sequence] = i;
        }
    }
}

/* Sizes of a sequence, from the leading dims of its first input. */
static te_status take_leading(const te_plan_info *info, const te_tensor *arguments, int sequence,
                              te_leading *leading, te_sizes *sizes)
{
    const int32_t input = info->sized_by[sequence];
    const int rows = sequence == 0 ? TE_SYMBOL_ROWS : TE_SYMBOL_SOURCE_ROWS;
    const te_buffer_info *buffer;
    const te_tensor *view;
    int64_t ranks;
    if (input < 0) return TE_OK;
    buffer = &info->buffers[input];
    view = &arguments[input];
    sizes->of[rows] = view->shape[0] * (view->ndim == 4 ? view->shape[1] : 1);
    ranks = buffer->shape[0].multiply; /* whose rows lie behind each other */
    if (ranks > 1) {
        const int64_t first = leading->count == 0 ? 1 : leading->dims[0];
        TE_FAIL_IF(first % ranks != 0, TE_ERROR_INVALID,
                   "plan: %s: the first dim has size %lld, expected a multiple of %lld",
                   buffer->name, (long long)first, (long long)ranks);
        leading->dims[0] /= ranks;
        sizes->of[rows] /= ranks;
    }
    if ((info->symbols >> (rows + 1) & 3U) == 0) return TE_OK;
    TE_FAIL_IF(leading->count != 2, TE_ERROR_INVALID, "plan: %s: %d dims, expected 3", buffer->name,
               (int)leading->count + 1);
    for (int i = 0; i < 2; i++) sizes->of[rows + 1 + i] = leading->dims[i];
    return TE_OK;
}

/* Sizes of packed sequences, from the first input of whose shape each is a dim. */
static void take_packed(const te_plan_info *info, const te_tensor *arguments, te_sizes *sizes)
{
    uint32_t wanted = info->symbols >> TE_SYMBOL_SEQUENCES;
    for (int32_t i = 0; wanted != 0 && i < info->argument_count; i++) {
        const te_buffer_info *buffer = &info->buffers[i];
        for (int32_t d = 0; d < buffer->ndim; d++) {
            const int32_t symbol = buffer->shape[d].symbol;
            const uint32_t bit =
                symbol < TE_SYMBOL_SEQUENCES ? 0 : 1U << symbol >> TE_SYMBOL_SEQUENCES;
            if ((wanted & bit) == 0 || arguments[i].ndim != buffer->ndim) continue;
            sizes->of[symbol] = arguments[i].shape[d] - buffer->shape[d].add;
            wanted &= ~bit;
        }
    }
}

te_status te_plan_take_sizes(const te_plan_info *info, const te_tensor *arguments,
                             te_leading leading[TE_SEQUENCES], te_sizes *sizes)
{
    for (int s = 0; s < TE_SEQUENCES; s++) {
        TE_TRY(take_leading(info, arguments, s, &leading[s], sizes));
    }
    take_packed(info, arguments, sizes);
    return TE_OK;
}
