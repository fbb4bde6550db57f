/* SPDX-License-Identifier: Apache-2.0
 *
 * plan_call.c - the custom call te_plan: a run of a plan, or of some of its stages.
 *
 * Attributes: `graph`, its text (te_graph_write), and `id`, the plan's, by which it is found again;
 * `first` and `end`, the stages from the first to before the end; `slots`, the first slot of each
 * owner in its chunk, int32; `rows`, where no input says them, and of a run of some stages.
 * Arguments are the buffers that the run is given, results those that it makes (te_plan_ports), in
 * the order of the plan, then scratch: XLA gives no other memory. So what a forward saves, and what
 * one run of a plan leaves to the next, are arrays of XLA.
 *
 * State is never changed behind XLA's back. What a run is given and changes is a result too, which
 * shares the memory of its argument; XLA copies the argument first where somebody still reads it.
 * JAX keeps a scale [1] and a history [length] for each quantizer, here both are columns of a chunk
 * of slots. A plan only reads scales, and of a history writes row 0 alone, the amaxes of this step:
 * so the chunks of a call are a vector of its quantizers' scales and a row of zeros, the row comes
 * back with the amaxes, and what follows from them for each scale and history is JAX's to compute.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/fork.h"
#include "core/status.h"
#include "xla/frame.h"

/* ---- plans by text ---- */

/* Plans that custom calls have met stay until so many are there: XLA does not say when its last
 * program with one has gone. Then all are let go, and those that still run are made again. */
#define MOST_KEPT 4096
#define BUCKETS 256

typedef struct kept_plan {
    struct kept_plan *next;
    te_plan *plan; /* held */
    te_plan_info info;
    int64_t id; /* as the call says it */
    size_t length;
    char text[];
} kept_plan;

/* The lock guards the lists; each store leaves them whole, for a child that is forked meanwhile. */
static _Atomic(kept_plan *) buckets[BUCKETS];
static int kept_count;
TE_PROCESS_LOCK(lock);

static void let_all_go(void)
{
    for (int b = 0; b < BUCKETS; b++) {
        kept_plan *kept = atomic_exchange(&buckets[b], NULL);
        while (kept != NULL) {
            kept_plan *next = kept->next;
            te_plan_release(kept->plan);
            free(kept);
            kept = next;
        }
    }
    kept_count = 0;
}

/* With the lock: the plan of a text, made where nobody has it. */
static te_status find_kept(const te_xla_span *text, int64_t id, const kept_plan **found)
{
    _Atomic(kept_plan *) *bucket = &buckets[(uint64_t)id % BUCKETS];
    kept_plan *kept = atomic_load(bucket);
    te_graph_desc graph;
    te_direction direction;
    te_status st;
    while (kept != NULL && (kept->id != id || kept->length != text->length ||
                            memcmp(kept->text, text->text, text->length) != 0)) {
        kept = kept->next;
    }
    *found = kept;
    if (kept != NULL) return TE_OK;
    if (kept_count >= MOST_KEPT) let_all_go();
    kept = calloc(1, sizeof *kept + text->length + 1);
    TE_FAIL_IF(kept == NULL, TE_ERROR_MEMORY, "no memory for the text of a plan");
    memcpy(kept->text, text->text, text->length);
    st = te_graph_read(kept->text, &graph, &direction);
    if (st == TE_OK) {
        st = te_plan_make(&graph, direction, &kept->plan);
        te_graph_release(&graph);
    }
    if (st != TE_OK) {
        free(kept);
        return st;
    }
    (void)te_plan_describe(kept->plan, &kept->info); /* it is there */
    kept->id = id;
    kept->length = text->length;
    kept->next = atomic_load(bucket);
    atomic_store(bucket, kept);
    kept_count++;
    *found = kept;
    return TE_OK;
}

/* The plan of a call, which the caller releases; what `info` points to lives as long. */
static te_status hold_plan(const te_xla_attributes *attributes, te_plan **plan, te_plan_info *info)
{
    const te_xla_span *text = te_xla_find(attributes, "graph", TE_XLA_ATTRIBUTE_STRING);
    const kept_plan *kept = NULL;
    int64_t id = 0;
    te_status st;
    TE_FAIL_IF(text == NULL, TE_ERROR_INVALID, "custom call: expected the attribute graph");
    TE_TRY(te_xla_integer(attributes, "id", &id));
    (void)pthread_mutex_lock(&lock);
    st = find_kept(text, id, &kept);
    if (st == TE_OK) {
        te_plan_retain(kept->plan);
        *plan = kept->plan;
        *info = kept->info;
    }
    (void)pthread_mutex_unlock(&lock);
    return st;
}

