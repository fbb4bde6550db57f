/* SPDX-License-Identifier: Apache-2.0
 *
 * layer_ops_py.c - the operators of a Transformer layer.
 *
 * Softmax, dropout and rotary embedding are called once per layer and step, so arguments arrive as
 * an array (METH_FASTCALL) and one table per operator says which name fills which field of its args
 * struct: nothing is allocated between Python and the operator. What an operator demands of its
 * arguments is checked in core/check_layer.c.
 */
#include "python/op_call.h"

#include <stddef.h>
#include <string.h>

typedef enum param_kind {
    PARAM_ROWS,       /* te_tensor, a matrix of all leading dims, read */
    PARAM_ROWS_OUT,   /* the same, written */
    PARAM_VECTOR,     /* te_tensor of one dim, read */
    PARAM_VECTOR_OUT, /* the same, written */
    PARAM_DIMS,       /* te_tensor, dims and strides as they are, read */
    PARAM_DIMS_OUT,   /* the same, written */
    PARAM_MASK,       /* PARAM_DIMS of u8 or bool */
    PARAM_FLOATS,     /* float *, `detail` elements */
    PARAM_INT64S,     /* int64_t *, `detail` elements */
    PARAM_FLOAT,      /* float */
    PARAM_INT,        /* int32_t or an enum */
    PARAM_LONG,       /* int64_t */
    PARAM_TRUTH,      /* int32_t, 0 or 1 */
    PARAM_BIT,        /* bit `detail` of a uint32_t */
    PARAM_CONTEXT     /* of the call */
} param_kind;

/* How a parameter may be given. */
typedef enum param_place {
    BY_POSITION, /* or by keyword; required */
    BY_NAME,     /* by keyword; required */
    OPTIONAL     /* by keyword; the field keeps its value without it */
} param_place;

typedef struct param {
    const char *name;
    size_t offset;
    int64_t detail;
    param_kind kind;
    param_place place;
} param;

#define MAX_PARAMS 24

/* What a call of METH_FASTCALL | METH_KEYWORDS is made of. */
typedef struct arguments {
    PyObject *module;
    PyObject *const *values; /* by position, then by the names */
    Py_ssize_t positional;
    PyObject *names; /* tuple of str, or NULL */
} arguments;

/* An operator and its args struct: what a call begins with, and where its parts are. */
typedef struct layer_op {
    te_op op;
    const param *params;  /* the last one has no name; tensors come before pointers to elements */
    const void *defaults; /* an args struct */
    size_t size;          /* of it */
    size_t quantized;     /* offset of the FP8 form of its result; 0: it has none */
    size_t workspace, workspace_size; /* offsets; 0: it has none */
} layer_op;

typedef union any_args {
#define X(NAME, name) te_##name##_args name;
    TE_OPS(X)
#undef X
} any_args;

/* ---- which value is whose ---- */

static int fail_call(const char *function, const char *format, const char *name)
{
    PyErr_Format(PyExc_TypeError, format, function, name);
    return -1;
}

/* The parameter of this name, looked for from `from` on and around; -1 with an exception. */
static int find_param(const char *function, const param *params, int count, PyObject *name,
                      int from)
{
    for (int step = 0; step < count; step++) {
        int at = from + step < count ? from + step : from + step - count;
        if (PyUnicode_CompareWithASCIIString(name, params[at].name) == 0) return at;
    }
    PyErr_Format(PyExc_TypeError, "%s: unexpected keyword argument %R", function, name);
    return -1;
}

