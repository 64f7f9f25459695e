"""What a step costs on this machine: a measured curve, kept honest by the steps that are served.

`CostCurve` is what was measured (a value), `CapacityFile` binds it to the machine and model it was measured
on, and `CostModel` is the curve corrected online. No clock: seconds come in from outside.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dspark.errors import ConfigError
from dspark.scheduling.corrected_curve import CorrectedCurve, Float64
from dspark.scheduling.interface import StepObservation

__all__ = ["FORMAT_VERSION", "CapacityFile", "CostCurve", "CostModel", "Fingerprint"]

FORMAT_VERSION = 1
_FLAT = 1.02  # the largest pass must cost this much more than the smallest
_ROW_SHARE = 0.05  # cost of one more row against the first, before anything was measured
_BLOCK_SHARE = 0.25  # likewise for one more drafted block
_LEAST_BATCH, _MOST_BATCH, _BATCH_S = 4, 64, 0.4  # steps that are learnt from together, and seconds of them
_SETTLED = 48  # passes after which these seconds count: a curve is of another day, so the first ones say much


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a cost curve holds for. Any difference makes it another curve."""

    machine: str
    executor: str
    dtype: str
    num_threads: int
    target_hash: str
    drafter: str  # hash of the drafter's checkpoint, or its name when it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCurve:
    """Seconds by size, piecewise linear between the measured sizes.

    A cliff is kept by measuring both sides of it: (64, 0.010), (65, 0.013). `row_context_s` is added for
    every row of the pass times the mean cached tokens of a sequence (arithmetic of attention), `context_s`
    for every cached token of the batch (reading the cache once).
    """

    target_tokens: tuple[int, ...]  # rows of a target pass, ascending
    verify_s: tuple[float, ...]  # seconds, short context
    num_blocks: tuple[int, ...] = ()  # drafted blocks, ascending; empty = drafting is free
    draft_s: tuple[float, ...] = ()  # seconds
    row_context_s: float = 0.0
    context_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what cannot be a cost curve.

        Raises:
            ConfigError: naming the field, the value and what is allowed.
        """
        _check_sizes("target_tokens", self.target_tokens, "verify_s", self.verify_s)
        if not self.target_tokens:
            raise ConfigError("target_tokens: got an empty curve, allowed is at least one measured size")
        if self.num_blocks or self.draft_s:
            _check_sizes("num_blocks", self.num_blocks, "draft_s", self.draft_s)
        for name in ("row_context_s", "context_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ConfigError(f"{name}: got {value!r}, allowed is a finite number >= 0")

    @property
    def max_target_tokens(self) -> int:
        return self.target_tokens[-1]

    def check_measured(self) -> None:
        """Refuse a curve that says nothing about load.

        Raises:
            ConfigError: fewer than two sizes, or the largest pass costs no more than the smallest.
        """
        if len(self.target_tokens) < 2:
            raise ConfigError(
                f"target_tokens: got one size ({self.target_tokens[0]}), allowed are two or more"
            )
        if max(self.verify_s) < _FLAT * min(self.verify_s):
            raise ConfigError(
                f"verify_s: got a flat curve ({self.verify_s[0]:.3g} s at {self.target_tokens[0]} tokens,"
                f" {self.verify_s[-1]:.3g} s at {self.target_tokens[-1]}), allowed is one that rises by"
                f" {_FLAT - 1:.0%} or more: measure again, with larger sizes"
            )


def _check_sizes(size_name: str, sizes: tuple[int, ...], cost_name: str, seconds: tuple[float, ...]) -> None:
    if len(sizes) != len(seconds):
        raise ConfigError(
            f"{cost_name}: got {len(seconds)} values, allowed is one for each of {len(sizes)} sizes"
        )
    if any(isinstance(b, bool) or not isinstance(b, int) or b < 1 for b in sizes):
        raise ConfigError(f"{size_name}: got {sizes!r}, allowed are whole numbers >= 1")
    if any(b <= a for a, b in itertools.pairwise(sizes)):
        raise ConfigError(f"{size_name}: got {sizes!r}, allowed are ascending sizes")
    for size, value in zip(sizes, seconds, strict=True):
        if not (math.isfinite(value) and value > 0.0):
            raise ConfigError(
                f"{cost_name}: got {value!r} at {size}, allowed is a finite number of seconds > 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityFile:
    """`capacity.json`: a curve and what it holds for."""

    fingerprint: Fingerprint
    curve: CostCurve

    def save(self, path: Path) -> None:
        """Write the file."""
        document = {
            "format_version": FORMAT_VERSION,
            "fingerprint": asdict(self.fingerprint),
            "curve": asdict(self.curve),
        }
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> CapacityFile:
        """Read and check the file, whatever machine it is of.

        Raises:
            ConfigError: not readable, another format version, missing or unknown fields, a curve that is flat,
                empty, negative or not finite.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: not a capacity file ({error})") from error
        if not isinstance(document, dict) or document.get("format_version") != FORMAT_VERSION:
            found = document.get("format_version") if isinstance(document, dict) else None
            raise ConfigError(
                f"{path}: format_version is {found!r}, allowed is {FORMAT_VERSION}: measure again with"
                " `dspark-build profile`"
            )
        try:
            fingerprint = Fingerprint(**_only(document, "fingerprint", Fingerprint))
            raw: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in _only(document, "curve", CostCurve).items()
            }
            curve = CostCurve(**raw)
            curve.check_measured()
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"{path}: {error}") from error
        return cls(fingerprint=fingerprint, curve=curve)

    def check_fingerprint(self, expected: Fingerprint) -> None:
        """Refuse a curve of another machine, executor, dtype, thread count or model.

        Raises:
            ConfigError: naming each field that differs, with both values.
        """
        differences = [
            f"{name} is {found!r} in the file and {here!r} here"
            for name, found, here in (
                (f.name, getattr(self.fingerprint, f.name), getattr(expected, f.name))
                for f in fields(Fingerprint)
            )
            if found != here
        ]
        if differences:
            raise ConfigError(
                f"capacity file of another set-up: {'; '.join(differences)}. Measure again with"
                " `dspark-build profile`"
            )


