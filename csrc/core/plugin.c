/* SPDX-License-Identifier: Apache-2.0
 *
 * plugin.c - loading of plug-ins, the table of functions that they are handed, and what they
 * register.
 *
 * A plug-in is known by its te_plugin_init: dlopen gives the same one for every name of a file. A
 * lock is held while one registers, so that two threads get one plug-in; whoever holds and drops
 * plug-ins does not wait for that, for it may hold a lock that the plug-in waits for (Python's).
 * Which plug-in is registering is a matter of its thread. One that is being released is waited for
 * before it registers anew: its release and its te_plugin_init share its static variables.
 */
#include "core/plugin.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/context.h"
#include "core/fork.h"
#include "core/fp8.h"
#include "core/interrupt.h"
#include "core/status.h"
#include "core/tensor.h"

/* What binaries depend on: a value that changes here needs another TE_PLUGIN_ABI_MAJOR. Args
 * structs may grow, what lies within them may not. */
#define PIN(what, value) _Static_assert((what) == (value), "breaks plug-ins: " #what)
#if UINTPTR_MAX == UINT64_MAX
PIN(sizeof(te_tensor), 88);
PIN(sizeof(te_operand), 624);
PIN(sizeof(te_cast_request), 704);
PIN(sizeof(te_attention_problem), 1296);
PIN(sizeof(te_rope_part), 264);
PIN(sizeof(te_cache), 264);
PIN(sizeof(te_activation_params), 12);
PIN(sizeof(te_field), 64);
PIN(sizeof(te_op_info), 32);
PIN(offsetof(te_host_api, register_backend), 32);
#endif
PIN(TE_DTYPE_I64, 7);
PIN(TE_SCALING_NVFP4, 6);
PIN(TE_ACTIVATION_CLAMPED_SWIGLU, 11);
PIN(TE_ERROR_INTERRUPTED, -8);
PIN(TE_DEVICE_CUDA, 1);
PIN(TE_MAX_DIMS, 4);

typedef struct registered_backend {
    struct registered_backend *next;
    te_plugin_backend backend; /* names are ours; operators are not kept */
    size_t count;
    te_plugin_record records[]; /* they do not move: they are the `self` of their slots */
} registered_backend;

struct te_plugin {
    te_plugin_init_function init;
    int users;
    int32_t generation; /* of forks, when it was dropped: in a child nobody ends another's drop */
    struct te_plugin *next;
    registered_backend *backends, **last; /* in order */
};

TE_PROCESS_LOCK(starting); /* held while a plug-in registers, and taken before the other one */
TE_PROCESS_LOCK(lock);     /* of the list, and of the users of those in it */
static te_plugin *plugins;
static te_plugin *leaving; /* their backends are being released */
static pthread_cond_t left = PTHREAD_COND_INITIALIZER;
static _Thread_local te_plugin *registering; /* whose te_plugin_init this thread is in */
static _Thread_local int releasing;          /* and in how many calls of `release` it is */

/* ---- registration ------------------------------------------------------------------------- */

/* Copies a struct that begins with its size. What a later version has appended must be 0. */
static te_status take_struct(const char *what, const void *given, void *own, size_t size)
{
    const size_t has = given == NULL ? 0 : *(const size_t *)given;
    TE_FAIL_IF(has < size, TE_ERROR_INVALID, "%s: size = %zu, expected %zu", what, has, size);
    for (size_t i = size; i < has; i++) {
        if (((const char *)given)[i] == 0 && has < 16 * size) continue;
        return TE_FAIL(TE_ERROR_UNSUPPORTED,
                       "%s: it sets what this library (%s) does not know, in byte %zu of %zu", what,
                       TE_VERSION, i, has);
    }
    memcpy(own, given, size);
    *(size_t *)own = size;
    return TE_OK;
}

/* What policies, tables and environment variables can name: no separators of these. */
static te_status check_name(const char *what, const char *name)
{
    const size_t length = strlen(name);
    for (size_t i = 0; i < length; i++) {
        const int at_end = i == 0 || i == length - 1;
        if (name[i] >= ' ' && name[i] <= '~' && strchr(",;|=", name[i]) == NULL &&
            !(at_end && name[i] == ' ')) {
            continue;
        }
        return TE_FAIL(TE_ERROR_INVALID,
                       "backend: its %s has byte %d at %zu, expected printable ASCII without , ; | "
                       "= and without a space at an end",
                       what, (int)(unsigned char)name[i], i);
    }
    return TE_OK;
}

