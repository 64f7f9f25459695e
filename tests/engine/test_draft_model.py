"""A smaller model as drafter, through the real engine: what speculation may not change, and that it drafts at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from dspark.drafters.loading import peek_drafter
from dspark.errors import CheckpointError, ConfigError
from dspark.models.hf import HfTarget
from dspark.models.loading import load_target
from dspark.request import Request
from dspark.serving.checks import load_checked_config
from dspark_plugins.native import native_available
from support.engines import answers, make_engine, make_request, run
from support.samples import assert_samples_follow_the_target
from support.tiny_models import random_weights, tiny_config, write_tiny_gguf, write_tiny_target

EXECUTORS = ["torch", *(["native"] if native_available() else [])]
PROMPTS = [[3, 5, 7], [1], list(range(40)), [9, 9, 9, 9, 9, 9, 9], [4, 8, 15, 16, 23, 42] * 4]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), num_layers=2)


@pytest.fixture(scope="module")
def drafters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The target itself, which is always right, the same as GGUF, and a stranger of the other family."""
    folder = tmp_path_factory.mktemp("drafters")
    checkpoint = load_target(target)
    assert isinstance(checkpoint.weights, HfTarget)
    weights = {name: checkpoint.weights.float32(name) for name in checkpoint.weights.names()}
    return {
        "itself": target,
        "gguf": write_tiny_gguf(folder / "itself.gguf", checkpoint.config, weights),
        "stranger": write_tiny_target(
            folder / "stranger", architecture="qwen3", hidden_size=16, num_layers=1, seed=5
        ),
    }


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("drafter", ["itself", "gguf", "stranger"])
def test_greedy_speculative_output_equals_plain_output(
    target: Path, drafters: dict[str, Path], drafter: str, executor: str
) -> None:
    requests = [make_request(prompt) for prompt in PROMPTS]
    plain = answers(make_engine(target, executor=executor), requests)
    for policy, length in (("fixed:2", 5), ("fixed:5", 5), ("fixed:1", 1), ("auto", 5), ("none", 5)):
        engine = make_engine(
            target,
            drafter=drafters[drafter],
            policy=policy,
            executor=executor,
            num_draft_tokens=length,
            drafter_dtype="float32",
        )
        assert answers(engine, requests) == plain, policy
        one_by_one = [answers(engine, [request])[0] for request in requests]
        assert one_by_one == plain, policy
        assert engine.stats().num_drafter_faults == 0


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("drafter", ["itself", "gguf"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 0.9, "seed": 4}])
def test_the_target_as_its_own_drafter_is_always_right(
    target: Path, drafters: dict[str, Path], drafter: str, params: dict[str, float], executor: str
) -> None:
    engine = make_engine(
        target,
        drafter=drafters[drafter],
        policy="fixed:5",
        page_size=4,
        executor=executor,
        drafter_dtype="float32",
    )
    for done in run(engine, [make_request(prompt, max_tokens=40, **params) for prompt in PROMPTS]):
        assert all(step.accepted == step.verify_len == 5 for step in done.steps[:-1])
        assert len(done.steps) == 7  # 39 tokens behind the first, 6 a step


def test_an_unlike_drafter_is_sometimes_right_and_sometimes_wrong(
    target: Path, drafters: dict[str, Path]
) -> None:
    engine = make_engine(target, drafter=drafters["stranger"], policy="fixed:5")
    run(engine, [make_request(prompt, max_tokens=60, temperature=2.0) for prompt in PROMPTS])
    stats = engine.stats()
    assert 0.05 < stats.num_accepted_tokens / stats.num_spec_steps < 4.5


@pytest.mark.parametrize("executor", EXECUTORS)
def test_chunks_preemption_and_page_size_change_nothing(target: Path, executor: str) -> None:
    requests = [make_request([(i * 7 + j) % 50 for j in range(20)], max_tokens=40) for i in range(6)]
    plain = answers(make_engine(target, executor=executor), requests)
    page = make_engine(target, executor=executor, drafter=target, policy="fixed:3")
    bytes_of = page.target.cache_page_bytes(4) + page.drafter.cache_page_bytes(4)
    for settings in (
        {"max_step_tokens": 3},
        {"page_size": 1, "max_step_tokens": 7},
        {"page_size": 4, "cache_bytes": 26 * bytes_of},
    ):
        engine = make_engine(
            target, drafter=target, policy="fixed:3", executor=executor, drafter_dtype="float32", **settings
        )
        done = run(engine, requests)
        assert [one.token_ids for one in done] == plain, settings
        assert all(step.accepted == step.verify_len for one in done for step in one.steps), settings
        if "cache_bytes" in settings:
            assert engine.stats().num_preemptions > 0


