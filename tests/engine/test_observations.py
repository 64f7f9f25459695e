"""What the engine tells the scheduler: exact labels, censored positions, nothing of sequences that ended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dspark.engine.engine import Engine
from dspark.scheduling.interface import COUPLED, GREEDY, REJECTION, StepObservation
from support.engines import make_engine, make_request, run
from support.tiny_drafters import write_good_drafter
from support.tiny_models import write_tiny_target

PROMPTS = [[3, 5, 7], [1], list(range(40)), [9, 9, 9, 9], [4, 8, 15, 16, 23, 42]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), num_layers=2)


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("drafter")
    write_good_drafter(folder, target)
    return str(folder)


def watched(engine: Engine, *, most: int) -> list[StepObservation]:
    """Keep every observation, and verify at most `most` of the drafts at hand, whatever the policy says."""
    seen: list[StepObservation] = []
    observe, verify_len = engine.scheduler.observe, engine.scheduler.verify_len

    def keep(step: StepObservation) -> None:
        seen.append(step)
        observe(step)

    engine.scheduler.observe = keep  # type: ignore[method-assign]
    engine.scheduler.verify_len = lambda **given: np.minimum(verify_len(**given), most)  # type: ignore[method-assign]
    return seen


def test_greedy_drafts_are_labelled_by_the_tokens_that_came_the_cut_off_one_too(
    target: Path, drafter: str
) -> None:
    engine = make_engine(target, drafter=drafter, policy="fixed:4")
    seen = watched(engine, most=1)
    cut_off = {0.0: 0, 1.0: 0}
    for prompt in PROMPTS:
        seen.clear()
        (done,) = run(engine, [make_request(prompt, max_tokens=100)])
        at = 1  # the first token is no decoding step's
        for step, record in zip(seen, done.steps, strict=True):
            assert step.soft_labels is not None
            answer = done.token_ids[at : at + record.accepted + 1]
            known = np.flatnonzero(~np.isnan(step.soft_labels[0])).tolist()
            if record.accepted == 0:
                assert known == [], "the rest is told by accepted and verify_len"
            elif len(answer) == 2:
                assert known == [1]
                label = float(step.soft_labels[0, 1])
                assert label == float(record.draft[1] == answer[1])
                cut_off[label] += 1
            at += record.accepted + 1
    assert min(cut_off.values()) > 0


@pytest.mark.parametrize(
    ("rule", "policy", "penalty"),
    [
        ("rejection", "fixed:4", 0.0),
        ("block", "fixed:4", 0.0),
        ("block", "threshold:0", 0.0),
        ("block", "threshold:0", 0.2),
    ],
)
def test_sampled_labels_are_the_acceptance_that_is_seen_on_average(
    target: Path, drafter: str, tmp_path: Path, rule: str, policy: str, penalty: float
) -> None:
    if penalty:  # with a confidence head nobody learns from altered logits
        write_good_drafter(tmp_path, target, confidence=False)
        drafter = str(tmp_path)
    engine = make_engine(target, drafter=drafter, policy=policy, rule=rule)
    seen = watched(engine, most=2)
    params = {"max_tokens": 200, "temperature": 1.0, "presence_penalty": penalty}
    run(engine, [make_request(p, seed=i, **params) for i, p in enumerate(PROMPTS * 3)])
    labels, hits, num_cut_off = [], [], 0
    for step in seen:
        if step.soft_labels is None:
            continue
        for row, exact in enumerate(step.soft_labels):
            accepted, verified = int(step.accepted[row]), int(step.verify_len[row])
            known = ~np.isnan(exact)
            assert ((exact[known] >= 0.0) & (exact[known] <= 1.0)).all()
            # Everything that was looked at has a label, and so has the first draft that was cut off.
            assert known.sum() == min(accepted + 1, step.num_drafts[row])
            num_cut_off += accepted == verified < step.num_drafts[row]
            for k in range(min(accepted + 1, verified)):
                labels.append(float(exact[k]))
                hits.append(float(k < accepted))
    assert len(labels) > 1500 and num_cut_off > 100
    error = np.sqrt(np.mean(np.array(labels) * (1 - np.array(labels))) / len(labels))
    assert abs(np.mean(labels) - np.mean(hits)) < 5 * error
    assert len(set(np.round(labels, 6))) > 100, "labels are probabilities, not outcomes"


def test_rows_that_are_not_finite_are_kept_from_the_calibrator(target: Path, drafter: str) -> None:
    engine = make_engine(target, drafter=drafter, policy="fixed:4")
    seen = watched(engine, most=4)
    calls = 0

    def forward(batch: object, original: object = engine.target.forward) -> object:
        nonlocal calls
        output = original(batch)  # type: ignore[operator]
        calls += 1
        if calls == 3:  # row 2 of the first sequence; the second one is well
            output.logits[2], output.finite[2] = np.nan, False
        return output

    engine.target.forward = forward  # type: ignore[method-assign,assignment]
    run(engine, [make_request([1, 2]), make_request([3, 4])])
    altered = [step.altered.tolist() for step in seen]
    assert altered.count([True, False]) == 1
    assert all(not any(flags) for flags in altered if flags != [True, False])


def test_the_scheduler_forgets_a_sequence_after_its_last_step(target: Path) -> None:
    engine = make_engine(target, drafter="ngram", policy="auto")
    for _ in range(5):
        run(engine, [make_request(prompt) for prompt in PROMPTS])
    assert len(engine.scheduler._rows) == 0  # type: ignore[attr-defined]


def test_how_drafts_are_judged_is_told_with_what_became_of_them(target: Path, drafter: str) -> None:
    engine = make_engine(target, drafter=drafter, policy="fixed:2")
    seen = watched(engine, most=2)
    wanted = {(0.0, None): GREEDY, (1.0, None): REJECTION, (1.0, 7): COUPLED}
    for (temperature, seed), kind in wanted.items():
        seen.clear()
        run(engine, [make_request(PROMPTS[0], max_tokens=8, temperature=temperature, seed=seed)])
        assert seen and all(step.sampled.tolist() == [kind] for step in seen)
