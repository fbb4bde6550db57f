# SPDX-License-Identifier: Apache-2.0
"""One valid call per name of `_core`.

`CASES` has an entry for every function and class of the module. A name without one fails
test_core_module.py, so whatever is added to the module meets the leak and the wrong-argument loops.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import c_plugins
import torch
from native import (
    ROWS,
    K,
    N,
    external,
    fp8,
    linear_plan,
    linear_tensors,
    mlp_graph,
    numbers_of,
    state,
)


@dataclass
class Case:
    """A valid call: what to call it with, and what undoes it where it can not be repeated."""

    args: list[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    undo: Callable[[], Any] = lambda: None
    needs_cuda: bool = False  # elsewhere it raises NotImplementedError

    def call(self, core, name: str) -> Any:
        """Make the call and undo it."""
        try:
            result = getattr(core, name)(*self.args, **self.kwargs)
        except NotImplementedError:
            assert self.needs_cuda
            return None
        self.undo()
        return result


def _bind(core):
    return Case([torch, None])


def _of_graph(core):
    return Case(mlp_graph(core).arguments(core.DIRECTION_FORWARD))


def _read_graph(core):
    return Case([core.write_graph(core.DIRECTION_BACKWARD, mlp_graph(core))])


def _run_staged(core):
    """The first stage in Python: whatever is wrong shows before anything has changed."""
    plan = linear_plan(core, core.DIRECTION_FORWARD, external=external(core, "quantize_input"))
    number = numbers_of(core, plan)

    def quantize(lend):
        lend(number["input_row"]).view(torch.uint8).zero_()
        lend(number["input_scales"]).fill_(1.0)

    functions = {"quantize_input": quantize}
    observer = lambda stage, buffers, done: None  # noqa: E731
    make_buffers = lambda lend, rows, slot: lend  # noqa: E731
    return Case([plan, 0, 0, functions, observer, make_buffers, *linear_tensors()])


def _run_consuming(core):
    """A backward; of what it consumes there is enough for all calls."""
    tensors = linear_tensors()
    _, saved = core.run(linear_plan(core, core.DIRECTION_FORWARD), 0, 0, *tensors)
    plan = linear_plan(core, core.DIRECTION_BACKWARD)
    return Case([plan, 0, 0, torch.randn(2, ROWS // 2, N), tensors[1], *state(), saved])


def _quantize(core):
    return Case(
        [torch.randn(ROWS, K)],
        dict(
            bias_grad=torch.zeros(K), noop=torch.zeros(1), **_cast_to_fp8(core),
        ),
    )  # fmt: skip


def _dequantize(core):
    return Case(
        [torch.zeros(ROWS, K)],
        dict(
            mode=core.SCALING_TENSOR, row=fp8(ROWS, K), row_scales=torch.ones(2), column=None,
            column_scales=None, **_context(core),
        ),
    )  # fmt: skip


def _gemm(core):
    mode = core.SCALING_TENSOR
    return Case(
        [fp8(ROWS, N)],
        dict(
            a=None, a_mode=mode, a_row=fp8(ROWS, 32), a_row_scales=torch.ones(2), a_column=None,
            a_column_scales=None, b=None, b_mode=mode, b_row=fp8(N, 32), b_row_scales=torch.ones(2),
            b_column=None, b_column_scales=None, a_transposed=0, b_transposed=1,
            bias=torch.zeros(N, dtype=torch.bfloat16), bias_grad=None, aux=None,
            d_scale=torch.ones(1), d_amax=torch.zeros(1), epilogue=core.EPILOGUE_NONE,
            accumulate=False, fast_accumulation=True, allow_tf32=False, **_context(core),
        ),
    )  # fmt: skip


def _cast_to_fp8(core, columns=K):
    """What an operator that casts is asked for, and its context."""
    return dict(
        mode=core.SCALING_TENSOR, row=fp8(ROWS, columns), row_scales=torch.zeros(2),
        column=fp8(columns, ROWS), column_scales=torch.zeros(2), scale=torch.ones(1),
        amax=torch.zeros(1), partials=None, amax_epsilon=0.0, power_2_scale=0, **_context(core),
    )  # fmt: skip


def _cast_any(core, columns=K):
    """The same of one that may write high precision too."""
    return dict(
        wide=torch.zeros(ROWS, columns), amax_partials=torch.zeros(core.AMAX_PARTIALS),
        **_cast_to_fp8(core, columns),
    )  # fmt: skip


def _norm(core):
    return Case(
        [torch.randn(ROWS, K)],
        dict(
            kind=core.NORM_LAYERNORM, gamma=torch.ones(K), beta=torch.zeros(K),
            mean=torch.zeros(ROWS), rsigma=torch.zeros(ROWS), eps=1e-5, zero_centered=False,
            statistics_given=False, **_cast_any(core),
        ),
    )  # fmt: skip


def _norm_backward(core):
    return Case(
        [torch.randn(ROWS, K), torch.randn(ROWS, K)],
        dict(
            kind=core.NORM_LAYERNORM, rsigma=torch.ones(ROWS), mean=torch.zeros(ROWS),
            gamma=torch.ones(K), grad_add=torch.randn(ROWS, K), grad_input=torch.zeros(ROWS, K),
            grad_residual=torch.randn(ROWS, K),
            gamma_grad=torch.zeros(K), beta_grad=torch.zeros(K), zero_centered=False,
            **_context(core),
        ),
    )  # fmt: skip


def _clamp_kwargs(core):
    return dict(kind=core.ACTIVATION_CLAMPED_SWIGLU, limit=7.0, alpha=1.702, linear_offset=1.0)


def _activation(core):
    return Case([torch.randn(ROWS, 2 * K)], _clamp_kwargs(core) | _cast_any(core))


def _activation_backward(core):
    return Case(
        [torch.randn(ROWS, K), torch.randn(ROWS, 2 * K)],
        dict(bias_grad=torch.zeros(2 * K), **_clamp_kwargs(core), **_cast_any(core, 2 * K)),
    )


def _softcap(core):
    return Case(
        [torch.randn(ROWS, K), 30.0], dict(grad_output=torch.randn(ROWS, K), **_cast_any(core))
    )


SCORES = (2, 3, 4, 5)  # batch, heads, queries, keys


def _rng():
    return torch.tensor([7, 11])


def _softmax(core):
    return Case(
        [torch.randn(SCORES), torch.zeros(SCORES)],
        dict(
            mask=torch.zeros(2, 1, 4, 5, dtype=torch.bool), bias=torch.randn(1, 3, 4, 5),
            sink=torch.randn(3), probabilities=torch.zeros(SCORES), log_sum=torch.zeros(24),
            rng=_rng(), scale=0.5,
            dropout=0.1, window_left=-1, window_right=0, diagonal=1, **_context(core),
        ),
    )  # fmt: skip


def _softmax_backward(core):
    return Case(
        [torch.randn(SCORES), torch.rand(SCORES), torch.zeros(SCORES)],
        dict(
            sink=torch.randn(3), log_sum=torch.zeros(24), grad_sinks=torch.zeros(24), rng=_rng(),
            scale=0.5, dropout=0.1, **_context(core),
        ),
    )  # fmt: skip


def _attended(core, *, length=4):
    """Query, key and value; the output; keywords of a call."""
    query, value = torch.randn(2, length, 4, 6), torch.randn(2, 5, 2, 3)
    return (
        [query, torch.randn(2, 5, 2, 6), value],
        torch.zeros(2, length, 4, 3),
        dict(
            mask=torch.zeros(2, 1, length, 5, dtype=torch.bool), bias=torch.randn(1, 4, length, 5),
            sink=torch.randn(4), slopes=torch.rand(2, 4),
            query_lengths=torch.tensor([length, 2], dtype=torch.int32),
            key_lengths=torch.tensor([3, 5], dtype=torch.int32), rng=_rng(), scale=0.5,
            dropout=0.1, window_left=-1, window_right=2, diagonal=1, bottom_right=True,
            softcap=2.0, **_context(core),
        ),
    )  # fmt: skip


def _attention(core):
    inputs, output, keywords = _attended(core)
    results = {"statistics": torch.zeros(2, 4, 4), "top": torch.zeros(4)}
    return Case([*inputs, output], results | keywords)


def _attention_backward(core):
    inputs, output, keywords = _attended(core)
    wanted = dict(zip(("query", "key", "value"), inputs, strict=True))
    wanted |= {"bias": keywords["bias"], "sink": keywords["sink"]}
    grads = {f"grad_{name}": torch.zeros_like(tensor) for name, tensor in wanted.items()}
    statistics = torch.zeros(2, 4, 4)
    keywords |= grads | {"deterministic": True}
    return Case([torch.randn_like(output), *inputs, output, statistics], keywords)


def _attention_merge(core):
    parts = [torch.randn(2, 4, 2, 8) for _ in range(3)]
    names = ("total_statistics", "step_statistics", "statistics")
    return Case(parts, {name: torch.randn(2, 4, 2, 1) for name in names} | _context(core))


def _dropout(core):
    return dict(rng=_rng(), dropout=0.1, drop_path=0.1, samples=2, **_context(core))


def _dropout_add(core):
    return Case(
        [torch.randn(ROWS, K), torch.zeros(ROWS, K)],
        dict(bias=torch.randn(K), residual=torch.randn(ROWS, K), **_dropout(core)),
    )


def _dropout_backward(core):
    outputs = dict(grad_input=torch.zeros(ROWS, K), bias_grad=torch.zeros(K))
    return Case([torch.randn(ROWS, K)], outputs | _dropout(core))


def _rope(core):
    further = {}
    for part in ("key", "value"):
        further |= {part: torch.randn(ROWS, 1, 8), f"{part}_output": torch.zeros(ROWS, 1, 8)}
        further[f"{part}_freqs"] = torch.randn(ROWS, 4)
    return Case(
        [torch.randn(ROWS, 2, 8), torch.zeros(ROWS, 2, 8)],
        dict(
            freqs=torch.randn(ROWS, 6), cu_seqlens=torch.tensor([0, 2, ROWS], dtype=torch.int32),
            start_positions=torch.tensor([1, 0], dtype=torch.int32), channels=8, cp_size=1,
            cp_rank=0, interleaved=0, backward=0, **further, **_context(core),
        ),
    )  # fmt: skip


def _pages():
    """Keys and values of 5 pages of 3 tokens; the pages of two sequences."""
    caches = [torch.randn(5, 3, 2, channels) for channels in (8, 6)]
    return caches, torch.tensor([[4, 1], [0, 2]], dtype=torch.int32)


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def _cache_append(core):
    caches, table = _pages()
    new = [torch.randn(ROWS, 2, channels) for channels in (8, 6)]
    return Case(
        [*new, *caches, _ints(1, 4)],
        dict(
            counts=_ints(2, 1), cu_seqlens=_ints(0, 2, ROWS), page_table=table, **_context(core)
        ),
    )  # fmt: skip


def _cache_gather(core):
    caches, table = _pages()
    made = [torch.zeros(2, 6, 2, channels) for channels in (8, 6)]
    return Case([*caches, _ints(5, 2), *made], {"page_table": table} | _context(core))


def _register(core):
    functions = {"cast": lambda args: NotImplemented}
    return Case(
        ["case", core.DEVICE_CPU, 1, functions], undo=lambda: core.unregister_backend("case")
    )


def _unregister(core):
    core.register_backend("case", core.DEVICE_CPU, 1, {"fill": lambda args: NotImplemented})
    return Case(
        ["case"],
        undo=lambda: core.register_backend("case", core.DEVICE_CPU, 1, {"fill": lambda args: None}),
    )


def _context(core):
    return {"context": core.Context(core.DEVICE_CPU)}


CASES: dict[str, Callable[[Any], Case]] = {
    "Context": lambda core: Case([core.DEVICE_CPU, 0]),
    "Dispatcher": lambda core: Case([lambda policy: (), lambda name, asked: None]),
    "Implementation": lambda core: Case(["op", "name", print, print]),
    "Scope": lambda core: Case(["policy"]),
    "policy_in_force": lambda core: Case([]),
    "Predicate": lambda core: Case([lambda dtype, device: True, print]),
    "Choice": lambda core: Case(["op", (core.Implementation("op", "name", print),), print]),
    "Selection": lambda core: Case([(("norm", print, ("input",)),)]),
    "load_plugin": lambda core: Case([c_plugins.usual()]),
    "obey": lambda core: Case([None]),
    "find_selections": lambda core: Case([print]),
    "before_cuda": lambda core: Case([print]),
    "meet_devices": lambda core: Case([print]),
    "add_device_type": lambda core: Case(["cpu", 1]),
    "device_is_met": lambda core: Case([core.add_device_type("test", 99), "test", int]),
    "device_type_name": lambda core: Case([core.DEVICE_CPU]),
    "count_gemm": lambda core: Case([core.DEVICE_CPU, core.DTYPE_F32, core.DTYPE_F32]),
    "count_attention": lambda core: Case([core.DEVICE_CPU, core.DTYPE_F32, 0]),
    "count_emulated": lambda core: Case([core.SCALING_ROW]),
    "count_mixed": lambda core: Case([]),
    "selected": lambda core: Case([]),
    "unselected": lambda core: Case([]),
    "selection_number": lambda core: Case([]),
    "selected_function": lambda core: Case(["multi_tensor_adam"]),
    "label_scopes": lambda core: Case([SimpleNamespace()]),
    "bind_torch": _bind,
    "dtype_code": lambda core: Case([torch.bfloat16]),
    "torch_dtype": lambda core: Case([core.DTYPE_BF16]),
    "dtype_names": lambda core: Case([]),
    "op_names": lambda core: Case([]),
    "op_fields": lambda core: Case(["gemm"]),
    "activation_names": lambda core: Case([]),
    "has_cuda": lambda core: Case([]),
    "xla_handlers": lambda core: Case([]),
    "op_workspace": lambda core: Case(
        ["gemm", {"d": (core.DTYPE_F32, (3, N)), "a": (0, (3, K)), "b": (0, (K, N))}, 0]
    ),
    "make_plan": _of_graph,
    "write_graph": _of_graph,
    "read_graph": _read_graph,
    "plan_count": lambda core: Case([]),
    "plan_describe": lambda core: Case([linear_plan(core, core.DIRECTION_FORWARD)]),
    "plan_infer": lambda core: Case([linear_plan(core, core.DIRECTION_FORWARD), ROWS]),
    "plan_ports": lambda core: Case([linear_plan(core, core.DIRECTION_FORWARD), 0, 1]),
    "plan_scratch": lambda core: Case(
        [linear_plan(core, core.DIRECTION_FORWARD), ROWS, core.DEVICE_CPU, 0]
    ),
    "run": lambda core: Case(
        [linear_plan(core, core.DIRECTION_FORWARD), 0, 0, *linear_tensors()]
    ),
    "run_consuming": _run_consuming,
    "run_staged": _run_staged,
    "update": lambda core: Case(
        [
            core.UPDATE_ADAM, 0,
            ([torch.randn(9)], [torch.randn(9)], [torch.zeros(9)], [torch.zeros(9)], None, None),
            None, (1e-3, 0.9, 0.99, 1e-8, 0.1, 1.0, 0.0, 0.0, 0.0), 1, (None, None, None),
        ]
    ),  # fmt: skip
    "l2norm": lambda core: Case(
        [
            [torch.randn(9), torch.randn(3, 4).bfloat16()], torch.ones(1),
            torch.zeros(1, dtype=torch.int32), True,
        ]
    ),  # fmt: skip
    "Entering": lambda core: Case([lambda self: None]),
    "Leaving": lambda core: Case([lambda self, *error: None]),
    "tensors_of_call": lambda core: Case([torch.randn(K), (({"w": torch.ones(K)}, "w"), None)]),
    "only_forward": lambda core: Case(
        [(torch.nn.ReLU(),), torch.nn.Module.__call__, "transformer_engine."]
    ),
    "facts_of_heads": lambda core: Case([torch.randn(2, ROWS, 4, 8), torch.randn(2, K, 4, 8)]),
    "lie_in": lambda core: Case([x := torch.randn(ROWS, K), (x[:1], x[1:]), (1, ROWS - 1)]),
    "split_storage": lambda core: Case([torch.randn(ROWS, K), (1, ROWS - 1)]),
    "cuda_configure": lambda core: Case([os.environ.get("TE_NVRTC") == "1", None], needs_cuda=True),
    "tune_gemm": lambda core: Case([core.DEVICE_CPU, 0, False, None], needs_cuda=True),
    "close_contexts": lambda core: Case([]),
    "quantize": _quantize,
    "dequantize": _dequantize,
    "amax": lambda core: Case(
        [torch.randn(ROWS, K), torch.zeros(core.AMAX_PARTIALS)], _context(core)
    ),
    "transpose": lambda core: Case([fp8(ROWS, K), fp8(K, ROWS)], _context(core)),
    "gemm": _gemm,
    "scaling_update": lambda core: Case(
        [*state(), 448.0], dict(algo=core.AMAX_MAX, **_context(core))
    ),
    "fill": lambda core: Case([torch.zeros(ROWS, K), 1.5], _context(core)),
    "cast": lambda core: Case(
        [torch.randn(ROWS, K), torch.zeros(ROWS, K, dtype=torch.bfloat16)], _context(core)
    ),
    "norm": _norm,
    "norm_backward": _norm_backward,
    "activation": _activation,
    "activation_backward": _activation_backward,
    "softcap": _softcap,
    "softmax": _softmax,
    "softmax_backward": _softmax_backward,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_merge": _attention_merge,
    "dropout_add": _dropout_add,
    "dropout_backward": _dropout_backward,
    "rope": _rope,
    "cache_append": _cache_append,
    "cache_gather": _cache_gather,
    "obeying": lambda core: Case(["amax"]),
    "register_backend": _register,
    "unregister_backend": _unregister,
    "counters": lambda core: Case([]),
    "reset_counters": lambda core: Case([]),
}  # fmt: skip
