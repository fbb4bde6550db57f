# SPDX-License-Identifier: Apache-2.0
"""`torch.export`: programs with the bits of the module, in this process and in a new one."""

import contextlib
import itertools

import processes
import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits, counted, states_of

import transformer_engine.pytorch as te
from transformer_engine.common import plan_text

WIDTH, TOKENS, BATCH = 32, 6, 2

MAKERS = {
    "linear": lambda d: te.Linear(WIDTH, 48, device=d),
    "split": lambda d: te.Linear(WIDTH, 48, parameters_split=("a", "b"), device=d),
    "layernorm-linear": lambda d: te.LayerNormLinear(
        WIDTH, 48, normalization="RMSNorm", return_layernorm_output=True, device=d
    ),
    "mlp": lambda d: te.LayerNormMLP(WIDTH, 48, activation="swiglu", return_bias=True, device=d),
    "layernorm": lambda d: te.LayerNorm(WIDTH, zero_centered_gamma=True, device=d),
    "rmsnorm": lambda d: te.RMSNorm(WIDTH, device=d),
    "attention": lambda d: te.MultiheadAttention(WIDTH, 4, qk_norm_type="RMSNorm", device=d),
    "transformer": lambda d: te.TransformerLayer(
        WIDTH, 48, 4, self_attn_mask_type="causal", device=d
    ),
    "transformer-window": lambda d: te.TransformerLayer(WIDTH, 48, 4, window_size=(2, 0), device=d),
}

OLD_TORCH = torch.__version__ < torch.torch_version.TorchVersion("2.12")

pytestmark = [
    # Strict export says so of an autocast inside of the model, which puts back what it changed.
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(torch.nn.Module):
    """A layer in a region of its own."""

    def __init__(self, layer, recipe):
        super().__init__()
        self.layer, self.recipe = layer, recipe

    def forward(self, x):
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.layer(x)


def trained(device, name, recipe):
    """A layer that has found scales, in evaluation mode."""
    layer = MAKERS[name](device)
    for number in range(2 if recipe is not None else 0):
        with te.autocast(recipe=recipe):
            out = layer(torch.randn(TOKENS, BATCH, WIDTH, device=device) * 4**number)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    return layer.eval()


def exported(layer, recipe, where, strict, x):
    """The program, for any number of tokens."""
    windowed = isinstance(layer, te.TransformerLayer) and layer.self_attention.window_size == (2, 0)
    if not strict and windowed and OLD_TORCH:
        pytest.skip(
            "torch before 2.12 adds guards on strides of its own where a tensor of four dims is "
            "viewed as one of three, and they exclude other numbers of tokens; strict=True works"
        )
    sizes = ({0: torch.export.Dim("tokens", min=2, max=4096)},)
    if where == "inside":
        return torch.export.export(Model(layer, recipe), (x,), strict=strict, dynamic_shapes=sizes)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        return torch.export.export(layer, (x,), strict=strict, dynamic_shapes=sizes)


def run(layer, recipe, x):
    """The layer without gradients: it updates nothing."""
    with torch.no_grad(), te.autocast(enabled=recipe is not None, recipe=recipe):
        return layer(x)


def as_tuple(out):
    return out if isinstance(out, tuple) else (out,)


REGIONS = [(None, "outside"), ("delayed", "outside"), ("delayed", "inside"), ("current", "inside")]


def program_cases():
    """Parameters of the test below.

    Every module in every region, each of both traced strictly and not, in turns; half of them are
    nightly on the CPU: the others, which CUDA has too, have every module and every region, each
    traced both ways, but not each module in each region.
    """
    for (row, name), (column, (recipe, where)) in itertools.product(
        enumerate(MAKERS), enumerate(REGIONS)
    ):
        case = (name, recipe, where, (row + column) % 2 == 1)
        text = f"{name}-{recipe}-{where}{'-strict' if case[-1] else ''}"
        chosen = (column - row) % 4 in (0, 3)
        marks = [] if chosen else pytest.mark.nightly
        yield pytest.param("cpu", *case, id=f"cpu-{text}", marks=marks)
        if chosen:
            yield pytest.param("cuda", *case, id=f"cuda-{text}", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("device", "name", "recipe", "where", "strict"), list(program_cases()))
def test_a_program_has_the_bits_of_the_module(device, name, recipe, where, strict):
    recipe = recipe and RECIPES[recipe]()
    layer = trained(device, name, recipe)
    before = states_of(layer)
    x = torch.randn(TOKENS, BATCH, WIDTH, device=device)
    program = exported(layer, recipe, where, strict, x)
    assert_same_bits(states_of(layer), before)
    module = program.module()
    for tokens in (TOKENS, 2, 37):
        x = torch.randn(tokens, BATCH, WIDTH, device=device)
        with counted() as ours:
            expected = run(layer, recipe, x)
        with counted() as programs:
            out = module(x)
        assert_same_bits(as_tuple(out), as_tuple(expected))
        assert (programs.fp8, programs.other) == (ours.fp8, ours.other)
    mutating = [n for n in program.graph.nodes if n.op == "call_function" and "state" in str(n)]
    assert not mutating and not program.graph_signature.buffers_to_mutate


LOAD = """
import sys, torch
import transformer_engine.pytorch
for folder in sys.argv[1:]:
    program = torch.export.load(f"{folder}/program.pt2")
    inputs, expected = torch.load(f"{folder}/data.pt")
    out = program.module()(inputs)
    out = out if isinstance(out, tuple) else (out,)
    assert len(out) == len(expected)
    for one, other in zip(out, expected):
        assert torch.equal(one, other), folder
"""


def test_programs_run_in_a_new_process(device, tmp_path):
    """Which has made no plan: the program says how."""
    folders = []
    for name in (None, "delayed", "current"):
        recipe = name and RECIPES[name]()
        layer = trained(device, "transformer", recipe)
        folders.append(tmp_path / str(name))
        folders[-1].mkdir()
        x = torch.randn(TOKENS, BATCH, WIDTH, device=device)
        torch.export.save(exported(layer, recipe, "outside", False, x), folders[-1] / "program.pt2")
        x = torch.randn(17, BATCH, WIDTH, device=device)
        torch.save((x, as_tuple(run(layer, recipe, x))), folders[-1] / "data.pt")
    processes.run(LOAD, *folders, fresh=device != "cpu")


def test_decompositions_and_other_operators(device):
    """A program in terms of torch's core operators; ours stay."""
    layer = te.TransformerLayer(WIDTH, 48, 4, window_size=(2, 0), device=device).eval()
    x = torch.randn(TOKENS, BATCH, WIDTH, device=device)
    program = exported(layer, None, "outside", False, x).run_decompositions()
    seen = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    names = ("run",) if device == "cpu" else ("run", "softmax")
    assert {f"transformer_engine.{name}.default" for name in names} <= seen
    assert_same_bits(program.module()(x), run(layer, None, x))


def test_delayed_scaling_without_scales(device):
    layer = te.Linear(WIDTH, 48, device=device)
    x = torch.randn(TOKENS, WIDTH, device=device)
    with (
        te.autocast(recipe=RECIPES["delayed"]()),
        pytest.raises(RuntimeError, match="takes the scales that the module has found, and it has"),
    ):
        torch.export.export(layer, (x,))
    assert states_of(layer) == [None]


def test_scales_of_a_checkpoint(device):
    """Loaded ones count, before the module has run."""
    recipe = RECIPES["delayed"]()
    source = trained(device, "linear", recipe)
    layer = te.Linear(WIDTH, 48, device=device)
    layer.load_state_dict(source.state_dict())
    x = torch.randn(TOKENS, BATCH, WIDTH, device=device)
    program = exported(layer, recipe, "outside", False, x)
    assert_same_bits(program.module()(x), run(source, recipe, x))


def test_scales_of_a_program_stay(device):
    recipe = RECIPES["delayed"]()
    layer = trained(device, "linear", recipe)
    x = torch.randn(TOKENS, BATCH, WIDTH, device=device)
    module = exported(layer, recipe, "outside", False, x).module()
    expected = run(layer, recipe, x)
    for _ in range(3):
        with te.autocast(recipe=recipe):
            layer(x * 100).sum().backward()
    assert_same_bits(module(x), expected)
    assert not torch.equal(run(layer, recipe, x), expected)


@pytest.mark.parametrize("name", ["linear", "rmsnorm", "transformer-window"])
def test_a_program_has_no_backward(device, name):
    """An error, not the silence that torch has for operators without a backward."""
    layer = MAKERS[name](device).eval()
    x = torch.randn(TOKENS, BATCH, WIDTH, device=device)
    out = exported(layer, None, "outside", False, x).module()(x)
    with pytest.raises(NotImplementedError, match="a program of torch.export has a forward only"):
        out.sum().backward()


# ---- texts of plans ------------------------------------------------------------------------------


def texts_of(layer, x, recipe):
    with te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()):
        return [plan.text for _, plan in layer.plans_of(x)]


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("name", ["linear", "layernorm-linear", "mlp"])
def test_a_text_is_the_plan(name, recipe):
    layer = MAKERS[name]("cpu")
    for text in texts_of(layer, torch.randn(TOKENS, WIDTH), recipe):
        content = plan_text.read_text(text)
        again = plan_text.make_plan(content.direction, content)
        assert again.text == text
        assert plan_text.plan_of(text) is again


