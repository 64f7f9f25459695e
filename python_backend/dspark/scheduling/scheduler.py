"""A scheduler by the name of its policy. Pure policy: no engine, no torch, no clock. See `interface`."""

from __future__ import annotations

import numpy as np

from dspark.errors import ConfigError
from dspark.scheduling.acceptance import is_unrated, learn_calibration
from dspark.scheduling.cost_model import CostModel
from dspark.scheduling.interface import (
    Bool,
    Calibrator,
    Float32,
    Int,
    Int32,
    Kinds,
    Scheduler,
    StepObservation,
)
from dspark.scheduling.load_aware import LoadAwareScheduler
from dspark.scheduling.policy import Policy, fixed_verify_len, parse_policy, threshold_verify_len

__all__ = ["Calibrator", "Scheduler", "StepObservation", "make_scheduler"]


class _Static:
    """`none`, `fixed:K` and `threshold:P`: nothing learned. A calibrator or cost model given to it still
    learns."""

    def __init__(
        self,
        text: str,
        policy: Policy,
        *,
        block_size: int,
        cost_model: CostModel | None,
        calibrator: Calibrator | None,
    ) -> None:
        self.policy = text
        self.cost_model = cost_model
        self.calibrator = calibrator
        self._policy = policy
        self._block_size = block_size

    def draft_len(self, *, sequence_ids: Int, caps: Int32, prefill_tokens: int) -> Int32:  # noqa: ARG002
        match self._policy.name:
            case "none":
                return np.zeros_like(caps)
            case "fixed":
                return fixed_verify_len(num_drafts=caps, k=self._policy.num_drafts)
            case _:
                return caps

    def verify_len(
        self,
        *,
        sequence_ids: Int,  # noqa: ARG002
        confidence_logits: Float32 | None,
        num_drafts: Int32,
        sampled: Kinds,  # noqa: ARG002
        altered: Bool,  # noqa: ARG002
        prefill_tokens: int,  # noqa: ARG002
    ) -> Int32:
        match self._policy.name:
            case "none":
                return np.zeros_like(num_drafts)
            case "fixed":
                return fixed_verify_len(num_drafts=num_drafts, k=self._policy.num_drafts)
            case _:
                if confidence_logits is None:
                    return num_drafts
                confidence = 0.5 * (1.0 + np.tanh(0.5 * confidence_logits.astype(np.float64)))
                confidence[is_unrated(confidence_logits, num_drafts)] = 1.0  # only long matches are looked up
                return threshold_verify_len(
                    confidence=confidence,
                    num_drafts=num_drafts,
                    min_confidence=self._policy.min_confidence,
                )

    def observe(self, step: StepObservation) -> None:
        if self.cost_model is not None:
            self.cost_model.observe(step)
        if self.calibrator is not None:
            learn_calibration(self.calibrator, step, block_size=self._block_size)

    def release(self, sequence_id: int) -> None:
        """No state."""


def make_scheduler(
    policy: str,
    *,
    block_size: int,
    has_confidence: bool,
    cost_model: CostModel | None = None,
    calibrator: Calibrator | None = None,
) -> Scheduler:
    """Make the scheduler of one policy.

    Arguments:
        policy: `none`, `fixed:K`, `threshold:P`, `prefix`, `lagged` or `auto`.
        block_size: G.
        has_confidence: the drafter has a confidence head.
        cost_model: measured seconds of a step. `auto` without one learns them from the steps it serves.
        calibrator: from confidence logits to probabilities; None takes them as they are.

    Raises:
        ConfigError: naming the policy, the value and what is allowed.
    """
    parsed = parse_policy(policy, block_size=block_size)
    if not parsed.needs_cost:
        return _Static(policy, parsed, block_size=block_size, cost_model=cost_model, calibrator=calibrator)
    if cost_model is None and parsed.name != "auto":
        raise ConfigError(
            f"policy: got {policy!r} without a measured cost curve, allowed is a capacity file made by"
            " `dspark-build profile`, or the policy auto, which learns while serving"
        )
    return LoadAwareScheduler(
        policy,
        parsed,
        block_size=block_size,
        has_confidence=has_confidence,
        cost_model=CostModel() if cost_model is None else cost_model,
        calibrator=calibrator,
    )
