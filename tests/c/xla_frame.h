/* SPDX-License-Identifier: Apache-2.0
 *
 * xla_frame.h - a custom call as XLA would hand it over: buffers of exactly the bytes that they
 * have, attributes sorted by name, and an API that remembers the error.
 */
#ifndef TE_TESTS_XLA_FRAME_H
#define TE_TESTS_XLA_FRAME_H

#include "../../csrc/xla/handlers.h"
#include "graphs.h"

enum { FAKE_BUFFERS = 32, FAKE_DIMS = 6, FAKE_ATTRIBUTES = 16 };

struct te_xla_error {
    int32_t code;
    char text[512];
};

typedef struct fake_buffers {
    te_xla_buffer all[FAKE_BUFFERS], *pointers[FAKE_BUFFERS];
    int64_t dims[FAKE_BUFFERS][FAKE_DIMS];
    int32_t types[FAKE_BUFFERS], owned[FAKE_BUFFERS];
    size_t bytes[FAKE_BUFFERS];
    int64_t count;
} fake_buffers;

typedef struct fake_attributes {
    te_xla_attributes own;
    te_xla_span names[FAKE_ATTRIBUTES], *name_pointers[FAKE_ATTRIBUTES];
    int32_t types[FAKE_ATTRIBUTES];
    void *values[FAKE_ATTRIBUTES];
    te_xla_scalar scalars[FAKE_ATTRIBUTES];
    te_xla_span texts[FAKE_ATTRIBUTES];
    te_xla_array arrays[FAKE_ATTRIBUTES];
    int64_t whole[FAKE_ATTRIBUTES];
    double real[FAKE_ATTRIBUTES];
} fake_attributes;

typedef struct fake_call {
    fake_buffers arguments, results;
    fake_attributes attributes, numbers;
    te_xla_error *error; /* of the last call */
} fake_call;

/* The message is gone when the call returns, so it is copied, as XLA does. */
static inline te_xla_error *fake_create_error(te_xla_error_request *request)
{
    te_xla_error *error = calloc(1, sizeof *error);
    EXPECT(error != NULL && request->struct_size >= 28, "an error of %zu bytes",
           request->struct_size);
    error->code = request->code;
    (void)snprintf(error->text, sizeof error->text, "%s", request->message);
    return error;
}

static inline te_xla_error *fake_get_stream(te_xla_stream_request *request)
{
    te_xla_error_request refused = {sizeof refused, NULL, "a fake stream", TE_XLA_UNIMPLEMENTED};
    EXPECT(request->struct_size == sizeof *request, "a request of %zu bytes", request->struct_size);
    return fake_create_error(&refused);
}

static const te_xla_api fake_api = {.create_error = fake_create_error,
                                    .get_stream = fake_get_stream};

/* ---- what a call has ---- */

/* Adds a buffer of `bytes` bytes; with data NULL of new memory, full of NaN. */
static inline void *fake_add(fake_buffers *to, int32_t dtype, size_t bytes, void *data,
                             int32_t rank, const int64_t *dims)
{
    const int64_t at = to->count++;
    EXPECT(at < FAKE_BUFFERS && rank <= FAKE_DIMS, "too many buffers, or dims");
    to->owned[at] = data == NULL;
    to->bytes[at] = bytes;
    if (data == NULL) data = plan_allocate(bytes);
    for (int32_t d = 0; d < rank; d++) to->dims[at][d] = dims[d];
    to->all[at] = (te_xla_buffer){48, NULL, dtype, data, rank, to->dims[at]};
    to->pointers[at] = &to->all[at];
    to->types[at] = TE_XLA_ARGUMENT_BUFFER;
    return data;
}

static inline void *fake_vector(fake_buffers *to, int32_t dtype, void *data, int64_t length,
                                size_t size)
{
    return fake_add(to, dtype, (size_t)length * size, data, 1, &length);
}

static inline void *fake_matrix(fake_buffers *to, int32_t dtype, void *data, int64_t rows,
                                int64_t columns, size_t size)
{
    const int64_t dims[2] = {rows, columns};
    return fake_add(to, dtype, (size_t)(rows * columns) * size, data, 2, dims);
}

static inline void fake_scratch(fake_call *call, size_t bytes)
{
    (void)fake_vector(&call->results, TE_XLA_U8, NULL, (int64_t)bytes + TE_XLA_SCRATCH_ALIGN, 1);
}

/* Puts an attribute at its place by name, or over one of this name. */
static inline int fake_place(fake_attributes *to, const char *name, int32_t type)
{
    int at = 0, last = (int)to->own.size;
    while (at < last && (strlen(name) != to->names[at].length ||
                         memcmp(to->names[at].text, name, to->names[at].length) != 0)) {
        at++;
    }
    EXPECT(at < FAKE_ATTRIBUTES, "too many attributes");
    if (at == last) to->own.size++;
    to->names[at] = (te_xla_span){name, strlen(name)};
    to->types[at] = type;
    return at;
}

