# SPDX-License-Identifier: Apache-2.0
"""`TransformerLayer`: attention and MLP with their norms, dropouts and residuals."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.attention import masks
from transformer_engine.pytorch.attention.problem import FORMATS, AttentionOptions, check_dispatch
from transformer_engine.pytorch.layer import traced_layer
from transformer_engine.pytorch.layer.composite import NORMS, CompositeLayer
from transformer_engine.pytorch.layer.dropout import DropPath, bias_dropout_add
from transformer_engine.pytorch.layer.multi_head_attention import MultiheadAttention
from transformer_engine.pytorch.module.emission import Bias, ByModules, Value
from transformer_engine.pytorch.module.layer_call import LayerRunner, asked
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from transformer_engine.pytorch.module.parallel import ContextParallel
from transformer_engine.pytorch.module.parameters import one_of, probabilities
from transformer_engine.pytorch.torchside.modes import only_forwards

__all__ = ["DropPath", "TransformerLayer"]

_PREFIXES = {"self_attention": "attn_", "inter_attention": "cross_", "layernorm_mlp": "mlp_"}
"""Of the names of nodes and values of each branch."""
_NAME = "TransformerLayer"

_ONE_CALL = 16 << 20
"""Bytes of hidden states up to which a layer is one call. Beyond, each branch is: the device takes
longer than the host, and what a branch has saved is freed when its gradients are there."""

_READ_BY_EMIT = itemgetter(
    "training", "hidden_dropout", "drop_path_rate", "apply_residual_connection_post_layernorm",
    "parallel_attention_mlp", "name",
)  # fmt: skip
"""Settings that nodes depend on, of the attributes of a layer."""


class TransformerLayer(ContextParallel, CompositeLayer):
    """One layer of a Transformer.

    x = x + dropout(attention(norm(x))); for a decoder x = x + dropout(cross_attention(norm(x),
    encoder_output)); x = x + dropout(mlp(norm(x))).

    Parameters
    ----------
    hidden_size : int
        Features of a token.
    ffn_hidden_size : int
        Features inside the MLP.
    num_attention_heads : int
        Heads of the queries.
    hidden_dropout : float, default 0.1
        Probability that an element is dropped after attention and MLP, in training.
    init_method, output_layer_init_method : callable, optional
        As of `MultiheadAttention`, for the first and the second layer of the MLP too.
    num_gqa_groups, layernorm_epsilon, attention_dropout, layer_number, kv_channels, params_dtype, \
