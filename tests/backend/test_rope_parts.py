# SPDX-License-Identifier: Apache-2.0
"""rope of several tensors in one call: heads side by side, chunks of ranks, copies, refusals."""

import pytest
import torch
from attention_reference import cp_positions
from backend.test_rope import FLAGS, WAYS, make_freqs, reference
from buffers import HIGH, Poisoned, name_of, normal
from comparators import assert_bits, assert_within
from refusals import check_refused
from tols import BF16, F32

from transformer_engine import _core

LENGTH, BATCH, POSITIONS = 8, 3, 56
FORMS = pytest.mark.parametrize("form", ["bshd", "sbhd", "packed"])
LIMITS = [0, 4, 4, 20, 24]  # of packed tokens, on one rank


class Parts:
    """Queries, keys and values of a packed projection, group by group, and how they turn."""

    def __init__(self, rng, form, dtype, *, groups=2, each=3, dim=16, value=24, rotary=(16, 8)):
        self.form, self.dim, self.rotary = form, dim, rotary
        lead = (LIMITS[-1] + 2,) if form == "packed" else (BATCH, LENGTH)
        self.sizes = [each * dim, dim, value]
        self.x = normal(rng, (*lead, groups, sum(self.sizes)), dtype)
        self.freqs = [make_freqs(rng, n, POSITIONS) for n in rotary]

    def split(self, x):
        """Views of the three."""
        return x.split(self.sizes, dim=-1)

    def placed(self, device):
        """The projection in the memory of the form, as [batch, sequence, ..]."""
        if self.form == "sbhd":
            return self.x.transpose(0, 1).contiguous().to(device).transpose(0, 1)
        return self.x.to(device)

    def positions(self, starts, ranks, rank):
        """Position of each token, -1 where it belongs to no sequence."""
        if self.form != "packed":
            at = cp_positions(LENGTH * ranks, ranks, rank).expand(BATCH, LENGTH)
            return at if starts is None else at + starts[:, None]
        found = torch.full((len(self.x),), -1)
        for b, (begin, end) in enumerate(zip(LIMITS[:-1], LIMITS[1:], strict=True)):
            at = cp_positions((end - begin) * ranks, ranks, rank)
            found[begin:end] = at + (0 if starts is None else starts[b])
        return found

    def exact(self, positions, interleaved, backward):
        """float64 values and terms of queries, keys and values."""
        found = []
        for part, freqs in zip(self.split(self.x), (*self.freqs, None), strict=True):
            heads = part.unflatten(-1, (-1, self.dim)) if freqs is not None else part[..., None, :]
            values, terms = heads.double(), heads.double().abs()
            if freqs is not None and freqs.shape[1] > 0:
                inside = positions >= 0
                angles = freqs[positions[inside]][:, None, None]
                turned = reference(heads[inside], angles, interleaved, backward)
                values[inside], terms[inside] = turned
            found.append((values.flatten(-2), terms.flatten(-2)))
        return found


def check_parts(rng, device, form, dtype, *, starts=None, ranks=1, rank=0, packs=False, **options):
    """One call; `packs`: from three dense tensors into one, as a gradient is."""
    flags = {n: options.pop(n, False) for n in ("interleaved", "backward")}
    parts = Parts(rng, form, dtype, **options)
    given = parts.split(parts.placed(device))
    if packs:
        given = [part.contiguous() for part in given]
        whole = Poisoned(parts.x.shape, dtype, device)
        made, outputs = [whole], parts.split(whole.tensor)
    else:
        made = [Poisoned(part.shape, dtype, device) for part in given]
        outputs = [each.tensor for each in made]
    keywords = dict(flags, channels=parts.dim, cp_size=ranks, cp_rank=rank)
    for name, at in (("key", 1), ("value", 2)):
        keywords |= {name: given[at], f"{name}_output": outputs[at]}
    if form == "packed":
        limits = torch.tensor(LIMITS, dtype=torch.int32, device=device)
        keywords["cu_seqlens"] = limits * ranks
    if starts is not None:
        keywords["start_positions"] = starts.int().to(device)
    freqs = [f.to(device) for f in parts.freqs]
    _core.rope(given[0], outputs[0], freqs=freqs[0], key_freqs=freqs[1], **keywords)
    positions = parts.positions(starts, ranks, rank)
    for output, exact in zip(outputs, parts.exact(positions, *flags.values()), strict=True):
        assert_within(output, *exact)
    assert all(each.untouched() for each in made)


