"""Logit transforms of one request, applied alike to drafted and target rows. (Contract; being filled in.)"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dspark.request import SamplingParams
from dspark.sampling.distribution import Distribution

__all__ = ["TokenSampler"]


class TokenSampler:
    """Turns logits of one request into distributions and tokens.

    Holds the request's parameters, its seed and its committed token history. Pure otherwise: the same calls give the
    same answers, whatever else runs.
    """

    def __init__(
        self, params: SamplingParams, *, seed: int, prompt_ids: Sequence[int], vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        raise NotImplementedError

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens to the history."""
        raise NotImplementedError

    def greedy_token(
        self, logits: npt.NDArray[np.float32], *, drafted: Sequence[int] = (), token_ids: npt.NDArray[np.int32] | None = None
    ) -> int:
        """Return the arg-max token id after the history transforms; `drafted` are uncommitted tokens in between."""
        raise NotImplementedError

    def distribution(
        self, logits: npt.NDArray[np.float32], *, drafted: Sequence[int] = (), token_ids: npt.NDArray[np.int32] | None = None
    ) -> Distribution:
        """Return the distribution after every transform; `token_ids` maps reduced-vocabulary logits [Vd]."""
        raise NotImplementedError

    def draw(self, distribution: Distribution, *, position: int, purpose: str) -> int:
        """Draw one token with the noise of (seed, position, purpose)."""
        raise NotImplementedError
