/* SPDX-License-Identifier: Apache-2.0
 *
 * test_l2norm.c - norms of lists on the CPU: their values, the same bits with every instruction set
 * and number of threads, and what a call may not be.
 */
#include "cpu_variants.h"

enum { COUNT = 7, LONGEST = 70001 };

typedef struct list {
    te_tensor tensors[COUNT];
    float factor;
    double exact[COUNT + 1]; /* of each, of all */
} list;

static list make_list(test_device *t, float factor)
{
    static const int64_t sizes[COUNT] = {0, 1, 5, 1023, 16384, 16385, LONGEST};
    list made = {.factor = factor};
    double total = 0.0;
    for (int i = 0; i < COUNT; i++) {
        test_matrix vector = test_vector_new(t, (te_dtype)(TE_DTYPE_F32 + i % 3), sizes[i]);
        double sum = 0.0;
        test_fill_random(t, &vector, 3.0, 0);
        for (int64_t j = 0; j < sizes[i]; j++) {
            const double value = test_get(&vector, 0, j) * (double)factor;
            sum += value * value;
        }
        made.tensors[i] = vector.tensor;
        made.exact[i] = sqrt(sum);
        total += sum;
    }
    made.exact[COUNT] = sqrt(total);
    return made;
}

/* A call on new results; the norms of each, then that of all, are the first of its buffers. */
static te_l2norm_args call_of(test_device *t, const list *given)
{
    te_l2norm_args args = {.size = sizeof args, .count = COUNT, .tensors = given->tensors};
    args.each = (float *)(void *)test_allocate(t, (COUNT + 1) * sizeof(float))->device;
    args.total = args.each + COUNT;
    args.factor = (float *)(void *)test_float(t, given->factor)->device;
    args.flag = (int32_t *)(void *)test_float(t, 0.0F)->device;
    TEST_OK(t, te_l2norm_workspace(&args, &args.workspace_size));
    args.workspace = test_allocate(t, args.workspace_size)->device;
    return args;
}

static uint64_t norms(test_device *t, const void *data)
{
    const int first = t->buffer_count;
    const te_l2norm_args args = call_of(t, data);
    TEST_OK(t, te_l2norm(t->context, &args, NULL));
    return test_digest(empty_digest, &t->buffers[first]);
}

static void check_values(test_device *t)
{
    const list given = make_list(t, -0.7F);
    const te_l2norm_args args = call_of(t, &given);
    TEST_OK(t, te_l2norm(t->context, &args, NULL));
    for (int i = 0; i <= COUNT; i++) {
        const double error = fabs((double)args.each[i] - given.exact[i]);
        TEST_CHECK(t, error <= 32 * 0x1p-24 * given.exact[i], "norm %d: %g, expected %g", i,
                   (double)args.each[i], given.exact[i]);
    }
    TEST_CHECK(t, *args.flag == 0, "the flag is set");
    ((float *)given.tensors[3].data)[1000] = INFINITY;
    TEST_OK(t, te_l2norm(t->context, &args, NULL));
    TEST_CHECK(t, *args.flag == 1, "the flag is not set");
    test_release(t);
}

#define REFUSE(field, value, kind)                                                                 \
    do {                                                                                           \
        te_l2norm_args wrong = args;                                                               \
        wrong.field = (value);                                                                     \
        TEST_CHECK(t, te_l2norm(t->context, &wrong, NULL) == TE_ERROR_##kind, #field);             \
        TEST_CHECK(t, strstr(te_last_error(), "l2norm: ") != NULL, "%s", te_last_error());         \
    } while (0)

static void check_refusals(test_device *t)
{
    list given = make_list(t, 1.0F);
    const te_l2norm_args args = call_of(t, &given);
    size_t bytes;
    REFUSE(size, sizeof args - 1, INVALID);
    REFUSE(flags, 2 * TE_L2NORM_CHECK, INVALID);
    REFUSE(count, -1, INVALID);
    REFUSE(tensors, NULL, INVALID);
    REFUSE(total, NULL, INVALID);
    REFUSE(workspace, NULL, INVALID);
    REFUSE(workspace, (char *)args.workspace + 1, INVALID);
    REFUSE(workspace_size, args.workspace_size - 1, INVALID);
    TEST_CHECK(t, te_l2norm(NULL, &args, NULL) != TE_OK, "no context");
    TEST_CHECK(t, te_l2norm(t->context, NULL, NULL) == TE_ERROR_INVALID, "no args");
    TEST_CHECK(t, te_l2norm_workspace(NULL, &bytes) == TE_ERROR_INVALID && bytes == 0, "no args");
    TEST_CHECK(t, te_l2norm_workspace(&args, NULL) == TE_ERROR_INVALID, "no bytes");
    for (int i = 0; i < 6; i++) {
        te_tensor *tensor = &given.tensors[6];
        const te_tensor kept = *tensor;
        const te_status expected = i == 0 ? TE_ERROR_TYPE : TE_ERROR_INVALID;
        if (i == 0) tensor->dtype = TE_DTYPE_E4M3;
        if (i == 1) tensor->strides[0] = 2;
        if (i == 2) tensor->data = NULL;
        if (i == 3) tensor->device.type = TE_DEVICE_CUDA;
        if (i == 4) tensor->ndim = TE_MAX_DIMS + 1;
        if (i == 5) tensor->shape[0] = INT64_MAX;
        TEST_CHECK(t, te_l2norm(t->context, &args, NULL) == expected, "tensor %d", i);
        TEST_CHECK(t, strstr(te_last_error(), "l2norm: tensors 6: ") != NULL, "%s",
                   te_last_error());
        *tensor = kept;
    }
    test_release(t);
}

/* A check needs no results, and writes nothing. */
static void check_checks(test_device *t)
{
    list given = make_list(t, 1.0F);
    te_l2norm_args args = call_of(t, &given);
    args.flags = TE_L2NORM_CHECK;
    ((float *)given.tensors[3].data)[1000] = INFINITY;
    *args.total = -1.0F;
    TEST_OK(t, te_l2norm(t->context, &args, NULL));
    TEST_CHECK(t, *args.flag == 0 && *args.total == -1.0F, "a check writes");
    args.total = NULL;
    args.workspace = NULL;
    TEST_OK(t, te_l2norm(t->context, &args, NULL));
    given.tensors[6].dtype = TE_DTYPE_E4M3;
    TEST_CHECK(t, te_l2norm(t->context, &args, NULL) == TE_ERROR_TYPE, "a dtype");
    test_release(t);
}

static void check_all(test_device *t)
{
    const list given = make_list(t, 1.3F);
    compare_variants(t, "norms", PORTABLE, norms, &given);
    test_release(t);
    check_values(t);
    check_refusals(t);
    check_checks(t);
}

int main(void)
{
    return test_on_cpu("l2norm", check_all);
}
