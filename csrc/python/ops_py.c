/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_py.c - the operators one by one, for tests and tools; modules run plans.
 *
 * Each function fills its args struct from keywords and hands it to tepy_op_run, which finds
 * context, workspace and stream. What an operator demands of its arguments is checked in
 * core/check.c.
 */
#include "python/op_call.h"

const char tepy_quantize_doc[] =
    "quantize($module, /, input, *, rowwise=None, columnwise=None, scale_pair=None, scale=None,\n"
    "         amax=None, bias_grad=None, noop=None, partials=None, amax_epsilon=0.0,\n"
    "         power_2=False, context=None)\n--\n\n"
    "Cast to FP8 into rowwise and columnwise (transposed); amax, column sums.";

PyObject *tepy_quantize(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"input",   "rowwise",   "columnwise", "scale_pair", "scale",
                            "amax",    "bias_grad", "noop",       "partials",   "amax_epsilon",
                            "power_2", "context",   NULL};
    tepy_op_call call;
    te_quantize_args a = {.size = sizeof a};
    tepy_workspace workspace = {&a.workspace, &a.workspace_size};
    PyObject *input, *row = NULL, *column = NULL, *pair = NULL, *scale = NULL, *amax = NULL,
                     *bias_grad = NULL, *noop = NULL, *partials = NULL, *epsilon = NULL;
    float *partial_data = NULL;
    double amax_epsilon = 0.0;
    int power_2 = 0;
    int failed;
    if (tepy_op_begin(&call, module, "quantize") != 0) return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OOOOOOOOOpO:quantize", names, &input, &row,
                                     &column, &pair, &scale, &amax, &bias_grad, &noop, &partials,
                                     &epsilon, &power_2, &call.given_context)) {
        return NULL;
    }
    failed = tepy_op_require(&call, input, "input") != 0 ||
             (epsilon != NULL &&
              tepy_float(epsilon, (tepy_site){"quantize", "amax_epsilon"}, &amax_epsilon) != 0) ||
             tepy_op_matrix(&call, input, "input", TEPY_READ, &a.input) != 0 ||
             tepy_op_matrix(&call, row, "rowwise", TEPY_WRITE, &a.output.rowwise) != 0 ||
             tepy_op_matrix(&call, column, "columnwise", TEPY_WRITE, &a.output.columnwise) != 0 ||
             tepy_op_floats(&call, pair, "scale_pair", 2, &a.output.scale_pair) != 0 ||
             tepy_op_scalar(&call, scale, "scale", &a.output.scale) != 0 ||
             tepy_op_floats(&call, amax, "amax", 1, &a.output.amax) != 0 ||
             tepy_op_vector(&call, bias_grad, "bias_grad", TEPY_WRITE, &a.bias_grad) != 0 ||
             tepy_op_scalar(&call, noop, "noop", &a.noop) != 0 ||
             tepy_op_floats(&call, partials, "partials", TE_AMAX_PARTIALS, &partial_data) != 0;
    a.partials = partial_data;
    a.amax_epsilon = (float)amax_epsilon;
    a.power_2_scale = power_2;
    a.output.mode = (row == NULL || row == Py_None) && (column == NULL || column == Py_None) &&
                            a.output.scale_pair == NULL
                        ? TE_SCALING_NONE
                        : TE_SCALING_TENSOR;
    failed = failed || tepy_op_run(&call, TE_OP_QUANTIZE, &a, &workspace) != 0;
    return tepy_op_end(&call, failed);
}

const char tepy_dequantize_doc[] = "dequantize($module, /, output, *, rowwise=None, "
                                   "columnwise=None, scale_pair, context=None)\n--\n\n"
                                   "output = data * scale_pair[0].";

PyObject *tepy_dequantize(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"output", "rowwise", "columnwise", "scale_pair", "context", NULL};
    tepy_op_call call;
    te_dequantize_args a = {.size = sizeof a, .input.mode = TE_SCALING_TENSOR};
    PyObject *output, *row = NULL, *column = NULL, *pair = Py_None;
    int failed;
    if (tepy_op_begin(&call, module, "dequantize") != 0) return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OOOO:dequantize", names, &output, &row,
                                     &column, &pair, &call.given_context)) {
        return NULL;
    }
    failed = tepy_op_require(&call, output, "output") != 0 ||
             tepy_op_require(&call, pair, "scale_pair") != 0 ||
             tepy_op_matrix(&call, output, "output", TEPY_WRITE, &a.output) != 0 ||
             tepy_op_matrix(&call, row, "rowwise", TEPY_READ, &a.input.rowwise) != 0 ||
             tepy_op_matrix(&call, column, "columnwise", TEPY_READ, &a.input.columnwise) != 0 ||
             tepy_op_floats(&call, pair, "scale_pair", 2, &a.input.scale_pair) != 0 ||
             tepy_op_run(&call, TE_OP_DEQUANTIZE, &a, NULL) != 0;
    return tepy_op_end(&call, failed);
}

