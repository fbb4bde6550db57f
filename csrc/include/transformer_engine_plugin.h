/* SPDX-License-Identifier: Apache-2.0
 *
 * transformer_engine_plugin.h - operators in shared objects of their own, and how they are loaded.
 *
 * A plug-in is a shared object that exports te_plugin_init. It links with nothing of this library:
 * all that it calls is in the table of functions that it is handed, so it runs under any program
 * that has this library in whatever form. Of transformer_engine.h it uses types and macros alone
 * (link it with -Wl,-z,defs to be told of a function that slipped in). docs/plugins_contract.md
 * says what the functions of an operator may rely on and what they owe.
 *
 * Versions. The major number changes with what is not compatible: both sides refuse another one.
 * Within one, structs are only appended to: each begins with its size, which is that of whoever
 * made it, and enumerators keep their numbers. Whoever reads one reads no further than that size;
 * what it lacks is 0.
 */
#ifndef TRANSFORMER_ENGINE_PLUGIN_H
#define TRANSFORMER_ENGINE_PLUGIN_H

#include <transformer_engine.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TE_PLUGIN_ABI_MAJOR 1
#define TE_PLUGIN_ABI_MINOR 1
/* Of the interface as this header has it: uint32_t, the major number above the minor one. */
#define TE_PLUGIN_ABI ((uint32_t)TE_PLUGIN_ABI_MAJOR << 16 | (uint32_t)TE_PLUGIN_ABI_MINOR)

/* ---- what a plug-in gives ----------------------------------------------------------------- */

/* Who made a backend: what the tokens of policies name. */
typedef enum te_plugin_kind {
    TE_PLUGIN_VENDOR = 0,   /* the maker of a device, say: the usual one */
    TE_PLUGIN_DEFAULT = 1,  /* goes with this library's own */
    TE_PLUGIN_REFERENCE = 2 /* a definition to compare others with */
} te_plugin_kind;

/* One operator of a backend. */
typedef struct te_plugin_operator {
    size_t size;
    const char *name; /* "norm": of TE_OPS. A name, for their numbers may change */
    /* Bytes of the args struct that the functions may read: its sizeof, as they were compiled. A
     * library whose struct is smaller refuses the backend; one whose struct is larger does not
     * offer calls that use what comes behind. */
    size_t args_size;
    te_op_function function;
    te_op_supports supports;            /* NULL: takes every call */
    te_op_workspace_function workspace; /* NULL: needs none. args_size reaches the workspace */
    void *self;                         /* of these three */
} te_plugin_operator;

/* One of TE_OPS by its name: TE_PLUGIN_OPERATOR(norm, run, supports, NULL, self). */
#define TE_PLUGIN_OPERATOR(op, run, supports, workspace, self)                                     \
    {                                                                                              \
        sizeof(te_plugin_operator), #op, sizeof(te_##op##_args), run, supports, workspace, self    \
    }

typedef struct te_plugin_backend {
    size_t size;
    uint32_t abi;        /* TE_PLUGIN_ABI */
    te_plugin_kind kind; /* te_plugin_kind */
    /* Printable ASCII without , ; | and =, which separate names, and no space at an end. */
    const char *name;   /* of this backend alone: with "vendor." before it what policies name */
    const char *vendor; /* whose it is; VENDOR needs one, of others it may be NULL */
    te_device_type device;
    int32_t priority;                    /* among those of one token the highest is asked first */
    const te_plugin_operator *operators; /* an array; all of them have the size of the first */
    size_t operator_count;
    /* Called once when nothing can call the backend any more: when its last slot is dropped, or
     * where te_plugin_init fails after it has registered it. On any thread; a process may end
     * before. It loads no plug-in. NULL: nobody is told. */
    void (*release)(void *self);
    void *self;
} te_plugin_backend;

/* ---- what a plug-in is given -------------------------------------------------------------- */

/* Functions of the library, by the names that they have there without te_ (transformer_engine.h
 * says what each does), valid as long as the process lives. Any thread may call them. The first
 * four members are the same in every version. */
