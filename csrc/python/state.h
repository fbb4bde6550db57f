/* SPDX-License-Identifier: Apache-2.0
 *
 * state.h - the module's state and what the files of csrc/python share.
 *
 * Every Python object that the module keeps is in one of the two lists below. They generate the
 * head of the struct, which is visited and cleared, and the check that a stage of the set-up left
 * none of its slots empty, so these can not drift apart. There is no process-wide state in here:
 * two instances of the module share nothing but what libtransformer_engine itself shares.
 */
#ifndef TE_PYTHON_STATE_H
#define TE_PYTHON_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "transformer_engine.h"

#include "python/dlpack.h"

/* The CPU, then the devices of each other type by index. */
#define TEPY_DEVICES (1 + (TE_DEVICE_COUNT - 1) * TE_DEVICE_INDICES)

/* When a slot is filled: INIT by the module's exec, BIND by bind_torch, LAZY at first use. */
typedef enum tepy_stage { TEPY_INIT, TEPY_BIND, TEPY_LAZY } tepy_stage;

/* X(name, stage, title): the types that the module has under their titles. */
#define TEPY_TYPES(X)                                                                              \
    X(context_type, INIT, "Context")                                                               \
    X(plan_type, INIT, "Plan")                                                                     \
    X(operator_type, INIT, "Operator")                                                             \
    X(scope_type, INIT, "Scope")                                                                   \
    X(selection_type, INIT, "Selection")                                                           \
    X(dispatcher_type, INIT, "Dispatcher")                                                         \
    X(predicate_type, INIT, "Predicate")                                                           \
    X(implementation_type, INIT, "Implementation")                                                 \
    X(choice_type, INIT, "Choice")                                                                 \
    X(leaving_type, INIT, "Leaving")                                                               \
    X(entering_type, INIT, "Entering")                                                             \
    X(native_slot_type, INIT, "NativeSlot")

/* X(name, stage, ...) */
#define TEPY_STATE_REFS(X)                                                                         \
    TEPY_TYPES(X)                                                                                  \
    X(plugins, LAZY)          /* {address of a te_plugin: its NativeSlots} */                      \
    X(dispatcher, LAZY)       /* whose selections runs of plans obey */                            \
    X(find_dispatcher, LAZY)  /* callable that looks for one */                                    \
    X(before_cuda, LAZY)      /* callable that raises where CUDA is not to be used */              \
    X(meet_device, LAZY)      /* callable that adds the type of device of a tensor */              \
    X(labels, LAZY)           /* a threading.local: where threads show the scopes they are in */   \
    X(empty_like, BIND)       /* torch.empty_like */                                               \
    X(empty, BIND)            /* torch.empty */                                                    \
    X(device_type, BIND)      /* torch.device */                                                   \
    X(tensor_type, BIND)      /* torch.Tensor */                                                   \
    X(parameter_type, BIND)   /* torch.nn.Parameter */                                             \
    X(dtype_getter, BIND)     /* the descriptor torch.Tensor.dtype */                              \
    X(is_neg, BIND)           /* torch.Tensor.is_neg, unbound */                                   \
    X(exchange_capsule, BIND) /* keeps `exchange` alive */                                         \
    X(classify, BIND)         /* callable for subclasses, or None */

/* X(NAME, text): keywords, and attributes that are read, interned. */
#define TEPY_KEYS(X)                                                                               \
    X(DTYPE, "dtype")                                                                              \
    X(DEVICE, "device")                                                                            \
    X(REQUIRES_GRAD, "requires_grad")                                                              \
    X(MODULE, "__module__")                                                                        \
    X(CALL, "__call__")                                                                            \
    X(PLANNED, "IS_PLANNED")                                                                       \
    X(OWN_FORWARD, "_FORWARD")                                                                     \
    X(FORWARD, "forward")                                                                          \
    X(COMPILED, "_compiled_call_impl")                                                             \
    X(HOOKS, "_forward_hooks") /* first of those of modules */                                     \
    X(PRE_HOOKS, "_forward_pre_hooks")                                                             \
    X(BACKWARD_HOOKS, "_backward_hooks")                                                           \
    X(BACKWARD_PRE_HOOKS, "_backward_pre_hooks") /* last */

