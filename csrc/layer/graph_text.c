/* SPDX-License-Identifier: Apache-2.0
 *
 * graph_text.c - graphs as text, by the tables of records.c. Numbers do not go by the locale of the
 * program, and are written with as few digits as are read to the same bits.
 */
#define _POSIX_C_SOURCE 200809L /* uselocale */

#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "transformer_engine.h"

#define VERSION "plan/7" /* raised whenever a number of a graph gets another meaning */

enum { NUMBER_CHARACTERS = 40 }; /* more than any number has */

static const char *const directions[TE_DIRECTION_COUNT] = {"forward", "backward", "deferred"};

/* Between these two, numbers do not go by the locale of the program in this thread. The one of C is
 * built in: it can not fail. */
static locale_t leave_locale(void)
{
    return uselocale(newlocale(LC_ALL_MASK, "C", (locale_t)0));
}

static void enter_locale(locale_t before)
{
    freelocale(uselocale(before));
}

/* ---- writing ------------------------------------------------------------------------------ */

typedef struct writer {
    char *buffer;
    size_t size, length; /* length of what was to be written so far */
} writer;

static void put(writer *to, const char *text)
{
    for (; *text != '\0'; text++, to->length++) {
        if (to->length + 1 < to->size) to->buffer[to->length] = *text;
    }
}

static void put_integer(writer *to, int64_t value)
{
    char text[NUMBER_CHARACTERS];
    (void)snprintf(text, sizeof text, "%lld", (long long)value);
    put(to, text);
}

static void put_real(writer *to, double value, int is_float)
{
    const locale_t before = leave_locale();
    char text[NUMBER_CHARACTERS];
    int digits = is_float ? 6 : 15;
    const int most = is_float ? 9 : 17;
    for (; digits <= most; digits++) {
        double again;
        (void)snprintf(text, sizeof text, "%.*g", digits, value);
        again = strtod(text, NULL);
        if (is_float ? (float)again == (float)value : again == value) break;
    }
    enter_locale(before);
    put(to, text);
}

static void put_name(writer *to, const char *name)
{
    put(to, "\"");
    for (int i = 0; i < TE_NAME_BYTES && name[i] != '\0'; i++) {
        unsigned char c = (unsigned char)name[i];
        char text[8] = {(char)c, '\0'};
        if (c == '"' || c == '\\') {
            (void)snprintf(text, sizeof text, "\\%c", c);
        } else if (c < ' ' || c > '~') {
            (void)snprintf(text, sizeof text, "\\x%02x", c);
        }
        put(to, text);
    }
    put(to, "\"");
}

/* An integer of any kind. */
static int64_t whole_of(const te_member *member, const void *item)
{
    if (member->kind == TE_MEMBER_INT64) return *(const int64_t *)item;
    return member->kind == TE_MEMBER_BITS ? (int64_t) * (const uint32_t *)item
                                          : (int64_t) * (const int32_t *)item;
}

static double real_of(const te_member *member, const void *item)
{
    return member->kind == TE_MEMBER_FLOAT ? (double)*(const float *)item : *(const double *)item;
}

static te_status put_record(writer *to, const te_record *record, const void *memory);

static te_status put_item(writer *to, const te_member *member, const void *item)
{
    switch (member->kind) {
    case TE_MEMBER_NAME:
        put_name(to, item);
        return TE_OK;
    case TE_MEMBER_INT32:
    case TE_MEMBER_BITS:
    case TE_MEMBER_INT64:
        put_integer(to, whole_of(member, item));
        return TE_OK;
    case TE_MEMBER_FLOAT:
    case TE_MEMBER_DOUBLE:
        put_real(to, real_of(member, item), member->kind == TE_MEMBER_FLOAT);
        return TE_OK;
    case TE_MEMBER_RECORD:
        return put_record(to, member->record, item);
    default: /* of descriptions, which are not written */
        return TE_FAIL(TE_ERROR_STATE, "graph: field %s has no form as text", member->name);
    }
}

static int is_initial(const te_member *member, const void *item)
{
    int initial = 1;
    switch (member->kind) {
    case TE_MEMBER_NAME:
        return *(const char *)item == '\0';
    case TE_MEMBER_FLOAT:
    case TE_MEMBER_DOUBLE:
        return real_of(member, item) == member->initial && !signbit(real_of(member, item));
    case TE_MEMBER_RECORD:
        for (int32_t m = 0; m < member->record->member_count; m++) {
            const te_member *inner = &member->record->members[m];
            const char *items = te_member_items(inner, item);
            int32_t count = 0;
            if (te_member_count(inner, item, &count) != TE_OK) return 0;
            if (inner->count_at >= 0) initial &= count == 0;
            for (int32_t i = 0; initial && i < count; i++) {
                initial = is_initial(inner, items + i * inner->size);
            }
        }
        return initial;
    default:
        return whole_of(member, item) == (int64_t)member->initial;
    }
}

/* How many items are written: of numbers, and where all are there anyway, none that is initial at
 * the end. */
