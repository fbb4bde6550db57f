/* SPDX-License-Identifier: Apache-2.0
 *
 * frame.c - what all custom calls share: the handshake, the device and its context, attributes,
 * buffers as te_tensor, and errors.
 */
#include "xla/frame.h"

#include <fenv.h>
#include <stdatomic.h>
#include <string.h>

#include "core/fork.h"
#include "core/status.h"
#include "core/tensor.h"

/* ---- contexts ---- */

/* Those of custom calls, made at the first call on a device and kept until the process ends: XLA
 * does not say when its last program has gone. */
static _Atomic(te_context *) contexts[TE_DEVICE_OTHER][TE_DEVICE_INDICES];
TE_PROCESS_LOCK(contexts_lock);

static int is_usable(const te_context *context)
{
    return context != NULL && te_context_check(context) == TE_OK; /* not of a parent process */
}

static te_status find_context(te_device device, te_context **context)
{
    _Atomic(te_context *) *place = &contexts[device.type][device.index];
    te_context *made = NULL;
    te_status st = TE_OK;
    *context = atomic_load_explicit(place, memory_order_acquire);
    if (is_usable(*context)) return TE_OK;
    (void)pthread_mutex_lock(&contexts_lock);
    *context = atomic_load_explicit(place, memory_order_acquire);
    if (!is_usable(*context)) {
        st = te_context_create(device, &made);
        if (st == TE_OK) atomic_store_explicit(place, made, memory_order_release);
        *context = made;
    }
    (void)pthread_mutex_unlock(&contexts_lock);
    return st;
}

/* ---- stages ---- */

/* Whether XLA asks what the handler is, which is then written. */
static int tell_metadata(te_xla_frame *frame)
{
    for (te_xla_extension *e = frame->extension_start; e != NULL; e = e->next) {
        te_xla_metadata *metadata;
        if (e->type != TE_XLA_EXTENSION_METADATA) continue;
        metadata = ((te_xla_metadata_extension *)(void *)e)->metadata;
        metadata->version.major = TE_XLA_MAJOR;
        metadata->version.minor = TE_XLA_MINOR;
        metadata->traits = TE_XLA_COMMAND_BUFFER_COMPATIBLE;
        return 1;
    }
    return 0;
}

static te_xla_error *error_of(const te_xla_frame *frame, te_status st)
{
    static const te_xla_code codes[] = {
        [-TE_ERROR_INVALID] = TE_XLA_INVALID_ARGUMENT,
        [-TE_ERROR_TYPE] = TE_XLA_INVALID_ARGUMENT,
        [-TE_ERROR_UNSUPPORTED] = TE_XLA_UNIMPLEMENTED,
        [-TE_ERROR_MEMORY] = TE_XLA_RESOURCE_EXHAUSTED,
        [-TE_ERROR_STATE] = TE_XLA_FAILED_PRECONDITION,
        [-TE_ERROR_DEVICE] = TE_XLA_INTERNAL,
        [-TE_ERROR_CALLBACK] = TE_XLA_INTERNAL,
        [-TE_ERROR_INTERRUPTED] = TE_XLA_CANCELLED,
    };
    te_xla_error_request request = {.struct_size =
                                        offsetof(te_xla_error_request, code) + sizeof request.code,
                                    .message = te_last_error(),
                                    .code = codes[-st]};
    return st == TE_OK ? NULL : frame->api->create_error(&request);
}

/* On the CPU XLA's threads flush the smallest numbers to zero; ours are to have the bits that they
 * have elsewhere, and so are threads that kernels start here. */
static te_status run_with_all_numbers(const te_xla_kind *kind, const te_xla_call *call)
{
    fenv_t before;
    te_status st;
    if (call->device.type != TE_DEVICE_CPU) return kind->run(call);
    (void)fegetenv(&before);
    (void)fesetenv(FE_DFL_ENV);
    st = kind->run(call);
    (void)fesetenv(&before);
    return st;
}

