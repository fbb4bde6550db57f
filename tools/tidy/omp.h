/* SPDX-License-Identifier: Apache-2.0
 *
 * omp.h - for clang-tidy alone, which can not read gcc's: what this project calls of OpenMP.
 */
#ifndef TE_TIDY_OMP_H
#define TE_TIDY_OMP_H

int omp_get_max_threads(void);
int omp_get_num_threads(void);
int omp_get_thread_num(void);
int omp_in_parallel(void);

#endif