static te_status count_written(const te_member *member, const void *memory, int32_t *count)
{
    const char *items = te_member_items(member, memory);
    TE_TRY(te_member_count(member, memory, count));
    if (member->kind == TE_MEMBER_RECORD && member->count_at >= 0) return TE_OK;
    while (*count > 0 && is_initial(member, items + (size_t)(*count - 1) * member->size))
        (*count)--;
    return TE_OK;
}

static te_status put_record(writer *to, const te_record *record, const void *memory)
{
    const char *before = "";
    put(to, "{");
    for (int32_t m = 0; m < record->member_count; m++) {
        const te_member *member = &record->members[m];
        const char *items = te_member_items(member, memory);
        int32_t count = 0;
        TE_TRY(count_written(member, memory, &count));
        if (count == 0) continue;
        put(to, before);
        put(to, member->name);
        put(to, member->form == TE_MEMBER_ONE ? "=" : "=[");
        for (int32_t i = 0; i < count; i++) {
            if (i > 0) put(to, " ");
            TE_TRY(put_item(to, member, items + i * member->size));
        }
        if (member->form != TE_MEMBER_ONE) put(to, "]");
        before = " ";
    }
    put(to, "}");
    return TE_OK;
}

te_status te_graph_write(const te_graph_desc *graph, te_direction direction, char *buffer,
                         size_t size, size_t *length)
{
    writer to = {buffer, buffer == NULL ? 0 : size, 0};
    TE_FAIL_IF(graph == NULL || length == NULL || graph->size != sizeof *graph, TE_ERROR_INVALID,
               "graph: graph or length is NULL, or graph->size is not %zu", sizeof *graph);
    TE_FAIL_IF((int)direction < 0 || direction >= TE_DIRECTION_COUNT, TE_ERROR_INVALID,
               "graph: direction = %d does not exist", (int)direction);
    put(&to, VERSION " ");
    put(&to, directions[direction]);
    put(&to, " ");
    TE_TRY(put_record(&to, te_record_describe(TE_RECORD_GRAPH), graph));
    if (to.size > 0) buffer[to.length < to.size ? to.length : to.size - 1] = '\0';
    *length = to.length;
    return TE_OK;
}

/* ---- reading ------------------------------------------------------------------------------ */

typedef struct reader {
    const char *text, *at;
} reader;

/* The beginning of a text, for messages. */
static void show(const char *text, char *shown, size_t size)
{
    size_t i = 0;
    for (; i + 1 < size && text[i] != '\0'; i++) {
        shown[i] = '?';
        if (text[i] >= ' ' && text[i] <= '~') shown[i] = text[i];
    }
    shown[i] = '\0';
}

static te_status damaged(const reader *from, const char *expected)
{
    char begin[48], here[24];
    show(from->text, begin, sizeof begin);
    show(from->at, here, sizeof here);
    return TE_FAIL(TE_ERROR_INVALID,
                   "plan \"%s\": damaged at character %zu: \"%s\", expected %s: export the program "
                   "again",
                   begin, (size_t)(from->at - from->text), here, expected);
}

/* Whether this comes next, which is left behind then. */
static int take(reader *from, const char *text)
{
    size_t length = strlen(text);
    if (strncmp(from->at, text, length) != 0) return 0;
    from->at += length;
    return 1;
}

static int is_of_name(char c)
{
    return (c >= 'a' && c <= 'z') || c == '_';
}

static int is_of_number(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || c == '+' || c == '-' || c == '.';
}

static te_status read_word(reader *from, int (*is_part)(char c), char *word)
{
    size_t length = 0;
    while (length + 1 < NUMBER_CHARACTERS && is_part(from->at[length])) {
        word[length] = from->at[length];
        length++;
    }
    word[length] = '\0';
    if (length == 0 || is_part(from->at[length])) {
        return damaged(from, is_part == is_of_name ? "a name" : "a number");
    }
    from->at += length;
    return TE_OK;
}

static te_status read_integer(reader *from, int64_t low, int64_t high, int64_t *value)
{
    const int negative = take(from, "-");
    uint64_t whole = 0;
    if (*from->at < '0' || *from->at > '9') return damaged(from, "an integer");
    for (; *from->at >= '0' && *from->at <= '9'; from->at++) {
        uint64_t digit = (uint64_t)(*from->at - '0');
        if (whole > (UINT64_MAX - digit) / 10) return damaged(from, "a smaller number");
        whole = whole * 10 + digit;
    }
    if (whole > (uint64_t)INT64_MAX + (uint64_t)negative) return damaged(from, "a smaller number");
    *value = !negative ? (int64_t)whole : whole == 0 ? 0 : -(int64_t)(whole - 1) - 1;
    return *value >= low && *value <= high ? TE_OK : damaged(from, "a number of its size before");
}

static te_status read_real(reader *from, double *value)
{
    char text[NUMBER_CHARACTERS], *end;
    locale_t before;
    TE_TRY(read_word(from, is_of_number, text));
    before = leave_locale();
    *value = strtod(text, &end);
    enter_locale(before);
    return *end == '\0' ? TE_OK : damaged(from, "a number before");
}

