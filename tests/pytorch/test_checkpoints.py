# SPDX-License-Identifier: Apache-2.0
"""State dicts: plain ones both ways, the scaling state in `_extra_state`, and wrong bytes."""

import hashlib
import io
import json
import pickle

import numpy as np
import pytest
import torch
from device_kinds import every_device
from hypothesis import HealthCheck, given, settings, strategies as st
from pytorch.helpers import RECIPES, assert_same_bits, counted, state_of, states_of
from torch.distributed.checkpoint.state_dict import _EXTRA_STATE

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.module.norm import L2Normalization, NormModule

pytestmark = every_device

KEY = "_extra_state"


def train(model, device, steps=3, recipe="delayed"):
    trace = []
    for _ in range(steps):
        model.zero_grad()
        x = torch.randn(16, 32, device=device) * 5
        with counted() as gemms:
            with te.autocast(recipe=RECIPES[recipe]()):
                out = model(x)
            out.sum().backward()
        assert gemms.fp8 % 3 == 2  # all but the gradient of the first input
        trace += [out.detach(), [p.grad.clone() for p in model.parameters()]]
    return trace


@pytest.fixture
def trained(device):
    layer = te.Linear(32, 48, device=device)
    train(layer, device)
    return layer


# ---- plain state dicts ---------------------------------------------------------------------------


@pytest.mark.parametrize("used", [None, "high-precision", "current"])
@pytest.mark.parametrize("bias", [True, False])
def test_torch_linear_both_ways(device, used, bias):
    ours = te.Linear(32, 48, bias=bias, device=device)
    if used == "current":
        train(ours, device, recipe="current")
    elif used:
        ours(torch.randn(16, 32, device=device)).sum().backward()
    theirs = torch.nn.Linear(32, 48, bias=bias, device=device)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert_same_bits(theirs.weight, ours.weight)
    back = te.Linear(32, 48, bias=bias, device=device)
    result = back.load_state_dict(torch.nn.Linear(32, 48, bias=bias).state_dict(), strict=True)
    assert not result.missing_keys and not result.unexpected_keys


def test_plain_state_dict_leaves_the_scaling_state(device, trained):
    before = state_of(trained)
    trained.load_state_dict(torch.nn.Linear(32, 48).state_dict(), strict=True)
    assert_same_bits(state_of(trained), before)


def test_missing_and_unexpected_keys_are_still_told(device):
    layer = te.Linear(32, 48, device=device)
    with pytest.raises(RuntimeError, match=r'Missing key.*"bias"'):
        layer.load_state_dict({"weight": layer.weight})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"other"'):
        layer.load_state_dict({**layer.state_dict(), "other": layer.bias})


# ---- scaling state -------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["memory", "file"])
def test_training_goes_on_from_a_state_dict(device, through):
    """Through a file that is read with weights_only=True: the next steps have the same bits."""

    def make():
        layers = te.Linear(32, 48, device=device), te.Linear(48, 16, device=device)
        return torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1])

    model = make()
    train(model, device)
    state = model.state_dict()
    assert [k for k in state if k.endswith(KEY)] == ["0._extra_state", "2._extra_state"]
    for name in ("0", "2"):
        entry = state[f"{name}.{KEY}"]
        assert entry.dtype == torch.uint8 and entry.device.type == "cpu" and entry.dim() == 1
    if through == "file":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    other = make()
    other.load_state_dict(state, strict=True)
    assert_same_bits(states_of(other), states_of(model))
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    expected = [train(model, device), states_of(model)]
    torch.manual_seed(seed)
    assert_same_bits([train(other, device), states_of(other)], expected)


def test_state_dict_before_the_first_step_after_loading(device, trained):
    """A loaded state that was not used yet is saved again, and explain does not lose it."""
    other = te.Linear(32, 48, device=device)
    other.load_state_dict(trained.state_dict())
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        te.explain(other, torch.randn(16, 32, device=device), file=io.StringIO())
    assert_same_bits(other.state_dict()[KEY], trained.state_dict()[KEY])


def test_loading_over_a_module_in_use(device, trained):
    other = te.Linear(32, 48, device=device)
    train(other, device, 1)
    other.load_state_dict(trained.state_dict())
    assert_same_bits(state_of(other), state_of(trained))
    train(other, device, 1)
    assert (state_of(other)["forward"][1][:, 0] > 0).sum() == 3


