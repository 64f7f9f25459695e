"""What executors may offer so that a step waits once: blocks that are started, and a pass laid out where they end up.

The drafter's call is started, then the target's, whose first rows are what the drafter's blocks hold once they are cut;
one wait follows. How many drafts are kept is known before; which ones, the device says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from dspark.drafters.device_draws import BlockDraws, SampledBlock
from dspark.executors.interface import DraftBatch, Float32, Int32, StepBatch, TargetOutput
from dspark.executors.verifying import VerifyBatch

__all__ = [
    "BlockLauncher",
    "PassScheduler",
    "ScheduledBatch",
    "ScheduledPass",
    "StartedBlock",
    "served_policy",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledBatch:
    """A pass of R sequences, the first D of which were drafted by the call before it, in that order.

    `rows` are those that the host knows, of the other sequences; they stand behind the drafted ones, and `query_start`,
    `logit_rows` and `verify.row_start` count them alone. `context_len`, `page_table`, `first_positions` and `draws` are
    of all R sequences. Pages for every draft are held.
    """

    anchors: Int32  # [D]
    kinds: Int32  # [D] how drafts are judged: GREEDY, REJECTION, COUPLED
    calibration: Float32  # [3, G, 5] the map from confidence logits to probabilities, for each kind
    budget: int  # drafts kept over all sequences, or fewer where there are no more
    rows: StepBatch
    verify: VerifyBatch


class ScheduledPass(NamedTuple):
    """What came of it; outputs are those of the pass that the host would have laid out."""

    output: TargetOutput
    verify_len: Int32  # [D]
    pass_s: float  # seconds on the device


class StartedBlock(NamedTuple):
    """What a started call drafted."""

    block: SampledBlock
    draft_s: float  # seconds on the device


@runtime_checkable
class BlockLauncher(Protocol):
    """A block executor that can be started; what it drafts stays where the target's pass finds it, too."""

    launches: bool  # False where it runs alone

    def launch(self, batch: DraftBatch, *, num_drafts: Int32, draws: BlockDraws) -> None:
        """Start to draft `num_drafts` [R], 0 = none; nothing waits."""

    def collect(self) -> StartedBlock:
        """Wait for what was started."""


@runtime_checkable
class PassScheduler(Protocol):
    """A target executor that lays out the rows of drafted sequences itself."""

    schedules: bool  # False where it does not, or is not meant to: set it before the cache is allocated
    longest_chain: int

    def launch_scheduled(self, batch: ScheduledBatch) -> None:
        """Start a pass behind the drafter's call; nothing waits."""

    def collect_scheduled(self) -> ScheduledPass:
        """Wait for what was started."""


def served_policy(target: object, policy: str, *, on_gpu: bool) -> str:
    """Return the policy that is served, and tell the target whether passes are to be laid out by it.

    `auto` is `lagged` on a GPU whose target can: the only rule that knows a step's budget before its drafts, so that
    no step waits in the middle. Everywhere else it is itself.

    Arguments:
        target: its cache is not allocated yet.
        policy: the setting.
    """
    if not isinstance(target, PassScheduler):
        return policy
    served = "lagged" if policy == "auto" and on_gpu and target.schedules else policy
    target.schedules = target.schedules and served == "lagged"
    return served
