# SPDX-License-Identifier: Apache-2.0
"""What test_megatron.py runs in a process of its own, with one version of megatron-core.

`python megatron_cases.py DEVICE OUTPUT SEED [CASE...]` runs the cases on "cpu" or "cuda", one after
the other, each with random numbers from the seed, and writes a JSON object: name of the case ->
{"facts": what it returned} or {"error": its traceback}. The test decides what the facts have to be.
"""

import copy
import functools
import importlib
import json
import pkgutil
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import megatron_recipes
import torch
from megatron_gpt import (
    BATCH,
    DELAYED,
    LENGTH,
    LLAMA,
    STEPS,
    config_of,
    first_microbatch,
    gemms,
    gradients,
    linear_layers,
    loss_of,
    make_model,
    seed,
    train,
    trained,
    worst,
)

import transformer_engine.pytorch as te
from transformer_engine import _core

CASES = {}


def case(function=None, *, needs="cpu"):
    """Register a case; `needs="cuda"`: megatron-core itself runs it on a GPU only."""
    if function is None:
        return functools.partial(case, needs=needs)
    CASES[function.__name__] = (function, needs)
    return function


# ---- names ---------------------------------------------------------------------------------------


@case
def names(device):
    """What each module of megatron-core found out about this package."""
    found = {}
    for name in sorted(n for n in sys.modules if n.startswith("megatron.core")):
        module = sys.modules[name]
        for attribute in vars(module):
            if attribute.startswith(("HAVE_TE", "HAVE_FUSED_QKV")):
                found[f"{name}.{attribute}"] = bool(getattr(module, attribute))
    extension = importlib.import_module("megatron.core.extensions.transformer_engine")
    found |= {
        f"extension.{name}": getattr(extension, name, None) is not None
        for name in (
            "Fp8Padding",
            "Fp8Unpadding",
            "Float8Tensor",
            "SplitAlongDim",
            "TEActivationOp",
            "TEColumnParallelGroupedLinear",
            "TEColumnParallelLinear",
            "TECudaRNGStatesTracker",
            "TEDelayedScaling",
            "TEDotProductAttention",
            "TEFusedMLP",
            "TELayerNormColumnParallelLinear",
            "TELinear",
            "TENorm",
            "TERowParallelLinear",
            "cpu_offload",
            "fused_apply_rotary_pos_emb",
            "fused_apply_rotary_pos_emb_thd",
            "fused_permute",
            "fused_permute_with_probs",
            "fused_sort_chunks_by_index",
            "fused_sort_chunks_by_index_with_probs",
            "fused_unpermute",
            "get_cpu_offload_context",
            "te_checkpoint",
            "te_general_gemm",
            "te_parallel_cross_entropy",
        )
    }
    version = importlib.import_module("megatron.core.utils").get_te_version()
    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    return {"found": found, "version": str(version), "optimizer": optimizer.USING_TE_OPTIMIZER}


@case
def absent_features(device):
    """What is not built raises when it is used, by name."""
    extension = importlib.import_module("megatron.core.extensions.transformer_engine")
    messages = {}
    for name, use in {
        "GroupedLinear": lambda: extension.TEColumnParallelGroupedLinear.__mro__[2](2, 32, 32),
        "moe_permute": lambda: extension.fused_permute(torch.ones(2, 2), torch.ones(2)),
        "Fp8Padding": lambda: extension.Fp8Padding(1),
        "SwiGLU": lambda: te.ops.SwiGLU(),
        "unpermute": lambda: extension.fused_unpermute(torch.ones(2, 2), None, pad_offsets=None),
        "router": lambda: extension.fused_topk_with_score_function(torch.ones(2, 4), 1),
        "offload": lambda: extension._get_cpu_offload_context(
            True, 1, 1, True, False, False, retain_pinned_cpu_buffers=True
        ),
        "graphs": lambda: te.make_graphed_callables((), (), _reuse_graph_input_output_buffers=True),
    }.items():
        try:
            use()
            messages[name] = ""
        except NotImplementedError as error:
            messages[name] = str(error)
    return messages


# ---- training ------------------------------------------------------------------------------------


@case
def bf16(device):
    return trained(device)


@case
def bf16_llama(device):
    return trained(device, **LLAMA)


@case
def fp8_delayed(device):
    return trained(device, **DELAYED)


@case
def fp8_delayed_llama(device):
    return trained(device, **LLAMA, **DELAYED)


@case
def fp8_current(device):
    return trained(device, fp8="hybrid", fp8_recipe="tensorwise")


@case
def fp8_e4m3_without_cache(device):
    return trained(device, **{**DELAYED, "fp8": "e4m3"}, disable_parameter_transpose_cache=True)


# ---- what megatron-core asks a version of this package for ---------------------------------------

