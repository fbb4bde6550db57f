# SPDX-License-Identifier: Apache-2.0
"""Write the stub of transformer_engine_torch, and the table of its operators in docs/operators.md.

Signatures and first sentences are those of this library's implementations, which the extension has
to be built for. With --check nothing is written, and the exit status says whether both are up to
date.
"""

import inspect
import sys

from page_tables import ROOT, keep, rows

sys.path.insert(0, str(ROOT))
import transformer_engine_torch as tex
from transformer_engine.plugin import builtin
from transformer_engine.plugin.core import ops

STUB = ROOT / "transformer_engine_torch/__init__.pyi"
SCRIPT = "tools/tex_stubs.py"
HEAD = f"""\
# SPDX-License-Identifier: Apache-2.0
# fmt: off
# Made by {SCRIPT}.
from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor, dtype

from transformer_engine.plugin.core import ops
from transformer_engine.plugin.core.ops import {{names}}
from transformer_engine.pytorch.tensor import {{quantizers}}

def flash_attention{{flash}}: ...
"""
SHORT = {
    "transformer_engine.plugin.core.": "", "collections.abc.": "", "typing.": "", "torch._C.": "",
    "torch.": "",
}  # fmt: skip


def _type(annotation):
    """Return the text of an annotation as the stub writes it."""
    named = isinstance(annotation, type) and not hasattr(annotation, "__args__")
    text = f"{annotation.__module__}.{annotation.__qualname__}" if named else str(annotation)
    text = "None" if annotation is None else text.removeprefix("builtins.")
    for long, short in SHORT.items():
        text = text.replace(long, short)
    return text


def _signature(operator):
    """Return the text of an operator's signature."""
    signature = inspect.signature(operator)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    types = {p.name: _type(p.annotation) for p in signature.parameters.values()}
    parts, keywords = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not keywords:
            keywords = True
            parts.append("*")
        default = "" if p.default is p.empty else f" = {p.default!r}"
        parts.append(f"{p.name}: {types[p.name]}{default}")
    return f"({', '.join(parts)}) -> {_type(signature.return_annotation)}"


def _operators():
    """Return (name, signature, first sentence) of all operators."""
    for name in builtin.OPERATORS:
        operator = builtin_of(name)
        first = inspect.getdoc(operator).split("\n\n")[0].replace("\n", " ")
        yield name, _signature(operator), first


def builtin_of(name):
    """Return an operator, not what `transformer_engine_torch` adds to it."""
    return tex.get_default_manager().operator(name)


def main():
    """Write or check both; return an exit status."""
    found = list(_operators())
    quantizers = [name for name in tex.__all__ if name.endswith("Quantizer")]
    names = [n for n in tex.__all__ if n in ops.__all__ and n in vars(ops)]
    head = HEAD.format(
        names=", ".join(f"{n} as {n}" for n in sorted(names)),
        flash=_signature(tex.flash_attention).replace("-> Any", "-> torch.nn.Module"),
        quantizers=", ".join(f"{n} as {n}" for n in quantizers),
    )
    text = head + "".join(f"def {name}{signature}: ...\n" for name, signature, _ in found)
    table = rows(("operator", "what it does"), [(f"`{n}{s}`", doc) for n, s, doc in found])
    status = keep("docs/operators.md", SCRIPT, table)
    if STUB.exists() and STUB.read_text(encoding="utf-8") == text:
        return status
    if "--check" in sys.argv[1:]:
        print(f"{STUB.relative_to(ROOT)} is not up to date: run python {SCRIPT}")
        return 1
    STUB.write_text(text, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
