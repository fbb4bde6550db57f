/* SPDX-License-Identifier: Apache-2.0
 *
 * test_graph_text.c - graphs as text: what is written is read to the same bits, whatever the
 * members hold; and no text crashes the reader or leaves memory behind. FUZZ_SEED and FUZZ_CALLS
 * choose other texts than those of every run.
 */
#include <locale.h>

#include "graph_ways.h"

enum { TEXT_BYTES = 1 << 16, GRAPHS = 200, DAMAGED = 20000 };

static uint32_t one_in(uint32_t count)
{
    return test_random() % count == 0;
}

/* ---- any graph ---- */

static uint64_t any_bits(void)
{
    uint64_t bits = (uint64_t)test_random() << 32 | test_random();
    return one_in(2) ? bits >> test_random() % 64 : bits;
}

/* A finite number, of either sign; now and then one that few digits say. */
static double any_number(void)
{
    uint64_t bits = any_bits();
    double value = (double)(int32_t)test_random() / 16;
    if (one_in(2)) memcpy(&value, &bits, sizeof value);
    if (one_in(16)) value = one_in(2) ? (double)INFINITY : -0.0;
    return isnan(value) ? 0.1 : value;
}

static void fill_record(const te_record *record, void *memory);

static void fill_item(const te_member *member, void *item)
{
    uint64_t bits = any_bits();
    float narrow;
    double wide;
    switch (member->kind) {
    case TE_MEMBER_NAME:
        memset(item, 0, TE_NAME_BYTES);
        for (uint32_t i = 0; i < test_random() % TE_NAME_BYTES; i++) {
            ((unsigned char *)item)[i] = (unsigned char)(1 + test_random() % 255);
        }
        return;
    case TE_MEMBER_FLOAT:
        wide = any_number();
        narrow = fabs(wide) < 1e38 ? (float)wide : 0.1F;
        memcpy(item, &narrow, sizeof narrow);
        return;
    case TE_MEMBER_DOUBLE:
        wide = any_number();
        memcpy(item, &wide, sizeof wide);
        return;
    case TE_MEMBER_RECORD:
        fill_record(member->record, item);
        return;
    default:
        memcpy(item, &bits, member->size);
    }
}

static void fill_record(const te_record *record, void *memory)
{
    te_record_initial(record, memory);
    for (int32_t m = 0; m < record->member_count; m++) {
        const te_member *member = &record->members[m];
        int32_t count = member->count_at < 0 ? member->most : (int32_t)(test_random() % 5);
        OK(te_member_resize(member, memory, count));
        for (int32_t i = 0; i < count; i++) {
            char *item = (char *)te_member_items(member, memory) + (size_t)i * member->size;
            if (!one_in(4)) fill_item(member, item);
        }
    }
}

static size_t write_to(const te_graph_desc *graph, te_direction direction, char *text)
{
    size_t length = 0;
    OK(te_graph_write(graph, direction, text, TEXT_BYTES, &length));
    EXPECT(length < TEXT_BYTES && strlen(text) == length, "%zu bytes", length);
    return length;
}

/* ---- the same bits ---- */

static void check_same(const te_record *record, const void *left, const void *right)
{
    for (int32_t m = 0; m < record->member_count; m++) {
        const te_member *member = &record->members[m];
        const char *a = te_member_items(member, left), *b = te_member_items(member, right);
        int32_t count = 0, other = 0;
        OK(te_member_count(member, left, &count));
        OK(te_member_count(member, right, &other));
        EXPECT(other <= count, "%s: %d items became %d", member->name, count, other);
        for (int32_t i = 0; i < other; i++, a += member->size, b += member->size) {
            if (member->kind == TE_MEMBER_RECORD) {
                check_same(member->record, a, b);
            } else if (member->kind == TE_MEMBER_NAME) {
                EXPECT(strcmp(a, b) == 0, "%s: %s became %s", member->name, a, b);
            } else {
                EXPECT(memcmp(a, b, member->size) == 0, "%s: item %d", member->name, (int)i);
            }
        }
    }
}