typedef enum tepy_key {
#define X(NAME, text) TEPY_KEY_##NAME,
    TEPY_KEYS(X)
#undef X
        TEPY_KEY_COUNT
} tepy_key;

/* X(name, count, stage) */
#define TEPY_STATE_ARRAYS(X)                                                                       \
    X(dtypes, TE_DTYPE_COUNT, BIND)          /* torch dtypes by te_dtype */                        \
    X(device_names, TE_DEVICE_COUNT, LAZY)   /* torch's, of types that are met */                  \
    X(device_streams, TE_DEVICE_COUNT, LAZY) /* callables: the current stream of an index */       \
    X(contexts, TEPY_DEVICES, LAZY)          /* Context objects by device */                       \
    X(tuning, TEPY_DEVICES, LAZY)  /* by device: NULL: off; the cache file's path, or None */      \
    X(devices, TEPY_DEVICES, LAZY) /* torch.device objects by device */                            \
    X(empty_kwargs, (TEPY_DEVICES * TE_DTYPE_COUNT), LAZY) /* {dtype, device} by both */           \
    X(field_names, TE_OP_COUNT, INIT)      /* names of the fields of each operator, interned */    \
    X(record_types, TE_RECORD_COUNT, INIT) /* named tuples by te_record_number */                  \
    X(keys, TEPY_KEY_COUNT, INIT)

typedef struct tepy_backend tepy_backend; /* backend_py.c */
typedef struct tepy_frame tepy_frame;     /* scope_py.c */

typedef struct tepy_state {
#define X(name, ...) PyObject *name;
    TEPY_STATE_REFS(X)
#undef X
#define X(name, count, stage) PyObject *name[count];
    TEPY_STATE_ARRAYS(X)
#undef X
    const tepy_dl_exchange *exchange; /* NULL until bind_torch */
    tepy_backend *backends;           /* linked list of those registered through this module */
    PyMethodDef *operators;           /* of the operators' functions; NULL until they are added */
    Py_tss_t *frames;     /* of each thread: the scopes that it is in; NULL: none any more */
    tepy_frame *entered;  /* linked list of the frames of all threads */
    int found_dispatcher; /* find_dispatcher was called, and found none */
    unsigned long long published;       /* how often tables were; from 1 on */
    unsigned long long told_dispatcher; /* how often it was told which one, or to look anew */
} tepy_state;

static inline tepy_state *tepy_state_of(PyObject *module)
{
    return (tepy_state *)PyModule_GetState(module);
}

/* Puts a new reference into a slot and drops what was there. */
static inline void tepy_set(PyObject **slot, PyObject *value)
{
    PyObject *old = *slot;
    *slot = value;
    Py_XDECREF(old);
}

/* Makes an item part of a tuple that is being made, which becomes NULL where either is NULL. */
static inline void tepy_fill(PyObject **tuple, Py_ssize_t at, PyObject *item)
{
    if (item == NULL || PyTuple_SetItem(*tuple, at, item) != 0) Py_CLEAR(*tuple);
}

/* New reference: the names of a list of X(NAME, name, ...). */
#define TEPY_NAMES(list) Py_BuildValue("(" list(TEPY_FORMAT) ")" list(TEPY_NAME))
#define TEPY_FORMAT(...) "s"
#define TEPY_NAME(NAME, name, ...) , #name

/* ---- errors.c ---- */

/* Where an argument stands, for messages: "quantize: scale: ...". */
typedef struct tepy_site {
    const char *function, *argument;
} tepy_site;