static te_status check_backend(const te_plugin *plugin, const te_plugin_backend *backend)
{
    TE_FAIL_IF(backend->abi >> 16 != TE_PLUGIN_ABI_MAJOR, TE_ERROR_UNSUPPORTED,
               "backend: built for version %u of the plug-in interface, this library (%s) "
               "has %d",
               (unsigned)(backend->abi >> 16), TE_VERSION, TE_PLUGIN_ABI_MAJOR);
    TE_FAIL_IF(backend->name == NULL || backend->name[0] == '\0', TE_ERROR_INVALID,
               "backend: it has no name");
    TE_TRY(check_name("name", backend->name));
    TE_FAIL_IF((int)backend->kind < TE_PLUGIN_VENDOR || backend->kind > TE_PLUGIN_REFERENCE,
               TE_ERROR_INVALID, "backend %s: kind = %d, expected 0 to 2", backend->name,
               (int)backend->kind);
    TE_FAIL_IF(backend->kind == TE_PLUGIN_VENDOR &&
                   (backend->vendor == NULL || backend->vendor[0] == '\0'),
               TE_ERROR_INVALID, "backend %s: it has no vendor", backend->name);
    if (backend->vendor != NULL) TE_TRY(check_name("vendor", backend->vendor));
    TE_FAIL_IF(te_device_type_dlpack(backend->device) == 0, TE_ERROR_INVALID,
               "backend %s: device = %d, expected 0 (CPU), 1 (CUDA) or a type that was added",
               backend->name, (int)backend->device);
    TE_FAIL_IF(backend->operator_count == 0 || backend->operators == NULL, TE_ERROR_INVALID,
               "backend %s: it has no operators", backend->name);
    for (registered_backend *other = plugin->backends; other != NULL; other = other->next) {
        if (strcmp(other->backend.name, backend->name) != 0) continue;
        return TE_FAIL(TE_ERROR_INVALID, "backend %s is registered already", backend->name);
    }
    return TE_OK;
}

/* A copy in memory at *end, which moves behind it; NULL of NULL. */
static const char *copy_text(const char *text, char **end)
{
    const size_t bytes = text == NULL ? 0 : strlen(text) + 1;
    char *copy = *end;
    if (text == NULL) return NULL;
    memcpy(copy, text, bytes);
    *end += bytes;
    return copy;
}

/* Memory for a backend, its records and the texts behind these. */
static registered_backend *make_backend(const te_plugin_backend *given)
{
    const size_t records = given->operator_count * sizeof(te_plugin_record);
    const size_t texts =
        strlen(given->name) + 2 + (given->vendor == NULL ? 0 : strlen(given->vendor));
    registered_backend *made = NULL;
    char *end;
    if (given->operator_count <= TE_OP_COUNT) made = calloc(1, sizeof *made + records + texts);
    if (made == NULL) return NULL;
    made->backend = *given;
    end = (char *)made->records + records;
    made->backend.name = copy_text(given->name, &end);
    made->backend.vendor = copy_text(given->vendor, &end);
    made->backend.operators = NULL;
    return made;
}

static te_status make_records(const te_plugin_backend *given, registered_backend *made)
{
    const char *at = (const char *)given->operators;
    const size_t stride = given->operators->size;
    TE_FAIL_IF(stride % _Alignof(te_plugin_operator) != 0, TE_ERROR_INVALID,
               "backend %s: operators have size %zu, no multiple of %zu", given->name, stride,
               _Alignof(te_plugin_operator));
    for (; made->count < given->operator_count; made->count++, at += stride) {
        te_plugin_record *record = &made->records[made->count];
        te_plugin_operator own;
        TE_FAIL_IF(*(const size_t *)at != stride, TE_ERROR_INVALID,
                   "backend %s: operators have sizes %zu and %zu", given->name, stride,
                   *(const size_t *)at);
        TE_TRY(take_struct("operator", at, &own, sizeof own));
        TE_TRY(te_plugin_record_make(&made->backend, &own, record));
        for (size_t i = 0; i < made->count; i++) {
            if (made->records[i].slot.op != record->slot.op) continue;
            return TE_FAIL(TE_ERROR_INVALID, "backend %s: it has %s twice", given->name, own.name);
        }
    }
    return TE_OK;
}