for _name in megatron_recipes.RECIPES:
    CASES[f"recipe_{_name}"] = (functools.partial(megatron_recipes.run, name=_name), "cpu")


@case
def softmax_off_by_one(device):
    return trained(device, softmax_type="off-by-one")


@case
def softmax_learnable(device):
    return trained(device, softmax_type="learnable")


@case
def nvfp4(device):
    facts = trained(device, fp4="e2m1", fp4_recipe="nvfp4")
    return {**facts, "emulated": _core.counters().get("emulated.nvfp4", 0)}


@case
def largest_logits(device):
    """qk_clip: the largest logit of each head, and the weights that megatron-core scales by it."""
    limit = 1e-3  # below what any head has
    te.reset()
    model = make_model(device, qk_clip=True, qk_clip_threshold=limit)
    facts = {"logits": [], "changed": []}
    for layer in model.module.decoder.layers:
        layer.self_attention.core_attention.current_max_attn_logits = None
    loss_of(model, device).backward()
    for layer in model.module.decoder.layers:
        attention = layer.self_attention
        facts["logits"].append(attention.core_attention.current_max_attn_logits.tolist())
        before = attention.linear_qkv.weight.detach().clone()
        attention.clip_qk()
        facts["changed"].append(not torch.equal(before, attention.linear_qkv.weight))
    facts["heads"] = model.module.config.num_attention_heads
    return facts


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@case
def recompute_layers(device):
    """te_checkpoint of whole layers, as megatron-core calls it for FP8."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    try:
        plain = gradients(device, **DELAYED)
        return {"full": worst(gradients(device, **DELAYED, **FULL), plain)}
    finally:
        if device == "cpu":  # it believes that it has states now
            get_cuda_rng_tracker().reset()


@case(needs="cuda")  # megatron-core keeps the random state of the GPU
def recompute_by_megatron(device):
    """Recompute of parts, and in bf16 of whole layers, by megatron-core's own function."""
    plain = gradients(device, **DELAYED)
    core = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    mlp = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    return {
        "core_attn": worst(gradients(device, **DELAYED, **core), plain),
        "mlp": worst(gradients(device, **DELAYED, **mlp), plain),
        "full, bf16": worst(gradients(device, **FULL), gradients(device)),
    }


