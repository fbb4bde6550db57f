# SPDX-License-Identifier: Apache-2.0
"""Calls of operators on the CPU that run by their definition in torch, beside those of the C code.

The definitions are `transformer_engine.plugin.definitions`.
"""

import contextlib
import copy

import torch
from comparators import assert_bits

from transformer_engine import _core
from transformer_engine.plugin import definitions


@contextlib.contextmanager
def by_definition(*ops, within=contextlib.nullcontext):
    """A block in which these operators run by their definition on the CPU.

    One of them must. Each runs in a block of `within()`. Yields a list of the operators that have
    run.
    """
    ran = []

    def counted(op, function):
        def run(fields):
            ran.append(op)
            with within():
                return function(fields)

        return run

    functions = definitions.functions()
    taken = {op: counted(op, functions[op]) for op in ops}
    _core.register_backend("by definition", _core.DEVICE_CPU, 1 << 20, taken)
    try:
        yield ran
    finally:
        _core.unregister_backend("by definition")
    assert ran, f"no {' or '.join(ops)} ran by definition"


def both(op, *args, within=contextlib.nullcontext, **fields):
    """(arguments after a call by definition, the same after one of the C code).

    Each call gets copies of the arguments; tensors of one memory share that in the copies too.
    """
    called = [copy.deepcopy((args, fields)) for _ in range(2)]
    run = getattr(_core, op)
    with by_definition(op, within=within):
        run(*called[0][0], **called[0][1])
    run(*called[1][0], **called[1][1])
    return called


def _tensors(called):
    args, fields = called
    named = {f"argument {number}": value for number, value in enumerate(args)} | fields
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def _memory(tensor):
    """All elements of the memory that a tensor lies in, what is around its own too."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def assert_defined(op, *args, but=(), within=contextlib.nullcontext, **fields):
    """A call by definition leaves the bits of the C code in all memory of its arguments.

    A NaN in high precision equals every other one. `but` names fields that are compared elsewhere;
    returns the two of each. `within` as of `by_definition`.
    """
    found, expected = map(_tensors, both(op, *args, within=within, **fields))
    for name, tensor in found.items():
        if name in but:
            continue
        any_nan = tensor.is_floating_point() and tensor.element_size() > 1
        try:
            assert_bits(_memory(tensor), _memory(expected[name]), any_nan=any_nan)
        except AssertionError as error:
            error.add_note(f"{op}: {name}")
            raise
    return {name: (found[name], expected[name]) for name in but}
