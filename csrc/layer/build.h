/* SPDX-License-Identifier: Apache-2.0
 *
 * build.h - from a graph to a plan.
 *
 * Buffers are known by what they are (a te_link and its number), the same in every plan of a graph;
 * whether one is an argument, saved or scratch follows from that and from the direction. A node
 * speaks of buffers by link alone.
 *
 * A value, or a gradient, that a casting operator makes is *pending* until somebody reads it: who
 * needs it in FP8 lets the operator cast in the same pass, who needs it in high precision lets it
 * write. A value's FP8 forms always come from its operator, so that a backward has the bits of the
 * forward whatever else it reads. One that is ROUNDED is written at once: its forms come from that.
 * What a backward reads of its forward is found out by building the backward: what is not given is
 * saved.
 */
#ifndef TE_LAYER_BUILD_H
#define TE_LAYER_BUILD_H

#include "layer/plan.h"

/* A set of links. */
typedef struct te_links {
    struct te_link_of {
        te_link link;
        int32_t of;
    } * items;
    int32_t count, capacity;
} te_links;

int te_links_has(const te_links *links, te_link link, int32_t of);

enum { TE_NOBODY = -1 };

/* What a builder knows of a value. */
typedef struct te_value_state {
    int32_t producer;   /* node; TE_NOBODY: an argument */
    int32_t readers;    /* nodes that read it */
    int32_t needs_grad; /* something that it is made of needs a gradient */
    int32_t pending;    /* node that will make it, when a reader says in which form; or TE_NOBODY */
    int32_t again;      /* the pending node repeats its forward, in a backward */
    int32_t grad_pending; /* as `pending`, of its gradient: the node that reads the value */
    int32_t grads;        /* contributions to the gradient */
    int32_t grad_alias; /* buffer that holds the first one (or the sum), where it is not its own */
} te_value_state;

typedef struct te_node_rules te_node_rules;

typedef struct te_build {
    te_plan plan;
    const te_graph_desc *graph;
    te_direction direction;
    const te_node_rules *const *rules; /* by te_node_kind */
    te_value_state *values;
    te_links saved;    /* what backward and deferred plan read of the forward */
    te_links deferred; /* what the deferred plan reads of the backward */
} te_build;

/* One kind of node: how it is built. Functions that make a stage add it with the inputs of the
 * operator alone; what it writes is the caller's to add. */
struct te_node_rules {
    const char *name; /* of the stage that runs it alone */
    /* Entries of a node's lists that it reads; the slices are of the first inputs. `many`: it may
     * have more inputs. */
    int inputs, numbers, slices, many;
    uint32_t flags; /* that it knows */
    int steps;      /* its steps that a caller may run, from 0 on */
    int outside;    /* these are all the caller's, whatever is said to be external */
    int casts;      /* it has a recipe */
    te_status (*check)(const te_graph_desc *graph, int32_t node);
    void (*forward)(te_build *build, int32_t node);
    void (*backward)(te_build *build, int32_t node);
    void (*deferred)(te_build *build, int32_t node); /* NULL: nothing of it is put off */
    /* Repeats the forward in a backward, with the scales and statistics of then; NULL: it can not.
     */
    void (*again)(te_build *build, int32_t node);
    /* Of a pending value, and of a pending gradient; `again`: statistics are read. */
    te_stage *(*produce)(te_build *build, int32_t node, const char *prefix, const char *name,
                         int again);
    te_stage *(*produce_grad)(te_build *build, int32_t node, const char *prefix, const char *name);
};

/* ---- checks (graph_check.c) ---- */

/* By te_node_kind. */
extern const te_node_rules *const te_rules[TE_NODE_KINDS];
/* The sizes of a graph and of its lists, and the direction. */
te_status te_check_head(const te_graph_desc *graph, te_direction direction);
/* Values, nodes and their order, of a graph whose head was checked; fills what is known of each
 * value. */
te_status te_check_graph(const te_graph_desc *graph, te_value_state *values);