@case
def te_checkpoint(device):
    """Recompute as megatron-core calls it, of a layer in FP8, without its random state."""
    extension = importlib.import_module("megatron.core.extensions.transformer_engine")
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    te.reset()
    model = make_model(device, **DELAYED)
    layer, config = model.module.decoder.layers[0], model.config
    group = torch.distributed.group.WORLD
    data = torch.randn(LENGTH, BATCH, 128, device=device, dtype=torch.bfloat16)
    results, order = [], []
    for recompute in (False, True, False, True):
        te.reset()
        first_microbatch(layer)
        layer.zero_grad()
        x = data.clone().requires_grad_()
        with get_fp8_context(config):
            if recompute:
                tracker = get_cuda_rng_tracker if device == "cuda" else None
                out = extension.te_checkpoint(layer, False, tracker, group, x, None)[0]
            else:
                out = layer(x, None)[0]
        out.float().square().sum().backward()
        found = {"input": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
        results.append({name: grad.double() for name, grad in found.items()})
        order.append("recompute" if recompute else "plain")
    return {"order": order, "errors": [worst(other, results[0]) for other in results[1:]]}


@case
def attention_through_te(device):
    """TEDotProductAttention against the definition, grouped queries, and a window."""
    extension = importlib.import_module("megatron.core.extensions.transformer_engine")
    from megatron.core.transformer.enums import AttnMaskType

    config = config_of(device, num_query_groups=4, window_size=(16, 0))
    facts = {}
    for kind in (AttnMaskType.causal, AttnMaskType.no_mask):
        attention = extension.TEDotProductAttention(
            config, 1, kind, "self", attention_dropout=0.0, softmax_scale=0.2
        )
        q = torch.randn(32, 2, 8, 16, device=device, dtype=torch.bfloat16)
        k, v = (torch.randn(32, 2, 4, 16, device=device, dtype=torch.bfloat16) for _ in range(2))
        out = attention(q, k, v, None, kind)
        wide = [t.double().permute(1, 2, 0, 3) for t in (q, k, v)]
        scores = wide[0] @ wide[1].repeat_interleave(2, 1).transpose(2, 3) * 0.2
        i, j = (torch.arange(32, device=device).unsqueeze(d) for d in (1, 0))
        hidden = (i - j > 16) | (j > i)  # the window has nothing to the right
        exact = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        exact = (exact @ wide[2].repeat_interleave(2, 1)).permute(2, 0, 1, 3).flatten(2)
        error = (out.double() - exact).square().sum() / exact.square().sum()
        facts[kind.name] = error.item()
    return facts


@case
def norms(device):
    """TENorm and rotary embeddings of the extension."""
    extension = importlib.import_module("megatron.core.extensions.transformer_engine")
    kinds = {}
    for kind in ("LayerNorm", "RMSNorm"):
        config = config_of(device, normalization=kind, layernorm_zero_centered_gamma=True)
        norm = extension.TENorm(config, 128, eps=1e-5)
        out = norm(torch.randn(4, 128, device=device, dtype=torch.bfloat16))
        kinds[kind] = [type(norm).__module__, str(out.dtype), norm.weight.sequence_parallel]
    t = torch.randn(LENGTH, BATCH, 8, 16, device=device)
    angles = torch.randn(LENGTH, 1, 1, 16, device=device)
    angles[..., 8:] = angles[..., :8]
    rotated = extension.fused_apply_rotary_pos_emb(t, angles)
    turned = torch.cat((-t[..., 8:], t[..., :8]), -1)
    kinds["rope"] = (rotated - (t * angles.cos() + turned * angles.sin())).abs().max().item()
    q, k, v = extension.SplitAlongDim(t, 3, [4, 4, 8])
    kinds["split"] = torch.equal(torch.cat((q, k, v), 3), t)
    return kinds


def entries_of(model):
    """What megatron-core saves of a model, and what it loads into."""
    return model.module.sharded_state_dict(metadata={"dp_cp_group": torch.distributed.group.WORLD})


def saved(entries, folder):
    """Save by megatron-core; a function that loads into other entries."""
    from megatron.core import dist_checkpointing

    importlib.import_module("psutil")  # the processes that write need it; without, this one hangs
    dist_checkpointing.save(entries, folder)
    return lambda given: dist_checkpointing.load(given, folder)


def scales_of(model):
    return {
        name: module._state_values()
        for name, module in model.named_modules()
        if isinstance(module, te.Linear | te.LayerNormLinear)
    }


def evaluated(model, device):
    model.eval()
    first_microbatch(model)
    return loss_of(model, device).item()


@case
def distributed_checkpoint(device):
    """Weights and scales go through megatron-core's sharded state into a fresh process' model."""
    te.reset()
    model = make_model(device, **DELAYED)
    train(model, device, steps=3)
    entries = entries_of(model)
    with tempfile.TemporaryDirectory() as folder:
        if device == "cuda":
            load = saved(entries, folder)
        else:  # megatron-core writes files only where there is a GPU
            kept = {k: copy.deepcopy(getattr(e, "data", e)) for k, e in entries.items()}

            def load(given):
                return {key: kept[key] for key in given}

        values, expected = scales_of(model), evaluated(model, device)
        te.reset()  # as in a process that has not run FP8 yet
        other = make_model(device, **DELAYED)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1.0)
        given = entries_of(other)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="a checkpoint was loaded in place")
            other.module.load_state_dict(load(given))
            loaded, found = scales_of(other), evaluated(other, device)
    return {
        "keys": sorted(entries) == sorted(given),
        "extra": sum(key.endswith("_extra_state") for key in entries),
        "weights": [
            name
            for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True)
            if not torch.equal(p, q)
        ],
        "scales": [
            f"{name}.{direction}"
            for name, state in values.items()
            for direction, pair in state.items()
            if loaded[name] is None
            or not all(map(torch.equal, map(on_cpu, loaded[name][direction]), map(on_cpu, pair)))
        ],
        "used": sum((scale != 1).any().item() for s in values.values() for scale, _ in s.values()),
        "losses": [expected, found],
    }


def on_cpu(tensor):
    return tensor.cpu()


# ---- on a GPU ------------------------------------------------------------------------------------


@case(needs="cuda")
def random_states(device):
    """Dropout is drawn and repeated under megatron-core's tracker and under a subclass of ours."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    options = {"hidden_dropout": 0.1, "attention_dropout": 0.1, **DELAYED}
    facts = {}
    for te_tracker in (False, True):
        plain, recomputed = (
            gradients(device, te_tracker=te_tracker, **options, **extra) for extra in ({}, FULL)
        )
        facts[type(get_cuda_rng_tracker()).__name__] = worst(recomputed, plain)
    seed(device)
    return facts


@case(needs="cuda")
def llama_with_rope(device):
    return trained(device, position="rope", apply_rope_fusion=True, **LLAMA, **DELAYED)


def megatron_training(device, distributed, gather=False, before=None, **options):
    """The DDP and optimizer of megatron-core, with gradients in fp32 buffers.

    `gather`: what is gathered of a distributed optimizer's parameters are their FP8 forms.
    `before` is called with the model, before it is wrapped.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    te.reset()
    model = make_model(device, **options)
    if before is not None:
        before(model)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, fp8_param_gather=gather
    )
    wrapped = DistributedDataParallel(model.config, settings, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=distributed,
            clip_grad=1.0,
        ),
        [wrapped],
    )
    te.reset_counters()
    losses, norms = [], []
    for _ in range(STEPS):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        first_microbatch(model)
        total = 0.0
        for _ in range(2):  # two microbatches: the second adds to main_grad
            loss = loss_of(wrapped, device) / 2
            loss.backward()
            total += loss.item()
        finalize_model_grads([wrapped])
        success, norm, _ = optimizer.step()
        assert success
        losses.append(total)
        norms.append(float(norm))
    fp8, other = gemms()
    kind = type(getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer).__module__
    return {
        "losses": losses,
        "norms": norms,
        "fp8": fp8,
        "other": other,
        "microbatches": 2,
        "linear_layers": linear_layers(model),
        "optimizer": kind,
    }