def test_loading_into_another_history_length(device, trained):
    other = te.Linear(32, 48, device=device)
    other.load_state_dict(trained.state_dict())
    with torch.no_grad(), te.autocast(recipe=DelayedScaling(amax_history_len=2)):
        other(torch.zeros(16, 32, device=device))
    assert_same_bits(state_of(other)["backward"][1], state_of(trained)["backward"][1][:2])


def test_current_scaling_ignores_loaded_state_and_keeps_it(device, trained):
    other = te.Linear(32, 48, device=device)
    other.load_state_dict(trained.state_dict())
    train(other, device, 1, "current")
    assert_same_bits(state_of(other), state_of(trained))


def test_state_dict_with_a_prefix_and_hooks_of_parents(device, trained):
    parent = torch.nn.ModuleDict({"deep": torch.nn.ModuleList([trained])})
    assert f"deep.0.{KEY}" in parent.state_dict()
    assert f"x.deep.0.{KEY}" in parent.state_dict(prefix="x.")


# ---- TE_EXTRA_STATE ------------------------------------------------------------------------------


def test_variables_come_with_their_entry(device):
    """So megatron-core asks a fresh module what it is going to load; it loads nothing else."""
    trained, fresh = (te.Linear(32, 48, device=device) for _ in range(2))
    assert KEY not in fresh.state_dict()
    asked = fresh.state_dict(prefix="", keep_vars=True)
    assert asked["weight"] is fresh.weight
    assert asked[KEY].numel() == 0
    train(trained, device)
    saved = trained.state_dict(keep_vars=True)
    fresh.load_state_dict({key: saved[key] for key in asked})
    assert_same_bits(state_of(fresh), state_of(trained))


def test_always_writes_an_empty_entry(device, monkeypatch):
    layer = te.Linear(32, 48, device=device)
    assert KEY not in layer.state_dict()
    monkeypatch.setenv("TE_EXTRA_STATE", "always")
    state = layer.state_dict()
    assert state[KEY].dtype == torch.uint8 and state[KEY].numel() == 0
    layer.load_state_dict(state, strict=True)
    monkeypatch.delenv("TE_EXTRA_STATE")
    te.Linear(32, 48, device=device).load_state_dict(state, strict=True)


def test_ignore_does_not_look_at_what_is_loaded(device, trained, monkeypatch):
    monkeypatch.setenv("TE_EXTRA_STATE", "ignore")
    other = te.Linear(32, 48, device=device)
    other.load_state_dict(trained.state_dict(), strict=True)
    assert state_of(other) is None
    assert_same_bits(other.weight, trained.weight)
    other.load_state_dict({**trained.state_dict(), KEY: "nonsense"}, strict=True)
    assert state_of(other) is None


# ---- wrong bytes ---------------------------------------------------------------------------------


