# SPDX-License-Identifier: Apache-2.0
"""Attention of sequences that are spread over ranks (context parallelism).

Of n ranks, rank r has chunks r and 2 n - 1 - r of 2 n of each sequence. `attend` runs one call in
the way that ``cp_comm_type`` names: keys go around (`ring`), are gathered (`gathered_keys`), or
heads are exchanged for tokens (`exchanged_heads`); the last and the first go together, too. What a
way does not run is a row of `FEATURES`.

It is a composition of calls of the operators in Python, as plans hold no attention whose statistics
are those of other nodes. So a layer calls its modules one by one.

Every rank draws its own dropout, from its own generator, a random pair for each step, as it does
for the hidden dropout of its tokens: seed ranks apart. The backward of a step reads its pair.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed as dist

from transformer_engine.common import config
from transformer_engine.pytorch.attention import backends, fp8
from transformer_engine.pytorch.attention.backends import Choice
from transformer_engine.pytorch.attention.chunks import (
    DenseTokens,
    PackedOrder,
    PackedTokens,
)
from transformer_engine.pytorch.attention.exchanged_heads import (
    DenseHeads,
    PackedHeads,
    heads_for_tokens,
    own_heads,
    tokens_for_heads,
)
from transformer_engine.pytorch.attention.gathered_keys import DenseKeys, GatherCall, PackedKeys
from transformer_engine.pytorch.attention.masks import (
    CAUSAL_WINDOW,
    NO_WINDOW,
    CallKind,
    deterministic,
)
from transformer_engine.pytorch.attention.problem import (
    MIXED,
    AttentionOptions,
    CoreOptions,
    Heads,
    check_tensors,
    packed_sizes,
    refuse_export,
    sequence_starts,
)
from transformer_engine.pytorch.attention.ring import RingCall
from transformer_engine.pytorch.attention.steps import Steps
from transformer_engine.pytorch.attention.steps_fp8 import StepCasts
from transformer_engine.pytorch.execution.autograd import run_call
from transformer_engine.pytorch.execution.random import draw_pairs
from transformer_engine.pytorch.execution.recompute import checkpoint
from transformer_engine.pytorch.torchside.collectives import gather_rows
from transformer_engine.pytorch.torchside.graph_breaks import Outside
from transformer_engine.pytorch.torchside.modes import forward_gradients, in_transform

_NAME = "DotProductAttention"

# ---- what runs -----------------------------------------------------------------------------------


class _Asked(NamedTuple):
    """A kind of call, and what else the table asks about."""

    kind: CallKind
    options: AttentionOptions
    form: str


class Feature(NamedTuple):
    """A row of the table: what a call may have, and which ways do not run it."""

    name: str  # a format of the fields of `CallKind`
    present: Callable[[_Asked], bool]
    ways: tuple[str, ...]


_RING, _EVERY = ("p2p", "a2a+p2p"), ("p2p", "all_gather", "a2a", "a2a+p2p")


def _windowed(asked: _Asked) -> bool:
    return asked.kind.window not in (NO_WINDOW, CAUSAL_WINDOW)


FEATURES: tuple[Feature, ...] = (
    Feature("two formats in one call", lambda a: a.form in MIXED, _EVERY),
    Feature("inference_params", lambda a: a.options.inference_params is not None, _EVERY),
    Feature("thd_attention_policies",
            lambda a: a.options.thd_attention_policies is not None, _EVERY),
    Feature("score_mod", lambda a: a.kind.score_mod, _EVERY),
    Feature("attn_mask_type {mask_type.name!r} of sequences that are not packed (thd)",
            lambda a: a.kind.mask_type.padding and not a.kind.packed, _EVERY),
    Feature("attn_mask_type {mask_type.name!r}",
            lambda a: a.kind.mask_type.name == "arbitrary" or bool(a.kind.mask_type.bottom_right),
            _EVERY),
    Feature("a causal mask of queries and keys that differ in number",
            lambda a: a.kind.mask_type.causal and not a.kind.square, _EVERY),
    Feature("core_attention_bias_type {bias!r}",
            lambda a: a.kind.bias in ("pre_scale_bias", "alibi"), _EVERY),
    Feature("window_size {window}", _windowed, _RING),
    Feature("window_size {window} of queries and keys that differ in number",
            lambda a: _windowed(a) and not a.kind.square, _EVERY),
    Feature("window_size {window} of packed sequences without a causal mask",
            lambda a: _windowed(a) and a.kind.packed and not a.kind.mask_type.causal,
            ("all_gather",)),
)  # fmt: skip
"""Every feature that some way does not run."""


def _check(asked: _Asked, way: str) -> None:
    """Raise NotImplementedError for what a way does not run."""
    for feature in FEATURES:
        if way in feature.ways and feature.present(asked):
            others = [each for each in _EVERY if each not in feature.ways]
            fix = f"cp_comm_type={' or '.join(map(repr, others))} runs it" if others else ""
            name = feature.name.format(**asked.kind._asdict())
            raise NotImplementedError(
                f"{_NAME}: {name} with cp_comm_type={way!r} over several ranks is not there yet"
                + (f": {fix}" if fix else ": give cp_group of one rank")
            )


def _check_sizes(core: Any, heads: Heads, form: str, bias: Any, groups: "_Groups") -> None:
    """Raise ValueError for tensors that are not those of a rank."""
    size, exchanged = core.cp_size, groups.heads_size
    query, key, _ = heads.split()
    for name, tensor in (("query", query), ("key", key)):
        tokens = tensor.shape[1 if form == "bshd" else 0]
        if tokens % 2 != 0:
            raise ValueError(
                f"{_NAME}: {name}: {tokens} tokens on one of {size} ranks, expected two chunks of "
                "one length"
            )
        if tensor.shape[-2] % exchanged != 0:
            raise ValueError(
                f"{_NAME}: {name}: {tensor.shape[-2]} heads, which {exchanged} ranks do not divide "
                f"(cp_comm_type={core.cp_comm_type!r})"
            )
    if bias is not None:
        tokens = [t.shape[1 if form == "bshd" else 0] for t in (query, key)]
        expected = (tokens[0], size * tokens[1])
        counts = 1, query.shape[-2]
        if bias.dim() != 4 or tuple(bias.shape[2:]) != expected or bias.shape[1] not in counts:
            raise ValueError(
                f"{_NAME}: core_attention_bias: shape {tuple(bias.shape)}, expected [b or 1, heads "
                f"or 1, queries of this rank, keys of all ranks] = [.., {expected[0]}, "
                f"{expected[1]}]"
            )


def _check_lengths(options: AttentionOptions, size: int) -> None:
    """Raise ValueError for packed sequences that are no chunks of one length; the host reads them.

    Of lengths that do not divide, steps would attend to the wrong tokens.
    """
    for side, starts in zip(("q", "kv"), sequence_starts(options), strict=True):
        lengths = [n for n in starts.diff().tolist() if n % (2 * size) != 0]
        if lengths:
            raise ValueError(
                f"{_NAME}: a packed sequence of {lengths[0]} tokens with its padding over {size} "
                f"ranks, expected a multiple of {2 * size}: pad it, and give cu_seqlens_{side} and "
                f"cu_seqlens_{side}_padded of all ranks"
            )


class _Groups(NamedTuple):
    """Ranks that exchange heads, and those that keys go between; None: one rank."""

    heads: Any
    keys: Any
    way: str  # as of ``cp_comm_type``, with "a2a+p2p" of one rank in a dim as the other way

    @property
    def heads_size(self) -> int:
        return 1 if self.heads is None else self.heads.size()

    @property
    def keys_size(self) -> int:
        return 1 if self.keys is None else self.keys.size()


def _groups(core: Any) -> _Groups:
    way = core.cp_comm_type
    if way != "a2a+p2p":
        return _Groups(core.cp_group, None, way) if way == "a2a" else _Groups(
            None, core.cp_group, way
        )  # fmt: skip
    inner, outer = core.cp_group
    if inner.size() == 1:
        return _Groups(None, outer, "p2p")
    return _Groups(inner, None, "a2a") if outer.size() == 1 else _Groups(inner, outer, way)


# ---- agreement -----------------------------------------------------------------------------------


def _agree(groups: _Groups, said: str) -> None:
    """Raise ValueError on all ranks where they do not say the same.

    Calls that differ would wait for each other.
    """
    for group in (groups.heads, groups.keys):
        if group is None:
            continue
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, said, group=group)
        if len(set(found)) > 1:
            listed = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(found))
            raise ValueError(f"{_NAME}: the ranks of cp_group do not make the same call: {listed}")


def _choice_of(
    core: Any, heads: Heads, options: AttentionOptions, form: str, more: CoreOptions
) -> Choice:
    """Backend of a call. Checks of a new kind of call are made once, by all ranks together.

    With `TE_CHECK_RANKS` they are made in each call.
    """
    groups, said = _groups(core), None
    try:
        key, said, find = _question(core, heads, options, form, more, groups)
        known = core._agreed.get(key)
        if known is not None and not config.TE_CHECK_RANKS.get():
            return known
        found = find()
    except (TypeError, ValueError, NotImplementedError):
        _agree(groups, "a call that is refused" if said is None else f"{said()} (refused)")
        raise
    _agree(groups, said())
    core._agreed[key] = found
    return found


def _question(
    core: Any,
    heads: Heads,
    options: AttentionOptions,
    form: str,
    more: CoreOptions,
    groups: _Groups,
) -> tuple[tuple, Callable, Callable]:
    """Key of a kind of call, what says it to other ranks, and what finds its backend."""
    query, key, value = heads.split()
    mixed = form in MIXED
    if mixed or options.inference_params is not None:  # no tensors to check against each other
        _check(_Asked(_NOTHING, options, form), groups.way)
    sizes = check_tensors(core, query, key, value, form, options)
    bias = options.core_attention_bias
    if bias is not None:  # that has the keys of all ranks
        sizes = (*sizes[:3], sizes[3] * core.cp_size)
    packed = form == "thd"
    if packed and query.device.type == "cpu":
        _check_lengths(options, core.cp_size)
    facts = backends._facts(core, options, sizes, query, packed, more.score_mod is not None,
                            query.device)  # fmt: skip
    dropout = core.attention_dropout if core.training else 0.0
    shapes = [tuple(t.shape) for t in (query, key, value)]
    shapes.append(None if bias is None else tuple(bias.shape))
    own = (groups.way, form, *shapes, query.dtype, dropout, core.softmax_type)
    policies = options.thd_attention_policies is not None

    def said() -> str:
        return (
            f"cp_comm_type={own[0]!r}, {form}, query, key, value, bias {shapes}, {query.dtype}, "
            f"mask {facts[0]!r}, window {facts[1]}, dropout {dropout}, FP8 {facts[13]}, "
            f"{core.cp_size} ranks"
        )

    def find() -> Choice:
        square = query.shape[0 if form != "bshd" else 1] == key.shape[0 if form != "bshd" else 1]
        kind = backends._call_kind(core, *facts)._replace(square=square)
        _check(_Asked(kind, options, form), groups.way)
        _check_sizes(core, heads, form, bias, groups)
        if packed:
            _check_lengths(options, core.cp_size)
        choice = backends.choose_backend(kind)
        if groups.keys is not None and choice.backend != "native":
            raise NotImplementedError(
                f"{_NAME}: cp_comm_type={groups.way!r} needs the library's own operator, which "
                f"gives its statistics, and does not run this call: {choice.reasons['native']}"
            )
        if choice.backend == "plugin":
            raise NotImplementedError(
                f"{_NAME}: cp_group of {core.cp_size} ranks with the class of a plug-in: select "
                "another one"
            )
        return choice

    return (*own, facts, policies), said, find


_NOTHING = CallKind(
    backends.masks.MASK_TYPES["no_mask"], NO_WINDOW, False, True, "no_bias", False, torch.float32,
    "cpu", backends._ALL_ON, (0, 0),
)  # fmt: skip


# ---- a call --------------------------------------------------------------------------------------


def attend(core: Any, heads: Heads, options: AttentionOptions, form: str, more: CoreOptions) -> Any:
    """Attend over the ranks of a `DotProductAttention`: see its `forward`.

    Tensors are those of this rank, sums of lengths those of all ranks. The gradient of a learnable
    sink is that of all ranks' tokens, on each rank. NotImplementedError for what is not there;
    ValueError where ranks do not make the same call.
    """
    if torch.compiler.is_compiling():
        refuse_export("cp_group of several ranks")
        return _attend_outside(core, heads, options, form, more)
    if in_transform() or forward_gradients():
        raise NotImplementedError(
            f"{_NAME}: cp_group of several ranks in a transform of torch.func or with tangents: "
            "take gradients by backward()"
        )
    heads = heads.in_autocast()
    choice = _choice_of(core, heads, options, form, more)
    core.__dict__["_last_call"] = choice
    call = _Call(core, options, form, more, choice)

    def run(bias: Tensor | None, *tensors: Tensor) -> Any:
        return call.run(heads._replace(tensors=tensors).split(), bias)

    given = options.core_attention_bias, *heads.tensors
    if not options.checkpoint_core_attention:
        return run(*given)
    tracker = core._get_tracker if call.dropout > 0.0 else None
    return checkpoint(run, *given, get_rng_state_tracker=tracker, use_reentrant=False)


_attend_outside = Outside(attend)


def _own_bias(bias: Tensor, heads: int, group: Any) -> Tensor:
    """The bias of this rank's heads and all queries, for one of all heads and its own queries."""
    rows = bias.expand(-1, heads, -1, -1).permute(2, 0, 1, 3)  # queries are tokens, keys channels
    return heads_for_tokens((rows,), DenseHeads("sbhd", group)).permute(1, 2, 0, 3).contiguous()


