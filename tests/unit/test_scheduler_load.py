"""The load-aware policies in a serving loop with known acceptance and known cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dspark.calibration.online import OnlineCalibrator
from dspark.drafters.interface import DraftBlock
from dspark.errors import ConfigError
from dspark.scheduling.cost_model import CostCurve, CostModel
from dspark.scheduling.interface import Scheduler, StepObservation
from dspark.scheduling.load_aware import LoadAwareScheduler
from dspark.scheduling.scheduler import make_scheduler
from support.decoding import decode
from support.traffic import Kind

G = 7
REPEATS = Kind(mean=3.0, fall=-0.1, spread=1.0)
CODE = Kind(mean=2.2, fall=0.15, spread=1.3, overconfidence=1.5)
CHAT = Kind(mean=0.8, fall=0.05, spread=1.2)
POOR = Kind(mean=-2.0, fall=0.0, spread=0.7)
MIX = [CODE, CHAT, POOR, REPEATS]
SIZES = (1, 2, 4, 8, 16, 32, 40, 64, 128, 256, 512)


def verify_s(rows: int) -> float:
    return 0.010 * (1 + 0.055 * (min(rows, 40) - 1) + 0.04 * max(rows - 40, 0))


def free(_: int) -> float:
    return 2e-5


def dear(num_blocks: int) -> float:
    return 0.0025 + 0.0012 * num_blocks


def curve(draft_s: Callable[[int], float]) -> CostCurve:
    return CostCurve(
        target_tokens=SIZES,
        verify_s=tuple(verify_s(b) for b in SIZES),
        num_blocks=(1, 64),
        draft_s=(draft_s(1), draft_s(64)),
    )


def rate(
    policy: str,
    kinds: list[Kind],
    *,
    confidence: bool,
    draft_s: Callable[[int], float],
    measured: bool = True,
    steps: int = 500,
    labels: bool = True,
    warm_up: int = 0,
) -> float:
    scheduler = make_scheduler(
        policy,
        block_size=G,
        has_confidence=confidence,
        cost_model=CostModel(curve(draft_s)) if measured else None,
        calibrator=OnlineCalibrator(block_size=G) if confidence else None,
    )
    return decode(
        scheduler,
        kinds,
        steps=steps,
        block_size=G,
        verify_s=verify_s,
        draft_s=draft_s,
        confidence=confidence,
        labels=labels,
        warm_up=warm_up,
    ).rate


@pytest.mark.parametrize("num_sequences", [1, 4, 16])
def test_auto_is_near_the_best_fixed_length_at_every_load(num_sequences: int) -> None:
    kinds = (MIX * num_sequences)[:num_sequences]
    fixed = [
        rate(p, kinds, confidence=True, draft_s=dear)
        for p in ("none", "fixed:1", "fixed:3", "fixed:5", "fixed:7")
    ]
    assert rate("auto", kinds, confidence=True, draft_s=dear) > 0.97 * max(fixed)


def test_when_no_block_pays_nearly_nothing_is_drafted() -> None:
    plain = rate("none", [POOR] * 16, confidence=True, draft_s=dear)
    for policy in ("prefix", "lagged", "auto"):
        assert rate(policy, [POOR] * 16, confidence=True, draft_s=dear) > 0.97 * plain


@pytest.mark.parametrize("num_sequences", [1, 8])
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("measured", [True, False])
def test_looked_up_drafts_cost_nothing_on_text_that_does_not_repeat(
    num_sequences: int, labels: bool, measured: bool
) -> None:
    kinds = [POOR] * num_sequences
    plain = rate("none", kinds, confidence=False, draft_s=free)
    auto = rate("auto", kinds, confidence=False, draft_s=free, labels=labels, measured=measured)
    assert auto > 0.97 * plain


@pytest.mark.parametrize("measured", [True, False])
def test_looked_up_drafts_win_on_text_that_repeats(measured: bool) -> None:
    plain = rate("none", [REPEATS], confidence=False, draft_s=free)
    auto = rate("auto", [REPEATS], confidence=False, draft_s=free, measured=measured)
    full = rate("fixed:7", [REPEATS], confidence=False, draft_s=free)
    assert auto > 0.95 * full > 2.0 * plain


def drafted_alone(scheduler: Scheduler, kind: Kind, steps: int, *, warm_up: int = 0) -> float:
    """Return how often a single sequence of this kind, which never ends, was drafted after `warm_up` steps."""
    return decode(
        scheduler,
        [kind],
        steps=steps,
        block_size=G,
        verify_s=verify_s,
        draft_s=dear,
        lifetime=10_000,
        warm_up=warm_up,
    ).drafted


def dear_auto() -> Scheduler:
    return make_scheduler(
        "auto", block_size=G, has_confidence=True, cost_model=CostModel(curve(dear)), calibrator=None
    )


def test_drafting_comes_back_when_the_text_changes() -> None:
    scheduler = dear_auto()
    drafted_alone(scheduler, POOR, 300)
    assert drafted_alone(scheduler, POOR, 200) < 0.1
    assert drafted_alone(scheduler, REPEATS, 100, warm_up=200) > 0.9


def test_a_single_sequence_is_soon_drafted_again_when_its_text_gets_better() -> None:
    """An answer is a hundred tokens: poor blocks at its start must not decide over the rest."""
    scheduler = dear_auto()
    assert drafted_alone(scheduler, POOR, 200, warm_up=300) < 0.1
    assert drafted_alone(scheduler, REPEATS, 40, warm_up=20) > 0.9


def test_only_the_sequences_that_pay_are_drafted() -> None:
    scheduler = make_scheduler("auto", block_size=G, has_confidence=True, cost_model=CostModel(curve(dear)))
    ids = np.arange(8)
    logits = np.where(np.arange(8)[:, None] < 4, 4.0, -4.0) * np.ones((8, G))
    caps, flags = np.full(8, G, np.int32), np.zeros(8, np.bool_)
    drafted = np.zeros(8)
    for _ in range(60):
        num_drafts = scheduler.draft_len(sequence_ids=ids, caps=caps, prefill_tokens=0)
        drafted += num_drafts > 0
        verify_len = scheduler.verify_len(
            sequence_ids=ids,
            confidence_logits=logits.astype(np.float32),
            num_drafts=num_drafts,
            sampled=flags,
            altered=flags,
            prefill_tokens=0,
        )
        scheduler.observe(
            StepObservation(
                sequence_ids=ids,
                num_drafts=num_drafts,
                verify_len=verify_len,
                accepted=verify_len,
                sampled=flags,
                altered=flags,
                target_tokens=8 + int(verify_len.sum()),
                verify_s=verify_s(8 + int(verify_len.sum())),
                confidence_logits=logits.astype(np.float32),
                draft_s=dear(int((num_drafts > 0).sum())),
            )
        )
    assert (drafted[:4] > 50).all() and (drafted[4:] < 15).all()


def one_step(scheduler: Scheduler, confidence: list[list[float]], *, accepted: int = 0) -> list[int]:
    c = np.asarray(confidence)
    num, block_size = c.shape
    flags = np.zeros(num, np.bool_)
    with np.errstate(divide="ignore"):
        logits = (np.log(c) - np.log1p(-c)).astype(np.float32)
    num_drafts = np.full(num, block_size, np.int32)
    verify_len = scheduler.verify_len(
        sequence_ids=np.arange(num),
        confidence_logits=logits,
        num_drafts=num_drafts,
        sampled=flags,
        altered=flags,
        prefill_tokens=0,
    )
    out = [int(n) for n in verify_len]
    scheduler.observe(
        StepObservation(
            sequence_ids=np.arange(num),
            num_drafts=num_drafts,
            verify_len=verify_len,
            accepted=np.minimum(verify_len, accepted).astype(np.int32),
            sampled=flags,
            altered=flags,
            target_tokens=num + int(verify_len.sum()),
            verify_s=0.0,
            confidence_logits=logits,
        )
    )
    return out


def test_lagged_takes_its_number_from_two_steps_earlier_and_its_choice_from_now() -> None:
    model = CostModel(CostCurve(target_tokens=(2, 100), verify_s=(1.0, 10.0)))
    scheduler = make_scheduler("lagged", block_size=3, has_confidence=True, cost_model=model)
    high, low = [[0.9, 0.9, 0.9], [0.01, 0.01, 0.01]], [[0.02, 0.02, 0.02], [0.01, 0.01, 0.01]]
    swapped = [high[1], high[0]]
    one_step(scheduler, high)
    one_step(scheduler, low)
    assert one_step(scheduler, swapped) == [
        0,
        3,
    ]  # three, as for the first step; the second sequence has them now
    assert one_step(scheduler, high) == [0, 0]  # none, as for the second


def test_lagged_counts_looked_up_blocks_like_drafted_ones() -> None:
    model = CostModel(CostCurve(target_tokens=(1, 100), verify_s=(1.0, 2.0)))
    scheduler = make_scheduler("lagged", block_size=3, has_confidence=True, cost_model=model)
    drafted, looked_up = [[0.9, 0.9, 0.9]], [[np.nan] * 3]
    chosen = [one_step(scheduler, block) for block in (looked_up, looked_up, looked_up, drafted, drafted)]
    assert chosen == [[3]] * 5
    assert one_step(scheduler, looked_up) == [3]  # three, as for the drafted block two steps earlier


def test_the_same_input_gives_the_same_answer() -> None:
    answers = []
    for _ in range(2):
        scheduler = make_scheduler(
            "auto",
            block_size=G,
            has_confidence=True,
            cost_model=CostModel(curve(dear)),
            calibrator=OnlineCalibrator(block_size=G),
        )
        outcome = decode(scheduler, MIX, steps=150, block_size=G, verify_s=verify_s, draft_s=dear, seed=3)
        answers.append((outcome.tokens, outcome.seconds, outcome.verify_len))
    assert answers[0] == answers[1]


def test_positions_that_load_keeps_cutting_still_get_a_look() -> None:
    # Rows are so dear that nothing past the first draft is ever worth it.
    model = CostModel(
        CostCurve(
            target_tokens=(1, 2, 3, 16),
            verify_s=(0.010, 0.011, 0.030, 0.200),
            num_blocks=(1,),
            draft_s=(1e-5,),
        )
    )
    calibrator = OnlineCalibrator(block_size=4)
    scheduler = make_scheduler(
        "prefix", block_size=4, has_confidence=True, cost_model=model, calibrator=calibrator
    )
    seen = [one_step(scheduler, [[0.9, 0.6, 0.6, 0.6]], accepted=4)[0] for _ in range(700)]
    assert set(seen) == {1, 4}
    assert 1 <= seen.count(4) <= 10
    assert calibrator.deepest_starved() in (0, 4)


def serve_step(scheduler: Scheduler, logits: list[float], *, cap: int) -> tuple[int, int]:
    """Run one step of one sequence, all right; return how many drafts were asked for and how many were verified."""
    ids, no, rated = np.array([3]), np.zeros(1, np.bool_), np.array([logits], np.float32)
    wanted = scheduler.draft_len(sequence_ids=ids, caps=np.full(1, cap, np.int32), prefill_tokens=0)
    common: dict[str, Any] = {"sequence_ids": ids, "confidence_logits": rated, "num_drafts": wanted}
    verify_len = scheduler.verify_len(**common, sampled=no, altered=no, prefill_tokens=0)
    scheduler.observe(
        StepObservation(
            **common,
            verify_len=verify_len,
            accepted=verify_len,
            sampled=no,
            altered=no,
            target_tokens=1 + int(verify_len[0]),
            verify_s=0.0,
            num_blocks=1,
        )
    )
    return int(wanted[0]), int(verify_len[0])


@pytest.mark.parametrize("looked_up", [False, True])
def test_looks_reach_past_the_depth_of_drafted_blocks_and_leave_looked_up_ones_alone(looked_up: bool) -> None:
    model = CostModel(
        CostCurve(
            target_tokens=(1, 2, 3, 16),
            verify_s=(0.010, 0.011, 0.030, 0.200),
            num_blocks=(1,),
            draft_s=(1e-4,),  # not free: blocks are as deep as they were worth
        )
    )
    calibrator = OnlineCalibrator(block_size=4)
    scheduler = make_scheduler(
        "prefix", block_size=4, has_confidence=True, cost_model=model, calibrator=calibrator
    )
    logits = [np.nan] * 4 if looked_up else [2.2, 0.4, 0.4, 0.4]
    chosen = [serve_step(scheduler, logits, cap=4)[1] for _ in range(700)]
    looks = chosen.count(4)
    assert looks == 0 if looked_up else 1 <= looks <= 10


def test_caps_are_kept_and_zero_means_off() -> None:
    for policy in ("prefix", "lagged", "auto"):
        scheduler = make_scheduler(
            policy, block_size=G, has_confidence=True, cost_model=CostModel(curve(free)), calibrator=None
        )
        caps = np.array([0, 2, 7], np.int32)
        wanted = scheduler.draft_len(sequence_ids=np.arange(3), caps=caps, prefill_tokens=0)
        assert (wanted <= caps).all() and wanted[0] == 0
        verify_len = scheduler.verify_len(
            sequence_ids=np.arange(3),
            confidence_logits=np.full((3, G), 6.0, np.float32),
            num_drafts=wanted,
            sampled=np.zeros(3, np.bool_),
            altered=np.zeros(3, np.bool_),
            prefill_tokens=0,
        )
        assert (verify_len <= wanted).all() and verify_len[1:].tolist() == wanted[1:].tolist()


def test_released_sequences_leave_nothing_behind() -> None:
    scheduler = make_scheduler("auto", block_size=G, has_confidence=False)
    for sequence_id in range(5000):
        scheduler.verify_len(
            sequence_ids=np.array([sequence_id]),
            confidence_logits=None,
            num_drafts=np.array([G], np.int32),
            sampled=np.zeros(1, np.bool_),
            altered=np.zeros(1, np.bool_),
            prefill_tokens=0,
        )
        scheduler.release(sequence_id)
    scheduler.release(123_456)  # never seen
    assert len(scheduler._rows) == 0  # type: ignore[attr-defined]
    assert scheduler._rows.num_rows == 1  # type: ignore[attr-defined]


def test_prefix_and_lagged_need_a_measured_curve() -> None:
    for policy in ("prefix", "lagged"):
        with pytest.raises(
            ConfigError, match=f"policy: got '{policy}' without a measured cost curve, allowed is"
        ):
            make_scheduler(policy, block_size=G, has_confidence=True)


def test_the_next_block_is_as_deep_as_the_last_was_worth_and_one_more() -> None:
    scheduler = make_scheduler(
        "auto",
        block_size=G,
        has_confidence=True,
        cost_model=CostModel(curve(lambda _: 2e-4)),
        calibrator=None,
    )
    sure = [6.0] * G
    early_end = [6.0, 6.0] + [-9.0] * (G - 2)
    assert serve_step(scheduler, early_end, cap=G) == (G, 2)
    assert serve_step(scheduler, early_end, cap=G) == (3, 2)
    depths = [serve_step(scheduler, sure, cap=G)[0] for _ in range(4)]
    assert depths == [3, 5, 7, 7]


def test_a_looked_up_block_says_nothing_of_the_depth_of_drafted_ones() -> None:
    scheduler = make_scheduler(
        "auto",
        block_size=G,
        has_confidence=True,
        cost_model=CostModel(curve(lambda _: 2e-4)),
        calibrator=None,
    )
    assert serve_step(scheduler, [6.0, 6.0] + [-9.0] * (G - 2), cap=G) == (G, 2)
    assert serve_step(scheduler, [np.nan] * G, cap=G)[0] == 3
    assert serve_step(scheduler, [6.0] * G, cap=G) == (G, G)


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_where_a_block_ended_early_does_not_choose_its_last_draft(num_sequences: int) -> None:
    # One row more does not pay, two do: the first draft is taken in the hope of those behind it.
    seconds = tuple(1.0 + 0.9 * (rows > num_sequences) + 0.001 * rows for rows in range(1, 9 * num_sequences))
    flags, ids = np.zeros(num_sequences, np.bool_), np.arange(num_sequences)
    chosen = []
    for ended_at in (4, 1):
        scheduler = make_scheduler(
            "auto",
            block_size=4,
            has_confidence=True,
            cost_model=CostModel(
                CostCurve(target_tokens=tuple(range(1, len(seconds) + 1)), verify_s=seconds)
            ),
        )
        wanted = scheduler.draft_len(
            sequence_ids=ids, caps=np.full(num_sequences, 4, np.int32), prefill_tokens=0
        )
        assert wanted.tolist() == [4] * num_sequences
        verify_len = scheduler.verify_len(
            sequence_ids=ids,
            confidence_logits=np.tile(np.array([2.0, -9.0, -9.0, -9.0], np.float32), (num_sequences, 1)),
            num_drafts=np.full(num_sequences, ended_at, np.int32),
            sampled=flags,
            altered=flags,
            prefill_tokens=0,
        )
        chosen.append(verify_len.tolist())
    assert chosen[0] == chosen[1] and chosen[0][0] == 1


def test_a_sequence_starts_with_a_whole_block_whoever_had_its_row_before() -> None:
    scheduler = make_scheduler(
        "auto",
        block_size=G,
        has_confidence=True,
        cost_model=CostModel(curve(lambda _: 2e-4)),
        calibrator=None,
    )
    early_end = [6.0, 6.0] + [-9.0] * (G - 2)
    assert [serve_step(scheduler, early_end, cap=G)[0] for _ in range(2)] == [G, 3]
    scheduler.release(3)
    assert serve_step(scheduler, early_end, cap=G)[0] == G


def test_confidence_logits_far_from_zero_are_confidences_of_0_and_1() -> None:
    logits = np.array([[2000.0, -2000.0, 0.0, 0.0]], np.float32)
    block = DraftBlock(
        tokens=np.zeros((1, 4), np.int32),
        num_tokens=np.full(1, 4, np.int32),
        distributions=None,
        confidence_logits=logits,
    )
    confidence = block.confidence()
    assert confidence is not None and confidence[0].tolist() == [1.0, 0.0, 0.5, 0.5]
    scheduler = make_scheduler("prefix", block_size=4, has_confidence=True, cost_model=CostModel(curve(free)))
    assert serve_step(scheduler, logits[0].tolist(), cap=4) == (4, 1)


def serve_two(scheduler: Scheduler, steps: int, *, repeats: bool) -> list[int]:
    """Serve two sequences, one of them looked up where `repeats`; return how often each was asked for drafts."""
    ids, no = np.arange(2), np.zeros(2, np.bool_)
    asked = [0, 0]
    for _ in range(steps):
        caps = np.full(2, G, np.int32)
        wanted = scheduler.draft_len(sequence_ids=ids, caps=caps, prefill_tokens=0)
        asked = [before + int(num > 0) for before, num in zip(asked, wanted, strict=True)]
        if not wanted.any():
            verify_len, logits = np.zeros(2, np.int32), None
        else:
            logits = np.array([[np.nan if repeats else -4.0] * G, [-4.0] * G], np.float32)
            verify_len = scheduler.verify_len(
                sequence_ids=ids,
                confidence_logits=logits,
                num_drafts=wanted,
                sampled=no,
                altered=no,
                prefill_tokens=0,
            )
        num_blocks = int(np.count_nonzero(wanted[1 if repeats else 0 :]))
        rows = 2 + int(verify_len.sum())
        scheduler.observe(
            StepObservation(
                sequence_ids=ids,
                num_drafts=wanted,
                verify_len=verify_len,
                accepted=np.array([verify_len[0] if repeats else 0, 0], np.int32),
                sampled=no,
                altered=no,
                target_tokens=rows,
                verify_s=verify_s(rows),
                confidence_logits=logits,
                num_blocks=num_blocks,
                draft_s=dear(num_blocks) if num_blocks else 0.0,
            )
        )
    return asked


def test_what_is_looked_up_is_not_charged_for_the_drafter() -> None:
    scheduler = make_scheduler("auto", block_size=G, has_confidence=True, cost_model=CostModel(curve(dear)))
    asked = serve_two(scheduler, 200, repeats=True)
    assert asked[0] >= 199 and asked[1] < 40  # drafting pays for neither; looking up costs nothing
    again = serve_two(scheduler, 200, repeats=False)
    assert again[0] < 40, "a sequence that repeats no more is drafted like any other"


def test_what_was_looked_up_says_nothing_of_what_the_drafter_is_worth() -> None:
    scheduler = make_scheduler("auto", block_size=G, has_confidence=True, cost_model=CostModel(curve(free)))
    for _ in range(100):
        serve_step(scheduler, [np.nan] * G, cap=G)
    planner = scheduler._planner  # type: ignore[attr-defined]
    assert planner.knows_nothing and planner.decay == 0.8
    serve_step(scheduler, [2.0] * G, cap=G)
    scheduler._read()  # type: ignore[attr-defined]
    assert not planner.knows_nothing and planner.decay != 0.8


@pytest.mark.parametrize("kind", [CODE, CHAT, POOR], ids=["code", "chat", "poor"])
def test_a_single_sequence_is_served_alike_by_the_short_way_and_the_general_one(
    monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    def served() -> tuple[float, float, float]:
        scheduler = make_scheduler(
            "auto",
            block_size=G,
            has_confidence=True,
            cost_model=CostModel(curve(dear)),
            calibrator=OnlineCalibrator(block_size=G),
        )
        shared: dict[str, Any] = {"steps": 400, "block_size": G, "verify_s": verify_s, "draft_s": dear}
        outcome = decode(scheduler, [kind], lifetime=60, **shared)
        return outcome.tokens, outcome.verify_len, outcome.drafted

    short = served()
    monkeypatch.setattr(LoadAwareScheduler, "_draft_len_alone", lambda *_: None)
    monkeypatch.setattr(LoadAwareScheduler, "_verify_len_alone", lambda *_: None)
    assert served() == short


def test_a_newcomer_is_not_drafted_while_plain_steps_are_measured() -> None:
    scheduler = make_scheduler("auto", block_size=G, has_confidence=True, cost_model=CostModel(curve(dear)))
    serve_step(scheduler, [3.0] * G, cap=G)
    planner = scheduler._planner  # type: ignore[attr-defined]
    planner._plans[0].compared, planner._plans[0].holds = True, 100
    scheduler.release(3)
    assert scheduler.draft_len(
        sequence_ids=np.array([4]), caps=np.full(1, G, np.int32), prefill_tokens=0
    ).tolist() == [0]


def test_a_plan_costs_nothing_in_most_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler("auto", block_size=G, has_confidence=True, cost_model=CostModel(curve(dear)))
    serve_two(scheduler, 20, repeats=False)
    planner = scheduler._planner  # type: ignore[attr-defined]
    plans = []
    replan = planner.replan
    monkeypatch.setattr(planner, "replan", lambda *given, **named: plans.append(1) or replan(*given, **named))
    serve_two(scheduler, 160, repeats=False)
    assert 10 <= len(plans) <= 20


@pytest.mark.parametrize("num_sequences", [1, 8])
def test_a_machine_whose_steps_vary_by_half_changes_little(num_sequences: int) -> None:
    kinds = (MIX * num_sequences)[:num_sequences]

    def noisy(policy: str) -> float:
        scheduler = make_scheduler(
            policy,
            block_size=G,
            has_confidence=True,
            cost_model=CostModel(curve(dear)),
            calibrator=OnlineCalibrator(block_size=G),
        )
        return decode(
            scheduler, kinds, steps=300, block_size=G, verify_s=verify_s, draft_s=dear, noise=0.5
        ).rate

    assert noisy("auto") > 0.96 * max(noisy(policy) for policy in ("none", "fixed:5", "fixed:7"))


def test_a_curve_that_flatters_drafts_is_seen_through_soon() -> None:
    """Quick curves have single sizes 10 % off, and a slope between two of them twice as much or half."""
    kinds = [Kind(mean=1.6, fall=0.1, spread=1.6), Kind(mean=2.0, fall=0.1, spread=1.8), CHAT] * 5 + [CHAT]

    def true_s(rows: int) -> float:
        return 0.0067 + 0.000137 * min(rows, 16) + 0.0003 * max(rows - 16, 0)

    def rate_of(policy: str, seed: int) -> float:
        flattering = CostCurve(
            target_tokens=(1, 8, 16, 24, 32),
            verify_s=(0.0068, 0.0080, 0.0097, 0.0106, 0.0140),
            num_blocks=(1, 4),
            draft_s=(0.0006, 0.0013),
        )
        scheduler = make_scheduler(
            policy,
            block_size=G,
            has_confidence=True,
            cost_model=CostModel(flattering),
            calibrator=OnlineCalibrator(block_size=G),
        )
        return decode(
            scheduler,
            kinds,
            steps=120,
            block_size=G,
            verify_s=true_s,
            draft_s=lambda blocks: 0.00047 + 0.00034 * blocks,
            noise=0.05,
            seed=seed,
        ).rate

    over_plain = [rate_of("auto", seed) / rate_of("none", seed) for seed in range(3)]
    assert np.mean(over_plain) > 0.97