const char tepy_amax_doc[] = "amax($module, /, input, partials, *, context=None)\n--\n\n"
                             "Write AMAX_PARTIALS partial maxima of |input|.";

PyObject *tepy_amax(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"input", "partials", "context", NULL};
    tepy_op_call call;
    te_amax_args a = {.size = sizeof a};
    PyObject *input, *partials;
    int failed;
    if (tepy_op_begin(&call, module, "amax") != 0) return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$O:amax", names, &input, &partials,
                                     &call.given_context)) {
        return NULL;
    }
    failed = tepy_op_require(&call, input, "input") != 0 ||
             tepy_op_require(&call, partials, "partials") != 0 ||
             tepy_op_matrix(&call, input, "input", TEPY_READ, &a.input) != 0 ||
             tepy_op_floats(&call, partials, "partials", TE_AMAX_PARTIALS, &a.partials) != 0 ||
             tepy_op_run(&call, TE_OP_AMAX, &a, NULL) != 0;
    return tepy_op_end(&call, failed);
}

/* Operators of one input and one output. */
typedef struct unary_op {
    te_op op;
    const char *name, *format;
    te_tensor *input, *output;
    const void *args;
} unary_op;

static PyObject *run_unary(PyObject *module, PyObject *args, PyObject *kwargs, const unary_op *op)
{
    static char *names[] = {"input", "output", "context", NULL};
    tepy_op_call call;
    PyObject *input, *output;
    int failed;
    if (tepy_op_begin(&call, module, op->name) != 0) return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, op->format, names, &input, &output,
                                     &call.given_context)) {
        return NULL;
    }
    failed = tepy_op_require(&call, input, "input") != 0 ||
             tepy_op_require(&call, output, "output") != 0 ||
             tepy_op_matrix(&call, input, "input", TEPY_READ, op->input) != 0 ||
             tepy_op_matrix(&call, output, "output", TEPY_WRITE, op->output) != 0 ||
             tepy_op_run(&call, op->op, op->args, NULL) != 0;
    return tepy_op_end(&call, failed);
}

const char tepy_transpose_doc[] = "transpose($module, /, input, output, *, context=None)\n--\n\n"
                                  "Transpose one-byte elements.";

PyObject *tepy_transpose(PyObject *module, PyObject *args, PyObject *kwargs)
{
    te_transpose_args a = {.size = sizeof a};
    unary_op op = {TE_OP_TRANSPOSE, "transpose", "OO|$O:transpose", &a.input, &a.output, &a};
    return run_unary(module, args, kwargs, &op);
}

const char tepy_cast_doc[] = "cast($module, /, input, output, *, context=None)\n--\n\n"
                             "Convert and copy between strided matrices.";

PyObject *tepy_cast(PyObject *module, PyObject *args, PyObject *kwargs)
{
    te_cast_args a = {.size = sizeof a};
    unary_op op = {TE_OP_CAST, "cast", "OO|$O:cast", &a.input, &a.output, &a};
    return run_unary(module, args, kwargs, &op);
}

const char tepy_gemm_doc[] =
    "gemm($module, /, a, b, d, *, a_transposed=False, b_transposed=False, a_scale_inv=None,\n"
    "     b_scale_inv=None, bias=None, bias_grad=None, aux=None, d_scale=None, d_amax=None,\n"
    "     gelu=False, accumulate=False, fast_accumulation=False, allow_tf32=False,\n"
    "     context=None)\n--\n\n"
    "d = epilogue(a b + bias).";

/* Objects of gemm's arguments. */
typedef struct gemm_objects {
    PyObject *a, *b, *d, *a_scale, *b_scale, *bias, *bias_grad, *aux, *d_scale, *d_amax;
    int gelu, accumulate, fast, tf32;
} gemm_objects;

