# SPDX-License-Identifier: Apache-2.0
"""Dispatch modes see what modules run: counters of FLOPs and loggers, with the same results."""

import processes
import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits, counted, states_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import transformer_engine.pytorch as te

WIDTH, FFN, HEADS, TOKENS, BATCH = 32, 80, 4, 12, 3


class Attention(torch.nn.Module):
    """Causal self-attention of torch."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 1, 3, 0, 4)
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.proj(out.permute(2, 0, 1, 3).flatten(2))


def mlp(first=torch.nn.Identity):
    return torch.nn.Sequential(
        first(WIDTH), torch.nn.Linear(WIDTH, FFN), torch.nn.GELU(), torch.nn.Linear(FFN, WIDTH)
    )


class Block(torch.nn.Module):
    """A Transformer block of torch."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = torch.nn.LayerNorm(WIDTH), Attention()
        self.mlp = mlp(torch.nn.LayerNorm)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


# name: (our module, its twin of torch)
TWINS = {
    "linear": (lambda d: te.Linear(WIDTH, FFN, device=d), lambda: torch.nn.Linear(WIDTH, FFN)),
    "split": (
        lambda d: te.Linear(WIDTH, 2 * FFN, parameters_split=("a", "b"), device=d),
        lambda: torch.nn.Linear(WIDTH, 2 * FFN),
    ),
    "layernorm-linear": (
        lambda d: te.LayerNormLinear(WIDTH, FFN, normalization="RMSNorm", device=d),
        lambda: torch.nn.Sequential(torch.nn.RMSNorm(WIDTH), torch.nn.Linear(WIDTH, FFN)),
    ),
    "mlp": (
        lambda d: te.LayerNormMLP(WIDTH, FFN, device=d),
        lambda: mlp(torch.nn.LayerNorm),
    ),
    "norm": (lambda d: te.LayerNorm(WIDTH, device=d), lambda: torch.nn.LayerNorm(WIDTH)),
    "transformer": (
        lambda d: te.TransformerLayer(
            WIDTH, FFN, HEADS, attention_dropout=0.0, self_attn_mask_type="causal", device=d
        ),
        Block,
    ),
}


