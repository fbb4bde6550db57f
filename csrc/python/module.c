/* SPDX-License-Identifier: Apache-2.0
 *
 * module.c - transformer_engine._core: method table, constants, and the life of the module's state.
 *
 * Multi-phase initialisation and the limited API of CPython 3.11: one binary for every later
 * version, and a module object that can be made twice and collected. m_free runs m_clear, so exec
 * just fails.
 */
#include "python/args.h"
#include "xla/handlers.h"

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    tepy_state *state = tepy_state_of(module);
    int result = tepy_state_visit(state, visit, arg);
    if (result == 0) result = tepy_scopes_visit(state, visit, arg);
    return result != 0 ? result : tepy_backends_visit(state, visit, arg);
}

static int module_clear(PyObject *module)
{
    tepy_state *state = tepy_state_of(module);
    tepy_scopes_clear(state);
    tepy_backends_clear(state);
    tepy_state_clear(state);
    return 0;
}

static void module_free(void *module)
{
    (void)module_clear(module);
    tepy_operators_free(tepy_state_of(module)); /* functions hold the module: there are none now */
}

/* Numbers of the public headers by their names there, less the TE_. */
#define NUMBERS(C)                                                                                 \
    C(DEVICE_CPU), C(DEVICE_CUDA), C(DEVICE_INDICES), C(RECIPE_NONE), C(RECIPE_DELAYED),           \
        C(RECIPE_CURRENT), C(RECIPE_BLOCK), C(RECIPE_ROW), C(RECIPE_MXFP8), C(RECIPE_NVFP4),       \
        C(DIRECTION_FORWARD), C(DIRECTION_BACKWARD), C(DIRECTION_DEFERRED), C(PORT_GIVEN),         \
        C(PORT_MADE), C(SYMBOL_ROWS), C(SYMBOL_DIM_0), C(SYMBOL_DIM_1), C(SYMBOL_SOURCE_ROWS),     \
        C(SYMBOL_SOURCE_DIM_0), C(SYMBOL_SOURCE_DIM_1), C(SYMBOL_SEQUENCES),                       \
        C(SYMBOL_MAX_QUERIES), C(SYMBOL_MAX_KEYS), C(NODE_MAX_SCORES), C(NODE_LINEAR),             \
        C(NODE_NORM), C(NODE_ACTIVATION), C(NODE_SOFTCAP), C(NODE_ATTENTION), C(NODE_ROPE),        \
        C(NODE_DROPOUT_ADD), C(NODE_HEAD_NORM), C(NODE_FUNCTION), C(NODE_CONVERT),                 \
        C(NODE_COLLECTIVE), C(COLLECTIVE_GATHER), C(COLLECTIVE_REDUCE_SCATTER),                    \
        C(COLLECTIVE_ALL_REDUCE), C(COLLECTIVE_COPY), C(COLLECTIVE_FORMS),                         \
        C(COLLECTIVE_PIECES_FORWARD), C(COLLECTIVE_PIECES_BACKWARD), C(COLLECTIVE_EXCHANGE),       \
        C(NORM_HEAD_COLUMNS), C(VALUE_INPUT), C(VALUE_PARAMETER), C(VALUE_RESULT),                 \
        C(VALUE_LEADING), C(VALUE_GRADIENT), C(VALUE_ACCUMULATE), C(VALUE_OVERWRITE),              \
        C(VALUE_DEFER), C(VALUE_KEEP_QUANTIZED), C(VALUE_QUANTIZED), C(VALUE_ROW_WISE),            \
        C(VALUE_RETURN_QUANTIZED), C(VALUE_ALSO_WIDE), C(VALUE_ROUNDED), C(BACKWARD_QUANTIZED),    \
        C(CAST_POWER_2), C(CAST_TILES_2D), C(CAST_HADAMARD), C(CAST_STOCHASTIC),                   \
        C(CAST_FOUR_OVER_SIX), C(CAST_SQUARED), C(CAST_TO_256), C(CAST_UNSIGNED),                  \
        C(CAST_ROW_SCALED), C(RECIPE_EXTERNAL), C(BACKWARD_HIGH_PRECISION),                        \
        C(BACKWARD_DEQUANTIZED), C(LINEAR_SAVE_INPUT), C(LINEAR_NO_AMAX), C(LINEAR_ALLOW_TF32),    \
        C(LINEAR_FAST_OUTPUT), C(LINEAR_FAST_GRAD_INPUT), C(LINEAR_FAST_GRAD_WEIGHT),              \
        C(LINEAR_MEASURE_OPERANDS), C(LINEAR_MEASURE_GRAD), C(LINEAR_MEASURE_RETURNED),            \
        C(LINEAR_WEIGHT_TRANSPOSED), C(NODE_ZERO_CENTERED), C(NODE_SEQUENCE_FIRST),                \
        C(NODE_BOTTOM_RIGHT), C(NODE_INTERLEAVED), C(NODE_DETERMINISTIC), C(NODE_PACKED),          \
        C(NODE_FP8_GRADIENT), C(ANY_LENGTH), C(GRAPH_RECOMPUTE), C(OPERAND_ROLES),                 \
        C(AMAX_PARTIALS), C(AMAX_MAX), C(AMAX_MOST_RECENT), C(EPILOGUE_NONE), C(EPILOGUE_GELU),    \
        C(NORM_LAYERNORM), C(NORM_RMSNORM), C(NORM_L2), C(UPDATE_ADAM), C(UPDATE_SGD),             \
        C(UPDATE_SCALE), C(UPDATE_DECOUPLED), C(UPDATE_CORRECTED), C(UPDATE_NESTEROV),             \
        C(UPDATE_FIRST), C(UPDATE_DECAY_LAST), C(UPDATE_WRITE_GRAD), C(UPDATE_RESCALE),            \
        C(UPDATE_POWER_2), C(UPDATE_CHECK), C(L2NORM_CHECK)

