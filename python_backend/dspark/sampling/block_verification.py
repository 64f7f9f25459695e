"""Block verification of drafted chains (Sun et al., arXiv 2403.10444): how many drafts are accepted is decided over the
whole block, by joint weights, and never fewer on average than token by token.

    w_0 = 1, w_k = min(w_{k-1} * p_k(x_k) / q_k(x_k), 1)
    S_k = sum_x max(w_k * p_{k+1}(x) - q_{k+1}(x), 0)
    h_k = S_k / (S_k + 1 - w_k) for 0 < k < l, h_l = w_l

The accepted length t is the largest k with u_k < h_k, else 0. The token behind it is drawn from
max(w_t * p_{t+1} - q_{t+1}, 0), renormalised, and from p_{l+1} where t = l. Then P(t >= k | x_1..x_k) = w_k, for
every l that is a stopping time: whether l > k may depend on x_1..x_k, never on later drafts. The proof is in
docs/decisions.md.

p is needed at all drafts, not only up to the first refused one. A row that cannot be read ends the block in front of
it; who gets there has all drafts up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dspark.errors import NonFiniteError, RequestError
from dspark.sampling.distribution import Distribution
from dspark.sampling.philox import Purpose
from dspark.sampling.residual import residual
from dspark.sampling.transforms import TokenSampler, inverse_cdf

__all__ = ["BlockVerdict", "next_weight", "threshold", "verify_block"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BlockVerdict:
    """How many drafts were accepted, and what is behind them."""

    accepted: int  # t
    replacement: (
        int | None
    )  # the token that replaces draft t + 1; None = t = l, or the row behind cannot be read
    weight: float  # w_t
    soft_labels: tuple[float, ...]  # P(draft k accepted | those before it were), up to draft min(t + 1, l)


def next_weight(weight: float, p: float, q: float) -> float:
    """Return w_k of w_{k-1} and of what p_k and q_k give the draft."""
    joint = weight * p
    if joint < q:
        return joint / q
    return 1.0 if joint > 0.0 else 0.0


def threshold(weight: float, left: float) -> float:
    """Return h_k of w_k and S_k; 1 where neither leaves anything: then the next draft is accepted in any case."""
    total = left + 1.0 - weight
    return left / total if total > 0.0 else 1.0


def verify_block(
    sampler: TokenSampler,
    logits: Float32,
    drafts: Sequence[int],
    distributions: Sequence[Distribution | None],
    *,
    position: int,
    soft_labels: bool = False,
) -> BlockVerdict:
    """Return how many drafts of a chain are accepted.

    Arguments:
        sampler: the request's, committed up to and including the anchor.
        logits: [1+l, V]; the last row is not read.
        drafts: l >= 1 token ids.
        distributions: [l] q_k, None for a one-hot one.
        position: absolute position of the first draft.

    Raises:
        NonFiniteError, RequestError: of the row behind the anchor.
    """
    block = _Block.read(sampler, logits, drafts, distributions)
    accepted = next(
        (
            k
            for k in range(block.verify_len, 0, -1)
            if block.accepts(k, sampler.uniform(position + k - 1, Purpose.ACCEPT))
        ),
        0,
    )
    labels, weight = block.labels(accepted) if soft_labels else (), block.weights[accepted]
    if accepted == block.verify_len:
        return BlockVerdict(accepted, None, weight, labels)
    p = block.targets[accepted]
    weights = block.residual(accepted) if block.left(accepted) > 0.0 else p.probs
    entry = inverse_cdf(weights, sampler.uniform(position + accepted, Purpose.REPLACE))
    return BlockVerdict(accepted, entry if p.token_ids is None else int(p.token_ids[entry]), weight, labels)


class _Block:
    """p, w and what is left of p along one chain, as far as a draft can be accepted."""

    def __init__(self, drafts: Sequence[int], distributions: Sequence[Distribution | None]) -> None:
        self.targets: list[Distribution] = []  # p_1, p_2, ...
        self.weights = [1.0]  # w_0, w_1, ...
        self._drafts, self._distributions = drafts, distributions
        self._left: dict[int, float] = {}
        self._scratch = np.empty(0)  # a fresh array for every row costs as much as its sum

    @classmethod
    def read(
        cls,
        sampler: TokenSampler,
        logits: Float32,
        drafts: Sequence[int],
        distributions: Sequence[Distribution | None],
    ) -> _Block:
        """Read rows up to the first draft of weight 0, behind which nothing is accepted."""
        block = cls(drafts, distributions)
        for k, (draft, q) in enumerate(zip(drafts, distributions, strict=True)):
            try:
                p = sampler.distribution(logits[k], drafted=drafts[:k])
            except (NonFiniteError, RequestError):
                if k == 0:
                    raise
                break
            block.targets.append(p)
            drawn_with = 1.0 if q is None else q.prob(draft)
            block.weights.append(next_weight(block.weights[-1], p.prob(draft), drawn_with))
            if block.weights[-1] == 0.0:
                break
        return block

    @property
    def verify_len(self) -> int:
        """Drafts that can be accepted, and the one of weight 0 behind them, where there is one."""
        return len(self.targets)

    def residual(self, k: int) -> Float64:
        """Return max(w_k * p_{k+1} - q_{k+1}, 0) on the support of p_{k+1}."""
        return residual(self.targets[k], self._distributions[k], self._drafts[k], self.weights[k])

    def left(self, k: int) -> float:
        """Return S_k, the mass of `residual`."""
        left = self._left.get(k)
        if left is None:
            p = self.targets[k]
            if len(self._scratch) != len(p.probs):
                self._scratch = np.empty(len(p.probs))
            over = residual(p, self._distributions[k], self._drafts[k], self.weights[k], out=self._scratch)
            left = self._left[k] = float(over.sum())
        return left

    def accepts(self, k: int, u: float) -> bool:
        """Return whether u < h_k, k >= 1; h_k is never above w_k, so that S_k is summed up for few rows."""
        weight = self.weights[k]
        if not u < weight or k == self.verify_len:
            return u < weight
        return u < threshold(weight, self.left(k))

    def labels(self, accepted: int) -> tuple[float, ...]:
        """Return P(t >= k + 1 | t >= k, x_1..x_k) = sum_x min(w_k * p, q) / w_k of all k <= t that have a draft."""
        last = min(accepted + 1, self.verify_len)
        return tuple(max(0.0, 1.0 - self.left(k) / self.weights[k]) for k in range(last))