/* Sorts the values by parameter; NULL where none is given. */
static int sort_values(const char *function, const param *params, const arguments *given,
                       PyObject **values)
{
    Py_ssize_t named = given->names == NULL ? 0 : PyTuple_Size(given->names);
    int count = 0, places = 0, next;
    for (; params[count].name != NULL; count++) {
        values[count] = NULL;
        if (params[count].place == BY_POSITION) places = count + 1;
    }
    if (tepy_count(function, given->positional, 0, places) != 0) return -1;
    for (int i = 0; i < (int)given->positional; i++) values[i] = given->values[i];
    next = (int)given->positional;
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GetItem(given->names, i); /* borrowed */
        int at = name == NULL ? -1 : find_param(function, params, count, name, next);
        if (at < 0) return -1;
        if (values[at] != NULL) {
            return fail_call(function, "%s: %s: given by name and position", params[at].name);
        }
        values[at] = given->values[given->positional + i];
        next = at + 1;
    }
    for (int i = 0; i < count; i++) {
        if (params[i].place == OPTIONAL) continue;
        if (values[i] == NULL) {
            return fail_call(function, "%s: %s: missing required argument", params[i].name);
        }
        if (params[i].kind <= PARAM_MASK && values[i] == Py_None) {
            return fail_call(function, "%s: %s: expected a torch.Tensor, got None", params[i].name);
        }
    }
    return 0;
}

/* ---- from a value to its field ---- */

static int take_view(tepy_op_call *call, const param *p, PyObject *value, void *field)
{
    static const struct {
        tepy_form form;
        tepy_access access;
    } as[] = {
        [PARAM_ROWS] = {TEPY_ROWS, TEPY_READ},     [PARAM_ROWS_OUT] = {TEPY_ROWS, TEPY_WRITE},
        [PARAM_VECTOR] = {TEPY_VECTOR, TEPY_READ}, [PARAM_VECTOR_OUT] = {TEPY_VECTOR, TEPY_WRITE},
        [PARAM_DIMS] = {TEPY_DIMS, TEPY_READ},     [PARAM_DIMS_OUT] = {TEPY_DIMS, TEPY_WRITE},
        [PARAM_MASK] = {TEPY_MASK, TEPY_READ},
    };
    tepy_want want = {{call->function, p->name}, as[p->kind].form, as[p->kind].access, NULL};
    return tepy_op_take(call, value, &want, field);
}

static int take_elements(tepy_op_call *call, const param *p, PyObject *value, void *field)
{
    void *data = NULL;
    if (tepy_op_elements(call, value, p->name,
                         p->kind == PARAM_INT64S ? TE_DTYPE_I64 : TE_DTYPE_F32, p->detail,
                         &data) != 0) {
        return -1;
    }
    memcpy(field, &data, sizeof data); /* float * and int64_t * look alike */
    return 0;
}

static int take_number(const tepy_op_call *call, const param *p, PyObject *value, void *field)
{
    const int wide = p->kind == PARAM_LONG;
    const tepy_site site = {call->function, p->name};
    int64_t whole = 0;
    double real = 0.0;
    if (p->kind == PARAM_FLOAT) {
        if (tepy_float(value, site, &real) != 0) return -1;
        *(float *)field = (float)real;
        return 0;
    }
    if (tepy_int(value, site, wide ? INT64_MIN : INT32_MIN, wide ? INT64_MAX : INT32_MAX, &whole) !=
        0) {
        return -1;
    }
    if (wide) {
        *(int64_t *)field = whole;
    } else {
        *(int32_t *)field = (int32_t)whole;
    }
    return 0;
}

static int take_truth(const param *p, PyObject *value, void *field)
{
    int truth = PyObject_IsTrue(value);
    if (truth < 0) return -1;
    if (p->kind == PARAM_TRUTH) {
        *(int32_t *)field = truth;
    } else if (truth) {
        *(uint32_t *)field |= (uint32_t)p->detail;
    }
    return 0;
}

static int take_value(tepy_op_call *call, const param *p, PyObject *value, void *args)
{
    void *field = (char *)args + p->offset;
    switch (p->kind) {
    case PARAM_FLOATS:
    case PARAM_INT64S:
        return take_elements(call, p, value, field);
    case PARAM_FLOAT:
    case PARAM_INT:
    case PARAM_LONG:
        return take_number(call, p, value, field);
    case PARAM_TRUTH:
    case PARAM_BIT:
        return take_truth(p, value, field);
    case PARAM_CONTEXT:
        call->given_context = value;
        return 0;
    default:
        return take_view(call, p, value, field);
    }
}

