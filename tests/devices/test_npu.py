# SPDX-License-Identifier: Apache-2.0
"""The test device npu itself: what torch and a vendor's module have to have, without this package."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from comparators import assert_bits

pytestmark = pytest.mark.npu
BOTH = pytest.mark.parametrize("index", [0, 1])
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]


def there(index):
    return torch.device("npu", index)


# ---- devices and memory --------------------------------------------------------------------------


def test_torch_finds_it(npu):
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.get_device_module("npu") is torch.npu and torch.npu.is_available()
    assert torch.npu.device_count() == 2 and torch.npu.is_initialized()
    assert torch.ones(2, device=npu).is_npu and not torch.ones(2).is_npu
    assert torch.ones(2).npu(1).device == there(1)
    assert torch.npu.is_bf16_supported() and torch.bfloat16 in torch.npu.get_amp_supported_dtype()
    assert torch._C._get_privateuse1_backend_name() == "npu"


def test_the_current_device():
    assert torch.npu.current_device() == 0
    with torch.npu.device(1):
        assert torch.npu.current_device() == torch.accelerator.current_device_index() == 1
        assert torch.ones(2, device="npu").device == there(1)
        with torch.npu.device(None), torch.npu.device_of(torch.ones(2)):
            assert torch.npu.current_device() == 1
    with torch.accelerator.device_index(1):
        assert torch.npu.current_device() == 1
    torch.npu.set_device("npu:1")
    assert torch.npu.current_device() == 1
    torch.npu.set_device(0)
    with pytest.raises(RuntimeError, match="npu: no device 2, there are 2"):
        torch.npu.set_device(2)
    with pytest.raises(RuntimeError, match="npu: no device 7, there are 2"):
        torch.ones(2, device="npu:7")
    with pytest.raises(ValueError, match="no device of npu: cpu"):
        torch.npu.set_device("cpu")
    assert torch.npu.current_device() == 0


@BOTH
def test_memory_belongs_to_an_index(index):
    """Also of storages, views, results and copies; and it is no memory of the host."""
    x = torch.ones(3, 4, device=there(index))
    pointers = [x.data_ptr(), x[1:, 2].data_ptr(), (x + 1).data_ptr(), x.to("npu:1").data_ptr()]
    assert [torch.npu.device_index_of(p) for p in pointers] == [index, index, index, 1]
    assert torch.npu.device_index_of(x.cpu().data_ptr()) == -1
    assert x.untyped_storage().device == there(index)
    with open("/proc/self/maps") as maps:
        parts = [line.split()[0].split("-") for line in maps]
    assert not any(int(first, 16) <= pointers[0] < int(last, 16) for first, last in parts)


def test_devices_do_not_mix():
    first, second, host = (torch.ones(4, 4, device=d) for d in ("npu:0", "npu:1", "cpu"))
    for other in (second, host):
        for call in (torch.add, torch.matmul, torch.nn.functional.linear, torch.where):
            arguments = (first, other) if call is not torch.where else (first > 0, first, other)
            with pytest.raises(RuntimeError, match="(?s)npu:0.*(npu:1|cpu)"):
                call(*arguments)
        with pytest.raises(RuntimeError, match="(?s)npu:0.*(npu:1|cpu)"):
            torch.cat([first, other])
        with pytest.raises(RuntimeError):
            torch.add(first, first, out=other)
    # Operators whose shapes torch does not look at first come to the device's own check.
    with pytest.raises(RuntimeError, match="aten::_foreach|tensors on npu:0"):
        torch.ops.aten._fused_sgd_([first], [second], [], weight_decay=0.0, momentum=0.0, lr=0.1,
                                   dampening=0.0, nesterov=False, maximize=False,
                                   is_first_step=True)  # fmt: skip
    # Copies, scalars of the host and indices on the host are what every device takes.
    assert_bits(first.copy_(second * 3).cpu(), host * 3)
    assert_bits((first * torch.tensor(2.0)).cpu(), host * 6)
    assert_bits(first[torch.tensor([1, 0])].cpu(), host[:2] * 3)


@BOTH
def test_copies(rng, index):
    x = torch.from_numpy(rng.standard_normal((5, 6)).astype("float32"))
    y = x.to(there(index))
    assert_bits(y.cpu(), x)
    assert_bits(y.t().contiguous().cpu(), x.t().contiguous())
    assert_bits(y.to(there(1 - index))[::2].cpu(), x[::2])
    assert_bits(torch.empty(6, 5).copy_(y.t(), non_blocking=True), x.t())
    assert y[2, 3].item() == x[2, 3].item() and y.tolist() == x.tolist()
    y[1:3] = x[:2].to(there(index))
    assert_bits(y.cpu()[1:3], x[:2])


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8(npu, rng, dtype):
    """Casts and copies with the bits of the host, views of bytes, and storage shared by views."""
    x = torch.from_numpy(rng.standard_normal((4, 8)).astype("float32")).abs()
    y = x.to(npu).to(dtype)
    assert_bits(y.cpu(), x.to(dtype))
    assert_bits(y.float().cpu(), x.to(dtype).float())
    assert_bits(y.to("npu:1").cpu(), x.to(dtype))
    assert_bits(y.view(torch.uint8).cpu(), x.to(dtype).view(torch.uint8))
    assert_bits(y.t().contiguous().view(torch.uint8).t().cpu(), x.to(dtype).view(torch.uint8))
    y.view(torch.uint8).fill_(1)
    assert y.cpu().view(torch.uint8).unique().tolist() == [1]
    assert torch.empty_like(y).copy_(x.to(dtype)).device == npu


def test_storages(npu):
    x = torch.arange(6.0, device=npu)
    view = torch.empty(0, device=npu).set_(x.untyped_storage(), 2, (2, 2), (2, 1))
    assert view.tolist() == [[2, 3], [4, 5]] and view.data_ptr() == x.data_ptr() + 8
    with pytest.raises(RuntimeError, match="storage of npu:0 for a tensor of npu:1"):
        torch.empty(0, device="npu:1").set_(x.untyped_storage(), 0, (2,), (1,))
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(24)
    assert x.copy_(torch.ones(6)).tolist() == [1] * 6
    assert torch.ones(2, device=npu).resize_(3, 2).shape == (3, 2)


def test_pinned_memory(npu):
    x = torch.arange(4.0).pin_memory()
    assert x.is_pinned() and x.device.type == "cpu" and not torch.arange(4.0).is_pinned()
    assert x.to(npu, non_blocking=True).tolist() == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="only memory of the host|cannot pin"):
        torch.empty(2, device=npu, pin_memory=True)


@BOTH
def test_what_memory_is_counted(index):
    torch.npu.reset_peak_memory_stats(index)
    before = torch.npu.memory_allocated(index), torch.npu.memory_allocated(1 - index)
    free, whole = torch.npu.mem_get_info(index)
    x = torch.empty(1 << 20, dtype=torch.uint8, device=there(index))
    assert torch.npu.memory_allocated(index) == before[0] + x.nbytes
    assert torch.npu.memory_allocated(1 - index) == before[1]
    assert torch.npu.mem_get_info(index) == (free - x.nbytes, whole)
    del x
    assert torch.npu.memory_allocated(index) == before[0]
    assert torch.npu.max_memory_allocated(index) == before[0] + (1 << 20)
    assert torch.npu.memory_stats(index)["allocated_bytes.all.current"] == before[0]
    torch.npu.empty_cache()


# ---- streams, events, capture --------------------------------------------------------------------


@BOTH
def test_streams(index):
    own = torch.npu.Stream(index)
    assert own.device == there(index) and own != torch.npu.current_stream(index)
    assert torch.npu.current_stream(index) == torch.npu.default_stream(index)
    with torch.npu.stream(own):
        assert torch.npu.current_stream(index) == own == torch.accelerator.current_stream(index)
        assert torch.npu.current_device() == index
        with torch.npu.stream(None):
            assert torch.npu.current_stream(index) == own
    assert torch.npu.current_stream(index) == torch.npu.default_stream(index)
    other = torch.Stream(there(index))
    assert other != own and own.query() and other.native_handle != own.native_handle
    other.wait_stream(own)
    x = torch.ones(2, device=there(index))
    x.record_stream(own)
    other.synchronize(), torch.npu.synchronize(index), torch.accelerator.synchronize()
    torch.npu.set_stream(other)
    assert torch.npu.current_stream(index) == other
    torch.npu.set_stream(torch.npu.default_stream(index))
    torch.npu.set_device(0)


def test_events():
    first, last = (torch.npu.Event(enable_timing=True) for _ in "ab")
    first.record()
    last.record(torch.npu.current_stream())
    torch.npu.current_stream().wait_event(last)
    last.synchronize()
    assert first.query() and last.query() and first.elapsed_time(last) >= 0
    with pytest.raises(RuntimeError):
        last.record(torch.npu.Stream(1))


def test_no_graph_is_captured():
    with pytest.raises(NotImplementedError, match="npu: no graph can be captured, because kernels"):
        torch.npu.NPUGraph()
    with pytest.raises(NotImplementedError, match="npu: no graph can be captured"):
        torch.npu.graph()
    assert not torch.npu.is_current_stream_capturing()


# ---- random numbers ------------------------------------------------------------------------------


@BOTH
def test_random_numbers(index):
    device = there(index)
    draws = {
        "randn": lambda **g: torch.randn(64, device=device, **g),
        "rand": lambda **g: torch.rand(64, device=device, **g),
        "bernoulli": lambda **g: torch.ones(64, device=device).mul(0.5).bernoulli(**g),
        "randperm": lambda **g: torch.randperm(64, device=device, **g),
    }
    for name, draw in draws.items():
        torch.manual_seed(5)
        first, second = draw(), draw()
        torch.manual_seed(5)
        assert_bits(draw().cpu(), first.cpu())
        assert not second.equal(first), name
        generator = torch.Generator(device=device)
        assert generator.device == device
        generator.manual_seed(5)
        assert_bits(draw(generator=generator).cpu(), first.cpu())
        state = generator.get_state()
        third = draw(generator=generator)
        generator.set_state(state)
        assert_bits(draw(generator=generator).cpu(), third.cpu())
        for wrong in (there(1 - index), "cpu"):
            with pytest.raises(RuntimeError, match=f"generator.*{wrong}"):
                draw(generator=torch.Generator(device=wrong))


def test_generators_are_of_an_index():
    """Each by itself, and none is that of the host."""
    first, second = (torch.npu.get_rng_state(n) for n in (0, 1))
    host = torch.get_rng_state()
    torch.randn(8, device="npu:1")
    F.dropout(torch.ones(8, device="npu:1")), torch.native_dropout(torch.ones(8).npu(1), 0.5, True)
    assert_bits(torch.npu.get_rng_state(0), first)
    assert_bits(torch.get_rng_state(), host)
    assert not torch.npu.get_rng_state(1).equal(second)
    torch.npu.set_rng_state(second, "npu:1")
    assert_bits(torch.npu.get_rng_state(1), second)
    with torch.npu.device(1):
        torch.npu.manual_seed(9)
        assert torch.npu.initial_seed() == 9
    torch.npu.manual_seed_all(9)
    assert len(torch.npu.get_rng_state_all()) == 2
    assert_bits(*torch.npu.get_rng_state_all())
    with torch.random.fork_rng([0, 1], device_type="npu"):
        inside = torch.randn(8, device="npu:0")
    assert_bits(torch.randn(8, device="npu:0").cpu(), inside.cpu())


@BOTH
def test_dropout(index):
    """The mask is that of the device's generator; `native_dropout` takes no generator itself."""
    x = torch.ones(256, device=there(index))
    for drop in (lambda: F.dropout(x), lambda: torch.native_dropout(x, 0.5, True)[0]):
        torch.manual_seed(2)
        first, second = drop(), drop()
        torch.manual_seed(2)
        assert_bits(drop().cpu(), first.cpu())
        assert not second.equal(first) and first.unique().tolist() == [0, 2]
