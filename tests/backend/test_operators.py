# SPDX-License-Identifier: Apache-2.0
"""What holds for every operator: it has tests, it is counted, threads do not show in its bits."""

import ast
import os
from pathlib import Path

import processes
import pytest
import torch
from operands import operand
from tols import BF16, E4M3

from transformer_engine import _core

HERE = Path(__file__).parent


# Operators whose tests stand in the file of a family.
FAMILIES = {"softmax_backward": "softmax", "dropout_add": "dropout", "dropout_backward": "dropout"}
FAMILIES["attention_backward"] = "attention"
FAMILIES["cache_append"] = FAMILIES["cache_gather"] = "cache"


@pytest.mark.parametrize("op", _core.op_names())
def test_has_a_test_module(op):
    """A new name in the operator table needs tests on both backends."""
    family = FAMILIES.get(op, op)
    modules = [ast.parse(path.read_text()) for path in HERE.glob(f"test_{family}*.py")]
    calls = {
        node.func.attr
        for module in modules
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert op in calls or (op == "gemm" and "run" in calls)
    tests = [n for module in modules for n in module.body if isinstance(n, ast.FunctionDef)]
    assert any("device" in [a.arg for a in t.args.args] for t in tests)
    assert any(t.name.startswith("test_cuda_") for t in tests)


def arguments(op, device):
    """A small valid call of an operator."""
    wide, one = torch.ones(16, 16, device=device), torch.ones(2, device=device)
    fp8 = torch.zeros(16, 16, dtype=E4M3, device=device)
    out, row, scores = wide.clone(), wide[0].clone(), wide.reshape(1, 2, 8, 16)
    heads, start = scores.to(BF16), torch.zeros(1, dtype=torch.int32, device=device)
    return {
        "quantize": ([wide], {**operand(row=fp8), "scale": one}),
        "dequantize": ([wide], operand(row=fp8, scales=one)),
        "amax": ([wide, torch.zeros(_core.AMAX_PARTIALS, device=device)], {}),
        "transpose": ([fp8, fp8.clone()], {}),
        "gemm": ([out], {"a": wide, "b": wide}),
        "scaling_update": ([one, torch.zeros(3, 2, device=device), 448.0], {}),
        "fill": ([wide, 1.0], {}),
        "cast": ([wide, wide.to(BF16)], {}),
        "norm": ([wide], {"kind": _core.NORM_LAYERNORM, "wide": out}),
        "norm_backward": (
            [wide, wide],
            {"kind": _core.NORM_RMSNORM, "rsigma": row, "gamma_grad": row.clone()},
        ),
        "activation": ([wide], {"kind": _core.ACTIVATION_GELU, "wide": out}),
        "activation_backward": (
            [wide, wide],
            {"kind": _core.ACTIVATION_GELU, "wide": out, "bias_grad": row.clone()},
        ),
        "softcap": ([wide, 30.0], {"wide": out}),
        "softmax": ([scores, scores.clone()], {}),
        "softmax_backward": ([scores, scores, scores.clone()], {}),
        "attention": ([heads, heads, heads, heads.clone()], {}),
        "attention_backward": (
            [heads, heads, heads, heads, heads, torch.zeros(1, 8, 2, device=device)],
            {"grad_query": heads.clone(), "grad_key": heads.clone()},
        ),
        "attention_merge": ([heads, heads.clone(), heads.clone()], {}),
        "dropout_add": ([wide, out], {}),
        "dropout_backward": ([wide], {"bias_grad": row.clone()}),
        "cache_append": ([heads, heads, heads.clone(), heads.clone(), start], {}),
        "cache_gather": ([heads, heads, start + 2, heads.clone(), heads.clone()], {}),
        "rope": ([scores, scores.clone()], {"freqs": wide}),
    }[op]


@pytest.mark.parametrize("op", _core.op_names())
def test_is_counted_once(device, op, counters):
    positional, keywords = arguments(op, device)
    getattr(_core, op)(*positional, **keywords)
    ops = {name: value for name, value in counters().items() if name.startswith("op.")}
    assert ops == {f"op.{device}.{op}": 1}


SCRIPT = """
import hashlib, sys, torch
import transformer_engine.pytorch
from transformer_engine import _core

def layer(x, q, t, out, sums, add):
    scale, rng = torch.full((1,), 20.0), torch.tensor([3, 5])
    mean, rsigma, beta_grad = torch.empty(len(x)), torch.empty(len(x)), torch.empty(x.shape[1])
    kind = _core.NORM_LAYERNORM
    cast = {"mode": _core.SCALING_TENSOR, "row": q, "column": t, "scale": scale}
    _core.norm(x, kind=kind, mean=mean, rsigma=rsigma, wide=out, **cast)
    add(q, t, mean, rsigma, out)
    grads = {"grad_input": out, "gamma_grad": sums, "beta_grad": beta_grad}
    _core.norm_backward(x, x, kind=kind, mean=mean, rsigma=rsigma, **grads)
    add(out, sums, beta_grad)
    _core.activation(x, kind=_core.ACTIVATION_GELU, wide=out, **cast)
    add(q, t, out)
    wanted = {"wide": out, "bias_grad": sums}
    _core.activation_backward(x, x, kind=_core.ACTIVATION_GELU, **wanted, **cast)
    add(q, t, out, sums)
    _core.softmax(x[None, None], out[None, None], rng=rng, dropout=0.1, window_right=0)
    _core.dropout_backward(x, grad_input=x, bias_grad=sums, rng=rng, dropout=0.1)
    add(out, x, sums)

def attention(queries, keys, heads, groups, add):
    q, k = torch.randn(1, queries, heads, 40), torch.randn(1, keys, groups, 40)
    v, out = torch.randn(1, keys, groups, 24), torch.empty(1, queries, heads, 24)
    bias, statistics = torch.randn(1, heads, 1, keys), torch.empty(1, heads, queries)
    options = {"bias": bias, "rng": torch.tensor([3, 5]), "dropout": 0.1, "window_right": 50}
    _core.attention(q, k, v, out, statistics=statistics, **options)
    grads = [torch.empty_like(t) for t in (q, k, v, bias)]
    names = ("grad_query", "grad_key", "grad_value", "grad_bias")
    wanted = dict(zip(names, grads, strict=True))
    _core.attention_backward(out, q, k, v, out, statistics, **wanted, **options)
    add(out, statistics, *grads)

def digest(seed):
    found = hashlib.sha256()
    torch.manual_seed(seed)

    def add(*tensors):
        for tensor in tensors:
            found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())

    for rows, columns in ((700, 531), (40, 9000)):
        x = torch.randn(rows, columns)
        q = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        t = torch.empty(columns, rows, dtype=torch.float8_e4m3fn)
        sums, amax, parts = torch.empty(columns), torch.zeros(1), torch.empty(_core.AMAX_PARTIALS)
        back = torch.empty(rows, columns)
        _core.amax(x, parts)
        mode, one = _core.SCALING_TENSOR, torch.ones(2)
        _core.quantize(x, mode=mode, row=q, column=t, partials=parts, bias_grad=sums, amax=amax)
        _core.dequantize(back, mode=mode, column=t, column_scales=one)
        add(q, t, sums, amax, parts, back)
        layer(x, q, t, back, sums, add)
    for m, n, k in ((500, 300, 600), (7, 900, 592), (900, 7, 592)):
        a, b, d, sums = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n), torch.empty(m)
        _core.gemm(d, a=a, b=b, bias_grad=sums)
        add(d, sums)
    attention(300, 500, 4, 1, add)
    attention(500, 230, 6, 3, add)
    return found.hexdigest()
"""


def test_threads_do_not_show(seed):
    """The CPU backend gives the same bits with one thread, or with three, as it does here."""
    namespace = {}
    exec(SCRIPT, namespace)
    threads = "1" if (os.cpu_count() or 1) > 1 else "3"
    done = processes.run(f"{SCRIPT}\nprint(digest({seed}))", OMP_NUM_THREADS=threads)
    assert done.stdout.strip() == namespace["digest"](seed)