/* ---- what the checks of nodes share (value.c) ---- */

/* A parameter [rows, columns], or of `columns` elements where rows is 0; or none. */
te_status te_check_parameter(const te_graph_desc *graph, int32_t value, const char *what,
                             int64_t rows, int64_t columns);
/* Input 0 and output are matrices, the output with the rows of so many ranks; with ANY a multiple
 * or part of those of the input. */
enum { TE_ANY_RANKS = 0 };
te_status te_check_rows(const te_graph_desc *graph, int32_t node, const char *what, int64_t ranks);
/* Of a linear node (linear_check.c). */
te_status te_check_linear(const te_graph_desc *graph, int32_t node);
/* Dtypes, numbers and slots of a node that has a recipe. */
te_status te_check_quantization(const te_node_desc *node, const char *what);

/* Input i of a node is a matrix of rows of a sequence, whose slice i lies inside; for attention
 * also a value of heads, which the slice is all of. */
te_status te_check_slice(const te_graph_desc *graph, int32_t node, int i);
/* The output is the dense matrix of so many heads, with the rows and the dtype of input 0. */
te_status te_check_output(const te_graph_desc *graph, int32_t node, const char *what, int32_t heads,
                          int32_t channels);
/* Input 0 is one, and the output the dense matrix of its heads. */
te_status te_check_heads(const te_graph_desc *graph, int32_t node, const char *what);
/* Whether a value is a random pair (seed, offset), i64 [2], where one is wanted, and else none. */
int te_pair_fits(const te_graph_desc *graph, int32_t value, int wanted);
/* The same of input i of a node. */
te_status te_check_pair(const te_graph_desc *graph, int32_t node, int i, int wanted);

extern const te_node_rules te_linear_rules, te_norm_rules, te_activation_rules, te_softcap_rules,
    te_attention_rules, te_rope_rules, te_dropout_add_rules, te_head_norm_rules, te_function_rules,
    te_convert_rules, te_collective_rules;

static inline const te_node_desc *te_node(const te_build *build, int32_t node)
{
    return &build->graph->nodes[node];
}
static inline const te_value_desc *te_value(const te_build *build, int32_t value)
{
    return &build->graph->values[value];
}
static inline const te_node_rules *te_rules_of(const te_build *build, int32_t node)
{
    return build->rules[te_node(build, node)->kind];
}
static inline int te_has_step(const int32_t *steps, int32_t count, int32_t step)
{
    for (int32_t i = 0; i < count; i++) {
        if (steps[i] == step) return 1;
    }
    return 0;
}
/* Whether the caller runs a step of the node; in two halves. */
static inline int te_is_external(const te_node_desc *node, int32_t step)
{
    return te_has_step(node->external, node->external_count, step);
}
static inline int te_is_halved(const te_node_desc *node, int32_t step)
{
    return te_has_step(node->halves, node->halves_count, step);
}
/* Number of a quantized operand, for te_link. */
static inline int32_t te_operand_of(int32_t node, te_operand_role role)
{
    return node * TE_OPERAND_ROLES + (int32_t)role;
}

/* Whether a value is one of heads: [rows, heads, channels] or [dim 0, dim 1, heads, channels]. */
static inline int te_is_of_heads(const te_value_desc *value)
{
    return (value->flags & TE_VALUE_LEADING) != 0 && value->ndim > 2;
}
/* Whether two numbers of rows are the same. */
static inline int te_is_alike(const te_extent *a, const te_extent *b)
{
    return a->symbol == b->symbol && a->align == b->align && a->multiply == b->multiply &&
           a->add == b->add;
}
/* The symbol of the rows of a matrix or of heads. */
static inline int32_t te_rows_symbol(const te_value_desc *value)
{
    return value->shape[0].symbol - (te_is_of_heads(value) && value->ndim == 4);
}