/* Nothing is cast where no FP8 data and no scale pair is wanted. */
static te_scaling_mode mode_of(const te_quantized *quantized)
{
    return quantized->rowwise.ndim == 0 && quantized->columnwise.ndim == 0 &&
                   quantized->scale_pair == NULL
               ? TE_SCALING_NONE
               : TE_SCALING_TENSOR;
}

static PyObject *run_layer_op(const layer_op *op, const arguments *given)
{
    PyObject *values[MAX_PARAMS];
    tepy_op_call call;
    any_args args;
    char *fields = (char *)&args;
    tepy_workspace workspace = {(void **)(void *)(fields + op->workspace),
                                (size_t *)(void *)(fields + op->workspace_size)};
    int failed = 0;
    memcpy(&args, op->defaults, op->size);
    if (tepy_op_begin(&call, given->module, te_op_name(op->op)) != 0 ||
        sort_values(call.function, op->params, given, values) != 0) {
        return NULL;
    }
    for (int i = 0; !failed && op->params[i].name != NULL; i++) {
        if (values[i] != NULL) failed = take_value(&call, &op->params[i], values[i], &args) != 0;
    }
    if (!failed && op->quantized != 0) {
        te_quantized *quantized = (te_quantized *)(void *)(fields + op->quantized);
        quantized->mode = mode_of(quantized);
    }
    failed =
        failed || tepy_op_run(&call, op->op, &args, op->workspace == 0 ? NULL : &workspace) != 0;
    return tepy_op_end(&call, failed);
}

/* ---- the operators ---- */

#define P(op, kind, name, place)                                                                   \
    {                                                                                              \
#name, offsetof(te_##op##_args, name), 0, PARAM_##kind, place                              \
    }
