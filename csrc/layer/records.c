/* SPDX-License-Identifier: Apache-2.0
 *
 * records.c - the members of the structs of graphs and of descriptions of plans, as tables.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "transformer_engine.h"

/* ---- the tables --------------------------------------------------------------------------- */

/* The kind of a member is that of its items: a table can not say something else than the struct. */
#define KIND_OF(item)                                                                              \
    _Generic((item),                                                                               \
        char *: TE_MEMBER_NAME,                                                                    \
        const char *: TE_MEMBER_TEXT,                                                              \
        int32_t: TE_MEMBER_INT32,                                                                  \
        uint32_t: TE_MEMBER_BITS,                                                                  \
        int64_t: TE_MEMBER_INT64,                                                                  \
        float: TE_MEMBER_FLOAT,                                                                    \
        double: TE_MEMBER_DOUBLE,                                                                  \
        default: TE_MEMBER_RECORD)

#define AT(of, member) .name = #member, .offset = offsetof(of, member)
#define MEMBER(of, member) (((of *)0)->member)

/* One of them. */
#define FIELD(of, member, what, ...)                                                               \
    {                                                                                              \
        AT(of, member), .size = sizeof MEMBER(of, member), .kind = what, .most = 1,                \
                        .count_at = -1, __VA_ARGS__                                                \
    }
#define ONE(of, member, start) FIELD(of, member, KIND_OF(MEMBER(of, member)), .initial = start)
#define ENUM(of, member, list) FIELD(of, member, TE_MEMBER_ENUM, .names = list)
#define STRUCT(of, member, what) FIELD(of, member, TE_MEMBER_RECORD, .record = what)
/* Several of them. */
#define SEVERAL(of, member, where, many, number, what, start)                                      \
    {                                                                                              \
        AT(of, member), .size = sizeof MEMBER(of, member[0]),                                      \
                        .kind = KIND_OF(MEMBER(of, member[0])), .form = where, .most = many,       \
                        .count_at = number, .record = what, .initial = start                       \
    }
#define ARRAY(of, member, many, number, what, start)                                               \
    SEVERAL(of, member, TE_MEMBER_ARRAY, many, number, what, start)
#define LIST(of, member, many, number, what, start)                                                \
    SEVERAL(of, member, TE_MEMBER_LIST, many, offsetof(of, number), what, start)

enum { NEVER = INT32_MIN }; /* is no item of a list, so that none is left out */