static int digit_of(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* One character of a string, unescaped; 0 for none. */
static char read_character(reader *from)
{
    char c = *from->at;
    int high, low;
    if (c < ' ' || c > '~' || c == '"') return '\0';
    from->at++;
    if (c != '\\') return c;
    c = *from->at;
    if (c == '"' || c == '\\') {
        from->at++;
        return c;
    }
    high = c == 'x' ? digit_of(from->at[1]) : -1;
    low = high < 0 ? -1 : digit_of(from->at[2]);
    if (low < 0) return '\0';
    from->at += 3;
    return (char)(16 * high + low);
}

static te_status read_name(reader *from, char *name)
{
    int length = 0;
    if (!take(from, "\"")) return damaged(from, "a string");
    while (!take(from, "\"")) {
        char c = read_character(from);
        if (c == '\0') return damaged(from, "a character of a string");
        if (length + 1 == TE_NAME_BYTES) return damaged(from, "the end of a string");
        name[length++] = c;
    }
    return TE_OK;
}

static te_status read_record(reader *from, const te_record *record, void *memory);

static te_status read_item(reader *from, const te_member *member, void *item)
{
    int64_t whole = 0;
    double real = 0;
    switch (member->kind) {
    case TE_MEMBER_NAME:
        return read_name(from, item);
    case TE_MEMBER_INT32:
        TE_TRY(read_integer(from, INT32_MIN, INT32_MAX, &whole));
        *(int32_t *)item = (int32_t)whole;
        return TE_OK;
    case TE_MEMBER_BITS:
        TE_TRY(read_integer(from, 0, UINT32_MAX, &whole));
        *(uint32_t *)item = (uint32_t)whole;
        return TE_OK;
    case TE_MEMBER_INT64:
        return read_integer(from, INT64_MIN, INT64_MAX, item);
    case TE_MEMBER_FLOAT:
        TE_TRY(read_real(from, &real));
        *(float *)item = (float)real;
        return TE_OK;
    case TE_MEMBER_DOUBLE:
        return read_real(from, item);
    case TE_MEMBER_RECORD:
        return read_record(from, member->record, item);
    default:
        return damaged(from, "another member");
    }
}

static te_status read_items(reader *from, const te_member *member, void *memory)
{
    if (member->form == TE_MEMBER_ONE) {
        return read_item(from, member, te_member_items(member, memory));
    }
    if (!take(from, "[")) return damaged(from, "[");
    for (int32_t i = 0; !take(from, "]"); i++) {
        if (i > 0 && !take(from, " ")) return damaged(from, "] or a space");
        if (i == member->most) return damaged(from, "]");
        if (member->count_at >= 0) TE_TRY(te_member_resize(member, memory, i + 1));
        TE_TRY(read_item(from, member, (char *)te_member_items(member, memory) + i * member->size));
    }
    return TE_OK;
}

static te_status read_record(reader *from, const te_record *record, void *memory)
{
    uint32_t seen = 0;
    if (!take(from, "{")) return damaged(from, "{");
    while (!take(from, "}")) {
        char name[NUMBER_CHARACTERS];
        int32_t m = 0;
        if (seen != 0 && !take(from, " ")) return damaged(from, "} or a space");
        TE_TRY(read_word(from, is_of_name, name));
        while (m < record->member_count && strcmp(record->members[m].name, name) != 0) m++;
        if (m == record->member_count || (seen >> m & 1U) != 0 || !take(from, "=")) {
            return damaged(from, "a member once, and = before");
        }
        seen |= 1U << m;
        TE_TRY(read_items(from, &record->members[m], memory));
    }
    return TE_OK;
}

te_status te_graph_read(const char *text, te_graph_desc *graph, te_direction *direction)
{
    const te_record *record = te_record_describe(TE_RECORD_GRAPH);
    reader from = {text, text};
    int found = 0;
    te_status st;
    TE_FAIL_IF(text == NULL || graph == NULL || direction == NULL, TE_ERROR_INVALID,
               "plan: text, graph or direction is NULL");
    te_record_initial(record, graph);
    graph->size = sizeof *graph;
    if (!take(&from, VERSION " ")) {
        char begin[17];
        show(text, begin, sizeof begin);
        return TE_FAIL(TE_ERROR_INVALID,
                       "plan \"%s\": this version of transformer_engine reads " VERSION
                       ": export the program again with it, or load it with the version that "
                       "exported it",
                       begin);
    }
    while (found < TE_DIRECTION_COUNT && !take(&from, directions[found])) found++;
    if (found == TE_DIRECTION_COUNT || !take(&from, " ")) return damaged(&from, "a direction");
    st = read_record(&from, record, graph);
    if (st == TE_OK && *from.at != '\0') st = damaged(&from, "the end");
    if (st != TE_OK) te_graph_release(graph);
    *direction = (te_direction)found;
    return st;
}

void te_graph_release(te_graph_desc *graph)
{
    if (graph != NULL) te_record_release(te_record_describe(TE_RECORD_GRAPH), graph);
}
