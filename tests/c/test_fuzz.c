/* SPDX-License-Identifier: Apache-2.0
 *
 * test_fuzz.c - valid calls of every operator with some of their fields replaced: each gives a
 * status, and writes nothing outside the memory that it was given. FUZZ_SEED and FUZZ_CALLS, of
 * each sample, choose other calls than those of every run.
 */
#include "cpu_device.h"
#include "op_samples.h"

#ifdef __SANITIZE_ADDRESS__ /* which sees reads outside, too */
enum { GUARD_BYTES = 0 };
#else
enum { GUARD_BYTES = 64 };
#endif

enum { CALLS = 1500 };

/* ---- guarded memory ----------------------------------------------------------------------- */

static void *allocate(size_t bytes)
{
    unsigned char *memory = malloc(bytes + 2 * GUARD_BYTES);
    if (memory == NULL) return NULL;
    memset(memory, TEST_GUARD, bytes + 2 * GUARD_BYTES);
    return memory + GUARD_BYTES;
}

static void release(void *memory)
{
    free((unsigned char *)memory - GUARD_BYTES);
}

/* A buffer is allocated with a byte more than it has. */
static void check_guards(test_device *t)
{
    for (int i = 0; i < t->buffer_count; i++) {
        const test_buffer *buffer = &t->buffers[i];
        int damaged = buffer->device[buffer->bytes] != TEST_GUARD;
        for (int k = 1; k <= GUARD_BYTES; k++) {
            damaged += *(buffer->device - k) != TEST_GUARD;
            damaged += buffer->device[buffer->bytes + (size_t)k] != TEST_GUARD;
        }
        TEST_CHECK(t, damaged == 0, "%d bytes beside buffer %d of %zu bytes", damaged, i,
                   buffer->bytes);
    }
}

static size_t room_of(const test_device *t, const void *data)
{
    for (int i = 0; i < t->buffer_count; i++) {
        if (t->buffers[i].device == data) return t->buffers[i].bytes;
    }
    return 0;
}

/* What a caller promises and nobody can check: the memory is as large as the tensor says. */
static int fits(const test_device *t, const te_tensor *tensor)
{
    const size_t room = room_of(t, tensor->data);
    double last = 0;
    if (tensor->data == NULL || tensor->ndim < 0 || tensor->ndim > TE_MAX_DIMS) return 1;
    for (int32_t i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] == 0) return 1;
        last += ((double)tensor->shape[i] - 1) * (double)tensor->strides[i];
    }
    return last >= 0 && (last + 1) * te_dtype_bits(tensor->dtype) <= 8 * (double)room;
}

static int all_fit(const test_device *t, te_op op, any_args *args)
{
    const te_op_info *info = te_op_describe(op);
    for (int32_t i = 0; i < info->field_count; i++) {
        const te_field *field = &info->fields[i];
        if (field->kind == TE_FIELD_TENSOR && !fits(t, member_of(args, field))) return 0;
    }
    return 1;
}

/* ---- replaced fields ---------------------------------------------------------------------- */

static int64_t any_size(void)
{
    static const int64_t sizes[] = {0,
                                    1,
                                    2,
                                    3,
                                    7,
                                    8,
                                    15,
                                    17,
                                    31,
                                    32,
                                    64,
                                    -1,
                                    -16,
                                    (int64_t)1 << 31,
                                    ((int64_t)1 << 32) + 1,
                                    (int64_t)1 << 55,
                                    (int64_t)1 << 56,
                                    (int64_t)1 << 62,
                                    INT64_MAX,
                                    INT64_MIN};
    return sizes[test_random() % (sizeof sizes / sizeof *sizes)];
}

static double any_number(void)
{
    static const double numbers[] = {
        0,    -0.0,  1,    -1,  0.5,    2,       16,          1e-45,
        3e38, 1e300, -3e9, 3e9, 0x1p60, -0x1p62, (double)NAN, (double)INFINITY};
    return numbers[test_random() % (sizeof numbers / sizeof *numbers)];
}

