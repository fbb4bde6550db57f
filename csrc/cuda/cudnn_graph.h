/* SPDX-License-Identifier: Apache-2.0
 *
 * cudnn_graph.h - writes a graph of cuDNN operations, and makes the plan that runs it.
 *
 * Tensors have 4 dims. A real one is a place: the number under which a run gives its pointer. The
 * first failure stays in the graph's status and later calls do nothing, so that a graph is written
 * as the formulas are.
 */
#ifndef TE_CUDA_CUDNN_GRAPH_H
#define TE_CUDA_CUDNN_GRAPH_H

#include "cuda/cudnn_library.h"

enum {
    TE_CUDNN_MAX_TENSORS = 96,
    TE_CUDNN_MAX_OPERATIONS = 64,
    TE_CUDNN_MAX_DESCRIPTORS = 256,
    TE_CUDNN_MAX_BOUND = 40 /* tensors that are not virtual */
};

typedef struct te_cudnn_tensor {
    cudnnBackendDescriptor_t descriptor;
    int64_t shape[4];
} te_cudnn_tensor;

/* What a run binds: a place, or a constant in host memory. */
typedef struct te_cudnn_bound {
    int64_t uid;
    int32_t place; /* -1: the constant */
    union {
        float f;
        int32_t i;
    } constant;
} te_cudnn_bound;

typedef struct te_cudnn_graph {
    te_status status;
    te_cudnn_tensor tensors[TE_CUDNN_MAX_TENSORS];
    cudnnBackendDescriptor_t operations[TE_CUDNN_MAX_OPERATIONS];
    cudnnBackendDescriptor_t owned[TE_CUDNN_MAX_DESCRIPTORS]; /* of all kinds, to be destroyed */
    te_cudnn_bound bound[TE_CUDNN_MAX_BOUND];
    int tensor_count, operation_count, owned_count, bound_count;
} te_cudnn_graph;

/* An empty graph is {0}. Destroys what it made. */
void te_cudnn_graph_clear(te_cudnn_graph *graph);

/* A tensor at a place, whose address is a multiple of `alignment` bytes. Where there are `offsets`,
 * batch entries begin there, at so many elements: [batch + 1] i64. */
te_cudnn_tensor *te_cudnn_at(te_cudnn_graph *graph, int32_t place, cudnnDataType_t dtype,
                             const int64_t shape[4], const int64_t strides[4], int64_t alignment,
                             const te_cudnn_tensor *offsets);
/* A tensor that is not kept; strides NULL: dense. */
te_cudnn_tensor *te_cudnn_virtual(te_cudnn_graph *graph, cudnnDataType_t dtype,
                                  const int64_t shape[4], const int64_t strides[4]);
/* One whose batch entries begin at offsets (NULL: none). */
te_cudnn_tensor *te_cudnn_virtual_from(te_cudnn_graph *graph, cudnnDataType_t dtype,
                                       const int64_t shape[4], const int64_t strides[4],
                                       const te_cudnn_tensor *offsets);
te_cudnn_tensor *te_cudnn_float(te_cudnn_graph *graph, float value);
te_cudnn_tensor *te_cudnn_int(te_cudnn_graph *graph, int32_t value);

/* y = mode(x, b), broadcast; b NULL where there is none. The modes of comparisons and logic give
 * truth values. */
void te_cudnn_pointwise_to(te_cudnn_graph *graph, cudnnPointwiseMode_t mode, te_cudnn_tensor *x,
                           te_cudnn_tensor *b, te_cudnn_tensor *y);
te_cudnn_tensor *te_cudnn_pointwise(te_cudnn_graph *graph, cudnnPointwiseMode_t mode,
                                    te_cudnn_tensor *x, te_cudnn_tensor *b, cudnnDataType_t dtype);
/* The index of each element of x along an axis, int32. */
te_cudnn_tensor *te_cudnn_index(te_cudnn_graph *graph, te_cudnn_tensor *x, int64_t axis);
/* x where `keep` holds, else `otherwise`. */
te_cudnn_tensor *te_cudnn_select(te_cudnn_graph *graph, te_cudnn_tensor *x,
                                 te_cudnn_tensor *otherwise, te_cudnn_tensor *keep);
/* y = x reduced over the dims in which y has 1. */
void te_cudnn_reduce(te_cudnn_graph *graph, cudnnReduceTensorOp_t how, te_cudnn_tensor *x,
                     te_cudnn_tensor *y);
/* c = a b in fp32; `extents` are how much of m, n and k (NULL: all) there is in a batch entry. */
void te_cudnn_multiply(te_cudnn_graph *graph, te_cudnn_tensor *a, te_cudnn_tensor *b,
                       te_cudnn_tensor *c, const te_cudnn_tensor *extents[3]);
void te_cudnn_reshape(te_cudnn_graph *graph, te_cudnn_tensor *x, te_cudnn_tensor *y);
/* y = 1 with the probability, else 0, from a pair of random numbers on the device. */
void te_cudnn_bernoulli(te_cudnn_graph *graph, te_cudnn_tensor *seed, te_cudnn_tensor *offset,
                        double probability, te_cudnn_tensor *y);

/* A graph that is made ready to run. */
typedef struct te_cudnn_plan {
    cudnnBackendDescriptor_t plan;
    size_t workspace;
    te_cudnn_bound bound[TE_CUDNN_MAX_BOUND];
    int bound_count;
} te_cudnn_plan;

/* What a plan is made for: the device of a handle, or (handle NULL) one that is described. */
typedef struct te_cudnn_target {
    cudnnHandle_t handle;
    cudnnBackendDescriptor_t device;
} te_cudnn_target;

/* The first engine configuration of those that the library's heuristics offer which compiles.
 * UNSUPPORTED where there is none. */
te_status te_cudnn_plan_make(te_cudnn_graph *graph, const te_cudnn_target *target,
                             te_cudnn_plan *plan);
/* The plan of a graph from the text of an earlier one, of the same graph, library and device. */
te_status te_cudnn_plan_restore(const te_cudnn_graph *graph, cudnnHandle_t handle, const char *text,
                                size_t size, te_cudnn_plan *plan);
/* That text (JSON), which the caller frees; NULL where the library gives none. */
char *te_cudnn_plan_text(const te_cudnn_plan *plan, size_t *size);
void te_cudnn_plan_clear(te_cudnn_plan *plan);
/* Runs on the handle's stream; `places` are device pointers by place. */
te_status te_cudnn_plan_run(const te_cudnn_plan *plan, cudnnHandle_t handle, void *const *places,
                            void *workspace);

#endif