typedef struct te_host_api {
    size_t size;
    uint32_t abi;        /* TE_PLUGIN_ABI of the library */
    const char *version; /* of the library: TE_VERSION */
    te_status (*fail)(te_status kind, const char *file, int line, const char *format, ...)
#ifdef __GNUC__
        __attribute__((format(printf, 4, 5)))
#endif
        ;

    /* Adds a backend; all that is given is copied, names too. Only on the thread of te_plugin_init
     * and until that returns: STATE later on. INVALID for what is incomplete, has an unknown
     * operator or a name that the plug-in has used; UNSUPPORTED for what a later version has made.
     * The backend stays the caller's where it fails. */
    te_status (*register_backend)(const te_plugin_backend *backend);
    const char *(*last_error)(void);

    /* Operators. A call of one runs the backends that are registered with the library and its own,
     * and never what a policy has selected: a plug-in may call the operator that it replaces. */
    int32_t (*op_find)(const char *name); /* te_op of this library; -1: it has no such operator */
    const char *(*op_name)(te_op op);
    const te_op_info *(*op_describe)(te_op op);
    void (*op_initial)(te_op op, void *args);
    te_status (*op_workspace)(te_context *context, te_op op, const void *args, size_t *bytes);
    te_status (*op_run)(te_context *context, te_op op, const void *args, void *stream);
    te_device (*context_device)(const te_context *context);

    const char *(*dtype_name)(te_dtype dtype);
    int32_t (*dtype_bits)(te_dtype dtype);
    size_t (*dtype_bytes)(te_dtype dtype);
    size_t (*dtype_size)(te_dtype dtype, int64_t elements);
    float (*dtype_max)(te_dtype dtype);

    int64_t (*tensor_elements)(const te_tensor *tensor);
    /* All dims before the last as the rows of a matrix; an absent tensor as it is. The row stride
     * is -1 where they are no one distance apart. */
    te_tensor (*tensor_rows)(const te_tensor *tensor);
    /* Dense elements on the host to fp32, and back: to nearest even, FP8 saturates. INVALID for the
     * integers and for what is packed. */
    te_status (*to_f32)(te_dtype dtype, const void *elements, float *numbers, int64_t count);
    te_status (*from_f32)(te_dtype dtype, const float *numbers, void *elements, int64_t count);

    /* For the thread that called the operator: whether the call shall stop, with INTERRUPTED. At
     * most ten times a second: it may run handlers of signals. */
    int (*interrupted)(void);
    te_status (*counters_read)(te_counter *out, size_t capacity, size_t *count);

    /* From 1.1 on: for plug-ins of a device of their own, the number by which backends name it. */
    te_status (*device_type_add)(const char *name, int32_t dlpack, te_device_type *type);
    const char *(*device_type_name)(te_device_type type);
    /* What a backend tells of its products (1.1). */
    void (*count_gemm)(te_device_type device, te_dtype a, te_dtype b);
    void (*count_emulated)(te_scaling_mode mode);
    void (*count_mixed)(void);
    void (*count_attention)(te_device_type device, te_dtype dtype, int backward);
} te_host_api;

/* True where the library has a member of the table that came after 1.0. */
#define TE_HOST_HAS(host, member)                                                                  \
    ((host)->size >= offsetof(te_host_api, member) + sizeof(((te_host_api *)0)->member))
/* return TE_HOST_FAIL(host, TE_ERROR_DEVICE, "the queue of device %d is gone", index); */
#define TE_HOST_FAIL(host, kind, ...) ((host)->fail((kind), __FILE__, __LINE__, __VA_ARGS__))
/* First in te_plugin_init: returns where the host has another major number. */
#define TE_PLUGIN_REQUIRE(host, abi)                                                               \
    do {                                                                                           \
        if ((abi) >> 16 != TE_PLUGIN_ABI_MAJOR) {                                                  \
            return TE_HOST_FAIL(host, TE_ERROR_UNSUPPORTED,                                        \
                                "built for version %d of the plug-in interface, the library "      \
                                "(%s) has %u",                                                     \
                                TE_PLUGIN_ABI_MAJOR, (host)->version, (unsigned)((abi) >> 16));    \
        }                                                                                          \
    } while (0)

/* The function that a plug-in exports: it registers its backends. `abi` is host->abi. TE_OK also
 * where this process can run none of them and nothing is registered; after a failure nothing stays.
 * It loads no other plug-in. */
TE_API te_status te_plugin_init(const te_host_api *host, uint32_t abi);
typedef te_status (*te_plugin_init_function)(const te_host_api *host, uint32_t abi);

/* ---- for programs that load plug-ins ------------------------------------------------------ */

/* A plug-in that has registered. It is kept by those who hold it, and shared by them. */
typedef struct te_plugin te_plugin;

/* An operator of a plug-in, for a te_selection or a te_backend. */
typedef struct te_plugin_slot {
    size_t size;
    te_op op;
    te_device_type device;
    te_plugin_kind kind;
    int32_t priority;
    const char *backend, *vendor; /* vendor may be NULL */
    /* Runs it, counts that, and tells of a failure whose it is and of which shapes. */
    te_op_slot slot;
} te_plugin_slot;

/* Loads a shared object and lets it register; of one that somebody holds it gives that. A path
 * without a slash is looked for where the dynamic linker looks. It is never unloaded: its threads
 * may run on. INVALID where it can not be loaded or is no plug-in, else what te_plugin_init
 * returned; *out is NULL then. */
TE_API te_status te_plugin_load(const char *path, te_plugin **out);
/* The same of a plug-in that is linked with the program; `name` is for messages. */
TE_API te_status te_plugin_add(te_plugin_init_function init, const char *name, te_plugin **out);
TE_API void te_plugin_retain(te_plugin *plugin);
/* No call of its slots may come after the last one. NULL is legal. */
TE_API void te_plugin_release(te_plugin *plugin);

TE_API size_t te_plugin_slot_count(const te_plugin *plugin);
/* In the order of registration; NULL from te_plugin_slot_count on. */
TE_API const te_plugin_slot *te_plugin_slot_at(const te_plugin *plugin, size_t at);
/* How often it ran without an error, in this process. */
TE_API int64_t te_plugin_slot_calls(const te_plugin_slot *slot);

#ifdef __cplusplus
}
#endif
#endif