static te_status register_backend(const te_plugin_backend *backend)
{
    te_plugin *plugin = registering;
    te_plugin_backend own;
    registered_backend *made;
    te_status st;
    TE_FAIL_IF(plugin == NULL, TE_ERROR_STATE,
               "register_backend: called outside of te_plugin_init, or in another thread: "
               "register in te_plugin_init");
    TE_TRY(take_struct("backend", backend, &own, sizeof own));
    TE_TRY(check_backend(plugin, &own));
    made = make_backend(&own);
    if (made == NULL) {
        return own.operator_count > TE_OP_COUNT
                   ? TE_FAIL(TE_ERROR_INVALID, "backend %s: it has %zu operators, there are %d",
                             own.name, own.operator_count, TE_OP_COUNT)
                   : TE_FAIL(TE_ERROR_MEMORY, "backend %s: no memory to register it", own.name);
    }
    st = make_records(&own, made);
    if (st != TE_OK) {
        free(made);
        return st;
    }
    *plugin->last = made;
    plugin->last = &made->next;
    return TE_OK;
}

/* ---- the table of functions --------------------------------------------------------------- */

static const te_host_api host = {
    .size = sizeof host,
    .abi = TE_PLUGIN_ABI,
    .version = TE_VERSION,
    .fail = te_fail,
    .register_backend = register_backend,
    .last_error = te_last_error,
    .op_find = te_op_find,
    .op_name = te_op_name,
    .op_describe = te_op_describe,
    .op_initial = te_op_initial,
    .op_workspace = te_op_workspace,
    .op_run = te_op_run,
    .context_device = te_context_device,
    .dtype_name = te_dtype_name,
    .dtype_bits = te_dtype_bits,
    .dtype_bytes = te_dtype_bytes,
    .dtype_size = te_dtype_size,
    .dtype_max = te_dtype_max,
    .tensor_elements = te_tensor_numel,
    .tensor_rows = te_tensor_rows,
    .to_f32 = te_to_f32,
    .from_f32 = te_from_f32,
    .interrupted = te_interrupt_asked,
    .counters_read = te_counters_read,
    .device_type_add = te_device_type_add,
    .device_type_name = te_device_type_name,
    .count_gemm = te_count_gemm,
    .count_emulated = te_count_emulated,
    .count_mixed = te_count_mixed,
    .count_attention = te_count_attention,
};

/* ---- life --------------------------------------------------------------------------------- */

/* Without the lock: the plug-in's own code runs. */
static void release_backends(te_plugin *plugin)
{
    releasing++;
    while (plugin->backends != NULL) {
        registered_backend *backend = plugin->backends;
        plugin->backends = backend->next;
        if (backend->backend.release != NULL) backend->backend.release(backend->backend.self);
        free(backend);
    }
    releasing--;
}

/* Takes a plug-in out of a list; with the lock. */
static void unlink_plugin(te_plugin **at, const te_plugin *plugin)
{
    while (*at != plugin) at = &(*at)->next;
    *at = plugin->next;
}

/* Whether one with this function is being released, by a thread of this process; with the lock. */
static int is_leaving(te_plugin_init_function init)
{
    for (const te_plugin *at = leaving; at != NULL; at = at->next) {
        if (at->init == init && at->generation == te_fork_generation()) return 1;
    }
    return 0;
}

/* One more user of the plug-in that has this function; NULL: there is none, nor one that is being
 * released. */
static te_plugin *find_plugin(te_plugin_init_function init)
{
    te_plugin *found;
    (void)pthread_mutex_lock(&lock);
    while (is_leaving(init)) (void)pthread_cond_wait(&left, &lock);
    for (found = plugins; found != NULL && found->init != init;) found = found->next;
    if (found != NULL) found->users++;
    (void)pthread_mutex_unlock(&lock);
    return found;
}

/* Lets a new plug-in register; of one that fails nothing stays. */
static te_status start(te_plugin *plugin, const char *name)
{
    const uint64_t failures = te_failure_count();
    char reason[512];
    te_status st;
    registering = plugin;
    st = plugin->init(&host, host.abi);
    registering = NULL;
    if (st == TE_OK) return TE_OK;
    (void)snprintf(reason, sizeof reason, "%s",
                   te_failure_count() == failures ? "it gave no reason" : te_last_error());
    release_backends(plugin); /* before the text is set: it runs the plug-in's code */
    return TE_FAIL(st < TE_OK && st >= TE_ERROR_INTERRUPTED ? st : TE_ERROR_STATE,
                   "plug-in %s: te_plugin_init returned %d: %s", name, (int)st, reason);
}

