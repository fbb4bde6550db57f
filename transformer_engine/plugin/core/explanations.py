# SPDX-License-Identifier: Apache-2.0
"""Results of `OpManager.explain`."""

from typing import NamedTuple

from transformer_engine.plugin.core.policy import SelectionPolicy
from transformer_engine.plugin.core.predicates import predicate_of
from transformer_engine.plugin.core.types import OpImpl


class Candidate(NamedTuple):
    """An implementation as a policy sees it."""

    impl: OpImpl
    refused: str  # why it is not used; "": it may be
    calls: int  # how often it was called
    said: str = ""  # what its `supports` said against the last call that it did not take


class Explanation(NamedTuple):
    """Explanation of what an operator calls, and why; ``str()`` of it is a table."""

    op_name: str
    policy: SelectionPolicy
    candidates: tuple[Candidate, ...]  # in the order in which they are asked, then the others

    @property
    def selected(self) -> OpImpl | None:
        """The one that is asked first; None: a call raises."""
        return next((found.impl for found in self.candidates if not found.refused), None)

    def __str__(self) -> str:
        lines = [f"{self.op_name} under {self.policy.fingerprint()}"]
        if not self.candidates:
            lines.append("    nobody has registered an implementation")
        number = 0
        for impl, refused, calls, said in self.candidates:
            number += not refused
            place = "-" if refused else str(number)
            takes = "" if predicate_of(impl) is None else ", of calls that it takes"
            takes += said and f" (not the last other one: {said})"
            why = refused or f"priority {impl.priority}{takes}, called {calls} times"
            lines.append(f"    {place:>2}  {impl.impl_id:24} {why}")
        return "\n".join(lines)
