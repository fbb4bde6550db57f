# SPDX-License-Identifier: Apache-2.0
"""norm_backward: gradients against torch's float64 autograd of the definition."""

import itertools

import pytest
import torch
from buffers import HIGH, LAYOUTS, Poisoned, laid_out, name_of, names_of, normal
from comparators import assert_bits, assert_repeats, assert_within
from layer_reference import NORMS, norm, norm_grad_terms, statistics, wide
from refusals import check_refused
from thinning import triples
from tols import BF16, E4M3, F16, F32

from transformer_engine import _core

SHAPES = [(1, 1), (5, 1), (3, 2), (7, 3), (300, 64), (33, 17), (129, 127), (9, 1000), (2, 4099)]
SHAPES += [(150, 768), (11, 1096), (3, 8192)]  # of whole vectors
# (input, gamma, grad_output, grad_input and the gradients of the parameters)
DTYPES = [
    (F32, F32, F32, F32),
    (BF16, BF16, BF16, BF16),
    (F16, F16, F16, F16),
    (BF16, F32, BF16, F32),
    (F32, BF16, F16, BF16),
]
EPS = 1e-5


class Problem:
    """An input with its statistics, and an output gradient.

    Parameters
    ----------
    rng, device :
        Of the data.
    kind : str
        Of NORMS.
    shape : tuple of int
        Of the input.
    dtypes : tuple
        Of input, gamma, grad_output and the results.
    added, zero_centered : bool
        There is a grad_add; the factor is 1 + gamma.
    layout : str
        Of LAYOUTS.
    mean : float
        Of the input.
    """

    def __init__(self, rng, device, kind, shape, dtypes=DTYPES[0], **options):
        self.kind, self.shape, self.dtypes, self.device = kind, shape, dtypes, device
        self.layout = options.get("layout", "dense")
        self.zero_centered = options.get("zero_centered", False)
        self.x = (normal(rng, shape, F32) + options.get("mean", 0.0)).to(dtypes[0])
        self.gamma = normal(rng, shape[1:], dtypes[1])
        self.grad = normal(rng, shape, dtypes[2])
        self.added = normal(rng, shape, dtypes[2]) if options.get("added", False) else None
        mean, rsigma = statistics(kind, wide(self.x), EPS)
        self.mean = mean[:, 0].float() if kind == "layernorm" else None
        self.rsigma = rsigma[:, 0].float()

    def names(self):
        """The results that this kind has."""
        found = ("grad_input", "gamma_grad", "beta_grad")
        return found if self.kind == "layernorm" else found[:2]

    def call(self, **results):
        def place(tensor, placed=False):
            if tensor is None:
                return None
            return laid_out(tensor, self.layout, self.device) if placed else tensor.to(self.device)

        _core.norm_backward(
            place(self.grad, True),
            place(self.x, True),
            kind=NORMS[self.kind],
            rsigma=place(self.rsigma),
            mean=place(self.mean),
            gamma=place(self.gamma),
            grad_add=place(self.added, True),
            zero_centered=self.zero_centered,
            **results,
        )

    def run(self, names=None):
        """Poisoned results by name, and the call that fills them."""
        made = {
            name: Poisoned(self.shape[1:], self.dtypes[3], self.device)
            for name in (self.names() if names is None else names)
        }
        if "grad_input" in made:
            made["grad_input"] = Poisoned(
                self.shape, self.dtypes[3], self.device, layout=self.layout
            )
        self.call(**{name: memory.tensor for name, memory in made.items()})
        assert all(memory.untouched() for memory in made.values())
        return {name: memory.tensor for name, memory in made.items()}

    def exact(self):
        """Gradients by name, each with its terms and the number of them."""
        one = 1 if self.zero_centered or self.gamma is None else 0
        rows, columns = self.shape
        none = torch.zeros(columns, dtype=torch.float64)
        gamma = none if self.gamma is None else wide(self.gamma)
        leaves = [t.clone().requires_grad_(True) for t in (wide(self.x), gamma, none)]
        grad = wide(self.grad) + (0 if self.added is None else wide(self.added))
        output = norm(self.kind, leaves[0], leaves[1] + one, leaves[2], EPS)
        values = torch.autograd.grad(output, leaves, grad)
        terms = norm_grad_terms(self.kind, wide(self.x), gamma + one, grad, EPS)
        names = ("grad_input", "gamma_grad", "beta_grad")
        depths = (columns, max(rows, columns), rows)
        return {n: v for n, *v in zip(names, values, terms, depths, strict=True)}

    def check(self, found):
        exact = self.exact()
        for name, tensor in found.items():
            assert_within(tensor, *exact[name])


def check_gradients(rng, device, kind, shape, dtypes=DTYPES[0], **options):
    """Compare one call with float64."""
    problem = Problem(rng, device, kind, shape, dtypes, **options)
    problem.check(problem.run())


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", DTYPES[:2], ids=names_of)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", NORMS)
def test_shapes(device, kind, shape, dtypes, rng):
    check_gradients(rng, device, kind, shape, dtypes)


