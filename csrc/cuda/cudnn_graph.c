/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/cudnn_graph.h"

#include <stdbool.h>
#include <string.h>

#include "core/status.h"

typedef cudnnBackendDescriptor_t descriptor;

static const int64_t one[4] = {1, 1, 1, 1};
static te_cudnn_tensor nothing; /* what a failed graph hands out */

/* ---- descriptors ---- */

static void keep_status(te_cudnn_graph *graph, te_status status)
{
    if (graph->status == TE_OK) graph->status = status;
}

static descriptor create(te_cudnn_graph *graph, cudnnBackendDescriptorType_t type)
{
    descriptor made = NULL;
    if (graph->status != TE_OK) return NULL;
    if (graph->owned_count == TE_CUDNN_MAX_DESCRIPTORS) {
        keep_status(graph, TE_FAIL(TE_ERROR_STATE, "a graph of more than %d descriptors",
                                   TE_CUDNN_MAX_DESCRIPTORS));
        return NULL;
    }
    keep_status(graph, TE_CUDNN(cudnnBackendCreateDescriptor, type, &made));
    if (made != NULL) graph->owned[graph->owned_count++] = made;
    return made;
}

static void set(te_cudnn_graph *graph, descriptor of, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, int64_t count, const void *values)
{
    if (graph->status != TE_OK) return;
    keep_status(graph, TE_CUDNN(cudnnBackendSetAttribute, of, name, type, count, values));
}

