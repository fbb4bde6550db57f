/* SPDX-License-Identifier: Apache-2.0
 *
 * ffi.h - the binary interface of XLA's foreign functions, as far as custom calls here use it,
 * written down in C so that no header of XLA is needed.
 *
 * It is that of API 0.3 on a 64-bit machine. XLA gives structs that only grow at their ends, each
 * with the number of bytes that it has filled (up to its last member, without padding): what is
 * read here lies in all versions from 0.1 on, and of the functions only those are named whose
 * places have not moved.
 */
#ifndef TE_XLA_FFI_H
#define TE_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>

#define TE_XLA_MAJOR 0
#define TE_XLA_MINOR 3

/* Types of elements: X(ENUM, number). */
#define TE_XLA_DTYPES(X)                                                                           \
    X(PRED, 1)                                                                                     \
    X(S32, 4)                                                                                      \
    X(S64, 5)                                                                                      \
    X(U8, 6)                                                                                       \
    X(U32, 8)                                                                                      \
    X(F16, 10)                                                                                     \
    X(F32, 11)                                                                                     \
    X(F64, 12)                                                                                     \
    X(BF16, 16)                                                                                    \
    X(F8E5M2, 19)                                                                                  \
    X(F8E4M3FN, 20)                                                                                \
    X(F8E8M0FNU, 33)

typedef enum te_xla_dtype {
#define X(NAME, number) TE_XLA_##NAME = (number),
    TE_XLA_DTYPES(X)
#undef X
} te_xla_dtype;

typedef enum te_xla_stage {
    TE_XLA_INSTANTIATE = 0, /* once for each place in a program: there are attributes alone */
    TE_XLA_PREPARE = 1,
    TE_XLA_INITIALIZE = 2,
    TE_XLA_EXECUTE = 3
} te_xla_stage;

/* Numbers of absl's codes of errors. */
typedef enum te_xla_code {
    TE_XLA_CANCELLED = 1,
    TE_XLA_INVALID_ARGUMENT = 3,
    TE_XLA_RESOURCE_EXHAUSTED = 8,
    TE_XLA_FAILED_PRECONDITION = 9,
    TE_XLA_UNIMPLEMENTED = 12,
    TE_XLA_INTERNAL = 13
} te_xla_code;

enum { TE_XLA_ARGUMENT_BUFFER = 1 }; /* kind of an argument, and of a result */
enum { TE_XLA_EXTENSION_METADATA = 1 };
/* A call launches the same work each time, which a graph of the device can hold. */
enum { TE_XLA_COMMAND_BUFFER_COMPATIBLE = 1 };

typedef enum te_xla_attribute {
    TE_XLA_ATTRIBUTE_ARRAY = 1,      /* te_xla_array */
    TE_XLA_ATTRIBUTE_DICTIONARY = 2, /* te_xla_attributes */
    TE_XLA_ATTRIBUTE_SCALAR = 3,     /* te_xla_scalar */
    TE_XLA_ATTRIBUTE_STRING = 4      /* te_xla_span */
} te_xla_attribute;

typedef struct te_xla_error te_xla_error;
typedef struct te_xla_context te_xla_context;

typedef struct te_xla_extension {
    size_t struct_size;
    int32_t type;
    struct te_xla_extension *next;
} te_xla_extension;

typedef struct te_xla_version {
    size_t struct_size;
    te_xla_extension *extension_start;
    int32_t major, minor;
} te_xla_version;

/* What a handler says of itself. */
typedef struct te_xla_metadata {
    size_t struct_size;
    te_xla_version version;
    uint32_t traits;
    int64_t state_type; /* from 0.3 on; not written */
} te_xla_metadata;

typedef struct te_xla_metadata_extension {
    te_xla_extension base;
    te_xla_metadata *metadata;
} te_xla_metadata_extension;

typedef struct te_xla_buffer {
    size_t struct_size;
    te_xla_extension *extension_start;
    int32_t dtype; /* te_xla_dtype, or one that is not listed */
    void *data;
    int64_t rank;
    const int64_t *dims; /* dense, the last one the fastest */
} te_xla_buffer;

/* Arguments, and results. */
typedef struct te_xla_buffers {
    size_t struct_size;
    te_xla_extension *extension_start;
    int64_t size;
    const int32_t *types;
    te_xla_buffer *const *buffers;
} te_xla_buffers;

typedef struct te_xla_span { /* not ended by a zero */
    const char *text;
    size_t length;
} te_xla_span;

typedef struct te_xla_scalar {
    int32_t dtype;
    const void *value;
} te_xla_scalar;

typedef struct te_xla_array {
    int32_t dtype;
    size_t size;
    const void *data;
} te_xla_array;

typedef struct te_xla_attributes { /* sorted by name */
    size_t struct_size;
    te_xla_extension *extension_start;
    int64_t size;
    const int32_t *types; /* te_xla_attribute */
    te_xla_span *const *names;
    void *const *values;
} te_xla_attributes;

typedef struct te_xla_error_request {
    size_t struct_size;
    te_xla_extension *extension_start;
    const char *message;
    int32_t code; /* te_xla_code */
} te_xla_error_request;

typedef struct te_xla_stream_request {
    size_t struct_size;
    te_xla_extension *extension_start;
    te_xla_context *context;
    void *stream; /* given back */
} te_xla_stream_request;

/* Functions of XLA; the error that one returns is the caller's, who may return it in turn. */
typedef struct te_xla_api {
    size_t struct_size;
    te_xla_extension *extension_start;
    te_xla_version version;
    void *internal;
    te_xla_error *(*create_error)(te_xla_error_request *request);
    void *unused[3];
    te_xla_error *(*get_stream)(te_xla_stream_request *request);
} te_xla_api;

typedef struct te_xla_frame {
    size_t struct_size;
    te_xla_extension *extension_start;
    const te_xla_api *api; /* may be NULL where metadata are asked */
    te_xla_context *context;
    int32_t stage; /* te_xla_stage */
    te_xla_buffers arguments, results;
    te_xla_attributes attributes;
} te_xla_frame;

_Static_assert(sizeof(void *) == 8 && sizeof(size_t) == 8, "offsets are those of 64-bit machines");
#define TE_XLA_AT(type, member, at)                                                                \
    _Static_assert(offsetof(type, member) == (at), #type "." #member)
_Static_assert(sizeof(te_xla_extension) == 24 && sizeof(te_xla_version) == 24 &&
                   sizeof(te_xla_buffer) == 48 && sizeof(te_xla_buffers) == 40 &&
                   sizeof(te_xla_attributes) == 48 && sizeof(te_xla_metadata) == 48 &&
                   sizeof(te_xla_error_request) == 32 && sizeof(te_xla_stream_request) == 32,
               "sizes of API 0.3");
TE_XLA_AT(te_xla_metadata, traits, 32);
TE_XLA_AT(te_xla_metadata, state_type, 40);
TE_XLA_AT(te_xla_metadata_extension, metadata, 24);
TE_XLA_AT(te_xla_buffer, data, 24);
TE_XLA_AT(te_xla_buffer, dims, 40);
TE_XLA_AT(te_xla_api, create_error, 48);
TE_XLA_AT(te_xla_api, get_stream, 80);
TE_XLA_AT(te_xla_frame, stage, 32);
TE_XLA_AT(te_xla_frame, arguments, 40);
TE_XLA_AT(te_xla_frame, results, 80);
TE_XLA_AT(te_xla_frame, attributes, 120);
#undef TE_XLA_AT

#endif
