"""What one step did and how long each part took: the engine's word to whoever watches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dspark.scheduling.interface import StepObservation

__all__ = ["StepReport", "StepWatcher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step; its arrays do not change any more. Times are seconds."""

    observation: StepObservation | None  # None = nothing was decoded, only prompts
    draft_s: float
    schedule_s: float
    verify_s: float  # the target pass
    commit_s: float
    learn_s: float


# Called from the engine thread after every step; must not block and must not raise.
StepWatcher = Callable[[StepReport], None]
