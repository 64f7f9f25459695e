"""What real speculative decoding did, block by block, as arrays: the ground of `eval` and `calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from dspark.calibration.sts import (
    ScaledFit,
    auc,
    brier,
    ece,
    ece_of_perfect,
    forecast_survival,
    survival_labels,
)
from dspark.errors import ConfigError
from dspark.request import Request, RequestOutput, SamplingParams, StepRecord

__all__ = ["Asked", "BlockRecords", "CalibrationScore", "SpeculativeRun", "collect_steps"]

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One prompt to decode."""

    prompt_ids: tuple[int, ...]
    source: str
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationScore:
    """How good the survival forecast a_k is at each position, over blocks whose outcome at k is known."""

    ece: tuple[float, ...]
    ece_of_perfect: tuple[float, ...]  # what as many true probabilities would show
    auc: tuple[float, ...]
    brier: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecords:
    """N full blocks; the last step of an answer is not among them, since the answer's end may have cut it."""

    accepted: npt.NDArray[np.int64]  # [N] accepted drafts
    verify_len: npt.NDArray[np.int64]  # [N]
    confidence_logits: Float64 | None  # [N, G]
    source: npt.NDArray[np.str_]  # [N]
    block_size: int

    def __len__(self) -> int:
        return len(self.accepted)

    def of(self, source: str) -> BlockRecords:
        """Return the blocks of one source."""
        return self.at(self.source == source)

    def at(self, at: npt.NDArray[np.bool_]) -> BlockRecords:
        """Return some of the blocks; `at` is [N]."""
        logits = None if self.confidence_logits is None else self.confidence_logits[at]
        return replace(
            self,
            accepted=self.accepted[at],
            verify_len=self.verify_len[at],
            confidence_logits=logits,
            source=self.source[at],
        )

    @property
    def accepted_len(self) -> float:
        """Mean tokens of a step, the added one included."""
        return 1.0 + float(self.accepted.mean()) if len(self) else float("nan")

    def cumulative(self) -> Float64:
        """Return the share of blocks whose positions 1..k were all accepted [G]."""
        reached = np.arange(1, self.block_size + 1)[None, :] <= self.accepted[:, None]
        return np.asarray(reached.mean(axis=0)) if len(self) else np.full(self.block_size, np.nan)

    def conditional(self) -> Float64:
        """Return P(position k accepted | positions before it were) [G], NaN where none was reached."""
        reached = np.concatenate([[1.0], self.cumulative()])
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(reached[1:] / reached[:-1])

    def calibration(self, fit: ScaledFit | None) -> CalibrationScore | None:
        """Return the scores of the confidences after `fit`; None without confidences."""
        if self.confidence_logits is None or not len(self):
            return None
        labels, known = survival_labels(self.accepted, self.verify_len, self.block_size)
        forecast = forecast_survival(self.confidence_logits, fit)
        columns = [(forecast[known[:, k], k], labels[known[:, k], k]) for k in range(self.block_size)]
        return CalibrationScore(
            ece=tuple(ece(p, y) for p, y in columns),
            ece_of_perfect=tuple(ece_of_perfect(p) for p, _ in columns),
            auc=tuple(auc(p, y) for p, y in columns),
            brier=tuple(brier(p, y) for p, y in columns),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeRun:
    """The blocks of a run and its totals."""

    records: BlockRecords
    num_failed: int
    num_tokens: int


def collect_steps(steps: Sequence[tuple[str, Sequence[StepRecord]]], *, block_size: int) -> BlockRecords:
    """Return the full blocks of answers, given as (source, steps in order)."""
    full = [
        (source, step) for source, records in steps for step in records[:-1] if len(step.draft) == block_size
    ]
    with_confidence = bool(full) and all(step.confidence is not None for _, step in full)
    logits = None
    if with_confidence:
        c = np.array([step.confidence for _, step in full], np.float64)
        c = np.clip(c, 1e-7, 1.0 - 1e-7)
        logits = np.log(c) - np.log1p(-c)
    return BlockRecords(
        accepted=np.array([step.accepted for _, step in full], np.int64),
        verify_len=np.array([step.verify_len for _, step in full], np.int64),
        confidence_logits=logits,
        source=np.array([source for source, _ in full], np.str_),
        block_size=block_size,
    )


def decode(
    asked: Sequence[Asked],
    *,
    target: str,
    drafter: str,
    max_tokens: int,
    batch: int,
    threads: int,
    executor: str = "auto",
    dtype: str = "auto",
    drafter_dtype: str = "auto",
    tell: Callable[[str], None],
) -> SpeculativeRun:
    """Decode every prompt with the whole block verified at each step.

    Raises:
        ConfigError: the drafter proposes nothing.
        DSparkError: that of the first prompt, when all of them failed.
    """
    from dspark.config import ServeConfig
    from dspark.generate import complete_all
    from dspark.runtime import build_engine

    block_size = _block_size(target, drafter)
    engine = build_engine(
        ServeConfig(
            target=target,
            drafter=drafter,
            dtype=dtype,
            drafter_dtype=drafter_dtype,
            executor=executor,
            max_batch_size=batch,
            num_threads=threads,
            rule="block",
            policy=f"fixed:{block_size}",
            calibration="none",  # what is measured here; that of another drafter may lie in its folder
        )
    )
    completions = complete_all(engine, _requests(asked, max_tokens=max_tokens, tell=tell))
    errors = [c.error for c in completions if c.error is not None]
    if errors:
        tell(f"{len(errors)} of {len(asked)} prompts failed, the first with: {errors[0]}")
    if len(errors) == len(asked):
        raise errors[0]
    good = [(one.source, c) for one, c in zip(asked, completions, strict=True) if c.error is None]
    return SpeculativeRun(
        records=collect_steps([(source, c.steps) for source, c in good], block_size=block_size),
        num_failed=len(asked) - len(good),
        num_tokens=sum(len(c.token_ids) for _, c in good),
    )


def _requests(asked: Sequence[Asked], *, max_tokens: int, tell: Callable[[str], None]) -> list[Request]:
    """Return what the engine is asked, with steps recorded; every twentieth that ends is told."""
    done = 0

    def count(output: RequestOutput) -> None:
        nonlocal done
        if output.final:
            done += 1
            if done % 20 == 0 or done == len(asked):
                tell(f"decoded {done} of {len(asked)} prompts")

    return [
        Request(
            prompt_ids=one.prompt_ids,
            params=SamplingParams(max_tokens=max_tokens, temperature=one.temperature, seed=one.seed),
            emit=count,
            record_steps=True,
        )
        for one in asked
    ]


def _block_size(target: str, drafter: str) -> int:
    from dspark.drafters.loading import peek_drafter
    from dspark.models.loading import load_target

    size = peek_drafter(drafter, load_target(target).config).block_size
    if size < 1:
        raise ConfigError(f"drafter: {drafter} proposes nothing, there is nothing to measure")
    return size
