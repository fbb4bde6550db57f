# SPDX-License-Identifier: Apache-2.0
"""``te_softmax`` and its gradient by the operators `scaled_*softmax_*`."""

from typing import Any

from transformer_engine.plugin.slots.fields import Choices, Fields, NotTakenError, written

_PLAIN, _MASKED = "scaled_softmax", "scaled_masked_softmax"
_TRIANGLE = "scaled_upper_triang_masked_softmax"
_ALIGNED = "scaled_aligned_causal_masked_softmax"


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Operators that a softmax is, without their last word."""
    *_, queries, keys = fields["input"].shape
    if any(fields[name] is not None for name in ("bias", "sink", "rng")):
        return ()
    left, right = fields["window_left"], fields["window_right"]
    if fields["mask"] is not None:
        shared = fields["mask"].shape[1] == 1  # by all heads
        return (_MASKED,) if shared and left < 0 and right < 0 else ()
    if left >= 0 or right > 0:
        return ()
    if right < 0:
        return (_PLAIN,)
    if fields["diagonal"] != keys - queries:
        return ()
    return (_TRIANGLE, _ALIGNED) if queries == keys else (_ALIGNED,)


def _made(
    choices: Choices, kinds: tuple[str, ...], way: str, tensors: tuple, *more: Any
) -> tuple[str, Any]:
    """The first of the operators that somebody has and that is taken, and what it makes."""
    names = [f"{kind}_{way}" for kind in kinds]
    for i, kind in enumerate(kinds):
        given = [t.flatten(0, 1) if kind == _TRIANGLE else t for t in tensors]
        made = choices.followed(names[i], *names[i + 1 :])(*given, *more)
        if made is not NotImplemented:
            return names[i], made
    raise NotTakenError


def forward(choices: Choices, fields: Fields) -> None:
    """Softmax of scores [batch, heads, queries, keys]."""
    scores, mask, kinds = fields["input"], fields["mask"], _kinds(fields)
    if not kinds:
        choices.unexpressed(next(iter(choices)))
    if mask is not None:
        mask = mask.expand(*mask.shape[:2], *scores.shape[2:]).contiguous()
    more = (fields["scale"],) if mask is None else (mask, fields["scale"])
    name, made = _made(choices, kinds, "forward", (scores,), *more)
    written(name, "the result", fields["output"], made)
    written(name, "the result", fields["probabilities"], made)


def backward(choices: Choices, fields: Fields) -> None:
    """Its gradient, one function of the probabilities whatever was masked."""
    grad, probabilities = fields["grad_output"], fields["probabilities"]
    if fields["rng"] is not None or fields["sink"] is not None:
        choices.unexpressed(next(iter(choices)))
    square = grad.shape[2] == grad.shape[3]
    kinds = _PLAIN, _MASKED, _ALIGNED, *((_TRIANGLE,) if square else ())
    name, made = _made(choices, kinds, "backward", (grad, probabilities), fields["scale"])
    written(name, "the gradient", fields["grad_input"], made)