def test_a_page_found_again_is_not_computed_again(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [(i * 3) % 50 for i in range(40)]
    engine = make_engine(target, drafter=target, policy="fixed:3", page_size=4)
    runner = engine.drafter.runner  # type: ignore[attr-defined]
    works, rows = runner.forward, []

    def counted(batch: object) -> object:
        rows.append(len(batch.tokens))  # type: ignore[attr-defined]
        return works(batch)

    monkeypatch.setattr(runner, "forward", counted)
    first = run(engine, [make_request(prompt)])[0]
    assert rows[0] == 41, "prompt and anchor"
    rows.clear()
    second = run(engine, [make_request(prompt)])[0]
    assert second.token_ids == first.token_ids
    assert rows[0] <= 5, "36 tokens of the prompt lie in pages that were found again, the rest may, too"
    assert [step.draft for step in second.steps] == [step.draft for step in first.steps]


def test_pages_that_another_kind_of_request_filled_are_caught_up_with(target: Path) -> None:
    prompt = [(i * 3) % 50 for i in range(40)]
    engine = make_engine(target, drafter=target, policy="fixed:3", page_size=4)
    run(engine, [make_request(prompt, num_draft_tokens=0)])
    (done,) = run(engine, [make_request(prompt)])
    assert engine.stats().num_cached_prompt_tokens == 36
    assert all(step.accepted == step.verify_len for step in done.steps)


def test_requests_that_share_a_prompt_draft_from_its_one_copy(target: Path) -> None:
    prompt = [(i * 3) % 50 for i in range(40)]
    engine = make_engine(target, drafter=target, policy="fixed:3", page_size=4)
    run(
        engine, [make_request(prompt, max_tokens=1)]
    )  # its pages are known from here on, and nothing was drafted
    for done in run(engine, [make_request(prompt) for _ in range(3)]):
        assert all(step.accepted == step.verify_len for step in done.steps)
        assert sum(step.verify_len for step in done.steps) > 12


def test_long_prompts_are_caught_up_with_over_steps(target: Path) -> None:
    engine = make_engine(target, drafter=target, policy="fixed:3")
    engine.drafter.max_step_tokens = 16  # type: ignore[attr-defined]
    long, short = run(engine, [make_request(list(range(50))), make_request([1, 2])])
    assert [len(step.draft) for step in long.steps[:5]] == [0, 0, 0, 3, 3]
    assert [len(step.draft) for step in short.steps[:2]] == [3, 3], "others do not wait"


def test_a_drafter_of_a_shorter_context_stops_drafting_there(tmp_path: Path, target: Path) -> None:
    short = write_tiny_target(tmp_path / "short", num_layers=2, max_context_len=32)
    engine = make_engine(target, drafter=short, policy="fixed:3")
    (done,) = run(engine, [make_request(list(range(20)), max_tokens=40)])
    assert answers(make_engine(target), [make_request(list(range(20)), max_tokens=40)]) == [done.token_ids]
    assert done.steps[0].verify_len == 3 and done.steps[-1].verify_len == 0
    assert engine.stats().num_drafter_faults == 0


@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_sampled_tokens_follow_the_target(target: Path, drafters: dict[str, Path], rule: str) -> None:
    engine = make_engine(
        target, drafter=drafters["stranger"], policy="fixed:2", rule=rule, max_batch_size=256
    )
    assert_samples_follow_the_target(engine)
    assert engine.stats().num_accepted_tokens > 20


def test_a_named_seed_gives_the_plain_answer(target: Path, drafters: dict[str, Path]) -> None:
    def requests() -> list[Request]:
        return [make_request(prompt, temperature=0.9, seed=index) for index, prompt in enumerate(PROMPTS)]

    plain = answers(make_engine(target), requests())
    for policy, batch in (("fixed:4", 64), ("auto", 2), ("threshold:0.4", 1)):
        engine = make_engine(target, drafter=drafters["stranger"], policy=policy, max_batch_size=batch)
        assert answers(engine, requests()) == plain, policy


def test_another_vocabulary_is_refused_with_both_sizes(tmp_path: Path, target: Path) -> None:
    other = write_tiny_target(tmp_path / "other", vocab_size=60)
    with pytest.raises(CheckpointError, match=r"vocab_size: .*60.*50"):
        make_engine(target, drafter=other)


def test_another_tokenizer_is_refused_with_both_pieces(tmp_path: Path) -> None:
    target = write_tiny_target(tmp_path / "target", with_tokenizer=True)
    same = write_tiny_target(tmp_path / "same", with_tokenizer=True, num_layers=1)
    checkpoint = load_target(target)
    assert peek_drafter(str(same), checkpoint.config, tokenizer=checkpoint.tokenizer).block_size == 5
    file = same / "tokenizer.json"
    file.write_text(_swapped(file.read_text("utf-8"), "A", "B"), "utf-8")
    with pytest.raises(CheckpointError, match=r"token \d+: .*b'[AB]'.*b'[AB]'"):
        peek_drafter(str(same), checkpoint.config, tokenizer=checkpoint.tokenizer)


def _swapped(text: str, one: str, other: str) -> str:
    """Return a tokenizer's JSON with the ids of two pieces exchanged."""
    fields = json.loads(text)
    vocab = fields["model"]["vocab"]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    return json.dumps(fields)


def test_bigger_draft_vocabularies_of_a_gguf_are_refused(tmp_path: Path, target: Path) -> None:
    config = tiny_config(vocab_size=51)
    file = write_tiny_gguf(tmp_path / "x.gguf", config, random_weights(config))
    with pytest.raises(CheckpointError, match=r"51.*50"):
        peek_drafter(str(file), load_target(target).config)


@pytest.mark.skipif(not native_available(), reason="no native executor on this machine")
def test_the_native_drafter_is_int8_unless_told_otherwise(target: Path) -> None:
    engine = make_engine(target, drafter=target, policy="fixed:3", executor="native")
    assert engine.drafter.runner.dtype == "int8"  # type: ignore[attr-defined]
    run(engine, [make_request(prompt) for prompt in PROMPTS])
    stats = engine.stats()
    assert np.float64(stats.num_accepted_tokens) / stats.num_draft_tokens > 0.8


@pytest.mark.parametrize("executor", EXECUTORS)
def test_look_up_before_a_draft_model_changes_no_answer(
    target: Path, drafters: dict[str, Path], executor: str
) -> None:
    requests = [make_request(prompt, max_tokens=60) for prompt in PROMPTS]
    plain = answers(make_engine(target, executor=executor), requests)
    for drafter, policy in (("itself", "fixed:5"), ("stranger", "fixed:5"), ("stranger", "auto")):
        engine = make_engine(
            target,
            drafter=drafters[drafter],
            policy=policy,
            prompt_lookup=True,
            executor=executor,
            drafter_dtype="float32",
        )
        assert engine.drafter.name == "draft_model+ngram"
        done = run(engine, requests)
        assert [one.token_ids for one in done] == plain
        assert engine.stats().num_drafter_faults == 0
    engine = make_engine(target, drafter=target, policy="fixed:5", prompt_lookup=True)
    for one in run(engine, [make_request([7, 1, 2, 3, 4] * 6, max_tokens=30, temperature=1.5)]):
        assert any(step.accepted == step.verify_len == 5 for step in one.steps), (
            "it drafts behind look-ups, too"
        )


def test_settings_take_a_models_file_as_drafter_and_no_other(
    tmp_path: Path, target: Path, drafters: dict[str, Path]
) -> None:
    given = {"target": str(target), "drafter": str(drafters["gguf"]), "num_draft_tokens": "3"}
    config = load_checked_config(None, given, base=tmp_path, environ={})
    assert (config.drafter, config.num_draft_tokens) == (str(drafters["gguf"]), 3)
    (tmp_path / "model.bin").write_bytes(b"x")
    wrong = {**given, "drafter": str(tmp_path / "model.bin"), "num_draft_tokens": "0"}
    with pytest.raises(ConfigError) as refused:
        load_checked_config(None, wrong, base=tmp_path, environ={})
    assert all(word in str(refused.value) for word in ("model.bin", "num_draft_tokens"))
