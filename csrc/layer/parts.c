/* SPDX-License-Identifier: Apache-2.0
 *
 * parts.c - runs of some stages of a plan: what each is given and makes.
 */
#include <string.h>

#include "core/status.h"
#include "layer/plan.h"

/* How stages use a buffer: before a run of some of them, in it, and behind it. */
enum { USED_BEFORE = 1, USED = 2, WRITTEN = 4, USED_BEHIND = 8 };

static void note_uses(const te_plan *plan, int32_t first, int32_t end, unsigned char *found)
{
    for (int32_t s = 0; s < plan->stage_count; s++) {
        const te_stage *stage = &plan->stages[s];
        for (int32_t u = 0; u < stage->use_count; u++) {
            const int32_t at = te_plan_memory_of(plan, &stage->uses[u]);
            if (at == TE_NO_BUFFER) continue;
            found[at] |= s < first ? USED_BEFORE : s >= end ? USED_BEHIND : USED;
            if (s >= first && s < end && stage->uses[u].written) found[at] |= WRITTEN;
        }
    }
}

te_status te_plan_ports(const te_plan *plan, int32_t first, int32_t end, unsigned char *ports)
{
    TE_TRY(te_plan_check(plan));
    TE_FAIL_IF(first < 0 || end < first || end > plan->stage_count, TE_ERROR_INVALID,
               "plan: stages %d to %d, of %d", (int)first, (int)end, (int)plan->stage_count);
    memset(ports, 0, (size_t)plan->buffer_count);
    note_uses(plan, first, end, ports);
    for (int32_t i = 0; i < plan->buffer_count; i++) {
        const te_buffer_role role = plan->buffers[i].info.role;
        const int saves = role == TE_ROLE_SAVED && plan->direction == TE_DIRECTION_FORWARD;
        const int argument = role <= TE_ROLE_STATE || (role == TE_ROLE_SAVED && !saves);
        const int result = role == TE_ROLE_OUTPUT || saves;
        const int whole = first == 0 && end == plan->stage_count;
        const int uses = ports[i];
        ports[i] = 0;
        if (role == TE_ROLE_VIEW) continue;
        if ((argument && whole) || ((uses & USED) && (argument || (uses & USED_BEFORE)))) {
            ports[i] |= TE_PORT_GIVEN;
        }
        if ((result && whole) ||
            ((uses & WRITTEN) && (result || role == TE_ROLE_STATE || (uses & USED_BEHIND)))) {
            ports[i] |= TE_PORT_MADE;
        }
    }
    return TE_OK;
}