def _only(document: Mapping[str, Any], name: str, kind: type) -> dict[str, Any]:
    part = document.get(name)
    if not isinstance(part, dict):
        raise ConfigError(f"{name}: got {part!r}, allowed is an object")
    unknown = sorted(part.keys() - {f.name for f in fields(kind)})
    if unknown:
        raise ConfigError(f"{name}: unknown field {unknown[0]!r}")
    return part


class CostModel:
    """Seconds of a step, corrected by the steps that were observed.

    Steps are gathered and learnt from a few at a time: predictions are those of the last time.

    Arguments:
        curve: what was measured on this machine; None learns from served steps alone (`measured` is then False
            until the first one), starting from a modest guess of what one more row costs.
    """

    def __init__(self, curve: CostCurve | None = None) -> None:
        self.version = 0  # rises whenever predictions change; steps that are only gathered change none
        self._measured = curve is not None
        self._row_context_s = curve.row_context_s if curve else 0.0
        self._context_s = curve.context_s if curve else 0.0
        if curve is None:
            sizes = (1, 2)
            self._verify = CorrectedCurve(sizes, (1.0, 1.0 + _ROW_SHARE), prior_weight=0.0)
            self._draft = CorrectedCurve(sizes, (1.0, 1.0 + _BLOCK_SHARE), prior_weight=0.0)
        else:
            self._verify = CorrectedCurve(curve.target_tokens, curve.verify_s, prior_weight=16.0)
            if len(curve.num_blocks) == 1:  # what more blocks take is a guess
                size, block_s = curve.num_blocks[0], curve.draft_s[0]
                more_s = block_s * (1.0 + _BLOCK_SHARE / size)
                self._draft = CorrectedCurve((size, size + 1), (block_s, more_s), prior_weight=16.0)
            elif curve.num_blocks:
                self._draft = CorrectedCurve(curve.num_blocks, curve.draft_s, prior_weight=16.0)
            else:
                self._draft = CorrectedCurve((1, 2), (1.0, 1.0 + _BLOCK_SHARE), prior_weight=0.0)
        self._gathered: list[StepObservation] = []
        self._gathered_s = 0.0
        self._num_passes = 0  # learnt from
        self._least = 1  # steps that are learnt from together: one at first
        self._errors: deque[float] = deque(maxlen=129)

    # -- predictions -----------------------------------------------------------------------------------------------

    @property
    def measured(self) -> bool:
        """Whether anything is known: a measured curve, or steps that were served."""
        return self._measured

    def verify_s(self, first: int, count: int, *, num_sequences: int = 1, context_tokens: int = 0) -> Float64:
        """Return the seconds of target passes over first, first+1, ... rows.

        Arguments:
            first: rows of the smallest pass, >= 1.
            count: how many sizes.
            num_sequences: R, decoding sequences in the pass.
            context_tokens: cached tokens of all of them together.

        Returns:
            float64 [count].
        """
        seconds = self._verify.seconds(first, count)
        if not context_tokens:
            return seconds
        factor = self._verify.factor
        fixed = (factor * self._context_s + self._verify.token_s) * context_tokens
        if self._row_context_s:
            per_row = factor * self._row_context_s * context_tokens / max(num_sequences, 1)
            extra = fixed + per_row * np.arange(first, first + count)
            return np.asarray(seconds + np.maximum(extra, 0.0))
        return seconds + max(fixed, 0.0)

    @property
    def pace(self) -> float:
        """How much slower than its curve the machine is now; relative to the first steps where none was measured."""
        return self._verify.factor

    def rise_error(self, rows: int, more: int) -> float:
        """Return one deviation of the error of a pass over `rows` + `more`, relative, if one over `rows` is right."""
        return self._verify.ratio_error(rows, rows + more)

    def draft_s(self, num_blocks: int) -> float:
        """Return the seconds of drafting `num_blocks` blocks; 0 where that was never seen."""
        if num_blocks < 1 or not self._draft.known:
            return 0.0
        return float(self._draft.seconds(num_blocks, 1)[0])

    def draft_s_range(self, num_blocks: int) -> Float64:
        """Return the seconds of drafting 1..num_blocks blocks [num_blocks]."""
        if not self._draft.known:
            return np.zeros(num_blocks)
        return self._draft.seconds(1, num_blocks)

    def steps_per_second(self, target_tokens: int) -> float:
        """Return SPS(B) of a pass over B rows, short context, nothing drafted."""
        return 1.0 / float(self.verify_s(target_tokens, 1)[0])

    @property
    def error(self) -> float:
        """Median relative error of the last predicted steps, drafting included; 0 with none.

        Each was made before its step was seen.
        """
        self.flush()
        return float(np.median(self._errors)) if self._errors else 0.0

    # -- learning --------------------------------------------------------------------------------------------------

    def observe(self, step: StepObservation) -> None:
        """Take the times of one step. Zero, negative and non-finite times are ignored.

        All but drafting counts as the target pass: what sampling and commit cost grows with the rows as well.
        """
        self._gathered.append(step)
        self._gathered_s += step.step_s or step.verify_s
        num = len(self._gathered)
        enough = self._gathered_s >= _BATCH_S or self._num_passes < _SETTLED
        if num >= _MOST_BATCH or (enough and num >= self._least):
            self.flush()

    def flush(self) -> None:
        """Learn now from what was gathered; called by itself every few steps."""
        steps = [self._times_of(step) for step in self._gathered]
        self._gathered, self._gathered_s = [], 0.0
        passes, drafts = [t for t in steps if t.verify_s], [t for t in steps if t.num_blocks]
        knew, knew_draft = self._verify.known, self._draft.known
        pass_s: list[float] = []
        block_s: list[float] = []
        self.version += bool(passes or drafts)
        if passes:
            pass_s = self._verify.observe(
                [t.rows for t in passes],
                [t.verify_s for t in passes],
                tokens=[t.tokens for t in passes],
                known_s=[t.known_s for t in passes],
            )
            self._measured = True
            self._num_passes += len(passes)
            self._least = min(self._least + 1, _LEAST_BATCH)
        if drafts:
            none = [0.0] * len(drafts)
            block_s = self._draft.observe(
                [t.num_blocks for t in drafts], [t.draft_s for t in drafts], tokens=none, known_s=none
            )
        foreseen, foreseen_block = iter(pass_s), iter(block_s)
        for times in steps:
            expected = next(foreseen) if times.verify_s else 0.0
            took = times.verify_s
            if times.num_blocks:
                expected += next(foreseen_block)
                took += times.draft_s
            if times.verify_s and knew and (knew_draft or not times.num_blocks):
                self._errors.append(abs(expected - took) / took)

    def _times_of(self, step: StepObservation) -> _Times:
        num_blocks = step.num_blocks
        if num_blocks is None:
            num_blocks = int(np.count_nonzero(step.num_drafts))
        verify_s = step.step_s - step.draft_s if step.step_s > 0.0 else step.verify_s
        if not (step.target_tokens > 0 and _is_time(verify_s)):
            verify_s = 0.0
        if not (num_blocks > 0 and _is_time(step.draft_s)):
            num_blocks = 0
        tokens = step.context_tokens
        per_token = self._context_s + self._row_context_s * step.target_tokens / max(
            len(step.sequence_ids), 1
        )
        return _Times(step.target_tokens, verify_s, tokens, tokens * per_token, num_blocks, step.draft_s)


class _Times(NamedTuple):
    """What one step took; 0 seconds of the pass, or 0 blocks, where there was no time to learn from."""

    rows: int
    verify_s: float
    tokens: int  # cached
    known_s: float  # of them, as it was measured
    num_blocks: int
    draft_s: float


def _is_time(seconds: float) -> bool:
    return 0.0 < seconds < math.inf