#define RECORD(variable, text, of)                                                                 \
    static const te_record variable = {                                                            \
        .name = text,                                                                              \
        .size = sizeof(of),                                                                        \
        .members = variable##_members,                                                             \
        .member_count = (int32_t)(sizeof variable##_members / sizeof variable##_members[0])};      \
    _Static_assert(sizeof variable##_members / sizeof variable##_members[0] <= 32,                 \
                   "a reader remembers in 32 bits which it has seen")

/* What a table lacks would be no part of a graph's identity. */
#define COMPLETE(of, bytes)                                                                        \
    _Static_assert(sizeof(void *) != 8 || sizeof(of) == (bytes),                                   \
                   "a member was added: add it to the table too")

static const te_member extent_members[] = {
    ONE(te_extent, symbol, 0), ONE(te_extent, multiply, 0), ONE(te_extent, align, 1),
    ONE(te_extent, add, 0),    ONE(te_extent, divide, 0),
};
RECORD(extent, "Extent", te_extent);
COMPLETE(te_extent, 40);

static const te_member value_members[] = {
    ONE(te_value_desc, name, 0),
    ONE(te_value_desc, flags, 0),
    ONE(te_value_desc, dtype, 0),
    ONE(te_value_desc, grad_dtype, 0),
    ARRAY(te_value_desc, shape, TE_MAX_DIMS, offsetof(te_value_desc, ndim), &extent, 0),
};
RECORD(value, "Value", te_value_desc);
COMPLETE(te_value_desc, 200);

static const te_member cast_members[] = {
    ONE(te_operand_cast, recipe, 0),       ONE(te_operand_cast, dtype, 0),
    ONE(te_operand_cast, amax_epsilon, 0), ONE(te_operand_cast, options, 0),
    ONE(te_operand_cast, margin, 0),
};
RECORD(cast, "OperandCast", te_operand_cast);
COMPLETE(te_operand_cast, 20);

static const te_member quantization_members[] = {
    ARRAY(te_quantization, casts, TE_GEMM_OPERANDS, -1, &cast, 0),
    ONE(te_quantization, backward, 0),
};
RECORD(quantization, "Quantization", te_quantization);
COMPLETE(te_quantization, 64);

static const te_member slice_members[] = {
    ONE(te_slice, heads, 0),  ONE(te_slice, channels, 0), ONE(te_slice, offset, 0),
    ONE(te_slice, stride, 0), ONE(te_slice, together, 0),
};
RECORD(slice, "Slice", te_slice);
COMPLETE(te_slice, 32);

static const te_member node_members[] = {
    ONE(te_node_desc, name, 0),
    ONE(te_node_desc, kind, 0),
    ONE(te_node_desc, variant, 0),
    ONE(te_node_desc, flags, 0),
    LIST(te_node_desc, inputs, TE_GRAPH_VALUES, input_count, NULL, -1),
    ONE(te_node_desc, output, 0),
    LIST(te_node_desc, numbers, TE_GRAPH_VALUES, number_count, NULL, 0),
    LIST(te_node_desc, slices, TE_GRAPH_VALUES, slice_count, &slice, 0),
    STRUCT(te_node_desc, quantization, &quantization),
    ONE(te_node_desc, owner, 0),
    ARRAY(te_node_desc, slots, 2, -1, NULL, 0),
    ONE(te_node_desc, ranks, 1),
    ONE(te_node_desc, rank, 0),
    LIST(te_node_desc, external, TE_GRAPH_VALUES, external_count, NULL, NEVER),
    LIST(te_node_desc, halves, TE_GRAPH_VALUES, halves_count, NULL, NEVER),
};
RECORD(node, "Node", te_node_desc);
COMPLETE(te_node_desc, 184);

static const te_member graph_members[] = {
    ONE(te_graph_desc, flags, 0),
    LIST(te_graph_desc, values, TE_GRAPH_VALUES, value_count, &value, 0),
    LIST(te_graph_desc, nodes, TE_GRAPH_NODES, node_count, &node, 0),
};
RECORD(graph, "Graph", te_graph_desc);
COMPLETE(te_graph_desc, 40);

static const char *const roles[] = {
#define X(NAME, name) #name,
    TE_BUFFER_ROLES(X)
#undef X
};
static const char *const links[] = {
#define X(NAME, name, number) #name,
    TE_LINKS(X)
#undef X
};
static const char *const operators[] = {
#define X(NAME, name) #name,
    TE_OPS(X)
#undef X
};
static const char *const directions[] = {"forward", "backward", "deferred"};

static const te_member buffer_members[] = {
    ONE(te_buffer_info, name, 0),
    ENUM(te_buffer_info, role, roles),
    ENUM(te_buffer_info, link, links),
    ONE(te_buffer_info, of, 0),
    ENUM(te_buffer_info, dtype, NULL),
    ONE(te_buffer_info, written, 0),
    ONE(te_buffer_info, leading, 0),
    ARRAY(te_buffer_info, shape, TE_MAX_DIMS, offsetof(te_buffer_info, ndim), &extent, 0),
    ONE(te_buffer_info, base, 0),
    ENUM(te_buffer_info, view, NULL),
    STRUCT(te_buffer_info, offset, &extent),
    ARRAY(te_buffer_info, strides, TE_MAX_DIMS, offsetof(te_buffer_info, ndim), &extent, 0),
};
RECORD(buffer, "Buffer", te_buffer_info);

static const te_member stage_members[] = {
    ONE(te_stage_info, name, 0),
    ENUM(te_stage_info, op, operators),
    ONE(te_stage_info, external, 0),
    LIST(te_stage_info, buffers, INT32_MAX, buffer_count, NULL, NEVER),
    ONE(te_stage_info, node, 0),
    ONE(te_stage_info, step, 0),
    ONE(te_stage_info, half, -1),
};
RECORD(stage, "Stage", te_stage_info);

static const te_member plan_members[] = {
    ONE(te_plan_info, id, 0),
    ENUM(te_plan_info, direction, directions),
    LIST(te_plan_info, buffers, INT32_MAX, buffer_count, &buffer, 0),
    LIST(te_plan_info, stages, INT32_MAX, stage_count, &stage, 0),
    ONE(te_plan_info, quantized, 0),
    ARRAY(te_plan_info, saved_bytes, TE_SEQUENCES, -1, &extent, 0),
    ONE(te_plan_info, owners, 0),
    ONE(te_plan_info, symbols, 0),
};
RECORD(plan, "PlanDescription", te_plan_info);

const te_record *te_record_describe(te_record_number number)
{
    static const te_record *const records[] = {
        [TE_RECORD_EXTENT] = &extent,     [TE_RECORD_VALUE] = &value,
        [TE_RECORD_OPERAND_CAST] = &cast, [TE_RECORD_QUANTIZATION] = &quantization,
        [TE_RECORD_SLICE] = &slice,       [TE_RECORD_NODE] = &node,
        [TE_RECORD_GRAPH] = &graph,       [TE_RECORD_BUFFER] = &buffer,
        [TE_RECORD_STAGE] = &stage,       [TE_RECORD_PLAN] = &plan,
    };
    return (int)number >= 0 && number < TE_RECORD_COUNT ? records[number] : NULL;
}

/* ---- filling a struct ----------------------------------------------------------------------- */

static void start_item(const te_member *member, void *item)
{
    switch (member->kind) {
    case TE_MEMBER_INT32:
        *(int32_t *)item = (int32_t)member->initial;
        return;
    case TE_MEMBER_BITS:
        *(uint32_t *)item = (uint32_t)member->initial;
        return;
    case TE_MEMBER_INT64:
        *(int64_t *)item = (int64_t)member->initial;
        return;
    case TE_MEMBER_FLOAT:
        *(float *)item = (float)member->initial;
        return;
    case TE_MEMBER_DOUBLE:
        *(double *)item = member->initial;
        return;
    case TE_MEMBER_RECORD:
        te_record_initial(member->record, item);
        return;
    default:
        memset(item, 0, member->size);
    }
}

void te_record_initial(const te_record *record, void *memory)
{
    memset(memory, 0, record->size);
    for (int32_t m = 0; m < record->member_count; m++) {
        const te_member *member = &record->members[m];
        char *item = (char *)memory + member->offset;
        if (member->form == TE_MEMBER_LIST) continue;
        for (int32_t i = 0; i < member->most; i++) start_item(member, item + i * member->size);
    }
}

te_status te_member_count(const te_member *member, const void *memory, int32_t *count)
{
    const char *at = (const char *)memory;
    *count = member->most;
    if (member->count_at < 0) return TE_OK;
    *count = *(const int32_t *)(const void *)(at + member->count_at);
    if (*count >= 0 && *count <= member->most &&
        (*count == 0 || te_member_items(member, memory) != NULL)) {
        return TE_OK;
    }
    return TE_FAIL(TE_ERROR_INVALID, "graph: %d %s, expected a list of 0 to %d", *count,
                   member->name, member->most);
}

void *te_member_items(const te_member *member, const void *memory)
{
    char *at = (char *)(uintptr_t)memory + member->offset;
    return member->form == TE_MEMBER_LIST ? *(void **)(void *)at : at;
}

/* Items that a list has room for: a power of two, so that one which grows is not always copied. */
static size_t room_for(int32_t count)
{
    size_t room = 1;
    while (room < (size_t)count) room *= 2;
    return room;
}

te_status te_member_resize(const te_member *member, void *memory, int32_t count)
{
    char *at = (char *)memory;
    int32_t *number = (int32_t *)(void *)(at + member->count_at), before;
    char *items = te_member_items(member, memory);
    TE_FAIL_IF(count < 0 || count > member->most, TE_ERROR_INVALID,
               "graph: %d %s, expected at most %d", count, member->name, member->most);
    if (member->count_at < 0) return TE_OK; /* all are there */
    before = *number;
    if (member->form == TE_MEMBER_LIST && (items == NULL || room_for(count) != room_for(before))) {
        items = realloc(items, room_for(count) * member->size);
        TE_FAIL_IF(items == NULL, TE_ERROR_MEMORY, "no memory for a graph");
        *(void **)(void *)(at + member->offset) = items;
    }
    *number = count;
    for (int32_t i = before; i < count; i++) start_item(member, items + i * member->size);
    return TE_OK;
}

void te_record_release(const te_record *record, void *memory)
{
    for (int32_t m = 0; m < record->member_count; m++) {
        const te_member *member = &record->members[m];
        char *items = te_member_items(member, memory);
        int32_t count = 0;
        if (items == NULL || te_member_count(member, memory, &count) != TE_OK) continue;
        for (int32_t i = 0; member->kind == TE_MEMBER_RECORD && i < count; i++) {
            te_record_release(member->record, items + i * member->size);
        }
        if (member->form != TE_MEMBER_LIST) continue;
        free(items);
        *(void **)(void *)((char *)memory + member->offset) = NULL;
        *(int32_t *)(void *)((char *)memory + member->count_at) = 0;
    }
}
