"""`dspark-build retrain`: what was served is read whole, dealt out for good, learnt from, and only a gain is kept."""

from __future__ import annotations

import errno
import json
import shutil
import stat
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dspark.drafters.checkpoint import load_drafter_checkpoint, save_drafter_checkpoint, tensor_shapes
from dspark.errors import CapacityError, CheckpointError, ConfigError
from dspark.models.config import DrafterConfig, RopeConfig
from dspark.models.loading import load_target
from dspark_build import retrain
from dspark_build.bench_retrain import letters
from dspark_build.block_records import BlockRecords, SpeculativeRun
from dspark_build.cli import main
from dspark_build.folder_lock import locked_folder
from dspark_build.progress import StopSignal
from dspark_build.retrain_checks import check_drafter
from dspark_build.traffic import (
    RecordedAnswer,
    TrafficLimits,
    read_part,
    read_traffic,
    split_traffic,
    write_part,
)
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
        for a in answers_of(list(read_part(folder / "data")), 120)
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


def read(*folders: Path, told: list[str] | None = None, **limits: int) -> list[RecordedAnswer]:
    wanted = {"max_sequence": 100, "max_prompt": 100, "max_tokens": 10**9} | limits
    tell = [].append if told is None else told.append
    return read_traffic(folders, target_hash="h", vocab_size=VOCAB, limits=TrafficLimits(**wanted), tell=tell)


ONE_READ = {"prompt_ids": (5, 6), "output_ids": (7, 8), "temperature": 0.5}
ONE = {"prompt_ids": [5, 6], "output_ids": [7, 8], "temperature": 0.5}