/* Makes a plug-in, with one user. */
static te_status make_plugin(te_plugin_init_function init, const char *name, te_plugin **out)
{
    te_plugin *made = calloc(1, sizeof *made);
    te_status st;
    TE_FAIL_IF(made == NULL, TE_ERROR_MEMORY, "plug-in %s: no memory to load it", name);
    made->init = init;
    made->last = &made->backends;
    made->users = 1;
    st = start(made, name);
    if (st != TE_OK) {
        free(made);
        return st;
    }
    (void)pthread_mutex_lock(&lock);
    made->next = plugins;
    plugins = made;
    (void)pthread_mutex_unlock(&lock);
    *out = made;
    return TE_OK;
}

te_status te_plugin_add(te_plugin_init_function init, const char *name, te_plugin **out)
{
    te_status st = TE_OK;
    *out = NULL;
    TE_FAIL_IF(init == NULL || name == NULL, TE_ERROR_INVALID, "plug-in: init is NULL");
    TE_FAIL_IF(registering != NULL || releasing > 0, TE_ERROR_STATE,
               "plug-in %s: one that %s may load no other", name,
               registering != NULL ? "registers" : "is released");
    (void)pthread_mutex_lock(&starting);
    *out = find_plugin(init);
    if (*out == NULL) st = make_plugin(init, name, out);
    (void)pthread_mutex_unlock(&starting);
    return st;
}

te_status te_plugin_load(const char *path, te_plugin **out)
{
    te_plugin_init_function init = NULL;
    void *library, *address;
    const char *why;
    *out = NULL;
    TE_FAIL_IF(path == NULL, TE_ERROR_INVALID, "plug-in: path is NULL");
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        why = dlerror();
        return TE_FAIL(TE_ERROR_INVALID, "plug-in: %s", why == NULL ? path : why); /* has it */
    }
    address = dlsym(library, "te_plugin_init");
    if (address == NULL) {
        (void)dlclose(library); /* none of its functions has run */
        return TE_FAIL(TE_ERROR_INVALID, "plug-in %s: it has no function te_plugin_init", path);
    }
    memcpy(&init, &address, sizeof init); /* C has no conversion for this, POSIX says it is one */
    return te_plugin_add(init, path, out);
}

void te_plugin_retain(te_plugin *plugin)
{
    (void)pthread_mutex_lock(&lock);
    plugin->users++;
    (void)pthread_mutex_unlock(&lock);
}

void te_plugin_release(te_plugin *plugin)
{
    int unused;
    if (plugin == NULL) return;
    (void)pthread_mutex_lock(&lock);
    unused = --plugin->users == 0;
    if (unused) {
        unlink_plugin(&plugins, plugin);
        plugin->generation = te_fork_generation();
        plugin->next = leaving;
        leaving = plugin;
    }
    (void)pthread_mutex_unlock(&lock);
    if (!unused) return;
    release_backends(plugin);
    (void)pthread_mutex_lock(&lock);
    unlink_plugin(&leaving, plugin);
    (void)pthread_cond_broadcast(&left);
    (void)pthread_mutex_unlock(&lock);
    free(plugin);
}

/* Nobody waits in a child, whatever its parent's threads did. */
static void renew_left(void)
{
    (void)pthread_cond_init(&left, NULL);
}

__attribute__((constructor)) static void watch_forks_of_left(void)
{
    (void)pthread_atfork(NULL, NULL, renew_left);
}

size_t te_plugin_slot_count(const te_plugin *plugin)
{
    size_t count = 0;
    for (const registered_backend *at = plugin->backends; at != NULL; at = at->next) {
        count += at->count;
    }
    return count;
}

const te_plugin_slot *te_plugin_slot_at(const te_plugin *plugin, size_t at)
{
    for (const registered_backend *in = plugin->backends; in != NULL; in = in->next) {
        if (at < in->count) return &in->records[at].slot;
        at -= in->count;
    }
    return NULL;
}
