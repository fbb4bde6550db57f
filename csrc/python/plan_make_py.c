/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_make_py.c - making plans: keywords become the fields of a description.
 */
#include "python/plan_py.h"

#include <stddef.h>
#include <string.h>

typedef enum field_kind { FIELD_I32, FIELD_U32, FIELD_I64, FIELD_F32 } field_kind;

typedef struct desc_field {
    const char *keyword;
    size_t offset;
    field_kind kind;
    int required;
} desc_field;

/* X(keyword, member, kind, required) */
#define LINEAR_FIELDS(X)                                                                           \
    X(direction, direction, I32, 1)                                                                \
    X(in_features, in_features, I64, 1)                                                            \
    X(out_features, out_features, I64, 1)                                                          \
    X(input_dtype, input_dtype, I32, 1)                                                            \
    X(weight_dtype, weight_dtype, I32, 1)                                                          \
    X(bias_dtype, bias_dtype, I32, 1)                                                              \
    X(output_dtype, output_dtype, I32, 1)                                                          \
    X(grad_weight_dtype, grad_weight_dtype, I32, 1)                                                \
    X(recipe, recipe, I32, 1)                                                                      \
    X(forward_fp8, forward_fp8, I32, 1)                                                            \
    X(backward_fp8, backward_fp8, I32, 1)                                                          \
    X(flags, flags, U32, 1)                                                                        \
    X(gather, gather, I32, 0)                                                                      \
    X(external, external, U32, 0)                                                                  \
    X(eps_input, amax_epsilon_input, F32, 0)                                                       \
    X(eps_weight, amax_epsilon_weight, F32, 0)                                                     \
    X(eps_grad, amax_epsilon_grad, F32, 0)                                                         \
    X(norm, norm, I32, 0)                                                                          \
    X(norm_dtype, norm_dtype, I32, 0)                                                              \
    X(norm_eps, norm_eps, F32, 0)

#define MLP_FIELDS(X)                                                                              \
    X(direction, direction, I32, 1)                                                                \
    X(activation, activation, I32, 1)                                                              \
    X(limit, params.limit, F32, 0)                                                                 \
    X(alpha, params.alpha, F32, 0)                                                                 \
    X(linear_offset, params.linear_offset, F32, 0)                                                 \
    X(flags, flags, U32, 0)

#define NORM_FIELDS(X)                                                                             \
    X(direction, direction, I32, 1)                                                                \
    X(features, features, I64, 1)                                                                  \
    X(kind, kind, I32, 1)                                                                          \
    X(input_dtype, input_dtype, I32, 1)                                                            \
    X(weight_dtype, weight_dtype, I32, 1)                                                          \
    X(output_dtype, output_dtype, I32, 1)                                                          \
    X(flags, flags, U32, 1)                                                                        \
    X(eps, eps, F32, 1)