def as_tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def rebuilt(header, body, checked=True):
    """State as it is written today, or in the former layout, which had no checksum."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    rest = len(text).to_bytes(8, "little") + text + body
    if not checked:
        return as_tensor(b"TEstate1" + rest)
    return as_tensor(b"TEstate2" + hashlib.sha256(rest).digest()[:8] + rest)


GOOD = {"forward": {"slots": 3, "length": 2}, "backward": {"slots": 2, "length": 1}}


def body_of(forward=(2.0, 3.0, 4.0), forward_amax=0.5, backward=(1.0, 5.0), backward_amax=0.25):
    """The data of `GOOD`: scales, then histories."""
    numbers = [*forward, *[forward_amax] * 6, *backward, *[backward_amax] * 2]
    return np.array(numbers, dtype="<f4").tobytes()


BODY = body_of()


def with_header(direction, **changes):
    return rebuilt({**GOOD, direction: {**GOOD[direction], **changes}}, BODY)


INF, NAN = float("inf"), float("nan")
WHOLE = bytes(rebuilt(GOOD, BODY).tolist())

MALFORMED = {
    "a string": "text",
    "a number": 7,
    "bytes": b"TEstate2",
    "a dict": {"scale_fwd": torch.ones(3)},
    "float tensor": torch.zeros(4),
    "int64 tensor": torch.zeros(4, dtype=torch.int64),
    "two dims": torch.zeros(2, 4, dtype=torch.uint8),
    "no dims": torch.tensor(1, dtype=torch.uint8),
    "meta tensor": torch.empty(8, dtype=torch.uint8, device="meta"),
    "one byte": as_tensor(b"T"),
    "other magic": as_tensor(b"XXstate1" + bytes(40)),
    "magic alone": as_tensor(b"TEstate2"),
    "magic and checksum alone": as_tensor(WHOLE[:16]),
    "cut in the length": as_tensor(WHOLE[:20]),
    "cut in the data": as_tensor(WHOLE[:-1]),
    "longer": as_tensor(WHOLE + b"\0"),
    "former magic alone": as_tensor(b"TEstate1"),
    "former, cut in the length": as_tensor(b"TEstate1\x05\x00"),
    "former, length beyond the end": as_tensor(b"TEstate1" + b"\xff" * 8 + b"{}"),
    "former, a byte short": rebuilt(GOOD, BODY[:-1], checked=False),
    "former, scale 0": rebuilt(GOOD, body_of((1.0, 0.0, 1.0)), checked=False),
    "not json": rebuilt(b"{forward", BODY),
    "not utf-8": rebuilt(b"\xff\xfe{}", BODY),
    "deep json": rebuilt(b"[" * 100_000, BODY),
    "a list": rebuilt([1, 2], BODY),
    "null": rebuilt(None, BODY),
    "no direction": rebuilt({"forward": GOOD["forward"]}, BODY),
    "direction is a number": rebuilt({**GOOD, "forward": 3}, BODY),
    "no slots": rebuilt({**GOOD, "backward": {"length": 2}}, BODY),
    "slots of another module": with_header("forward", slots=6),
    "negative slots": with_header("forward", slots=-3),
    "infinite slots": with_header("forward", slots=INF),
    "nan length": with_header("backward", length=NAN),
    "huge length": with_header("forward", length=2**62),
    "no rows": with_header("backward", length=0),
    "negative rows": with_header("backward", length=-1),
    "text for a number": with_header("backward", length="many"),
    "a byte short": rebuilt(GOOD, BODY[:-1]),
    "a byte too many": rebuilt(GOOD, BODY + b"\0"),
    "no data": rebuilt(GOOD, b""),
    "scale 0": rebuilt(GOOD, body_of(forward=(1.0, 1.0, 0.0))),
    "scale -0": rebuilt(GOOD, body_of(backward=(-0.0, 1.0))),
    "negative scale": rebuilt(GOOD, body_of(backward=(1.0, -2.0))),
    "scale Inf": rebuilt(GOOD, body_of(forward=(INF, 1.0, 1.0))),
    "scale NaN": rebuilt(GOOD, body_of(backward=(NAN, 1.0))),
    "negative amax": rebuilt(GOOD, body_of(forward_amax=-1.0)),
    "amax -Inf": rebuilt(GOOD, body_of(backward_amax=-INF)),
}


@pytest.mark.parametrize("checked", [True, False], ids=["checksum", "former"])
def test_the_base_of_the_malformed_ones_is_good(device, checked):
    """In today's layout, and in the one that had no checksum."""
    layer = te.Linear(32, 48, device=device)
    layer.set_extra_state(rebuilt(GOOD, BODY, checked))
    state = state_of(layer)
    assert state["forward"][1].shape == (2, 3)
    assert state["forward"][0].tolist() == [2.0, 3.0, 4.0]
    assert state["backward"][0].tolist() == [1.0, 5.0]
    assert state["backward"][1].tolist() == [[0.25, 0.25]]


def test_what_inf_and_nan_in_the_data_leave_behind_loads(device):
    """A history may hold them; they never reach a scale."""
    state = rebuilt(GOOD, body_of(forward_amax=INF, backward_amax=NAN))
    layer = te.Linear(32, 48, device=device)
    layer.set_extra_state(state)
    assert state_of(layer)["forward"][1].isinf().all()
    train(layer, device, 1)
    other = te.Linear(32, 48, device=device)
    other.load_state_dict(layer.state_dict())
    assert_same_bits(state_of(other), state_of(layer))