static void set_descriptor(te_cudnn_graph *graph, descriptor of, cudnnBackendAttributeName_t name,
                           descriptor value)
{
    set(graph, of, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

static void set_tensor(te_cudnn_graph *graph, descriptor of, cudnnBackendAttributeName_t name,
                       const te_cudnn_tensor *value)
{
    if (value != NULL) set_descriptor(graph, of, name, value->descriptor);
}

static void finalize(te_cudnn_graph *graph, descriptor made)
{
    if (graph->status != TE_OK) return;
    keep_status(graph, TE_CUDNN(cudnnBackendFinalize, made));
}

static void add_operation(te_cudnn_graph *graph, descriptor operation)
{
    finalize(graph, operation);
    if (graph->status != TE_OK) return;
    if (graph->operation_count == TE_CUDNN_MAX_OPERATIONS) {
        keep_status(graph, TE_FAIL(TE_ERROR_STATE, "a graph of more than %d operations",
                                   TE_CUDNN_MAX_OPERATIONS));
        return;
    }
    graph->operations[graph->operation_count++] = operation;
}

void te_cudnn_graph_clear(te_cudnn_graph *graph)
{
    while (graph->owned_count > 0) {
        (void)te_cudnn.cudnnBackendDestroyDescriptor(graph->owned[--graph->owned_count]);
    }
}

/* ---- tensors ---- */

/* The tensor's number is its uid. */
static te_cudnn_tensor *add_tensor(te_cudnn_graph *graph, cudnnDataType_t dtype,
                                   const int64_t shape[4], const int64_t strides[4],
                                   cudnnBackendAttributeName_t kind, int64_t alignment,
                                   const te_cudnn_tensor *offsets)
{
    const int64_t uid = graph->tensor_count + 1;
    const bool yes = true;
    te_cudnn_tensor *tensor = &graph->tensors[graph->tensor_count];
    int64_t dense[4] = {0, 0, 0, 1};
    if (graph->status != TE_OK) return &nothing;
    if (graph->tensor_count == TE_CUDNN_MAX_TENSORS) {
        keep_status(graph, TE_FAIL(TE_ERROR_STATE, "a graph of more than %d tensors",
                                   TE_CUDNN_MAX_TENSORS));
        return &nothing;
    }
    graph->tensor_count++;
    for (int i = 2; i >= 0; i--) dense[i] = dense[i + 1] * shape[i + 1];
    memcpy(tensor->shape, shape, sizeof tensor->shape);
    tensor->descriptor = create(graph, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    set(graph, tensor->descriptor, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &dtype);
    set(graph, tensor->descriptor, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, shape);
    set(graph, tensor->descriptor, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4,
        strides != NULL ? strides : dense);
    set(graph, tensor->descriptor, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
    set(graph, tensor->descriptor, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1,
        &alignment);
    if (kind != CUDNN_ATTR_TENSOR_UNIQUE_ID) {
        set(graph, tensor->descriptor, kind, CUDNN_TYPE_BOOLEAN, 1, &yes);
    }
    set_tensor(graph, tensor->descriptor, CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, offsets);
    finalize(graph, tensor->descriptor);
    return tensor;
}

static te_cudnn_bound *bind(te_cudnn_graph *graph, int32_t place)
{
    static te_cudnn_bound none;
    if (graph->status != TE_OK) return &none;
    if (graph->bound_count == TE_CUDNN_MAX_BOUND) {
        keep_status(graph, TE_FAIL(TE_ERROR_STATE, "a graph that binds more than %d tensors",
                                   TE_CUDNN_MAX_BOUND));
        return &none;
    }
    graph->bound[graph->bound_count] = (te_cudnn_bound){graph->tensor_count, place, {0}};
    return &graph->bound[graph->bound_count++];
}

te_cudnn_tensor *te_cudnn_at(te_cudnn_graph *graph, int32_t place, cudnnDataType_t dtype,
                             const int64_t shape[4], const int64_t strides[4], int64_t alignment,
                             const te_cudnn_tensor *offsets)
{
    te_cudnn_tensor *tensor =
        add_tensor(graph, dtype, shape, strides, CUDNN_ATTR_TENSOR_UNIQUE_ID, alignment, offsets);
    (void)bind(graph, place);
    return tensor;
}

te_cudnn_tensor *te_cudnn_virtual(te_cudnn_graph *graph, cudnnDataType_t dtype,
                                  const int64_t shape[4], const int64_t strides[4])
{
    return te_cudnn_virtual_from(graph, dtype, shape, strides, NULL);
}

te_cudnn_tensor *te_cudnn_virtual_from(te_cudnn_graph *graph, cudnnDataType_t dtype,
                                       const int64_t shape[4], const int64_t strides[4],
                                       const te_cudnn_tensor *offsets)
{
    return add_tensor(graph, dtype, shape, strides, CUDNN_ATTR_TENSOR_IS_VIRTUAL, 16, offsets);
}

te_cudnn_tensor *te_cudnn_float(te_cudnn_graph *graph, float value)
{
    te_cudnn_tensor *tensor =
        add_tensor(graph, CUDNN_DATA_FLOAT, one, one, CUDNN_ATTR_TENSOR_IS_BY_VALUE, 16, NULL);
    bind(graph, -1)->constant.f = value;
    return tensor;
}

te_cudnn_tensor *te_cudnn_int(te_cudnn_graph *graph, int32_t value)
{
    te_cudnn_tensor *tensor =
        add_tensor(graph, CUDNN_DATA_INT32, one, one, CUDNN_ATTR_TENSOR_IS_BY_VALUE, 16, NULL);
    bind(graph, -1)->constant.i = value;
    return tensor;
}

/* ---- operations ---- */

static int is_truth(cudnnPointwiseMode_t mode)
{
    return mode == CUDNN_POINTWISE_CMP_GE || mode == CUDNN_POINTWISE_CMP_LT ||
           mode == CUDNN_POINTWISE_CMP_GT || mode == CUDNN_POINTWISE_LOGICAL_AND;
}

/* An operation of a kind that a descriptor describes, which is complete now. */
static descriptor operation_of(te_cudnn_graph *graph, descriptor how,
                               cudnnBackendDescriptorType_t type, cudnnBackendAttributeName_t name)
{
    descriptor operation;
    finalize(graph, how);
    operation = create(graph, type);
    set_descriptor(graph, operation, name, how);
    return operation;
}

static void pointwise(te_cudnn_graph *graph, cudnnPointwiseMode_t mode, cudnnDataType_t compute,
                      int64_t axis, te_cudnn_tensor *inputs[3], te_cudnn_tensor *y)
{
    static const cudnnBackendAttributeName_t names[] = {CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
                                                        CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
                                                        CUDNN_ATTR_OPERATION_POINTWISE_TDESC};
    descriptor how = create(graph, CUDNN_BACKEND_POINTWISE_DESCRIPTOR), operation;
    set(graph, how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set(graph, how, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &compute);
    if (axis >= 0) set(graph, how, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    operation = operation_of(graph, how, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
                             CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    for (int i = 0; i < 3; i++) set_tensor(graph, operation, names[i], inputs[i]);
    set_tensor(graph, operation, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    add_operation(graph, operation);
}

void te_cudnn_pointwise_to(te_cudnn_graph *graph, cudnnPointwiseMode_t mode, te_cudnn_tensor *x,
                           te_cudnn_tensor *b, te_cudnn_tensor *y)
{
    te_cudnn_tensor *inputs[3] = {x, b, NULL};
    pointwise(graph, mode, CUDNN_DATA_FLOAT, -1, inputs, y);
}

te_cudnn_tensor *te_cudnn_pointwise(te_cudnn_graph *graph, cudnnPointwiseMode_t mode,
                                    te_cudnn_tensor *x, te_cudnn_tensor *b, cudnnDataType_t dtype)
{
    const cudnnDataType_t compute = is_truth(mode)              ? CUDNN_DATA_BOOLEAN
                                    : dtype == CUDNN_DATA_INT32 ? CUDNN_DATA_INT32
                                                                : CUDNN_DATA_FLOAT;
    te_cudnn_tensor *inputs[3] = {x, b, NULL}, *y;
    int64_t shape[4];
    for (int i = 0; i < 4; i++) {
        shape[i] = b != NULL && b->shape[i] > x->shape[i] ? b->shape[i] : x->shape[i];
    }
    y = te_cudnn_virtual(graph, is_truth(mode) ? CUDNN_DATA_BOOLEAN : dtype, shape, NULL);
    pointwise(graph, mode, compute, -1, inputs, y);
    return y;
}

te_cudnn_tensor *te_cudnn_index(te_cudnn_graph *graph, te_cudnn_tensor *x, int64_t axis)
{
    te_cudnn_tensor *inputs[3] = {x, NULL, NULL};
    te_cudnn_tensor *y = te_cudnn_virtual(graph, CUDNN_DATA_INT32, x->shape, NULL);
    pointwise(graph, CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32, axis, inputs, y);
    return y;
}

te_cudnn_tensor *te_cudnn_select(te_cudnn_graph *graph, te_cudnn_tensor *x,
                                 te_cudnn_tensor *otherwise, te_cudnn_tensor *keep)
{
    te_cudnn_tensor *inputs[3] = {x, otherwise, keep};
    te_cudnn_tensor *y = te_cudnn_virtual(graph, CUDNN_DATA_FLOAT, x->shape, NULL);
    pointwise(graph, CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, -1, inputs, y);
    return y;
}

void te_cudnn_reduce(te_cudnn_graph *graph, cudnnReduceTensorOp_t how, te_cudnn_tensor *x,
                     te_cudnn_tensor *y)
{
    const cudnnDataType_t compute = CUDNN_DATA_FLOAT;
    descriptor reduction = create(graph, CUDNN_BACKEND_REDUCTION_DESCRIPTOR), operation;
    set(graph, reduction, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1,
        &how);
    set(graph, reduction, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &compute);
    operation = operation_of(graph, reduction, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
                             CUDNN_ATTR_OPERATION_REDUCTION_DESC);
    set_tensor(graph, operation, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_tensor(graph, operation, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    add_operation(graph, operation);
}

void te_cudnn_multiply(te_cudnn_graph *graph, te_cudnn_tensor *a, te_cudnn_tensor *b,
                       te_cudnn_tensor *c, const te_cudnn_tensor *extents[3])
{
    static const cudnnBackendAttributeName_t names[] = {
        CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC,
        CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC,
        CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC};
    const cudnnDataType_t compute = CUDNN_DATA_FLOAT;
    descriptor how = create(graph, CUDNN_BACKEND_MATMUL_DESCRIPTOR), operation;
    set(graph, how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &compute);
    operation = operation_of(graph, how, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
                             CUDNN_ATTR_OPERATION_MATMUL_DESC);
    set_tensor(graph, operation, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set_tensor(graph, operation, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    set_tensor(graph, operation, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    for (int i = 0; i < 3; i++) set_tensor(graph, operation, names[i], extents[i]);
    add_operation(graph, operation);
}

void te_cudnn_reshape(te_cudnn_graph *graph, te_cudnn_tensor *x, te_cudnn_tensor *y)
{
    descriptor operation = create(graph, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set_tensor(graph, operation, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    set_tensor(graph, operation, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    add_operation(graph, operation);
}

void te_cudnn_bernoulli(te_cudnn_graph *graph, te_cudnn_tensor *seed, te_cudnn_tensor *offset,
                        double probability, te_cudnn_tensor *y)
{
    const cudnnRngDistribution_t distribution = CUDNN_RNG_DISTRIBUTION_BERNOULLI;
    descriptor how = create(graph, CUDNN_BACKEND_RNG_DESCRIPTOR), operation;
    set(graph, how, CUDNN_ATTR_RNG_DISTRIBUTION, CUDNN_TYPE_RNG_DISTRIBUTION, 1, &distribution);
    set(graph, how, CUDNN_ATTR_RNG_BERNOULLI_DIST_PROBABILITY, CUDNN_TYPE_DOUBLE, 1, &probability);
    operation = operation_of(graph, how, CUDNN_BACKEND_OPERATION_RNG_DESCRIPTOR,
                             CUDNN_ATTR_OPERATION_RNG_DESC);
    set_tensor(graph, operation, CUDNN_ATTR_OPERATION_RNG_YDESC, y);
    set_tensor(graph, operation, CUDNN_ATTR_OPERATION_RNG_SEED, seed);
    set_tensor(graph, operation, CUDNN_ATTR_OPERATION_RNG_OFFSET_DESC, offset);
    add_operation(graph, operation);
}
