/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_tuner.c - which candidate is fastest, by trying, and a text file of winners.
 *
 * A problem is timed on the operands of the call that met it first: its outputs are about to be
 * overwritten anyway. A problem that accumulates can not be run twice and takes the winner of the
 * same problem without accumulation, where there is one.
 *
 * One line per winner: format|device|library version|key|algorithm|milliseconds, the two in hex as
 * they lie in memory. What is read is checked by the library before use.
 */
#define _POSIX_C_SOURCE 200809L /* fdopen */
#include "cuda/gemm_tuner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/private_file.h"
#include "core/status.h"
#include "cuda/api.h"

#define FORMAT 1
#define REPEATS 10
#define WORTHWHILE 0.98F /* of the first candidate's time: below it, a difference is noise */
#define DEVICE_NAME_BYTES 96
#define LINE_BYTES 1024
/* Winners kept in memory; past it new problems are still timed, but not remembered here. */
#define MAX_WINNERS 16384

typedef struct winner {
    te_gemm_key key;
    cublasLtMatmulAlgo_t algo;
} winner;

struct te_gemm_tuner {
    char device[DEVICE_NAME_BYTES];
    size_t version; /* of the library */
    char *path;     /* NULL: no file */
    winner *winners;
    int winner_count;
    CUevent start, stop;
};

/* ---- winners ------------------------------------------------------------------------------ */

static const winner *find_winner(const te_gemm_tuner *tuner, const te_gemm_key *key)
{
    for (int i = 0; i < tuner->winner_count; ++i)
        if (memcmp(&tuner->winners[i].key, key, sizeof *key) == 0) return &tuner->winners[i];
    return NULL;
}

static void remember(te_gemm_tuner *tuner, const winner *won)
{
    if (tuner->winner_count % 256 == 0) {
        size_t capacity = (size_t)tuner->winner_count + 256;
        winner *grown = tuner->winner_count < MAX_WINNERS
                            ? realloc(tuner->winners, capacity * sizeof *grown)
                            : NULL;
        if (grown == NULL) return;
        tuner->winners = grown;
    }
    tuner->winners[tuner->winner_count++] = *won;
}

