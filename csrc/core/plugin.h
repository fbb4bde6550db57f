/* SPDX-License-Identifier: Apache-2.0
 *
 * plugin.h - an operator of a plug-in as a slot of ours: what stands between a caller and code that
 * was built apart.
 */
#ifndef TE_CORE_PLUGIN_H
#define TE_CORE_PLUGIN_H

#include <stdatomic.h>

#include "transformer_engine_plugin.h"

typedef struct te_plugin_record {
    te_plugin_slot slot; /* what hosts see; first, so that te_plugin_slot_calls finds the rest */
    te_plugin_operator given;
    _Atomic int64_t calls;
} te_plugin_record;

/* The number of an operator; -1 where there is none of that name. */
int32_t te_op_find(const char *name);

/* Makes the slot of an operator, whose size is this library's; backend and vendor are the caller's
 * and live as long. */
te_status te_plugin_record_make(const te_plugin_backend *backend, const te_plugin_operator *given,
                                te_plugin_record *record);

#endif