static inline void fake_integer(fake_attributes *to, const char *name, int64_t value)
{
    const int at = fake_place(to, name, TE_XLA_ATTRIBUTE_SCALAR);
    to->whole[at] = value;
    to->scalars[at] = (te_xla_scalar){TE_XLA_S64, &to->whole[at]};
    to->values[at] = &to->scalars[at];
}

static inline void fake_real(fake_attributes *to, const char *name, double value)
{
    const int at = fake_place(to, name, TE_XLA_ATTRIBUTE_SCALAR);
    to->real[at] = value;
    to->scalars[at] = (te_xla_scalar){TE_XLA_F64, &to->real[at]};
    to->values[at] = &to->scalars[at];
}

static inline void fake_text(fake_attributes *to, const char *name, const char *text)
{
    const int at = fake_place(to, name, TE_XLA_ATTRIBUTE_STRING);
    to->texts[at] = (te_xla_span){text, strlen(text)};
    to->values[at] = &to->texts[at];
}

static inline void fake_array(fake_attributes *to, const char *name, const int32_t *data,
                              size_t size)
{
    const int at = fake_place(to, name, TE_XLA_ATTRIBUTE_ARRAY);
    to->arrays[at] = (te_xla_array){TE_XLA_S32, size, data};
    to->values[at] = &to->arrays[at];
}

static inline void fake_dictionary(fake_attributes *to, const char *name, fake_attributes *value)
{
    to->values[fake_place(to, name, TE_XLA_ATTRIBUTE_DICTIONARY)] = &value->own;
}

/* ---- calling ---- */

/* Indices of the attributes, sorted by name, go into the struct that XLA would give. */
static inline void fake_sort(fake_attributes *of, int32_t *types, void **values)
{
    int order[FAKE_ATTRIBUTES];
    for (int i = 0; i < (int)of->own.size; i++) {
        int at = i;
        for (; at > 0 && strcmp(of->names[order[at - 1]].text, of->names[i].text) > 0; at--) {
            order[at] = order[at - 1];
        }
        order[at] = i;
    }
    for (int i = 0; i < (int)of->own.size; i++) {
        of->name_pointers[i] = &of->names[order[i]];
        types[i] = of->types[order[i]];
        values[i] = of->values[order[i]];
    }
    of->own.struct_size = sizeof of->own;
    of->own.types = types;
    of->own.names = of->name_pointers;
    of->own.values = values;
}

static inline void fake_forget_error(fake_call *call)
{
    free(call->error);
    call->error = NULL;
}

static inline void fake_stage(fake_call *call, te_xla_handler handler, te_xla_stage stage)
{
    int32_t types[2][FAKE_ATTRIBUTES];
    void *values[2][FAKE_ATTRIBUTES];
    te_xla_frame frame = {.struct_size = 168, .api = &fake_api, .stage = (int32_t)stage};
    fake_forget_error(call);
    fake_sort(&call->attributes, types[0], values[0]);
    fake_sort(&call->numbers, types[1], values[1]);
    frame.attributes = call->attributes.own;
    if (stage == TE_XLA_EXECUTE) {
        frame.arguments = (te_xla_buffers){40, NULL, call->arguments.count, call->arguments.types,
                                           call->arguments.pointers};
        frame.results = (te_xla_buffers){40, NULL, call->results.count, call->results.types,
                                         call->results.pointers};
    }
    call->error = handler(&frame);
    for (int64_t i = 0; i < call->results.count; i++) {
        if (!call->results.owned[i]) continue;
        plan_check_guard(call->results.all[i].data, call->results.bytes[i], "a result's");
    }
}

static inline void fake_run(fake_call *call, te_xla_handler handler)
{
    fake_stage(call, handler, TE_XLA_EXECUTE);
    EXPECT(call->error == NULL, "%s", call->error->text);
}

static inline void fake_refused(fake_call *call, te_xla_handler handler, te_xla_stage stage,
                                int32_t code, const char *text)
{
    fake_stage(call, handler, stage);
    EXPECT(call->error != NULL, "no error, expected %s", text);
    EXPECT(call->error->code == code && strstr(call->error->text, text) != NULL, "%d: %s, not %s",
           (int)call->error->code, call->error->text, text);
}

static inline void fake_end(fake_call *call)
{
    fake_forget_error(call);
    for (int64_t i = 0; i < call->arguments.count; i++) {
        if (call->arguments.owned[i]) free(call->arguments.all[i].data);
    }
    for (int64_t i = 0; i < call->results.count; i++) {
        if (call->results.owned[i]) free(call->results.all[i].data);
    }
    memset(call, 0, sizeof *call);
}

#endif
