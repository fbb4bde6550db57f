/* SPDX-License-Identifier: Apache-2.0
 *
 * merge_cases.h - two attentions as one, against the definition.
 */
#ifndef TE_TESTS_MERGE_CASES_H
#define TE_TESTS_MERGE_CASES_H

#include "attention_cases.h"

typedef struct merge_case {
    te_dtype dtypes[3]; /* of total, step, output */
    int64_t shape[4], gap;
    int weighs;
} merge_case;

static void check_merge(test_device *t, const merge_case *c, const test_matrix parts[3],
                        const test_matrix sums[3])
{
    for (int64_t r = 0; r < parts[0].rows; r++) {
        double weights[2] = {1.0, 1.0};
        if (c->weighs) {
            const double a = test_get(&sums[0], r, 0), b = test_get(&sums[1], r, 0);
            const double both = fmax(a, b) + log1p(exp(-fabs(a - b)));
            weights[0] = exp(a - both);
            weights[1] = exp(b - both);
            check_value(t, TE_DTYPE_F32, test_get(&sums[2], r, 0), both, fabs(a) + 1.0);
        }
        for (int64_t j = 0; j < parts[0].columns; j++) {
            const double x = weights[0] * test_get(&parts[0], r, j);
            const double y = weights[1] * test_get(&parts[1], r, j);
            check_value(t, c->dtypes[2], test_get(&parts[2], r, j), x + y, fabs(x) + fabs(y));
        }
    }
}

static void run_merge(test_device *t, const merge_case *c)
{
    const int64_t one[4] = {c->shape[0], c->shape[1], c->shape[2], 1};
    test_matrix parts[3], sums[3];
    te_attention_merge_args args = {.size = sizeof args};
    for (int i = 0; i < 3; i++) {
        parts[i] = dense4(t, c->dtypes[i], c->shape, c->gap);
        sums[i] = dense4(t, TE_DTYPE_F32, one, i);
        test_fill_random(t, &parts[i], 2.0, 0);
        test_fill_random(t, &sums[i], 4.0, 0);
    }
    args.total = parts[0].tensor;
    args.step = parts[1].tensor;
    args.output = parts[2].tensor;
    if (c->weighs) {
        args.total_statistics = sums[0].tensor;
        args.step_statistics = sums[1].tensor;
        args.statistics = sums[2].tensor;
    }
    TEST_OK(t, te_attention_merge(t->context, &args, t->stream));
    test_fetch(t, &parts[2]);
    test_fetch(t, &sums[2]);
    check_merge(t, c, parts, sums);
    test_release(t);
}

static void test_attention_merge(test_device *t)
{
    static const int64_t channels[] = {1, 8, 13, 128, 300, 1100};
    for (int i = 0; i < 108; i++) {
        const merge_case c = {.dtypes = {attention_dtypes[i % 3], attention_dtypes[i / 3 % 3],
                                         attention_dtypes[i / 9 % 3]},
                              .shape = {2, 5, 3, channels[i % 6]},
                              .gap = i % 4,
                              .weighs = i / 27 % 2};
        run_merge(t, &c);
    }
}

#endif