static void check_round_trips(void)
{
    static char first[TEXT_BYTES], second[TEXT_BYTES];
    const te_record *record = te_record_describe(TE_RECORD_GRAPH);
    for (int i = 0; i < GRAPHS; i++) {
        te_graph_desc graph, again;
        te_direction direction = (te_direction)(test_random() % 3), found;
        size_t length, cut, told = 0;
        fill_record(record, &graph);
        graph.size = sizeof graph;
        length = write_to(&graph, direction, first);
        OK(te_graph_read(first, &again, &found));
        EXPECT(found == direction && again.size == sizeof again, "direction %d", (int)found);
        check_same(record, &graph, &again);
        (void)write_to(&again, direction, second);
        EXPECT(strcmp(first, second) == 0, "%s became %s", first, second);
        cut = test_random() % (uint32_t)(length + 1);
        memset(second, 'x', sizeof second);
        OK(te_graph_write(&graph, direction, second, cut, &told));
        EXPECT(told == length && second[cut] == 'x' &&
                   memcmp(first, second, cut ? cut - 1 : 0) == 0,
               "cut off at %zu", cut);
        EXPECT(cut == 0 || second[cut - 1] == '\0', "cut off at %zu without an end", cut);
        te_graph_release(&graph);
        te_graph_release(&again);
        te_graph_release(&again); /* again: there is nothing any more */
    }
}

/* ---- a graph that has plans ---- */

static void make_graph(graph *g)
{
    int32_t x, a, y;
    graph_start(g, TE_RECIPE_CURRENT, 0);
    x = graph_input(g, "x", WIDTH);
    a = rows_of(g, "a", 0, WIDTH);
    y = rows_of(g, "y", TE_VALUE_RESULT, WIDTH);
    (void)graph_norm(g, TE_NORM_LAYERNORM, "first_", x, a);
    (void)graph_linear(g, "second_", a, y, 0);
}

static void check_plans(void)
{
    static graph g;
    static char text[TEXT_BYTES], in_locale[TEXT_BYTES];
    make_graph(&g);
    for (int d = 0; d < 2; d++) {
        te_graph_desc read;
        te_direction direction;
        te_plan *plan = NULL, *again = NULL;
        (void)write_to(&g.desc, (te_direction)d, text);
        OK(te_plan_make(&g.desc, (te_direction)d, &plan));
        OK(te_graph_read(text, &read, &direction));
        OK(te_plan_make(&read, direction, &again));
        EXPECT(plan == again, "another plan of %s", text);
        te_graph_release(&read);
        te_plan_release(plan);
        te_plan_release(again);
        if (setlocale(LC_NUMERIC, "de_DE.UTF-8") == NULL) continue; /* not installed here */
        (void)write_to(&g.desc, (te_direction)d, in_locale);
        OK(te_graph_read(text, &read, &direction));
        EXPECT(strcmp(text, in_locale) == 0 && read.nodes[0].numbers[0] == g.nodes[0].numbers[0],
               "%s", in_locale);
        te_graph_release(&read);
        (void)puts("texts in de_DE");
        (void)setlocale(LC_NUMERIC, "C");
    }
}

