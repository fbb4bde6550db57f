# SPDX-License-Identifier: Apache-2.0
"""What programs of torch do on the test device npu, compared with the same on the CPU."""

import copy
import ctypes
import io
import threading

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from comparators import assert_bits
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import from_dlpack, to_dlpack

pytestmark = pytest.mark.npu
BOTH = pytest.mark.parametrize("index", [0, 1])
WIDTH, TOKENS = 16, 8
EXT_DEV = 12  # kDLExtDev of DLPack


def mlp(device="cpu", dropout=0.0):
    layers = [torch.nn.Linear(WIDTH, 32), torch.nn.GELU(), torch.nn.Dropout(dropout),
              torch.nn.Linear(32, WIDTH)]  # fmt: skip
    return torch.nn.Sequential(*layers).to(device)


def there(index):
    return torch.device("npu", index)


def step(model, x, run=None):
    """Output and gradients of a step, on the host."""
    x = x.detach().to(next(model.parameters()).device).requires_grad_()
    y = (run or model)(x)
    y.float().square().sum().backward()
    found = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    assert {one.device for one in found} == {x.device}
    model.zero_grad()
    return [one.cpu() for one in found]


def same(found, wanted):
    for one, exact in zip(found, wanted, strict=True):
        assert_bits(one, exact)


@pytest.fixture
def x():
    return torch.randn(TOKENS, WIDTH)


# ---- autograd ------------------------------------------------------------------------------------


@BOTH
def test_a_step(x, index):
    model = mlp()
    wanted = step(model, x)
    same(step(model.to(there(index)), x), wanted)
    assert all(p.device == there(index) for p in model.parameters())


@BOTH
def test_the_backward_has_a_thread_of_the_device(index):
    seen = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            stream = torch.npu.current_stream(index)
            seen.append((threading.get_ident(), torch.npu.current_device(), stream))
            return dy * 2

    own = torch.npu.Stream(index)
    x = torch.ones(3, device=there(index), requires_grad=True)
    with torch.npu.stream(own):
        Noting.apply(x).sum().backward()
    ((thread, device, stream),) = seen
    assert thread != threading.get_ident() and device == index and stream == own
    assert x.grad.tolist() == [2] * 3
    assert torch.npu.current_device() == 0