static char *write_hex(char *to, const void *from, size_t bytes)
{
    static const char digits[] = "0123456789abcdef";
    const unsigned char *in = from;
    for (size_t i = 0; i < bytes; ++i) {
        *to++ = digits[in[i] >> 4];
        *to++ = digits[in[i] & 15];
    }
    *to = '\0';
    return to;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* 1 where the text is that many bytes in hex and nothing else. */
static int read_hex(const char *from, void *to, size_t bytes)
{
    unsigned char *out = to;
    if (strlen(from) != 2 * bytes) return 0;
    for (size_t i = 0; i < bytes; ++i) {
        int high = hex_digit(from[2 * i]), low = hex_digit(from[2 * i + 1]);
        if (high < 0 || low < 0) return 0;
        out[i] = (unsigned char)(high << 4 | low);
    }
    return 1;
}

/* The folder of the winners' file, and its name there; -1: nothing is kept. */
static int open_folder(const te_gemm_tuner *tuner, const char **name)
{
    char why[512]; /* te_cuda_configure has said it of this folder */
    return tuner->path == NULL ? -1 : te_private_folder_of(tuner->path, name, why, sizeof why);
}

static int open_file(const te_gemm_tuner *tuner)
{
    const char *name;
    const int folder = open_folder(tuner, &name);
    const int file = folder < 0 ? -1 : te_private_open(folder, name);
    if (folder >= 0) (void)close(folder);
    return file;
}

/* Takes the lines that were made by this device and library; others, and torn ones, are passed
 * over. */
static void read_file(te_gemm_tuner *tuner)
{
    char line[LINE_BYTES], mine[DEVICE_NAME_BYTES + 64];
    const int opened = open_file(tuner);
    FILE *file = opened < 0 ? NULL : fdopen(opened, "r");
    int length;
    if (file == NULL) {
        if (opened >= 0) (void)close(opened);
        return;
    }
    length = snprintf(mine, sizeof mine, "%d|%s|%zu|", FORMAT, tuner->device, tuner->version);
    while (fgets(line, sizeof line, file) != NULL) {
        winner won;
        char *key = line + length, *algo, *end;
        if (strncmp(line, mine, (size_t)length) != 0) continue;
        algo = strchr(key, '|');
        end = algo != NULL ? strchr(algo + 1, '|') : NULL;
        if (end == NULL) continue;
        *algo = *end = '\0';
        if (read_hex(key, &won.key, sizeof won.key) &&
            read_hex(algo + 1, &won.algo, sizeof won.algo))
            remember(tuner, &won);
    }
    (void)fclose(file);
}

/* One write in append mode, so that processes sharing the file do not tear each other's lines. A
 * file that can not be written only costs the next process its time. */
static void append_to_file(const te_gemm_tuner *tuner, const winner *won, float milliseconds)
{
    char line[LINE_BYTES], key[2 * sizeof won->key + 1], algo[2 * sizeof won->algo + 1];
    const char *name;
    const int folder = open_folder(tuner, &name);
    int length;
    if (folder < 0) return;
    (void)write_hex(key, &won->key, sizeof won->key);
    (void)write_hex(algo, &won->algo, sizeof won->algo);
    length = snprintf(line, sizeof line, "%d|%s|%zu|%s|%s|%.4f\n", FORMAT, tuner->device,
                      tuner->version, key, algo, (double)milliseconds);
    if (length > 0 && length < (int)sizeof line) {
        (void)te_private_append(folder, name, line, (size_t)length);
    }
    (void)close(folder);
}

/* ---- timing ------------------------------------------------------------------------------- */

/* Milliseconds of one run; negative where it can not be run. */
static float time_candidate(te_cublaslt *lt, const te_gemm_entry *entry,
                            const cublasLtMatmulAlgo_t *algo, const te_gemm_pointers *at,
                            void *stream)
{
    const te_gemm_tuner *tuner = lt->tuner;
    te_gemm_descriptor desc;
    float milliseconds = -1.0F;
    if (te_gemm_describe(&entry->key, at, &desc) != TE_OK) return -1.0F;
    if (te_gemm_matmul(lt, entry, algo, at, &desc, stream) != CUBLAS_STATUS_SUCCESS) return -1.0F;
    if (TE_CU(cuEventRecord, tuner->start, (CUstream)stream) != TE_OK) return -1.0F;
    for (int i = 0; i < REPEATS; ++i)
        if (te_gemm_matmul(lt, entry, algo, at, &desc, stream) != CUBLAS_STATUS_SUCCESS)
            return -1.0F;
    if (TE_CU(cuEventRecord, tuner->stop, (CUstream)stream) != TE_OK ||
        TE_CU(cuEventSynchronize, tuner->stop) != TE_OK ||
        TE_CU(cuEventElapsedTime, &milliseconds, tuner->start, tuner->stop) != TE_OK)
        return -1.0F;
    return milliseconds / REPEATS;
}

/* Uses a remembered winner where the library still accepts it; 1 where it does. */
static int adopt_winner(te_cublaslt *lt, te_gemm_entry *entry, const winner *won)
{
    cublasLtMatmulHeuristicResult_t checked = {0};
    te_gemm_pointers none = {0};
    te_gemm_descriptor desc;
    size_t limit = entry->key.workspace_log2 == 0 ? 0 : (size_t)1 << entry->key.workspace_log2;
    if (won == NULL || te_gemm_describe(&entry->key, &none, &desc) != TE_OK) return 0;
    if (te_cublaslt_functions.cublasLtMatmulAlgoCheck(
            lt->handle, (cublasLtMatmulDesc_t)(void *)&desc, &entry->a, &entry->b, &entry->c,
            &entry->d, &won->algo, &checked) != CUBLAS_STATUS_SUCCESS ||
        checked.workspaceSize > limit)
        return 0;
    te_gemm_adopt(entry, &won->algo, checked.workspaceSize);
    return 1;
}

static void time_candidates(te_cublaslt *lt, te_gemm_entry *entry,
                            const cublasLtMatmulHeuristicResult_t *candidates, int count,
                            const te_gemm_pointers *at, void *stream)
{
    float best = 0.0F;
    int chosen = -1;
    winner won;
    for (int i = 0; i < count; ++i) {
        float milliseconds;
        if (candidates[i].state != CUBLAS_STATUS_SUCCESS ||
            candidates[i].workspaceSize > at->workspace_size)
            continue;
        milliseconds = time_candidate(lt, entry, &candidates[i].algo, at, stream);
        if (milliseconds < 0.0F || (chosen >= 0 && milliseconds > best * WORTHWHILE)) continue;
        best = milliseconds;
        chosen = i;
    }
    if (chosen < 0) return;
    te_gemm_adopt(entry, &candidates[chosen].algo, candidates[chosen].workspaceSize);
    won = (winner){.key = entry->key, .algo = entry->algo};
    remember(lt->tuner, &won);
    append_to_file(lt->tuner, &won, best);
}

void te_gemm_tune_entry(te_cublaslt *lt, te_gemm_entry *entry,
                        const cublasLtMatmulHeuristicResult_t *candidates, int count,
                        const te_gemm_pointers *at, void *stream)
{
    int accumulates = entry->key.features & TE_GEMM_FEATURE_ACCUMULATE;
    te_gemm_key key = entry->key;
    key.features &= (uint8_t)~TE_GEMM_FEATURE_ACCUMULATE;
    if (adopt_winner(lt, entry, find_winner(lt->tuner, &key))) return;
    if (at == NULL) {
        for (int i = 0; i < count; ++i)
            if (candidates[i].workspaceSize > entry->workspace)
                entry->workspace = (candidates[i].workspaceSize + 255) / 256 * 256;
    } else if (!accumulates && !te_cuda_is_capturing(lt->cuda, stream)) {
        time_candidates(lt, entry, candidates, count, at, stream);
    }
}

/* ---- life --------------------------------------------------------------------------------- */

/* '|' separates fields and is no part of a device name; a driver that disagrees is not believed. */
static void clean_name(char *name)
{
    for (; *name != '\0'; ++name)
        if (*name == '|' || *name == '\n') *name = ' ';
}

te_status te_gemm_tuner_create(te_cublaslt *lt, const char *path, te_gemm_tuner **out)
{
    te_status st = TE_OK;
    te_gemm_tuner *tuner = calloc(1, sizeof *tuner);
    *out = NULL;
    TE_FAIL_IF(tuner == NULL, TE_ERROR_MEMORY, "no memory for the GEMM tuner");
    if (path != NULL) {
        tuner->path = malloc(strlen(path) + 1);
        if (tuner->path == NULL) {
            st = TE_FAIL(TE_ERROR_MEMORY, "no memory for the GEMM tuner");
            goto done;
        }
        memcpy(tuner->path, path, strlen(path) + 1);
    }
    TE_TRY_DONE(TE_CU(cuDeviceGetName, tuner->device, DEVICE_NAME_BYTES, lt->cuda->device));
    clean_name(tuner->device);
    TE_TRY_DONE(TE_CU(cuEventCreate, &tuner->start, CU_EVENT_DEFAULT));
    TE_TRY_DONE(TE_CU(cuEventCreate, &tuner->stop, CU_EVENT_DEFAULT));
    tuner->version = te_cublaslt_functions.cublasLtGetVersion();
    read_file(tuner);
    *out = tuner;
    tuner = NULL;
done:
    te_gemm_tuner_destroy(tuner);
    return st;
}

void te_gemm_tuner_destroy(te_gemm_tuner *tuner)
{
    if (tuner == NULL) return;
    if (tuner->start != NULL) (void)te_cuda_functions.cuEventDestroy(tuner->start);
    if (tuner->stop != NULL) (void)te_cuda_functions.cuEventDestroy(tuner->stop);
    free(tuner->winners);
    free(tuner->path);
    free(tuner);
}
