# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of an operator: the exception, its text, and that nothing was written before."""

import pytest
import torch

from transformer_engine import _core


def placed(value, device):
    """A tensor on the device, with the strides that it has; what need not move as it is."""
    if not isinstance(value, torch.Tensor) or value.device.type == device:
        return value
    memory = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return memory.copy_(value)


def check_refused(op, device, case, good, *outputs):
    """Call an operator with something wrong.

    Parameters
    ----------
    op : str
        Name of the operator; each text of an error begins with it.
    device : str
        Where all tensors are brought.
    case : tuple
        Exception, pattern of its text behind the name, changes to the arguments by name.
    good : dict
        Arguments of a call that is right, by name in the order of the signature; the first one is
        given by position.
    outputs : Poisoned
        Memory among the arguments that must stay as it is.
    """
    exception, text, changes = case
    first, *named = {**good, **changes}.items()
    with pytest.raises(exception, match=f"{op}: {text}"):
        getattr(_core, op)(
            placed(first[1], device), **{name: placed(value, device) for name, value in named}
        )
    assert all(output.unwritten() for output in outputs), "an output was written"
