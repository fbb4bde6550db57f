# SPDX-License-Identifier: Apache-2.0
"""Check the stub of transformer_engine_torch, and write the table in docs/operators.md.

The stub is the list of signatures (`plugin.builtin.signatures`): functions that have a signature of
their own must have the same, which this script prints where they do not. First sentences are those
of the implementations, which the extension has to be built for. With --check nothing is written.
The exit status says whether both are up to date.
"""

import inspect
import sys

from page_tables import ROOT, keep, rows

sys.path.insert(0, str(ROOT))
import transformer_engine_torch as tex
from transformer_engine.common import absent
from transformer_engine.plugin import builtin
from transformer_engine.plugin.builtin import signatures
from transformer_engine.plugin.core import ops

STUB = ROOT / "transformer_engine_torch/__init__.pyi"
SCRIPT = "tools/tex_stubs.py"
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


def _signature(signature):
    """Return the text of a signature."""
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
        yield name, _signature(inspect.signature(operator)), first


def builtin_of(name):
    """Return an operator, not what `transformer_engine_torch` adds to it."""
    return tex.get_default_manager().operator(name)


def main():
    """Write or check both; return an exit status."""
    found = list(_operators())
    table = rows(("operator", "what it does"), [(f"`{n}{s}`", doc) for n, s, doc in found])
    status = keep("docs/operators.md", SCRIPT, table)
    own = [("flash_attention", _signature(inspect.signature(tex.flash_attention)))]
    lacking = [
        f"def {name}{text}: ..."
        for name, text in (*own, *(each[:2] for each in found))
        if text != _signature(signatures.signature(name))
    ]
    exported = [n for n in tex.__all__ if n in ops.__all__ or n.endswith("Quantizer")]
    exported = [f"{n} as {n}" for n in exported if n not in absent.names_of(tex.__name__)]
    text = STUB.read_text(encoding="utf-8")
    lacking += [name for name in exported if name not in text]
    for line in lacking:
        print(f"{STUB.relative_to(ROOT)} lacks: {line}")
    return 1 if lacking else status


if __name__ == "__main__":
    sys.exit(main())