te_xla_error *te_xla_handle(te_xla_frame *frame, te_device_type type, const te_xla_kind *kind)
{
    te_xla_call call = {.frame = frame};
    te_status st = TE_OK;
    if (tell_metadata(frame)) return NULL;
    if (frame->stage == TE_XLA_INSTANTIATE) return error_of(frame, kind->check(&frame->attributes));
    if (frame->stage != TE_XLA_EXECUTE) {
        return error_of(frame, TE_FAIL(TE_ERROR_INVALID, "custom call: stage %d, expected %d or %d",
                                       (int)frame->stage, TE_XLA_INSTANTIATE, TE_XLA_EXECUTE));
    }
    if (type != TE_DEVICE_CPU) {
        te_xla_stream_request request = {.struct_size = sizeof request, .context = frame->context};
        te_xla_error *failed = frame->api->get_stream(&request);
        if (failed != NULL) return failed;
        call.stream = request.stream;
    }
    TE_TRY_DONE(te_device_current(type, &call.device));
    TE_TRY_DONE(find_context(call.device, &call.context));
    TE_TRY_DONE(run_with_all_numbers(kind, &call));
done:
    return error_of(frame, st);
}

/* ---- attributes ---- */

static int compare(const te_xla_span *span, const char *name, size_t length)
{
    const int order = memcmp(span->text, name, span->length < length ? span->length : length);
    return order != 0 ? order : (span->length > length) - (span->length < length);
}

const void *te_xla_find(const te_xla_attributes *attributes, const char *name,
                        te_xla_attribute type)
{
    const size_t length = strlen(name);
    int64_t low = 0, high = attributes->size;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        const int order = compare(attributes->names[middle], name, length);
        if (order == 0) {
            return attributes->types[middle] == (int32_t)type ? attributes->values[middle] : NULL;
        }
        if (order < 0) low = middle + 1;
        if (order > 0) high = middle;
    }
    return NULL;
}

/* Both forms of a number; 0 where its type is none of those that come from Python. */
static int read_scalar(const te_xla_scalar *scalar, int64_t *whole, double *real)
{
    float single;
    int32_t narrow;
    switch (scalar->dtype) {
    case TE_XLA_PRED:
        *whole = *(const uint8_t *)scalar->value != 0;
        break;
    case TE_XLA_S32:
        memcpy(&narrow, scalar->value, sizeof narrow);
        *whole = narrow;
        break;
    case TE_XLA_S64:
        memcpy(whole, scalar->value, sizeof *whole);
        break;
    case TE_XLA_F32:
        memcpy(&single, scalar->value, sizeof single);
        *real = (double)single;
        return 1;
    case TE_XLA_F64:
        memcpy(real, scalar->value, sizeof *real);
        return 1;
    default:
        return 0;
    }
    *real = (double)*whole;
    return 2;
}

te_status te_xla_number(const te_xla_attributes *attributes, const char *name, double *value)
{
    const te_xla_scalar *scalar = te_xla_find(attributes, name, TE_XLA_ATTRIBUTE_SCALAR);
    int64_t whole = 0;
    TE_FAIL_IF(scalar == NULL || read_scalar(scalar, &whole, value) == 0, TE_ERROR_INVALID,
               "custom call: attribute %s: there is no such number", name);
    return TE_OK;
}

te_status te_xla_integer(const te_xla_attributes *attributes, const char *name, int64_t *value)
{
    const te_xla_scalar *scalar = te_xla_find(attributes, name, TE_XLA_ATTRIBUTE_SCALAR);
    double real = 0.0;
    TE_FAIL_IF(scalar == NULL || read_scalar(scalar, value, &real) != 2, TE_ERROR_INVALID,
               "custom call: attribute %s: there is no such integer", name);
    return TE_OK;
}

/* ---- buffers ---- */

te_xla_cursor te_xla_arguments(const te_xla_call *call)
{
    return (te_xla_cursor){call, &call->frame->arguments, "argument", 0};
}

te_xla_cursor te_xla_results(const te_xla_call *call)
{
    return (te_xla_cursor){call, &call->frame->results, "result", 0};
}

te_status te_xla_no_more(const te_xla_cursor *cursor)
{
    TE_FAIL_IF(cursor->at != cursor->of->size, TE_ERROR_INVALID,
               "custom call: %lld %ss, expected %lld", (long long)cursor->of->size, cursor->what,
               (long long)cursor->at);
    return TE_OK;
}

static te_status next_buffer(te_xla_cursor *cursor, const char *name, const te_xla_buffer **buffer)
{
    const int64_t at = cursor->at++;
    TE_FAIL_IF(at >= cursor->of->size, TE_ERROR_INVALID,
               "custom call: %lld %ss, expected one more for %s", (long long)cursor->of->size,
               cursor->what, name);
    TE_FAIL_IF(cursor->of->types[at] != TE_XLA_ARGUMENT_BUFFER, TE_ERROR_TYPE,
               "custom call: %s: %s %lld is no buffer", name, cursor->what, (long long)at);
    *buffer = cursor->of->buffers[at];
    return TE_OK;
}

