"""Logit transforms of one request, applied alike to drafted and target rows.

Order: history transforms (`history.py`: bad words, end tokens and what a grammar forbids masked, then
repetition, frequency and presence penalty), temperature, top-k, top-p, min-p (`truncation.py`). The history
transforms apply at temperature 0 too. The likeliest token always survives; among equals the lowest id counts as
the likelier one.

How a token is drawn depends on whether the client named a seed:

* named: `gumbel.py`'s race, the same for drafted and target tokens, so that the output is a function of the
  seed and the target alone, whatever was drafted (verification rule `coupled`);
* drawn: one uniform number per decision and inversion of the cumulative distribution (verification rules
  `block` and `rejection`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dspark.errors import NonFiniteError, RequestError
from dspark.request import Grammar, SamplingParams
from dspark.sampling.distribution import Distribution
from dspark.sampling.gumbel import gumbel_argmax
from dspark.sampling.history import TokenHistory
from dspark.sampling.philox import Purpose, uniform_scalar
from dspark.sampling.truncation import truncate

__all__ = ["SampledRule", "TokenSampler", "VerificationRule", "inverse_cdf", "scale_of"]

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

VerificationRule = Literal["greedy", "block", "rejection", "coupled"]
SampledRule = Literal["auto", "block", "rejection", "coupled"]

_BLOCK = 256  # entries summed at once by `inverse_cdf`
_STEEPEST = 1e37  # largest 1 / temperature; keeps 0 * scale finite in float32


class TokenSampler:
    """Turns logits of one request into distributions and tokens.

    Holds the request's parameters, its seed and its committed token history. Pure otherwise: the same calls
    give the same answers, whatever else runs. Rows are float32 [V], or [Vd] with a map `token_ids` [Vd] of
    distinct target token ids (ascending costs nothing; any other order a sort per row). A row is never
    written to.

    Arguments:
        params: the request's.
        seed: 64-bit; the named one, or the one drawn at submission.
        prompt_ids: the prompt.
        vocab_size: V of the target.
        eos_ids: the model's own end tokens.
        rule: how sampled drafts are judged; "auto" = "coupled" for a named seed, else "block".
        grammar: what the answer must follow, if anything; this sampler's own from now on.

    Raises:
        RequestError: when a token id of the request is outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        prompt_ids: Sequence[int],
        vocab_size: int,
        eos_ids: Sequence[int],
        rule: SampledRule = "auto",
        grammar: Grammar | None = None,
    ) -> None:
        _check_ids("end_id", () if params.end_id in (None, -1) else (params.end_id or 0,), vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        for word in params.bad_words_ids:
            _check_ids("bad_words", word, vocab_size)
        _check_ids("input_ids", prompt_ids, vocab_size)
        self.params = params
        self.seed = seed
        if rule == "auto":
            rule = "block" if params.seed is None else "coupled"
        self._rule: VerificationRule = "greedy" if params.greedy else rule
        self._coupled = rule == "coupled"
        self.vocab_size = vocab_size
        self.end_ids = _end_ids(params, eos_ids)  # tokens that end the answer
        self._history = TokenHistory(
            params, prompt_ids=prompt_ids, vocab_size=vocab_size, end_ids=self.end_ids, grammar=grammar
        )

    @property
    def rule(self) -> VerificationRule:
        """The verification rule that fits how this request's drafts are drawn."""
        return self._rule

    @property
    def num_tokens(self) -> int:
        """Committed tokens, prompt and output."""
        return self._history.num_tokens

    @property
    def num_outputs(self) -> int:
        """Committed output tokens."""
        return self._history.num_outputs

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens to the history."""
        self._history.commit(token_ids)

    def grammar_ends(self, drafted: Sequence[int] = ()) -> bool:
        """Return whether the grammar leaves nothing but the end behind `drafted` uncommitted tokens."""
        return self._history.grammar_ends(drafted)

    def alters(self, num_drafted: int = 0) -> bool:
        """Return whether the history changes the row behind `num_drafted` drafted tokens.

        Where it does not and the temperature is 0, the arg-max of the logits is the answer.
        """
        return self._history.alters(num_drafted)

    def greedy_token(
        self,
        logits: Float32,
        *,
        drafted: Sequence[int] = (),
        token_ids: Int32 | None = None,
        argmax: int | None = None,
    ) -> int:
        """Return the arg-max token id after the history transforms, the lowest among equals.

        Arguments:
            logits: [V] or [Vd].
            drafted: uncommitted tokens between the history and this row.
            token_ids: [Vd] map of a reduced vocabulary.
            argmax: arg-max token id of `logits` of a finite row, where known; then an unaltered row is not
                read at all.

        Raises:
            NonFiniteError: for NaN, +inf or nothing but -inf in a row that was read.
        """
        if argmax is not None and not self._history.alters(len(drafted)):
            return argmax
        row = self._altered(logits, drafted, token_ids)
        top = _finite_max(row)
        if token_ids is None:
            return int(row.argmax())
        return int(token_ids[row == top].min())

    def distribution(
        self, logits: Float32, *, drafted: Sequence[int] = (), token_ids: Int32 | None = None
    ) -> Distribution:
        """Return the distribution after every transform; one-hot at temperature 0.

        Arguments and errors are those of `greedy_token`.
        """
        if self.params.greedy:
            return Distribution.one_hot(self.greedy_token(logits, drafted=drafted, token_ids=token_ids))
        row = self._scaled(logits, drafted, token_ids)
        weights = np.exp(row.log_weights, dtype=np.float64)
        weights /= weights.sum()
        return Distribution(row.token_ids, weights)

    def draw(self, distribution: Distribution, *, position: int, purpose: Purpose | str) -> int:
        """Draw one token with the noise of (seed, position, purpose).

        With a named seed the noise is that of (seed, position, token) for every purpose. Otherwise drafts
        that are drawn again at the same position after a rejection get fresh noise.

        Arguments:
            distribution: non-empty.
            position: absolute position that the token will have.
            purpose: a `Purpose` or its lower-case name ("draft", "sample", ...).
        """
        if distribution.token_ids is not None and len(distribution.token_ids) == 1:
            return int(distribution.token_ids[0])
        if self._coupled:
            with np.errstate(divide="ignore"):
                log_probs = np.log(distribution.probs)
            return gumbel_argmax(log_probs, distribution.token_ids, seed=self.seed, position=position)
        entry = inverse_cdf(distribution.probs, self.uniform(position, purpose))
        return entry if distribution.token_ids is None else int(distribution.token_ids[entry])

    def sample(
        self, logits: Float32, *, position: int, drafted: Sequence[int] = (), argmax: int | None = None
    ) -> int:
        """Draw the target's own token of one row; plain decoding, and what `coupled` compares drafts with.

        Arguments:
            logits: [V].
            position: absolute position that the token will have.
            drafted, argmax: as for `greedy_token`.

        Raises:
            NonFiniteError: as `greedy_token`.
        """
        if self.params.greedy:
            return self.greedy_token(logits, drafted=drafted, argmax=argmax)
        row = self._scaled(logits, drafted, None)
        if self._coupled:
            return gumbel_argmax(row.log_weights, row.token_ids, seed=self.seed, position=position)
        entry = inverse_cdf(np.exp(row.log_weights), self.uniform(position, Purpose.SAMPLE))
        return entry if row.token_ids is None else int(row.token_ids[entry])

    def uniform(self, position: int, purpose: Purpose | str) -> float:
        """Return the uniform number in (0, 1) of one decision."""
        purpose = Purpose.of(purpose)
        # A position may be drafted more than once, but only once from each anchor: the distance keeps the draws
        # apart. Block verification also looks at drafts behind the last one that is accepted.
        again = purpose is Purpose.DRAFT or (purpose is Purpose.ACCEPT and self._rule == "block")
        lane = max(position - self._history.num_tokens, 0) if again else 0
        return uniform_scalar(self.seed, position, purpose, lane)

    def _altered(self, logits: Float32, drafted: Sequence[int], token_ids: Int32 | None) -> Float32:
        if not self._history.alters(len(drafted)):
            return logits
        _finite_max(logits)
        entry_of_token = None if token_ids is None else _inverse(token_ids, self.vocab_size)
        return self._history.apply(logits, drafted, entry_of_token)

    def _scaled(self, logits: Float32, drafted: Sequence[int], token_ids: Int32 | None) -> _Row:
        params = self.params
        row = self._altered(logits, drafted, token_ids)
        scaled = row - _finite_max(row)
        with np.errstate(over="ignore"):  # what overflows is -inf: probability 0, as it would be anyway
            scaled *= np.float32(scale_of(params.temperature))
        kept = truncate(scaled, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        if kept is None:
            ids = token_ids
        else:
            scaled = scaled[kept]
            ids = kept.astype(np.int32) if token_ids is None else token_ids[kept]
        if token_ids is not None and ids is not None and (ids[1:] < ids[:-1]).any():
            order = np.argsort(ids)
            ids, scaled = ids[order], scaled[order]
        return _Row(ids, scaled)


@dataclass(frozen=True, slots=True)
class _Row:
    """What is left of a row: log weights [n] up to a constant, largest 0, and their tokens (None = all V)."""

    token_ids: Int32 | None
    log_weights: Float32


def scale_of(temperature: float) -> float:
    """Return what logits are multiplied with at a temperature above 0."""
    return min(1.0 / temperature, _STEEPEST)


def inverse_cdf(weights: npt.NDArray[np.floating[Any]], u: float) -> int:
    """Return the entry whose share of the running total holds `u`; never one of weight 0.

    Arguments:
        weights: [n] >= 0, not all 0, any total.
        u: in (0, 1).
    """
    start = 0
    if len(weights) > 16 * _BLOCK:
        # Whole blocks first: a running total over a whole vocabulary is a long chain of dependent additions.
        starts = np.arange(0, len(weights), _BLOCK)
        sums = np.add.reduceat(weights, starts, dtype=np.float64)
        totals = sums.cumsum()
        rest = u * totals[-1]
        block = _entry_at(totals, rest)
        rest -= totals[block] - sums[block]
        start = block * _BLOCK
        return start + _entry_at(weights[start : start + _BLOCK].cumsum(dtype=np.float64), rest)
    totals = weights.cumsum(dtype=np.float64)
    return _entry_at(totals, u * totals[-1])


def _entry_at(totals: npt.NDArray[np.float64], mass: float) -> int:
    """Return the first entry whose running total exceeds `mass`.

    By rounding there may be none: then the last of any weight.
    """
    entry = int(np.searchsorted(totals, mass, side="right"))
    if entry == len(totals):
        entry = int(np.searchsorted(totals, totals[-1], side="left"))
    return entry


def _finite_max(row: Float32) -> np.float32:
    with np.errstate(invalid="ignore"):
        top: np.float32 = row.max()
    if not np.isfinite(top):
        raise NonFiniteError("the logits must be finite, and the model gave NaN, +inf or no possible token")
    return top


def _end_ids(params: SamplingParams, eos_ids: Sequence[int]) -> frozenset[int]:
    ends = set(params.stop_token_ids)
    if not params.ignore_eos:
        if params.end_id is None:
            ends.update(eos_ids)
        elif params.end_id >= 0:
            ends.add(params.end_id)
    return frozenset(ends)


def _check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if len(token_ids) and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError(field, wrong, f"token ids from 0 to {vocab_size - 1}")


_INVERSES: dict[
    int, tuple[Int32, Int32]
] = {}  # by id() of the map, which is held so that its id stays its own


def _inverse(token_ids: Int32, vocab_size: int) -> Int32:
    """Return the entry of every token in a reduced vocabulary, [V] int32, -1 where there is none.

    Kept for the few maps that a process has; a map must not change once used.
    """
    held = _INVERSES.get(id(token_ids))
    if held is not None and len(held[1]) == vocab_size:
        return held[1]
    inverse = np.full(vocab_size, -1, np.int32)
    inverse[token_ids] = np.arange(len(token_ids), dtype=np.int32)
    if len(_INVERSES) >= 4:
        _INVERSES.pop(next(iter(_INVERSES)))
    _INVERSES[id(token_ids)] = (token_ids, inverse)
    return inverse
