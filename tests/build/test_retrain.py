"""`dspark-build retrain`: what was served is read whole, dealt out for good, learnt from, and only a gain is kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.errors import CheckpointError, ConfigError
from dspark.models.loading import load_target
from dspark_build import retrain
from dspark_build.cli import main
from dspark_build.progress import StopSignal
from dspark_build.traffic import RecordedAnswer, read_part, read_traffic, split_traffic, write_part
from support.tiny_models import write_tiny_target

VOCAB = 300


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A tiny target, a drafter of it and what a server recorded."""
    folder = tmp_path_factory.mktemp("retrain")
    write_tiny_target(
        folder / "target", vocab_size=VOCAB, with_tokenizer=True, eos_ids=(2,), max_context_len=256
    )
    lines = [json.dumps({"turns": [f"add {i} and {i * 7}"]}) for i in range(40)]
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    target = ["--target", str(folder / "target")]
    data = [
        *target,
        "--prompts",
        str(folder / "prompts.jsonl"),
        "--out",
        str(folder / "data"),
        "--max-tokens",
        "24",
    ]
    assert main(["data", *data, "--feature-layers", "0,2"]) == 0
    shape = [
        "--layers",
        "1",
        "--block-size",
        "3",
        "--rank",
        "4",
        "--draft-vocab",
        "200",
        "--positions",
        "300",
    ]
    train = [*target, "--data", str(folder / "data"), "--out", str(folder / "run"), "--target-layers", "0,2"]
    assert main(["train", *train, *shape]) == 0
    answers = [
        {"prompt_ids": list(a.prompt_ids), "output_ids": list(a.output_ids), "temperature": a.temperature}
        for a in answers_of(read_part(folder / "data"), 120)
    ]
    record(folder / "traffic", answers, target_hash=load_target(folder / "target").config.model_hash)
    return folder


def answers_of(some: list[RecordedAnswer], count: int) -> list[RecordedAnswer]:
    """Return as many answers, their prompts made different in front."""
    return [
        RecordedAnswer(
            prompt_ids=(3 + i % 200, 3 + i // 200, *some[i % len(some)].prompt_ids),
            output_ids=some[i % len(some)].output_ids,
            temperature=(0.0, 0.7)[i % 2],
        )
        for i in range(count)
    ]


def record(
    folder: Path, answers: list[dict[str, object]], *, target_hash: str, name: str = "1-1", tail: str = ""
):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(one) for one in ({"format_version": 1, "target_hash": target_hash}, *answers)]
    (folder / f"traffic-{name}.jsonl").write_text("\n".join(lines) + "\n" + tail, encoding="utf-8")


def read(*folders: Path) -> list[RecordedAnswer]:
    return read_traffic(folders, target_hash="h", vocab_size=VOCAB)


ONE = {"prompt_ids": [5, 6], "output_ids": [7, 8], "temperature": 0.5}


def test_answers_are_read_once_each_and_a_torn_last_line_is_passed_over(tmp_path):
    record(tmp_path, [ONE, ONE | {"temperature": 0}], target_hash="h", tail='{"prompt_ids": [1, 2')
    record(tmp_path, [ONE, ONE | {"output_ids": [9, 2]}], target_hash="h", name="2-1")
    (tmp_path / "traffic-3-1.jsonl").write_text("")  # begun, and killed
    assert [(a.output_ids, a.temperature) for a in read(tmp_path)] == [
        ((7, 8), 0.5),
        ((7, 8), 0.0),
        ((9, 2), 0.5),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (ONE | {"prompt_ids": []}, ["line 2", "prompt_ids", "0 to 299"]),
        (ONE | {"output_ids": [300]}, ["line 2", "300", "0 to 299"]),
        (ONE | {"output_ids": [True]}, ["line 2", "True"]),
        (ONE | {"temperature": -1.0}, ["line 2", "-1.0", "temperature"]),
        (ONE | {"temperature": float("nan")}, ["line 2", "nan", "temperature"]),
        ([1], ["line 2", "[1]"]),
    ],
)
def test_a_line_that_is_no_answer_is_refused_naming_it(tmp_path, line, words):
    record(tmp_path, [line, ONE], target_hash="h")
    with pytest.raises(ConfigError) as refused:
        read(tmp_path)
    assert all(word in str(refused.value) for word in words), refused.value


def test_no_files_another_target_and_another_format_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no traffic"):
        read(tmp_path)
    record(tmp_path, [ONE], target_hash="other")
    with pytest.raises(CheckpointError, match="other.* h"):
        read(tmp_path)
    (tmp_path / "traffic-1-1.jsonl").write_text('{"format_version": 2}\n')
    with pytest.raises(ConfigError, match="format_version"):
        read(tmp_path)
    (tmp_path / "traffic-1-1.jsonl").write_text('{"format_version": 1, "target_hash": "h"}\nno\n{}\n')
    with pytest.raises(ConfigError, match="line 2: not JSON"):
        read(tmp_path)


