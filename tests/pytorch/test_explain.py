# SPDX-License-Identifier: Apache-2.0
"""`explain` prints the plans of a call, runs nothing and changes nothing."""

import io

import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits, state_of

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.pytorch.execution.thread_state import current_state


def text_of(*args, **kwargs):
    file = io.StringIO()
    te.explain(*args, file=file, **kwargs)
    return file.getvalue()


@pytest.fixture
def layer(device):
    return te.Linear(32, 48, device=device)


@pytest.fixture
def x(device):
    return torch.randn(2, 8, 32, device=device, requires_grad=True)


STAGES = {
    None: ["gemm_output [gemm]", "gemm_grad_weight [gemm] -> gemm_grad_input [gemm]"],
    "delayed": [
        "quantize_input [quantize] -> quantize_weight [quantize]",
        "quantize_grad_output [quantize] -> gemm_grad_weight [gemm] -> requantize_weight",
    ],
    "current": [
        "amax_input [amax] -> quantize_input [quantize] -> amax_weight [amax]",
        "amax_grad_output [amax] -> quantize_grad_output [quantize]",
    ],
}


@pytest.mark.parametrize("recipe", STAGES)
def test_stages_and_buffers(layer, x, recipe, device):
    made = recipe and RECIPES[recipe]()
    with te.autocast(enabled=made is not None, recipe=made):
        text = text_of(layer, x)
    for part in STAGES[recipe]:
        assert part in text
    assert "forward: plan " in text and "backward: plan " in text and "wgrad: plan" not in text
    assert repr(layer) in text and f"recipe: {made}" in text
    assert ("CPU reference backend" in text) == (device == "cpu")
    assert "output: f32 [16 x 48]" in text.replace("any", "16")
    with te.autocast(enabled=made is not None, recipe=made):
        out = layer(x)
    saved = out.grad_fn.saved_tensors
    packed = sum(t.nbytes for t in saved if t.dtype == torch.uint8)
    assert text.count(f"saved for backward: {packed} bytes") == 2  # written and read


def test_follows_the_call(layer, x):
    """Gradients off, a frozen weight, the cache, the deferred gradient: other plans."""
    with torch.no_grad():
        assert "backward" not in text_of(layer, x).replace("for backward", "")
    layer.requires_grad_(False)
    with te.autocast():
        assert "gemm_grad_weight" not in text_of(layer, x)
        cached = text_of(layer, x, is_first_microbatch=True)
        assert "weight_column" in cached and "requantize_weight" not in cached
    late = te.Linear(32, 48, delay_wgrad_compute=True, device=x.device)
    assert "wgrad: plan " in text_of(late, x)


def test_changes_and_runs_nothing(layer, x):
    recipe = RECIPES["delayed"]()
    with te.autocast(recipe=recipe):
        layer(x)
    before, slots = state_of(layer), layer._slots
    _core.reset_counters()
    with te.autocast(recipe=RECIPES["delayed-e4m3"]()):
        text_of(layer, x)
        assert current_state().owes_update
    ran = {name.rpartition(".")[2] for name in _core.counters()}
    assert ran <= {"scaling_update"}  # that of the region's exit
    assert layer._slots is slots and layer._weight_caches[0] is None
    assert_same_bits(state_of(layer)["backward"], before["backward"])


def test_input_by_name_and_standard_output(layer, x, capsys):
    te.explain(layer, inp=x)
    assert "gemm_output" in capsys.readouterr().out


def test_wrong_arguments(layer, x):
    with pytest.raises(TypeError, match="explain: Linear runs no plans of its own"):
        te.explain(torch.nn.Linear(32, 48), x)
    with pytest.raises(TypeError, match="explain: input: list, expected a tensor"):
        te.explain(layer, [1.0])
    with pytest.raises(TypeError, match="explain: input: NoneType, expected a tensor"):
        te.explain(layer)
    with pytest.raises(ValueError, match="expected \\[\\.\\.\\., 32\\]"):
        te.explain(layer, x[..., :7])


@pytest.mark.parametrize("recipe", STAGES)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_whole_layer(device, recipe, kind):
    layer = te.TransformerLayer(
        32, 64, 4, layer_type=kind, params_dtype=torch.bfloat16, device=device, layer_number=1
    )
    x = torch.randn(8, 2, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    context = {"encoder_output": torch.randn_like(x)[:6]} if kind == "decoder" else {}
    made = recipe and RECIPES[recipe]()
    with te.autocast(enabled=made is not None, recipe=made):
        text = text_of(layer, x, **context)
        assert all(m._slots is None for m in layer.modules() if isinstance(m, te.Linear))
        again = text_of(layer, hidden_states=x, **context)
    assert again == text
    forward, backward = text.split("\nbackward: plan ")
    assert "forward: plan " in forward
    for name in ("attn_qkv_gemm_output", "attn_core_attention [", "mlp_fc2_gemm_output"):
        assert name in forward and name not in backward
    assert ("cross_kv_gemm_output" in forward) == (kind == "decoder")
    assert "attn_core_attention_backward" in backward and "mlp_dropout_backward" in backward
    assert "output: bf16 [16 x 32]" in forward
    if kind == "decoder":
        assert "cross_source: bf16 [12 x 32]" in forward


def test_a_layer_by_its_modules(device):
    layer = te.TransformerLayer(32, 64, 4, device=device)
    layer.layernorm_mlp.register_forward_hook(lambda *_: None)
    text = text_of(layer, torch.randn(8, 2, 32, device=device))
    assert "it calls its modules; explain them: self_attention.layernorm_qkv" in text


@pytest.mark.parametrize("told", [{}, {"max_seqlen_q": 9}])
def test_packed_sequences(device, told):
    """Their number and bounds are of the call; what is not given is read."""
    layer = te.TransformerLayer(
        32, 64, 4, attn_input_format="thd", self_attn_mask_type="padding", device=device,
        params_dtype=torch.float32 if device == "cpu" else torch.bfloat16,
    )  # fmt: skip
    x = torch.randn(16, 32, device=device).to(layer.layernorm_mlp.fc2_weight.dtype)
    told["cu_seqlens_q"] = torch.tensor([0, 7, 16], dtype=torch.int32, device=device)
    text = text_of(layer, x, **told)
    longest = told.get("max_seqlen_q", 64)
    assert "query_offsets: i32 [3]" in text and f"bounds: i32 [{longest} x {longest} x 0]" in text