/* Sets the exception of a failed status and returns NULL. With CALLBACK it is set already. */
PyObject *tepy_raise(te_status status);
/* 0, or -1 with the exception of a failed status. */
int tepy_check(te_status status);
/* Sets MemoryError; returns -1. */
int tepy_no_memory(void);
/* Sets `exception` with the text "function: argument: ..."; returns -1. */
int tepy_fail(PyObject *exception, tepy_site site, const char *format, ...);
/* The same for functions that return a pointer: NULL. */
#define TEPY_FAIL(...) (tepy_fail(__VA_ARGS__), (void *)NULL)
/* The same, and %U in the text is what `object` is: the value of a number, a str or None, of others
 * the class alone. The repr of a tensor may be long, or crash where its memory is gone. */
int tepy_fail_showing(PyObject *exception, tepy_site site, const char *format, PyObject *object);
/* The same with the exception that is set as its cause. */
int tepy_fail_from_current(PyObject *exception, tepy_site site, const char *fix);
/* TypeError "expected `what`, got" the class of an object. */
int tepy_expected(tepy_site site, const char *what, PyObject *object);
#define TEPY_EXPECTED(...) (tepy_expected(__VA_ARGS__), (void *)NULL)
/* The exception that is set, which is cleared: a new reference, or NULL; and set again, which takes
 * the reference. The limited API has both from 3.12 on. */
PyObject *tepy_take_error(void);
void tepy_set_error(PyObject *error);
/* Sets it again with a note, which may be NULL; both references are taken. */
void tepy_set_error_noted(PyObject *error, PyObject *note);

/* ---- state.c ---- */

/* 0, or -1 with SystemError where a slot that is filled at `stage` is empty. */
int tepy_state_verify(const tepy_state *state, tepy_stage stage);
int tepy_state_visit(tepy_state *state, visitproc visit, void *arg);
void tepy_state_clear(tepy_state *state);

/* ---- gil.c ---- */

/* The time that a native call runs without the GIL. An operator that computes for long lets this
 * thread run signal handlers; one that raises stops it. */
typedef struct tepy_without_gil {
    PyThreadState *thread; /* NULL: the GIL is held */
    te_interrupt outer;
} tepy_without_gil;

void tepy_leave_gil(tepy_without_gil *without);
void tepy_retake_gil(tepy_without_gil *without); /* does nothing where it was not left */

/* ---- torch_py.c ---- */

/* 0, or -1 with RuntimeError where bind_torch has not been called. */
int tepy_require_torch(const tepy_state *state, const char *function);
/* Index into the arrays by device; -1 with ValueError where there is no such device. */
int tepy_device_slot(te_device device);
/* New reference: torch.empty of this shape. */
PyObject *tepy_empty(tepy_state *state, te_device device, te_dtype dtype, const int64_t *shape,
                     int32_t ndim);
/* Address of a tensor that torch.empty just made; -1 with an exception where it has no memory, less
 * than `bytes`, or on another device: a mode of torch may change what that gives. */
int tepy_fresh_data(const tepy_state *state, PyObject *tensor, tepy_site site, te_device device,
                    int64_t bytes, void **data);

/* ---- storage_py.c ---- */

/* New reference: a tensor over a view of `whole`'s memory, which keeps it; NULL: over memory of the
 * caller, which outlives the tensor. */
PyObject *tepy_share(const tepy_state *state, PyObject *whole, const te_tensor *view);

/* ---- context_py.c ---- */

typedef struct tepy_context {
    PyObject_HEAD te_context *context; /* NULL: closed */
    te_device device;
    int users;        /* calls in flight; guarded by the GIL */
    uint64_t ops_met; /* operators that have run from Python, as bits; likewise */
} tepy_context;

/* New reference to `given` (an object or None/NULL: the module's own of `device`), checked and with
 * its users counted up; NULL with an exception. Every one goes back through tepy_context_release.
 */
tepy_context *tepy_context_acquire(tepy_state *state, const char *function, PyObject *given,
                                   te_device device);
void tepy_context_release(tepy_context *context); /* NULL is legal */
/* Runs a call of the library on the module's own context of a device and torch's current stream; on
 * the CPU it computes without the GIL. 0, or -1 with an exception. */