def test_a_prompt_goes_one_way_in_every_run_and_nine_of_ten_are_not_checked():
    answers = [RecordedAnswer(prompt_ids=(i % 500,), output_ids=(i, 1), temperature=0.0) for i in range(1000)]
    parts = split_traffic(answers)
    by_prompt = [{a.prompt_ids for a in part} for part in (parts.learn, parts.rate, parts.check)]
    assert sum(map(len, by_prompt)) == 500 == len(set().union(*by_prompt))
    assert 30 < len(by_prompt[1]) < 75 and 30 < len(by_prompt[2]) < 75
    again = split_traffic(answers[::-1])
    assert set(again.check) == set(parts.check) and set(again.rate) == set(parts.rate)


def test_a_part_is_read_as_it_was_written(tmp_path):
    answers = [
        RecordedAnswer(prompt_ids=(i % 300, 5), output_ids=(6,) * (1 + i % 4), temperature=(i % 3) / 2)
        for i in range(600)
    ]
    write_part(tmp_path, answers, target_hash="h")
    assert read_part(tmp_path) == answers
    with pytest.raises(ConfigError, match="prompts_hash"):
        write_part(tmp_path, answers[:-1], target_hash="h")


def command(home: Path, out: Path, *extra: str) -> list[str]:
    drafter = home / "run" / "drafter"
    paths = ["--target", home / "target", "--drafter", drafter, "--traffic", home / "traffic", "--out", out]
    return ["retrain", *map(str, paths), "--minutes", "0.01", "--sequences", "3", "--anchors", "4", *extra]


def test_a_drafter_goes_on_from_traffic_and_is_kept_only_where_it_is_accepted_further(
    home, tmp_path, capsys, monkeypatch
):
    status = main(command(home, tmp_path / "out"))
    printed = capsys.readouterr()
    assert "120 of 120 answers" in printed.err and "served  accepted length" in printed.out
    new = load_drafter_checkpoint(tmp_path / "out/rated/drafter", target=load_target(home / "target").config)
    old = load_drafter_checkpoint(home / "run/drafter", target=load_target(home / "target").config)
    assert new.config == old.config
    moved = "layers.0.mlp.up_proj.weight"
    assert np.abs(new.weights.float32(moved) - old.weights.float32(moved)).max() > 0
    assert (tmp_path / "out/rated/drafter/calibration.json").exists()
    assert (status == 0) == (tmp_path / "out/drafter/model.safetensors").exists()
    # Both outcomes, whatever this one was: the same folders, compared with lengths that are known.
    monkeypatch.setattr(retrain, "_run", lambda *_: None)
    for gain, kept in ((0.5, True), (-0.5, False)):
        lengths = iter((2.0, 2.0 + gain))
        monkeypatch.setattr(retrain, "_decode", lambda *_, **__: Decoded(next(lengths)))  # noqa: B023
        for path in (tmp_path / "out/drafter").glob("*"):
            path.unlink()
        assert main(command(home, tmp_path / "out")) == (0 if kept else 1)
        assert (tmp_path / "out/drafter/model.safetensors").exists() is kept
    assert "stays" in capsys.readouterr().out


class Decoded:
    def __init__(self, accepted_len: float) -> None:
        self.accepted_len = accepted_len

    def conditional(self) -> list[float]:
        return [0.5]


def test_a_stop_ends_between_steps_and_the_same_command_goes_on(home, tmp_path, capsys, monkeypatch):
    done = []

    def stopped_in_the_first(*words: str) -> None:
        done.append(words[0])
        with StopSignal() as inner:
            if len(done) == 1:
                inner._ask(2, None)

    monkeypatch.setattr(retrain, "_run", stopped_in_the_first)
    monkeypatch.setattr(retrain, "_compare", lambda *_, **__: 0)
    assert main(command(home, tmp_path / "out")) == 130
    assert done == ["data"] and "goes on" in capsys.readouterr().err
    record(home / "traffic", [], target_hash="another", name="9-9")  # not looked at again
    assert main(command(home, tmp_path / "out")) == 0
    (home / "traffic" / "traffic-9-9.jsonl").unlink()
    assert done == ["data", "data", "data", "train", "train", "calibrate"]


def test_too_few_answers_are_told_and_answers_that_are_too_long_are_left_out(home, tmp_path, capsys):
    assert main(command(home, tmp_path / "out", "--max-sequence", "20")) == 2
    assert "answers of use, needed are 100" in capsys.readouterr().err
    assert not (tmp_path / "out" / "collected").exists()