def step(module, recipe, x, mode):
    """Output and gradients of a step, run inside of a mode."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    with mode:
        with te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()):
            out = module(x)
        out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


def flops(module, x, recipe=None, backward=True):
    counter = FlopCounterMode(display=False)
    if backward:
        step(module, recipe, x, counter)
    else:
        with counter, te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()):
            module(x)
    return counter


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("twin", TWINS)
def test_as_many_as_the_twin_in_torch(device, twin, recipe, backward):
    ours, theirs = TWINS[twin][0](device), TWINS[twin][1]().to(device)
    x = torch.randn(TOKENS, BATCH, WIDTH, device=device)
    expected = flops(theirs, x, None, backward).get_total_flops()
    assert (expected > 0) == (twin != "norm")
    if twin == "transformer" and device == "cpu":  # torch counts no attention there
        expected += (7 if backward else 2) * 2 * BATCH * TOKENS * TOKENS * WIDTH
    for _ in range(3):  # a first call, then repeated ones
        assert flops(ours, x, recipe, backward).get_total_flops() == expected


def test_by_module(device):
    model = torch.nn.Sequential(*(TWINS[name][0](device) for name in ("transformer", "mlp")))
    counts = flops(model, torch.randn(TOKENS, BATCH, WIDTH, device=device)).get_flop_counts()

    def total(name):
        return sum(counts[name].values())

    gemm = 2 * TOKENS * BATCH * WIDTH * FFN
    assert total("Sequential.1") == total("Sequential.0.layernorm_mlp") == 2 * 3 * gemm
    assert total("Sequential.0.self_attention.proj") == 3 * gemm // FFN * WIDTH
    assert total("Sequential.0") + total("Sequential.1") == total("Global")


def test_backward_alone(device):
    """A mode that begins after the forward sees the backward."""
    layer = te.Linear(WIDTH, FFN, device=device)
    for _ in range(2):
        loss = layer(torch.randn(TOKENS, WIDTH, device=device)).sum()
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        assert counter.get_total_flops() == 2 * TOKENS * WIDTH * FFN


def test_deferred_weight_gradient(device):
    layer = te.Linear(WIDTH, FFN, delay_wgrad_compute=True, device=device)
    loss = layer(torch.randn(TOKENS, WIDTH, device=device)).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() == 0
    with counter:
        layer.backward_dw()
    assert counter.get_total_flops() == 2 * TOKENS * WIDTH * FFN


@pytest.mark.parametrize("observed", [False, True])
def test_python_functions_of_stages(device, observed):
    """What they run is seen as itself, once; an observer sees the stages that it sees otherwise."""
    layer = te.Linear(WIDTH, FFN, bias=False, device=device)
    x = torch.randn(TOKENS, WIDTH, device=device)

    def gemm(buffers):
        torch.mm(buffers["input"], buffers["weight"].t(), out=buffers["output"])

    layer.override_stages(gemm_output=gemm)
    stages = {False: [], True: []}
    collected, counter, log = [], FlopCounterMode(display=False), Log()
    for mode in (torch.enable_grad(), counter, log):
        if observed:
            found = stages[mode in (counter, log)]
            layer.observe_stages(lambda stage, *_, found=found: found.append(stage.name))
        collected.append(step(layer, None, x, mode))
    assert counter.get_total_flops() == 3 * 2 * TOKENS * WIDTH * FFN
    assert sum(name.startswith("aten.mm.") for name in log.seen) == 1
    assert stages[True] == 2 * stages[False] and bool(stages[False]) == observed
    assert_same_bits(*collected[:2])
    assert_same_bits(*collected[1:])


def test_recompute_is_counted(device):
    plain, recomputing = (te.LayerNormMLP(WIDTH, FFN, checkpoint=c, device=device) for c in (0, 1))
    x = torch.randn(TOKENS, WIDTH, device=device)
    gemm = 2 * TOKENS * WIDTH * FFN
    assert flops(plain, x).get_total_flops() == 6 * gemm
    assert flops(recomputing, x).get_total_flops() == 7 * gemm


# Under delayed scaling the graph of "aot_eager" has torch's operator for what mutates, which
# FlopCounterMode can not run; Inductor's has not.
@pytest.mark.parametrize("recipe", [None, "current"])
def test_compiled(device, recipe):
    """Also where a graph that is there already runs: its backward, after a forward outside."""
    layer = te.LayerNormMLP(WIDTH, FFN, device=device)
    compiled = torch.compile(lambda x: layer(x), backend="aot_eager")
    x = torch.randn(TOKENS, WIDTH, device=device)
    with te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()):
        loss = compiled(x.requires_grad_()).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() == 4 * 2 * TOKENS * WIDTH * FFN
    counter = FlopCounterMode(display=False)
    step(layer, recipe, x.detach(), counter)
    assert counter.get_total_flops() == 6 * 2 * TOKENS * WIDTH * FFN


class Log(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("twin", TWINS)
def test_a_mode_changes_no_bit(device, twin, recipe, start):
    """Of outputs, gradients and scaling state, over steps with and without one."""
    results = []
    for modes in ((), (0, 2)):
        start()
        module = TWINS[twin][0](device)
        collected = []
        for number in range(4):
            x = torch.randn(TOKENS, BATCH, WIDTH, device=device)
            log = Log()
            if number in modes:
                collected.append(step(module, recipe, x, log))
                names = {name.split(".")[1] for name in log.seen if "transformer_engine" in name}
                assert any(name.startswith("run") for name in names)
            else:
                with counted():
                    collected.append(step(module, recipe, x, torch.enable_grad()))
        results.append((collected, states_of(module)))
    assert_same_bits(*results)


def test_attention(device):
    """Products over channels of queries and keys and of values, of groups and of other lengths."""
    if device == "cuda":
        pytest.skip("torch's formulas count attention there")
    batch, queries, keys, heads, k, v = 2, 5, 7, 4, 16, 24
    for form, turn in (("sbhd", False), ("bshd", True)):
        module = te.DotProductAttention(heads, (k, v), 2, qkv_format=form)
        shapes = ((queries, batch, heads, k), (keys, batch, 2, k), (keys, batch, 2, v))
        qkv = [torch.randn(shape) for shape in shapes]
        qkv = [(t.transpose(0, 1) if turn else t).requires_grad_() for t in qkv]
        with FlopCounterMode(display=False) as counter:
            loss = module(*qkv).sum()
            scores = 2 * batch * heads * queries * keys
            assert counter.get_total_flops() == scores * (k + v)
            loss.backward()
        assert counter.get_total_flops() == scores * (4 * k + 3 * v)


@pytest.mark.parametrize("option", ["dropout", "window", "rotary"])
def test_other_operators_are_seen(device, option):
    options = {"window": {"window_size": (3, 0)}, "dropout": {"hidden_dropout": 0.5}}
    layer = te.TransformerLayer(
        WIDTH, FFN, HEADS, attention_dropout=0.0, device=device, **options.get(option, {})
    )
    angles = te.RotaryPositionEmbedding(WIDTH // HEADS)(TOKENS).to(device)
    x = torch.randn(TOKENS, BATCH, WIDTH, device=device)
    with Log() as log:
        layer(x, rotary_pos_emb=angles if option == "rotary" else None).sum().backward()
    names = {
        "dropout": ("draw_pair", "dropout_add", "dropout_backward"),
        "window": () if device == "cpu" else ("softmax", "softmax_backward"),
        "rotary": ("rope",),
    }[option]
    seen = {name.split(".")[1] for name in log.seen if name.startswith("transformer_engine")}
    # The pair of a dropout is torch's own draw in eager code.
    assert {"run", *names} - {"draw_pair"} <= seen


ORDERS = {
    "counter-first": "from torch.utils.flop_counter import FlopCounterMode\nimport "
    "transformer_engine.pytorch as te\nlayer = te.Linear(4, 8, device='cpu')\n",
    "counter-last": "import transformer_engine.pytorch as te\n"
    "layer = te.Linear(4, 8, device='cpu')\nlayer(torch.ones(2, 4))\n"
    "import sys\nassert 'torch.utils.flop_counter' not in sys.modules\n"
    "from torch.utils.flop_counter import FlopCounterMode\n",
}


@pytest.mark.parametrize("order", ORDERS)
def test_whoever_is_imported_first(order):
    """The counter's module is not imported by the package, and not missed."""
    code = (
        f"import torch\n{ORDERS[order]}"
        "with FlopCounterMode(display=False) as counter:\n    layer(torch.ones(2, 4))\n"
        "assert counter.get_total_flops() == 2 * 2 * 4 * 8, counter.get_total_flops()\n"
    )
    processes.run(code)