#define P_AT(op, kind, name, field, detail)                                                        \
    {                                                                                              \
        name, offsetof(te_##op##_args, field), detail, PARAM_##kind, OPTIONAL                      \
    }
#define P_RNG(op) P_AT(op, INT64S, "rng", rng, 2)
#define P_END                                                                                      \
    {"context", 0, 0, PARAM_CONTEXT, OPTIONAL},                                                    \
    {                                                                                              \
        NULL, 0, 0, PARAM_CONTEXT, OPTIONAL                                                        \
    }

/* The FP8 form of a result, with the names of quantize. */
#define P_FP8(op)                                                                                  \
    P_AT(op, ROWS_OUT, "rowwise", quantized.rowwise, 0),                                           \
        P_AT(op, ROWS_OUT, "columnwise", quantized.columnwise, 0),                                 \
        P_AT(op, FLOATS, "scale_pair", quantized.scale_pair, 2),                                   \
        P_AT(op, FLOATS, "scale", quantized.scale, 1),                                             \
        P_AT(op, FLOATS, "amax", quantized.amax, 1),                                               \
        P_AT(op, FLOATS, "partials", partials, TE_AMAX_PARTIALS),                                  \
        P_AT(op, FLOATS, "amax_partials", amax_partials, TE_AMAX_PARTIALS),                        \
        P_AT(op, FLOAT, "amax_epsilon", amax_epsilon, 0),                                          \
        P_AT(op, TRUTH, "power_2", power_2_scale, 0)

#define P_CLAMP(op)                                                                                \
    P_AT(op, FLOAT, "limit", params.limit, 0), P_AT(op, FLOAT, "alpha", params.alpha, 0),          \
        P_AT(op, FLOAT, "linear_offset", params.linear_offset, 0)

#define P_DROP(op)                                                                                 \
    P_RNG(op), P(op, FLOAT, dropout, OPTIONAL), P(op, FLOAT, drop_path, OPTIONAL),                 \
        P(op, LONG, samples, OPTIONAL)

#define CLAMP_DEFAULTS                                                                             \
    {                                                                                              \
        .limit = 7.0F, .alpha = 1.702F, .linear_offset = 1.0F                                      \
    }

/* What a layer_op is made of, from <name>_params and <name>_defaults. */
#define OP(NAME, name)                                                                             \
    .op = TE_OP_##NAME, .params = name##_params, .defaults = &name##_defaults,                     \
    .size = sizeof name##_defaults
#define OP_FP8(name) .quantized = offsetof(te_##name##_args, quantized)
#define OP_WORKSPACE(name)                                                                         \
    .workspace = offsetof(te_##name##_args, workspace),                                            \
    .workspace_size = offsetof(te_##name##_args, workspace_size)

/* The function of <name>_op. */
#define ENTRY(name)                                                                                \
    PyObject *tepy_##name TEPY_PARAMS_FASTKEYS                                                     \
    {                                                                                              \
        const arguments given = {module, args, nargs, names};                                      \
        return run_layer_op(&name##_op, &given);                                                   \
    }

_Static_assert(sizeof(te_norm_kind) == sizeof(int32_t) &&
                   sizeof(te_activation_kind) == sizeof(int32_t),
               "PARAM_INT writes 32 bits");

const char tepy_norm_doc[] =
    "norm($module, /, input, *, kind, output=None, gamma=None, beta=None, mean=None,\n"
    "     rsigma=None, eps=1e-05, zero_centered=False, statistics_given=False, rowwise=None,\n"
    "     columnwise=None, scale_pair=None, scale=None, amax=None, partials=None,\n"
    "     amax_partials=None, amax_epsilon=0.0, power_2=False, context=None)\n--\n\n"
    "Normalize rows, times gamma plus beta; to high precision and (or) FP8.";

static const param norm_params[] = {
    P(norm, ROWS, input, BY_POSITION),
    P(norm, INT, kind, BY_NAME),
    P(norm, ROWS_OUT, output, OPTIONAL),
    P(norm, VECTOR, gamma, OPTIONAL),
    P(norm, VECTOR, beta, OPTIONAL),
    P(norm, VECTOR_OUT, mean, OPTIONAL),
    P(norm, VECTOR_OUT, rsigma, OPTIONAL),
    P(norm, FLOAT, eps, OPTIONAL),
    P_AT(norm, BIT, "zero_centered", flags, TE_NORM_ZERO_CENTERED),
    P_AT(norm, BIT, "statistics_given", flags, TE_NORM_STATISTICS_GIVEN),
    P_FP8(norm),
    P_END};

static const te_norm_args norm_defaults = {.size = sizeof norm_defaults, .eps = 1e-5F};
static const layer_op norm_op = {OP(NORM, norm), OP_FP8(norm), OP_WORKSPACE(norm)};
ENTRY(norm)

const char tepy_norm_backward_doc[] =
    "norm_backward($module, /, grad_output, input, *, kind, rsigma, mean=None, gamma=None,\n"
    "              grad_add=None, grad_input=None, gamma_grad=None, beta_grad=None,\n"
    "              zero_centered=False, context=None)\n--\n\n"
    "Gradients of norm.";

static const param norm_backward_params[] = {
    P(norm_backward, ROWS, grad_output, BY_POSITION),
    P(norm_backward, ROWS, input, BY_POSITION),
    P(norm_backward, INT, kind, BY_NAME),
    P(norm_backward, VECTOR, rsigma, BY_NAME),
    P(norm_backward, VECTOR, mean, OPTIONAL),
    P(norm_backward, VECTOR, gamma, OPTIONAL),
    P(norm_backward, ROWS, grad_add, OPTIONAL),
    P(norm_backward, ROWS_OUT, grad_input, OPTIONAL),
    P(norm_backward, VECTOR_OUT, gamma_grad, OPTIONAL),
    P(norm_backward, VECTOR_OUT, beta_grad, OPTIONAL),
    P_AT(norm_backward, BIT, "zero_centered", flags, TE_NORM_ZERO_CENTERED),
    P_END};

static const te_norm_backward_args norm_backward_defaults = {.size = sizeof norm_backward_defaults};
static const layer_op norm_backward_op = {OP(NORM_BACKWARD, norm_backward),
                                          OP_WORKSPACE(norm_backward)};
ENTRY(norm_backward)

const char tepy_activation_doc[] =
    "activation($module, /, input, *, kind, output=None, rowwise=None, columnwise=None,\n"
    "           scale_pair=None, scale=None, amax=None, partials=None, amax_partials=None,\n"
    "           amax_epsilon=0.0, power_2=False, limit=7.0, alpha=1.702, linear_offset=1.0,\n"
    "           context=None)\n--\n\n"
    "Activate rows (gated: two halves to one); to high precision and (or) FP8.";

static const param activation_params[] = {P(activation, ROWS, input, BY_POSITION),
                                          P(activation, INT, kind, BY_NAME),
                                          P(activation, ROWS_OUT, output, OPTIONAL),
                                          P_FP8(activation),
                                          P_CLAMP(activation),
                                          P_END};

static const te_activation_args activation_defaults = {.size = sizeof activation_defaults,
                                                       .params = CLAMP_DEFAULTS};
static const layer_op activation_op = {OP(ACTIVATION, activation), OP_FP8(activation),
                                       OP_WORKSPACE(activation)};
ENTRY(activation)

const char tepy_activation_backward_doc[] =
    "activation_backward($module, /, grad_output, input, *, kind, grad_input=None,\n"
    "                    bias_grad=None, rowwise=None, columnwise=None, scale_pair=None,\n"
    "                    scale=None, amax=None, partials=None, amax_partials=None,\n"
    "                    amax_epsilon=0.0, power_2=False, limit=7.0, alpha=1.702,\n"
    "                    linear_offset=1.0, context=None)\n--\n\n"
    "Gradient of activation, to high precision and (or) FP8, and its column sums.";

static const param activation_backward_params[] = {
    P(activation_backward, ROWS, grad_output, BY_POSITION),
    P(activation_backward, ROWS, input, BY_POSITION),
    P(activation_backward, INT, kind, BY_NAME),
    P(activation_backward, ROWS_OUT, grad_input, OPTIONAL),
    P(activation_backward, VECTOR_OUT, bias_grad, OPTIONAL),
    P_FP8(activation_backward),
    P_CLAMP(activation_backward),
    P_END};

static const te_activation_backward_args activation_backward_defaults = {
    .size = sizeof activation_backward_defaults, .params = CLAMP_DEFAULTS};
static const layer_op activation_backward_op = {OP(ACTIVATION_BACKWARD, activation_backward),
                                                OP_FP8(activation_backward),
                                                OP_WORKSPACE(activation_backward)};
ENTRY(activation_backward)

const char tepy_softmax_doc[] =
    "softmax($module, /, input, output, *, mask=None, bias=None, probabilities=None, rng=None,\n"
    "        scale=1.0, dropout=0.0, window_left=-1, window_right=-1, diagonal=0,\n"
    "        context=None)\n--\n\n"
    "Softmax of scale * input + bias over the keys that a query may attend, with dropout.";

static const param softmax_params[] = {P(softmax, DIMS, input, BY_POSITION),
                                       P(softmax, DIMS_OUT, output, BY_POSITION),
                                       P(softmax, MASK, mask, OPTIONAL),
                                       P(softmax, DIMS, bias, OPTIONAL),
                                       P(softmax, DIMS_OUT, probabilities, OPTIONAL),
                                       P_RNG(softmax),
                                       P(softmax, FLOAT, scale, OPTIONAL),
                                       P(softmax, FLOAT, dropout, OPTIONAL),
                                       P(softmax, LONG, window_left, OPTIONAL),
                                       P(softmax, LONG, window_right, OPTIONAL),
                                       P(softmax, LONG, diagonal, OPTIONAL),
                                       P_END};

static const te_softmax_args softmax_defaults = {
    .size = sizeof softmax_defaults, .scale = 1.0F, .window_left = -1, .window_right = -1};
static const layer_op softmax_op = {OP(SOFTMAX, softmax)};
ENTRY(softmax)

const char tepy_softmax_backward_doc[] =
    "softmax_backward($module, /, grad_output, probabilities, grad_input, *, rng=None, scale=1.0,\n"
    "                 dropout=0.0, context=None)\n--\n\n"
    "Gradient of softmax.";

static const param softmax_backward_params[] = {
    P(softmax_backward, DIMS, grad_output, BY_POSITION),
    P(softmax_backward, DIMS, probabilities, BY_POSITION),
    P(softmax_backward, DIMS_OUT, grad_input, BY_POSITION),
    P_RNG(softmax_backward),
    P(softmax_backward, FLOAT, scale, OPTIONAL),
    P(softmax_backward, FLOAT, dropout, OPTIONAL),
    P_END};

static const te_softmax_backward_args softmax_backward_defaults = {
    .size = sizeof softmax_backward_defaults, .scale = 1.0F};
static const layer_op softmax_backward_op = {OP(SOFTMAX_BACKWARD, softmax_backward)};
ENTRY(softmax_backward)

/* What attention and its gradient have in common. */
#define P_PROBLEM(op)                                                                              \
    P_AT(op, MASK, "mask", problem.mask, 0), P_AT(op, DIMS, "bias", problem.bias, 0),              \
        P_AT(op, VECTOR, "query_lengths", problem.query_lengths, 0),                               \
        P_AT(op, VECTOR, "key_lengths", problem.key_lengths, 0),                                   \
        P_AT(op, INT64S, "rng", problem.rng, 2), P_AT(op, FLOAT, "scale", problem.scale, 0),       \
        P_AT(op, FLOAT, "dropout", problem.dropout, 0),                                            \
        P_AT(op, LONG, "window_left", problem.window_left, 0),                                     \
        P_AT(op, LONG, "window_right", problem.window_right, 0),                                   \
        P_AT(op, LONG, "diagonal", problem.diagonal, 0),                                           \
        P_AT(op, TRUTH, "bottom_right", problem.bottom_right, 0)
#define P_ATTENDED(op, name)                                                                       \
    {                                                                                              \
#name, offsetof(te_##op##_args, problem.name), 0, PARAM_DIMS, BY_POSITION                  \
    }
#define PROBLEM_DEFAULTS .problem = {.scale = 1.0F, .window_left = -1, .window_right = -1}

const char tepy_attention_doc[] =
    "attention($module, /, query, key, value, output, *, statistics=None, mask=None, bias=None,\n"
    "          query_lengths=None, key_lengths=None, rng=None, scale=1.0, dropout=0.0,\n"
    "          window_left=-1, window_right=-1, diagonal=0, bottom_right=False,\n"
    "          context=None)\n--\n\n"
    "dropout(softmax(scale * query key + bias)) value, without a matrix of scores.";

static const param attention_params[] = {P_ATTENDED(attention, query),
                                         P_ATTENDED(attention, key),
                                         P_ATTENDED(attention, value),
                                         P(attention, DIMS_OUT, output, BY_POSITION),
                                         P(attention, DIMS_OUT, statistics, OPTIONAL),
                                         P_PROBLEM(attention),
                                         P_END};

static const te_attention_args attention_defaults = {.size = sizeof attention_defaults,
                                                     PROBLEM_DEFAULTS};
static const layer_op attention_op = {OP(ATTENTION, attention), OP_WORKSPACE(attention)};
ENTRY(attention)

const char tepy_attention_backward_doc[] =
    "attention_backward($module, /, grad_output, query, key, value, output, statistics, *,\n"
    "                   grad_query=None, grad_key=None, grad_value=None, grad_bias=None,\n"
    "                   mask=None, bias=None, query_lengths=None, key_lengths=None, rng=None,\n"
    "                   scale=1.0, dropout=0.0, window_left=-1, window_right=-1, diagonal=0,\n"
    "                   bottom_right=False, context=None)\n--\n\n"
    "Gradients of attention.";

static const param attention_backward_params[] = {
    P(attention_backward, DIMS, grad_output, BY_POSITION),
    P_ATTENDED(attention_backward, query),
    P_ATTENDED(attention_backward, key),
    P_ATTENDED(attention_backward, value),
    P(attention_backward, DIMS, output, BY_POSITION),
    P(attention_backward, DIMS, statistics, BY_POSITION),
    P(attention_backward, DIMS_OUT, grad_query, OPTIONAL),
    P(attention_backward, DIMS_OUT, grad_key, OPTIONAL),
    P(attention_backward, DIMS_OUT, grad_value, OPTIONAL),
    P(attention_backward, DIMS_OUT, grad_bias, OPTIONAL),
    P_PROBLEM(attention_backward),
    P_END};

static const te_attention_backward_args attention_backward_defaults = {
    .size = sizeof attention_backward_defaults, PROBLEM_DEFAULTS};
static const layer_op attention_backward_op = {OP(ATTENTION_BACKWARD, attention_backward),
                                               OP_WORKSPACE(attention_backward)};
ENTRY(attention_backward)

const char tepy_dropout_add_doc[] =
    "dropout_add($module, /, input, output, *, bias=None, residual=None, rng=None, dropout=0.0,\n"
    "            drop_path=0.0, samples=1, context=None)\n--\n\n"
    "output = residual + drop_path(dropout(input + bias)).";

static const param dropout_add_params[] = {P(dropout_add, ROWS, input, BY_POSITION),
                                           P(dropout_add, ROWS_OUT, output, BY_POSITION),
                                           P(dropout_add, VECTOR, bias, OPTIONAL),
                                           P(dropout_add, ROWS, residual, OPTIONAL),
                                           P_DROP(dropout_add),
                                           P_END};

static const te_dropout_add_args dropout_add_defaults = {.size = sizeof dropout_add_defaults,
                                                         .samples = 1};
static const layer_op dropout_add_op = {OP(DROPOUT_ADD, dropout_add)};
ENTRY(dropout_add)

const char tepy_dropout_backward_doc[] =
    "dropout_backward($module, /, grad_output, *, grad_input=None, bias_grad=None, rng=None,\n"
    "                 dropout=0.0, drop_path=0.0, samples=1, context=None)\n--\n\n"
    "Gradients of dropout_add with respect to input and bias.";

static const param dropout_backward_params[] = {
    P(dropout_backward, ROWS, grad_output, BY_POSITION),
    P(dropout_backward, ROWS_OUT, grad_input, OPTIONAL),
    P(dropout_backward, VECTOR_OUT, bias_grad, OPTIONAL), P_DROP(dropout_backward), P_END};

static const te_dropout_backward_args dropout_backward_defaults = {
    .size = sizeof dropout_backward_defaults, .samples = 1};
static const layer_op dropout_backward_op = {OP(DROPOUT_BACKWARD, dropout_backward),
                                             OP_WORKSPACE(dropout_backward)};
ENTRY(dropout_backward)

const char tepy_rope_doc[] =
    "rope($module, /, input, output, freqs, *, cu_seqlens=None, start_positions=None,\n"
    "     interleaved=False, backward=False, context=None)\n--\n\n"
    "Rotary position embedding, or its transposed map.";

static const param rope_params[] = {
    P(rope, DIMS, input, BY_POSITION),          P(rope, DIMS_OUT, output, BY_POSITION),
    P(rope, ROWS, freqs, BY_POSITION),          P(rope, VECTOR, cu_seqlens, OPTIONAL),
    P(rope, VECTOR, start_positions, OPTIONAL), P(rope, TRUTH, interleaved, OPTIONAL),
    P(rope, TRUTH, backward, OPTIONAL),         P_END};

static const te_rope_args rope_defaults = {.size = sizeof rope_defaults};
static const layer_op rope_op = {OP(ROPE, rope)};
ENTRY(rope)
