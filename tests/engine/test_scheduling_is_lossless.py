"""Law 3 of algorithm.md, section 6, by sampling through the real engine: no policy bends the target's distribution.

The counterexample of section 4 is served for real: it must show the fault of a naive full search, or it would prove
nothing of the others.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from dspark.engine.engine import Engine
from dspark.sampling.transforms import SampledRule
from dspark.scheduling.cost_model import CostCurve, CostModel
from dspark.scheduling.interface import Int, Int32, Scheduler, StepObservation
from dspark.scheduling.load_aware import LoadAwareScheduler
from dspark.scheduling.policy import parse_policy
from dspark.scheduling.scheduler import make_scheduler
from dspark.scheduling.single import rates_of
from support.chi_square import assert_distributed_as
from support.engines import answers, make_request
from support.two_tokens import make_table_engine

TARGET, DRAFT = np.array([0.7, 0.3]), np.array([0.5, 0.5])
CONFIDENCE = np.array([[0.8, 0.8], [0.9, 0.0]])  # c_2 = 0.9 behind A, 0 behind B
RULES: tuple[SampledRule, ...] = ("block", "rejection")
SECONDS = (1.0, 1.0 / 0.5, 1.0 / 0.45)
CLIFFS = (1.0, 2.0, 2.05, 2.1, 3.4, 3.45, 3.5, 5.0, 5.05, 5.1, 5.15, 7.0)  # of 1, 2, ... rows


class UnteachableCost(CostModel):
    """Keeps to its curve: what this machine takes for a table says nothing."""

    def observe(self, _step: StepObservation) -> None:
        return None


class NaiveScheduler(LoadAwareScheduler):
    """A full search over the confidences of the very drafts it chooses among."""

    def _num_of_few(
        self, survival: list[float], seconds: list[float], num_sequences: int, _num_blocks: int
    ) -> int:
        return int(np.argmax(rates_of(survival, seconds, num_sequences=num_sequences)))

    def _verify_len_alone(self, *_: object) -> None:
        """Let the choice above decide for single sequences as well."""

    def draft_len(self, *, sequence_ids: Int, caps: Int32, prefill_tokens: int) -> Int32:
        """Draft whole blocks: the counterexample needs both tokens in sight."""
        wanted = super().draft_len(sequence_ids=sequence_ids, caps=caps, prefill_tokens=prefill_tokens)
        return np.where(wanted > 0, caps, np.int32(0))


def cost(seconds: tuple[float, ...]) -> CostModel:
    return UnteachableCost(CostCurve(target_tokens=tuple(range(1, len(seconds) + 1)), verify_s=seconds))


def scheduler_of(policy: str, seconds: tuple[float, ...], block_size: int) -> Scheduler:
    if policy != "naive":
        return make_scheduler(
            policy, block_size=block_size, has_confidence=True, cost_model=cost(seconds), calibrator=None
        )
    return NaiveScheduler(
        "auto",
        parse_policy("auto", block_size=block_size),
        block_size=block_size,
        has_confidence=True,
        cost_model=cost(seconds),
        calibrator=None,
    )


def pairs(engine: Engine, *, num_requests: int, length: int) -> npt.NDArray[np.int64]:
    """Return how often each pair of neighbouring tokens came, [V, V], over pairs that do not overlap.

    The first token is drawn from the prompt; all others go through drafting and verification.
    """
    requests = [
        make_request([i % 2], max_tokens=length, temperature=1.0, seed=1000 + i) for i in range(num_requests)
    ]
    counts = np.zeros((2, 2), np.int64)
    for answer in answers(engine, requests):
        for left, right in zip(answer[1:-1:2], answer[2::2], strict=False):
            counts[left, right] += 1
    return counts


def engine_of(policy: str, rule: SampledRule = "block") -> Engine:
    scheduler = scheduler_of(policy, SECONDS, block_size=2)
    return make_table_engine(TARGET, DRAFT, CONFIDENCE, scheduler, max_batch_size=1, rule=rule)


@pytest.mark.parametrize("rule", RULES)
def test_the_naive_full_search_bends_the_distribution_through_the_engine(rule: SampledRule) -> None:
    counts = pairs(engine_of("naive", rule), num_requests=60, length=60)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_distributed_as(counts, np.outer(TARGET, TARGET))
    # 0.85 where a block is drawn, 0.7 for the token behind it.
    assert counts.sum(axis=1)[0] / counts.sum() > 0.74


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", ["prefix", "lagged", "auto", "threshold:0.85", "fixed:1", "fixed:2"])
def test_every_policy_keeps_the_distribution_on_the_counterexample(policy: str, rule: SampledRule) -> None:
    engine = engine_of(policy, rule)
    counts = pairs(engine, num_requests=60, length=60)
    assert_distributed_as(counts, np.outer(TARGET, TARGET))
    if policy == "prefix":
        assert engine.stats().num_draft_tokens == 0, "early stop keeps nothing here"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", ["prefix", "lagged", "auto"])
def test_every_policy_keeps_the_distribution_of_a_batch_on_a_curve_with_cliffs(
    policy: str, rule: SampledRule
) -> None:
    confidence = np.array([[0.75, 0.85], [0.95, 0.1], [0.05, 0.99], [0.9, 0.3]])
    engine = make_table_engine(
        TARGET, DRAFT, confidence, scheduler_of(policy, CLIFFS, block_size=4), max_batch_size=3, rule=rule
    )
    counts = pairs(engine, num_requests=60, length=60)
    assert_distributed_as(counts, np.outer(TARGET, TARGET))
    assert engine.stats().num_draft_tokens > 300, "nothing was drafted, so nothing was proved"