static int take_gemm(tepy_op_call *call, const gemm_objects *o, te_gemm_args *a)
{
    a->epilogue = o->gelu ? TE_EPILOGUE_GELU : TE_EPILOGUE_NONE;
    a->flags = (o->accumulate ? (uint32_t)TE_GEMM_ACCUMULATE : 0U) |
               (o->fast ? (uint32_t)TE_GEMM_FAST_ACCUMULATION : 0U) |
               (o->tf32 ? (uint32_t)TE_GEMM_ALLOW_TF32 : 0U);
    if (tepy_op_require(call, o->a, "a") != 0 || tepy_op_require(call, o->b, "b") != 0 ||
        tepy_op_require(call, o->d, "d") != 0) {
        return -1;
    }
    return tepy_op_matrix(call, o->a, "a", TEPY_READ, &a->a.data) != 0 ||
                   tepy_op_matrix(call, o->b, "b", TEPY_READ, &a->b.data) != 0 ||
                   tepy_op_matrix(call, o->d, "d", TEPY_WRITE, &a->d) != 0 ||
                   tepy_op_scalar(call, o->a_scale, "a_scale_inv", &a->a.scale_inv) != 0 ||
                   tepy_op_scalar(call, o->b_scale, "b_scale_inv", &a->b.scale_inv) != 0 ||
                   tepy_op_vector(call, o->bias, "bias", TEPY_READ, &a->bias) != 0 ||
                   tepy_op_vector(call, o->bias_grad, "bias_grad", TEPY_WRITE, &a->bias_grad) !=
                       0 ||
                   tepy_op_matrix(call, o->aux, "aux", TEPY_WRITE, &a->aux) != 0 ||
                   tepy_op_scalar(call, o->d_scale, "d_scale", &a->d_scale) != 0 ||
                   tepy_op_floats(call, o->d_amax, "d_amax", 1, &a->d_amax) != 0
               ? -1
               : 0;
}

PyObject *tepy_gemm(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "a",           "b",           "d",    "a_transposed", "b_transposed",
        "a_scale_inv", "b_scale_inv", "bias", "bias_grad",    "aux",
        "d_scale",     "d_amax",      "gelu", "accumulate",   "fast_accumulation",
        "allow_tf32",  "context",     NULL};
    tepy_op_call call;
    te_gemm_args a = {.size = sizeof a};
    tepy_workspace workspace = {&a.workspace, &a.workspace_size};
    gemm_objects o = {0};
    int a_transposed = 0, b_transposed = 0;
    int failed;
    if (tepy_op_begin(&call, module, "gemm") != 0) return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$ppOOOOOOOppppO:gemm", names, &o.a, &o.b,
                                     &o.d, &a_transposed, &b_transposed, &o.a_scale, &o.b_scale,
                                     &o.bias, &o.bias_grad, &o.aux, &o.d_scale, &o.d_amax, &o.gelu,
                                     &o.accumulate, &o.fast, &o.tf32, &call.given_context)) {
        return NULL;
    }
    a.a.transposed = a_transposed;
    a.b.transposed = b_transposed;
    failed = take_gemm(&call, &o, &a) != 0 || tepy_op_run(&call, TE_OP_GEMM, &a, &workspace) != 0;
    return tepy_op_end(&call, failed);
}

const char tepy_fill_doc[] =
    "fill($module, /, output, value, *, context=None)\n--\n\nSet every element.";

PyObject *tepy_fill(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"output", "value", "context", NULL};
    tepy_op_call call;
    te_fill_args a = {.size = sizeof a};
    PyObject *output, *value;
    int failed;
    if (tepy_op_begin(&call, module, "fill") != 0) return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$O:fill", names, &output, &value,
                                     &call.given_context)) {
        return NULL;
    }
    failed = tepy_float(value, (tepy_site){"fill", "value"}, &a.value) != 0 ||
             tepy_op_require(&call, output, "output") != 0 ||
             tepy_op_matrix(&call, output, "output", TEPY_WRITE, &a.output) != 0 ||
             tepy_op_run(&call, TE_OP_FILL, &a, NULL) != 0;
    return tepy_op_end(&call, failed);
}

const char tepy_scaling_update_doc[] =
    "scaling_update($module, scale, history, fp8_max, most_recent=False, /)\n--\n\n"
    "One update of a chunk of delayed-scaling slots, in place.";

PyObject *tepy_scaling_update(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    tepy_op_call call;
    te_scaling_update_args a = {.size = sizeof a, .algo = TE_AMAX_MAX};
    double fp8_max = 0.0;
    int most_recent = 0;
    int failed;
    if (tepy_op_begin(&call, module, "scaling_update") != 0 ||
        tepy_count("scaling_update", nargs, 3, 4) != 0 ||
        tepy_float(args[2], (tepy_site){"scaling_update", "fp8_max"}, &fp8_max) != 0) {
        return NULL;
    }
    if (nargs > 3 && (most_recent = PyObject_IsTrue(args[3])) < 0) return NULL;
    a.fp8_max = (float)fp8_max;
    if (most_recent) a.algo = TE_AMAX_MOST_RECENT;
    call.keep_gil = 1; /* once per step, after plans have run */
    failed = tepy_op_require(&call, args[0], "scale") != 0 ||
             tepy_op_require(&call, args[1], "history") != 0 ||
             tepy_op_vector(&call, args[0], "scale", TEPY_WRITE, &a.scale) != 0 ||
             tepy_op_matrix(&call, args[1], "history", TEPY_WRITE, &a.history) != 0 ||
             tepy_op_run(&call, TE_OP_SCALING_UPDATE, &a, NULL) != 0;
    return tepy_op_end(&call, failed);
}
