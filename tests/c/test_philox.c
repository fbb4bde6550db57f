/* SPDX-License-Identifier: Apache-2.0
 *
 * test_philox.c - the random numbers behind every dropout are those of Philox4x32-10: the reference
 * gives the published answers, and the library decides with the reference's numbers, found here by
 * bisection: what is kept at p and dropped at the next p has just that number.
 */
#include "cpu_device.h"
#include "philox_reference.h"

enum { COUNT = 23 }; /* elements looked at; no multiple of four */

/* Published with the generator: counter, key, words. */
static void check_published(test_device *t)
{
    static const uint32_t answers[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d,
         0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09,
         0x94fdcceb, 0x5001e420, 0x24126ea1}};
    for (int i = 0; i < 3; i++) {
        uint32_t words[4];
        philox_reference(answers[i], answers[i] + 4, words);
        TEST_CHECK(t, memcmp(words, answers[i] + 6, sizeof words) == 0,
                   "answer %d is %08x %08x %08x %08x", i, (unsigned)words[0], (unsigned)words[1],
                   (unsigned)words[2], (unsigned)words[3]);
    }
}

/* Whether a dropout of COUNT elements with that probability keeps one of them. */
static int keeps(test_device *t, const int64_t rng[2], double probability, int element)
{
    test_matrix x = test_matrix_new(t, TE_DTYPE_F32, 1, COUNT, 0);
    for (int i = 0; i < COUNT; i++) test_set(&x, 0, i, 1.0);
    test_upload(t, x.buffer);
    te_dropout_add_args args = {.size = sizeof args,
                                .input = x.tensor,
                                .output = x.tensor,
                                .rng = rng,
                                .dropout = (float)probability,
                                .samples = 1};
    TEST_OK(t, te_dropout_add(t->context, &args, t->stream));
    test_fetch(t, &x);
    int kept = test_get(&x, 0, element) != 0.0;
    test_release(t);
    return kept;
}

static void check_numbers(test_device *t, const int64_t rng[2])
{
    for (int i = 0; i < COUNT; i++) {
        double found = 0.0, expected = philox_uniform(rng, i);
        for (double bit = 0.5; bit >= 0x1p-24; bit /= 2) {
            if (keeps(t, rng, found + bit, i)) found += bit;
        }
        TEST_CHECK(t, found == expected, "seed %llx offset %llx element %d: number %a, not %a",
                   (unsigned long long)rng[0], (unsigned long long)rng[1], i, found, expected);
    }
}

static void check_all(test_device *t)
{
    static const int64_t pairs[][2] = {{0, 0},
                                       {-1, -1}, /* the counter wraps */
                                       {0x0123456789abcdef, 0x7edcba9876543210},
                                       {1, 0xfffffffe}, /* from the low to the high word */
                                       {INT64_MIN, INT64_MAX}};
    check_published(t);
    for (int i = 0; i < 5; i++) check_numbers(t, pairs[i]);
}

int main(void)
{
    return test_on_cpu("philox", check_all);
}