#define X(keyword, member, kind, required)                                                         \
    {#keyword, offsetof(te_linear_desc, member), FIELD_##kind, required},
static const desc_field linear_fields[] = {LINEAR_FIELDS(X){NULL, 0, FIELD_I32, 0}};
#undef X
#define X(keyword, member, kind, required)                                                         \
    {#keyword, offsetof(te_mlp_desc, member), FIELD_##kind, required},
static const desc_field mlp_fields[] = {MLP_FIELDS(X){NULL, 0, FIELD_I32, 0}};
#undef X
#define X(keyword, member, kind, required)                                                         \
    {#keyword, offsetof(te_norm_desc, member), FIELD_##kind, required},
static const desc_field norm_fields[] = {NORM_FIELDS(X){NULL, 0, FIELD_I32, 0}};
#undef X

static int set_field(void *desc, const desc_field *field, const char *function, PyObject *object)
{
    void *member = (char *)desc + field->offset;
    tepy_site site = {function, field->keyword};
    int64_t whole = 0;
    double real = 0.0;
    switch (field->kind) {
    case FIELD_I32:
        if (tepy_int(object, site, INT32_MIN, INT32_MAX, &whole) != 0) return -1;
        *(int32_t *)member = (int32_t)whole;
        return 0;
    case FIELD_U32:
        if (tepy_int(object, site, 0, UINT32_MAX, &whole) != 0) return -1;
        *(uint32_t *)member = (uint32_t)whole;
        return 0;
    case FIELD_I64:
        return tepy_int(object, site, INT64_MIN, INT64_MAX, member);
    case FIELD_F32:
        if (tepy_float(object, site, &real) != 0) return -1;
        *(float *)member = (float)real;
        return 0;
    }
    return 0;
}

/* The keyword's value, borrowed; NULL where it is not given, or with an exception. */
static PyObject *find_keyword(PyObject *kwargs, const char *name)
{
    PyObject *key, *value;
    if (kwargs == NULL) return NULL;
    key = PyUnicode_FromString(name);
    if (key == NULL) return NULL;
    value = PyDict_GetItemWithError(kwargs, key);
    Py_DECREF(key);
    return value;
}

/* Fills a description from positional arguments and keywords; `skipped` names of the keywords are
 * the caller's own. */
static int fill(void *desc, const desc_field *fields, const char *function, PyObject *args,
                PyObject *kwargs, Py_ssize_t skipped)
{
    Py_ssize_t given = args == NULL ? 0 : PyTuple_Size(args);
    Py_ssize_t used = given;
    Py_ssize_t count = 0;
    for (const desc_field *field = fields; field->keyword != NULL; field++, count++) {
        PyObject *object = find_keyword(kwargs, field->keyword);
        if (object == NULL && PyErr_Occurred()) return -1;
        if (object != NULL) {
            used++;
            if (count < given) {
                PyErr_Format(PyExc_TypeError, "%s: %s is given twice", function, field->keyword);
                return -1;
            }
        } else if (count < given) {
            object = PyTuple_GetItem(args, count);
        }
        if (object == NULL) {
            if (!field->required) continue;
            PyErr_Format(PyExc_TypeError, "%s: %s is missing", function, field->keyword);
            return -1;
        }
        if (set_field(desc, field, function, object) != 0) return -1;
    }
    if (given > count || used != given + (kwargs == NULL ? 0 : PyDict_Size(kwargs)) - skipped) {
        PyErr_Format(PyExc_TypeError, "%s: more arguments than its %zd, or an unknown keyword",
                     function, count + skipped);
        return -1;
    }
    return 0;
}

const char tepy_linear_plan_doc[] =
    "linear_plan($module, direction, in_features, out_features, input_dtype, weight_dtype,\n"
    "            bias_dtype, output_dtype, grad_weight_dtype, recipe, forward_fp8, backward_fp8,\n"
    "            flags, gather=1, external=0, eps_input=0.0, eps_weight=0.0, eps_grad=0.0, "
    "norm=0,\n"
    "            norm_dtype=0, norm_eps=0.0)\n--\n\n"
    "Id of a linear plan; the same description has the same id in every process.";

static void begin_linear(te_linear_desc *desc)
{
    memset(desc, 0, sizeof *desc);
    desc->size = sizeof *desc;
    desc->gather = 1;
}

PyObject *tepy_linear_plan(PyObject *module, PyObject *args, PyObject *kwargs)
{
    te_linear_desc desc;
    int64_t id = 0;
    te_status st;
    (void)module;
    begin_linear(&desc);
    if (fill(&desc, linear_fields, "linear_plan", args, kwargs, 0) != 0) return NULL;
    st = te_plan_linear(&desc, &id);
    return st == TE_OK ? PyLong_FromLongLong(id) : tepy_raise(st);
}

const char tepy_mlp_plan_doc[] =
    "mlp_plan($module, direction, activation, limit=0.0, alpha=0.0, linear_offset=0.0, flags=0, "
    "*,\n"
    "         fc1, fc2)\n--\n\n"
    "Id of the plan of an MLP; fc1 and fc2 are dicts of linear_plan's keywords.";

static int fill_part(te_linear_desc *desc, PyObject *kwargs, const char *name)
{
    PyObject *part = find_keyword(kwargs, name);
    if (part == NULL && PyErr_Occurred()) return -1;
    if (part == NULL || !PyDict_Check(part)) {
        PyErr_Format(PyExc_TypeError, "mlp_plan: %s: expected a dict of linear_plan's keywords",
                     name);
        return -1;
    }
    begin_linear(desc);
    return fill(desc, linear_fields, "mlp_plan", NULL, part, 0);
}

PyObject *tepy_mlp_plan(PyObject *module, PyObject *args, PyObject *kwargs)
{
    te_mlp_desc desc;
    int64_t id = 0;
    te_status st;
    (void)module;
    memset(&desc, 0, sizeof desc);
    desc.size = sizeof desc;
    if (fill_part(&desc.fc1, kwargs, "fc1") != 0 || fill_part(&desc.fc2, kwargs, "fc2") != 0 ||
        fill(&desc, mlp_fields, "mlp_plan", args, kwargs, 2) != 0) {
        return NULL;
    }
    st = te_plan_mlp(&desc, &id);
    return st == TE_OK ? PyLong_FromLongLong(id) : tepy_raise(st);
}

const char tepy_norm_plan_doc[] = "norm_plan($module, direction, features, kind, input_dtype, "
                                  "weight_dtype, output_dtype, flags,\n"
                                  "          eps)\n--\n\n"
                                  "Id of the plan of a norm by itself.";

PyObject *tepy_norm_plan(PyObject *module, PyObject *args, PyObject *kwargs)
{
    te_norm_desc desc;
    int64_t id = 0;
    te_status st;
    (void)module;
    memset(&desc, 0, sizeof desc);
    desc.size = sizeof desc;
    if (fill(&desc, norm_fields, "norm_plan", args, kwargs, 0) != 0) return NULL;
    st = te_plan_norm(&desc, &id);
    return st == TE_OK ? PyLong_FromLongLong(id) : tepy_raise(st);
}
