# SPDX-License-Identifier: Apache-2.0
"""Packed sequences of random lengths, and the same tokens as a padded batch."""

import numpy as np
import torch


class Packing:
    """Where the sequences of one side lie: `lengths`, `offsets` [batch + 1], and `tokens` in all.

    With gaps there are tokens of no sequence before, between and behind them.
    """

    def __init__(self, rng, batch, longest, *, gaps=False, lengths=None):
        if lengths is None:
            some = [0, min(1, longest), longest, int(rng.integers(0, longest + 1))]
            lengths = [int(rng.choice(some)) for _ in range(batch)]
        room = rng.integers(0, 4, batch + 1) if gaps else np.zeros(batch + 1, dtype=int)
        starts = np.cumsum([room[0], *(n + g for n, g in zip(lengths, room[1:], strict=True))])
        self.lengths, self.offsets = lengths, [int(n) for n in starts]
        self.tokens = self.offsets[-1] + (2 if gaps else 0)
        self.batch, self.longest = batch, longest

    def vector(self, name, device="cpu"):
        """`lengths` or `offsets` as operators read them."""
        return torch.tensor(getattr(self, name), dtype=torch.int32, device=device)

    def cumulative(self, device="cpu"):
        """Sums of the lengths, [batch + 1]: the offsets without gaps."""
        sums = np.cumsum([0, *self.lengths])
        return torch.tensor(sums, dtype=torch.int32, device=device)

    def rows(self):
        """(sequence, its tokens in the packed tensor) of each sequence."""
        pairs = zip(self.offsets, self.lengths, strict=False)
        return [(b, slice(start, start + n)) for b, (start, n) in enumerate(pairs)]

    def owned(self):
        """Bool [tokens]: which tokens are of a sequence."""
        mine = torch.zeros(self.tokens, dtype=torch.bool)
        for _, where in self.rows():
            mine[where] = True
        return mine

    def padded(self, packed, fill=0.0):
        """[tokens, ...] as [batch, longest, ...], with `fill` behind the lengths."""
        made = packed.new_full((self.batch, self.longest, *packed.shape[1:]), fill)
        for b, where in self.rows():
            made[b, : self.lengths[b]] = packed[where]
        return made

    def packed(self, padded, fill=0.0):
        """The inverse, with `fill` in tokens of no sequence."""
        made = padded.new_full((self.tokens, *padded.shape[2:]), fill)
        for b, where in self.rows():
            made[where] = padded[b, : self.lengths[b]]
        return made
