/* SPDX-License-Identifier: Apache-2.0
 *
 * cudnn_plan.c - from a graph to what runs it.
 */
#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "cuda/cudnn_graph.h"

typedef cudnnBackendDescriptor_t descriptor;

enum { MAX_CONFIGURATIONS = 8 };

static void destroy(descriptor made)
{
    if (made != NULL) (void)te_cudnn.cudnnBackendDestroyDescriptor(made);
}

/* A new descriptor with one attribute. */
static te_status create_with(cudnnBackendDescriptorType_t type, cudnnBackendAttributeName_t name,
                             cudnnBackendAttributeType_t kind, int64_t count, const void *values,
                             descriptor *made)
{
    TE_TRY(TE_CUDNN(cudnnBackendCreateDescriptor, type, made));
    return TE_CUDNN(cudnnBackendSetAttribute, *made, name, kind, count, values);
}

/* Configurations of engines for a finalized graph, best first. */
static te_status ask_heuristics(descriptor graph, const te_cudnn_target *target,
                                descriptor *configurations, int64_t *count)
{
    const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    te_status st = TE_OK;
    descriptor heuristics = NULL;
    *count = 0;
    TE_TRY_DONE(create_with(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR,
                            CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                            &graph, &heuristics));
    TE_TRY_DONE(TE_CUDNN(cudnnBackendSetAttribute, heuristics, CUDNN_ATTR_ENGINEHEUR_MODE,
                         CUDNN_TYPE_HEUR_MODE, 1, &mode));
    if (target->handle == NULL) {
        TE_TRY_DONE(TE_CUDNN(cudnnBackendSetAttribute, heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP,
                             CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &target->device));
    }
    TE_TRY_DONE(TE_CUDNN(cudnnBackendFinalize, heuristics));
    for (int i = 0; i < MAX_CONFIGURATIONS; i++) {
        TE_TRY_DONE(TE_CUDNN(cudnnBackendCreateDescriptor, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR,
                             &configurations[i]));
    }
    TE_TRY_DONE(TE_CUDNN(cudnnBackendGetAttribute, heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                         CUDNN_TYPE_BACKEND_DESCRIPTOR, MAX_CONFIGURATIONS, count, configurations));
    if (*count > MAX_CONFIGURATIONS) *count = MAX_CONFIGURATIONS;
done:
    destroy(heuristics);
    return st;
}

/* The handle of a graph or a plan, where there is one. */
static te_status set_handle(descriptor of, cudnnBackendAttributeName_t name,
                            const te_cudnn_target *target)
{
    if (target->handle == NULL) return TE_OK;
    return TE_CUDNN(cudnnBackendSetAttribute, of, name, CUDNN_TYPE_HANDLE, 1, &target->handle);
}

/* Makes a plan of one attribute, a configuration or a text. */
static te_status finalize(const te_cudnn_target *target, cudnnBackendAttributeName_t name,
                          cudnnBackendAttributeType_t kind, int64_t length, const void *values,
                          te_cudnn_plan *plan)
{
    te_status st = TE_OK;
    int64_t workspace = 0, count = 0;
    TE_TRY_DONE(create_with(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, name, kind, length, values,
                            &plan->plan));
    TE_TRY_DONE(set_handle(plan->plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, target));
    TE_TRY_DONE(TE_CUDNN(cudnnBackendFinalize, plan->plan));
    TE_TRY_DONE(TE_CUDNN(cudnnBackendGetAttribute, plan->plan,
                         CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count,
                         &workspace));
    plan->workspace = (size_t)workspace;
done:
    if (st != TE_OK) te_cudnn_plan_clear(plan);
    return st;
}

static void take_bound(te_cudnn_plan *plan, const te_cudnn_graph *graph)
{
    memcpy(plan->bound, graph->bound, sizeof plan->bound);
    plan->bound_count = graph->bound_count;
}