/* The stages that a call runs. */
static te_status take_stages(const te_xla_attributes *attributes, const te_plan_info *info,
                             int32_t stages[2])
{
    int64_t first = 0, end = 0;
    TE_TRY(te_xla_integer(attributes, "first", &first));
    TE_TRY(te_xla_integer(attributes, "end", &end));
    TE_FAIL_IF(first < 0 || end < first || end > info->stage_count, TE_ERROR_INVALID,
               "custom call: stages %lld to %lld, of %d", (long long)first, (long long)end,
               (int)info->stage_count);
    stages[0] = (int32_t)first;
    stages[1] = (int32_t)end;
    return TE_OK;
}

static te_status check_stages(const te_xla_attributes *attributes, const te_plan_info *info)
{
    int32_t stages[2] = {0, 0};
    TE_TRY(take_stages(attributes, info, stages));
    for (int32_t s = stages[0]; s < stages[1]; s++) {
        TE_FAIL_IF(info->stages[s].external, TE_ERROR_UNSUPPORTED,
                   "custom call: a function of the program runs stage %s", info->stages[s].name);
    }
    return TE_OK;
}

static te_status check(const te_xla_attributes *attributes)
{
    te_plan *plan = NULL;
    te_plan_info info;
    te_status st;
    TE_TRY(hold_plan(attributes, &plan, &info));
    st = check_stages(attributes, &info);
    te_plan_release(plan);
    return st;
}

/* ---- a run ---- */

/* A plan of up to so many buffers and owners runs without an allocation for them. */
#define FEW_BUFFERS 64
#define FEW_OWNERS 16

typedef struct plan_run {
    te_plan_info info;
    te_plan_call call;
    te_xla_cursor arguments, results;
    te_leading leading[TE_SEQUENCES];
    int whole; /* all stages run */
    te_tensor *buffers;
    int32_t *slots;
    unsigned char *ports; /* te_plan_ports */
    int32_t few_slots[2 * FEW_OWNERS];
    unsigned char few_ports[FEW_BUFFERS];
    te_tensor few_buffers[FEW_BUFFERS]; /* what a run begins with is 0 up to here */
} plan_run;

/* Dims of a buffer as the plan has them, if the call's may have more. */
static int32_t dims_to_join(const te_buffer_info *buffer)
{
    return buffer->leading && buffer->ndim < 3 ? buffer->ndim : 0;
}

static void note_leading(const te_xla_buffer *buffer, int32_t inner, te_leading *leading)
{
    leading->count = buffer->rank < inner ? 0 : (int32_t)(buffer->rank - inner);
    if (leading->count > TE_MAX_LEADING) leading->count = TE_MAX_LEADING;
    for (int32_t i = 0; i < leading->count; i++) leading->dims[i] = buffer->dims[i];
}

static te_status take_arguments(plan_run *run)
{
    const te_plan_info *info = &run->info;
    for (int32_t i = 0; i < info->buffer_count; i++) {
        const te_buffer_info *buffer = &info->buffers[i];
        const te_xla_buffer *own = NULL;
        if ((run->ports[i] & TE_PORT_GIVEN) == 0) continue;
        TE_TRY(te_xla_take(&run->arguments, buffer->name, dims_to_join(buffer), &run->buffers[i],
                           &own));
        for (int s = 0; s < TE_SEQUENCES && run->whole; s++) {
            if (i != info->sized_by[s]) continue;
            TE_FAIL_IF(run->buffers[i].ndim != buffer->ndim, TE_ERROR_INVALID,
                       "custom call: %s: %lld dims, expected %d", buffer->name,
                       (long long)own->rank, (int)buffer->ndim);
            note_leading(own, buffer->ndim < 3 ? 1 : 2, &run->leading[s]);
        }
    }
    return TE_OK;
}

static te_status take_results(plan_run *run)
{
    for (int32_t i = 0; i < run->info.buffer_count; i++) {
        const te_buffer_info *buffer = &run->info.buffers[i];
        if ((run->ports[i] & TE_PORT_MADE) == 0) continue;
        if (run->ports[i] & TE_PORT_GIVEN) {
            TE_TRY(te_xla_take_updated(&run->results, buffer->name, &run->buffers[i]));
        } else {
            TE_TRY(te_xla_take(&run->results, buffer->name, dims_to_join(buffer), &run->buffers[i],
                               NULL));
        }
    }
    return TE_OK;
}

