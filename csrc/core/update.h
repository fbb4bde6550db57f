/* SPDX-License-Identifier: Apache-2.0
 *
 * update.h - what backends share of te_update, and what is checked of any list of tensors.
 */
#ifndef TE_CORE_UPDATE_H
#define TE_CORE_UPDATE_H

#include "core/update_math.h"
#include "transformer_engine.h"

/* The numbers of a call but for those on the device. */
te_update_numbers te_update_numbers_of(const te_update_args *args);

/* Checks number `i` of a list, `name` ("update: grad") in texts: dense, on the device, and with
 * memory where it has elements. The dtype is the caller's to check. */
te_status te_check_listed(const char *name, int64_t i, const te_tensor *tensor, te_device device);

#endif
