/* SPDX-License-Identifier: Apache-2.0
 *
 * test_process.c - what stops a call (te_set_interrupt), and what a forked child may use.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <transformer_engine.h>

enum { SIZE = 1024 };

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, te_last_error());            \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

typedef struct problem {
    te_gemm_args args;
    float *a, *b, *d;
    void *workspace;
} problem;

static te_tensor square(float *data)
{
    te_tensor tensor = {.data = data, .dtype = TE_DTYPE_F32, .ndim = 2};
    tensor.shape[0] = tensor.shape[1] = tensor.strides[0] = SIZE;
    tensor.strides[1] = 1;
    return tensor;
}

static int make(te_context *context, problem *p)
{
    const size_t count = (size_t)SIZE * SIZE;
    float **all[] = {&p->a, &p->b, &p->d};
    memset(p, 0, sizeof *p);
    for (int i = 0; i < 3; i++) {
        *all[i] = malloc(count * sizeof(float));
        EXPECT(*all[i] != NULL);
        for (size_t j = 0; j < count; j++) (*all[i])[j] = 1.0F;
    }
    p->args.size = sizeof p->args;
    p->args.a.wide = square(p->a);
    p->args.b.wide = square(p->b);
    p->args.d = square(p->d);
    EXPECT(te_op_workspace(context, TE_OP_GEMM, &p->args, &p->args.workspace_size) == TE_OK);
    p->workspace = malloc(p->args.workspace_size);
    p->args.workspace = p->workspace;
    EXPECT(p->workspace != NULL);
    return 0;
}

static void drop(problem *p)
{
    free(p->a);
    free(p->b);
    free(p->d);
    free(p->workspace);
}

/* ---- interrupts ---- */

typedef struct hook_state {
    int asked, answer;
} hook_state;

static int count_and_answer(void *self)
{
    hook_state *state = self;
    state->asked++;
    return state->answer;
}

static int check_interrupts(te_context *context, problem *p)
{
    hook_state state = {0, 0};
    te_interrupt old = te_set_interrupt((te_interrupt){count_and_answer, &state}), mine;
    EXPECT(old.check == NULL);
    while (state.asked == 0) EXPECT(te_gemm(context, &p->args, NULL) == TE_OK);
    for (size_t i = 0; i < (size_t)SIZE * SIZE; i++) EXPECT(p->d[i] == (float)SIZE);
    state = (hook_state){0, 1};
    while (state.asked == 0) { /* about ten times a second */
        te_status st = te_gemm(context, &p->args, NULL);
        EXPECT(st == (state.asked != 0 ? TE_ERROR_INTERRUPTED : TE_OK));
    }
    EXPECT(state.asked == 1 && strstr(te_last_error(), "interrupted") != NULL);
    mine = te_set_interrupt(old);
    EXPECT(mine.check == count_and_answer && mine.self == &state);
    state.asked = 0;
    EXPECT(te_gemm(context, &p->args, NULL) == TE_OK && state.asked == 0);
    EXPECT(p->d[0] == (float)SIZE);
    return 0;
}

/* ---- forks ---- */

static int in_child(te_context *parents, problem *p)
{
    te_context *context = NULL;
    EXPECT(te_context_check(parents) == TE_ERROR_STATE);
    EXPECT(strstr(te_last_error(), "forked") != NULL);
    EXPECT(te_gemm(parents, &p->args, NULL) == TE_ERROR_STATE);
    EXPECT(te_context_create((te_device){TE_DEVICE_CPU, 0}, &context) == TE_OK);
    EXPECT(te_context_check(context) == TE_OK);
    memset(p->d, 0, (size_t)SIZE * SIZE * sizeof(float));
    EXPECT(te_gemm(context, &p->args, NULL) == TE_OK); /* the parent used several threads */
    EXPECT(p->d[(size_t)SIZE * SIZE - 1] == (float)SIZE);
    te_context_destroy(context);
    te_context_destroy(parents);
    return 0;
}

static int check_fork(te_context *context, problem *p)
{
    int status = -1;
    pid_t child;
    (void)fflush(stdout);
    child = fork();
    EXPECT(child >= 0);
    if (child == 0) {
        (void)alarm(120); /* a hang ends by a signal */
        status = in_child(context, p);
        (void)fflush(stdout);
        _exit(status);
    }
    EXPECT(waitpid(child, &status, 0) == child);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    EXPECT(te_context_check(context) == TE_OK);
    EXPECT(te_gemm(context, &p->args, NULL) == TE_OK);
    return 0;
}

int main(void)
{
    te_context *context = NULL;
    problem p;
    int failed;
    EXPECT(te_context_check(NULL) == TE_ERROR_STATE);
    EXPECT(te_context_create((te_device){TE_DEVICE_CPU, 0}, &context) == TE_OK);
    EXPECT(make(context, &p) == 0);
    failed = check_interrupts(context, &p) || check_fork(context, &p);
    drop(&p);
    te_context_destroy(context);
    return failed;
}
