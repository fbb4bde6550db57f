# SPDX-License-Identifier: Apache-2.0
"""Operators by the names of NVIDIA Transformer Engine's native module.

Each is a C object that calls the implementation in force (docs/plugins.md): this library's own, or
one that a plug-in has registered. Further names are enumerations and classes that operators take.
What is not built yet raises when it is called.
"""

import inspect
from typing import Any

from transformer_engine.common import absent, config
from transformer_engine.plugin.builtin import OPERATORS
from transformer_engine.plugin.core import ops
from transformer_engine.plugin.core.manager import BINDERS, get_default_manager

_QUANTIZERS = (
    "Float8Quantizer Float8CurrentScalingQuantizer Float8BlockQuantizer MXFP8Quantizer "
    "NVFP4Quantizer"
)
_BY_PARAMS = ("get_fused_attn_backend",)
"""Operators that this module gives another form, too."""
_LAZY = dict.fromkeys(_QUANTIZERS.split(), "transformer_engine.pytorch.tensor")

globals().update({name: getattr(ops, name) for name in ops.NAMES})
__getattr__, __dir__ = absent.attach(globals(), lazy=_LAZY)
__all__ = [
    "bind_operators",
    "flash_attention",
    *_LAZY,
    *ops.NAMES,
    *OPERATORS,
    *absent.names_of(__name__),
]


def bind_operators() -> None:
    """Take the operators of the manager of the process; `reset_default_manager` does so."""
    manager = get_default_manager()
    operators = {name: manager.operator(name) for name in OPERATORS if name not in _BY_PARAMS}
    globals().update(operators, _manager=manager)


bind_operators()
BINDERS[:] = [bind_operators]


def flash_attention(*args: Any, **kwargs: Any) -> Any:
    """Make an attention module of the class that the operator `get_flash_attention_class` gives.

    The arguments are those of `FlashAttentionBase`.
    """
    return get_default_manager().operator("get_flash_attention_class")()(*args, **kwargs)


flash_attention.__signature__ = inspect.signature(ops.FlashAttentionBase).replace(
    return_annotation=ops.FlashAttentionBase
)


def get_fused_attn_backend(*given: Any, **named: Any) -> Any:
    """Which kind of fused attention takes a call, as the implementation in force says.

    Of one `FusedAttentionParams` (`pytorch.attention.dot_product_attention.utils`) the kind and a
    message, which is "" where there is one, else why there is none. Of the arguments of the
    operator of that name, which plug-ins implement, its answer alone.
    """
    from transformer_engine.plugin.builtin import queries

    ask = get_default_manager().operator("get_fused_attn_backend")
    asked = (*given, *named.values())
    if len(asked) != 1 or not set(named) <= {"fused_attn_params"}:
        return ask(*given, **named)
    (params,) = asked
    if not isinstance(params, queries.FusedAttentionParams):
        raise TypeError(
            f"get_fused_attn_backend: {type(params).__name__}, expected a FusedAttentionParams"
        )
    kind = ask(**params.scalars())
    none = kind == ops.NVTE_Fused_Attn_Backend.NVTE_No_Backend
    return kind, queries.why_none(params) if none else ""


if config.TE_PLUGIN.get():  # it may put another module in place of this one
    from transformer_engine.plugin.core import replacement

    replacement.load()
