/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* syscall */
#include "core/holders.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef __linux__
#include <sys/syscall.h>
#endif

/* Numbers of linux/membarrier.h, which older systems lack. */
enum { PRIVATE_EXPEDITED = 1 << 3, REGISTER_PRIVATE_EXPEDITED = 1 << 4 };

int te_holders_fence = 1;
static _Atomic(te_holder *) holders;
_Thread_local te_holder *te_holder_mine;
static pthread_key_t key; /* calls `give_back` at the end of each thread */
static int has_key;

static int membarrier(int command)
{
#ifdef SYS_membarrier
    return syscall(SYS_membarrier, command, 0, 0) == 0 ? 0 : -1;
#else
    (void)command;
    return -1;
#endif
}

static void give_back(void *holder)
{
    te_holder_mine = NULL; /* what ends later in this thread may call, too */
    atomic_store_explicit(&((te_holder *)holder)->taken, 0, memory_order_release);
}

/* A forked child has the forking thread alone. */
static void keep_mine(void)
{
    te_holder *holder = atomic_load(&holders);
    for (; holder != NULL; holder = holder->next) {
        if (holder == te_holder_mine) continue;
        atomic_store(&holder->held, NULL);
        atomic_store(&holder->taken, 0);
    }
}

__attribute__((constructor)) static void at_load(void)
{
    te_holders_fence = membarrier(REGISTER_PRIVATE_EXPEDITED) != 0;
    has_key = pthread_key_create(&key, give_back) == 0;
    (void)pthread_atfork(NULL, NULL, keep_mine);
}

/* A library that is closed leaves no thread with a function of its own to call. */
__attribute__((destructor)) static void at_unload(void)
{
    if (has_key) (void)pthread_key_delete(key);
    has_key = 0;
}

/* One that no thread has, or a new one. */
static te_holder *find_holder(void)
{
    te_holder *holder = atomic_load(&holders);
    for (; holder != NULL; holder = holder->next) {
        int is_taken = 0;
        if (atomic_compare_exchange_strong(&holder->taken, &is_taken, 1)) return holder;
    }
    holder = aligned_alloc(_Alignof(te_holder), sizeof *holder); /* no two of a cache line */
    if (holder == NULL) return NULL;
    memset(holder, 0, sizeof *holder);
    atomic_store(&holder->taken, 1);
    holder->next = atomic_load(&holders);
    while (!atomic_compare_exchange_weak(&holders, &holder->next, holder)) continue;
    return holder;
}

te_holder *te_holder_begin(void)
{
    te_holder *holder = has_key ? find_holder() : NULL;
    if (holder != NULL && pthread_setspecific(key, holder) != 0) {
        atomic_store(&holder->taken, 0);
        holder = NULL;
    }
    te_holder_mine = holder;
    return holder;
}

int te_holders_settle(void)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (te_holders_fence || membarrier(PRIVATE_EXPEDITED) == 0) return 0;
    /* Another process image than the one that registered: a forked child, on some kernels. */
    return membarrier(REGISTER_PRIVATE_EXPEDITED) == 0 ? membarrier(PRIVATE_EXPEDITED) : -1;
}

const te_holder *te_holders_all(void)
{
    return atomic_load(&holders);
}

int te_holders_have(const void *object)
{
    const te_holder *holder = atomic_load(&holders);
    for (; holder != NULL; holder = holder->next) {
        if (atomic_load(&holder->held) == object) return 1;
    }
    return 0;
}