def test_any_flipped_bit_is_found(device, trained):
    """In every byte; the message names the entry and what to do."""
    model = torch.nn.ModuleDict({"deep": torch.nn.ModuleList([trained])})
    key = f"deep.0.{KEY}"
    good = model.state_dict()
    before = state_of(trained)
    for at in range(good[key].numel()):
        bad = good[key].clone()
        bad[at] ^= 1 << int(torch.randint(8, ()))
        with pytest.raises(ValueError, match=rf"{key}: .*TE_EXTRA_STATE=ignore"):
            model.load_state_dict({**good, key: bad})
    assert_same_bits(state_of(trained), before)


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_state_leaves_the_module_untouched(device, trained, what):
    """Neither the scaling state nor a weight has changed when the error comes."""
    state, weight = state_of(trained), trained.weight.detach().clone()
    with pytest.raises((ValueError, TypeError), match="_extra_state: .*TE_EXTRA_STATE=ignore"):
        trained.set_extra_state(MALFORMED[what])
    new = {"weight": torch.ones(48, 32), "bias": torch.ones(48), KEY: MALFORMED[what]}
    with pytest.raises((ValueError, TypeError, RuntimeError), match="_extra_state"):
        trained.load_state_dict(new)
    assert_same_bits(state_of(trained), state)
    assert_same_bits(trained.weight.detach(), weight)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_fuzzed_bytes(data):
    """Any bytes: taken over whole, or refused by one of three exceptions with nothing changed."""
    layer = te.Linear(16, 16, device="cpu")
    checked = data.draw(st.booleans())
    good = bytearray(rebuilt(GOOD, BODY, checked).tolist())
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "any"]))
    if kind == "flip":
        for _ in range(data.draw(st.integers(1, 4))):
            good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    elif kind == "cut":
        del good[data.draw(st.integers(0, len(good) - 1)) :]
    elif kind == "insert":
        at = data.draw(st.integers(0, len(good)))
        good[at:at] = data.draw(st.binary(min_size=1, max_size=20))
    else:
        magic = data.draw(st.sampled_from([b"", b"TEstate1", b"TEstate2"]))
        good = bytearray(magic) + data.draw(st.binary())
    tensor = torch.tensor(list(good), dtype=torch.uint8)
    try:
        layer.set_extra_state(tensor)
    except (ValueError, TypeError, RuntimeError) as error:
        assert "_extra_state: " in str(error)
        assert state_of(layer) is None
    else:
        state = state_of(layer)
        if checked and kind != "any" and state is not None:
            assert bytes(good) == WHOLE  # a change that changed nothing
        shapes = None if state is None else [s[0].shape[0] for s in state.values()]
        assert shapes in (None, [3, 2])
        assert state is None or all(
            (s[0] > 0).all() and s[0].isfinite().all() for s in state.values()
        )


class Trap:
    """Unpickling an instance leaves a trace."""

    sprung = False

    def __reduce__(self):
        return (setattr, (Trap, "sprung", True))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_foreign_pickle_is_refused_without_unpickling(device, trained, protocol, monkeypatch):
    before = state_of(trained)
    foreign = as_tensor(pickle.dumps({"recipe": Trap()}, protocol=protocol))
    with pytest.raises(RuntimeError, match=r"pickle of another package.*TE_EXTRA_STATE=ignore"):
        trained.load_state_dict({**trained.state_dict(), KEY: foreign})
    assert not Trap.sprung
    assert_same_bits(state_of(trained), before)
    monkeypatch.setenv("TE_EXTRA_STATE", "ignore")
    trained.load_state_dict({**trained.state_dict(), KEY: foreign})
    assert not Trap.sprung
    assert_same_bits(state_of(trained), before)


NOTHING = {
    "none": None,
    "empty": torch.empty(0, dtype=torch.uint8),
    "empty fp32": torch.empty(0),
    "empty meta": torch.empty(0, dtype=torch.uint8, device="meta"),
    "placeholder": _EXTRA_STATE(),
    **{
        f"pickle {protocol} of {value}": as_tensor(pickle.dumps(value, protocol))
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
        for value in ({}, None)
    },
}


