/* SPDX-License-Identifier: Apache-2.0
 *
 * frame.h - one custom call as XLA hands it over: its stage, its attributes and its buffers.
 */
#ifndef TE_XLA_FRAME_H
#define TE_XLA_FRAME_H

#include "transformer_engine.h"

#include "xla/handlers.h"

/* An EXECUTE. */
typedef struct te_xla_call {
    const te_xla_frame *frame;
    te_device device;
    te_context *context;
    void *stream;
} te_xla_call;

/* What a kind of custom call does at its two stages. */
typedef struct te_xla_kind {
    te_status (*check)(const te_xla_attributes *attributes);
    te_status (*run)(const te_xla_call *call);
} te_xla_kind;

/* The whole of a handler: metadata, stages, device, stream; NULL or an error of XLA with
 * te_last_error's text. */
te_xla_error *te_xla_handle(te_xla_frame *frame, te_device_type type, const te_xla_kind *kind);

/* ---- attributes ---- */

/* The value of an attribute; NULL where there is none of this name and type. */
const void *te_xla_find(const te_xla_attributes *attributes, const char *name,
                        te_xla_attribute type);
/* A number of any type; INVALID where there is none. */
te_status te_xla_number(const te_xla_attributes *attributes, const char *name, double *value);
te_status te_xla_integer(const te_xla_attributes *attributes, const char *name, int64_t *value);

/* ---- buffers ---- */

/* The next one of the arguments, or of the results. */
typedef struct te_xla_cursor {
    const te_xla_call *call;
    const te_xla_buffers *of;
    const char *what; /* "argument", "result" */
    int64_t at;
} te_xla_cursor;

te_xla_cursor te_xla_arguments(const te_xla_call *call);
te_xla_cursor te_xla_results(const te_xla_call *call);
/* INVALID unless all of them have been taken. */
te_status te_xla_no_more(const te_xla_cursor *cursor);
/* A dense view of the next one, for what is called `name` in messages. With ndim above 0 it has
 * so many dims: the first ones become one, or there is one of size 1 before the others. Pairs of
 * u32, low one first, are i64, which JAX does not have unless it is asked for. *buffer, where not
 * NULL, is the buffer itself. */
te_status te_xla_take(te_xla_cursor *cursor, const char *name, int32_t ndim, te_tensor *view,
                      const te_xla_buffer **buffer);
/* The next result is the memory of an argument that the call changes, whose view it becomes. */
te_status te_xla_take_updated(te_xla_cursor *cursor, const char *name, te_tensor *view);
/* The next result is bytes that the call may use as it likes, from an aligned address on. */
te_status te_xla_take_scratch(te_xla_cursor *cursor, void **scratch, size_t *size);

#endif
