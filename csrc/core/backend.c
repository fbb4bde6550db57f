/* SPDX-License-Identifier: Apache-2.0 */
#include "core/backend.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/check.h"
#include "core/context.h"
#include "core/counters.h"
#include "core/fork.h"
#include "core/holders.h"
#include "core/status.h"

/* A plug-in; the built-in backends come from the device drivers. */
typedef struct registration {
    te_backend backend;
    int users;                 /* the list of those registered, and tables; guarded by the lock */
    struct registration *next; /* in that list, and then in one of those to release */
} registration;

/* A backend of a table. */
typedef struct candidate {
    const te_backend *backend;
    registration *plugin; /* NULL: built in */
} candidate;

struct te_op_table {
    /* 0 less one for each release; once the table is replaced, plus one for each acquisition: what
     * is left is how many hold it. */
    _Atomic int64_t balance;
    int64_t number;  /* 0: not in use; guarded by the lock */
    int is_replaced; /* and once no holder has it the balance goes down by 1; guarded by the lock */
    int count;
    /* Of the first candidate that has an operator. NULL: there is none, or it wants to be asked
     * whether it takes a call. */
    const te_op_slot *first[TE_OP_COUNT];
    candidate *candidates; /* highest priority first; `builtin`, or memory of the table's own */
    candidate builtin;
};

/* Tables that calls in flight may hold at a time, and those in force. pool[0] is never used. */
#define POOL 40

TE_PROCESS_LOCK(lock);
static registration *registered; /* in order */
static int64_t published_count;
static te_op_table pool[POOL];
/* The place in the pool of the table in force, plus ACQUIRED for each time it was acquired: in one
 * word, so that no table is replaced between the two. */
static _Atomic uint64_t in_force[TE_DEVICE_COUNT];
#define ACQUIRED ((uint64_t)POOL)
/* The table in force once more, for calls that hold it by themselves; NULL before the first one. */
static _Atomic(te_op_table *) current[TE_DEVICE_COUNT];
/* Tables are replaced and not yet given up: calls that end look whether theirs is one. */
static _Atomic int are_replaced;

static void add_backend(te_op_table *table, const te_backend *backend, registration *plugin)
{
    candidate *list = table->candidates;
    int at = table->count++;
    /* Later registrations of the same priority come first: an override overrides. */
    for (; at > 0 && list[at - 1].backend->priority <= backend->priority; at--) {
        list[at] = list[at - 1];
    }
    list[at] = (candidate){backend, plugin};
}

static void find_first(te_op_table *table)
{
    for (int op = 0; op < TE_OP_COUNT; op++) {
        for (int at = 0; at < table->count; at++) {
            const te_op_slot *slot = &table->candidates[at].backend->slots[op];
            if (slot->function == NULL) continue;
            table->first[op] = slot->supports == NULL ? slot : NULL;
            break;
        }
    }
}

/* ---- the life of tables and plug-ins; the lock is held but for release_all ---- */

static void disuse(registration *plugin, registration **unused)
{
    if (--plugin->users > 0) return;
    plugin->next = *unused;
    *unused = plugin;
}

static void empty_table(te_op_table *table, registration **unused)
{
    for (int i = 0; i < table->count; i++) {
        if (table->candidates[i].plugin != NULL) disuse(table->candidates[i].plugin, unused);
    }
    if (table->candidates != &table->builtin) free(table->candidates);
    table->number = 0;
}

/* Gives up the tables that are replaced and that no holder has. Whoever gets one as its `held`
 * after te_holders_settle sees that it is replaced, and takes another one. */
static void give_up_replaced(registration **unused)
{
    int left = 0;
    for (te_op_table *table = &pool[1]; table < &pool[POOL]; table++) {
        if (!table->is_replaced) continue;
        if (te_holders_have(table)) {
            left = 1;
            continue;
        }
        table->is_replaced = 0;
        if (atomic_fetch_sub(&table->balance, 1) == 1) empty_table(table, unused);
    }
    atomic_store(&are_replaced, left);
}

/* Without the lock: the plug-in's own code runs. */
static void release_all(registration *unused)
{
    while (unused != NULL) {
        registration *plugin = unused;
        unused = plugin->next;
        if (plugin->backend.release != NULL) plugin->backend.release(plugin->backend.self);
        free(plugin);
    }
}

