# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of tensors without memory: shapes, dtypes, devices; no state, no work."""

import pytest
import torch
from pytorch.helpers import RECIPES, arenas, assert_same_bits, counted, states_of
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import transformer_engine.pytorch as te
from transformer_engine.pytorch.execution.thread_state import current_state
from transformer_engine.pytorch.scaling_state import scaling

WIDTH, TOKENS, BATCH = 32, 6, 2


def transformer(**options):
    return lambda **o: te.TransformerLayer(WIDTH, 48, 4, **options, **o)


MAKERS = {
    "linear": lambda **o: te.Linear(WIDTH, 48, **o),
    "split": lambda **o: te.Linear(WIDTH, 48, parameters_split={"a": 16, "b": 32}, **o),
    "layernorm-linear": lambda **o: te.LayerNormLinear(
        WIDTH, 48, normalization="RMSNorm", return_layernorm_output=True, **o
    ),
    "mlp": lambda **o: te.LayerNormMLP(WIDTH, 48, activation="swiglu", return_bias=True, **o),
    "mlp-recompute": lambda **o: te.LayerNormMLP(WIDTH, 48, checkpoint=True, **o),
    "layernorm": lambda **o: te.LayerNorm(WIDTH, **o),
    "transformer": transformer(),
    "transformer-window": transformer(window_size=(2, 0), drop_path_rate=0.1, num_gqa_groups=2),
    "transformer-post": transformer(output_layernorm=True, fuse_qkv_params=True),
}
FUSED = ("transformer", "transformer-post")
"""With torch's attention, which makes a mask of its own and so needs the mode to be active."""


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.fixture(params=[None, "delayed", "current"])
def recipe(request):
    return request.param


def region(recipe):
    return te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]())


def described(tensors):
    return [None if t is None else (t.shape, t.dtype, t.stride()) for t in tensors]


def step(module, recipe, x):
    """What a step gives: outputs, and gradients of the input and of the parameters."""
    x = x.requires_grad_()
    with region(recipe):
        out = module(x)
    outputs = list(out) if isinstance(out, tuple) else [out]
    sum(t.sum() for t in outputs if t.requires_grad).backward()
    return [*outputs, x.grad, *(p.grad for p in module.parameters())]


def chunks():
    """Everything that scaling state consists of in this process."""
    found = [arena for direction in scaling.DIRECTIONS for arena in arenas(direction)]
    return [tensor for arena in found for c in arena.chunks for tensor in (c.scale, c.history)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_as_a_real_step_would(device, make, recipe, kind, dtype):
    options = {"params_dtype": dtype} if make is not MAKERS["layernorm"] else {"dtype": dtype}
    real = step(
        make(device=device, **options),
        recipe,
        torch.randn(TOKENS, BATCH, WIDTH, dtype=dtype, device=device),
    )
    te.reset()
    with counted() as gemms:
        if kind == "meta":
            x = torch.empty(TOKENS, BATCH, WIDTH, dtype=dtype, device="meta")
            blank = step(make(device="meta", **options), recipe, x)
            assert all(t.is_meta for t in blank if t is not None)
        else:
            with FakeTensorMode():
                x = torch.empty(TOKENS, BATCH, WIDTH, dtype=dtype, device=device)
                blank = step(make(device=device, **options), recipe, x)
            assert all(isinstance(t, FakeTensor) for t in blank if t is not None)
            assert {t.device.type for t in blank if t is not None} == {device}
    assert gemms.fp8 == gemms.other == 0
    assert described(blank) == described(real)
    assert chunks() == []


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in FUSED])
def test_fake_tensors_outside_of_their_mode(device, name, recipe):
    """A fake tensor computes in its own mode."""
    make = MAKERS[name]
    with FakeTensorMode():
        module = make(device=device)
        x = torch.empty(TOKENS, BATCH, WIDTH, device=device)
    for tensor in step(module, recipe, x):
        assert tensor is None or isinstance(tensor, FakeTensor)
    assert chunks() == []