def test_answers_are_read_once_each_and_a_torn_last_line_is_passed_over(tmp_path):
    record(tmp_path, [ONE, ONE | {"temperature": 0}], target_hash="h", tail='{"prompt_ids": [1, 2')
    record(tmp_path, [ONE, ONE | {"output_ids": [9, 2]}], target_hash="h", name="2-1")
    (tmp_path / "traffic-3-1.jsonl").write_text("")  # begun, and killed
    assert [(a.output_ids, a.temperature) for a in read(tmp_path)] == [
        ((7, 8), 0.0),
        ((7, 8), 0.5),
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
        (ONE | {"temperature": float("inf")}, ["line 2", "inf", "temperature"]),
        (ONE | {"temperature": 10**400}, ["line 2", "temperature", "remove the line"]),
        (ONE | {"temperature": True}, ["line 2", "temperature"]),
        (None, ["line 2", "{}"]),
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
    (tmp_path / "traffic-1-1.jsonl").write_text('{"format_version": 1, "tar\n' + json.dumps(ONE) + "\n")
    with pytest.raises(ConfigError, match="line 1.* move the file"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="allowed is a folder"):
        read(tmp_path / "traffic-1-1.jsonl")


def test_torn_lines_and_files_of_another_target_are_passed_over_and_told(tmp_path):
    head = json.dumps({"format_version": 1, "target_hash": "h"})
    torn = [head, '{"prompt_ids": [1,', json.dumps(ONE), "\0\0\0", json.dumps(ONE | {"output_ids": [9, 9]})]
    (tmp_path / "traffic-2-1.jsonl").write_text("\n".join(torn))
    with (tmp_path / "traffic-2-1.jsonl").open("ab") as file:
        file.write(b"\n\xff\xfe\n" + b"[" * 100_000)
    record(tmp_path, [ONE], target_hash="other", name="3-1")
    record(tmp_path, [ONE], target_hash="other", name="4-1")
    (tmp_path / "traffic-5-1.jsonl").mkdir()
    told: list[str] = []
    assert [a.output_ids for a in read(tmp_path, told=told)] == [(7, 8), (9, 9)]
    assert any(
        "traffic-2-1.jsonl: passed over 4 torn lines" in line and "first is 2" in line for line in told
    )
    assert any("2 files are passed over" in line and "target other" in line for line in told)


def test_the_newest_answers_are_taken_and_older_files_not_read(tmp_path):
    for name in ("9-1", "10-1", "11-1"):  # by time, not by letters
        record(
            tmp_path,
            [ONE | {"output_ids": [int(name[:-2]), i]} for i in range(10)],
            target_hash="h",
            name=name,
        )
    (tmp_path / "traffic-9-1.jsonl").write_text("not even looked at\n\n")
    told: list[str] = []
    taken = read(tmp_path, told=told, max_tokens=4 * 15 + 3)
    assert [a.output_ids for a in taken] == [(10, i) for i in range(5, 10)] + [(11, i) for i in range(10)]
    assert any("1 older files are not read" in line for line in told)


def test_answers_that_no_training_can_use_are_counted(tmp_path):
    record(
        tmp_path,
        [ONE, ONE | {"output_ids": [7]}, ONE | {"output_ids": [7] * 9}, ONE | {"prompt_ids": [5] * 7}],
        target_hash="h",
    )
    told: list[str] = []
    assert len(read(tmp_path, told=told, max_sequence=10, max_prompt=6)) == 1
    assert any("3 of 4 answers are left out" in line for line in told)


def test_a_file_that_the_server_removed_or_goes_on_with_meanwhile_is_no_fault(tmp_path, monkeypatch):
    record(tmp_path, [ONE], target_hash="h")
    record(tmp_path, [ONE | {"output_ids": [9, 2]}], target_hash="h", name="2-1")
    glob = Path.glob

    def removed(folder: Path, pattern: str):
        found = list(glob(folder, pattern))
        (tmp_path / "traffic-1-1.jsonl").rename(tmp_path / "gone")
        return found

    monkeypatch.setattr(Path, "glob", removed)
    monkeypatch.setattr(Path, "is_file", lambda _path: True)
    assert [a.output_ids for a in read(tmp_path)] == [(9, 2)]


def test_reading_takes_no_more_memory_than_what_is_taken(tmp_path):
    line = json.dumps(ONE | {"output_ids": [299] * 2000}) + "\n"
    with (tmp_path / "traffic-1-1.jsonl").open("w") as file:
        file.write(json.dumps({"format_version": 1, "target_hash": "h"}) + "\n")
        file.writelines(
            line.replace("5", str(10 + i % 280), 1) for i in range(300)
        )  # 3 MB, seven times that as numbers
    tracemalloc.start()
    try:
        taken = read(tmp_path, max_sequence=5000, max_tokens=20_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(taken) == 9 and peak < 2 << 20


def test_a_prompt_goes_one_way_in_every_run_and_nine_of_ten_are_not_checked():
    answers = [RecordedAnswer(prompt_ids=(i % 500,), output_ids=(i, 1), temperature=0.0) for i in range(1000)]
    parts = split_traffic(answers)
    by_prompt = [{a.prompt_ids for a in part} for part in (parts.learn, parts.rate, parts.check)]
    assert sum(map(len, by_prompt)) == 500 == len(set().union(*by_prompt))
    assert 30 < len(by_prompt[1]) < 75 and 30 < len(by_prompt[2]) < 75
    again = split_traffic(answers[::-1])
    assert set(again.check) == set(parts.check) and set(again.rate) == set(parts.rate)


def test_nothing_is_checked_with_a_prompt_that_data_mixed_in_teaches(home, tmp_path, monkeypatch):
    monkeypatch.setattr(retrain, "_run", lambda *_: None)
    monkeypatch.setattr(retrain, "_compare", lambda *_, **__: 0)
    target_hash = load_target(home / "target").config.model_hash
    assert main(command(home, tmp_path / "plain")) == 0
    checked = list(read_part(tmp_path / "plain" / "answers" / "check"))
    (tmp_path / "data" / "features-0-2").mkdir(parents=True)
    write_part(tmp_path / "data", checked[:3], target_hash=target_hash)
    assert main(command(home, tmp_path / "mixed", "--data", str(tmp_path / "data"))) == 0
    assert list(read_part(tmp_path / "mixed" / "answers" / "check")) == checked[3:]
    learnt = {a.prompt_ids for a in read_part(tmp_path / "mixed" / "answers" / "learn")}
    assert learnt >= {a.prompt_ids for a in checked[:3]}


def test_a_part_is_read_as_it_was_written(tmp_path):
    answers = [
        RecordedAnswer(prompt_ids=(i % 300, 5), output_ids=(6,) * (1 + i % 4), temperature=(i % 3) / 2)
        for i in range(600)
    ]
    write_part(tmp_path, answers, target_hash="h")
    assert list(read_part(tmp_path)) == answers
    with pytest.raises(ConfigError, match="prompts_hash"):
        write_part(tmp_path, answers[:-1], target_hash="h")


def command(home: Path, out: Path, *extra: str) -> list[str]:
    drafter = home / "run" / "drafter"
    paths = ["--target", home / "target", "--drafter", drafter, "--traffic", home / "traffic", "--out", out]
    few = ["--minutes", "0.01", "--sequences", "3", "--anchors", "4", "--threads", "1"]
    return ["retrain", *map(str, paths), *few, *extra]


def test_a_drafter_goes_on_from_traffic_and_is_kept_only_where_it_is_accepted_further(
    home, tmp_path, capsys, monkeypatch
):
    status = main(command(home, tmp_path / "out"))
    printed = capsys.readouterr()
    assert "120 answers to 120 prompts" in printed.err and "served  accepted length" in printed.out
    new = load_drafter_checkpoint(tmp_path / "out/rated/drafter", target=load_target(home / "target").config)
    old = load_drafter_checkpoint(home / "run/drafter", target=load_target(home / "target").config)
    assert new.config == old.config
    moved = "layers.0.mlp.up_proj.weight"
    assert np.abs(new.weights.float32(moved) - old.weights.float32(moved)).max() > 0
    assert (tmp_path / "out/rated/drafter/calibration.json").exists()
    assert (status == 0) == (tmp_path / "out/drafter/model.safetensors").exists()
    capsys.readouterr()
    # Every outcome, whatever this one was: the same folders, compared with blocks that are known.
    monkeypatch.setattr(retrain, "_run", lambda *_: None)
    kept = tmp_path / "out/drafter"
    for accepted, exit_status, words in (
        (3, 0, "accepted further"),
        (0, 1, "accepted less far"),
        (1, 1, "more than chance"),
        (None, 1, "more than chance"),
    ):
        lengths = iter((1, accepted))
        monkeypatch.setattr(retrain, "_decode", lambda *_, **__: blocks(next(lengths)))  # noqa: B023
        if kept.exists():
            shutil.rmtree(kept)
        assert main(command(home, tmp_path / "out")) == exit_status
        assert (kept / "model.safetensors").exists() is (exit_status == 0) is kept.exists()
        assert words in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["answers", "rated", "run"]
    assert stat.S_IMODE((tmp_path / "out/answers").stat().st_mode) == 0o700


def blocks(accepted: int | None) -> BlockRecords:
    """Return what ten prompts gave, none with None."""
    num = 0 if accepted is None else 40
    return BlockRecords(
        accepted=np.full(num, accepted or 0),
        verify_len=np.full(num, 3),
        confidence_logits=None,
        source=np.array([str(i % 10) for i in range(num)], np.str_),
        block_size=3,
    )


def test_short_answers_to_few_token_prompts_fill_many_pages(home, tmp_path):
    answers = [
        RecordedAnswer(prompt_ids=(i % 200,), output_ids=(3 + i % 7, i % 200), temperature=0.0)
        for i in range(256)
    ]
    target = str(home / "target")
    write_part(tmp_path, answers, target_hash=load_target(target).config.model_hash)
    features = ["data", "--only", "features", "--target", target, "--out", str(tmp_path)]
    assert main([*features, "--feature-layers=-1,0"]) == 0


def test_checked_are_single_answers_of_prompts_from_all_the_time_of_recording():
    answers = [RecordedAnswer(prompt_ids=(i // 3,), output_ids=(i, 1), temperature=0.0) for i in range(600)]
    some = [a.prompt_ids[0] for a in retrain._checked(answers)]
    assert len(set(some)) == len(some) == 64 and some == sorted(some) and some[0] < 4 and some[-1] > 190
    assert len(retrain._checked(answers[:30])) == 10


def test_both_drafters_are_asked_the_same(home, tmp_path, monkeypatch):
    asked = []

    def decoded(questions, *, drafter, **options):
        asked.append((Path(drafter).parent.name, questions, options))
        return SpeculativeRun(records=blocks(1), num_failed=0, num_tokens=1)

    monkeypatch.setattr(retrain, "_run", lambda *_: None)
    monkeypatch.setattr(retrain, "decode", decoded)
    assert main(command(home, tmp_path / "out")) == 1
    (one, *same), (other, *same_again) = asked
    assert (one, other) == ("run", "rated") and same == same_again
    assert len({question.seed for question in same[0]}) == len(same[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--minutes", "0"], ["--minutes", "got 0", "above 0"]),
        (["--minutes", "nan"], ["--minutes", "nan"]),
        (["--lr", "inf"], ["--lr", "inf"]),
        (["--sequences", "0"], ["--sequences", "got 0", "1 or more"]),
        (["--threads", "-1"], ["--threads", "-1", "0 or more"]),
        (["--traffic", "nowhere"], ["--traffic", "nowhere", "dspark serve --record"]),
        (["--drafter", "ngram"], ["ngram", "a drafter is a folder"]),
        (["--data", "DATA"], ["--data", "layers [[1, 2]]", "needs [0, 2]", "--feature-layers=0,2"]),
        (["--data", "OTHER"], ["--data", "made for target other"]),
        (["--max-bytes", "1e4"], ["needed are 100", "--max-bytes"]),
        (["--out", "HOME"], ["--out", "holds other things", "new folder"]),
    ],
)
def test_what_no_step_could_take_is_refused_before_the_first(home, tmp_path, capsys, options, words):
    (tmp_path / "data" / "features-1-2").mkdir(parents=True)
    hash_of = {"data": load_target(home / "target").config.model_hash, "other": "other"}
    answer = [RecordedAnswer(prompt_ids=(1,), output_ids=(2, 3), temperature=0.0)]
    for name, target_hash in hash_of.items():
        write_part(tmp_path / name, answer, target_hash=target_hash)
    places = {"DATA": tmp_path / "data", "OTHER": tmp_path / "other", "HOME": home}
    given = [str(places.get(word, word)) for word in options]
    assert main(command(home, tmp_path / "out", *given)) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in words), told
    assert not (tmp_path / "out").exists()


def test_answers_to_few_prompts_are_refused_telling_why(home, tmp_path, capsys):
    target_hash = load_target(home / "target").config.model_hash
    record(tmp_path / "same", [ONE | {"output_ids": [7, i]} for i in range(200)], target_hash=target_hash)
    assert main(command(home, tmp_path / "out", "--traffic", str(tmp_path / "same"))) == 2
    assert "200 answers, but to 1 different prompts only" in capsys.readouterr().err


def test_an_out_that_cannot_be_written_is_refused(home, tmp_path, capsys):
    (tmp_path / ".answers.part").write_text("in the way")
    assert main(command(home, tmp_path)) == 2
    assert f"--out: {tmp_path} cannot be written" in capsys.readouterr().err


def test_an_out_is_gone_on_with_under_the_same_options_only(home, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(retrain, "_run", lambda *_: None)
    monkeypatch.setattr(retrain, "_compare", lambda *_, **__: 0)
    out = tmp_path / "out"
    assert main(command(home, out)) == 0
    shutil.copytree(home / "run" / "drafter", tmp_path / "drafter")
    for option, value in (
        ("--minutes", "2"),
        ("--drafter", str(tmp_path / "drafter")),
        ("--traffic", str(home)),
        ("--max-sequence", "99"),
    ):
        assert main(command(home, out, option, value)) == 2
        told = capsys.readouterr().err
        assert f"{option}: {out} was made with" in told and value in told
    with locked_folder(out):
        assert main(command(home, out)) == 2
    assert "another build is at work" in capsys.readouterr().err
    monkeypatch.chdir(home)  # the same paths, said otherwise
    again = ["--drafter", "run/drafter", "--traffic", "traffic", "--target", "target"]
    assert main(command(home, out, *again)) == 0


def test_a_run_that_was_killed_while_it_read_is_begun_anew(home, tmp_path, monkeypatch):
    monkeypatch.setattr(retrain, "_run", lambda *_: None)
    monkeypatch.setattr(retrain, "_compare", lambda *_, **__: 0)
    write_part(
        tmp_path / ".answers.part" / "learn", answers_of([RecordedAnswer(**ONE_READ)], 3), target_hash="h"
    )
    assert main(command(home, tmp_path)) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["answers"]
    assert len(list(read_part(tmp_path / "answers" / "learn"))) > 50


def test_where_calibration_has_too_few_blocks_the_drafters_are_compared_all_the_same(
    home, tmp_path, capsys, monkeypatch
):
    def too_few(name: str, *_: str) -> None:
        if name == "calibrate":
            raise ConfigError("calibrate: 3 full blocks, needed are 200")

    monkeypatch.setattr(retrain, "_run", too_few)
    monkeypatch.setattr(retrain, "_decode", lambda *_, **__: blocks(1))
    assert main(command(home, tmp_path / "out")) == 1
    printed = capsys.readouterr()
    assert "the server calibrates while it serves" in printed.err and "gain" in printed.out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_confidence_head": False}, ["no confidence head"]),
        ({"sliding_windows": (16,)}, ["sliding windows [16]"]),
        ({"rope": RopeConfig(theta=5e5)}, ["rope", "500000", "10000"]),
        ({"num_heads": 2, "num_kv_heads": 1}, ["num_heads 2", "the target 4"]),
        ({"own": "embed_tokens.weight"}, ["embed_tokens.weight", "not the target's"]),
        ({"own": "lm_head.weight"}, ["lm_head.weight", "not the target's"]),
    ],
)
def test_a_drafter_of_a_kind_that_is_not_trained_is_refused_naming_it(home, tmp_path, capsys, changes, words):
    target = load_target(home / "target")
    fields = dict(changes)
    own = fields.pop("own", None)
    decoder = {name: fields.pop(name) for name in ("rope", "num_heads", "num_kv_heads") if name in fields}
    config = DrafterConfig(
        decoder=replace(target.config.decoder, num_layers=1, **decoder),
        vocab_size=VOCAB,
        block_size=3,
        target_layer_ids=(0, 2),
        mask_token_id=0,
        markov_rank=4,
        **({"enable_confidence_head": True} | fields),
    )
    tensors = {name: np.ones(shape, np.float32) for name, shape in tensor_shapes(config).items()}
    if own:
        tensors[own] = np.ones((VOCAB, 32), np.float32)
    save_drafter_checkpoint(tmp_path / "drafter", config, tensors)
    assert main(command(home, tmp_path / "out", "--drafter", str(tmp_path / "drafter"))) == 2
    told = capsys.readouterr().err
    assert "--drafter" in told and all(word in told for word in words), told


def test_a_copy_of_the_targets_tables_in_the_drafter_is_fine(home, tmp_path):
    target = load_target(home / "target")
    served = load_drafter_checkpoint(home / "run/drafter", target=target.config)
    tensors = {
        name: served.weights.float32(name) for name in served.weights.names() if name != "draft_to_target"
    }
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors[name] = target.weights.float32(name)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][served.draft_to_target]
    save_drafter_checkpoint(tmp_path / "copy", served.config, tensors, draft_to_target=served.draft_to_target)
    check_drafter(load_drafter_checkpoint(tmp_path / "copy", target=target.config), target)


def test_what_came_before_a_command_began_stops_it_too():
    with StopSignal() as outer:
        outer._ask(15, None)
        with StopSignal() as inner:
            assert inner()
            with pytest.raises(KeyboardInterrupt):
                inner._ask(2, None)
    with StopSignal() as fresh:
        assert not fresh()


def test_a_kept_drafter_is_whole_or_not_there(tmp_path, monkeypatch):
    for name, text in (("new", "new"), ("out/drafter", "old")):
        (tmp_path / name).mkdir(parents=True)
        for part in ("config.json", "model.safetensors"):
            (tmp_path / name / part).write_text(text)
    (tmp_path / "out" / "drafter" / "calibration.json").write_text("of the old one")
    copy = shutil.copyfileobj

    def torn(source, target):
        if source.name.endswith(".safetensors"):
            raise OSError(errno.ENOSPC, "No space left on device")
        copy(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", torn)
        with pytest.raises(CapacityError, match="disk full"):
            retrain._keep(tmp_path / "new", tmp_path / "out" / "drafter")
    texts = {path.name: path.read_text() for path in (tmp_path / "out/drafter").iterdir()}
    assert texts["config.json"] == texts["model.safetensors"] == "old"
    retrain._keep(tmp_path / "new", tmp_path / "out" / "drafter")
    texts = {path.name: path.read_text() for path in (tmp_path / "out/drafter").iterdir()}
    assert texts == {"config.json": "new", "model.safetensors": "new"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["drafter"]


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
    assert not (tmp_path / "out").exists()


def test_the_letters_of_the_benchmark_are_the_same_in_every_run_and_differ():
    assert letters(50, seed=5) == letters(50, seed=5)
    assert len(set(letters(200, seed=5))) == 200