/* An empty one with memory for so many plug-ins, and for the built-in backend. */
static te_status unused_table(int plugins, const char *name, te_op_table **table)
{
    candidate *candidates = NULL;
    int at = 1;
    while (at < POOL && pool[at].number != 0) at++;
    TE_FAIL_IF(at == POOL, TE_ERROR_STATE,
               "backend %s: calls in flight hold %d operator tables, no more fit: wait for them",
               name, POOL - 1);
    if (plugins > 0) {
        candidates = calloc((size_t)plugins + 1, sizeof *candidates);
        TE_FAIL_IF(candidates == NULL, TE_ERROR_MEMORY, "backend %s: no memory", name);
    }
    *table = &pool[at];
    memset(*table, 0, sizeof **table);
    (*table)->candidates = candidates == NULL ? &(*table)->builtin : candidates;
    return TE_OK;
}

/* Fills a table with the backends of a device and puts it in force. */
static void publish(te_op_table *table, te_device_type device, registration **unused)
{
    const te_device_driver *driver = te_driver_of(device);
    te_op_table *replaced;
    uint64_t word;
    table->number = ++published_count;
    if (driver != NULL && driver->backend != NULL) add_backend(table, driver->backend, NULL);
    for (registration *plugin = registered; plugin != NULL; plugin = plugin->next) {
        if (plugin->backend.device != device) continue;
        add_backend(table, &plugin->backend, plugin);
        plugin->users++;
    }
    find_first(table);
    word = atomic_exchange(&in_force[device], (uint64_t)(table - pool));
    atomic_store(&current[device], table);
    replaced = &pool[word % ACQUIRED];
    if (replaced == pool) return;
    (void)atomic_fetch_add(&replaced->balance, (int64_t)(word / ACQUIRED) + 1);
    replaced->is_replaced = 1;
    atomic_store(&are_replaced, 1);
    /* Either a call that holds one is seen, or it sees at its end that there are some. Where the
     * kernel fails they stay until the next change. */
    if (te_holders_settle() == 0) {
        give_up_replaced(unused);
    } else {
        atomic_store(&are_replaced, 0);
    }
}

/* The first tables of all devices at a time: later the pool might be used up. */
static void publish_first(void)
{
    for (int device = 0; device < TE_DEVICE_COUNT; device++) {
        te_op_table *table = NULL;
        if (in_force[device] != 0) continue;
        (void)unused_table(0, "", &table);
        publish(table, (te_device_type)device, NULL);
    }
}

/* ---- calls ---- */

te_op_table *te_op_table_acquire(te_device_type device)
{
    uint64_t word;
    if (atomic_load_explicit(&in_force[device], memory_order_relaxed) == 0) {
        (void)pthread_mutex_lock(&lock);
        publish_first();
        (void)pthread_mutex_unlock(&lock);
    }
    word = atomic_fetch_add_explicit(&in_force[device], ACQUIRED, memory_order_acquire);
    return &pool[word % ACQUIRED];
}

void te_op_table_release(te_op_table *table)
{
    registration *unused = NULL;
    if (atomic_fetch_sub_explicit(&table->balance, 1, memory_order_acq_rel) != 1) return;
    (void)pthread_mutex_lock(&lock);
    empty_table(table, &unused);
    (void)pthread_mutex_unlock(&lock);
    release_all(unused);
}

/* The table in force, as the `held` of this thread until release_held. NULL: the thread has a call
 * that holds one already, or there is no memory. */
static inline te_op_table *hold(te_holder *holder, te_device_type device)
{
    te_op_table *table, *seen = atomic_load_explicit(&current[device], memory_order_relaxed);
    if (holder == NULL || seen == NULL ||
        atomic_load_explicit(&holder->held, memory_order_relaxed) != NULL) {
        return NULL;
    }
    do { /* until it was in force while it was held: it is not given up from there on */
        table = seen;
        atomic_store_explicit(&holder->held, table, memory_order_relaxed);
        te_holder_order();
        seen = atomic_load_explicit(&current[device], memory_order_acquire);
    } while (seen != table);
    return table;
}