def test_larger_than_any_memory(recipe):
    """Sizes are computed, nothing is allocated."""
    layer = te.TransformerLayer(1 << 15, 1 << 17, 128, device="meta")
    with region(recipe):
        out = layer(torch.empty(1 << 14, 1 << 10, 1 << 15, device="meta", requires_grad=True))
    out.sum().backward()
    assert out.shape == (1 << 14, 1 << 10, 1 << 15)


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_real_modules_do_not_notice(device, make, recipe, kind, start):
    """Between the steps of a real module, and inside of its region."""
    data = [torch.randn(TOKENS, BATCH, WIDTH, device=device) for _ in range(3)]
    seeds = torch.randint(2**31, (3,)).tolist()

    def blank_step():
        if kind == "meta":
            step(make(device="meta"), recipe, torch.empty(TOKENS, BATCH, WIDTH, device="meta"))
            return
        with FakeTensorMode():
            fake = torch.empty(TOKENS, BATCH, WIDTH, device=device)
            step(make(device=device), recipe, fake)

    results = []
    for disturbed in (False, True):
        start()
        module = make(device=device)
        for x, seed in zip(data, seeds, strict=True):
            if disturbed:
                random = torch.random.get_rng_state()
                blank_step()
                torch.random.set_rng_state(random)
            torch.manual_seed(seed)
            with region(recipe):
                if disturbed:
                    owed = current_state().owes_update
                    blank = make(device="meta")
                    blank(torch.empty(TOKENS, BATCH, WIDTH, device="meta"))
                    assert current_state().owes_update == owed
                torch.manual_seed(seed)
                out = module(x.clone().requires_grad_())
            out = out if isinstance(out, torch.Tensor) else out[0]
            out.sum().backward()
        grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        results.append((out.detach(), grads, states_of(module)))
    assert_same_bits(*results)
    assert all(type(t) is torch.Tensor and not t.is_meta for t in chunks())


def test_real_tensors_in_a_fake_mode(device, recipe):
    """Converted by the mode where it may; the module keeps its own state and caches."""
    layer = te.Linear(WIDTH, 48, device=device)
    x = torch.randn(TOKENS, WIDTH, device=device)
    results = []
    for disturbed in (False, True):
        te.reset()
        for _ in range(3):
            with region(recipe):
                out = layer(x)
            if disturbed:
                with FakeTensorMode(allow_non_fake_inputs=True), region(recipe):
                    assert isinstance(layer(x), FakeTensor)
        results.append((out.detach(), states_of(layer)))
    assert_same_bits(*results)


def test_weight_cache_is_left_alone(device):
    layer = te.Linear(WIDTH, 48, device=device)
    x = torch.randn(TOKENS, WIDTH, device=device)
    with region("current"):
        layer(x, is_first_microbatch=True)
        kept = layer._weight_caches
        with FakeTensorMode(allow_non_fake_inputs=True):
            layer(x, is_first_microbatch=True)
            layer(x, is_first_microbatch=False)
    assert layer._weight_caches is kept


def test_recompute(recipe):
    """Checkpoints of both kinds around a module without memory."""
    layer = te.LayerNormMLP(WIDTH, 48, device="meta")
    for reentrant in (False, True):
        x = torch.empty(TOKENS, WIDTH, device="meta", requires_grad=True)
        with region(recipe):
            out = te.checkpoint(layer, x, use_reentrant=reentrant)
        out.sum().backward()
        assert x.grad.shape == x.shape and x.grad.is_meta
    assert chunks() == []


@pytest.mark.parametrize("mask", ["causal", "padding", "arbitrary"])
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_attention(device, kind, mask):
    def attend(where):
        heads = [torch.empty(TOKENS, BATCH, 4, 8, device=where).requires_grad_() for _ in range(3)]
        shape = {"padding": (BATCH, 1, 1, TOKENS), "arbitrary": (1, 1, TOKENS, TOKENS)}.get(mask)
        given = None if shape is None else torch.zeros(shape, dtype=torch.bool, device=where)
        angles = torch.empty(TOKENS, 1, 1, 8, device=where)
        attention = te.DotProductAttention(4, 8, attention_dropout=0.1, attn_mask_type=mask)
        query = te.apply_rotary_pos_emb(heads[0], angles)
        out = attention(query, *heads[1:], given)
        out.sum().backward()
        return out, heads

    if kind == "meta":
        out, heads = attend("meta")
        assert all(t.is_meta for t in (out, *(t.grad for t in heads)))
    else:
        with FakeTensorMode():
            out, heads = attend(device)
    assert out.shape == (TOKENS, BATCH, 32)
    assert all(t.grad.shape == t.shape for t in heads)


@pytest.mark.parametrize("make", [MAKERS["linear"], MAKERS["layernorm"]])
def test_mixtures_are_refused(device, make):
    real = make(device=device)
    with pytest.raises(TypeError, match="inp is on meta, a parameter a Parameter on .*: shapes"):
        real(torch.empty(TOKENS, WIDTH, device="meta"))
    with FakeTensorMode():
        fake = torch.empty(TOKENS, WIDTH, device=device)
    with pytest.raises(TypeError, match="inp is a FakeTensor on .*Make the module under"):
        real(fake)
    with pytest.raises(TypeError, match="no memory to read"):
        make(device="meta")(torch.empty(TOKENS, WIDTH, device=device))


def test_torch_autocast_on_meta():
    """The meta device has no autocast of its own: torch's operators leave its tensors alone."""
    layer = te.LayerNormMLP(WIDTH, 48, device="meta")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.empty(TOKENS, WIDTH, device="meta")).dtype is torch.float32