class _Call:
    """One call."""

    def __init__(
        self, core: Any, options: AttentionOptions, form: str, more: CoreOptions, choice: Choice
    ) -> None:
        self.core, self.options, self.form, self.more = core, options, form, more
        self.choice, self.groups = choice, _groups(core)
        self.packed = form == "thd"
        self.dropout = core.attention_dropout if core.training else 0.0

    def run(self, heads: Sequence[Tensor], bias: Tensor | None) -> Any:
        """Output[, largest scores] for queries, keys and values of this rank."""
        group, way = self.groups.heads, None
        if group is not None:
            way, count = self._way(heads, group), heads[0].shape[-2]
            heads = heads_for_tokens(heads, way)
            if bias is not None:
                bias = _own_bias(bias, count, group)
        sink = backends._sink(self.core, heads[0])
        if sink is not None and group is not None:
            sink = own_heads(sink, group)
        run = self._run_alone if self.groups.keys is None else self._run_by_steps
        made = run(heads, bias, sink)
        out, *top = made if self.core.return_max_logit else (made,)
        if group is not None:
            out = tokens_for_heads(out, way)
            top = [gather_rows(each.detach().clone(), group)[0] for each in top]
        out = out.flatten(-2).contiguous()
        return (out, *[each.detach() for each in top]) if top else out

    def _way(self, heads: Sequence[Tensor], group: Any) -> DenseHeads | PackedHeads:
        """How heads are exchanged for tokens."""
        if not self.packed:
            return DenseHeads(self.form, group)
        orders = self._orders(heads, self.groups.heads_size, self.groups.keys_size)
        return PackedHeads(orders, group)

    def _orders(self, heads: Sequence[Tensor], size: int, further: int) -> list[PackedOrder]:
        """Orders of queries, keys and values on `size` ranks, of which there are `further` sets."""
        starts, made = sequence_starts(self.options), []
        for padded, tensor in zip(starts, heads, strict=False):
            made.append(PackedOrder(padded // further, size, tensor.shape[0] * size))
            if starts[1] is starts[0]:
                return made * 3
        return [made[0], made[1], made[1]]

    def _run_alone(self, heads: Sequence[Tensor], bias: Any, sink: Any) -> Any:
        """As one rank does, over all tokens of some heads."""
        core, query, key = self.core, heads[0], heads[1]
        given = self.options._replace(core_attention_bias=bias)
        s, b = (1, 0) if self.form == "bshd" else (0, 1)
        if self.packed:
            tokens = query.shape[0], key.shape[0]
            batch, *lengths = packed_sizes(self.options, *tokens)
        else:
            tokens, batch, lengths = None, query.shape[b], [query.shape[s], key.shape[s]]
        sizes = (batch, query.shape[-2], *lengths)
        choice, limits = core.limits_for(given, sizes, query, tokens)
        limits = limits.replaced(sink=sink)
        options = given._replace(checkpoint_core_attention=False)
        more = self.more._replace(fp8_output=False)
        arguments = choice.backend, options, more
        made = core._run_backend(arguments, Heads(tuple(heads)), self.form, limits)
        out, *top = made if core.return_max_logit else (made,)
        out = out.unflatten(-1, (query.shape[-2], heads[2].shape[-1]))
        return (out, *top) if top else out

    def _run_by_steps(self, heads: Sequence[Tensor], bias: Any, sink: Any) -> Any:
        """Over the keys of other ranks."""
        core, group, size = self.core, self.groups.keys, self.groups.keys_size
        cap = backends._cap_of(core, self.options)
        steps = Steps(
            self.form, core.softmax_scale, self.dropout, cap, deterministic(),
            core.return_max_logit,
        )  # fmt: skip
        tokens: Any = DenseTokens()
        if self.packed:
            tokens = PackedTokens(size, *self._sides(heads))
        name = self.options.attn_mask_type
        kind = backends.masks.mask_type(core.attn_mask_type if name is None else name)
        call: Any
        if self.groups.way == "all_gather":
            window = self.options.window_size
            window = core.window_size if window is None else window
            window = backends.masks.effective_window(window, kind)
            keys: Any = DenseKeys(self.form, group, window)
            if self.packed:
                keys = PackedKeys(tokens, self._orders(heads, size, 1)[1], group, window)
            casts = StepCasts(core, heads[0], group) if fp8.in_force(core) else None
            call = GatherCall(steps, tokens, group, keys, self._draw, casts)
        else:
            stream = None if heads[0].device.type == "cpu" else core.cp_stream
            casts = StepCasts(core, heads[0]) if fp8.in_force(core) else None
            call = RingCall(steps, tokens, group, kind.causal, stream, self._draw, casts)
        return run_call(call, *heads, bias, sink)

    def _sides(self, heads: Sequence[Tensor]) -> tuple[tuple, tuple]:
        """Sums of lengths and of padded ones, and bounds of those, of queries and of keys."""
        options, size = self.options, self.groups.keys_size
        counts = [tensor.shape[0] * size for tensor in heads[:2]]
        _, *longest = packed_sizes(options, *counts)
        given = options.cu_seqlens_q, options.cu_seqlens_kv
        given = given[0], given[0] if given[1] is None else given[1]
        starts = sequence_starts(options)
        return tuple(zip(given, starts, longest, strict=True))  # type: ignore[return-value]

    def _draw(self, like: Tensor) -> Tensor:
        """Draw the random pair of a step, in a fork of the tracker where there is one."""
        tracker = self.core._get_tracker
        with contextlib.nullcontext() if tracker is None else tracker().fork():
            return draw_pairs(like, 1)[0]