# ---- values --------------------------------------------------------------------------------------


@WAYS
@FLAGS
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
@FORMS
def test_parts(device, form, dtype, packs, interleaved, backward, rng):
    options = {"packs": packs, "interleaved": interleaved, "backward": backward}
    check_parts(rng, device, form, dtype, **options)
    check_parts(rng, device, form, dtype, each=1, dim=32, value=32, rotary=(32, 32), **options)


@FLAGS
@pytest.mark.parametrize(
    ("dim", "value", "rotary"),
    [(5, 3, (4, 2)), (64, 64, (64, 64)), (24, 8, (0, 24)), (160, 160, (160, 0)), (18, 2, (0, 0))],
)
def test_odd_sizes(device, dim, value, rotary, interleaved, rng):
    options = {"dim": dim, "value": value, "rotary": rotary, "interleaved": interleaved}
    for each, groups in ((1, 1), (4, 3)):
        check_parts(rng, device, "bshd", BF16, each=each, groups=groups, **options)


@WAYS
@pytest.mark.parametrize("ranks", [1, 2, 3])
@FORMS
def test_ranks_and_starts(device, form, ranks, backward, rng):
    """Chunks of every rank; with starts that differ, and without."""
    count, longest = (len(LIMITS) - 1, 16) if form == "packed" else (BATCH, LENGTH)
    for rank in range(ranks):
        starts = torch.from_numpy(rng.integers(0, POSITIONS - longest * ranks + 1, count))
        options = {"ranks": ranks, "rank": rank, "backward": backward}
        check_parts(rng, device, form, F32, starts=starts, **options)
        check_parts(rng, device, form, F32, **options)


def test_ranks_together_are_the_whole(device, rng):
    """The chunks of all ranks, put in order, are what one rank gives."""
    ranks, whole = 4, normal(rng, (BATCH, 24, 2, 16), BF16, device)
    freqs, made = make_freqs(rng, 16).to(device), torch.empty_like(whole)
    expected = torch.empty_like(whole)
    _core.rope(whole, expected, freqs=freqs)
    for rank in range(ranks):
        at = cp_positions(24, ranks, rank).to(device)
        own = whole[:, at]
        _core.rope(own, own, freqs=freqs, cp_size=ranks, cp_rank=rank)
        made[:, at] = own
    assert_bits(made, expected)


@pytest.mark.parametrize("heads", [1, 40, 200])
def test_many_heads(device, heads, rng):
    check_parts(rng, device, "bshd", BF16, groups=heads, each=1, dim=64, value=64, rotary=(64, 64))
    check_parts(rng, device, "bshd", BF16, groups=2, each=heads, dim=64, value=64, rotary=(64, 32))


def test_without_angles_all_is_copied(device, rng):
    x = normal(rng, (2, 5, 3, 24), BF16, device)
    for channels in (0, 8):
        made = Poisoned(x.shape, BF16, device, layout="strided")
        _core.rope(x, made.tensor, channels=channels)
        assert_bits(made.tensor, x)
        assert made.untouched()


def test_parts_in_place(device, rng):
    x, freqs = normal(rng, (2, 5, 3, 40), F32, device), make_freqs(rng, 16).to(device)
    key, rest = x[..., 16:32], x[..., 32:].clone()
    expected = [torch.empty_like(part) for part in (x[..., :16], key)]
    for part, out in zip((x[..., :16], key), expected, strict=True):
        _core.rope(part, out, freqs=freqs)
    query = x[..., :16]
    _core.rope(query, query, freqs=freqs, key=key, key_output=key, key_freqs=freqs)
    for part, out in zip((*x.split([16, 16, 8], -1),), (*expected, rest), strict=True):
        assert_bits(part, out)