__attribute__((noinline)) static void give_up_now(void)
{
    registration *unused = NULL;
    (void)pthread_mutex_lock(&lock);
    give_up_replaced(&unused);
    (void)pthread_mutex_unlock(&lock);
    release_all(unused);
}

static inline void release_held(te_holder *holder)
{
    atomic_store_explicit(&holder->held, NULL, memory_order_release);
    te_holder_order();
    if (atomic_load_explicit(&are_replaced, memory_order_relaxed)) give_up_now();
}

int64_t te_op_table_number(const te_op_table *table)
{
    return table->number;
}

/* ---- registration ---- */

/* Where the list of those registered names one, or its end; *count is of those before it. */
static registration **find_registered(const char *name, int *count)
{
    registration **at = &registered;
    for (*count = 0; *at != NULL && strcmp((*at)->backend.name, name) != 0; ++*count) {
        at = &(*at)->next;
    }
    return at;
}

te_status te_backend_register(const te_backend *backend)
{
    te_status st = TE_OK;
    registration *made = NULL, *unused = NULL, **at;
    te_op_table *table = NULL;
    int count;
    TE_FAIL_IF(backend == NULL || backend->size < offsetof(te_backend, slots) ||
                   backend->name == NULL,
               TE_ERROR_INVALID, "backend: size and name must be set");
    TE_FAIL_IF(te_device_type_dlpack(backend->device) == 0, TE_ERROR_INVALID,
               "backend %s: device = %d, expected 0 (CPU), 1 (CUDA) or a type that was added",
               backend->name, (int)backend->device);
    made = calloc(1, sizeof *made);
    TE_FAIL_IF(made == NULL, TE_ERROR_MEMORY, "backend %s: no memory to register it",
               backend->name);
    memcpy(&made->backend, backend,
           backend->size < sizeof *backend ? backend->size : sizeof *backend);
    made->users = 1;
    (void)pthread_mutex_lock(&lock);
    publish_first();
    at = find_registered(backend->name, &count);
    st = *at == NULL
             ? unused_table(count + 1, backend->name, &table)
             : TE_FAIL(TE_ERROR_INVALID, "backend %s is registered already: unregister it first",
                       backend->name);
    if (st == TE_OK) {
        *at = made;
        made = NULL;
        publish(table, backend->device, &unused);
    }
    (void)pthread_mutex_unlock(&lock);
    free(made);
    release_all(unused);
    return st;
}

te_status te_backend_unregister(const char *name)
{
    te_status st = TE_OK;
    registration *removed, *unused = NULL, **at;
    te_op_table *table = NULL;
    int count;
    TE_FAIL_IF(name == NULL, TE_ERROR_INVALID, "name is NULL");
    (void)pthread_mutex_lock(&lock);
    at = find_registered(name, &count);
    removed = *at;
    for (registration *after = removed; after != NULL; after = after->next) count++;
    st = removed != NULL ? unused_table(count - 1, name, &table)
                         : TE_FAIL(TE_ERROR_INVALID, "no backend named %s is registered", name);
    if (st == TE_OK) {
        *at = removed->next;
        publish(table, removed->backend.device, &unused);
        disuse(removed, &unused);
    }
    (void)pthread_mutex_unlock(&lock);
    release_all(unused);
    return st;
}

/* An operator, whom a call of it may ask, and who is asked next. */
typedef struct search {
    te_op_candidates among;
    te_context *context;
    te_device_type device;
    te_op op;
    int at, end;
} search;

static const te_backend *backend_at(const search *in, int at)
{
    const int selected = in->among.selection == NULL ? 0 : in->among.selection->count;
    return at < selected ? in->among.selection->backends[at]
                         : in->among.table->candidates[at - selected].backend;
}

/* Whether there is another candidate that has the operator on this device; moves on to it. */
static int any_left(search *in)
{
    for (; in->at < in->end; in->at++) {
        const te_backend *backend = backend_at(in, in->at);
        const int is_asked = backend->device == in->device || backend->device == TE_DEVICE_ANY;
        if (is_asked && backend->slots[in->op].function != NULL) return 1;
    }
    return 0;
}