@case(needs="cuda")
def optimizer_bf16(device):
    return megatron_training(device, distributed=False)


@case(needs="cuda")
def distributed_optimizer_fp8(device):
    return megatron_training(device, distributed=True, **DELAYED)


@case(needs="cuda")
def optimizer_fp8_param(device):
    return megatron_training(device, distributed=False, **megatron_recipes.CURRENT, fp8_param=True)


def _gathered(device, options):
    return megatron_training(device, distributed=True, gather=True, fp8_param=True, **options)


for _name, _options in megatron_recipes.GATHERED.items():
    CASES[f"distributed_fp8_param_{_name}"] = (
        functools.partial(_gathered, options=_options),
        "cuda",
    )


@case(needs="cuda")
def main_gradients(device):
    """Weight gradients added inside the GEMM to ``main_grad``, as of a plain accumulation.

    gradient_accumulation_fusion of a whole GPT needs apex for megatron's own layers; those of this
    package take it without.
    """
    extension = importlib.import_module("megatron.core.extensions.transformer_engine")
    te.reset()
    data = torch.randn(2, LENGTH, BATCH, 128, device=device, dtype=torch.bfloat16)
    results = []
    for fused in (False, True):
        config = config_of(device, gradient_accumulation_fusion=fused)
        seed(device)
        options = {"config": config, "init_method": torch.nn.init.xavier_uniform_, "bias": True}
        options |= {"skip_bias_add": False, "is_expert": False}
        up = extension.TELayerNormColumnParallelLinear(128, 256, gather_output=False, **options)
        down = extension.TERowParallelLinear(256, 128, input_is_parallel=True, **options)
        weights = (up.weight, down.weight)
        for weight in weights:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            weight.grad_added_to_main_grad = False
        for x in data:
            down(up(x)[0])[0].float().square().sum().backward()
            if not fused:
                for weight in weights:
                    weight.main_grad += weight.grad
                    weight.grad = None
        results.append([w.main_grad for w in weights])
        added = [w.grad_added_to_main_grad for w in weights]
    errors = [
        ((a - b).square().sum() / b.square().sum()).item() for b, a in zip(*results, strict=True)
    ]
    return {"added": added, "errors": errors}


@case
def every_module(device):
    """Import every module of megatron-core: the errors that name this package. The last case."""
    core = importlib.import_module("megatron.core")
    count, ours = 0, []
    for info in pkgutil.walk_packages(core.__path__, "megatron.core.", onerror=lambda name: None):
        try:
            importlib.import_module(info.name)
            count += 1
        except Exception as error:  # packages that are not installed, a GPU that is not there
            if (
                "transformer_engine" in str(error)
                or "transformer_engine/" in traceback.format_exc()
            ):
                ours.append(f"{info.name}: {type(error).__name__}: {error}")
    return {"imported": count, "ours": ours}


# ---- the process ---------------------------------------------------------------------------------


def main():
    """Run the cases; what is known is written after each, should the process end in one."""
    device, output = sys.argv[1], Path(sys.argv[2])
    wanted = sys.argv[4:] or [n for n, (_, needs) in CASES.items() if needs in ("cpu", device)]
    torch.manual_seed(int(sys.argv[3]))
    results = {}
    try:
        if device == "cuda":
            torch.cuda.set_device(0)
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=torch.distributed.FileStore(str(output.with_suffix(".store")), 1),
            rank=0,
            world_size=1,
        )
        from megatron.core import parallel_state

        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        importlib.import_module("megatron.core.optimizer")
        parallel_state.initialize_model_parallel()
        for name in wanted:
            seed(device)
            try:
                results[name] = {"facts": CASES[name][0](device)}
            except Exception:
                results[name] = {"error": traceback.format_exc()}
            output.write_text(json.dumps(results))
    except BaseException:
        results["start"] = {"error": traceback.format_exc()}
        output.write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
