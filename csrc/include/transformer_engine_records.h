/* SPDX-License-Identifier: Apache-2.0
 *
 * transformer_engine_records.h - public C API: the members of the structs that graphs consist of,
 * and of those that describe plans, for whoever fills or reads one by names: a binding of another
 * language, the text form of graphs.
 *
 * Part of transformer_engine.h, which has the types of everything here.
 */
#ifndef TRANSFORMER_ENGINE_RECORDS_H
#define TRANSFORMER_ENGINE_RECORDS_H

#ifndef TRANSFORMER_ENGINE_H
#error "include transformer_engine.h, which includes this file"
#endif

/* X(ENUM, name) */
#define TE_RECORDS(X)                                                                              \
    X(EXTENT, Extent)                                                                              \
    X(VALUE, Value)                                                                                \
    X(OPERAND_CAST, OperandCast)                                                                   \
    X(QUANTIZATION, Quantization)                                                                  \
    X(SLICE, Slice)                                                                                \
    X(NODE, Node)                                                                                  \
    X(GRAPH, Graph)                                                                                \
    X(BUFFER, Buffer)                                                                              \
    X(STAGE, Stage)                                                                                \
    X(PLAN, PlanDescription)

typedef enum te_record_number {
#define X(NAME, name) TE_RECORD_##NAME,
    TE_RECORDS(X)
#undef X
        TE_RECORD_COUNT
} te_record_number;

typedef enum te_member_kind {
    TE_MEMBER_NAME, /* char [TE_NAME_BYTES] */
    TE_MEMBER_TEXT, /* const char *, of what is described */
    TE_MEMBER_INT32,
    TE_MEMBER_BITS, /* uint32_t */
    TE_MEMBER_ENUM, /* an enum */
    TE_MEMBER_INT64,
    TE_MEMBER_FLOAT,
    TE_MEMBER_DOUBLE,
    TE_MEMBER_RECORD
} te_member_kind;

/* Where the items of a member lie. */
typedef enum te_member_form {
    TE_MEMBER_ONE,   /* one, in the struct */
    TE_MEMBER_ARRAY, /* in the struct */
    TE_MEMBER_LIST   /* behind a pointer, which may be NULL where there are none */
} te_member_form;

typedef struct te_record te_record;

typedef struct te_member {
    const char *name;
    size_t offset, size; /* in the struct, of an item */
    te_member_kind kind;
    te_member_form form;
    int32_t most;             /* items, of an array or list */
    int64_t count_at;         /* offset of their int32_t number; -1: `most` */
    const te_record *record;  /* of a RECORD */
    const char *const *names; /* of an ENUM: of its values; NULL: it goes by number */
    double initial;           /* of a number that is not given */
} te_member;

struct te_record {
    const char *name;
    size_t size; /* of the struct */
    const te_member *members;
    int32_t member_count; /* at most 32 */
};

/* NULL for a number that does not exist. */
TE_API const te_record *te_record_describe(te_record_number number);
/* Fills a struct as if nothing was given. */
TE_API void te_record_initial(const te_record *record, void *memory);
/* How many items a member has; INVALID where their number is out of range, or a list NULL. */
TE_API te_status te_member_count(const te_member *member, const void *memory, int32_t *count);
/* The first of them; NULL where there are none. */
TE_API void *te_member_items(const te_member *member, const void *memory);
/* Lets a member have so many items, those that are new as te_record_initial has them. */
TE_API te_status te_member_resize(const te_member *member, void *memory, int32_t count);
/* Frees all lists that te_member_resize has made of a struct, and of those in it. */
TE_API void te_record_release(const te_record *record, void *memory);

/* ---- graphs as text ------------------------------------------------------------------------- */

/* A graph and a direction, for whoever makes that plan in another process, or without the program
 * that made the graph. One line of ASCII: "plan/7 forward {values=[{name="input" flags=25
 * shape=[{symbol=1 multiply=1} {add=24}]} ...] nodes=[...]}". Members go by name, and those with
 * their initial values are left out; strings have the escapes \" \\ \xNN; numbers are read to the
 * bits that were written. Equal graphs have equal texts.
 *
 * Writes at most `size` bytes, the last one 0; *length is that of the whole text without it. */
TE_API te_status te_graph_write(const te_graph_desc *graph, te_direction direction, char *buffer,
                                size_t size, size_t *length);
/* Fills a graph, which the caller releases when all is well. INVALID for a text of another version
 * of this library, or one that is damaged; whether there is a plan is te_plan_make's to say. */
TE_API te_status te_graph_read(const char *text, te_graph_desc *graph, te_direction *direction);
TE_API void te_graph_release(te_graph_desc *graph);

#endif
