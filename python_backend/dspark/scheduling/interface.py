"""What crosses between the engine and a scheduler: four calls a step, arrays in, arrays out.

    draft_len    before drafting: how many drafts are worth asking for
    verify_len   after drafting: how many of them the target will verify
    observe      after the step: what was verified, what was accepted, how long it took
    release      a sequence has left

No choice looks at the token it is about: `verify_len` may use the confidence of position k, which looks at
x_1..x_{k-1} only, and everything else comes from steps that are over (algorithm.md, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = [
    "COUPLED",
    "GREEDY",
    "REJECTION",
    "Bool",
    "BudgetScheduler",
    "Calibrator",
    "CostEstimate",
    "Float32",
    "Float64",
    "Int",
    "Int32",
    "Int64",
    "Kinds",
    "Scheduler",
    "StepObservation",
]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Int = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

# How the drafts of a request are judged: the kinds of traffic that are calibrated apart. With the same q and p a draft
# is accepted less often under coupling than under rejection, and greedily it is or it is not. True is REJECTION.
GREEDY, REJECTION, COUPLED = range(3)
Kinds = npt.NDArray[np.int8] | npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObservation:
    """What one step drafted, verified, accepted and cost.

    R decoding sequences; those that only prefill are not among them. `accepted` counts accepted drafts by
    the verification rule alone, before stop rules cut the output. `soft_labels` holds the exact acceptance
    probability `sum min(w p_k, q_k) / w` wherever both distributions are at hand, NaN elsewhere; w is the joint
    weight of the drafts before (block verification), 1 token by token. That includes the first position that was
    cut off when all verified drafts were accepted: the row that gives the added token has p of just that
    position. For greedy sequences the label is 1.0 or 0.0: does the draft equal the target's token.
    """

    sequence_ids: Int  # [R]
    num_drafts: Int32  # [R] drafts proposed
    verify_len: Int32  # [R] drafts verified
    accepted: Int32  # [R] drafts accepted, <= verify_len
    sampled: Kinds  # [R] 0 = greedy
    altered: Bool  # [R] logits changed by penalties, bias, grammar: kept from the calibrator
    target_tokens: int  # rows of the target pass, prefill rows among them
    verify_s: float  # seconds of the target pass
    confidence_logits: Float32 | None = None  # [R, G], undefined past num_drafts, NaN where looked up
    soft_labels: Float32 | None = None  # [R, G], NaN = unknown
    num_blocks: int | None = None  # blocks that the drafter ran for; None = all sequences with drafts
    prefill_tokens: int = 0  # prefill rows of the pass
    context_tokens: int = 0  # cached tokens of all sequences together, before the pass
    draft_s: float = 0.0  # seconds of drafting
    step_s: float = 0.0  # seconds of the whole step, sampling and commit included; 0 = draft_s + verify_s


class CostEstimate(Protocol):
    """What is shown of a cost model; `cost_model` has it."""

    @property
    def error(self) -> float:
        """Median relative error of the last predictions; 0 with none."""


class Scheduler(Protocol):
    """See the module's text. Sequence ids are the engine's; state of an id lives until `release`."""

    policy: str

    @property
    def cost_model(self) -> CostEstimate | None:
        """What predicts the seconds of a step, where the policy or its maker has one."""

    @property
    def calibrator(self) -> Calibrator | None:
        """What turns confidence logits into probabilities, where there is one."""

    def draft_len(self, *, sequence_ids: Int, caps: Int32, prefill_tokens: int) -> Int32:
        """Return the most drafts worth asking from each sequence in this step, 0 = do not draft it.

        Arguments:
            sequence_ids: [R].
            caps: [R] most drafts by request, block and length left.
            prefill_tokens: prefill rows in the same pass.

        Returns:
            [R] int32, <= caps.
        """

    def verify_len(
        self,
        *,
        sequence_ids: Int,
        confidence_logits: Float32 | None,
        num_drafts: Int32,
        sampled: Kinds,
        altered: Bool,
        prefill_tokens: int,
    ) -> Int32:
        """Return how many drafts of each sequence the target verifies.

        Arguments:
            sequence_ids: [R].
            confidence_logits: [R, G] logits of c_k, NaN in rows that were looked up and not rated, None for
                drafters without a confidence head.
            num_drafts: [R] drafts at hand; 0 for sequences that were not drafted.
            sampled: [R] GREEDY, REJECTION or COUPLED.
            altered: [R] the request changes its logits.
            prefill_tokens: prefill rows in the same pass.

        Returns:
            [R] int32 with 0 <= verify_len <= num_drafts.
        """

    def observe(self, step: StepObservation) -> None:
        """Learn from a finished step."""

    def release(self, sequence_id: int) -> None:
        """Forget a sequence; unknown ids are fine."""


@runtime_checkable
class BudgetScheduler(Scheduler, Protocol):
    """A scheduler that may know how many drafts it keeps before there are any; `verify_len` comes all the same, behind
    the pass: it keeps what later steps choose by."""

    def budget(self, num_drafts: Int32) -> int | None:
        """Return how many drafts of blocks [R] it keeps over all of them, None where only the drafts tell."""


class Calibrator(Protocol):
    """Turns confidence logits into probabilities that come true; `calibration.online` has the one that
    learns."""

    def confidence(self, logits: Float32, *, sampled: Kinds) -> Float64:
        """Return c_k [R, G] for logits [R, G]; NaN for a logit that is not finite."""

    def confidence_of_one(self, logits: Sequence[float], *, sampled: int) -> list[float]:
        """Return c_k of one sequence, up to the first logit that is not finite."""

    def observe(
        self, logits: Float32, labels: Float64, *, sampled: Kinds, usable: Bool, num_steps: int = 1
    ) -> None:
        """Take what some steps showed: labels [R, G] in [0, 1], NaN = unknown; rows that are not usable [R] are
        left out."""

    def ece(self) -> Float64:
        """Return the expected calibration error of each position [G]; NaN where nothing is known."""

    def deepest_starved(self) -> int:
        """Return the deepest position (from 1) that has shown nothing for long, 0 when there is none."""
