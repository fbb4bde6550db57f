# SPDX-License-Identifier: Apache-2.0
"""How the attention of a `MultiheadAttention` is part of a plan: projections, angles, the node."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.pytorch.attention import fp8, plan
from transformer_engine.pytorch.attention.problem import AttentionOptions, packed_sizes
from transformer_engine.pytorch.module.layer_call import Attending
from transformer_engine.pytorch.torchside.modes import autocast_dtype


class Projections(NamedTuple):
    """Layout of the projections: one of all three, or one of queries and one of keys and values."""

    heads: int  # of queries
    groups: int  # heads of keys and values
    k: int  # channels of a head of queries and keys
    v: int  # channels of a head of values
    interleaved: bool
    """A group's queries, key and value lie side by side; else all queries do, then all keys."""
    crossed: bool  # keys and values are a projection of another sequence

    def rows(self) -> dict[str, int]:
        """Outputs of each of them: rows of the weights."""
        return {"query": self.heads * self.k, "key": self.groups * self.k,
                "value": self.groups * self.v}  # fmt: skip

    def slices(self) -> tuple[tuple[int, ...], ...]:
        """The same as slices of a graph (see `attention_graphs.AttentionSpec`)."""
        heads, groups, k, v = self[:4]
        if self.crossed:
            query, before = (heads, k, 0, k), 0
        elif not self.interleaved:
            query, before = (heads, k, 0, k), heads * k
        else:
            each = heads // groups
            before, stride = each * k, (each + 1) * k + v
            query = (heads, k, 0, stride) if each == 1 else (heads, k, 0, stride, each)
            return query, (groups, k, before, stride), (groups, v, before + k, stride)
        if self.interleaved:
            return query, (groups, k, 0, k + v), (groups, v, k, k + v)
        return query, (groups, k, before, k), (groups, v, before + groups * k, v)

    def split(self, query: Tensor, key_value: Tensor | None) -> tuple[Tensor, ...]:
        """Queries, keys and values [..., heads, channels] as views of the projections.

        `query` is the projection of the hidden states; `key_value`, that of another sequence, is
        None unless it is `crossed`.
        """
        if key_value is None:
            return self._split(query, self.heads)
        return query.unflatten(-1, (self.heads, self.k)), *self._split(key_value, 0)

    def _split(self, mixed: Tensor, heads: int) -> tuple[Tensor, ...]:
        """Queries (of `heads` heads; 0: there are none), keys and values of one projection.

        One split, so that its backward is one pass that writes the gradient of the projection.
        """
        _, groups, k, v, *_ = self
        each = heads // groups
        lead = mixed.shape[:-1]
        sizes = [each * k, k, v] if heads else [k, v]
        if self.interleaved:
            parts = torch.split_with_sizes(mixed.view(*lead, groups, sum(sizes)), sizes, -1)
            if each <= 1:
                return parts
            return parts[0].reshape(*lead, heads, k), parts[1], parts[2]
        if k == v:
            counts = [heads, groups, groups] if heads else [groups, groups]
            return torch.split_with_sizes(mixed.view(*lead, sum(counts), k), counts, -2)
        parts = torch.split_with_sizes(mixed, [groups * size for size in sizes], -1)
        key, value = parts[-2].view(*lead, groups, k), parts[-1].view(*lead, groups, v)
        return (parts[0].view(*lead, heads, k), key, value) if heads else (key, value)


def _matches_input(keys: Any, inp: Tensor, batch: int | None) -> bool:
    """Return whether a source of keys goes with the input; `batch`: the dim of it, or None.

    Inside of `torch.autocast` projections take any dtype.
    """
    return keys is inp or (
        type(keys) is Tensor
        and keys.dim() == inp.dim()
        and (keys.dtype is inp.dtype or autocast_dtype(inp.device.type) is not None)
        and keys.device == inp.device
        and (batch is None or keys.shape[batch] == inp.shape[batch])
        and keys.shape[-1] == inp.shape[-1]
    )


def _rotary_angles(
    given: Any, lengths: tuple[int, int], slices: tuple, inp: Tensor
) -> tuple[Tensor, ...] | None:
    """Angles [positions, channels] of queries and keys; None for what is to be called, or refused.

    One for both where they are the same.
    """
    if given is None:
        return ()
    both = given if isinstance(given, tuple | list) else (given, given)
    if len(both) != 2:
        return None
    found = []
    for angles, length, slice_ in zip(both, lengths, slices, strict=False):
        if (
            type(angles) is not Tensor
            or angles.dim() != 4
            or angles.shape[1:3] != (1, 1)
            or angles.requires_grad
            or angles.shape[0] < length
            or angles.shape[3] > slice_[1]
            or angles.shape[3] % 2 != 0
        ):
            return None
        flat = angles.reshape(angles.shape[0], angles.shape[3])
        found.append(flat.to(inp.device, torch.float32).contiguous())
    return tuple(found[:1] if both[0] is both[1] else found)


def attention_in_plan(
    layer: Any, inp: Tensor, options: AttentionOptions, dtype: torch.dtype, replay: Any
) -> Attending | None:
    """How a call of a `MultiheadAttention` over `inp` attends, with heads of a dtype.

    None where it has to call its modules. `replay` is as of `fp8.repeated`.
    """
    core, source = layer._modules["core_attention"], options.encoder_output
    slices, packed = layer._projections().slices(), layer.qkv_format == "thd"
    s, b = (1, 0) if layer.qkv_format == "bshd" else (0, 1)
    like = inp  # of which shape, dtype and device are read
    if inp.dtype is not dtype:
        like = inp.new_empty(1, dtype=dtype).expand(inp.shape)
    keys = like if source is None else source
    if (
        options.inference_params is not None
        or options.checkpoint_core_attention
        or options.thd_attention_policies is not None
        or core.cp_size > 1  # no plan holds attention over ranks
        or core.qkv_format != layer.qkv_format
        or (source is None) != (layer.attention_type == "self")
        or not _matches_input(keys, like, None if packed else b)
    ):
        return None
    tokens = (inp.shape[0], keys.shape[0]) if packed else None
    if packed:
        batch, *lengths = packed_sizes(options, *tokens)
    else:
        batch, lengths = inp.shape[b], (inp.shape[s], keys.shape[s])
    angles = _rotary_angles(options.rotary_pos_emb, lengths, slices, inp)
    if angles is None:
        return None
    sizes = (batch, layer.num_attention_heads, *lengths)
    choice, limits = core.limits_for(options, sizes, like, tokens)
    if choice.backend != "native" or limits.max_logit:
        return None
    pairs = (layer.rotary_pos_interleaved, layer.qk_norm_before_rope)
    given = (() if source is None else (source,), angles, *pairs)
    in_fp8 = fp8.layer_casts(
        core, replay, limits, layer._hands_over(core, replay), device=inp.device.type,
        queries=inp.shape[s], dropout=core.attention_dropout if core.training else 0.0,
    )  # fmt: skip
    return plan.attention_node(core, (choice, limits), slices, core.qkv_format, given, in_fp8)
