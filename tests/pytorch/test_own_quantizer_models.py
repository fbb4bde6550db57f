# SPDX-License-Identifier: Apache-2.0
"""Models whose weights, inputs and gradients are cast by quantizers of programs."""

import copy
import functools
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from comparators import assert_within
from pytorch.distributed_programs import shard
from pytorch.helpers import assert_same_bits
from pytorch.own_quantizers import OWN, Halves, HalvesQuantizer, Writes, custom, halves_of
from pytorch.quantized_cases import E4M3, E5M2, assert_same_tensor, current, twins

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor import HybridQuantizedTensor, utils


def spread(weight):
    """Values that halves tell apart."""
    torch.nn.init.uniform_(weight, -2, 2)


FIRST, BOTH = {"init_method": spread}, {"init_method": spread, "output_layer_init_method": spread}
MODELS = {
    "linear": lambda device: te.Linear(32, 64, device=device, **FIRST),
    "norm and linear": lambda device: te.LayerNormLinear(32, 64, device=device, **FIRST),
    "mlp": lambda device: te.LayerNormMLP(32, 64, device=device, **BOTH),
    "layer": lambda device: te.TransformerLayer(
        32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, device=device, **BOTH
    ),
}


def give_halves(role):
    """A function with a name, which pickles can have."""
    return HalvesQuantizer()


HALVES = te.recipe.CustomRecipe(qfactory=give_halves)


def run(model, x, recipe=HALVES):
    with te.autocast(recipe=recipe):
        return model(x)


def source(device):
    """[tokens, batch, hidden]."""
    return torch.randn(16, 2, 32, device=device) * 2


def halves_in(model):
    return [p for p in model.parameters() if isinstance(p, Halves)]


# ---- an MLP, cast by cast ------------------------------------------------------------------------


class Watched(HalvesQuantizer):
    """It keeps what it was given, and the values that it made of that."""

    def __init__(self, seen, role):
        super().__init__()
        self.seen, self.role = seen, role

    def quantize_impl(self, tensor):
        made = super().quantize_impl(tensor)
        self.seen[self.role] = tensor.clone(), made.dequantize()
        return made


def test_an_mlp_multiplies_what_it_makes(device):
    """Each cast is given what follows from the values of the casts before, in float64."""
    seen = {}

    def factory(role):
        return Watched(seen, (role.name.split(".")[-1], role.tensor_type))

    mlp = MODELS["mlp"](device)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.uniform_(-1, 1)
    x = torch.randn(48, 32, device=device, requires_grad=True)
    grad = torch.randn(48, 32, device=device)
    out = run(mlp, x, te.recipe.CustomRecipe(qfactory=factory))
    out.backward(grad)
    assert len(seen) == 6
    for given, made in seen.values():
        assert_same_bits(made, halves_of(given))
    given = {role: pair[0] for role, pair in seen.items()}
    a1, w1, g1, a2, w2, g2 = (
        seen[layer, role][1].double()
        for layer in ("fc1", "fc2")
        for role in ("input", "weight", "grad_output")
    )
    gamma, beta, b1, b2 = (
        p.detach().double()
        for p in (mlp.layer_norm_weight, mlp.layer_norm_bias, mlp.fc1_bias, mlp.fc2_bias)
    )
    wide = x.detach().double()
    rstd = (wide.var(1, correction=0, keepdim=True) + mlp.eps).rsqrt()
    hat = (wide - wide.mean(1, keepdim=True)) * rstd
    assert_within(given["fc1", "input"], hat * gamma + beta, hat.abs() * 4 + 1, 32)
    assert_same_bits(given["fc1", "weight"], mlp.fc1_weight.detach())
    h = (a1 @ w1.t() + b1).requires_grad_()
    size = a1.abs() @ w1.abs().t() + 1
    after = torch.nn.functional.gelu(h, approximate="tanh")
    assert_within(given["fc2", "input"], after, 2 * size, 32)
    assert_within(out, a2 @ w2.t() + b2, a2.abs() @ w2.abs().t() + 1, 64)
    assert_same_bits(given["fc2", "grad_output"], grad)
    after.backward(g2 @ w2)
    terms = 2 * (g2.abs() @ w2.abs()) * (1 + size)
    assert_within(given["fc1", "grad_output"], h.grad, terms, 32)
    assert_within(mlp.fc2_weight.grad, g2.t() @ a2, g2.abs().t() @ a2.abs(), 48)
    assert_within(mlp.fc1_weight.grad, g1.t() @ a1, g1.abs().t() @ a1.abs(), 48)
    assert_within(mlp.fc1_bias.grad, given["fc1", "grad_output"].double().sum(0), terms.sum(0), 48)
    u, terms = (g1 @ w1) * gamma, (g1.abs() @ w1.abs()) * gamma.abs()
    means = u.mean(1, keepdim=True), (u * hat).mean(1, keepdim=True)
    sizes = terms.mean(1, keepdim=True), (terms * hat.abs()).mean(1, keepdim=True)
    exact = rstd * (u - means[0] - hat * means[1])
    assert_within(x.grad, exact, 4 * rstd * (terms + sizes[0] + hat.abs() * sizes[1]), 64)


