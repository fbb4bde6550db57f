/* SPDX-License-Identifier: Apache-2.0
 *
 * update.h - what backends share of te_update.
 */
#ifndef TE_CORE_UPDATE_H
#define TE_CORE_UPDATE_H

#include "core/update_math.h"
#include "transformer_engine.h"

/* The numbers of a call but for those on the device. */
te_update_numbers te_update_numbers_of(const te_update_args *args);

#endif