@pytest.mark.parametrize("empty", NOTHING)
def test_nothing_to_load_changes_nothing(device, trained, empty):
    before = state_of(trained)
    trained.set_extra_state(NOTHING[empty])
    trained.load_state_dict({**trained.state_dict(), KEY: NOTHING[empty]})
    assert_same_bits(state_of(trained), before)


@pytest.mark.parametrize("empty", NOTHING)
def test_norms_drop_a_state_of_nothing(device, empty):
    """The incumbent writes one for each of its norms, those of queries and keys too."""

    def make(fill):
        parts = [te.LayerNorm(32), te.RMSNorm((4, 8)), L2Normalization()]
        attention = te.MultiheadAttention(32, 2, fuse_qkv_params=True, qk_norm_type="RMSNorm")
        model = torch.nn.ModuleList([*parts, attention]).to(device)
        for parameter in model.parameters():
            parameter.data.fill_(fill)
        return model

    model, peer = make(1.0), make(2.0).state_dict()
    norms = [n for n, m in model.named_modules() if isinstance(m, NormModule)]
    assert len(norms) == 5
    peer.update({f"{name}.{KEY}": NOTHING[empty] for name in norms})
    given = dict(peer)
    model.load_state_dict(peer, strict=True)
    assert all((p == 2).all() for p in model.parameters())
    assert peer.keys() == given.keys()


def test_norms_do_not_drop_anything_else(device, trained, monkeypatch):
    norm = te.LayerNorm(32, device=device)
    pickled = as_tensor(pickle.dumps({"recipe": Trap()}))
    for state in (pickled, trained.get_extra_state(), torch.ones(3)):
        with pytest.raises(RuntimeError, match="Unexpected key.*_extra_state"):
            norm.load_state_dict({**norm.state_dict(), KEY: state}, strict=True)
    monkeypatch.setenv("TE_EXTRA_STATE", "ignore")
    norm.load_state_dict({**norm.state_dict(), KEY: pickled}, strict=True)
    assert not Trap.sprung


@pytest.mark.parametrize("make", [lambda: te.Linear(32, 48), lambda: te.RMSNorm(32)])
def test_files_of_early_versions_are_named(device, make, monkeypatch):
    module = make().to(device)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    file = io.BytesIO()
    torch.save({"recipe": Trap()}, file)
    peer = {name: t + 1 for name, t in before.items()} | {KEY: file}
    with pytest.raises(RuntimeError, match=r"_extra_state: a BytesIO object.*before 2\.0.*=ignore"):
        module.load_state_dict(peer)
    assert_same_bits(dict(module.state_dict()), before)
    assert not Trap.sprung
    monkeypatch.setenv("TE_EXTRA_STATE", "ignore")
    module.load_state_dict(peer, strict=True)
    assert_same_bits(dict(module.state_dict()), {n: t + 1 for n, t in before.items()})
    assert not Trap.sprung


def test_state_of_a_stateless_recipe_is_empty(device):
    layer = te.Linear(32, 48, device=device)
    with te.autocast(recipe=Float8CurrentScaling()):
        layer(torch.randn(16, 32, device=device))
    assert layer.get_extra_state().numel() == 0


@pytest.mark.parametrize("mode", ["auto", "ignore"])
def test_a_module_without_memory_lists_what_it_takes(device, mode, monkeypatch):
    """Loaders that read the keys that a model on the meta device lists (transformers) find it."""
    monkeypatch.setenv("TE_EXTRA_STATE", mode)
    empty = te.Linear(32, 48, device="meta")
    listed = empty.state_dict()
    assert (KEY in listed) == (mode == "auto")
    if mode == "auto":
        assert listed[KEY].is_meta and listed[KEY].numel() == 0
    trained = te.Linear(32, 48, device=device)
    plain = dict(trained.state_dict())
    empty.load_state_dict(plain, strict=True, assign=True)
    assert KEY not in empty.state_dict()
    train(torch.nn.Sequential(trained), device)
    empty = te.Linear(32, 48, device="meta")
    empty.load_state_dict(trained.state_dict(), strict=True, assign=True)
    assert_same_bits(state_of(empty), state_of(trained) if mode == "auto" else None)
