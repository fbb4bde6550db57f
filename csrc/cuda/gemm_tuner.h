/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_tuner.h - optional: times the heuristic's candidates for a problem when it is first run, and
 * remembers the winner, in a file too if one is named. Costs a host synchronisation per new
 * problem.
 */
#ifndef TE_CUDA_GEMM_TUNER_H
#define TE_CUDA_GEMM_TUNER_H

#include "cuda/gemm_cublaslt.h"

#define TE_GEMM_CANDIDATES 8

typedef struct te_gemm_tuner te_gemm_tuner;

/* path NULL: nothing is read or written. A file that is not there yet is made at the first winner;
 * one for another device or library version is read past. */
te_status te_gemm_tuner_create(te_cublaslt *lt, const char *path, te_gemm_tuner **out);
void te_gemm_tuner_destroy(te_gemm_tuner *tuner);

/* Gives an entry the best algorithm that it can find out: the file's, else the fastest candidate on
 * these pointers, else (sizes only, accumulating, capturing) what the heuristic said, with space
 * for any candidate. Never fails: the entry holds a valid choice already. */
void te_gemm_tune_entry(te_cublaslt *lt, te_gemm_entry *entry,
                        const cublasLtMatmulHeuristicResult_t *candidates, int count,
                        const te_gemm_pointers *at, void *stream);

#endif