int tepy_context_run(tepy_state *state, const char *function, te_device device,
                     te_status (*run)(te_context *context, const void *args, void *stream),
                     const void *args);

/* ---- what the families give to module.c ---- */

/* Create types; new references. */
#define X(name, stage, title) PyObject *tepy_make_##name(PyObject *module);
TEPY_TYPES(X)
#undef X
int tepy_records_add(PyObject *module);
int tepy_backends_visit(tepy_state *state, visitproc visit, void *arg);
void tepy_backends_clear(tepy_state *state);
/* Adds a function per operator; what they are made of lives in the state for as long as they do. */
int tepy_operators_add(PyObject *module);
void tepy_operators_free(tepy_state *state);

/* ---- scope_py.c ---- */

/* Visits and gives up what scopes that were entered and not left hold. */
int tepy_scopes_visit(tepy_state *state, visitproc visit, void *arg);
void tepy_scopes_clear(tepy_state *state);

/* ---- operators_py.c ---- */

/* Borrowed: the name of a field; for the number of fields itself "context". Keywords of a call are
 * the same objects. */
static inline PyObject *tepy_field_name(const tepy_state *state, te_op op, int at)
{
    return PyTuple_GetItem(state->field_names[op], at);
}
/* Number of the operator that a str names; -1 with an exception. */
int tepy_op_by_name(PyObject *name, tepy_site site);
/* New reference: what a field has for a value; None for a field that is no number. */
PyObject *tepy_number(const te_field *field, double value);

/* Who runs a call: one slot, or (NULL) the operator table, and before that a selection, if any. */
typedef struct tepy_slot_call {
    const te_op_slot *slot;
    const te_selection *selection;
    te_device_type device; /* that it runs on */
    int asked;             /* it is not run: the result is whether it would be */
} tepy_slot_call;

/* Fills the args struct of an operator (`args` has room for it) from its first argument and a dict
 * of the others. *held becomes a new reference to a list of what its pointers need, or NULL. */
int tepy_take_args(PyObject *module, te_op op, PyObject *first, PyObject *fields, void *args,
                   PyObject **held);
/* Runs an operator with arguments as its function of the module takes them. New reference: None, or
 * a bool where that is asked. */
PyObject *tepy_call_operator(PyObject *module, te_op op, tepy_slot_call by, PyObject *const *given,
                             Py_ssize_t nargs, PyObject *names);

#define TEPY_MOST_HEADS 3 /* tensors of facts_of_heads */

/* X(name, takes tensors, fewest arguments, most, parameters): functions of the module that are
 * called when torch is bound, if they take tensors, and with so many arguments. _core.pyi says what
 * each does. */
#define TEPY_CHECKED_FUNCTIONS(X)                                                                  \
    X(bind_torch, 0, 1, 2, "torch_module, classify=None, /")                                       \
    X(tensors_of_call, 1, 2, 2, "inp, places, /")                                                  \
    X(facts_of_heads, 1, 1, TEPY_MOST_HEADS, "/, *tensors")                                        \
    X(only_forward, 0, 3, 3, "modules, call, prefix, /")                                           \
    X(make_plan, 0, 2, 2, "direction, graph, /")                                                   \
    X(write_graph, 0, 2, 2, "direction, graph, /")                                                 \
    X(plan_infer, 0, 2, 2, "plan, rows, /")                                                        \
    X(plan_ports, 0, 3, 3, "plan, first, end, /")                                                  \
    X(plan_scratch, 0, 3, 4, "plan, rows, device_type, device_index=0, /")                         \
    X(op_workspace, 0, 3, 4, "name, fields, device_type, device_index=0, /")                       \
    X(lie_in, 1, 3, 3, "tensor, parts, rows, /")                                                   \
    X(split_storage, 1, 2, 2, "tensor, rows, /")                                                   \
    X(cuda_configure, 0, 1, 2, "force_source, cache_dir=None, /")                                  \
    X(tune_gemm, 0, 3, 4, "device_type, device_index, enabled, cache_file=None, /")                \
    X(update, 1, 7, 8, "kind, flags, lists, flag, numbers, step, device_numbers, casts=None, /")   \
    X(l2norm, 1, 4, 5, "tensors, factor, flag, per_tensor, flags=0, /")                            \
    X(add_device_type, 0, 2, 2, "name, dlpack, /")                                                 \
    X(device_is_met, 0, 3, 3, "device_type, torch_name, stream, /")                                \
    X(count_gemm, 0, 3, 3, "device_type, a, b, /")                                                 \
    X(count_attention, 0, 3, 3, "device_type, dtype, backward, /")                                 \
    X(register_backend, 1, 4, 4, "name, device_type, priority, functions, /")