# ---- weights that stay quantized -----------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_weights_that_it_made_are_read_as_they_are(device, name):
    """The bits of a model that casts plain weights at each call."""
    kept, plain = twins(lambda: MODELS[name](device), HALVES, None)
    weights = halves_in(kept)
    assert len(weights) == {"linear": 1, "norm and linear": 1, "mlp": 2, "layer": 6}[name]
    for weight in weights:  # what programs put on parameters says nothing of their format
        weight.allreduce, weight.main_grad = True, torch.zeros(weight.shape, device=device)
    x = source(device)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outs = [run(model, inp) for model, inp in zip((kept, plain), inputs, strict=True)]
    assert_same_bits(*outs)
    for out in outs:
        out.backward(torch.ones_like(out))
    assert_same_bits(inputs[0].grad, inputs[1].grad)
    for mine, other in zip(kept.parameters(), plain.parameters(), strict=True):
        assert_same_bits(mine.grad, other.grad)
        if isinstance(mine, Halves):
            assert_same_bits(mine.detach().dequantize(), halves_of(other.detach()))


OPTIMIZERS = {
    "fused sgd": lambda p: te.optimizers.FusedSGD(p, lr=0.5, momentum=0.9),
    "fused adam": lambda p: te.optimizers.FusedAdam(p, lr=0.25, weight_decay=0.125),
    "fused adam capturable": lambda p: te.optimizers.FusedAdam(p, lr=0.25, capturable=True),
    "fused adam masters": lambda p: te.optimizers.FusedAdam(p, lr=0.25, master_weights=True),
}


@pytest.mark.parametrize("model", ["linear", "mlp"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_such_a_model(device, name, model):
    """Each step's values are cast; with masters these go on, else what was made of them."""
    with te.quantized_model_init(recipe=HALVES):
        kept = MODELS[model](device)
    values = [p.detach().float().clone() for p in kept.parameters()]
    twin = [torch.nn.Parameter(value) for value in values]
    mine, other = OPTIMIZERS[name](kept.parameters()), OPTIMIZERS[name](twin)
    for _ in range(3):
        for parameter, known in zip(kept.parameters(), twin, strict=True):
            known.grad = torch.randn_like(known)
            parameter.grad = known.grad.clone()
        mine.step()
        other.step()
        for parameter, known in zip(kept.parameters(), twin, strict=True):
            wanted = known.detach()
            if isinstance(parameter, Halves):
                wanted = halves_of(wanted)
                if "masters" not in name:
                    with torch.no_grad():
                        known.copy_(wanted)
            assert_same_bits(parameter.detach().float(), wanted)
    assert len(halves_in(kept)) == (2 if model == "mlp" else 1)
    plain, x = MODELS[model](device), source(device)
    plain.load_state_dict({name: p.detach().float() for name, p in kept.named_parameters()}, False)
    assert_same_bits(run(kept, x), run(plain, x))


def test_a_class_that_writes_otherwise(device):
    """New tensors are those of its base; what is there gets what it writes, by whoever writes."""
    make, plain = (lambda: Writes(E4M3, device)), current()
    x = torch.randn(16, 32, device=device)
    assert_same_bits(make()(x)._data, plain(x)._data)
    wanted = plain(2 * x)
    for write in (
        lambda t: make().quantize(x, out=t),
        lambda t: make().update_quantized(x, t),
        lambda t: t.quantize_(x),
        lambda t: t.copy_(x),
        lambda t: utils.quantize_master_weights([t], [x.view(-1)], [0], None),
    ):
        into = make()(torch.ones_like(x))
        write(into)
        assert_same_bits(into._data, wanted._data)
        assert_same_bits(into._scale_inv, wanted._scale_inv)
    kept = make()(x)
    kept.quantize_(3 * x, noop_flag=torch.ones(1, device=device))
    assert_same_bits(kept._data, plain(x)._data)


@pytest.mark.parametrize("name", ["fused sgd", "fused adam", "fused adam masters"])
def test_optimizers_write_as_it_does(device, name):
    start = torch.randn(64, 128, device=device)
    weight = torch.nn.Parameter(Writes(E4M3, device)(start))
    twin = torch.nn.Parameter(weight.detach().float())
    for parameter in (weight, twin):
        parameter.grad = torch.ones_like(twin)
        OPTIMIZERS[name]([parameter]).step()
    wanted = current()(2 * twin.detach())
    assert_same_bits(weight.detach().float(), wanted.dequantize(dtype=torch.float32))


class WritesAlone(te.Quantizer):
    """It says how to write, and what to write to, but makes nothing."""

    update_quantized = HalvesQuantizer.update_quantized
    make_empty = HalvesQuantizer.make_empty


def test_a_class_that_makes_nothing(device):
    x = torch.randn(16, 32, device=device)
    into = WritesAlone().make_empty(x.shape, device=device)
    WritesAlone().quantize(x, out=into)
    assert_same_bits(into.dequantize(), halves_of(x))
    for call in (
        lambda: WritesAlone()(x),
        lambda: run(te.Linear(32, 64, device=device), x, custom(WritesAlone)),
    ):
        with pytest.raises(NotImplementedError, match=r"WritesAlone: .*no quantize_impl\(tensor\)"):
            call()


def whole(parameter):
    """The values of all ranks of a sharded parameter."""
    mine = parameter.detach()._local_tensor
    mine = mine.dequantize() if isinstance(mine, Halves) else mine
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.contiguous())
    return torch.cat(parts)


def sharded(device):
    """FSDP2 over weights of which ranks cast their parts, beside plain ones that are cast whole."""
    linear = functools.partial(te.Linear, 32, 32, init_method=spread)
    with te.quantized_model_init(recipe=HALVES):
        model = torch.nn.Sequential(linear(device="meta"), linear(device="meta"))
    shard(model, device)
    for layer in model:
        layer.reset_parameters()
    twin = torch.nn.Sequential(linear(device=device), linear(device=device))
    with torch.no_grad():
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            other.copy_(whole(mine))
    models = model, twin
    steps = [te.optimizers.FusedAdam(m.parameters(), lr=0.25, master_weights=True) for m in models]
    outs = []
    for number in range(3):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(number)).to(device)
        made = [run(m, x) for m in models]
        for out, step in zip(made, steps, strict=True):
            (out / 64).square().sum().backward()
            step.step()
            step.zero_grad()
        outs.append([out.detach() for out in made])
    kinds = [type(p._local_tensor) is Halves for p in model.parameters()]
    found = [whole(p) for p in model.parameters()]
    masters = [p.detach() for p in twin.parameters()]
    wanted = [halves_of(m) if own else m for own, m in zip(kinds, masters, strict=True)]
    return kinds, outs, found, wanted