def test_a_model_on_two_devices(x):
    first, second = mlp(), mlp()
    wanted = step(torch.nn.Sequential(first, second), x)
    first.to("npu:0"), second.to("npu:1")
    x = x.to("npu:0").requires_grad_()
    y = second(first(x).to("npu:1"))
    y.square().sum().backward()
    parameters = [*first.parameters(), *second.parameters()]
    same([one.cpu() for one in (y.detach(), x.grad, *(p.grad for p in parameters))], wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(x, reentrant):
    model = mlp("npu:1", dropout=0.5)
    torch.manual_seed(1)
    wanted = step(model, x)
    torch.manual_seed(1)
    same(step(model, x, lambda x: checkpoint(model, x, use_reentrant=reentrant)), wanted)


def test_autocast(x):
    """Dtypes and bits of the CPU's products and of CUDA's lists: softmax and norms in fp32."""
    model = mlp("npu:1")
    x = x.to("npu:1")
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("npu") and not torch.is_autocast_enabled("cpu")
        y = F.linear(x, model[0].weight)
        assert_bits(y, F.linear(x.bfloat16(), model[0].weight.bfloat16()))
        assert torch.softmax(y, -1).dtype == torch.layer_norm(y, (32,)).dtype == torch.float32
        assert torch.addcmul(y, y, y.float()).dtype == torch.float32
        with torch.autocast("npu", enabled=False):
            assert F.linear(x, model[0].weight).dtype == torch.float32
        grads = step(model, x)
    assert grads[0].dtype == torch.bfloat16 and grads[1].dtype == torch.float32
    with torch.autocast("npu", dtype=torch.float16):
        assert model(x).dtype == torch.float16
    with pytest.warns(UserWarning, match="npu"), torch.autocast("npu", dtype=torch.float64):
        assert model(x).dtype == torch.float32


@pytest.mark.parametrize("causal", [False, True])
def test_attention(npu, causal):
    q, k, v = (torch.randn(2, 4, 8, WIDTH) for _ in "qkv")
    found = F.scaled_dot_product_attention(q.to(npu), k.to(npu), v.to(npu), is_causal=causal)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert_bits(found.cpu(), F.scaled_dot_product_attention(q, k, v, is_causal=causal))


# ---- compile -------------------------------------------------------------------------------------


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(x, backend):
    model = mlp("npu:1", dropout=0.5)
    torch.manual_seed(1)
    wanted = step(model, x)
    torch.manual_seed(1)
    same(step(model, x, torch.compile(model, backend=backend, fullgraph=True)), wanted)


def test_fake_tensors():
    with torch._subclasses.FakeTensorMode():
        x = torch.ones(2, 3, device="npu:1", requires_grad=True)
        y = F.linear(x, torch.empty(4, 3, device="npu:1"))
        assert y.device == there(1) and y.shape == (2, 4)
        assert torch.empty(2, device="npu").device == there(0)


@pytest.mark.usefixtures("compiler")
def test_streams_in_graphs():
    torch.npu.register_with_compiler()
    own = torch.npu.Stream(0)

    @torch.compile(backend="eager")
    def run(x):
        with torch.npu.stream(own):
            return x + 1

    assert run(torch.ones(2, device="npu")).tolist() == [2, 2]


# ---- models and optimizers -----------------------------------------------------------------------

OPTIMIZERS = {
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "one by one": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "default": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(x, name):
    models = [mlp(), None]
    models[1] = copy.deepcopy(models[0]).to("npu:1")
    for model in models:
        optimizer = OPTIMIZERS[name](model.parameters())
        for _ in range(3):
            model(x.to(next(model.parameters()).device)).square().sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        states = optimizer.state_dict()["state"][0]
        assert norm.device == next(model.parameters()).device
        assert all(s.device == norm.device for s in states.values() if getattr(s, "ndim", 0))
    for one, exact in zip(*(m.parameters() for m in reversed(models)), strict=True):
        torch.testing.assert_close(one.cpu(), exact)


def test_foreach_operators(npu):
    xs = [torch.arange(4.0, device=npu), torch.ones(2, device=npu)]
    assert [y.tolist() for y in torch._foreach_mul(xs, 2.0)] == [[0, 2, 4, 6], [2, 2]]
    torch._foreach_add_(xs, xs)
    assert [y.tolist() for y in xs] == [[0, 2, 4, 6], [2, 2]]
    assert torch._foreach_norm(xs)[1].item() == torch.tensor(8.0).sqrt().item()
    torch._foreach_copy_(xs, [x.neg() for x in xs])
    assert xs[1].tolist() == [-2, -2]


def test_moves_and_copies_of_modules(npu, x):
    model = mlp()
    wanted = step(model, x)
    assert model.npu(1) is model and {p.device for p in model.parameters()} == {there(1)}
    again = copy.deepcopy(model)
    assert {p.device for p in again.parameters()} == {there(1)}
    same(step(again, x), wanted)
    other = mlp(npu)
    other.load_state_dict(model.state_dict())
    assert {p.device for p in other.parameters()} == {npu}
    same(step(other, x), wanted)
    same(step(model.to("npu:0").cpu(), x), wanted)
    with torch.device("npu:1"):
        assert torch.nn.Linear(2, 2).weight.device == there(1)
    meta = torch.nn.Linear(2, 2, device="meta").to_empty(device=npu)
    assert meta.weight.device == npu


# ---- saving, DLPack ------------------------------------------------------------------------------

PLACES = {"as saved": (None, "npu:1"), "host": ("cpu", "cpu"), "other": ("npu:0", "npu:0"),
          "table": ({"npu:1": "npu:0"}, "npu:0")}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_saved_tensors(place):
    mapped, device = PLACES[place]
    model = mlp("npu:1")
    saved = {**model.state_dict(), "fp8": torch.ones(3).to(torch.float8_e4m3fn).npu(1)}
    saved["view"] = saved["0.weight"][1:]
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file, map_location=mapped)
    assert {str(one.device) for one in loaded.values()} == {device}
    same([one.cpu() for one in loaded.values()], [one.cpu() for one in saved.values()])
    assert loaded["view"].data_ptr() == loaded["0.weight"][1:].data_ptr()


def test_files_of_the_host_load_there():
    file = io.BytesIO()
    torch.save({"w": torch.arange(3.0)}, file)
    file.seek(0)
    assert torch.load(file, map_location="npu:1")["w"].device == there(1)


class DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", DLDevice), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64)]  # fmt: skip


class Exchange(ctypes.Structure):
    """The functions of DLPack's C exchange table, behind its header."""

    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32),
                *((name, ctypes.c_void_p) for name in
                  ("previous", "allocate", "managed", "object", "view", "stream"))]  # fmt: skip


def exchange():
    capsule = torch.Tensor.__dlpack_c_exchange_api__
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return Exchange.from_address(get(capsule, b"dlpack_exchange_api"))


@BOTH
def test_the_exchange_table(index):
    """What C code sees of a tensor, and the stream of the device."""
    x = torch.ones(3, 4, device=there(index))[1:]
    seen = DLTensor()
    view = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(exchange().view)
    assert view(x, ctypes.byref(seen)) == 0
    assert (seen.device.type, seen.device.index) == (EXT_DEV, index)
    assert seen.data + seen.offset == x.data_ptr() and list(seen.shape[:2]) == [2, 4]
    own, stream = torch.npu.Stream(index), ctypes.c_void_p()
    ask = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)
    with torch.npu.stream(own):
        assert ask(exchange().stream)(EXT_DEV, index, ctypes.byref(stream)) == 0
    assert stream.value == own.native_handle


@BOTH
def test_capsules_of_dlpack(index):
    x = torch.arange(4.0, device=there(index))
    y = from_dlpack(to_dlpack(x))
    assert y.device == there(index) and y.data_ptr() == x.data_ptr()
    y.fill_(3)
    assert x.tolist() == [3] * 4


# ---- the process ---------------------------------------------------------------------------------


def test_cuda_is_as_before():
    assert torch.cuda.device_count() == 0 or torch.cuda.current_device() == 0
    assert not torch.cuda.is_initialized() and not torch.ones(2).is_cuda
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
    assert torch.ones(2).device.type == "cpu" and torch.get_default_device().type == "cpu"
