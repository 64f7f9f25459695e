"""Laws of `data`, `train`, `calibrate` and `eval` on a tiny target: resuming, refusing, losing nothing."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.errors import CapacityError, CheckpointError, ConfigError, NonFiniteError
from dspark.models.loading import load_target
from dspark_build import files, greedy_confidence, train
from dspark_build.answers import AnswerShard, shard_path
from dspark_build.cli import main
from dspark_build.feature_cache import FeatureStore, feature_folder, feature_paths
from dspark_build.training_data import Dataset, target_head
from support.tiny_models import write_tiny_target
from torch.nn import functional

LAYERS = "0,2"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A tiny target with its data folder."""
    folder = tmp_path_factory.mktemp("train")
    write_tiny_target(
        folder / "target", vocab_size=300, with_tokenizer=True, eos_ids=(2,), max_context_len=256
    )
    lines = [json.dumps({"source": "a", "turns": [f"add {i} and {i * 7}"]}) for i in range(60)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert main(data_command(folder, folder / "data")) == 0
    return folder


def data_command(home: Path, out: Path, *extra: str) -> list[str]:
    return [
        *(
            "data",
            "--target",
            str(home / "target"),
            "--prompts",
            str(home / "prompts.jsonl"),
            "--out",
            str(out),
        ),
        *("--max-tokens", "24", "--shard-size", "20", "--feature-layers", LAYERS, "--executor", "torch"),
        *("--dtype", "float32", *extra),
    ]


def train_command(home: Path, out: Path, *extra: str) -> list[str]:
    return [
        *(
            "--target",
            str(home / "target"),
            "--data",
            str(home / "data"),
            "--out",
            str(out),
            "--block-size",
            "3",
        ),
        *("--layers", "1", "--rank", "4", "--draft-vocab", "200", "--sequences", "3", "--anchors", "4"),
        *("--positions", "300", "--dtype", "float32", "--ema", "0.9", *extra),
    ]


def trainer_of(home: Path, out: Path, *extra: str) -> train.Trainer:
    return train.build_trainer(train_parser().parse_args(train_command(home, out, *extra)))


def train_parser():
    import argparse

    parser = argparse.ArgumentParser()
    train.add_train_arguments(parser)
    return parser


def dataset(home: Path) -> Dataset:
    checkpoint = load_target(home / "target")
    head = target_head(checkpoint, dtype=torch.float32)
    return Dataset([home / "data"], target=checkpoint.config, layer_ids=(0, 2), head=head)


def test_cached_features_say_what_the_target_says(home):
    from dspark.executors.torch_target import TorchTarget
    from dspark_build.feature_cache import whole_sequences

    checkpoint = load_target(home / "target")
    data = dataset(home)
    target = TorchTarget(checkpoint.config, checkpoint.weights, dtype="float32", feature_layer_ids=(0, 2))
    target.allocate_cache(num_pages=20, page_size=16)
    one = data.example(data.train[3])
    batch = whole_sequences([one.tokens[:-1].astype(np.int32)], checkpoint.config)
    batch = type(batch)(
        **{f: getattr(batch, f) for f in batch.__dataclass_fields__} | {"logit_rows": batch.positions}
    )
    output = target.forward(batch)
    np.testing.assert_allclose(one.features.float(), output.features, rtol=0.01, atol=0.01)
    logits = output.logits[one.prompt_len - 1 :]
    lse = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    np.testing.assert_allclose(one.target_lse, lse, rtol=0.02, atol=0.1)
    agree = (one.target_argmax.numpy() == output.argmax[one.prompt_len - 1 :]).mean()
    assert agree > 0.9  # features are kept in bfloat16


def test_greedy_answers_follow_the_target_and_every_prompt_is_answered(home):
    shards = [AnswerShard.load(shard_path(home / "data", i)) for i in range(3)]
    assert sorted(int(p) for shard in shards for p in shard.prompt_id) == list(range(60))
    data = dataset(home)
    hits = total = 0
    for number, i in data.train:
        if shards[number].temperature[i] == 0.0:
            one = data.example((number, i))
            hits += int((one.target_argmax.numpy() == one.tokens[one.prompt_len :]).sum())
            total += len(one.target_argmax)
    assert total > 100 and hits / total > 0.9


def test_held_out_prompts_are_never_trained_on(home):
    data = dataset(home)
    assert data.held_out
    ids = {kind: set() for kind in ("train", "held_out")}
    for kind, found in ids.items():
        for number, i in getattr(data, kind):
            found.add(int(AnswerShard.load(shard_path(home / "data", number)).prompt_id[i]))
    assert not ids["train"] & ids["held_out"]


def test_data_that_was_interrupted_ends_the_same(home, tmp_path):
    out = tmp_path / "data"
    assert main(data_command(home, out)) == 0
    folder = feature_folder(out, (0, 2))
    kept = shard_path(out, 0).stat().st_mtime_ns
    shard_path(out, 1).unlink()
    feature_paths(folder, 2)[1].unlink()
    assert main(data_command(home, out)) == 0
    assert shard_path(out, 0).stat().st_mtime_ns == kept
    for index in range(3):
        ours, theirs = (AnswerShard.load(shard_path(f, index)) for f in (out, home / "data"))
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        pair = [FeatureStore(feature_folder(f, (0, 2)), index, width=64) for f in (out, home / "data")]
        # The passes were cut differently: equal up to a rounding of bfloat16.
        torch.testing.assert_close(pair[0].rows.float(), pair[1].rows.float(), atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(pair[0].lse, pair[1].lse, atol=2e-2, rtol=5e-3)


def test_data_of_other_settings_is_refused_with_both_values(home, capsys):
    assert main(data_command(home, home / "data", "--max-tokens", "25")) == 2
    assert "max_tokens 24, asked for is 25" in capsys.readouterr().err


def test_data_of_another_target_is_refused_with_both_hashes(home, tmp_path):
    write_tiny_target(tmp_path / "other", vocab_size=300, with_tokenizer=True, eos_ids=(2,), seed=9)
    other = load_target(tmp_path / "other")
    with pytest.raises(CheckpointError) as caught:
        Dataset(
            [home / "data"],
            target=other.config,
            layer_ids=(0, 2),
            head=target_head(other, dtype=torch.float32),
        )
    assert other.config.model_hash in str(caught.value)
    assert load_target(home / "target").config.model_hash in str(caught.value)


def test_hot_answers_count_as_often_as_asked(home):
    checkpoint = load_target(home / "target")
    head = target_head(checkpoint, dtype=torch.float32)
    once, thrice = (
        Dataset([home / "data"], target=checkpoint.config, layer_ids=(0, 2), head=head, repeat_hot=times)
        for times in (1, 3)
    )
    hot = {key for key in once.train if once.temperature(key) >= 0.9}
    assert hot and set(once.train) - hot
    assert sorted(thrice.train) == sorted([*once.train, *hot, *hot])
    assert thrice.held_out == once.held_out
    with pytest.raises(ConfigError, match="--repeat-hot: got 0, allowed is 1 or more"):
        Dataset([home / "data"], target=checkpoint.config, layer_ids=(0, 2), head=head, repeat_hot=0)


def test_several_data_folders_are_read_as_one(home):
    checkpoint = load_target(home / "target")
    one, two = (
        Dataset(
            [home / "data"] * times,
            target=checkpoint.config,
            layer_ids=(0, 2),
            head=target_head(checkpoint, dtype=torch.float32),
        )
        for times in (1, 2)
    )
    assert two.num_answer_tokens == 2 * one.num_answer_tokens and one.held_out
    assert [two.example(key).tokens.tolist() for key in two.held_out] == [
        one.example(key).tokens.tolist() for key in one.held_out for _ in range(2)
    ]
    last = two.example(two.train[-1])
    assert torch.equal(last.features, one.example(one.train[-1]).features)
    assert one.content_hash != two.content_hash


@pytest.mark.parametrize(
    ("content", "word"),
    [("", "empty"), ("{nonsense\n", "line 1"), ('{"turns": []}\n', "line 1"), (None, "cannot read")],
)
def test_prompt_files_that_cannot_be_used_are_refused(home, tmp_path, capsys, content, word):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    command = ["data", "--target", str(home / "target"), "--prompts", str(path), "--out", str(tmp_path / "d")]
    assert main(command) == 2
    assert word in capsys.readouterr().err


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(home, tmp_path):
    whole = trainer_of(home, tmp_path / "whole")
    for _ in range(6):
        whole.step(whole.new_acceptance())
    first = trainer_of(home, tmp_path / "cut")
    for _ in range(3):
        first.step(first.new_acceptance())
    first.save()
    second = trainer_of(home, tmp_path / "cut")
    assert second.resume()
    for _ in range(3):
        second.step(second.new_acceptance())
    assert second.counters.positions == whole.counters.positions
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, second.parameters[name]), name
        assert torch.equal(whole.ema.mean[name], second.ema.mean[name]), name


def test_training_to_the_end_leaves_a_drafter_that_serves_and_curves(home, tmp_path):
    out = tmp_path / "run"
    assert main(["train", *train_command(home, out)]) == 0
    found = load_drafter_checkpoint(out / "drafter", target=load_target(home / "target").config)
    assert found.config.block_size == 3 and found.config.draft_vocab_size == 200
    header, *rows = (out / "curves.csv").read_text(encoding="utf-8").splitlines()
    assert "held_out_accepted_len" in header and "acceptance_3" in header and rows
    base = ["--target", str(home / "target"), "--drafter", str(out / "drafter"), "--executor", "torch"]
    stale = json.dumps({"format_version": 1, "drafter_hash": "another", "sts_temperatures": [1.0] * 3})
    (out / "drafter" / "calibration.json").write_text(stale, encoding="utf-8")  # is replaced, not believed
    calibrated = main(["calibrate", *base, "--prompts", str(home / "prompts.jsonl"), "--max-tokens", "32"])
    assert calibrated == 0
    content = json.loads((out / "drafter" / "calibration.json").read_text(encoding="utf-8"))
    assert all(len(content[f"{kind}sts_temperatures"]) == 3 for kind in ("", "greedy_", "sampled_"))
    report = tmp_path / "report"
    command = [
        "eval",
        *base,
        "--prompts",
        str(home / "prompts.jsonl"),
        "--limit",
        "20",
        "--max-tokens",
        "32",
        "--out",
        str(report),
    ]
    assert main(command) == 0
    figures = json.loads((report / "report.json").read_text(encoding="utf-8"))
    assert figures["sources"]["a"]["num_steps"] == figures["overall"]["num_steps"] > 0
    assert len(figures["overall"]["confidence_calibrated"]["ece"]) == 3
    assert (report / "reliability.png").stat().st_size > 0


def test_a_drafter_that_goes_on_from_another_starts_where_it_ended(home, tmp_path):
    first = trainer_of(home, tmp_path / "first", "--ema", "0")
    first.step(first.new_acceptance())
    first.save()
    drafter = str(tmp_path / "first" / "drafter")
    second = trainer_of(home, tmp_path / "second", "--init", drafter, "--vocab-from", drafter)
    for name, parameter in first.parameters.items():
        torch.testing.assert_close(parameter, second.parameters[name], atol=2e-3, rtol=1e-3)


def test_another_block_size_takes_over_all_weights_and_another_rank_none(home, tmp_path):
    first = trainer_of(home, tmp_path / "first", "--ema", "0")
    first.save()
    drafter = str(tmp_path / "first" / "drafter")
    more = ("--init", drafter, "--vocab-from", drafter)
    longer = trainer_of(home, tmp_path / "longer", *more, "--block-size", "5")
    for name, parameter in first.parameters.items():
        torch.testing.assert_close(parameter, longer.parameters[name], atol=2e-3, rtol=1e-3)
    with pytest.raises(ConfigError, match="rank 4.* rank 6"):
        trainer_of(home, tmp_path / "wider", *more, "--rank", "6")


def test_a_deeper_drafter_starts_with_the_drafts_of_the_one_it_grew_from(home, tmp_path):
    first = trainer_of(home, tmp_path / "first", "--ema", "0", "--layers", "1")
    first.step(first.new_acceptance())
    first.save()
    drafter = str(tmp_path / "first" / "drafter")
    more = ("--init", drafter, "--vocab-from", drafter, "--ema", "0")
    same, deeper = (trainer_of(home, tmp_path / n, *more, "--layers", n) for n in ("1", "3"))
    name = "layers.2.self_attn.q_proj.weight"
    torch.testing.assert_close(deeper.parameters[name], same.parameters[name.replace("2", "0")])
    assert deeper.held_out().survival == pytest.approx(same.held_out().survival, rel=1e-5)
    deeper.step(deeper.new_acceptance())
    deeper.step(deeper.new_acceptance())
    assert deeper.parameters[name.replace("q_proj", "o_proj")].abs().max() > 0
    deeper.save()
    with pytest.raises(ConfigError, match="3 layers.* 1 layers"):
        trainer_of(home, tmp_path / "back", "--init", str(tmp_path / "3" / "drafter"), "--layers", "1")


def test_a_drafter_goes_on_without_its_sequential_head(home, tmp_path):
    first = trainer_of(home, tmp_path / "first", "--ema", "0")
    first.step(first.new_acceptance())
    first.save()
    drafter = str(tmp_path / "first" / "drafter")
    second = trainer_of(
        home, tmp_path / "second", "--init", drafter, "--vocab-from", drafter, "--head", "none"
    )
    width = second.model.config.decoder.hidden_size
    assert not any(name.startswith("markov_head") for name in second.parameters)
    for name, taken in second.parameters.items():
        given = first.parameters[name]
        given = given[:, :width] if name == "confidence_head.proj.weight" else given
        torch.testing.assert_close(given, taken, atol=2e-3, rtol=1e-3)
    second.save()
    with pytest.raises(ConfigError, match="head vanilla rank 0.* head vanilla rank"):
        trainer_of(home, tmp_path / "third", "--init", str(tmp_path / "second" / "drafter"))


def test_another_draft_vocabulary_takes_over_the_rows_of_the_tokens_both_have(home, tmp_path):
    first = trainer_of(home, tmp_path / "first", "--ema", "0", "--draft-vocab", "60")
    first.step(first.new_acceptance())
    first.save()
    drafter = str(tmp_path / "first" / "drafter")
    second = trainer_of(home, tmp_path / "second", "--init", drafter, "--draft-vocab", "90")
    old, new = (t.model.frozen.draft_to_target.tolist() for t in (first, second))
    both = sorted({*old} & {*new})
    assert 0 < len(both) < 90
    old_rows, new_rows = ([ids.index(token) for token in both] for ids in (old, new))
    close = {"atol": 2e-3, "rtol": 1e-3}
    for name, parameter in first.parameters.items():
        taken = second.parameters[name]
        if name.startswith("markov_head.markov_w"):
            torch.testing.assert_close(parameter[old_rows], taken[new_rows], **close)
        else:
            torch.testing.assert_close(parameter, taken, **close)
    fresh_rows = [new.index(token) for token in new if token not in both]
    w1, w2 = (second.parameters[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    others = first.parameters["markov_head.markov_w1.weight"][-1]
    torch.testing.assert_close(w1[[*fresh_rows, -1]], others.expand(len(fresh_rows) + 1, -1), **close)
    assert not w2[fresh_rows].any()


def test_a_copied_layer_sees_the_context_as_the_target_does_where_its_input_is_stored(home, tmp_path):
    checkpoint = load_target(home / "target")
    trainer = trainer_of(home, tmp_path / "run", "--init", "layers:1", "--target-layers", "0,2")
    model, d = trainer.model, checkpoint.config.decoder.hidden_size
    features = torch.randn(20, 2 * d, generator=torch.Generator().manual_seed(3))
    seen = model.hidden_norm(model.fc(features))
    norm = torch.from_numpy(checkpoint.weights.float32("layers.1.input_layernorm.weight"))
    own = functional.rms_norm(features[:, :d], (d,), norm, checkpoint.config.decoder.rms_norm_eps)
    torch.testing.assert_close(seen, own, atol=0.1, rtol=0.0)  # but for the noise that breaks ties
    assert functional.cosine_similarity(seen, own, dim=-1).min() > 0.999


def test_a_run_with_other_settings_is_refused_with_both_values(home, tmp_path):
    first = trainer_of(home, tmp_path / "run")
    first.save()
    with pytest.raises(ConfigError, match=r"lr 0\.001, asked for is 0\.5"):
        trainer_of(home, tmp_path / "run", "--lr", "0.5").resume()


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(home, tmp_path):
    trainer = trainer_of(home, tmp_path / "run")
    trainer.step(trainer.new_acceptance())
    trainer.save()
    before = (tmp_path / "run" / "state.pt").read_bytes()
    with torch.no_grad():
        trainer.model.norm.weight[0] = float("nan")
    with pytest.raises(NonFiniteError, match="step 2"):
        trainer.step(trainer.new_acceptance())
    assert (tmp_path / "run" / "state.pt").read_bytes() == before


def test_a_full_disk_is_told_and_costs_nothing_finished(home, tmp_path, monkeypatch):
    trainer = trainer_of(home, tmp_path / "run")
    trainer.save()
    before = (tmp_path / "run" / "state.pt").read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(CapacityError, match="disk full"):
        trainer.save()
    assert (tmp_path / "run" / "state.pt").read_bytes() == before
    assert not list((tmp_path / "run").glob(".*.part"))


def test_a_signal_ends_the_run_with_its_state_saved(home, tmp_path):
    trainer = trainer_of(home, tmp_path / "run", "--positions", "1e9")
    with train.StopSignal() as stop:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGTERM)
        train.train(trainer, should_stop=stop, checkpoint_s=1e9)
    again = trainer_of(home, tmp_path / "run", "--positions", "1e9")
    assert again.resume() and again.counters.step == 1


def test_the_schedule_rises_then_falls_to_its_floor(home, tmp_path):
    trainer = trainer_of(home, tmp_path / "run", "--positions", "1000", "--warmup-share", "0.1")
    rates = []
    for positions in range(0, 1001, 50):
        trainer.counters.positions = positions
        rates.append(trainer.pace().lr)
    top = int(np.argmax(rates))
    assert top == 2 and rates[0] < 0.1 * rates[top]
    assert all(np.diff(rates[top:]) < 0)
    assert rates[-1] == pytest.approx(0.02 * 1e-3)


def test_the_confidence_head_alone_can_be_fitted_and_nothing_else_moves(home, tmp_path):
    assert main(["train", *train_command(home, tmp_path / "run")]) == 0
    first = tmp_path / "run" / "drafter"
    options = ["--confidence-only", "--init", str(first), "--vocab-from", str(first)]
    assert main(["train", *train_command(home, tmp_path / "fitted"), *options]) == 0
    target = load_target(home / "target").config
    before, after = (
        load_drafter_checkpoint(folder, target=target).weights
        for folder in (first, tmp_path / "fitted" / "drafter")
    )
    names = [name for name in before.names() if name != "draft_to_target"]
    moved = {name for name in names if not np.array_equal(before.float32(name), after.float32(name))}
    assert moved == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert main(["train", *train_command(home, tmp_path / "none"), "--confidence-only"]) != 0


def test_the_confidence_run_tells_what_an_arg_max_draft_is_worth(home, tmp_path, monkeypatch, capsys):
    assert main(["train", *train_command(home, tmp_path / "run")]) == 0
    first, fitted = (tmp_path / name / "drafter" for name in ("run", "fitted"))
    options = ["--confidence-only", "--init", str(first), "--vocab-from", str(first)]
    monkeypatch.setattr(train, "MIN_BLOCKS", 10)
    monkeypatch.setattr(greedy_confidence, "MIN_BLOCKS", 10)
    assert main(["train", *train_command(home, tmp_path / "fitted"), *options]) == 0
    assert "greedy confidence:" in capsys.readouterr().err
    target = load_target(home / "target").config
    assert load_drafter_checkpoint(first, target=target).greedy_confidence() is None
    weights = load_drafter_checkpoint(fitted, target=target).greedy_confidence()
    assert weights is not None and weights.shape == (3, 3) and np.isfinite(weights).all()
    monkeypatch.setattr(greedy_confidence, "MIN_BLOCKS", 10**6)
    assert main(["train", *train_command(home, tmp_path / "few"), *options]) == 0
    assert "left out" in capsys.readouterr().err


def test_the_fit_finds_the_weights_that_the_outcomes_were_drawn_with():
    rng = np.random.default_rng(3)
    z, logit_q = rng.normal(0.3, 1.0, (20_000, 2)), rng.normal(0.0, 1.5, (20_000, 2))
    true = np.array([[0.8, 1.5, 0.9], [0.5, 0.9, 0.4]])
    rate = 1.0 / (1.0 + np.exp(-(true[:, 0] * z + true[:, 1] * logit_q + true[:, 2])))
    hit = rng.random(rate.shape) < rate
    known = np.stack([np.ones(len(hit), bool), hit[:, 0]], 1)
    slots = greedy_confidence.GreedySlots(
        features=np.stack([z, logit_q, np.ones_like(z)], -1), hit=hit, known=known
    )
    np.testing.assert_allclose(greedy_confidence.fit_weights(slots), true, atol=0.15)


def test_some_answers_are_kept_to_judge_the_fit_however_many_one_pass_takes(home, tmp_path, monkeypatch):
    trainer = trainer_of(home, tmp_path / "run", "--block-size", "4")
    monkeypatch.setattr(greedy_confidence, "MIN_BLOCKS", 10)
    fitted, fit_weights = [], greedy_confidence.fit_weights
    monkeypatch.setattr(
        greedy_confidence, "fit_weights", lambda slots: fitted.append(len(slots.hit)) or fit_weights(slots)
    )
    fit = greedy_confidence.fit_greedy_confidence(trainer.model, trainer.data, sequences=1000)
    assert fit is not None
    learnt, whole = fitted
    assert 0 < learnt < whole == fit.num_blocks


def test_what_learns_comes_back_when_a_measure_of_what_is_served_fails(home, tmp_path):
    trainer = trainer_of(home, tmp_path / "run", "--block-size", "4")
    assert trainer.ema is not None
    name, value = next(iter(trainer.parameters.items()))
    trainer.ema.mean[name].add_(1.0)
    before = value.detach().clone()
    seen = []

    def measure():
        with trainer._served():
            seen.append(bool((value != before).any()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure()
    assert seen == [True] and (value == before).all()


def test_slots_behind_a_miss_or_the_end_of_the_answer_are_not_learnt_from(home, tmp_path):
    trainer = trainer_of(home, tmp_path / "run", "--block-size", "4")
    keys = [key for key in trainer.data.train if trainer.data.temperature(key) == 0.0]
    assert 0 < len(keys) < len(trainer.data.train)
    parts = list(greedy_confidence.greedy_slots(trainer.model, trainer.data, keys[:6], sequences=3))
    assert len(parts) == 2
    for part in parts:
        assert part.known[:, 0].all()
        assert not (part.known[:, 1:] & ~part.hit[:, :-1]).any()
        assert not (part.known[:, 1:] & ~part.known[:, :-1]).any()