/* All dims of one size become another, so that the tensors may still agree. */
static void resize_all(te_op op, any_args *args)
{
    const te_op_info *info = te_op_describe(op);
    const int64_t from = test_random() % 2 ? SIDE : 2, to = any_size();
    const uint32_t without = test_random() % 2; /* memory of nothing */
    for (int32_t i = 0; i < info->field_count; i++) {
        te_tensor *tensor = member_of(args, &info->fields[i]);
        if (info->fields[i].kind != TE_FIELD_TENSOR) continue;
        for (int32_t d = 0; d < tensor->ndim && d < TE_MAX_DIMS; d++) {
            if (tensor->shape[d] == from) tensor->shape[d] = to;
        }
        if (to == 0 && without) tensor->data = NULL;
    }
}

static void change_tensor(te_tensor *tensor)
{
    const uint32_t dim = test_random() % TE_MAX_DIMS;
    switch (test_random() % 8) {
    case 0:
        tensor->data = NULL;
        return;
    case 1:
        memset(tensor, 0, sizeof *tensor);
        return;
    case 2:
        tensor->ndim = (int32_t)(test_random() % 8) - 2;
        return;
    case 3:
        tensor->dtype = (te_dtype)(test_random() % (TE_DTYPE_COUNT + 2));
        return;
    case 4:
        tensor->device.type = (te_device_type)(test_random() % 4);
        tensor->device.index = (int32_t)(test_random() % 2);
        return;
    case 5:
        tensor->strides[dim] = any_size();
        return;
    default:
        tensor->shape[dim] = any_size();
    }
}

static void change(te_op op, any_args *args)
{
    const te_op_info *info = te_op_describe(op);
    const te_field *field = &info->fields[test_random() % (uint32_t)info->field_count];
    void *member = member_of(args, field);
    int64_t whole;
    if (test_random() % 4 == 0) {
        resize_all(op, args);
        return;
    }
    switch (field->kind) {
    case TE_FIELD_TENSOR:
        change_tensor(member);
        return;
    case TE_FIELD_FLOATS:
    case TE_FIELD_INT64S:
        *pointer_of(args, field) = NULL;
        return;
    case TE_FIELD_WORKSPACE:
        if (test_random() % 2) *pointer_of(args, field) = NULL;
        *(size_t *)((char *)member + sizeof(void *)) = test_random() % 4096;
        return;
    case TE_FIELD_FLOAT:
        *(float *)member = (float)any_number();
        return;
    case TE_FIELD_DOUBLE:
        *(double *)member = any_number();
        return;
    default: /* whole numbers: as many bytes as the field has */
        whole = test_random() % 2 ? any_size() : (int64_t)(test_random() % 16);
        memcpy(member, &whole, field->size);
    }
}

/* ---- calls -------------------------------------------------------------------------------- */

static int run_changed(test_device *t, const sample *s, const any_args *whole)
{
    any_args args = *whole;
    char text[128];
    size_t bytes = 0;
    te_status asked, st = TE_OK;
    for (uint32_t changes = 1 + test_random() % 3; changes > 0; changes--) change(s->op, &args);
    te_op_shapes(s->op, &args, text, test_random() % sizeof text);
    asked = te_op_workspace(t->context, s->op, &args, &bytes);
    if (all_fit(t, s->op, &args)) st = te_op_run(t->context, s->op, &args, NULL);
    TEST_CHECK(t, st <= TE_OK && asked <= TE_OK, "status %d, %d", (int)st, (int)asked);
    check_guards(t);
    return st == TE_OK;
}

static int number_of(const char *name, int otherwise)
{
    const char *value = getenv(name);
    return value != NULL ? atoi(value) : otherwise;
}

static void check_all(test_device *t)
{
    const int seed = number_of("FUZZ_SEED", 1), calls = number_of("FUZZ_CALLS", CALLS);
    (void)printf("fuzz: FUZZ_SEED=%d FUZZ_CALLS=%d\n", seed, calls);
    t->allocate = allocate;
    t->release = release;
    for (size_t i = 0; i < SAMPLES; i++) {
        const sample *s = &samples[i];
        any_args args = fill(t, s);
        int done = 0;
        t->running = te_op_name(s->op);
        for (int k = 0; k < calls && t->failures == 0; k++) {
            test_seed = ((uint64_t)seed << 32) + ((uint64_t)i << 24) + (uint64_t)k;
            (void)test_random();
            done += run_changed(t, s, &args);
        }
        TEST_CHECK(t, done > calls / 100 && done < calls, "%d of %d calls ran", done, calls);
        test_release(t);
    }
}

int main(void)
{
    return test_on_cpu("fuzz", check_all);
}
