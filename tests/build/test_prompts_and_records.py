"""Laws of prompts, of the draft vocabulary, and of the figures made from decoded blocks."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
import pytest
from dspark.errors import CheckpointError, ConfigError
from dspark.request import StepRecord
from dspark_build.block_records import collect_steps
from dspark_build.calibrate import fit_records, load_offline_fit
from dspark_build.cli import main
from dspark_build.drafter_init import choose_draft_vocab
from dspark_build.eval_plots import threshold_sweep
from dspark_build.everyday_prompts import EVERYDAY_KINDS, everyday_prompts
from dspark_build.prompt_files import Prompt, read_prompts, without
from dspark_build.prompts import KINDS, generate_prompts

EVAL = Path(__file__).parents[2] / "clients" / "prompts" / "eval.jsonl"
CALIBRATION = EVAL.with_name("calibration.jsonl")


def test_eval_prompts_are_twenty_of_each_kind_and_none_is_generated():
    prompts = read_prompts([EVAL])
    assert collections.Counter(p.source for p in prompts) == {"code": 20, "maths": 20, "chat": 20}
    generated = generate_prompts(4000, seed=0)
    assert without(generated, prompts) == generated


def test_generated_prompts_are_different_seeded_and_of_every_kind():
    prompts = generate_prompts(3000, seed=1)
    assert len({p.text for p in prompts}) == len(prompts) == 3000
    assert generate_prompts(500, seed=1) == prompts[:500]
    assert generate_prompts(500, seed=2) != prompts[:500]
    counts = collections.Counter(p.source for p in prompts)
    assert set(counts) == set(KINDS) and min(counts.values()) > 100
    assert not any(("{" in p.text and "}" not in p.text) or "  " in p.text.split("\n")[0] for p in prompts)


def test_everyday_prompts_are_different_seeded_of_every_kind_and_none_is_of_eval():
    prompts = everyday_prompts(3000, seed=1)
    assert len({p.text for p in prompts}) == len(prompts) == 3000
    assert everyday_prompts(500, seed=1) == prompts[:500]
    counts = collections.Counter(p.source for p in prompts)
    assert set(counts) == {kind.rstrip("0123456789") for kind in EVERYDAY_KINDS} and min(counts.values()) > 50
    assert without(prompts, read_prompts([EVAL])) == prompts


def test_exclusion_ignores_case_and_spacing():
    prompts = [Prompt(text="Why is  the sky\nblue?", source="x"), Prompt(text="Why?", source="x")]
    assert without(prompts, [Prompt(text="why is the SKY blue?", source="y")]) == prompts[1:]


def test_the_draft_vocabulary_holds_the_most_frequent_and_the_required_tokens():
    counts = np.array([5, 0, 9, 9, 1, 0])
    assert choose_draft_vocab(counts, size=3, required=(5,)).tolist() == [2, 3, 5]
    assert choose_draft_vocab(counts, size=4, required=()).tolist() == [0, 2, 3, 4]
    with pytest.raises(ConfigError, match="1 to 6"):
        choose_draft_vocab(counts, size=7, required=())


def step(accepted: int, *, size: int = 3, confidence: float | None = 0.5) -> StepRecord:
    return StepRecord(
        draft=tuple(range(size)),
        confidence=None if confidence is None else (confidence,) * size,
        verify_len=size,
        accepted=accepted,
    )


def test_figures_follow_from_the_blocks():
    records = collect_steps(
        [("a", [step(0), step(1), step(3), step(0)]), ("b", [step(3), step(2, size=2), step(0)])],
        block_size=3,
    )
    assert records.accepted.tolist() == [0, 1, 3, 3]  # last steps and cut blocks are left out
    assert records.accepted_len == 1 + 7 / 4
    np.testing.assert_allclose(records.cumulative(), [0.75, 0.5, 0.5])
    np.testing.assert_allclose(records.conditional(), [0.75, 2 / 3, 1.0])
    assert records.of("b").accepted_len == 4.0
    np.testing.assert_allclose(records.confidence_logits, 0.0, atol=1e-9)


def test_a_higher_threshold_never_verifies_or_accepts_more():
    rng = np.random.default_rng(0)
    records = collect_steps(
        [
            (
                "a",
                [
                    step(int(a), confidence=c)
                    for a, c in zip(rng.integers(0, 4, 50), rng.random(50), strict=True)
                ],
            )
        ],
        block_size=3,
    )
    verified, accepted_len = threshold_sweep(records, None, np.linspace(0, 1, 20))
    assert verified[0] == 3.0 and accepted_len[0] == pytest.approx(records.accepted_len)
    assert np.all(np.diff(verified) <= 0) and np.all(np.diff(accepted_len) <= 0)


def test_calibration_needs_confidences_and_enough_blocks():
    with pytest.raises(ConfigError, match="needed are 200"):
        fit_records(collect_steps([("a", [step(1)] * 10)], block_size=3))
    with pytest.raises(ConfigError, match="no confidence head"):
        fit_records(collect_steps([("a", [step(1, confidence=None)] * 300)], block_size=3))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"sts_temperatures": [1, 2]}',
        '{"temperatures": [1, 0, 2]}',
        '{"temperatures": [1, 1, 2], "greedy_sts_shifts": [0]}',
    ],
)
def test_calibration_files_that_do_not_fit_are_refused(tmp_path, text):
    (tmp_path / "c.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError):
        load_offline_fit(tmp_path / "c.json", block_size=3, greedy=True)


def test_temperatures_are_read_under_either_key(tmp_path):
    for key in ("sts_temperatures", "temperatures"):
        (tmp_path / "c.json").write_text(f'{{"{key}": [1.0, 2, 0.5]}}', encoding="utf-8")
        for greedy in (True, False):
            found = load_offline_fit(tmp_path / "c.json", block_size=3, greedy=greedy)
            assert found.temperatures.tolist() == [1.0, 2.0, 0.5] and found.shifts.tolist() == [0.0] * 3


def test_prompts_of_calibration_are_not_those_of_eval():
    evaluated, fitted = (read_prompts([path]) for path in (EVAL, CALIBRATION))
    assert {p.source for p in fitted} == {p.source for p in evaluated}
    texts = [{p.text.lower() for p in prompts} for prompts in (evaluated, fitted)]
    assert len(texts[1]) == len(fitted) and not texts[0] & texts[1]


def test_greedy_requests_have_their_own_temperatures(tmp_path):
    text = '{"sts_temperatures": [1, 1], "greedy_sts_temperatures": [2, 1], "greedy_sts_shifts": [0.5, -1]}'
    (tmp_path / "c.json").write_text(text, encoding="utf-8")
    greedy, sampled = (load_offline_fit(tmp_path / "c.json", block_size=2, greedy=g) for g in (True, False))
    assert greedy.temperatures.tolist() == [2.0, 1.0] and greedy.shifts.tolist() == [0.5, -1.0]
    assert sampled.temperatures.tolist() == [1.0, 1.0] and sampled.shifts.tolist() == [0.0, 0.0]


def test_help_names_every_command_and_an_unknown_one_is_refused(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("data", "train", "calibrate", "eval"))
    assert main(["trian"]) == 2
    assert "unknown command 'trian'" in capsys.readouterr().err