def test_one_pass(device, rng, counters):
    check_parts(rng, device, "sbhd", F32)
    assert counters() == {f"op.{device}.rope": 1}


# ---- refusals ------------------------------------------------------------------------------------

X, FREQS = torch.zeros(2, 6, 3, 8), torch.zeros(6, 8)
TWO = {"key": X[:, :, :1].clone(), "key_output": X[:, :, :1].clone(), "key_freqs": FREQS}
WRONG = {
    "no output": (ValueError, "key_output: ndim = 0", {"key_output": None}),
    "no key": (ValueError, "key: is missing, and key_output is given", {"key": None}),
    "other tokens": (ValueError, "key: dim 1: size 5", {"key": X[:, :5].clone()}),
    "other dtype": (TypeError, "key: dtype bf16, expected f32", {"key": X[:, :, :1].bfloat16()}),
    "wide angles": (ValueError, "key_freqs: 10 rotary", {"key_freqs": torch.zeros(6, 10)}),
    "few positions": (ValueError, "key_freqs: 5 positions", {"key_freqs": FREQS[:5]}),
    "few positions of ranks": (ValueError, "freqs: 6 positions, .* the 12", {"cp_size": 2}),
    "channels": (ValueError, "channels: 3, which does not divide", {"channels": 3}),
    "angles for the channels": (
        ValueError,
        "freqs: 8 rotary channels, .* at most 4",
        {"channels": 4},
    ),
    "rank": (ValueError, "cp_rank: 2, expected one of cp_size = 2", {"cp_size": 2, "cp_rank": 2}),
    "negative rank": (ValueError, "cp_rank: -1, expected a rank", {"cp_rank": -1}),
    "odd sequence": (
        ValueError,
        "input: a sequence of 5 tokens, expected two chunks",
        {"input": X[:, :5].clone(), "cp_size": 2},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case):
    output = Poisoned(X.shape, F32, device)
    good = {"input": X, "output": output.tensor, "freqs": FREQS, **TWO}
    check_refused("rope", device, WRONG[case], good, output)


def test_cpu_checks_lengths_of_ranks():
    """On a GPU they are in device memory, which a launch does not read."""
    limits = torch.tensor([0, 4, 10], dtype=torch.int32)
    changes = {"cu_seqlens": limits, "cp_size": 2}
    good = {"input": X[0, :5].clone(), "output": X[0, :5].clone(), "freqs": FREQS}
    refusal = (ValueError, "cu_seqlens: sequence 1 is .4, 10., expected multiples of 2 cp_size = 4")
    check_refused("rope", "cpu", (*refusal, changes), good)


@pytest.mark.gpu
@WAYS
@FORMS
def test_cuda_close_to_cpu(form, backward, rng):
    parts = Parts(rng, form, BF16, groups=8, each=4, dim=128, value=128, rotary=(128, 64))
    results = []
    for device in ("cpu", "cuda"):
        given = parts.split(parts.placed(device))
        outputs = [torch.empty_like(part) for part in given]
        limits = torch.tensor(LIMITS, dtype=torch.int32, device=device)
        freqs = [f.to(device) for f in parts.freqs]
        keywords = {"cu_seqlens": limits} if form == "packed" else {}
        _core.rope(
            given[0], outputs[0], freqs=freqs[0], key=given[1], key_output=outputs[1],
            key_freqs=freqs[1], value=given[2], value_output=outputs[2], channels=128,
            backward=backward, **keywords,
        )  # fmt: skip
        results.append(outputs)
    positions = parts.positions(None, 1, 0)
    for ours, theirs, exact in zip(*results, parts.exact(positions, False, backward), strict=True):
        assert_within(theirs, *exact)
        assert_within(ours, *exact)
