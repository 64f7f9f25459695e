"""What an executor may offer beside `TargetExecutor`: to verify chains where the logits are, which then stay there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dspark.drafters.device_draws import BlockDraws
from dspark.executors.interface import Int32, StepBatch, TargetOutput

__all__ = ["ChainVerifier", "VerifyBatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBatch:
    """How the sequences of a pass draw, and which of its logit rows are theirs.

    A chain's first row is that of its anchor (or of a prompt's last token), so a sequence without drafts has one row,
    and one whose prompt goes on has none.
    """

    row_start: Int32  # [R+1] logit rows of sequence i are row_start[i] : row_start[i+1]
    first_positions: Int32  # [R] absolute position of the first drafted token
    prob_rows: (
        Int32  # [M] row in the drafter's kept q, as [R * G, Vd], of the draft in each logit row; -1 = one-hot
    )
    draws: BlockDraws  # of [R]


@runtime_checkable
class ChainVerifier(Protocol):
    """Verifies by the rules of `dspark.sampling.verification`, in float32 where the host has float64."""

    longest_chain: int  # drafts; 0 where it verifies nothing
    reads_probs: bool  # whether it knows the q that its drafter keeps on the device

    def forward_verified(self, batch: StepBatch, verify: VerifyBatch) -> TargetOutput:
        """Run one pass as `forward` does, and verify; the output has no logits but `verified`."""