/* Whether what a plan is given of the operand are its quantized forms; whether it returns them. */
int te_operand_arrives(const te_build *build, int32_t of);
int te_operand_is_kept(const te_build *build, int32_t of);

/* Whether its column-wise form is made of the row-wise one, which alone arrives. */
int te_operand_is_transposed(const te_build *build, int32_t of);

/* ---- buffers ---- */

/* What a buffer is; nothing where the making of the plan has failed. */
static inline const te_buffer *te_buffer_of(const te_build *build, int32_t number)
{
    static const te_buffer none;
    return build->plan.status == TE_OK ? &build->plan.buffers[number] : &none;
}
/* The buffer, or TE_NO_BUFFER where the plan has none yet. */
int32_t te_find(const te_build *build, te_link link, int32_t of);
/* The buffer, added where it is not there. */
int32_t te_get(te_build *build, te_link link, int32_t of);
/* The same of what the forward makes; in a later plan it is saved where it is not given. */
int32_t te_need(te_build *build, te_link link, int32_t of);

/* The same of what the backward has made for the deferred plan, which is being built. */
int32_t te_defer(te_build *build, te_link link, int32_t of);

/* Heads of a matrix of rows as [batch, sequence, heads, channels], `node` says in which order of
 * memory. Heads that lie side by side are one. Of packed sequences with a batch of 1 for attention,
 * and without one for others. A buffer of heads is read as it is, in that order. */
int32_t te_heads_of(te_build *build, int32_t node, int32_t matrix, const te_slice *slice);
/* Part of a buffer; `view` has shape, base, offset and strides. The name is printed. */
__attribute__((format(printf, 3, 4))) int32_t te_view(te_build *build, const te_buffer_info *view,
                                                      const char *format, ...);
/* Rows of `count` ranks from one on, of a matrix of the rows of so many ranks. */
int32_t te_rows_of_ranks(te_build *build, int32_t matrix, int32_t ranks, int32_t from,
                         int32_t count);
/* A dense matrix of heads as one of their rows. */
int32_t te_rows_of_heads(te_build *build, int32_t matrix, const te_slice *slice, const char *name);
/* Heads that lie side by side, and how often; in all they have as many elements of a row. */
static inline int64_t te_slice_together(const te_slice *slice)
{
    return slice->together > 1 ? slice->together : 1;
}
static inline int64_t te_slice_blocks(const te_slice *slice)
{
    return slice->heads / te_slice_together(slice);
}
static inline int64_t te_slice_width(const te_slice *slice)
{
    return te_slice_together(slice) * slice->channels;
}

/* ---- values ---- */

static inline int te_is_rounded(const te_build *build, int32_t value)
{
    return (te_value(build, value)->flags & TE_VALUE_ROUNDED) != 0;
}
/* Whether no operator of who reads a value is joined with that of who makes it: its gradient has
 * more than one contribution, or it is rounded. */
static inline int te_value_is_shared(const te_build *build, int32_t value)
{
    return build->values[value].readers > 1 || te_is_rounded(build, value) ||
           (te_value(build, value)->flags & TE_VALUE_RESULT) != 0;
}
/* Does a node read the value in FP8, or one in high precision? */
int te_is_read(const te_build *build, int32_t value, int quantized);
/* It in high precision: given, made already, made now by whoever it is pending at, in a backward
 * saved or repeated. */
int32_t te_wide(te_build *build, int32_t value, const char *prefix, const char *name);
/* Lets its operator write a value that is pending. */
void te_write_pending(te_build *build, int32_t value);
/* In a backward: leaves the value pending at its node, or there. */
void te_make_again(te_build *build, int32_t value);

/* ---- gradients ---- */

/* Whether somebody has a gradient for the value. */
int te_has_grad(const te_build *build, int32_t value);
/* Where the next contribution to the gradient of a value goes. */
int32_t te_grad_target(te_build *build, int32_t value);
/* Makes a gradient that is there a contribution to that of another value, without a copy where it
 * is the first one. */