/* All stages find sizes in the shapes of arguments; some of them are told the rows, and there is no
 * other size. */
static te_status take_sizes(plan_run *run, const te_xla_attributes *attributes)
{
    int64_t *rows = &run->call.sizes.of[TE_SYMBOL_ROWS];
    if (run->whole && run->info.sized_by[0] >= 0) return TE_OK;
    TE_FAIL_IF(!run->whole && run->info.symbols >> (TE_SYMBOL_ROWS + 1) != 0, TE_ERROR_UNSUPPORTED,
               "custom call: the plan has sizes besides its rows, so all its stages run together");
    return te_xla_integer(attributes, "rows", rows);
}

static te_status take_slots(plan_run *run, const te_xla_attributes *attributes)
{
    const te_xla_array *given = te_xla_find(attributes, "slots", TE_XLA_ATTRIBUTE_ARRAY);
    const int way = run->info.direction != TE_DIRECTION_FORWARD;
    run->call.slots = run->slots;
    if (run->info.owners == 0) return TE_OK;
    TE_FAIL_IF(
        given == NULL || given->dtype != TE_XLA_S32 || given->size < (size_t)run->info.owners,
        TE_ERROR_INVALID, "custom call: slots: expected %d of 32 bits", (int)run->info.owners);
    for (int32_t i = 0; i < run->info.owners; i++) {
        memcpy(&run->slots[2 * i + way], (const int32_t *)given->data + i, sizeof *run->slots);
    }
    return TE_OK;
}

static te_status run_stages(plan_run *run, const te_xla_call *call)
{
    const te_xla_attributes *attributes = &call->frame->attributes;
    int32_t stages[2] = {0, 0};
    run->arguments = te_xla_arguments(call);
    run->results = te_xla_results(call);
    TE_TRY(take_stages(attributes, &run->info, stages));
    run->call.first_stage = stages[0];
    run->call.end_stage = stages[1];
    run->whole = stages[0] == 0 && stages[1] == run->info.stage_count;
    TE_TRY(te_plan_ports(run->call.plan, stages[0], stages[1], run->ports));
    TE_TRY(take_sizes(run, attributes));
    TE_TRY(take_slots(run, attributes));
    TE_TRY(take_arguments(run));
    if (run->whole) {
        TE_TRY(te_plan_take_sizes(&run->info, run->buffers, run->leading, &run->call.sizes));
    }
    TE_TRY(take_results(run));
    TE_TRY(te_xla_take_scratch(&run->results, &run->call.scratch, &run->call.scratch_size));
    TE_TRY(te_xla_no_more(&run->arguments));
    TE_TRY(te_xla_no_more(&run->results));
    return te_plan_run(call->context, &run->call, call->stream);
}

static te_status run(const te_xla_call *call)
{
    plan_run run;
    te_plan *plan = NULL;
    te_status st;
    memset(&run, 0, offsetof(plan_run, few_buffers));
    run.buffers = run.few_buffers;
    run.slots = run.few_slots;
    run.ports = run.few_ports;
    TE_TRY(hold_plan(&call->frame->attributes, &plan, &run.info));
    if (run.info.buffer_count > FEW_BUFFERS || run.info.owners > FEW_OWNERS) {
        const size_t buffers = (size_t)run.info.buffer_count * sizeof *run.buffers;
        const size_t slots = 2 * (size_t)run.info.owners * sizeof *run.slots;
        run.buffers = calloc(1, buffers + slots + (size_t)run.info.buffer_count);
        if (run.buffers == NULL) {
            st = TE_FAIL(TE_ERROR_MEMORY, "no memory for a run");
            goto done;
        }
        run.slots = (int32_t *)(void *)((char *)run.buffers + buffers);
        run.ports = (unsigned char *)run.buffers + buffers + slots;
    } else {
        memset(run.buffers, 0, (size_t)run.info.buffer_count * sizeof *run.buffers);
    }
    run.call.size = sizeof run.call;
    run.call.plan = plan;
    run.call.buffers = run.buffers;
    run.call.apart = 1;
    st = run_stages(&run, call);
done:
    if (run.buffers != run.few_buffers) free(run.buffers);
    te_plan_release(plan);
    return st;
}

static const te_xla_kind plan_call = {check, run};

te_xla_error *te_xla_plan_cpu(te_xla_frame *frame)
{
    return te_xla_handle(frame, TE_DEVICE_CPU, &plan_call);
}

te_xla_error *te_xla_plan_CUDA(te_xla_frame *frame)
{
    return te_xla_handle(frame, TE_DEVICE_CUDA, &plan_call);
}
