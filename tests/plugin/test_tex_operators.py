# SPDX-License-Identifier: Apache-2.0
"""The module `transformer_engine_torch`: its operators are there, with their signatures."""

import copy
import importlib.util
import inspect
from pathlib import Path

import processes
import pytest
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine import _core, plugin
from transformer_engine.plugin import adapters, builtin, core
from transformer_engine.plugin.core import (
    BackendImplKind,
    OpImpl,
    OpManager,
    OpRegistry,
    SelectionPolicy,
    get_manager,
    get_registry,
    policy_context,
    with_preference,
    with_strict_mode,
)

_spec = importlib.util.spec_from_file_location(
    "tex_signatures", Path(__file__).parent / "tex_signatures.py"
)
_table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_table)
SIGNATURES = _table.SIGNATURES
ABSENT = list(builtin.ABSENT)


def function_of(name, parameters):
    """A function with these parameters that gives its arguments."""
    scope = {}
    exec(f"def {name}({parameters}):\n    return dict(locals())", scope)
    return scope[name]


OUT = ("out", inspect.Parameter.KEYWORD_ONLY, None)
"""Places of results: this library's implementations take it, as those of plug-ins may."""


def parameters_of(function):
    """Parameters of a signature: names, kinds, defaults, in order."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_there_are_113():
    assert len(SIGNATURES) == 113
    assert set(SIGNATURES) == set(builtin.OPERATORS) and len(builtin.OPERATORS) == 113
    assert set(SIGNATURES) <= set(tex.__all__) <= set(dir(tex))


NAMES = """
BackendImplKind OpImpl match_token TEFLBackendBase TEFLModule get_tefl_module reset_tefl_module
get_registry get_manager reset_registry Logger LoggerManager SelectionPolicy PolicyManager
get_policy set_global_policy reset_global_policy policy_context policy_from_env get_policy_epoch
bump_policy_epoch with_strict_mode with_preference with_allowed_vendors with_denied_vendors
PREFER_DEFAULT PREFER_VENDOR PREFER_REFERENCE VALID_PREFER_VALUES OpManager get_default_manager
reset_default_manager OpRegistry discover_plugin discover_from_entry_points
discover_from_env_modules get_discovered_plugin clear_discovered_plugin PLUGIN_GROUP
PLUGIN_MODULES_ENV
"""
CLASSES = """
DType Float8BlockScaleTensorFormat FP8FwdTensors FP8BwdTensors FP8TensorMeta NVTE_Activation_Type
NVTE_Bias_Type NVTE_Mask_Type NVTE_Softmax_Type NVTE_Fused_Attn_Backend NVTE_QKV_Format
NVTE_QKV_Layout CommOverlapType CommOverlapAlgo CommGemmOverlapRole CommOverlapHelper CommOverlap
CommOverlapP2P CommGemmOverlapAlgoConfig FusedAdamCUDAKernel FusedSGDCUDAKernel
"""


def test_names_of_the_api():
    """What the fork exports is there, by ``import *``, too."""
    for package, names in ((core, NAMES), (tex, CLASSES)):
        assert set(names.split()) <= set(package.__all__) & set(dir(package))
        scope = {}
        exec(f"from {package.__name__} import *", scope)
        for name in names.split():
            assert scope[name] is getattr(package, name), name
    assert (core.PLUGIN_GROUP, core.PLUGIN_MODULES_ENV) == ("te_fl.plugin", "TE_FL_PLUGIN_MODULES")
    assert {core.PREFER_DEFAULT, core.PREFER_VENDOR, core.PREFER_REFERENCE} == set(
        core.VALID_PREFER_VALUES
    )


def test_names_of_the_fork():
    """What packages for the fork import by ``from ...core.ops import *``."""
    scope = {}
    exec("from transformer_engine.plugin.core.ops import *", scope)
    classes = "TEFLBackendBase TEFLModule FlashAttentionBase FP8TensorMeta CommOverlap"
    functions = "get_tefl_module reset_tefl_module get_registry get_manager reset_registry"
    for name in classes.split():
        assert isinstance(scope[name], type), name
    for name in functions.split():
        assert scope[name] is getattr(core, name), name
    mine = type(
        "Mine", (scope["TEFLBackendBase"],), {"relu": lambda self, input, quantizer: input}
    )()
    assert mine.relu(3, None) == 3
    with pytest.raises(NotImplementedError, match="Mine has no gelu"):
        mine.gelu(3, None)
    assert plugin.tefl is tex is scope["get_tefl_module"]()
    for name in ("FusedAdamCUDAKernel", "FusedSGDCUDAKernel"):
        with pytest.raises(NotImplementedError, match=f"{name} is not built yet.*multi_tensor_"):
            getattr(tex, name)()
    with pytest.raises(AttributeError, match="has no attribute 'telf'"):
        core.backend_base.telf  # noqa: B018


def test_copies():
    """An operator is itself, as a function is: models that hold one are copied."""
    model = torch.nn.Linear(2, 2)
    model.act = tex.gelu
    assert copy.copy(tex.gelu) is tex.gelu is copy.deepcopy(model).act


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    get_manager().ensure_initialized()
    impls = get_registry().get_implementations(name)
    assert impls
    expected = parameters_of(function_of(name, SIGNATURES[name]))
    for impl in impls:
        more = [OUT] if name in adapters.PLACED and impl.impl_id == adapters.NATIVE else []
        assert parameters_of(impl.fn) == expected + more, impl
        function = inspect.unwrap(impl.fn.func)
        assert inspect.getdoc(function) and function.__name__ == name, impl


@pytest.mark.parametrize("name", SIGNATURES)
def test_round_trips(name):
    """What a plug-in registers is what the module's attribute runs, with all arguments."""
    fn = function_of(name, SIGNATURES[name])
    parameters = inspect.signature(fn).parameters.values()
    values = {p.name: object() for p in parameters}
    by_position = [values[p.name] for p in parameters if p.kind is not p.KEYWORD_ONLY]
    by_name = {p.name: values[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}
    op = getattr(tex, name)
    of_manager = isinstance(op, _core.Operator) and op is get_manager().operator(name)
    assert of_manager or name == "get_fused_attn_backend"  # a function that takes an object, too
    assert op.__name__ == name and vars(tex)[name] is op
    registry = get_registry()
    registry.register(OpImpl(name, "vendor.t", BackendImplKind.VENDOR, fn, vendor="t"))
    try:
        with with_preference("vendor"):
            assert op(*by_position, **by_name) == values
            assert op(**values) == values
            required = {
                n: v
                for n, v in values.items()
                if inspect.signature(fn).parameters[n].default is inspect.Parameter.empty
            }
            got = op(**required)
            assert {n: got[n] for n in required} == required
    finally:
        registry.unregister(name, "vendor.t")


@pytest.mark.parametrize("name", ABSENT)
def test_what_is_absent_says_so(name):
    fn = function_of(name, SIGNATURES[name])
    given = dict.fromkeys(inspect.signature(fn).parameters)
    for policy in (SelectionPolicy(), SelectionPolicy("reference"), SelectionPolicy(strict=True)):
        with policy_context(policy), pytest.raises(NotImplementedError, match=f"{name} is not"):
            getattr(tex, name)(**given)
    registry = get_registry()
    registry.register(OpImpl(name, "vendor.t", BackendImplKind.VENDOR, fn, vendor="t"))
    try:
        for prefer in ("flagos", "vendor", "reference"):
            with with_preference(prefer):
                assert getattr(tex, name)(**given) == given
    finally:
        registry.unregister(name, "vendor.t")


def test_selection():
    x = torch.randn(4, 8)
    manager = get_manager()
    assert manager.get_selected_impl_id("gelu") == "default.native"
    before = manager.counts().get("gelu/reference.torch", 0)
    with with_preference("reference"), with_strict_mode():
        assert manager.get_selected_impl_id("gelu") == "reference.torch"
        torch.testing.assert_close(
            tex.gelu(x, None), torch.nn.functional.gelu(x, approximate="tanh")
        )
    assert manager.counts()["gelu/reference.torch"] == before + 1


def test_registering_twice_adds_nothing():
    registry = OpRegistry()
    made = builtin.register_builtins(registry)
    assert made == sum(map(len, registry.snapshot().impls_by_op.values()))
    assert set(registry.list_operators()) == set(SIGNATURES)
    assert builtin.register_builtins(registry) == 0
    registry.unregister("gelu", "reference.torch")
    assert builtin.register_builtins(registry) == 1
    assert OpManager(registry).call("get_num_cublas_streams") == 1


def test_errors_have_a_note():
    with pytest.raises(TypeError, match="gelu: input: int, expected a tensor") as error:
        tex.gelu(3, None)
    assert error.value.__notes__ == [
        "raised by default.native, an implementation of gelu; called with (input=3, "
        "quantizer=None); input is a int, expected a Tensor"
    ]
    with pytest.raises(TypeError, match="gelu: quantizer: int, expected a Quantizer"):
        tex.gelu(torch.ones(2, 2), 3)


class Unlike:
    """It is no argument of any operator."""


@pytest.mark.parametrize("name", sorted(set(SIGNATURES) - set(ABSENT)))
def test_wrong_arguments_are_told(name):
    """Each argument in turn is something else: an error with a note that shows it, or none."""
    parameters = parameters_of(function_of(name, SIGNATURES[name]))
    function = getattr(tex, name)
    good = torch.ones(4, 4)
    told = 0
    for wrong in ("text", [0, 4], Unlike(), None):
        for at, (changed, *_) in enumerate(parameters):
            values = {each: good for each, *_ in parameters} | {changed: wrong}
            keywords = {each for each, kind, _ in parameters if kind == OUT[1]}
            named = {each: values[each] for each in keywords}
            given = [values[each] for each, *_ in parameters if each not in keywords]
            try:
                function(*given, **named)
            except Exception as error:
                (note,) = error.__notes__
                assert note.startswith("raised by ") and f"an implementation of {name};" in note
                shown = {"text": "'text'", "Unlike": "Unlike"}.get(
                    wrong if isinstance(wrong, str) else type(wrong).__name__, str(wrong)
                )
                assert f"{changed}={shown}" in note, (at, note)
                told += 1
    assert told or not parameters


def test_notes_show_what_was_given():
    """Shapes, dtypes and types, and which argument is no tensor where the signature has one."""
    scores = torch.ones(1, 1, 2, 2, dtype=torch.bfloat16)
    with pytest.raises(AttributeError) as error:
        tex.scaled_masked_softmax_forward(scores, [[0]], 1.0)
    assert error.value.__notes__ == [
        "raised by default.native, an implementation of scaled_masked_softmax_forward; called with "
        "(input=bfloat16[1, 1, 2, 2], mask=[[0]], scale=1.0); mask is a list, expected a Tensor"
    ]
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")
    codes = quantizer(torch.ones(16, 16))
    with pytest.raises(TypeError) as error:
        tex.quantize(codes, [quantizer] * 5, output=...)
    assert error.value.__notes__[0].endswith(
        "called with (tensor=Float8Tensor[16, 16], quantizer=[Float8CurrentScalingQuantizer, "
        "Float8CurrentScalingQuantizer, Float8CurrentScalingQuantizer, ...], output=ellipsis)"
    )


ENUMS = {
    "NVTE_QKV_Format": "NVTE_SBHD=0 NVTE_BSHD=1 NVTE_THD=2 NVTE_BSHD_2SBHD=3 NVTE_SBHD_2BSHD=4",
    "NVTE_Fused_Attn_Backend": "NVTE_No_Backend=-1 NVTE_F16_max512_seqlen=0 "
    "NVTE_F16_arbitrary_seqlen=1 NVTE_FP8=2",
    "Float8BlockScaleTensorFormat": "GEMM_READY=0 COMPACT=1",
    "NVTE_Mask_Type": "NVTE_NO_MASK=0 NVTE_PADDING_MASK=1 NVTE_CAUSAL_MASK=2 "
    "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK=5",
    "NVTE_QKV_Layout": "NVTE_SB3HD=0 NVTE_BSHD_BSHD_BSHD=9 NVTE_THD_THD_THD=14 "
    "NVTE_Paged_KV_THD_SBHD_SBHD=24",
    "NVTE_Bias_Type": "NVTE_NO_BIAS=0 NVTE_PRE_SCALE_BIAS=1 NVTE_POST_SCALE_BIAS=2 NVTE_ALIBI=3",
    "NVTE_Softmax_Type": "NVTE_VANILLA_SOFTMAX=0 NVTE_LEARNABLE_SOFTMAX=2",
    "NVTE_Activation_Type": "GELU=0 SREGLU=9",
    "CommOverlapType": "RS=0 AG=1",
    "CommOverlapAlgo": "BULK_OVERLAP_AG=0 EXTERNAL_BULK_OVERLAP_AG=8",
    "DType": "kByte=0 kInt32=2 kFloat32=4 kFloat16=5 kBFloat16=6 kFloat8E4M3=7 kFloat8E5M2=8 "
    "kFloat4E2M1=10",
}


@pytest.mark.parametrize("name", ENUMS)
def test_enumerations(name):
    kind = getattr(tex, name)
    for member in ENUMS[name].split():
        label, _, number = member.partition("=")
        assert kind[label] == int(number) and kind(int(number)) is kind[label]


def test_queries():
    assert tex.get_num_cublas_streams() == 1
    for ask in (tex.get_cublasLt_version, tex.get_cudnn_version):
        assert isinstance(ask(), int) and ask() >= 0
    meta = tex.create_fp8_tensor_meta()
    assert isinstance(meta, tex.FP8TensorMeta) and meta.scale.numel() == 0
    with pytest.raises(NotImplementedError, match="user buffers"):
        tex.CommOverlap()


def test_classes_of_plug_ins():
    class Backend(core.TEFLBackendBase):
        def gelu(self, input, quantizer):
            return "mine"

    backend = Backend()
    assert backend.is_available() and backend.gelu(1, None) == "mine"
    for name in SIGNATURES.keys() - {"gelu"}:
        with pytest.raises(NotImplementedError, match=f"Backend has no {name}$"):
            getattr(backend, name)(1)
    registry = OpRegistry()
    registry.register(OpImpl("gelu", "default.b", BackendImplKind.DEFAULT, backend.gelu))
    module = core.TEFLModule(OpManager(registry))
    assert module.gelu(1, None) == module["gelu"](1, None) == "mine"
    assert module.DType is tex.DType and "113 operators" in repr(module)
    assert core.get_tefl_module() is tex is plugin.get_tefl_module()
    assert core.TEFLModule().silu is tex.silu


def test_registering_imports_no_torch():
    program = """
        import sys
        from transformer_engine.plugin.core import get_manager
        from transformer_engine import plugin
        print(plugin.explain("rmsnorm_fwd"))
        assert len(get_manager().registry.list_operators()) == 113
        assert "torch" not in sys.modules
        import transformer_engine_torch as tex, torch
        assert not [n for n in sys.modules if n.startswith("transformer_engine.plugin.builtin.")]
        assert tex.relu(-torch.ones(2, 2), None).sum() == 0
        from transformer_engine.plugin.core import reset_default_manager
        former = tex.relu
        reset_default_manager()
        assert tex.relu is get_manager().operator("relu") is not former
        assert tex.relu(-torch.ones(2, 2), None).sum() == 0
        assert get_manager().call("get_num_cublas_streams") == 1
    """
    processes.run(program, fresh=True)


def test_operators_of_a_manager_that_was_reset():
    """They go on with that, also where it had not been asked before."""
    program = """
        from transformer_engine.plugin.core import (
            get_manager, reset_default_manager, with_preference)
        former = get_manager()
        op = former.operator("get_num_cublas_streams")
        reset_default_manager()
        assert op() == 1 and get_manager() is not former
        del former
        assert op() == 1
        with with_preference("reference"):
            assert op() == 1
    """
    processes.run(program)


@pytest.mark.parametrize("prefer", ["flagos", "reference"])
def test_the_environment_chooses(prefer):
    program = """
        import os, torch
        import transformer_engine_torch as tex
        from transformer_engine.plugin.core import get_manager
        tex.silu(torch.ones(2, 2), None)
        kind = "reference.torch" if os.environ["TE_FL_PREFER"] == "reference" else "default.native"
        assert get_manager().counts() == {f"silu/{kind}": 1}
    """
    processes.run(program, TE_FL_PREFER=prefer)


def test_first_calls_of_many_threads():
    program = """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        barrier = threading.Barrier(9)

        def imports():
            barrier.wait()
            import transformer_engine_torch as tex
            import torch
            return tex.relu(torch.ones(2, 2), None).sum().item()

        def explains():
            barrier.wait()
            from transformer_engine import plugin
            return str(plugin.explain("relu")).count("priority") * 2.0

        with ThreadPoolExecutor(9) as pool:
            runs = [pool.submit(imports if i % 2 else explains) for i in range(9)]
            assert [run.result(60) for run in runs] == [4.0] * 9
    """
    processes.run(program, fresh=True)