static te_status dtype_of(const te_xla_buffer *buffer, const char *name, te_dtype *dtype)
{
    switch (buffer->dtype) {
#define X(number, own)                                                                             \
    case number:                                                                                   \
        *dtype = own;                                                                              \
        return TE_OK;
        X(TE_XLA_F32, TE_DTYPE_F32)
        X(TE_XLA_F16, TE_DTYPE_F16)
        X(TE_XLA_BF16, TE_DTYPE_BF16)
        X(TE_XLA_F8E4M3FN, TE_DTYPE_E4M3)
        X(TE_XLA_F8E5M2, TE_DTYPE_E5M2)
        X(TE_XLA_F8E8M0FNU, TE_DTYPE_U8)
        X(TE_XLA_PRED, TE_DTYPE_U8)
        X(TE_XLA_U8, TE_DTYPE_U8)
        X(TE_XLA_S32, TE_DTYPE_I32)
        X(TE_XLA_S64, TE_DTYPE_I64)
        X(TE_XLA_U32, TE_DTYPE_I64)
#undef X
    default:
        return TE_FAIL(TE_ERROR_TYPE, "custom call: %s: XLA's dtype %d has no counterpart here",
                       name, (int)buffer->dtype);
    }
}

te_status te_xla_take(te_xla_cursor *cursor, const char *name, int32_t ndim, te_tensor *view,
                      const te_xla_buffer **buffer)
{
    const te_xla_buffer *own = NULL;
    int64_t more = 0, stride = 1;
    TE_TRY(next_buffer(cursor, name, &own));
    if (buffer != NULL) *buffer = own;
    if (ndim > 0 && own->rank >= ndim - 1) more = own->rank - ndim;
    TE_FAIL_IF(own->rank - more > TE_MAX_DIMS, TE_ERROR_INVALID,
               "custom call: %s: %lld dims, expected at most %d", name, (long long)own->rank,
               TE_MAX_DIMS);
    *view = (te_tensor){.data = own->data, .device = cursor->call->device};
    TE_TRY(dtype_of(own, name, &view->dtype));
    view->ndim = (int32_t)(own->rank - more);
    for (int32_t d = 0; d < view->ndim; d++) view->shape[d] = 1;
    for (int64_t d = 0; d < own->rank; d++) view->shape[d > more ? d - more : 0] *= own->dims[d];
    if (own->dtype == TE_XLA_U32 && view->ndim > 0) {
        int64_t *last = &view->shape[view->ndim - 1];
        TE_FAIL_IF(*last % 2 != 0, TE_ERROR_INVALID,
                   "custom call: %s: %lld numbers of 32 bits, expected pairs", name,
                   (long long)*last);
        *last /= 2;
    }
    for (int32_t d = view->ndim - 1; d >= 0; d--) {
        view->strides[d] = stride;
        stride *= view->shape[d];
    }
    return TE_OK;
}

te_status te_xla_take_updated(te_xla_cursor *cursor, const char *name, te_tensor *view)
{
    const te_xla_buffer *own = NULL;
    TE_TRY(next_buffer(cursor, name, &own));
    TE_FAIL_IF(own->data != view->data, TE_ERROR_STATE,
               "custom call: %s is changed: its argument and result must share memory", name);
    return TE_OK;
}

te_status te_xla_take_scratch(te_xla_cursor *cursor, void **scratch, size_t *size)
{
    te_tensor bytes = {.ndim = 0};
    uintptr_t skipped;
    TE_TRY(te_xla_take(cursor, "scratch", 0, &bytes, NULL));
    TE_FAIL_IF(
        bytes.dtype != TE_DTYPE_U8 || bytes.ndim != 1 || bytes.shape[0] < TE_XLA_SCRATCH_ALIGN,
        TE_ERROR_INVALID, "custom call: scratch: expected at least %d bytes", TE_XLA_SCRATCH_ALIGN);
    skipped = -(uintptr_t)bytes.data & (TE_XLA_SCRATCH_ALIGN - 1);
    *scratch = (char *)bytes.data + skipped;
    *size = (size_t)bytes.shape[0] - TE_XLA_SCRATCH_ALIGN;
    return TE_OK;
}