@pytest.mark.parametrize("dtypes", DTYPES, ids=names_of)
@pytest.mark.parametrize("shape", [(65, 260), (20, 1096)])
@pytest.mark.parametrize("kind", NORMS)
def test_dtypes(device, kind, shape, dtypes, rng):
    check_gradients(rng, device, kind, shape, dtypes, added=True)


# A gradient of another dtype than the input: of a residual in fp32 before layers of 16 bits, say.
TWO_DTYPES = pytest.mark.parametrize(
    "dtypes", [(a, F32, b, a) for a, b in itertools.permutations(HIGH, 2)], ids=names_of
)


@TWO_DTYPES
@pytest.mark.parametrize("added", [False, True], ids=["", "added"])
@pytest.mark.parametrize("shape", [*SHAPES, (2500, 40), (2, 9000)])
@pytest.mark.parametrize("kind", NORMS)
def test_two_dtypes(device, kind, shape, added, dtypes, rng):
    check_gradients(rng, device, kind, shape, dtypes, added=added)


@TWO_DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("columns", [40, 264, 1096])
def test_layouts_of_two_dtypes(device, columns, layout, dtypes, rng):
    check_gradients(rng, device, "layernorm", (37, columns), dtypes, layout=layout, added=True)


@TWO_DTYPES
def test_two_dtypes_are_those_of_one(dtypes, rng):
    """Values that both dtypes have give the bits that they give in fp32, on the CPU."""
    problem = Problem(rng, "cpu", "layernorm", (70, 520), dtypes)
    problem.dtypes = (*dtypes[:3], F32)
    found = problem.run()
    problem.x, problem.grad = problem.x.float(), problem.grad.float()
    for name, tensor in problem.run().items():
        assert_bits(found[name], tensor)


@pytest.mark.parametrize("kind", NORMS)
def test_wide_rows(device, kind, rng):
    check_gradients(rng, device, kind, (2, 50021))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", HIGH, ids=name_of)
@pytest.mark.parametrize("kind", NORMS)
def test_layouts(device, kind, source, layout, rng):
    check_gradients(rng, device, kind, (37, 264), (source,) * 4, layout=layout, added=True)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", [(5000, 8), (2500, 40), (1025, 1)])
def test_many_rows(device, kind, shape, rng):
    """Column sums over many more rows than one block takes."""
    check_gradients(rng, device, kind, shape, DTYPES[3])


@pytest.mark.parametrize("kind", NORMS)
def test_zero_centered(device, kind, rng):
    check_gradients(rng, device, kind, (33, 130), DTYPES[1], zero_centered=True)


@pytest.mark.parametrize("kind", NORMS)
def test_without_gamma(device, kind, rng):
    problem = Problem(rng, device, kind, (19, 70))
    problem.gamma = None
    problem.check(problem.run())


@pytest.mark.parametrize("kind", NORMS)
def test_far_from_zero(device, kind, rng):
    check_gradients(rng, device, kind, (21, 777), mean=300.0)


@pytest.mark.parametrize("wanted", [(), ("grad_input",), ("gamma_grad",), ("gamma_grad", "rest")])
@pytest.mark.parametrize("kind", NORMS)
def test_some_of_the_results(device, kind, wanted, rng):
    problem = Problem(rng, device, kind, (130, 96), DTYPES[1])
    names = [problem.names()[-1] if name == "rest" else name for name in wanted]
    problem.check(problem.run(dict.fromkeys(names)))


@pytest.mark.parametrize("kind", NORMS)
def test_given_statistics_are_used(device, kind, rng):
    """Nothing makes rsigma again: twice as large a one doubles the gradient of gamma."""
    problem = Problem(rng, device, kind, (40, 64))
    once = problem.run()["gamma_grad"]
    problem.rsigma = problem.rsigma * 2
    assert_bits(problem.run()["gamma_grad"], once * 2)


@pytest.mark.parametrize("kind", NORMS)
def test_no_rows(device, kind, rng):
    """Gradients of parameters that nothing used are 0."""
    problem = Problem(rng, device, kind, (0, 40))
    for name, tensor in problem.run().items():
        if name != "grad_input":
            assert_bits(tensor, torch.zeros(40))


@pytest.mark.parametrize("kind", NORMS)
def test_nan_stays_in_its_row(device, kind, rng):
    problem = Problem(rng, device, kind, (9, 200))
    clean = problem.run()
    problem.grad[4, 77] = float("nan")
    found = problem.run()
    others = [row for row in range(9) if row != 4]
    assert_bits(found["grad_input"][others], clean["grad_input"][others])
    assert found["grad_input"][4].isnan().all()
    columns = [column for column in range(200) if column != 77]
    for name in problem.names()[1:]:
        assert found[name][77].isnan()
        assert_bits(found[name][columns], clean[name][columns])


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", [(700, 530), (700, 1096), (3000, 16)])
def test_twice_the_same(device, kind, shape, rng):
    problem = Problem(rng, device, kind, shape, DTYPES[1], added=True)
    assert_repeats(lambda: problem.run().values())


