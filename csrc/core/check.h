/* SPDX-License-Identifier: Apache-2.0
 *
 * check.h - argument checks of the operators, done once for every backend before a slot is called.
 *
 * A backend may rely on what these let through: sizes agree, dtypes are legal for the operator, all
 * tensors live on the context's device, strides are as documented, data is there where there are
 * elements. A backend's `supports` only says what of that it has not got.
 */
#ifndef TE_CORE_CHECK_H
#define TE_CORE_CHECK_H

#include "transformer_engine.h"

/* Checks the args struct of an operator (args->size included). */
te_status te_check_args(te_op op, te_device device, const void *args);

#endif
