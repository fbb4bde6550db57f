# SPDX-License-Identifier: Apache-2.0
"""`MultiheadAttention`: projections of queries, keys and values, attention, output projection."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.attention import fp8, plan
from transformer_engine.pytorch.attention.core import DotProductAttention
from transformer_engine.pytorch.attention.lowering import angles_for_cache
from transformer_engine.pytorch.attention.problem import (
    AttentionOptions,
    CoreOptions,
    Heads,
    check_dispatch,
    sequence_starts,
)
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from transformer_engine.pytorch.layer import traced_layer
from transformer_engine.pytorch.layer.attending import Projections, attention_in_plan
from transformer_engine.pytorch.layer.composite import NORMS, CompositeLayer
from transformer_engine.pytorch.module.call_key import keep
from transformer_engine.pytorch.module.emission import Bias, Value
from transformer_engine.pytorch.module.layer_call import Attending, LayerRunner, asked, given_to
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.module.linear_base import LinearBase
from transformer_engine.pytorch.module.norm import L2Normalization
from transformer_engine.pytorch.module.parallel import ContextParallel
from transformer_engine.pytorch.module.parameters import (
    device_of,
    functions,
    one_of,
    positive_sizes,
)
from transformer_engine.pytorch.torchside.modes import autocast_dtype, only_forwards

__all__ = ["MultiheadAttention"]

_NAME = "MultiheadAttention"


class MultiheadAttention(ContextParallel, CompositeLayer):
    """Multi-head attention, of a sequence to itself or to another one.

    Parameters
    ----------
    hidden_size : int
        Features of an input and an output token.
    num_attention_heads : int
        Heads of the queries, of all ranks; the attribute has those of this rank.
    kv_channels : int or (int, int), optional
        Channels of a head, of queries and keys and of values where they differ;
        ``hidden_size / num_attention_heads`` where None.
    layernorm_epsilon : float, default 1e-5
        Of the input norm.
    init_method, output_layer_init_method : callable, optional
        ``f(weight)`` for the projections of queries, keys and values, and for that of the output;
        normal with mean 0 and deviation 0.023 where None.
    num_gqa_groups, attention_dropout, layer_number, attn_mask_type, window_size, \
bottom_right_diagonal, softcap, softmax_type, get_rng_state_tracker, qkv_format
        As of `DotProductAttention`; ``attention_dropout`` is 0.1 by default.
    tp_group, tp_size, sequence_parallel, ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, \
