/* SPDX-License-Identifier: Apache-2.0
 *
 * stdatomic.h - for clang-tidy alone: its wheel comes without the compiler's headers, and gcc's is
 * written in builtins that clang refuses on _Atomic objects.
 */
#ifndef TE_TIDY_STDATOMIC_H
#define TE_TIDY_STDATOMIC_H

typedef enum {
    memory_order_relaxed = __ATOMIC_RELAXED,
    memory_order_consume = __ATOMIC_CONSUME,
    memory_order_acquire = __ATOMIC_ACQUIRE,
    memory_order_release = __ATOMIC_RELEASE,
    memory_order_acq_rel = __ATOMIC_ACQ_REL,
    memory_order_seq_cst = __ATOMIC_SEQ_CST
} memory_order;

typedef _Atomic(_Bool) atomic_bool;
typedef _Atomic(int) atomic_int;
typedef _Atomic(unsigned) atomic_uint;
typedef _Atomic(long) atomic_long;
typedef _Atomic(unsigned long) atomic_ulong;
typedef _Atomic(long long) atomic_llong;
typedef _Atomic(__SIZE_TYPE__) atomic_size_t;
typedef _Atomic(__INTPTR_TYPE__) atomic_intptr_t;
typedef _Atomic(__UINTPTR_TYPE__) atomic_uintptr_t;
typedef struct {
    atomic_bool value;
} atomic_flag;

#define ATOMIC_VAR_INIT(value) (value)
#define ATOMIC_FLAG_INIT                                                                           \
    { 0 }
#define atomic_init __c11_atomic_init
#define atomic_thread_fence __c11_atomic_thread_fence
#define atomic_load_explicit __c11_atomic_load
#define atomic_store_explicit __c11_atomic_store
#define atomic_exchange_explicit __c11_atomic_exchange
#define atomic_compare_exchange_strong_explicit __c11_atomic_compare_exchange_strong
#define atomic_compare_exchange_weak_explicit __c11_atomic_compare_exchange_weak
#define atomic_fetch_add_explicit __c11_atomic_fetch_add
#define atomic_fetch_sub_explicit __c11_atomic_fetch_sub
#define atomic_fetch_or_explicit __c11_atomic_fetch_or
#define atomic_fetch_and_explicit __c11_atomic_fetch_and
#define atomic_load(p) __c11_atomic_load(p, memory_order_seq_cst)
#define atomic_store(p, v) __c11_atomic_store(p, v, memory_order_seq_cst)
#define atomic_exchange(p, v) __c11_atomic_exchange(p, v, memory_order_seq_cst)
#define atomic_fetch_add(p, v) __c11_atomic_fetch_add(p, v, memory_order_seq_cst)
#define atomic_fetch_sub(p, v) __c11_atomic_fetch_sub(p, v, memory_order_seq_cst)
#define atomic_fetch_or(p, v) __c11_atomic_fetch_or(p, v, memory_order_seq_cst)
#define atomic_fetch_and(p, v) __c11_atomic_fetch_and(p, v, memory_order_seq_cst)
#define atomic_compare_exchange_strong(p, e, v)                                                    \
    __c11_atomic_compare_exchange_strong(p, e, v, memory_order_seq_cst, memory_order_seq_cst)
#define atomic_compare_exchange_weak(p, e, v)                                                      \
    __c11_atomic_compare_exchange_weak(p, e, v, memory_order_seq_cst, memory_order_seq_cst)
#define atomic_flag_test_and_set(f) atomic_exchange(&(f)->value, 1)
#define atomic_flag_clear(f) atomic_store(&(f)->value, 0)

#endif
