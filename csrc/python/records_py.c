/* SPDX-License-Identifier: Apache-2.0
 *
 * records_py.c - structs of the C API as Python objects: named tuples with the names of the members
 * are made of them, and they are made of whatever has these names.
 */
#include "python/records_py.h"

#include <string.h>

/* ---- from Python -------------------------------------------------------------------------- */

static int take_name(PyObject *object, tepy_site site, char *name)
{
    Py_ssize_t length = 0;
    const char *text = tepy_text(object, site, &length);
    if (text == NULL) return -1;
    if (strlen(text) != (size_t)length) {
        return tepy_fail(PyExc_ValueError, site, "embedded null character");
    }
    if (length >= TE_NAME_BYTES) {
        return tepy_fail(PyExc_ValueError, site, "%s has more than %d characters", text,
                         TE_NAME_BYTES - 1);
    }
    memcpy(name, text, (size_t)length + 1);
    return 0;
}

static int take_item(tepy_site site, const te_member *member, PyObject *object, void *item)
{
    int64_t whole = 0;
    double real = 0;
    switch (member->kind) {
    case TE_MEMBER_NAME:
        return take_name(object, site, item);
    case TE_MEMBER_INT32:
        if (tepy_int(object, site, INT32_MIN, INT32_MAX, &whole) != 0) return -1;
        *(int32_t *)item = (int32_t)whole;
        return 0;
    case TE_MEMBER_BITS:
        if (tepy_int(object, site, 0, UINT32_MAX, &whole) != 0) return -1;
        *(uint32_t *)item = (uint32_t)whole;
        return 0;
    case TE_MEMBER_INT64:
        return tepy_int(object, site, INT64_MIN, INT64_MAX, item);
    case TE_MEMBER_FLOAT:
        if (tepy_float(object, site, &real) != 0) return -1;
        *(float *)item = (float)real;
        return 0;
    case TE_MEMBER_DOUBLE:
        return tepy_float(object, site, item);
    case TE_MEMBER_RECORD:
        if (member->record == te_record_describe(TE_RECORD_EXTENT) && PyLong_Check(object)) {
            return tepy_int(object, site, 1, INT32_MAX, &((te_extent *)item)->add);
        }
        return tepy_take_record(site.function, member->record, object, item);
    default:
        return tepy_fail(PyExc_TypeError, site, "it is not given");
    }
}

static int take_items(tepy_site site, const te_member *member, PyObject *items, void *memory)
{
    Py_ssize_t count = PyTuple_Size(items);
    if (count > member->most || (member->count_at < 0 && count != member->most)) {
        return tepy_fail(PyExc_ValueError, site, "%zd items, expected %s%d", count,
                         member->count_at < 0 ? "" : "at most ", (int)member->most);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        /* one by one: what is there is whole, and is released by its number */
        te_status st = te_member_resize(member, memory, (int32_t)i + 1);
        if (tepy_check(st) != 0) return -1;
        if (take_item(site, member, PyTuple_GetItem(items, i),
                      (char *)te_member_items(member, memory) + (size_t)i * member->size) != 0) {
            return -1;
        }
    }
    return 0;
}

static int take_member(const char *function, const te_member *member, PyObject *object,
                       void *memory)
{
    const tepy_site site = {function, member->name};
    PyObject *items;
    int result;
    if (member->form == TE_MEMBER_ONE) {
        return take_item(site, member, object, te_member_items(member, memory));
    }
    if (!PyTuple_Check(object) && !PyList_Check(object)) {
        return tepy_expected(site, "a tuple or a list", object);
    }
    items = PySequence_Tuple(object); /* nobody changes it meanwhile */
    if (items == NULL) return -1;
    result = take_items(site, member, items, memory);
    Py_DECREF(items);
    return result;
}

/* New reference; NULL without an exception: a dict lacks it. */
static PyObject *find_member(const char *function, const te_record *record, const char *name,
                             PyObject *object)
{
    PyObject *key, *value;
    if (!PyDict_Check(object)) {
        value = PyObject_GetAttrString(object, name);
        if (value == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            (void)tepy_fail(PyExc_TypeError, (tepy_site){function, record->name},
                            "expected a dict, or an object with the attribute %s, got %R", name,
                            Py_TYPE(object));
        }
        return value;
    }
    key = PyUnicode_FromString(name);
    if (key == NULL) return NULL;
    value = Py_XNewRef(PyDict_GetItemWithError(object, key));
    Py_DECREF(key);
    return value;
}

int tepy_take_record(const char *function, const te_record *record, PyObject *object, void *memory)
{
    Py_ssize_t found = 0;
    for (int32_t m = 0; m < record->member_count; m++) {
        const te_member *member = &record->members[m];
        PyObject *value = find_member(function, record, member->name, object);
        int result;
        if (value == NULL && PyErr_Occurred()) return -1;
        if (value == NULL) continue;
        found++;
        result = take_member(function, member, value, memory);
        Py_DECREF(value);
        if (result != 0) return -1;
    }
    if (!PyDict_Check(object) || found == PyDict_Size(object)) return 0;
    return tepy_fail(PyExc_ValueError, (tepy_site){function, record->name},
                     "%zd keys of the dict are none of its members", PyDict_Size(object) - found);
}

