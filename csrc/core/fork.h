/* SPDX-License-Identifier: Apache-2.0
 *
 * fork.h - what a forked child must not inherit: mutexes that another thread of the parent held,
 * contexts, and threads. A child has the forking thread alone; other threads of the parent do not
 * continue there, and what they had locked would stay locked.
 */
#ifndef TE_CORE_FORK_H
#define TE_CORE_FORK_H

#include <pthread.h>
#include <stdint.h>

/* Forks between the process that loaded the library and this one. */
int32_t te_fork_generation(void);

/* Defines a static mutex of the process that a forked child finds free. What it guards must be
 * valid at every step: published by a last atomic store, or settings of which the old ones do. */
#define TE_PROCESS_LOCK(name)                                                                      \
    static pthread_mutex_t name = PTHREAD_MUTEX_INITIALIZER;                                       \
    static void name##_in_child(void)                                                              \
    {                                                                                              \
        (void)pthread_mutex_init(&name, NULL);                                                     \
    }                                                                                              \
    __attribute__((constructor)) static void name##_at_load(void)                                  \
    {                                                                                              \
        (void)pthread_atfork(NULL, NULL, name##_in_child);                                         \
    }                                                                                              \
    static pthread_mutex_t name /* takes the semicolon */

#endif