def test_parts_of_sharded_weights(ranks):
    for kinds, outs, found, wanted in ranks.run(sharded):
        assert kinds == [True, False] * 2
        for mine, other in outs:
            assert_same_bits(mine, other)
        assert_same_bits(found, wanted)
        assert not torch.equal(outs[0][0], outs[-1][0])


# ---- pairs ---------------------------------------------------------------------------------------

PAIRS = {
    "row": lambda: (HalvesQuantizer(), current(E5M2)),
    "column": lambda: (current(), HalvesQuantizer()),
    "both": lambda: (HalvesQuantizer(), HalvesQuantizer()),
    "cast of this library": lambda: (OWN["current"][0]("cpu"), current(E5M2)),
}
SOURCES = ["original", "rowwise_dequantized"]


def paired(name, columnwise_source):
    row, column = PAIRS[name]()
    return te.HybridQuantizer(
        rowwise_quantizer=row, columnwise_quantizer=column, columnwise_source=columnwise_source
    )


def forms_of(name, columnwise_source, x):
    """The values of both forms."""
    row, column = PAIRS[name]()
    first = row(x).dequantize()
    return first, column(x if columnwise_source == "original" else first).dequantize()


@pytest.mark.parametrize("of", SOURCES)
@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_with_one_of_them(device, name, of):
    quantizer, x = paired(name, of), torch.randn(24, 40, device=device)
    wanted = forms_of(name, of, x)

    def check(tensor):
        assert type(tensor) is HybridQuantizedTensor and tensor.shape == x.shape
        found = tensor.rowwise_sub_storage, tensor.columnwise_sub_storage
        assert_same_bits([part.dequantize(dtype=torch.float32) for part in found], wanted)
        assert_same_bits(tensor.dequantize(), wanted[0])

    tensor = quantizer(x)
    check(tensor)
    into = quantizer(torch.ones_like(x))
    check(into.copy_(x))
    quantizer.update_quantized(2 * x, into)
    for twin in (tensor.clone(), copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert_same_tensor(twin, tensor)
        check(twin)
        check(twin.zero_().copy_(x))
    check(tensor)
    names, rest = tensor.__tensor_flatten__()
    inner = {n: getattr(tensor, n) for n in names}
    check(HybridQuantizedTensor.__tensor_unflatten__(inner, rest, x.shape, x.stride()))
    file = io.BytesIO()
    torch.save(tensor, file)
    kinds = [Halves, HalvesQuantizer, *(kind for kind in map(type, PAIRS[name]()))]
    with torch.serialization.safe_globals(kinds):
        file.seek(0)
        check(torch.load(file, weights_only=True))


@pytest.mark.parametrize("of", SOURCES)
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("name", PAIRS)
def test_modules_read_each_form_of_a_pair(device, name, role, of):
    def factory(asked):
        return paired(name, of) if asked.tensor_type == role else te.IdentityQuantizer()

    layer = te.Linear(32, 64, device=device)
    x = torch.randn(128, 32, device=device, requires_grad=True)
    grad = torch.randn(128, 64, device=device)
    out = run(layer, x, te.recipe.CustomRecipe(qfactory=factory))
    out.backward(grad)
    forms = {"input": [x.detach()] * 2, "weight": [layer.weight.detach()] * 2}
    forms["grad_output"] = [grad] * 2
    forms[role] = forms_of(name, of, forms[role][0])
    (a, at), (w, wt), (g, gt) = ([t.double() for t in forms[n]] for n in forms)
    bias = layer.bias.detach().double()
    expected = a @ w.t() + bias, g @ wt, gt.t() @ at
    terms = a.abs() @ w.abs().t() + 1, g.abs() @ wt.abs(), gt.abs().t() @ at.abs()
    for found, exact, size in zip((out, x.grad, layer.weight.grad), expected, terms, strict=True):
        assert_within(found, exact, size, 128)


@pytest.mark.parametrize("of", SOURCES)
@pytest.mark.parametrize("name", PAIRS)
def test_weights_that_are_pairs(device, name, of):
    recipe = custom(lambda: paired(name, of))
    kept, plain = twins(lambda: MODELS["mlp"](device), recipe, None)
    x = source(device)
    assert_same_bits(run(kept, x, recipe), run(plain, x, recipe))
    weights = [p for p in kept.parameters() if type(p) is HybridQuantizedTensor]
    assert len(weights) == 2
    twin = [torch.nn.Parameter(p.detach().float()) for p in weights]
    for parameter in (*weights, *twin):
        parameter.grad = torch.ones(parameter.shape, device=device)
    for each in (weights, twin):
        te.optimizers.FusedAdam(each, lr=0.25).step()
    for weight, known in zip(weights, twin, strict=True):
        wanted = forms_of(name, of, known.detach())
        parts = weight.rowwise_sub_storage, weight.columnwise_sub_storage
        assert_same_bits([part.dequantize(dtype=torch.float32) for part in parts], wanted)


# ---- copies and files ----------------------------------------------------------------------------


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "file": saved,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_copy_of_a_model(device, name, way, when):
    """It has its own memory, and computes and learns as the original does."""
    with te.quantized_model_init(recipe=HALVES):
        model = MODELS[name](device)
    for weight in halves_in(model):
        weight.shared = name
    x = source(device)
    if when == "after":
        run(model, x).sum().backward()
        model.zero_grad()
    twin = COPIES[way](model)
    assert len(halves_in(twin)) == len(halves_in(model))
    for mine, other in zip(halves_in(model), halves_in(twin), strict=True):
        assert other.shared == name and isinstance(other, torch.nn.Parameter)
        assert type(other._quantizer) is HalvesQuantizer
        assert other.codes.data_ptr() != mine.codes.data_ptr()
    before = run(model, x)
    assert_same_bits(run(twin, x), before)
    for each in (model, twin):
        run(each, x).square().sum().backward()
    te.optimizers.FusedSGD(twin.parameters(), lr=0.5).step()
    assert_same_bits(run(model, x), before)
    te.optimizers.FusedSGD(model.parameters(), lr=0.5).step()
    assert_same_bits(run(twin, x), run(model, x))
    assert not torch.equal(run(model, x), before)


@pytest.mark.parametrize("name", MODELS)
def test_state_dicts_of_such_models(device, name):
    """Through a file that is read without trust, into models of both kinds."""
    with te.quantized_model_init(recipe=HALVES):
        model, kept = MODELS[name](device), MODELS[name](device)
    plain, x = MODELS[name](device), source(device)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    with torch.serialization.safe_globals([Halves, HalvesQuantizer]):
        for other in (kept, plain):
            file.seek(0)
            other.load_state_dict(torch.load(file, weights_only=True))
            assert_same_bits(run(other, x), run(model, x))
    assert len(halves_in(kept)) == len(halves_in(model)) and not halves_in(plain)