/* ---- to Python ---------------------------------------------------------------------------- */

static PyObject *give(const tepy_state *state, const te_record *record, const void *memory);

static PyObject *give_item(const tepy_state *state, const te_member *member, const void *item)
{
    const char *text;
    int32_t value;
    switch (member->kind) {
    case TE_MEMBER_NAME:
        return PyUnicode_FromString(item);
    case TE_MEMBER_TEXT:
        text = *(const char *const *)item;
        return PyUnicode_FromString(text == NULL ? "" : text);
    case TE_MEMBER_INT32:
        return PyLong_FromLong(*(const int32_t *)item);
    case TE_MEMBER_BITS:
        return PyLong_FromUnsignedLong(*(const uint32_t *)item);
    case TE_MEMBER_ENUM:
        value = *(const int32_t *)item;
        return member->names == NULL ? PyLong_FromLong(value)
                                     : PyUnicode_FromString(member->names[value]);
    case TE_MEMBER_INT64:
        return PyLong_FromLongLong(*(const int64_t *)item);
    case TE_MEMBER_FLOAT:
        return PyFloat_FromDouble((double)*(const float *)item);
    case TE_MEMBER_DOUBLE:
        return PyFloat_FromDouble(*(const double *)item);
    default:
        return give(state, member->record, item);
    }
}

static PyObject *give_member(const tepy_state *state, const te_member *member, const void *memory)
{
    const char *items = te_member_items(member, memory);
    PyObject *tuple;
    int32_t count = 0;
    te_status st;
    if (member->form == TE_MEMBER_ONE) return give_item(state, member, items);
    st = te_member_count(member, memory, &count);
    if (st != TE_OK) return tepy_raise(st);
    tuple = PyTuple_New(count);
    for (int32_t i = 0; tuple != NULL && i < count; i++) {
        tepy_fill(&tuple, i, give_item(state, member, items + (size_t)i * member->size));
    }
    return tuple;
}

/* New reference: the members of a struct, in their order. */
static PyObject *give_members(const tepy_state *state, const te_record *record, const void *memory)
{
    PyObject *members = PyTuple_New(record->member_count);
    for (int32_t m = 0; members != NULL && m < record->member_count; m++) {
        tepy_fill(&members, m, give_member(state, &record->members[m], memory));
    }
    return members;
}

static PyObject *give(const tepy_state *state, const te_record *record, const void *memory)
{
    PyObject *members = give_members(state, record, memory), *made = NULL;
    int number = 0;
    while (te_record_describe((te_record_number)number) != record) number++;
    if (members != NULL) made = PyObject_CallObject(state->record_types[number], members);
    Py_XDECREF(members);
    return made;
}

PyObject *tepy_give_record(const tepy_state *state, te_record_number number, const void *memory)
{
    return give(state, te_record_describe(number), memory);
}

/* ---- the types ---------------------------------------------------------------------------- */

static PyObject *names_of(const te_record *record)
{
    PyObject *names = PyTuple_New(record->member_count);
    for (int32_t m = 0; names != NULL && m < record->member_count; m++) {
        tepy_fill(&names, m, PyUnicode_FromString(record->members[m].name));
    }
    return names;
}

/* New reference: collections.namedtuple, whose defaults are what nothing was given for. */
static PyObject *make_type(const tepy_state *state, PyObject *named_tuple, const te_record *record)
{
    void *initial = PyMem_Malloc(record->size);
    PyObject *defaults, *arguments, *keywords = NULL, *type = NULL;
    if (initial == NULL) return PyErr_NoMemory();
    te_record_initial(record, initial);
    defaults = give_members(state, record, initial);
    PyMem_Free(initial);
    if (defaults == NULL) return NULL;
    arguments = Py_BuildValue("(sN)", record->name, names_of(record));
    keywords = Py_BuildValue("{sNss}", "defaults", defaults, "module", "transformer_engine._core");
    if (arguments != NULL && keywords != NULL) {
        type = PyObject_Call(named_tuple, arguments, keywords);
    }
    Py_XDECREF(arguments);
    Py_XDECREF(keywords);
    return type;
}

int tepy_records_add(PyObject *module)
{
    tepy_state *state = tepy_state_of(module);
    PyObject *collections = PyImport_ImportModule("collections"), *named_tuple = NULL;
    int failed;
    if (collections != NULL) named_tuple = PyObject_GetAttrString(collections, "namedtuple");
    failed = named_tuple == NULL;
    for (int number = 0; !failed && number < TE_RECORD_COUNT; number++) {
        const te_record *record = te_record_describe((te_record_number)number);
        PyObject *type = make_type(state, named_tuple, record); /* those of its members are there */
        state->record_types[number] = type;
        failed = type == NULL || PyModule_AddObjectRef(module, record->name, type) != 0;
    }
    Py_XDECREF(named_tuple);
    Py_XDECREF(collections);
    return failed ? -1 : 0;
}