/* Calling conventions of the others: parameters of the C function and flags of its method. */
#define TEPY_PARAMS_FAST (PyObject * module, PyObject *const *args, Py_ssize_t nargs)
#define TEPY_PARAMS_ONE (PyObject * module, PyObject * arg)
#define TEPY_PARAMS_NONE (PyObject * module, PyObject * unused)
#define TEPY_FLAGS_FAST METH_FASTCALL
#define TEPY_FLAGS_ONE METH_O
#define TEPY_FLAGS_NONE METH_NOARGS

/* X(name, convention, parameters): all others but the operators. */
#define TEPY_FUNCTIONS(X)                                                                          \
    X(dtype_code, ONE, "dtype, /")                                                                 \
    X(torch_dtype, ONE, "code, /")                                                                 \
    X(dtype_names, NONE, "/")                                                                      \
    X(op_names, NONE, "/")                                                                         \
    X(activation_names, NONE, "/")                                                                 \
    X(has_cuda, NONE, "/")                                                                         \
    X(xla_handlers, NONE, "/")                                                                     \
    X(read_graph, ONE, "text, /")                                                                  \
    X(plan_count, NONE, "/")                                                                       \
    X(plan_describe, ONE, "plan, /")                                                               \
    X(run, FAST, "plan, slot_fwd, slot_bwd, /, *tensors")                                          \
    X(run_consuming, FAST, "plan, slot_fwd, slot_bwd, /, *tensors")                                \
    X(run_staged, FAST,                                                                            \
      "plan, slot_fwd, slot_bwd, functions, observer, make_buffers, /, *tensors")                  \
    X(close_contexts, NONE, "/")                                                                   \
    X(op_fields, ONE, "name, /")                                                                   \
    X(obeying, ONE, "name, /")                                                                     \
    X(unregister_backend, ONE, "name, /")                                                          \
    X(load_plugin, ONE, "path, /")                                                                 \
    X(obey, ONE, "dispatcher, /")                                                                  \
    X(find_selections, ONE, "find, /")                                                             \
    X(meet_devices, ONE, "meet, /")                                                                \
    X(device_type_name, ONE, "device_type, /")                                                     \
    X(count_emulated, ONE, "mode, /")                                                              \
    X(count_mixed, NONE, "/")                                                                      \
    X(before_cuda, ONE, "check, /")                                                                \
    X(selected, NONE, "/")                                                                         \
    X(unselected, NONE, "/")                                                                       \
    X(selection_number, NONE, "/")                                                                 \
    X(selected_function, ONE, "name, /")                                                           \
    X(label_scopes, ONE, "labels, /")                                                              \
    X(policy_in_force, NONE, "/")                                                                  \
    X(counters, NONE, "/")                                                                         \
    X(reset_counters, NONE, "/")

#define X(name, ...) PyObject *tepy_##name TEPY_PARAMS_FAST;
TEPY_CHECKED_FUNCTIONS(X)
#undef X
#define X(name, convention, parameters) PyObject *tepy_##name TEPY_PARAMS_##convention;
TEPY_FUNCTIONS(X)
#undef X

#endif
