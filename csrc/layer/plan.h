/* SPDX-License-Identifier: Apache-2.0
 *
 * plan.h - a plan as it is kept: buffers, stages and what was worked out of them once.
 */
#ifndef TE_LAYER_PLAN_H
#define TE_LAYER_PLAN_H

#include "transformer_engine.h"

#define TE_NO_BUFFER (-1)
#define TE_NO_FIELD (-1)
/* Members of a packed buffer begin at multiples of this: enough for every vector access and
 * cuBLASLt. */
#define TE_MEMBER_ALIGN 256

/* A field of a stage's args struct that a buffer fills. A pointer field gets the address of element
 * `element`; of a chunk of slots, of that many behind the owner's first slot. Without a buffer a
 * number gets the value of symbol `element`, at least 1. */
typedef struct te_use {
    int32_t field;  /* te_at_<op>_<name>; TE_NO_FIELD where the caller alone runs the stage */
    int32_t buffer; /* or TE_NO_BUFFER */
    int32_t written;
    int32_t element;
    int32_t chunk; /* 0: no chunk; else 1 + which of te_plan_call.slots */
} te_use;

typedef struct te_stage {
    char name[3 * TE_NAME_BYTES];
    te_op op;
    int32_t external; /* the caller runs it */
    int32_t node, step;
    int32_t halved; /* it is run in two halves */
    int32_t half;   /* the other one, as of te_stage_info */
    int32_t use_count, use_capacity;
    te_use *uses;
    void *args; /* what no buffer fills: an args struct of the operator */
} te_stage;

typedef struct te_buffer {
    char name[2 * TE_NAME_BYTES];
    te_buffer_info info;
    int32_t first_use, last_use; /* stages between which a scratch buffer is alive */
    int32_t joins;               /* those of all ranks are put together: no extent is rounded up */
} te_buffer;

/* Shapes and offsets of a plan's buffers for given sizes. */
typedef struct te_layout {
    struct te_layout *next;
    te_device device;
    te_sizes sizes;
    int32_t consumes_saved;
    int64_t saved_bytes, scratch_bytes;
    unsigned char *in_saved; /* of each buffer: it lies in the packed saved buffer */
    te_tensor tensors[];     /* of packed buffers and views, `data` is the offset in bytes */
} te_layout;

struct te_plan {
    _Atomic(te_plan *) next; /* bucket of the intern table */
    _Atomic int64_t holders; /* 0: it is being freed */
    int64_t id;
    te_direction direction;
    int32_t quantized;
    int32_t buffer_count, buffer_capacity, stage_count, stage_capacity;
    te_buffer *buffers;
    te_stage *stages;
    te_buffer_info *buffer_infos; /* for te_plan_describe */
    te_stage_info *stage_infos;
    te_extent saved_bytes[TE_SEQUENCES];
    int32_t owners;
    uint32_t symbols; /* 1 << te_symbol of those that it names */
    void *desc;       /* the text of its graph, to tell a hash collision */
    size_t desc_bytes;
    _Atomic(te_layout *) layouts; /* of the first sizes that were met */
    te_status status;             /* of the first step of its making that failed */
};

te_extent te_constant(int64_t value);
te_extent te_multiple(int32_t symbol, int64_t multiply);

/* ---- making (plan.c) ---- */

/* An array with space for one more element; NULL, and the plan's status, where there is none. */
void *te_plan_grow(te_plan *plan, void *array, int32_t count, int32_t *capacity, size_t size);
/* Adds a buffer and returns its number. Failures of memory are remembered in plan->status. */
int32_t te_plan_add_buffer(te_plan *plan, const te_buffer_info *info);
/* Adds a stage named prefix + name; valid until the next one is added. */
te_stage *te_plan_add_stage(te_plan *plan, const char *prefix, const char *name, te_op op);
/* Hands a buffer to a stage that the caller alone runs, which reads or writes it. */
void te_stage_hand(te_plan *plan, te_stage *stage, int32_t buffer, int written);
/* Lets a buffer fill a field, from an element on; TE_NO_BUFFER: a size, see te_use. */
void te_stage_use_at(te_plan *plan, te_stage *stage, int field, int32_t buffer, int32_t element,
                     int32_t chunk);
/* The buffer whose memory a use reads or writes; TE_NO_BUFFER: none. */
int32_t te_plan_memory_of(const te_plan *plan, const te_use *use);
/* Releases what the plan owns, and not the plan. */
void te_plan_clear(te_plan *plan);
/* Puts the buffers into the order of a call's arguments, finds lifetimes and sizes. */
te_status te_plan_finish(te_plan *plan);

/* ---- the intern table (intern.c) ---- */

/* The plan of a description, held for the caller; NULL where nobody holds one. */
te_status te_plan_find_desc(const void *desc, size_t bytes, te_plan **plan);
/* Takes what was built over, under its description, and holds it for the caller; clears it where
 * another thread was first, whose plan it is then. */
te_status te_plan_intern(te_plan *built, const void *desc, size_t bytes, te_plan **plan);
/* INVALID where it is NULL. */
te_status te_plan_check(const te_plan *plan);

/* ---- layout.c ---- */

/* The layout for given sizes: one that is kept with the plan, or a new one, in *own too, which the
 * caller frees. consumes_saved: as of te_plan_call. */
te_status te_plan_layout(const te_plan *plan, te_device device, const te_sizes *sizes,
                         int consumes_saved, const te_layout **layout, te_layout **own);

/* ---- ports.c ---- */

/* Works out what te_plan_info says of a call from its buffers and stages. */
void te_plan_count_ports(te_plan_info *info);

static inline int te_is_packed(te_buffer_role role)
{
    return role == TE_ROLE_SAVED || role == TE_ROLE_SCRATCH;
}

#endif