void te_grad_pass(te_build *build, int32_t value, int32_t grad);
/* The matrix where the gradients of its slices go: its one contribution. */
int32_t te_grad_matrix(te_build *build, int32_t value);
/* Where the gradient of a slice of a matrix goes: heads of that. */
int32_t te_grad_heads(te_build *build, int32_t node, int32_t value, const te_slice *slice);
/* Whether the buffer holds the gradient of this value alone. */
int te_grad_is_own(const te_build *build, int32_t value, int32_t buffer);
/* Up to two contributions, the others added as they came; the second may be TE_NO_BUFFER. */
void te_grad_pair(te_build *build, int32_t value, int32_t pair[2]);
/* The whole gradient in high precision. */
int32_t te_grad(te_build *build, int32_t value);
/* Where a node writes the whole gradient of a value: its own contribution, added to what is in
 * `*other`, what there is so far. With TE_NO_BUFFER there it writes its own, as to te_grad_target.
 */
int32_t te_grad_joined(te_build *build, int32_t value, int32_t *other);
/* Where a deferred plan finds it. */
te_link te_grad_link(const te_build *build, int32_t value);
/* Output or state for the gradient of a parameter; TE_NO_BUFFER where none is wanted now. */
int32_t te_parameter_grad(te_build *build, int32_t value);

/* ---- stages ---- */

te_stage *te_add(te_build *build, int32_t node, const char *prefix, const char *name, te_op op);
/* A stage of a node whose steps are all the caller's; it hands buffers over by itself. */
te_stage *te_add_outside(te_build *build, int32_t node, const char *prefix, const char *name,
                         int32_t step);
/* Lets a buffer fill the field of this name. */
void te_use_as(te_build *build, te_stage *stage, const char *field, int32_t buffer);
/* Lets a buffer fill the field, where there is the value; as te_get and te_need. */
void te_use_value(te_build *build, te_stage *stage, const char *field, int32_t value);
/* Lets a slot of a chunk of the scaling state fill the field; `chunk` as in te_cast_to. */
void te_use_slot(te_build *build, te_stage *stage, const char *field, int32_t buffer, int32_t chunk,
                 int32_t slot);
/* Gives a number the value of a te_symbol. */
void te_use_size(te_build *build, te_stage *stage, const char *field, int32_t symbol);
/* output = input, in its own dtype: a stage of the node. */
void te_convert(te_build *build, int32_t node, const char *name, int32_t input, int32_t output);
/* output = residual + input; TE_NO_BUFFER: a copy. */
void te_sum(te_build *build, int32_t input, int32_t residual, int32_t output);
/* Sets a number, kind or flag. */
void te_set_number(te_build *build, te_stage *stage, const char *field, double value);

/* Buffers that a casting stage is asked for, by the fields that they fill: X(name). */
#define TE_CAST_BUFFERS(X)                                                                         \
    X(wide)                                                                                        \
    X(bias_grad)                                                                                   \
    X(amax_partials)                                                                               \
    X(row)                                                                                         \
    X(column)                                                                                      \
    X(row_scales)                                                                                  \
    X(column_scales)                                                                               \
    X(partials)                                                                                    \
    X(row_amax)                                                                                    \
    X(column_amax)                                                                                 \
    X(column_partials)                                                                             \
    X(rng)

/* What a casting stage is asked for; TE_NO_BUFFER where it is not wanted. */
typedef struct te_cast_to {
#define X(name) int32_t name;
    TE_CAST_BUFFERS(X)
#undef X
    int32_t scale, history; /* where the scale comes from, but for partials: a chunk */
    int32_t given;          /* or the scales of an earlier cast */
    int32_t chunk, slot;
    int32_t square;
    float amax_epsilon;
    uint32_t options; /* TE_CAST_* */
    int32_t margin;
    te_scaling_mode mode;
} te_cast_to;

te_cast_to te_cast_nothing(void);
void te_ask_cast(te_build *build, te_stage *stage, const te_cast_to *cast);

#endif