static void check_refused(void)
{
    static const struct refused {
        const char *text, *said;
    } all[] = {
        {"plan/5 (0, 0, (), ())", "\"plan/5 (0, 0, ()\": this version of transformer_engine reads "
                                  "plan/7: export the program again with it, or"},
        {"", "\"\": this version"},
        {"\x80plan/7", "\"?plan/7\": this version"},
        {"plan/7 sideways {}", "damaged at character 7: \"sideways {}\", expected a direction"},
        {"plan/7 forward {} ", "expected the end"},
        {"plan/7 forward {flags=1 flags=1}", "a member once"},
        {"plan/7 forward {size=1}", "a member once"},
        {"plan/7 forward {flags=4294967296}", "a number of its size"},
        {"plan/7 forward {flags=-1}", "a number of its size"},
        {"plan/7 forward {flags=99999999999999999999}", "a smaller number"},
        {"plan/7 forward {values=[{shape=[{} {} {} {} {}]}]}", "expected ]"},
        {"plan/7 forward {values=[{name=\"xxxxxxxxxxxxxxxxxxxxxxxx\"}]}", "the end of a string"},
        {"plan/7 forward {values=[{name=\"\\x00\"}]}", "a character of a string"},
        {"plan/7 forward {nodes=[{numbers=[1,5]}]}", "] or a space"},
        {"plan/7 forward {nodes=[{numbers=[1.5.2]}]}", "a number before"},
        {"plan/7 forward {nodes=[{slots=[1 2 3]}]}", "expected ]"},
    };
    te_graph_desc graph;
    te_direction direction;
    size_t length = 0;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        EXPECT(te_graph_read(all[i].text, &graph, &direction) == TE_ERROR_INVALID, "%s",
               all[i].text);
        EXPECT(strstr(te_last_error(), all[i].said) != NULL, "%s", te_last_error());
        EXPECT(graph.nodes == NULL && graph.values == NULL, "lists of %s", all[i].text);
    }
    EXPECT(te_graph_read(NULL, &graph, &direction) == TE_ERROR_INVALID, "read NULL");
    te_record_initial(te_record_describe(TE_RECORD_GRAPH), &graph);
    EXPECT(te_graph_write(&graph, TE_DIRECTION_FORWARD, NULL, 0, &length) == TE_ERROR_INVALID,
           "wrote a graph of another size");
    graph.size = sizeof graph;
    EXPECT(te_graph_write(&graph, (te_direction)3, NULL, 0, &length) == TE_ERROR_INVALID,
           "wrote direction 3");
    graph.value_count = 1;
    EXPECT(te_graph_write(&graph, TE_DIRECTION_FORWARD, NULL, 0, &length) == TE_ERROR_INVALID,
           "wrote a list at NULL");
    EXPECT(te_record_describe(TE_RECORD_COUNT) == NULL, "a record that does not exist");
}

/* ---- damaged texts ---- */

/* Changes a text at one place: an end, a character, a piece that is left out or comes twice. */
static void damage(char *text)
{
    static const char parts[] = "{}[]=\" \\x0.-e9_abn/\x80\x7f";
    const size_t length = strlen(text), at = test_random() % (length + 1);
    const size_t piece = test_random() % 40;
    if (length + 64 >= TEXT_BYTES || length == 0) return;
    switch (test_random() % 5) {
    case 0:
        text[at] = '\0';
        return;
    case 1:
        if (at < length) text[at] = parts[test_random() % (sizeof parts - 1)];
        return;
    case 2:
        memmove(text + at + 1, text + at, length - at + 1);
        text[at] = parts[test_random() % (sizeof parts - 1)];
        return;
    case 3:
        if (at + piece <= length) memmove(text + at, text + at + piece, length - at - piece + 1);
        return;
    default:
        if (at + piece <= length) memmove(text + at + piece, text + at, length - at + 1);
    }
}

static int number_of(const char *name, int otherwise)
{
    const char *value = getenv(name);
    return value != NULL ? atoi(value) : otherwise;
}

static void check_damaged(void)
{
    static graph g;
    static char whole[TEXT_BYTES], text[TEXT_BYTES];
    const int seed = number_of("FUZZ_SEED", 1), calls = number_of("FUZZ_CALLS", DAMAGED);
    int read_whole = 0, made = 0;
    (void)printf("graph text: FUZZ_SEED=%d FUZZ_CALLS=%d\n", seed, calls);
    make_graph(&g);
    (void)write_to(&g.desc, TE_DIRECTION_FORWARD, whole);
    for (int i = 0; i < calls; i++) {
        te_graph_desc graph;
        te_direction direction;
        te_plan *plan = NULL;
        size_t length = 0;
        test_seed = ((uint64_t)seed << 32) + (uint64_t)i;
        (void)test_random();
        memcpy(text, whole, sizeof text);
        for (uint32_t changes = 1 + test_random() % 3; changes > 0; changes--) damage(text);
        if (te_graph_read(text, &graph, &direction) != TE_OK) continue;
        read_whole++;
        OK(te_graph_write(&graph, direction, text, TEXT_BYTES, &length));
        made += te_plan_make(&graph, direction, &plan) == TE_OK;
        te_plan_release(plan);
        te_graph_release(&graph);
    }
    EXPECT(read_whole > calls / 100 && read_whole < calls && made > 0, "%d of %d texts, %d plans",
           read_whole, calls, made);
    EXPECT(te_plan_count() == 0, "%d plans are left", (int)te_plan_count());
}

int main(void)
{
    check_round_trips();
    check_plans();
    check_refused();
    check_damaged();
    (void)puts("graph text: ok");
    return 0;
}