typedef struct constant {
    const char *name;
    long value;
} constant;

static const constant constants[] = {
#define X(NAME, name, bits, dlpack, cuda, max) {"DTYPE_" #NAME, TE_DTYPE_##NAME},
    TE_DTYPES(X)
#undef X
#define X(NAME, name, gated) {"ACTIVATION_" #NAME, TE_ACTIVATION_##NAME},
        TE_ACTIVATIONS(X)
#undef X
#define X(NAME, name, along, across) {"SCALING_" #NAME, TE_SCALING_##NAME},
            TE_SCALING_MODES(X)
#undef X
#define X(NAME)                                                                                    \
    {                                                                                              \
#NAME, TE_##NAME                                                                           \
    }
                NUMBERS(X)
#undef X
};

/* Adds a new reference (or fails on NULL); the reference is taken either way. */
static int add_object(PyObject *module, const char *name, PyObject *object)
{
    int result = PyModule_AddObjectRef(module, name, object);
    Py_XDECREF(object);
    return result;
}

static int add_constants(PyObject *module)
{
    for (size_t i = 0; i < sizeof constants / sizeof constants[0]; i++) {
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) != 0) return -1;
    }
    if (add_object(module, "LINEAR_STAGES", TEPY_NAMES(TE_LINEAR_STAGES)) != 0 ||
        add_object(module, "ATTENTION_INPUTS", TEPY_NAMES(TE_ATTENTION_INPUTS)) != 0 ||
        add_object(module, "ATTENTION_NUMBERS", TEPY_NAMES(TE_ATTENTION_NUMBERS)) != 0) {
        return -1;
    }
    if (PyModule_AddIntConstant(module, "XLA_SCRATCH_ALIGN", TE_XLA_SCRATCH_ALIGN) != 0) return -1;
    return PyModule_AddStringConstant(module, "version", TE_VERSION);
}

static int module_exec(PyObject *module)
{
    static const char *const keys[] = {
#define X(NAME, text) text,
        TEPY_KEYS(X)
#undef X
    };
    tepy_state *state = tepy_state_of(module);
    for (int key = 0; key < TEPY_KEY_COUNT; key++) {
        if ((state->keys[key] = PyUnicode_InternFromString(keys[key])) == NULL) return -1;
    }
#define X(name, stage, title)                                                                      \
    if ((state->name = tepy_make_##name(module)) == NULL ||                                        \
        PyModule_AddObjectRef(module, title, state->name) != 0) {                                  \
        return -1;                                                                                 \
    }
    TEPY_TYPES(X)
#undef X
    state->frames = PyThread_tss_alloc();
    if (state->frames == NULL || PyThread_tss_create(state->frames) != 0) return tepy_no_memory();
    if (tepy_records_add(module) != 0) return -1;
    if (add_constants(module) != 0 || tepy_operators_add(module) != 0) return -1;
    return tepy_state_verify(state, TEPY_INIT);
}

PyObject *tepy_op_names(PyObject *module, PyObject *unused)
{
    return TEPY_NAMES(TE_OPS);
}

PyObject *tepy_activation_names(PyObject *module, PyObject *unused)
{
    return TEPY_NAMES(TE_ACTIVATIONS);
}

PyObject *tepy_has_cuda(PyObject *module, PyObject *unused)
{
#ifdef TE_WITH_CUDA
    return Py_NewRef(Py_True);
#else
    return Py_NewRef(Py_False);
#endif
}

#define X(name, takes_tensors, low, high, parameters)                                              \
    static PyObject *call_##name TEPY_PARAMS_FAST                                                  \
    {                                                                                              \
        if ((takes_tensors) && tepy_require_torch(tepy_state_of(module), #name) != 0) return NULL; \
        return tepy_count(#name, nargs, low, high) != 0 ? NULL : tepy_##name(module, args, nargs); \
    }
TEPY_CHECKED_FUNCTIONS(X)
#undef X

/* Every convention's function goes through a PyCFunction in the table, as CPython wants it. */
static PyMethodDef module_methods[] = {
#define METHOD(name, function, flags, parameters)                                                  \
    {#name, (PyCFunction)(void (*)(void))(function), flags,                                        \
     #name "($module, " parameters ")\n--\n\n"},
#define X(name, takes_tensors, low, high, parameters)                                              \
    METHOD(name, call_##name, METH_FASTCALL, parameters)
    TEPY_CHECKED_FUNCTIONS(X)
#undef X
#define X(name, convention, parameters)                                                            \
    METHOD(name, tepy_##name, TEPY_FLAGS_##convention, parameters)
        TEPY_FUNCTIONS(X)
#undef X
            {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "transformer_engine._core",
    .m_doc = "Plans, operators, backends and counters over framework tensors; see _core.pyi.",
    .m_size = sizeof(tepy_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&module_def);
}
