"""Measuring the cost curve, on a fake machine whose clock is the sum of what its passes cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from dspark.drafters.interface import DraftBlock
from dspark.errors import ConfigError
from dspark.executors.interface import StepBatch, TargetOutput
from dspark.scheduling.measurement import (
    Bench,
    measure_curve,
    pages_needed,
    rising,
    rows_of_a_sequence,
    sizes_to_measure,
)

PAGE = 16


class FakeMachine:
    """A target and a drafter that only let time pass."""

    name, dtype, feature_layer_ids, block_size = "fake", "float32", (), 4

    def __init__(self, verify_s: Callable[[int], float], *, num_pages: int, noise: float = 0.0) -> None:
        self.verify_s, self.noise, self.num_slots = verify_s, noise, num_pages * PAGE
        self.now, self.rng, self.sizes = 0.0, np.random.default_rng(0), []
        self.config = type("Config", (), {"vocab_size": 50, "max_context_len": 2048})()

    def clock(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        slow = 5.0 if self.noise and self.rng.random() < 0.05 else 1.0
        self.now += seconds * slow * float(np.exp(self.noise * self.rng.normal()))

    def forward(self, batch: StepBatch) -> TargetOutput:
        rows = len(batch.tokens)
        assert batch.query_start[-1] == rows and len(batch.context_len) == len(batch.query_start) - 1
        assert (batch.slots >= 0).all() and (batch.slots < self.num_slots).all()
        assert len(set(batch.slots.tolist())) == rows, "two rows share a slot"
        assert (batch.tokens < self.config.vocab_size).all()
        self.sizes.append(rows)
        per_sequence = np.diff(batch.query_start)
        self.spend(
            self.verify_s(rows)
            + 1e-6 * float((per_sequence * batch.context_len).sum())
            + 2e-6 * float(batch.context_len.sum())
        )
        empty = np.zeros((len(batch.logit_rows), 50), np.float32)
        return TargetOutput(
            logits=empty,
            argmax=np.zeros(len(empty), np.int32),
            finite=np.ones(len(empty), np.bool_),
            features=None,
        )

    def propose(self, inputs):
        assert [len(i.pages) * PAGE >= len(i.token_ids) for i in inputs]
        self.spend(0.002 + 0.001 * len(inputs))
        return DraftBlock.empty(len(inputs), self.block_size)

    def observe(self, **_features) -> None:
        return None

    def release(self, _sequence_id: int) -> None:
        return None


def curve_of(verify_s: Callable[[int], float], *, most: int = 300, noise: float = 0.0):
    machine = FakeMachine(
        verify_s, num_pages=pages_needed(max_target_tokens=most, page_size=PAGE), noise=noise
    )
    told = []
    curve = measure_curve(
        Bench(target=machine, drafter=machine, page_size=PAGE),
        max_target_tokens=most,
        max_blocks=8,
        budget_s=60.0,
        clock=machine.clock,
        progress=lambda share, text: told.append((share, text)),
        max_context_len=2048,
    )
    return curve, told


def test_both_sides_of_a_cliff_are_found_wherever_it_is() -> None:
    curve, _ = curve_of(lambda rows: 0.010 + 1e-5 * rows + (0.02 if rows > 147 else 0.0))
    assert {147, 148} <= set(curve.target_tokens)
    at = curve.target_tokens.index(148)
    assert curve.verify_s[at] - curve.verify_s[at - 1] > 0.018


def test_noise_and_slow_spells_do_not_reach_the_curve() -> None:
    def truth(rows: int) -> float:
        return 0.010 + 2e-4 * rows

    curve, _ = curve_of(truth, noise=0.03)
    # All passes stand on 64 cached tokens, which the fake charges for: rows at 1e-6 each, sequences of 4 at 2e-6.
    expected = [truth(b) + 64e-6 * b + 128e-6 * -(-b // 4) for b in curve.target_tokens]
    assert curve.verify_s == pytest.approx(expected, rel=0.04)
    assert (np.diff(curve.verify_s) >= 0).all()


def test_drafting_and_context_are_measured() -> None:
    curve, told = curve_of(lambda rows: 0.010 + 2e-4 * rows)
    assert curve.num_blocks == (1, 2, 4, 8)
    assert curve.draft_s == pytest.approx([0.003, 0.004, 0.006, 0.010])
    assert curve.row_context_s == pytest.approx(1e-6, rel=0.01)
    assert curve.context_s == pytest.approx(2e-6, rel=0.01)
    shares = [share for share, _ in told]
    assert shares == sorted(shares) and shares[-1] == 1.0


@pytest.mark.parametrize("max_sequences", [3, 5, 64])
def test_no_pass_has_more_sequences_than_are_allowed(max_sequences: int) -> None:
    most = 3 * 16

    class Limited(FakeMachine):
        def forward(self, batch):
            assert len(batch.context_len) <= max_sequences
            return super().forward(batch)

    num_pages = pages_needed(max_target_tokens=most, page_size=PAGE, max_sequences=max_sequences)
    machine = Limited(lambda rows: 0.010 + 2e-4 * rows, num_pages=num_pages)
    bench = Bench(
        target=machine,
        drafter=machine,
        page_size=PAGE,
        max_sequences=max_sequences,
        most_rows=rows_of_a_sequence(most, max_sequences),
    )
    curve = measure_curve(
        bench,
        max_target_tokens=most,
        max_blocks=3,
        budget_s=5.0,
        clock=machine.clock,
        progress=lambda _share, _text: None,
        max_context_len=2048,
    )
    assert curve.max_target_tokens == most


def test_a_flat_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="flat curve"):
        curve_of(lambda _rows: 10.0)


def test_every_small_size_and_both_sides_of_usual_buckets_are_measured() -> None:
    sizes = sizes_to_measure(300)
    assert sizes[:10] == list(range(1, 11)) and sizes[-1] == 300
    assert {16, 17, 32, 33, 64, 65, 128, 129, 256, 257} <= set(sizes)


def test_a_curve_that_seems_to_fall_is_levelled() -> None:
    assert rising(np.array([1.0, 4.0, 1.0, 3.0])) == pytest.approx([1.0, 2.0, 2.0, 3.0])
    assert rising(np.array([1.0, 2.0, 3.0])) == pytest.approx([1.0, 2.0, 3.0])
