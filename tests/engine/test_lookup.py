"""Look-up before drafting: which blocks come from where, and what the scheduler learns of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dspark.calibration.online import OnlineCalibrator
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.interface import DraftBlock, DraftInput
from dspark.drafters.lookup import LookupDrafter
from dspark.engine.engine import Engine
from dspark.request import SamplingParams
from dspark.sampling.transforms import TokenSampler
from dspark.scheduling.acceptance import is_unrated
from dspark.scheduling.cost_model import CostCurve, CostModel
from dspark.scheduling.scheduler import StepObservation, make_scheduler
from support.engines import answers, make_engine, make_request, run
from support.tiny_drafters import write_good_drafter
from support.tiny_models import write_tiny_target

REPEATS = [4, 8, 15, 16, 23, 42] * 4
NEW = list(range(30))
G = 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target = write_tiny_target(tmp_path_factory.mktemp("target"), num_layers=2)
    drafter = tmp_path_factory.mktemp("drafter")
    write_good_drafter(drafter, target)
    return target, drafter


def engine_of(pair: tuple[Path, Path], **settings: Any) -> Engine:
    return make_engine(pair[0], drafter=pair[1], prompt_lookup=True, **settings)


def propose(engine: Engine, *prompts: list[int], temperature: float = 0.0, max_drafts: int = G) -> DraftBlock:
    """Feed the prompts through the engine, then ask its drafter about their texts with nothing committed since."""
    drafter = engine.drafter
    assert isinstance(drafter, LookupDrafter)
    pages = np.arange(8, dtype=np.int32)
    sampler = TokenSampler(
        SamplingParams(temperature=temperature), seed=1, prompt_ids=(), vocab_size=50, eos_ids=()
    )
    return drafter.propose(
        [
            DraftInput(
                sequence_id=i, token_ids=prompt, max_drafts=max_drafts, sampler=sampler, pages=pages + 8 * i
            )
            for i, prompt in enumerate(prompts)
        ]
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_that_repeats_is_looked_up_and_other_text_is_drafted(
    pair: tuple[Path, Path], temperature: float
) -> None:
    block = propose(engine_of(pair), NEW, REPEATS, temperature=temperature)
    assert block.looked_up is not None and block.looked_up.tolist() == [False, True]
    assert block.num_drafted == 1 and block.num_tokens[0] > 0
    assert block.tokens[1, : block.num_tokens[1]].tolist() == [4, 8, 15, 16][: block.num_tokens[1]]
    logits = block.confidence_logits
    assert logits is not None and np.isfinite(logits[0, : block.num_tokens[0]]).all()
    assert np.isnan(logits[1]).all()
    if temperature:
        assert block.distributions is not None
        assert block.distributions[1] == (None,) * int(block.num_tokens[1])
        assert None not in block.distributions[0]


def test_with_nothing_to_look_up_the_block_is_the_drafters_own(pair: tuple[Path, Path]) -> None:
    engine = engine_of(pair)
    block = propose(engine, NEW)
    assert block.looked_up is None and block.num_drafted == 1
    assert isinstance(engine.drafter, LookupDrafter) and isinstance(engine.drafter.drafter, DSparkDrafter)


def test_a_match_too_short_for_a_whole_block_is_too_short_for_part_of_one(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    write_good_drafter(tmp_path, pair[0], block_size=7)
    three_alike = [20, 1, 2, 3, 9, 8, 7, 6, 5, 1, 2, 3]
    engine = engine_of((pair[0], tmp_path))
    for max_drafts in (7, 2):
        block = propose(engine, three_alike, REPEATS, max_drafts=max_drafts)
        assert block.looked_up is not None and block.looked_up.tolist() == [False, True]
        assert block.num_tokens[1] == max_drafts and 0 < block.num_tokens[0] <= max_drafts


def test_records_tell_confidences_of_drafted_blocks_and_none_of_looked_up_ones(
    pair: tuple[Path, Path],
) -> None:
    records = [
        record
        for done in run(engine_of(pair, policy="fixed:4"), [make_request(REPEATS, max_tokens=40)])
        for record in done.steps
        if record.draft
    ]
    kinds = {record.confidence is None for record in records}
    assert kinds == {True, False}
    for record in records:
        assert record.confidence is None or np.isfinite(record.confidence).all()


@pytest.mark.parametrize("policy", ["prefix", "lagged"])
def test_policies_that_need_a_curve_give_the_plain_answer_too(pair: tuple[Path, Path], policy: str) -> None:
    made = engine_of(pair)
    curve = CostCurve(target_tokens=(1, 64), verify_s=(1.0, 1.5), num_blocks=(1, 8), draft_s=(0.02, 0.1))
    engine = Engine(
        target=made.target,
        drafter=made.drafter,
        scheduler=make_scheduler(
            policy,
            block_size=G,
            has_confidence=True,
            cost_model=CostModel(curve),
            calibrator=OnlineCalibrator(block_size=G),
        ),
        limits=made.limits,
    )
    requests = [make_request(prompt, max_tokens=40) for prompt in (REPEATS, NEW, REPEATS[:-3])]
    plain = answers(make_engine(pair[0]), requests)
    assert answers(engine, requests) == plain
    assert [answers(engine, [request])[0] for request in requests] == plain
    assert engine.stats().num_accepted_tokens > 0


def test_looked_up_drafts_teach_their_own_counts_and_never_the_calibrator() -> None:
    calibrator = OnlineCalibrator(block_size=G)
    scheduler = make_scheduler("auto", block_size=G, has_confidence=True, calibrator=calibrator)
    logits = np.array([[2.0] * G, [np.nan] * G], np.float32)
    num_drafts = np.full(2, G, np.int32)
    assert is_unrated(logits, num_drafts).tolist() == [False, True]
    ids, no = np.array([5, 6]), np.zeros(2, np.bool_)
    common: dict[str, Any] = {"sequence_ids": ids, "confidence_logits": logits, "num_drafts": num_drafts}
    deep = []
    for _ in range(200):
        chosen = scheduler.verify_len(**common, sampled=no, altered=no, prefill_tokens=0)
        deep.append(int(chosen[1]))
        labels = np.stack([np.zeros(G), np.ones(G)]).astype(np.float32)  # drafted: wrong; looked up: right
        scheduler.observe(
            StepObservation(
                **common,
                verify_len=np.full(2, G, np.int32),
                accepted=np.array([0, G], np.int32),
                soft_labels=labels,
                sampled=no,
                altered=no,
                target_tokens=10,
                verify_s=0.010,
                step_s=0.010,
                num_blocks=1,
            )
        )
    # the first position of the drafted sequence; what came last is not learnt yet
    assert calibrator.num_labels in range(100, 201)
    assert calibrator.num_excluded == 0
    assert deep[-1] == G
