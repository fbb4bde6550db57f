# SPDX-License-Identifier: Apache-2.0
"""What a rank of tests/pytorch/test_context_parallel*.py runs, over its part of sequences."""

import functools
from contextlib import nullcontext

import torch
import torch.distributed as dist
from pytest import MonkeyPatch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.attention import steps
from transformer_engine.pytorch.attention.chunks import DenseTokens, PackedTokens
from transformer_engine.pytorch.attention.context_parallel import get_thd_partitioned_indices
from transformer_engine.pytorch.attention.ring import RingCall
from transformer_engine.pytorch.execution.autograd import run_call


@functools.cache
def _halves():
    """The groups of this rank of four: of neighbours, and of those between them."""
    size, rank = dist.get_world_size(), dist.get_rank()
    near = [dist.new_group([n, n + 1]) for n in range(0, size, 2)]
    far = [dist.new_group(list(range(n, size, 2))) for n in range(2)]
    return [near[rank // 2], far[rank % 2]]


@functools.cache
def _alone():
    """A group of this rank."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def spread(module, way):
    """Spread a module over all ranks."""
    group = _halves() if way == "a2a+p2p" else dist.group.WORLD
    module.set_context_parallel_group(group, list(range(dist.get_world_size())), None, way)


def part_of(tensor, form, padded=None, rank=None):
    """What a rank has of a tensor of a format."""
    size, rank = dist.get_world_size(), dist.get_rank() if rank is None else rank
    if form == "thd":
        at = get_thd_partitioned_indices(padded, int(padded[-1]), size, rank).long()
        return tensor[at.to(tensor.device)]
    dim = form.index("s")
    chunks = tensor.chunk(2 * size, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def attend(device, way, options, call, problem, recipe=None):
    """Output and gradients of this rank by name, of an attention with such options."""
    form, padded = options["qkv_format"], problem["padded"]
    module = te.DotProductAttention(**options)
    if module.softmax_type == "learnable":
        module.softmax_offset.data.copy_(problem["sink"])
    module.to(device)
    spread(module, way)
    given = {name: part_of(problem[name], form, padded) for name in ("q", "k", "v")}
    if "bias" in problem:
        given["bias"] = part_of(problem["bias"].transpose(2, 1), "bshd").transpose(1, 2)
    given = {name: t.to(device).requires_grad_() for name, t in given.items()}
    grad = part_of(problem["grad"], form, padded).to(device)
    call = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in call.items()}
    if "bias" in given:
        kind = {"core_attention_bias_type": "post_scale_bias"}
        call |= {**kind, "core_attention_bias": given["bias"]}
    te.reset_counters()
    with nullcontext() if recipe is None else te.autocast(recipe=recipe):
        out = module(given["q"], given["k"], given["v"], **call)
    found = {}
    if module.return_max_logit:
        out, found["top"] = out
    out.backward(grad)
    found |= {"out": out.detach(), **{name: t.grad for name, t in given.items()}}
    if module.softmax_type == "learnable":
        found["sink"] = module.softmax_offset.grad
    if recipe is not None:
        ran = [name for name in te.counters() if name.startswith("attention.")]
        assert ran and all("e4m3" in name for name in ran), ran
    return {name: t.cpu() for name, t in found.items()}


def compiled(device, problem):
    """Whether a compiled call has the bits of one that is not, and what one graph alone says."""
    module = te.DotProductAttention(4, (16, 8), qkv_format="bshd").to(device)
    spread(module, "p2p")
    heads = [part_of(problem[name], "bshd").to(device) for name in "qkv"]

    def run(*heads):
        return module(*(2.0 * each for each in heads)) + 1.0

    torch._dynamo.reset()
    out = torch.compile(run, backend="aot_eager")(*heads)
    same = torch.equal(out, run(*heads))
    torch._dynamo.reset()
    try:
        torch.compile(run, backend="aot_eager", fullgraph=True)(*heads)
    except Exception as error:  # its kind is not public
        return same, type(error).__name__
    return same, None


def delayed(device, problem):
    """Amax of the heads of a call, and the scales that it and the one behind it cast with."""
    module = te.DotProductAttention(4, 16, qkv_format="bshd").to(device)
    spread(module, "p2p")
    heads = [part_of(problem[name], "bshd").to(device) for name in "qkv"]
    found, own = [], DelayedScaling(fp8_dpa=True, amax_history_len=1, reduce_amax=False)
    for _ in range(2):
        with te.autocast(recipe=own):
            module(*heads)
            slots, at = module._slots, module._slots.forward_slot + 2
            scale, amax = slots.forward_scale[at].item(), slots.forward_history[0, at].item()
        found.append(scale)
    return amax, found


def said(device, way, options, call, shapes, recipe=None, apart=False):
    """What a refused call says, of queries, keys and values of such shapes for each rank.

    `apart`: each rank has scaling state of its own.
    """
    module = te.DotProductAttention(**options).to(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tensors = [torch.randn(shape, dtype=dtype, device=device) for shape in shapes[dist.get_rank()]]
    try:
        spread(module, way[dist.get_rank()] if isinstance(way, list) else way)
        own = {name: v.to(device) if torch.is_tensor(v) else v for name, v in call.items()}
        group = {"amax_reduction_group": _alone()} if apart else {}
        with nullcontext() if recipe is None else te.autocast(recipe=recipe, **group):
            module(*tensors, **own)
    except (ValueError, NotImplementedError) as error:
        return type(error).__name__, str(error)
    return None


def said_later(device, options, calls, shape, checks):
    """What the second of two calls of a rank says, whose kinds all ranks have made before."""
    module = te.DotProductAttention(**options).to(device)
    spread(module, "p2p")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tensors = [torch.randn(shape, dtype=dtype, device=device) for _ in range(3)]
    own = [{k: v.to(device) if torch.is_tensor(v) else v for k, v in c.items()} for c in calls]
    for call in own[:-1]:
        module(*tensors, **call)
    with MonkeyPatch.context() as patch:
        patch.setenv("TE_CHECK_RANKS", str(int(checks)))
        try:
            module(*tensors, **own[-1] if dist.get_rank() == 0 else own[0])
        except ValueError as error:
            return str(error)
    return None


def layer(device, kind, way, options, state, x, grad, angles):
    """Output, gradient of the input and of the parameters of a layer, of this rank's tokens."""
    module = getattr(te, kind)(**options, device=device)
    module.load_state_dict(state)
    spread(module, way)
    form = options.get("qkv_format", options.get("attn_input_format", "sbhd"))
    x, grad = (part_of(t, form).to(device) for t in (x, grad))
    x.requires_grad_()
    out = module(x, rotary_pos_emb=angles.to(device))
    out.backward(grad)
    of_parameters = {name: p.grad.cpu() for name, p in module.named_parameters()}
    return out.detach().cpu(), x.grad.cpu(), of_parameters


def dropped(device, way, problem):
    """Two runs from one random state have the same bits, with gradients and in a recompute."""
    options = {"num_attention_heads": 4, "kv_channels": 8, "qkv_format": "bshd"}
    options["attention_dropout"] = 0.5
    found = []
    for call in ({}, {}, {"checkpoint_core_attention": True}):
        torch.manual_seed(1 + dist.get_rank())
        found.append(attend(device, way, options, call, problem))
    return found


# ---- schedules in float64 ------------------------------------------------------------------------


def _sequences(query, key, fields):
    """Places of each sequence: (batch entry, queries, keys)."""
    if fields.get("query_offsets") is None:
        return [(b, slice(None), slice(None)) for b in range(query.shape[0])]
    names = ("query_offsets", "query_lengths", "key_offsets", "key_lengths")
    columns = [fields[name].tolist() for name in names]
    return [
        (0, slice(q, q + m), slice(k, k + n))
        for q, m, k, n in zip(columns[0][:-1], columns[1], columns[2][:-1], columns[3], strict=True)
    ]


def _weights(query, key, fields, statistics=None):
    """Exponentiated scores [heads, queries, keys] over their sum, and its logarithm."""
    scores = fields["scale"] * torch.einsum("qhd,khd->hqk", query, key)
    if fields["window_right"] == 0:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    total = scores.logsumexp(-1) if statistics is None else statistics
    return (scores - total[..., None]).exp(), total


def _attention(query, key, value, output, *, statistics, top, **fields):
    output.zero_()
    statistics.fill_(-torch.inf)
    packed = fields.get("query_offsets") is not None
    for b, q, k in _sequences(query, key, fields):
        weights, total = _weights(query[b, q], key[b, k], fields)
        output[b, q] = torch.einsum("hqk,khd->qhd", weights, value[b, k])
        if packed:
            statistics[b, q] = total.T
        else:
            statistics[b] = total


def _attention_backward(grad, query, key, value, output, statistics, *, grad_query, grad_key,
                        grad_value, **fields):  # fmt: skip
    for each in (grad_query, grad_key, grad_value):
        each.zero_()
    packed = fields.get("query_offsets") is not None
    for b, q, k in _sequences(query, key, fields):
        total = statistics[b, q].T if packed else statistics[b]
        weights, _ = _weights(query[b, q], key[b, k], fields, total)
        of_weights = torch.einsum("qhd,khd->hqk", grad[b, q], value[b, k])
        delta = (grad[b, q] * output[b, q]).sum(-1).T[..., None]
        of_scores = fields["scale"] * weights * (of_weights - delta)
        grad_query[b, q] = torch.einsum("hqk,khd->qhd", of_scores, key[b, k])
        grad_key[b, k] = torch.einsum("hqk,qhd->khd", of_scores, query[b, q])
        grad_value[b, k] = torch.einsum("hqk,qhd->khd", weights, grad[b, q])


def _attention_merge(total, step, output, total_statistics=None, step_statistics=None,
                     statistics=None):  # fmt: skip
    if statistics is None:
        output.copy_(total + step)
        return
    merged = torch.logaddexp(total_statistics, step_statistics)
    of_total, of_step = (
        (each - merged).exp().masked_fill(each == -torch.inf, 0.0)
        for each in (total_statistics, step_statistics)
    )
    output.copy_(of_total * total + of_step * step)
    statistics.copy_(merged)


def ring_in_float64(device, form, causal, problem):
    """Output and gradients of a ring whose operators compute in float64."""
    del device
    padded, size = problem["padded"], dist.get_world_size()
    with MonkeyPatch.context() as patch:
        mine = {"attention": _attention, "attention_backward": _attention_backward}
        patch.setattr(steps, "_OPERATORS", mine | {"attention_merge": _attention_merge})
        made = [part_of(problem[n], form, padded).requires_grad_() for n in "qkv"]
        tokens = DenseTokens()
        if padded is not None:
            side = problem["cu"], padded, int(padded.diff().max())
            tokens = PackedTokens(size, side, side)
        own = steps.Steps(form, problem["q"].shape[-1] ** -0.5, 0.0, 0.0, True, False)
        out = run_call(
            RingCall(own, tokens, dist.group.WORLD, causal, None, None), *made, None, None
        )
        out.backward(part_of(problem["grad"], form, padded).view_as(out))
    return {
        "out": out.detach().flatten(-2),
        **{n: t.grad for n, t in zip("qkv", made, strict=True)},
    }
