"""The lagged policy with steps that take what a formula says: two engines with equal steps make equal choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from dspark.calibration.online import OnlineCalibrator
from dspark.engine.engine import Engine
from dspark.scheduling.cost_model import CostCurve, CostModel
from dspark.scheduling.interface import StepObservation
from dspark.scheduling.load_aware import LoadAwareScheduler
from dspark.scheduling.policy import parse_policy

__all__ = ["SteadyLagged", "assert_equal_steps", "bent_calibrator", "steady"]

_MOST_ROWS = 64


def _verify_s(num_rows: int) -> float:
    return 1.0 + 0.02 * num_rows + 0.1 * (num_rows // 8)  # with cliffs


class SteadyLagged(LoadAwareScheduler):
    """Keeps what it is told in `seen`."""

    def __init__(
        self, *, block_size: int, calibrator: OnlineCalibrator | None, policy: str = "lagged"
    ) -> None:
        curve = CostCurve(
            target_tokens=tuple(range(1, _MOST_ROWS + 1)),
            verify_s=tuple(_verify_s(num_rows) for num_rows in range(1, _MOST_ROWS + 1)),
        )
        super().__init__(
            policy,
            parse_policy(policy, block_size=block_size),
            block_size=block_size,
            has_confidence=True,
            cost_model=CostModel(curve),
            calibrator=calibrator,
        )
        self.seen: list[StepObservation] = []

    def observe(self, step: StepObservation) -> None:
        self.seen.append(step)
        verify_s, draft_s = _verify_s(step.target_tokens), 0.02 if step.num_blocks else 0.0
        super().observe(replace(step, verify_s=verify_s, draft_s=draft_s, step_s=1.01 * (verify_s + draft_s)))


def steady(engine: Engine) -> Engine:
    """Return an engine whose prompts share passes with answers as no clock says."""
    engine._prefill_budget.observe = lambda **_: None  # type: ignore[method-assign,assignment]
    return engine


def bent_calibrator(block_size: int) -> OnlineCalibrator:
    """Return a calibrator whose kinds of traffic and positions differ widely."""
    at = np.arange(block_size)
    return OnlineCalibrator(
        block_size=block_size,
        temperatures=(1.5 + 0.2 * at).tolist(),
        greedy_temperatures=(0.7 + 0.1 * at).tolist(),
        shifts=(0.3 - 0.2 * at).tolist(),
        greedy_shifts=(1.0 - 0.3 * at).tolist(),
    )


def assert_equal_steps(mine: Sequence[StepObservation], theirs: Sequence[StepObservation]) -> None:
    """Check that two engines drafted, verified, accepted and learnt the same; ratings to 1e-5."""
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        for name in ("sequence_ids", "num_drafts", "verify_len", "accepted", "sampled", "altered"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        for name in ("num_blocks", "target_tokens", "prefill_tokens", "context_tokens"):
            assert getattr(one, name) == getattr(other, name), name
        np.testing.assert_array_equal(_or_nothing(one.soft_labels), _or_nothing(other.soft_labels))
        drafted = np.arange(len(_or_nothing(one.confidence_logits).T)) < one.num_drafts[:, None]
        rated, expected = _or_nothing(one.confidence_logits), _or_nothing(other.confidence_logits)
        assert rated.shape == expected.shape
        if rated.size:
            np.testing.assert_allclose(rated[drafted], expected[drafted], atol=1e-5)


def _or_nothing(array: np.ndarray | None) -> np.ndarray:
    return np.empty((0, 0), np.float32) if array is None else array