ub_bulk_dgrad, ub_bulk_wgrad, fuse_wgrad_accumulation, params_dtype, device, name
        As of `Linear`.
    return_bias : bool, default False
        Return the bias of the output projection beside the output instead of adding it.
    return_layernorm_output : bool, default False
        Return the normalized input too; needs `input_layernorm`.
    input_layernorm : bool, default False
        Normalize the input first.
    attention_type : str, default "self"
        "self", or "cross": keys and values come from ``encoder_output``.
    set_parallel_mode : bool, default False
        The projections of queries, keys and values have the mode "column", that of the output
        "row". Several ranks need it: each has some of the heads.
    fuse_qkv_params : bool, default False
        One weight for queries, keys and values, not one each (``query_weight``, ``key_weight``,
        ``value_weight``).
    zero_centered_gamma : bool, default False
        The norm's factor is 1 + weight.
    qkv_weight_interleaved : bool, default True
        Rows of the one weight lie group by group: queries, key, value; else all queries, all keys,
        all values. Weights of their own are never interleaved.
    rotary_pos_interleaved : bool, default False
        As ``interleaved`` of `apply_rotary_pos_emb`.
    bias : bool, default True
        The projections have biases.
    normalization : str, default "LayerNorm"
        "LayerNorm" or "RMSNorm", for the input norm.
    qk_norm_type : str, optional
        "L2Normalization", "RMSNorm" or "LayerNorm" over the channels of each head of queries and
        keys.
    qk_norm_eps : float, default 1e-6
        Of these norms.
    qk_norm_before_rope : bool, default False
        They come before the rotary embedding, not after it.
    seq_length, micro_batch_size : int, optional
        Accepted for their callers: nothing is warmed up.

    Raises
    ------
    ValueError
        Sizes or names that do not go together.
    NotImplementedError
        An option that is not there yet.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int] | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable | None = None,
        output_layer_init_method: Callable | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        self._set_parallel(
            tp_group, tp_size, sequence_parallel=sequence_parallel,
            backward=(ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad),
        )  # fmt: skip
        self.name = name
        self._check_split(set_parallel_mode, qkv_format)
        one_of(_NAME, ("self", "cross"), attention_type=attention_type)
        one_of(_NAME, NORMS, normalization=normalization)
        if return_layernorm_output and not input_layernorm:
            raise ValueError(f"{_NAME}: return_layernorm_output=True needs input_layernorm=True")
        positive_sizes(_NAME, hidden_size=hidden_size, num_attention_heads=num_attention_heads)
        if kv_channels is None:
            if hidden_size % num_attention_heads != 0:
                raise ValueError(
                    f"{_NAME}: hidden_size={hidden_size} is no multiple of num_attention_heads="
                    f"{num_attention_heads}; give kv_channels"
                )
            kv_channels = hidden_size // num_attention_heads
        with device_of(device):  # which the attention takes no argument for
            core = DotProductAttention(
                num_attention_heads, kv_channels, num_gqa_groups, attention_dropout, qkv_format,
                attn_mask_type, window_size, bottom_right_diagonal, softcap,
                layer_number=layer_number, get_rng_state_tracker=get_rng_state_tracker,
                attention_type=attention_type, tp_group=tp_group, tp_size=tp_size,
                sequence_parallel=sequence_parallel, softmax_type=softmax_type,
                name=self._name_of("core_attention"),
            )  # fmt: skip
        k, v = core.hidden_size_per_attention_head_k, core.hidden_size_per_attention_head_v
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = k, v
        self.hidden_size, self.num_attention_heads = hidden_size, core.num_attention_heads
        self.num_gqa_groups, self.attention_type = core.num_gqa_groups, attention_type
        self.attn_mask_type, self.window_size = core.attn_mask_type, core.window_size
        self.qkv_format, self.layer_number = qkv_format, layer_number
        self.input_layernorm, self.return_bias = bool(input_layernorm), bool(return_bias)
        self.return_layernorm_output = bool(return_layernorm_output)
        self.rotary_pos_interleaved = bool(rotary_pos_interleaved)
        self.qk_norm_before_rope = bool(qk_norm_before_rope)
        self.qkv_weight_interleaved = bool(qkv_weight_interleaved and fuse_qkv_params)
        self._kept_attending: dict[tuple, Attending] = {}
        linear = dict(
            bias=bias, params_dtype=params_dtype, device=device, tp_group=tp_group,
            tp_size=tp_size, sequence_parallel=sequence_parallel,
            get_rng_state_tracker=get_rng_state_tracker,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            ub_overlap_ag=ub_overlap_ag, ub_overlap_rs=ub_overlap_rs,
        )  # fmt: skip
        norm = dict(
            eps=layernorm_epsilon, normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            return_layernorm_output=self.return_layernorm_output,
        )  # fmt: skip
        functions(_NAME, output_layer_init_method=output_layer_init_method)
        column, row = ("column", "row") if set_parallel_mode else (None, None)
        inner = {**linear, "parallel_mode": column, "init_method": init_method, "ub_name": "qkv"}
        self._make_projections(fuse_qkv_params, inner, norm)
        self.core_attention = core  # after them: programs ask the first parameter for its dtype
        self._make_qk_norms(qk_norm_type, qk_norm_eps, device, params_dtype)
        outer = {**linear, "parallel_mode": row, "init_method": output_layer_init_method}
        heads = num_attention_heads * v
        outer |= {"return_bias": self.return_bias, "name": self._name_of("proj"), "ub_name": "proj"}
        self.proj = Linear(heads, hidden_size, **outer)

    def _check_split(self, set_parallel_mode: bool, qkv_format: str) -> None:
        """ValueError for what several ranks can not do."""
        if self.tp_size > 1 and not set_parallel_mode:
            raise ValueError(
                f"{_NAME}: tp_size={self.tp_size} with set_parallel_mode=False: heads are divided "
                "among the ranks, and so are the projections: give set_parallel_mode=True"
            )
        if self.sequence_parallel and qkv_format == "bshd":
            raise ValueError(
                f"{_NAME}: sequence_parallel=True with qkv_format='bshd': the rows of all ranks "
                "are put together along the first dim, which is the batch: give 'sbhd' or 'thd'"
            )

    def _make_projections(self, fused: bool, common: dict, norm: dict) -> None:
        """Make the layers before the attention."""
        of_a_rank = self._projections().rows()
        rows = {name: self.tp_size * size for name, size in of_a_rank.items()}

        def make(*names: str, normalized: bool = self.input_layernorm) -> torch.nn.Module:
            parts = {name: rows[name] for name in names}
            options = {**common, "parameters_split": None if fused else parts}
            kind = "layernorm_linear" if normalized else "linear"
            options["name"] = self._name_of(f"{kind}_{''.join(name[0] for name in names)}")
            sizes = self.hidden_size, sum(parts.values())
            if normalized:
                made: LinearBase = LayerNormLinear(*sizes, **norm, **options)
            else:
                made = Linear(*sizes, **options)
            made._input_name = "hidden_states" if "query" in names else "encoder_output"
            return made

        if self.attention_type == "self":
            setattr(self, self._first(), make("query", "key", "value"))
        else:
            setattr(self, self._first(), make("query"))
            self.key_value = make("key", "value", normalized=False)

    def _first(self) -> str:
        """Name of the projection of the hidden states."""
        if self.attention_type == "self":
            return "layernorm_qkv" if self.input_layernorm else "qkv"
        return "layernorm_query" if self.input_layernorm else "query_layer"

    def _make_qk_norms(
        self, kind: str | None, eps: float, device: Any, dtype: torch.dtype | None
    ) -> None:
        """Make the norms of queries and keys, or none."""
        self.q_norm: torch.nn.Module | None = None
        self.k_norm: torch.nn.Module | None = None
        if kind == "L2Normalization":  # without parameters: one module under both names
            self.q_norm = self.k_norm = L2Normalization(eps)
        elif kind is not None:
            one_of(_NAME, ("L2Normalization", *NORMS), qk_norm_type=kind)
            size = self.hidden_size_per_attention_head_k
            self.q_norm = NORMS[kind](size, eps, device=device, dtype=dtype)
            self.k_norm = NORMS[kind](size, eps, device=device, dtype=dtype)

    # ---- forward -------------------------------------------------------------------------------

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: Any = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
        thd_attention_policies: Any = None,
        thd_attention_policy_dispatch: str = "auto",
        softcap: float | None = None,
    ) -> Any:
        """Attend.

        Parameters
        ----------
        hidden_states : Tensor
            [s, b, hidden_size] (sbhd), [b, s, hidden_size] (bshd) or [t, hidden_size] (thd).
        attention_mask : Tensor or pair of Tensor, optional
            bool, True: masked out; see `DotProductAttention`.
        encoder_output : Tensor, optional
            Keys and values come from it: like `hidden_states`, with a sequence of its own. Only
            for attention type "cross", and needed there. As all that no norm reads first, of the
            dtype of the parameters, outside of `torch.autocast`.
        is_first_microbatch : bool, optional
            As of `Linear`.
        rotary_pos_emb : Tensor or (Tensor, Tensor), optional
            Angles of `RotaryPositionEmbedding`, for queries and keys alike or for each.
        attn_mask_type, window_size, bottom_right_diagonal, checkpoint_core_attention, \
inference_params, core_attention_bias_type, core_attention_bias, alibi_slopes, cu_seqlens_q, \
cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, \
fast_zero_fill, pad_between_seqs, thd_attention_policies, thd_attention_policy_dispatch, softcap
            As of `DotProductAttention`.

        Returns
        -------
        Tensor or tuple of Tensor
            Output in the shape of `hidden_states`[, bias of the output projection][, normalized
            input].

        Raises
        ------
        TypeError, ValueError
            Tensors or arguments that do not go together.
        NotImplementedError
            An option that is not there yet.
        """
        if thd_attention_policy_dispatch != "auto":
            check_dispatch(thd_attention_policy_dispatch)
        options = AttentionOptions(
            attention_mask, encoder_output, attn_mask_type, window_size, bottom_right_diagonal,
            is_first_microbatch, checkpoint_core_attention, inference_params, rotary_pos_emb,
            core_attention_bias_type, core_attention_bias, alibi_slopes, cu_seqlens_q,
            cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv,
            fast_zero_fill, pad_between_seqs, thd_attention_policies,
            thd_attention_policy_dispatch, softcap,
        )  # fmt: skip
        return self.attend(hidden_states, options)

    _FORWARD = forward
    _READ_BY_PLANS = (
        "attention_type", "input_layernorm", "num_attention_heads", "num_gqa_groups",
        "hidden_size_per_attention_head_k", "hidden_size_per_attention_head_v",
        "qkv_weight_interleaved", "qk_norm_before_rope", "rotary_pos_interleaved", "qkv_format",
        "return_bias", "return_layernorm_output", "name",
    )  # fmt: skip
    """Settings that its plans depend on (see `traced_layer`)."""
    _MAY_HAVE = ("q_norm", "k_norm")  # submodules that a program may set at any time

    def emit(self, nodes: Any, x: Value, name: str = "", **call: Any) -> Value:
        """Append its nodes over value `x`; return its output (see `layer_call`).

        `call` are the other arguments of its forward.
        """
        _, (options,) = given_to(self, (None,), call)
        return self.emit_branch(nodes, x, name, f"{name}output", options)[0]

    def emit_branch(
        self, nodes: Any, x: Value, name: str = "", output: str = "output", options: Any = None
    ) -> tuple[Value, Value]:
        """Append its nodes; return its result and the output of its norm."""
        modules, crossed = self._modules, self.attention_type != "self"
        first = modules[self._first()]
        nodes.does_work_of(self, modules["core_attention"])
        prefix = f"{name}{'query' if crossed else 'qkv'}_"
        query, normed = nodes.linear(first, x, prefix, f"{prefix}made")
        site = nodes.attends(self, first, options)
        projected = [query]
        if crossed:
            source = nodes.source(site, name)
            key_value = modules["key_value"]
            projected += nodes.linear(key_value, source, f"{name}kv_", f"{name}kv_made")[:1]
        norms = () if self.q_norm is None else (modules["q_norm"], modules["k_norm"])
        context = nodes.attend(site, projected, norms, name)
        out, _ = nodes.linear(modules["proj"], context, f"{name}proj_", output)
        return out, normed

    def _emit(self, nodes: Any, x: Value, options: tuple, branch: int | None) -> list[Value]:
        """Append the nodes of a call; return its results."""
        del options, branch
        out, normed = self.emit_branch(nodes, x)
        returned = getattr(self._modules[self._first()], "return_layernorm_output", False)
        return [out, normed] if returned else [out]

    def _added_bias(self) -> Bias | None:
        """The bias that it leaves to the layer around it."""
        proj = self._modules["proj"]
        there = getattr(proj, "return_bias", False) and proj.use_bias
        return Bias(proj, "bias") if there else None

    def _layer_key(self, options: tuple) -> tuple:
        """Key of all that messages depend on."""
        del options
        return (self.name,)

    def _is_planned(self, inp: Tensor, options: tuple = ()) -> bool:
        """Return whether there may be plans for it."""
        del options
        return inp.dim() == (2 if self.qkv_format == "thd" else 3)

    def _attending(
        self, inp: Tensor, options: AttentionOptions, dtype: torch.dtype, replay: Any
    ) -> Attending | None:
        """How a call attends, over heads of a dtype, as part of a layer.

        None where it has to call its modules. `replay` is as of `fp8.repeated`.
        """
        core, key = self._modules["core_attention"], None
        if core.cp_size > 1:
            return None
        queries = inp.shape[self.qkv_format == "bshd"]
        in_fp8 = fp8.layer_key(core, queries, replay)
        own = core.__dict__  # an attribute lookup of torch takes longer
        if options.without_tensors() and type(own["window_size"]) is not list:
            key = (  # of the options those that are read: mask type to type of the bias
                options[2:10], options.softcap, self.qk_norm_before_rope,
                self.qkv_weight_interleaved, own["training"], own["attention_dropout"],
                own["softmax_scale"], own["_get_tracker"], own["attn_mask_type"],
                own["window_size"], own["bottom_right_diagonal"], own["qkv_format"],
                own["softcap"], own["softmax_type"], own["return_max_logit"],
                dtype, inp.device, plan.facts_around(core),
                in_fp8, in_fp8 is not None and self._hands_over(core, replay),
                queries == 1,  # cuDNN has no bias over one key
            )  # fmt: skip
            known = self._kept_attending.get(key)
            if known is not None:
                core.__dict__["_last_call"] = known.choice
                return known
        found = attention_in_plan(self, inp, options, dtype, replay)
        if key is not None and found is not None and found.constant:
            found = found._replace(key=(object(),))  # found by itself now
            keep(self._kept_attending, key, found)
        return found

    def attending_in_graph(self, inp: Tensor, options: AttentionOptions) -> Any:
        """How a call attends, in the graph that is traced; `NotImplemented`: by modules.

        None where `_attending` finds the same outside of the graph: the call has no tensors, and is
        not in FP8.
        """
        core = self._modules["core_attention"]
        if not isinstance(core, DotProductAttention):
            return NotImplemented
        made = core.softmax_type != "vanilla" or options.core_attention_bias_type == "alibi"
        made = made or fp8.region_in_fp8(core)
        if core.cp_size > 1:
            return NotImplemented
        if options.without_tensors() and not made and type(core.window_size) is not list:
            return None
        first = self._modules[self._first()]
        dtype = autocast_dtype(inp.device.type) or getattr(first, first.weight_names[0]).dtype
        found = attention_in_plan(self, inp, options, dtype, None)
        return NotImplemented if found is None else found

    def _hands_over(self, core: DotProductAttention, replay: Any) -> bool:
        """Return whether the projection is handed the output of attention in FP8.

        `replay` is as of `fp8.repeated`.
        """
        proj = self._modules["proj"]  # it, or the core, may be another package's
        ours = isinstance(proj, Linear) and isinstance(core, DotProductAttention)
        return ours and fp8.hands_fp8_to(core, proj, replay)

    def _projections(self) -> Projections:
        channels = self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v
        layout = self.qkv_weight_interleaved, self.attention_type != "self"
        return Projections(self.num_attention_heads, self.num_gqa_groups, *channels, *layout)

    def attend(self, hidden_states: Tensor, options: AttentionOptions) -> Any:
        """`forward` with its other arguments in one."""
        out = None
        if torch.compiler.is_compiling() and traced_layer.may_hold(hidden_states):
            attends = self.attending_in_graph(hidden_states, options)
            if attends is not NotImplemented:
                given = traced_layer.constants((options,))
                out = traced_layer.run(self, hidden_states, given, (attends,))
        if out is None:
            asked(self, hidden_states, (options,))
            calls = LayerRunner.of(self)
            out = NotImplemented if calls is None else calls.run(self, hidden_states, (options,))
            if out is NotImplemented:
                return self._attend_by_modules(hidden_states, options)
        return self._results(hidden_states, *(out if isinstance(out, tuple) else (out,)))

    def _results(self, inp: Tensor, out: Tensor, normalized: Tensor | None = None) -> Any:
        """Select what a forward returns from the results of the layer's graph."""
        results = [out]
        if self.return_bias:
            proj = self._modules["proj"]
            results.append(proj._returned_bias(out.dtype) if proj.return_bias else None)
        if self.return_layernorm_output:
            results.append(self._modules[self._first()]._norm_result(inp, normalized))
        return results[0] if len(results) == 1 else tuple(results)

    def _attend_by_modules(self, hidden_states: Tensor, options: AttentionOptions) -> Any:
        if options.inference_params is not None and self.attention_type != "self":
            raise ValueError(
                f"{_NAME}: inference_params with attention_type='cross': a cache does not hold "
                "keys and values of encoder_output: leave inference_params out"
            )
        first_microbatch, source = options.is_first_microbatch, options.encoder_output
        to_itself = self.attention_type == "self"
        if to_itself and source is not None:
            raise ValueError(
                f"{_NAME}: encoder_output with attention_type='self': leave it out, or make the "
                "module with attention_type='cross'"
            )
        if not to_itself and source is None:
            raise ValueError(f"{_NAME}: attention_type='cross' needs encoder_output")
        modules = self._modules  # an attribute lookup of torch takes longer than a short operator
        mixed, normalized = modules[self._first()](hidden_states, first_microbatch), None
        if self.return_layernorm_output:
            mixed, normalized = mixed
        key_value = None if to_itself else modules["key_value"](source, first_microbatch)
        query, key, value = self._projections().split(mixed, key_value)
        if self.q_norm is not None or options.rotary_pos_emb is not None:
            query, key = self._position(query, key, options)
        core = modules["core_attention"]
        hands_over = self._hands_over(core, fp8.repeated())
        if only_forwards(core):
            more = CoreOptions(fp8_output=hands_over)
            context = core.attend(Heads((query, key, value)), options, more=more)
        else:
            named = options.named_for_core()
            if hands_over:
                named["fp8_output"] = True
            context = core(query, key, value, *options.for_core(), **named)
        if isinstance(context, tuple):
            raise NotImplementedError(
                f"{_NAME}: core_attention returned a tuple, expected a tensor: a layer has no "
                "place for largest scores: leave return_max_logit at False, or call a "
                "DotProductAttention by itself"
            )
        out = modules["proj"](context, first_microbatch)
        if self.return_bias and not isinstance(out, tuple):
            out = (out, None)  # another package's module wraps the projection: the bias is added
        if normalized is None:
            return out
        return (*out, normalized) if self.return_bias else (out, normalized)

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys after their norms, in the dtype before: attention takes one dtype."""
        return self.q_norm(query).to(query.dtype), self.k_norm(key).to(key.dtype)

    def _position(
        self, query: Tensor, key: Tensor, call: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Apply the norms of queries and keys and the rotary embedding, in the order set."""
        angles, params = call.rotary_pos_emb, call.inference_params
        if self.q_norm is not None and self.qk_norm_before_rope:
            query, key = self._normed(query, key)
        if angles is not None:
            packed, start_positions = self.qkv_format == "thd", None
            starts = sequence_starts(call) if packed and params is None else (None, None)
            if params is not None:  # positions go on where the sequences have ended
                now, length = params.lengths, query.shape[0 if self.qkv_format == "sbhd" else 1]
                start_positions, starts = now.starts, (now.cu_seqlens_q, now.cu_seqlens_q)
                if not packed:
                    angles = angles_for_cache(angles, params, length)
            pair = isinstance(angles, tuple | list)
            if pair and len(angles) != 2:
                raise ValueError(f"{_NAME}: rotary_pos_emb: {len(angles)}, expected one or a pair")
            of_query, of_key = angles if pair else (angles, angles)
            options = {
                "interleaved": self.rotary_pos_interleaved,
                "cp_size": self.cp_size,
                "cp_rank": self.cp_rank,
            }
            given = (self.qkv_format, start_positions)
            query = apply_rotary_pos_emb(query, of_query, *given, cu_seqlens=starts[0], **options)
            key = apply_rotary_pos_emb(key, of_key, *given, cu_seqlens=starts[1], **options)
        if self.q_norm is not None and not self.qk_norm_before_rope:
            query, key = self._normed(query, key)
        return query, key