static void begin_search(search *in, te_op_candidates among, te_context *context, te_op op)
{
    in->among = among;
    in->context = context;
    in->device = te_context_device(context).type;
    in->op = op;
    in->at = 0;
    in->end = among.table->count + (among.selection == NULL ? 0 : among.selection->count);
}

/* The next candidate that supports the call; the search goes on behind it. */
static te_status resolve(search *in, const void *args, const te_op_slot **out)
{
    te_status st = TE_OK;
    while (any_left(in)) {
        const te_op_slot *slot = &backend_at(in, in->at++)->slots[in->op];
        st = slot->supports == NULL ? TE_OK : slot->supports(slot->self, in->context, args);
        if (st == TE_OK) {
            *out = slot;
            return TE_OK;
        }
        if (st != TE_ERROR_UNSUPPORTED) return st;
    }
    if (st == TE_ERROR_UNSUPPORTED) return st; /* the last candidate said why */
    return TE_FAIL(TE_ERROR_UNSUPPORTED, "%s: no backend of %s has this operator",
                   te_op_name(in->op), te_device_type_name(in->device));
}

static te_status check_call(te_context *context, te_op op, const void *args)
{
    TE_TRY(te_context_check(context));
    return te_check_args(op, te_context_device(context), args);
}

/* Asks one candidate after the other. A function may find out only when called that it does not
 * take the arguments; `asked`: the first one has. */
__attribute__((noinline)) static te_status run_other(te_op_candidates candidates, int asked,
                                                     te_context *context, te_op op,
                                                     const void *args, void *stream)
{
    const te_op_slot *slot = NULL;
    search in;
    te_status st;
    begin_search(&in, candidates, context, op);
    if (asked && any_left(&in)) in.at++;
    if (asked && !any_left(&in)) return TE_ERROR_UNSUPPORTED; /* it said why */
    do {
        TE_TRY(resolve(&in, args, &slot));
        st = slot->function(slot->self, context, args, stream);
    } while (st == TE_ERROR_UNSUPPORTED && any_left(&in));
    return st;
}

/* Arguments have been checked. It is counted by the caller. */
static inline te_status run_checked(te_op_candidates candidates, te_context *context, te_op op,
                                    const void *args, void *stream)
{
    const te_op_slot *slot = candidates.selection == NULL ? candidates.table->first[op] : NULL;
    te_status st = TE_ERROR_UNSUPPORTED;
    /* Where the first one has nothing to be asked: a load and a call. */
    if (slot != NULL) st = slot->function(slot->self, context, args, stream);
    if (st == TE_ERROR_UNSUPPORTED) {
        st = run_other(candidates, slot != NULL, context, op, args, stream);
    }
    return st;
}

te_status te_op_run_in(te_op_candidates candidates, te_context *context, te_op op, const void *args,
                       void *stream)
{
    TE_TRY(check_call(context, op, args));
    TE_TRY(run_checked(candidates, context, op, args, stream));
    te_count_op(te_context_device(context).type, op);
    return TE_OK;
}

te_status te_op_workspace_in(te_op_candidates candidates, te_context *context, te_op op,
                             const void *args, size_t *bytes)
{
    const te_op_slot *slot = NULL;
    search in;
    te_status st;
    *bytes = 0;
    TE_TRY(check_call(context, op, args));
    begin_search(&in, candidates, context, op);
    TE_TRY(resolve(&in, args, &slot));
    for (;;) { /* enough for every candidate that the call may end at */
        size_t need = 0;
        if (slot->workspace != NULL) {
            TE_TRY(slot->workspace(slot->self, context, args, &need));
        }
        if (need > *bytes) *bytes = need;
        if (!any_left(&in)) return TE_OK;
        st = resolve(&in, args, &slot);
        if (st != TE_OK) return st == TE_ERROR_UNSUPPORTED ? TE_OK : st;
    }
}

/* Of a call within a call, and of one that asks a selection. */
__attribute__((noinline)) static te_status run_acquired(te_context *context,
                                                        const te_selection *selection, te_op op,
                                                        const void *args, void *stream)
{
    const te_device_type device = te_context_device(context).type;
    te_op_table *table = te_op_table_acquire(device);
    te_status st = run_checked((te_op_candidates){selection, table}, context, op, args, stream);
    te_op_table_release(table);
    if (st == TE_OK) te_count_op(device, op);
    return st;
}