te_status te_cudnn_plan_make(te_cudnn_graph *graph, const te_cudnn_target *target,
                             te_cudnn_plan *plan)
{
    te_status st = graph->status;
    descriptor configurations[MAX_CONFIGURATIONS] = {NULL}, whole = NULL;
    int64_t count = 0;
    memset(plan, 0, sizeof *plan);
    TE_TRY_DONE(st);
    TE_TRY_DONE(create_with(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, CUDNN_ATTR_OPERATIONGRAPH_OPS,
                            CUDNN_TYPE_BACKEND_DESCRIPTOR, graph->operation_count,
                            graph->operations, &whole));
    TE_TRY_DONE(set_handle(whole, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, target));
    TE_TRY_DONE(TE_CUDNN(cudnnBackendFinalize, whole));
    TE_TRY_DONE(ask_heuristics(whole, target, configurations, &count));
    st = TE_FAIL(TE_ERROR_UNSUPPORTED, "cuDNN has no engine for this attention");
    for (int64_t i = 0; i < count && st != TE_OK; i++) {
        st = finalize(target, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG,
                      CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &configurations[i], plan);
    }
    take_bound(plan, graph);
done:
    for (int i = 0; i < MAX_CONFIGURATIONS; i++) destroy(configurations[i]);
    destroy(whole);
    return st;
}

te_status te_cudnn_plan_restore(const te_cudnn_graph *graph, cudnnHandle_t handle, const char *text,
                                size_t size, te_cudnn_plan *plan)
{
    const te_cudnn_target target = {handle, NULL};
    memset(plan, 0, sizeof *plan);
    TE_TRY(graph->status);
    TE_TRY(finalize(&target, CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
                    (int64_t)size, text, plan));
    take_bound(plan, graph);
    return TE_OK;
}

char *te_cudnn_plan_text(const te_cudnn_plan *plan, size_t *size)
{
    int64_t length = 0;
    char *text = NULL;
    const cudnnBackendAttributeName_t name = CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION;
    if (te_cudnn.cudnnBackendGetAttribute(plan->plan, name, CUDNN_TYPE_CHAR, 0, &length, NULL) !=
            CUDNN_STATUS_SUCCESS ||
        length <= 0) {
        return NULL;
    }
    text = malloc((size_t)length);
    if (text != NULL && te_cudnn.cudnnBackendGetAttribute(plan->plan, name, CUDNN_TYPE_CHAR, length,
                                                          &length, text) == CUDNN_STATUS_SUCCESS) {
        *size = (size_t)length;
        return text;
    }
    free(text);
    return NULL;
}

void te_cudnn_plan_clear(te_cudnn_plan *plan)
{
    destroy(plan->plan);
    plan->plan = NULL;
}

te_status te_cudnn_plan_run(const te_cudnn_plan *plan, cudnnHandle_t handle, void *const *places,
                            void *workspace)
{
    te_status st = TE_OK;
    int64_t uids[TE_CUDNN_MAX_BOUND];
    const void *pointers[TE_CUDNN_MAX_BOUND];
    descriptor pack = NULL;
    for (int i = 0; i < plan->bound_count; i++) {
        const te_cudnn_bound *bound = &plan->bound[i];
        uids[i] = bound->uid;
        pointers[i] = bound->place < 0 ? (const void *)&bound->constant : places[bound->place];
    }
    TE_TRY_DONE(create_with(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR,
                            CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, plan->bound_count,
                            uids, &pack));
    TE_TRY_DONE(TE_CUDNN(cudnnBackendSetAttribute, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS,
                         CUDNN_TYPE_VOID_PTR, plan->bound_count, pointers));
    TE_TRY_DONE(TE_CUDNN(cudnnBackendSetAttribute, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE,
                         CUDNN_TYPE_VOID_PTR, 1, &workspace));
    TE_TRY_DONE(TE_CUDNN(cudnnBackendFinalize, pack));
    TE_TRY_DONE(TE_CUDNN(cudnnBackendExecute, handle, plan->plan, pack));
done:
    destroy(pack);
    return st;
}