# Kernels are chosen by shape, layout and dtypes; the rest is a factor or a term in each.
@triples(
    kind=NORMS,
    shape=[(7, 3), (33, 17), (65, 256), (20, 1096), (3, 8192), (3, 40960)],
    dtypes=DTYPES,
    added=[False, True],
    layout=LAYOUTS,
)
def test_residual(device, kind, shape, dtypes, added, layout, rng):
    """The gradient of another reader is added to what is written without it, in place too."""
    problem = Problem(rng, device, kind, shape, dtypes, added=added, layout=layout)
    other = normal(rng, shape, dtypes[3])
    alone = problem.run()
    expected = (alone["grad_input"].float() + other.to(device).float()).to(dtypes[3])
    made = {name: torch.empty_like(tensor) for name, tensor in alone.items()}
    problem.call(**made, grad_residual=laid_out(other, layout, device))
    assert_bits(made["grad_input"], expected)
    for name in problem.names()[1:]:
        assert_bits(made[name], alone[name])
    there = laid_out(other, layout, device)
    problem.call(grad_input=there, grad_residual=there)
    assert_bits(there, expected)


# ---- refusals ------------------------------------------------------------------------------------

WRONG = {
    "kind": (ValueError, r"kind: -1 does not exist, expected 0 to 2", {"kind": -1}),
    "no columns": (
        ValueError,
        r"input: shape \[4, 0\], expected at least one column",
        {"input": torch.zeros(4, 0)},
    ),
    "gradient's shape": (
        ValueError,
        r"grad_output: shape \[4, 5\], expected \[4, 6\]",
        {"grad_output": torch.ones(4, 5)},
    ),
    "FP8 gradient": (
        TypeError,
        r"grad_output: dtype e4m3, expected f32, f16 or bf16",
        {"grad_output": torch.ones(4, 6).to(E4M3)},
    ),
    "added dtype": (
        TypeError,
        r"grad_add: dtype bf16, expected f32",
        {"grad_add": torch.ones(4, 6).to(BF16)},
    ),
    "added shape": (
        ValueError,
        r"grad_add: shape \[3, 6\], expected \[4, 6\]",
        {"grad_add": torch.ones(3, 6)},
    ),
    "residual alone": (
        ValueError,
        r"grad_residual: ndim = 2, expected 0",
        {"grad_residual": torch.ones(4, 6), "grad_input": None},
    ),
    "residual's dtype": (
        TypeError,
        r"grad_residual: dtype bf16, expected f32",
        {"grad_residual": torch.ones(4, 6).to(BF16)},
    ),
    "no rsigma": (TypeError, r"rsigma: expected a torch.Tensor, got None", {"rsigma": None}),
    "half rsigma": (
        TypeError,
        r"rsigma: dtype f16, expected f32",
        {"rsigma": torch.ones(4).half()},
    ),
    "no mean": (ValueError, r"mean: is missing: the gradient", {"mean": None}),
    "mean of RMSNorm": (
        ValueError,
        r"mean: kind 1 has none, only layernorm \(0\) has",
        {"kind": 1, "beta_grad": None},
    ),
    "beta of RMSNorm": (
        ValueError,
        r"beta_grad: kind 1 has none, only layernorm \(0\) has",
        {"kind": 1, "mean": None},
    ),
    "short gamma": (
        ValueError,
        r"gamma: .*length 5, expected a vector of 6",
        {"gamma": torch.ones(5)},
    ),
    "short gamma_grad": (
        ValueError,
        r"gamma_grad: .*length 7, expected a vector of 6",
        {"gamma_grad": torch.ones(7)},
    ),
    "integer beta_grad": (
        TypeError,
        r"beta_grad: dtype i32, expected f32, f16 or bf16",
        {"beta_grad": torch.ones(6, dtype=torch.int32)},
    ),
    "strided result": (
        ValueError,
        r"grad_input: its strides .* contiguous",
        {"grad_input": torch.ones(4, 12)[:, ::2]},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case):
    result = Poisoned((4, 6), F32, device)
    good = {
        "grad_output": torch.ones(4, 6), "input": torch.ones(4, 6), "kind": 0,
        "mean": torch.ones(4), "rsigma": torch.ones(4), "gamma": torch.ones(6),
        "gamma_grad": torch.ones(6), "beta_grad": torch.ones(6), "grad_input": result.tensor,
    }  # fmt: skip
    check_refused("norm_backward", device, WRONG[case], good, result)


# ---- CUDA against CPU ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES, ids=names_of)
@pytest.mark.parametrize("shape", [(1, 1), (1024, 768), (5000, 70), (3, 40000)])
@pytest.mark.parametrize("kind", NORMS)
def test_cuda_equals_cpu(kind, shape, dtypes, rng):
    """Both within the margin of the same exact gradients."""
    problem = Problem(rng, "cpu", kind, shape, dtypes, added=True)
    for problem.device in ("cpu", "cuda"):
        problem.check(problem.run())


@pytest.mark.gpu
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("shape", [(9000, 264), (4500, 1096)])
@pytest.mark.parametrize("kind", NORMS)
def test_rows_in_turns(kind, shape, added, rng):
    """So many that each of the blocks that stay meets more than are on their way at once."""
    check_gradients(rng, "cuda", kind, shape, DTYPES[1], added=added)