set_parallel_mode, fuse_qkv_params, rotary_pos_interleaved, zero_centered_gamma, \
qkv_weight_interleaved, bias, normalization, device, name, qk_norm_type, qk_norm_eps, \
qk_norm_before_rope, softcap, softmax_type, seq_length, micro_batch_size
        As of `MultiheadAttention`.
    self_attn_mask_type, window_size, bottom_right_diagonal
        Defaults of the forward; see `DotProductAttention`.
    enc_dec_attn_mask_type, enc_dec_bottom_right_diagonal, enc_dec_window_size
        The same for the attention to ``encoder_output``.
    tp_group, tp_size, sequence_parallel, ub_tp_comm_overlap, ub_overlap_ag, ub_overlap_rs, \
ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad
        As of `Linear`: a group of one rank, and what changes nothing there.
    get_rng_state_tracker : callable, optional
        Returns a tracker whose ``fork()`` is entered while parameters and attention dropout are
        drawn.
    fuse_wgrad_accumulation : bool, default False
        As of `Linear`; needs `fuse_qkv_params`.
    apply_residual_connection_post_layernorm : bool, default False
        The residual is the norm's output, not its input.
    output_layernorm : bool, default False
        Normalize the output of the layer, not the input of its attention.
    parallel_attention_mlp : bool, default False
        Attention and MLP take the same input, each with a norm of its own, and are added.
    layer_type : str, default "encoder"
        "encoder", or "decoder": with attention to ``encoder_output``.
    drop_path_rate : float, default 0
        Probability that a branch is dropped for a sample of the first dim, in training.
    activation, activation_params
        As of `LayerNormMLP`.
    attn_input_format : str, default "sbhd"
        "sbhd": inputs are [sequence, batch, hidden_size]; "bshd": [batch, sequence, hidden_size].

    Attributes
    ----------
    self_attention : MultiheadAttention
        With the norm before it, unless `output_layernorm`.
    inter_attention : MultiheadAttention
        Attention to ``encoder_output``, of a decoder.
    layernorm_mlp : LayerNormMLP
        With the norm before it.
    layernorm : LayerNorm or RMSNorm
        With `output_layernorm`.

    Raises
    ------
    ValueError
        Options that exclude each other.
    NotImplementedError
        An option that is not there yet.
    """

    _READ_BY_PLANS = (
        "training", "hidden_dropout", "drop_path_rate", "parallel_attention_mlp", "name",
        "apply_residual_connection_post_layernorm", "attn_input_format",
    )  # fmt: skip
    """Settings that its plans depend on (see `traced_layer`)."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable | None = None,
        output_layer_init_method: Callable | None = None,
        layer_number: int | None = None,
        kv_channels: int | tuple[int, int] | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        backward = ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad
        self._set_parallel(
            tp_group, tp_size, sequence_parallel=sequence_parallel,
            backward=backward if ub_tp_comm_overlap else (False,) * 3,
        )  # fmt: skip
        probabilities(_NAME, hidden_dropout=hidden_dropout, drop_path_rate=drop_path_rate)
        one_of(_NAME, ("encoder", "decoder"), layer_type=layer_type)
        one_of(_NAME, FORMATS, attn_input_format=attn_input_format)
        if fuse_wgrad_accumulation and not fuse_qkv_params:
            raise ValueError(f"{_NAME}: fuse_wgrad_accumulation=True needs fuse_qkv_params=True")
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.num_attention_heads, self.attn_input_format = num_attention_heads, attn_input_format
        self.layer_type, self.layer_number, self.name = layer_type, layer_number, name
        self.hidden_dropout, self.drop_path_rate = hidden_dropout, drop_path_rate
        own, crossed = self_attn_mask_type, enc_dec_attn_mask_type
        self.self_attn_mask_type = masks.mask_type(own, "self_attn_mask_type").name
        self.enc_dec_attn_mask_type = masks.mask_type(crossed, "enc_dec_attn_mask_type").name
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.output_layernorm = output_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        if parallel_attention_mlp:
            self._check_parallel()
        # The bias of a layer whose output is dropped is added in the pass that drops it.
        drops = hidden_dropout > 0.0 or drop_path_rate > 0.0
        self._biases_returned = bool(bias and drops and not parallel_attention_mlp)
        norm = dict(
            normalization=normalization, zero_centered_gamma=zero_centered_gamma,
            return_layernorm_output=apply_residual_connection_post_layernorm,
        )  # fmt: skip
        linear = dict(
            params_dtype=params_dtype, get_rng_state_tracker=get_rng_state_tracker, device=device,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, set_parallel_mode=set_parallel_mode,
            tp_group=tp_group, tp_size=tp_size, sequence_parallel=sequence_parallel,
            return_bias=self._biases_returned, bias=bias,
            ub_overlap_ag=ub_tp_comm_overlap and ub_overlap_ag,
            ub_overlap_rs=ub_tp_comm_overlap and ub_overlap_rs,
        )  # fmt: skip
        attention = partial(
            MultiheadAttention, hidden_size, num_attention_heads, kv_channels, attention_dropout,
            layernorm_epsilon, init_method, output_layer_init_method, layer_number,
            num_gqa_groups=num_gqa_groups, fuse_qkv_params=fuse_qkv_params, qk_norm_eps=qk_norm_eps,
            qkv_weight_interleaved=qkv_weight_interleaved, qk_norm_before_rope=qk_norm_before_rope,
            rotary_pos_interleaved=rotary_pos_interleaved, qk_norm_type=qk_norm_type,
            qkv_format=attn_input_format, softmax_type=softmax_type, softcap=softcap, **linear,
        )  # fmt: skip
        self.self_attention = attention(
            self_attn_mask_type, window_size, bottom_right_diagonal,
            input_layernorm=not output_layernorm, **({} if output_layernorm else norm),
            name=self._name_of("self_attention"),
        )  # fmt: skip
        if layer_type == "decoder":
            masking = enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal
            options = {"attention_type": "cross", "input_layernorm": True, **norm}
            name = self._name_of("inter_attention")
            self.inter_attention = attention(*masking, **options, name=name)
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, init_method=init_method,
            output_layer_init_method=output_layer_init_method, activation=activation,
            activation_params=activation_params, **linear, **norm,
            name=self._name_of("layernorm_mlp"),
        )  # fmt: skip
        if output_layernorm:
            settings = hidden_size, layernorm_epsilon, None, params_dtype, zero_centered_gamma
            self.layernorm = NORMS[normalization](*settings, device=device)

    def _check_parallel(self) -> None:
        """Raise for what excludes parallel branches."""
        defaults = {"layer_type": "encoder", "output_layernorm": False}
        defaults["apply_residual_connection_post_layernorm"] = False
        for name, default in defaults.items():
            value = getattr(self, name)
            if value != default:
                raise ValueError(f"{_NAME}: parallel_attention_mlp=True excludes {name}={value!r}")

    # ---- forward -------------------------------------------------------------------------------

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
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
    ) -> Tensor:
        """Apply the layer.

        Parameters
        ----------
        hidden_states : Tensor
            [s, b, hidden_size] (sbhd) or [b, s, hidden_size] (bshd).
        attention_mask : Tensor, optional
            bool, True: masked out; for padding and arbitrary mask types.
        self_attn_mask_type, window_size, bottom_right_diagonal, enc_dec_attn_mask_type, \
enc_dec_window_size, enc_dec_bottom_right_diagonal
            As of the constructor, for this call.
        encoder_output : Tensor, optional
            What a decoder attends to; like `hidden_states`, with a sequence of its own. No norm
            reads it: of the dtype of the parameters, outside of `torch.autocast`.
        enc_dec_attn_mask : Tensor or pair of Tensor, optional
            Masks of that attention.
        is_first_microbatch : bool, optional
            As of `Linear`.
        rotary_pos_emb : Tensor or (Tensor, Tensor), optional
            As of `MultiheadAttention`, for the attention of the sequence to itself.
        checkpoint_core_attention, inference_params, core_attention_bias_type, \
core_attention_bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, \
cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, fast_zero_fill, pad_between_seqs, \
thd_attention_policies, thd_attention_policy_dispatch, softcap
            As of `DotProductAttention`. In a decoder those of queries are of `hidden_states`, and
            count for the attention of the sequence to itself alone, too; those of keys are of
            `encoder_output`. A bias and a `softcap` count for both attentions of a decoder,
            policies for that of the sequence to itself.

        Returns
        -------
        Tensor
            Shape of `hidden_states`.

        Raises
        ------
        TypeError, ValueError
            Tensors or arguments that do not go together.
        NotImplementedError
            An option that is not there yet.
        """
        if encoder_output is not None and self.layer_type == "encoder":
            raise ValueError(
                f"{_NAME}: encoder_output with layer_type='encoder': leave it out, or make the "
                "layer with layer_type='decoder'"
            )
        if thd_attention_policy_dispatch != "auto":
            check_dispatch(thd_attention_policy_dispatch)
        options = AttentionOptions(
            attention_mask, None, self_attn_mask_type, window_size, bottom_right_diagonal,
            is_first_microbatch, checkpoint_core_attention, inference_params, rotary_pos_emb,
            core_attention_bias_type, core_attention_bias, alibi_slopes, cu_seqlens_q,
            cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv,
            fast_zero_fill, pad_between_seqs, thd_attention_policies,
            thd_attention_policy_dispatch, softcap,
        )  # fmt: skip
        crossed = None
        if self_attn_mask_type is not None:
            masks.mask_type(self_attn_mask_type, "self_attn_mask_type")
        if enc_dec_attn_mask_type is not None:
            masks.mask_type(enc_dec_attn_mask_type, "enc_dec_attn_mask_type")
        if self.layer_type == "decoder":
            crossed = AttentionOptions(
                enc_dec_attn_mask, encoder_output, enc_dec_attn_mask_type, enc_dec_window_size,
                enc_dec_bottom_right_diagonal, is_first_microbatch, checkpoint_core_attention,
                None, None, core_attention_bias_type, core_attention_bias, alibi_slopes,
                *options[12:20], softcap=softcap,
            )  # fmt: skip
            options = options._replace(
                cu_seqlens_kv=None, cu_seqlens_kv_padded=None, max_seqlen_kv=None
            )
        given = (options, options) if crossed is None else (options, crossed, options)
        out = self._forward(hidden_states, given)
        return self.layernorm(out) if self.output_layernorm else out

    def _forward(self, hidden_states: Tensor, options: tuple) -> Tensor:
        """The layer but for the norm of its output; `options` are those of each branch."""
        if torch.compiler.is_compiling() and traced_layer.may_hold(hidden_states):
            out = self._run_in_graph(hidden_states, options)
            if out is not None:
                return out
        asked(self, hidden_states, options)
        calls, parallel = LayerRunner.of(self), self.parallel_attention_mlp
        branches: Sequence[Any] = (None,) * len(options)
        if calls is not None:
            if self._is_one_call(hidden_states):
                out = calls.run(self, hidden_states, options)
                if out is not NotImplemented:
                    return out
            else:
                branches = calls.branches
        if parallel:
            first_microbatch = options[0].is_first_microbatch
            made = _attend(self._modules["self_attention"], hidden_states, options[0])
            made = made + self._modules["layernorm_mlp"](hidden_states, first_microbatch)
            return self._add(made, hidden_states, False)
        for i, branch in enumerate(branches):
            out = NotImplemented
            if branch is not None:
                out = branch.run(self, hidden_states, options[i : i + 1])
            if out is NotImplemented:
                out = self._run_branch(i, hidden_states, options)
            hidden_states = out
        return hidden_states

    def _run_in_graph(self, hidden_states: Tensor, options: tuple) -> Any:
        """Run it as one call in the graph that is traced; None where it has to call its modules."""
        attending = []
        for name, own in zip(("self_attention", "inter_attention"), options[:-1], strict=False):
            attention = self._modules[name]
            if not isinstance(attention, MultiheadAttention):
                return None
            attending.append(attention.attending_in_graph(hidden_states, own))
        if any([each is NotImplemented for each in attending]):
            return None
        return traced_layer.run(self, hidden_states, traced_layer.constants(options), attending)

    def _is_planned(self, inp: Tensor, options: tuple = ()) -> bool:
        """Return whether there may be plans: they drop paths by the first of two leading dims."""
        if self.attn_input_format != "thd":
            return inp.dim() == 3
        return inp.dim() == 2 and (self.drop_path_rate == 0.0 or not self.training)

    def _is_one_call(self, inp: Tensor) -> bool:
        return self.parallel_attention_mlp or getattr(inp, "nbytes", 0) <= _ONE_CALL

    def _planned_calls(self, calls: LayerRunner, inp: Tensor, options: tuple) -> list[tuple]:
        if self._is_one_call(inp):
            return super()._planned_calls(calls, inp, options)
        names = [prefix for name, prefix in _PREFIXES.items() if name in self._modules]
        return [
            (prefix, branch, options[i : i + 1])
            for prefix, (i, branch) in zip(names, enumerate(calls.branches), strict=True)
        ]

    def _run_branch(self, branch: int, hidden_states: Tensor, options: tuple) -> Tensor:
        modules = self._modules  # an attribute lookup of torch takes longer than a short operator
        if branch == len(options) - 1:
            made = modules["layernorm_mlp"](hidden_states, options[branch].is_first_microbatch)
        else:
            name = "inter_attention" if branch else "self_attention"
            made = _attend(modules[name], hidden_states, options[branch])
        return self._add(made, hidden_states, branch > 0 or not self.output_layernorm)

    def _count_of_branches(self) -> int:
        return 1 if self.parallel_attention_mlp else 3 if "inter_attention" in self._modules else 2

    def _emit(self, nodes: Any, x: Value, options: tuple, branch: int | None) -> list[Value]:
        """Append the nodes of a call, or of one branch of it; see `layer_call`."""
        del options
        rates = {"dropout": self.hidden_dropout, "drop_path": self.drop_path_rate}
        rates = rates if self.training else {}
        names = ("self_attention", "inter_attention", "layernorm_mlp")
        found = [name for name in names if name in self._modules]
        if self.parallel_attention_mlp:
            made = [self._emit_branch(nodes, x, name)[0] for name in found]
            both = nodes.add(*made, name="sum_", output="branches")
            return [nodes.add(both, x, **rates)]
        for name in found if branch is None else found[branch : branch + 1]:
            made, normed, bias = self._emit_branch(nodes, x, name)
            residual = normed if self.apply_residual_connection_post_layernorm else x
            prefix = _PREFIXES[name]
            names = {"name": prefix, "output": f"{prefix}output"}
            x = nodes.add(made, residual, bias, **rates, **names)
        return [x]

    def _emit_branch(self, nodes: Any, x: Value, name: str) -> tuple[Value, Value, Bias | None]:
        """Append a branch: its result, the output of its norm, and the bias that is added."""
        module, prefix = self._modules[name], _PREFIXES[name]
        if name != "layernorm_mlp":
            if not isinstance(module, MultiheadAttention):
                raise ByModules
            return *module.emit_branch(nodes, x, prefix, f"{prefix}branch"), module._added_bias()
        made = nodes.linear(module, x, prefix, f"{prefix}branch")
        there = getattr(module, "return_bias", False) and module.use_bias
        return *made, Bias(module, "fc2_bias") if there else None

    def _layer_key(self, options: tuple) -> tuple:
        """Key of all that `_emit` depends on."""
        del options
        return _READ_BY_EMIT(self.__dict__)  # an attribute lookup of torch takes longer

    def _add(self, made: Any, residual: Tensor, normalizes: bool) -> Tensor:
        """Add what a branch made, output[, bias][, normalized input], to the residual stream.

        `residual` is the input of the branch, which has a norm where it `normalizes`.
        """
        bias = None
        if type(made) is tuple:
            if normalizes and self.apply_residual_connection_post_layernorm:
                *made, residual = made
            made, bias = made if self._biases_returned else (made[0], None)
        return bias_dropout_add(
            made, bias, residual, self.hidden_dropout, self.drop_path_rate, self.training
        )


def _attend(attention: Any, hidden_states: Tensor, options: AttentionOptions) -> Any:
    """Let a submodule attend, as a module where that is more than its forward."""
    if only_forwards(attention):
        return attention.attend(hidden_states, options)
    return attention(hidden_states, *options)
