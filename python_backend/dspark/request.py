"""What a caller asks for and what it gets back: values only, no engine, no server.

Names are those of the wire contract, so that an error names the field the client sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from dspark.errors import RequestError

__all__ = [
    "GUIDE_TYPES",
    "MOST_ALTERNATIVES",
    "FinishReason",
    "Grammar",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "SpecMetrics",
    "StepRecord",
    "TokenLogProb",
]

FinishReason = Literal["stop", "length", "cancelled", "timeout"]
GUIDE_TYPES: Final = ("json", "json_schema", "regex")
MOST_ALTERNATIVES: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop; field names and defaults are the wire contract's.

    `stop_token_ids` are further tokens that end the answer beside the model's own end tokens. `end_id`
    replaces the model's own when given. `bad_words_ids` are token sequences that must never be produced (the serving
    side makes them from `bad_words`). `seed` None = one is drawn at submission and reported. Log probabilities are
    those of the target before every transform; `logprobs` is how many alternatives come with each token's own. A
    guide is what the answer must follow; its compiled form is `Request.grammar`.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_words: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    end_id: int | None = None
    ignore_eos: bool = False
    num_draft_tokens: int = -1
    return_log_probs: bool = False
    logprobs: int = 0
    guided_decoding_guide_type: str | None = None
    guided_decoding_guide: str | None = None

    def __post_init__(self) -> None:
        """Refuse every value outside its range.

        Raises:
            RequestError: naming the field, the value and what is allowed.
        """
        _whole("max_tokens", self.max_tokens, 1, None)
        _whole("min_tokens", self.min_tokens, 0, None)
        if self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        _real("temperature", self.temperature, 0.0, None)
        _whole("top_k", self.top_k, 0, None)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _real("min_p", self.min_p, 0.0, 1.0, open_high=True)
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**64 - 1)
        _real("repetition_penalty", self.repetition_penalty, 0.0, None, open_low=True)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if any(not isinstance(word, str) or not word for word in self.stop_words):
            raise RequestError("stop_words", list(self.stop_words), "non-empty strings")
        if any(not word for word in self.bad_words_ids):
            raise RequestError("bad_words", list(self.bad_words_ids), "words of at least one token")
        if self.end_id is not None:
            _whole("end_id", self.end_id, -1, None)
        _whole("num_draft_tokens", self.num_draft_tokens, -1, None)
        _whole("logprobs", self.logprobs, 0, MOST_ALTERNATIVES)
        self._check_guide()

    def _check_guide(self) -> None:
        kind, guide = self.guided_decoding_guide_type, self.guided_decoding_guide
        if kind is None and guide is not None:
            raise RequestError("guided_decoding_guide_type", None, f"one of {', '.join(GUIDE_TYPES)}")
        if kind is not None and kind not in GUIDE_TYPES:
            raise RequestError("guided_decoding_guide_type", kind, f"one of {', '.join(GUIDE_TYPES)}")
        if kind in ("json_schema", "regex") and not guide:
            raise RequestError("guided_decoding_guide", guide, f"the {kind} that the answer must follow")

    @property
    def greedy(self) -> bool:
        """True when every token is an arg-max."""
        return self.temperature == 0.0

    @property
    def alters_logits(self) -> bool:
        """True when logits are changed by the token history (kept away from the calibrator)."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.bad_words_ids)
            or self.min_tokens > 0
            or self.guided_decoding_guide_type is not None
        )

    @property
    def wants_log_probs(self) -> bool:
        return self.return_log_probs or self.logprobs > 0


def _whole(name: str, value: object, low: int, high: int | None) -> None:
    allowed = f"a whole number >= {low}" if high is None else f"a whole number from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(name, value, allowed)
    if value < low or (high is not None and value > high):
        raise RequestError(name, value, allowed)


def _real(
    name: str,
    value: object,
    low: float,
    high: float | None,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    left, right = "(" if open_low else "[", ")" if open_high else "]"
    allowed = (
        f"a finite number {'>' if open_low else '>='} {low:g}"
        if high is None
        else f"a number in {left}{low:g}, {high:g}{right}"
    )
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(name, value, allowed)
    too_low = value <= low if open_low else value < low
    too_high = high is not None and (value >= high if open_high else value > high)
    if too_low or too_high:
        raise RequestError(name, value, allowed)


SAMPLING_FIELDS: frozenset[str] = frozenset(f.name for f in fields(SamplingParams))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One decoding step of one sequence, as `dspark generate --json` prints it.

    `accepted` counts drafts only; `confidence` is None for drafters without a confidence head, and where drafts were
    looked up. The drafts of a tree stand in the order of their survival: accepted ones need not be the first, and the
    product of the first k confidences is the survival of draft k.
    """

    draft: tuple[int, ...]
    confidence: tuple[float, ...] | None
    verify_len: int
    accepted: int


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """Log probability of one token under the target's own distribution, and of the likeliest ones there."""

    log_prob: float
    rank: int  # 1 = the likeliest
    top: tuple[tuple[int, float], ...] = ()  # (token id, log probability), the likeliest first


class Grammar(Protocol):
    """What one answer must follow: which tokens may come next. State of one request; `sampling.grammar` has it."""

    def allowed(self, drafted: tuple[int, ...]) -> npt.NDArray[np.bool_] | None:
        """Return [V] which tokens may follow the committed ones and then `drafted`, end tokens left out.

        None = `drafted` does not follow the grammar, so that nothing behind it will ever be read.
        """

    def may_end(self, drafted: tuple[int, ...]) -> bool:
        """Return whether the answer may end there."""

    def commit(self, token_ids: tuple[int, ...]) -> None:
        """Append committed tokens, end tokens left out."""


@dataclass(slots=True, kw_only=True)
class SpecMetrics:
    """Counts of one request, for the perf metrics of its answer. Times are on time.time_ns()'s clock."""

    seed: int = 0  # the one given, or the one drawn
    num_spec_steps: int = 0  # decoding steps
    num_draft_tokens: int = 0  # drafts verified
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)  # [k] = steps that accepted k drafts
    arrival_time_ns: int = 0
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0
    num_pages: int = 0  # held at the end
    num_cached_pages: int = 0  # of these, found again when the request first ran


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one step gave one request: a delta. `finish_reason` is set on the last one, and only there.

    `error` is set instead of `finish_reason` when the request failed; then nothing follows.
    """

    request_id: int
    token_ids: tuple[int, ...] = ()
    text: str | None = None  # None where no tokenizer is loaded
    log_probs: tuple[TokenLogProb, ...] = ()  # of each token, when the request asked for them
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    metrics: SpecMetrics | None = None  # on the last output
    steps: tuple[StepRecord, ...] = ()  # on the last output, when the request asked for them

    @property
    def final(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation request as the engine takes it.

    `emit` is called from the engine thread with every output; it must not block and must not raise. `is_cancelled`
    is polled between steps.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    emit: Callable[[RequestOutput], None]
    is_cancelled: Callable[[], bool] | None = None
    record_steps: bool = False
    deadline_s: float | None = None  # on time.monotonic()'s clock
    priority: int = 0
    arrival_time_ns: int = 0  # on time.time_ns()'s clock; 0 = when it reaches the engine
    grammar: Grammar | None = None  # of params.guided_decoding_guide; this request's own
