"""One probability distribution over the target's vocabulary, dense or sparse."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Distribution"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Probabilities of the tokens that can occur; every other token has probability 0.

    `token_ids` None means `probs` is over the whole vocabulary [V]. Otherwise `token_ids` is ascending and
    unique. `probs` is float64 and sums to 1 up to rounding. A one-hot (greedy or looked-up token) holds a
    single entry.
    """

    token_ids: npt.NDArray[np.int32] | None  # [n]
    probs: npt.NDArray[np.float64]  # [n], or [V] when token_ids is None

    @classmethod
    def one_hot(cls, token_id: int) -> Distribution:
        return cls(np.array([token_id], np.int32), np.ones(1))

    def prob(self, token_id: int) -> float:
        """Return the probability of one token."""
        if self.token_ids is None:
            return float(self.probs[token_id])
        at = int(np.searchsorted(self.token_ids, token_id))
        if at < len(self.token_ids) and self.token_ids[at] == token_id:
            return float(self.probs[at])
        return 0.0

    def dense(self, vocab_size: int) -> npt.NDArray[np.float64]:
        """Return the probabilities over the whole vocabulary [V]."""
        if self.token_ids is None:
            return self.probs
        full = np.zeros(vocab_size)
        full[self.token_ids] = self.probs
        return full