OWN = """
import sys
import transformer_engine.pytorch
from transformer_engine.common import plan_text
for line in sys.stdin:
    print(plan_text.plan_of(line.strip()).native.id)
"""


def test_a_text_gives_the_same_plan_in_another_process():
    layer, x = MAKERS["mlp"]("cpu"), torch.randn(TOKENS, WIDTH)
    texts = [text for recipe in (None, *RECIPES) for text in texts_of(layer, x, recipe)]
    done = processes.run(OWN, input="\n".join(texts))
    expected = [plan_text.plan_of(text).native.id for text in texts]
    assert [int(line) for line in done.stdout.split()] == expected


@pytest.mark.parametrize(
    "change",
    ["version", "older", "before", "empty", "cut", "short", "call", "more", "member"],
)
def test_a_text_of_another_version_or_damaged(change):
    text = texts_of(MAKERS["linear"]("cpu"), torch.randn(TOKENS, WIDTH), None)[0]
    wrong = {
        "version": text.replace("plan/7 ", "plan/99 "),
        "older": "linear/1 direction=0 in_features=48",
        "before": "plan/5 (0, 0, (), ())",
        "empty": "-",
        "cut": text[:-5],
        "short": "plan/7 forward",
        "call": "plan/7 print()",
        "more": text + " {}",
        "member": text.replace("nodes", "edges"),
    }[change]
    with pytest.raises(ValueError, match="export the program again"):
        plan_text.plan_of(wrong)
    x, layer = torch.randn(TOKENS, WIDTH), MAKERS["linear"]("cpu")
    with contextlib.suppress(ValueError):
        torch.ops.transformer_engine.run(
            wrong, (0,), [x, layer.weight, layer.bias], None, -1, 0, -1
        )
        pytest.fail("the operator took it")