te_status te_op_run_checked(te_context *context, te_op op, const void *args, void *stream)
{
    const te_device_type device = te_context_device(context).type;
    te_holder *holder = te_holder_of_thread();
    const te_op_table *table = hold(holder, device);
    te_status st;
    if (table == NULL) return run_acquired(context, NULL, op, args, stream);
    st = run_checked((te_op_candidates){NULL, table}, context, op, args, stream);
    if (st == TE_OK) te_holder_count(holder, device, op);
    release_held(holder);
    return st;
}

te_status te_op_run_selected(te_context *context, const te_selection *selection, te_op op,
                             const void *args, void *stream)
{
    te_any_args whole;
    TE_TRY(te_check_size(op, args, &whole, &args));
    TE_TRY(check_call(context, op, args));
    TE_TRY(te_check_memory(op, args));
    return selection == NULL ? te_op_run_checked(context, op, args, stream)
                             : run_acquired(context, selection, op, args, stream);
}

te_status te_op_run(te_context *context, te_op op, const void *args, void *stream)
{
    return te_op_run_selected(context, NULL, op, args, stream);
}

te_status te_op_workspace_selected(te_context *context, const te_selection *selection, te_op op,
                                   const void *args, size_t *bytes)
{
    te_any_args whole;
    te_op_table *table;
    te_status st;
    TE_FAIL_IF(bytes == NULL, TE_ERROR_INVALID, "%s: bytes is NULL", te_op_name(op));
    TE_TRY(te_check_size(op, args, &whole, &args));
    TE_TRY(te_context_check(context));
    table = te_op_table_acquire(te_context_device(context).type);
    st = te_op_workspace_in((te_op_candidates){selection, table}, context, op, args, bytes);
    te_op_table_release(table);
    return st;
}

te_status te_op_workspace(te_context *context, te_op op, const void *args, size_t *bytes)
{
    return te_op_workspace_selected(context, NULL, op, args, bytes);
}

/* ---- single slots ---- */

/* Of args as they are given, of which *whole is what the slot gets. */
static te_status check_slot(const te_op_slot *slot, te_context *context, te_op op,
                            te_any_args *buffer, const void *args, const void **whole)
{
    TE_TRY(te_check_size(op, args, buffer, whole));
    TE_FAIL_IF(slot == NULL || slot->function == NULL, TE_ERROR_INVALID,
               "%s: the slot has no function", te_op_name(op));
    TE_TRY(check_call(context, op, *whole));
    return slot->supports == NULL ? TE_OK : slot->supports(slot->self, context, *whole);
}

te_status te_slot_supports(const te_op_slot *slot, te_context *context, te_op op, const void *args)
{
    te_any_args whole;
    return check_slot(slot, context, op, &whole, args, &args);
}

te_status te_slot_workspace(const te_op_slot *slot, te_context *context, te_op op, const void *args,
                            size_t *bytes)
{
    te_any_args whole;
    TE_FAIL_IF(bytes == NULL, TE_ERROR_INVALID, "%s: bytes is NULL", te_op_name(op));
    *bytes = 0;
    TE_TRY(check_slot(slot, context, op, &whole, args, &args));
    return slot->workspace == NULL ? TE_OK : slot->workspace(slot->self, context, args, bytes);
}

te_status te_slot_run(const te_op_slot *slot, te_context *context, te_op op, const void *args,
                      void *stream)
{
    te_any_args whole;
    TE_TRY(check_slot(slot, context, op, &whole, args, &args));
    TE_TRY(te_check_memory(op, args));
    TE_TRY(slot->function(slot->self, context, args, stream));
    te_count_op(te_context_device(context).type, op);
    return TE_OK;
}

int64_t te_selection_next_number(void)
{
    static _Atomic int64_t given;
    return atomic_fetch_add(&given, 1) + 1;
}

#define X(NAME, name)                                                                              \
    te_status te_##name(te_context *context, const te_##name##_args *args, void *stream)           \
    {                                                                                              \
        return te_op_run(context, TE_OP_##NAME, args, stream);                                     \
    }
TE_OPS(X)
#undef X
