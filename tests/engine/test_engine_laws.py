"""Laws 1, 2 and 6 of the algorithm through the real engine: what speculation, batching and memory may not change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from dspark.engine.engine import Engine
from dspark.errors import RequestError
from dspark.generate import complete_all
from dspark.request import Request, RequestOutput, SamplingParams
from dspark.sampling.transforms import TokenSampler
from dspark_plugins.native import native_available
from support.chi_square import assert_distributed_as
from support.engines import answers, make_engine, make_request, run
from support.tiny_drafters import write_good_drafter, write_tiny_drafter
from support.tiny_models import write_tiny_target

EXECUTORS = ["torch", *(["native"] if native_available() else [])]
PROMPTS = [[3, 5, 7], [1], list(range(40)), [9, 9, 9, 9, 9, 9, 9], [4, 8, 15, 16, 23, 42] * 4]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), num_layers=2)


@pytest.fixture(scope="module")
def drafters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Every drafter with every head: good ones, whose drafts are often right, and random ones."""
    folder = tmp_path_factory.mktemp("drafters")
    specs = {"ngram": "ngram"}
    for head in ("vanilla", "gated", "rnn"):
        write_good_drafter(folder / f"good-{head}", target, head=head)
        specs[f"good-{head}"] = str(folder / f"good-{head}")
    write_good_drafter(folder / "reduced", target, head="vanilla", draft_vocab=30)
    write_tiny_drafter(folder / "dflash", target, head="none", confidence=False)
    write_tiny_drafter(folder / "no-markov-confidence", target, confidence_with_markov=False)
    for name in ("reduced", "dflash", "no-markov-confidence"):
        specs[name] = str(folder / name)
    return specs | {f"{name}+ngram": specs[name] for name in ("good-vanilla", "reduced", "dflash")}


DRAFTERS = [
    "ngram",
    "good-vanilla",
    "good-gated",
    "good-rnn",
    "reduced",
    "dflash",
    "no-markov-confidence",
    "good-vanilla+ngram",
    "reduced+ngram",
    "dflash+ngram",
]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_speculative_output_equals_plain_output(
    target: Path, drafters: dict[str, str], drafter: str, executor: str
) -> None:
    requests = [make_request(prompt) for prompt in PROMPTS]
    plain = answers(make_engine(target, executor=executor), requests)
    for policy in ("fixed:2", "fixed:4", "threshold:0.5", "auto", "none"):
        engine = make_engine(
            target,
            drafter=drafters[drafter],
            prompt_lookup=drafter.endswith("+ngram"),
            policy=policy,
            executor=executor,
        )
        assert answers(engine, requests) == plain, policy
        one_by_one = [answers(engine, [request])[0] for request in requests]
        assert one_by_one == plain, policy


@pytest.mark.parametrize("drafter", ["good-vanilla", "reduced"])
def test_good_drafters_are_accepted_so_that_the_laws_mean_something(
    target: Path, drafters: dict[str, str], drafter: str
) -> None:
    engine = make_engine(target, drafter=drafters[drafter], policy="fixed:4")
    run(engine, [make_request(prompt, max_tokens=60) for prompt in PROMPTS])
    stats = engine.stats()
    assert 0.2 < stats.num_accepted_tokens / stats.num_spec_steps < 3.5


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_named_seed_gives_the_plain_answer_with_every_drafter_and_batch(
    target: Path, drafters: dict[str, str], drafter: str
) -> None:
    def requests() -> list[Request]:
        return [
            make_request(prompt, temperature=0.9, top_p=0.95, seed=index)
            for index, prompt in enumerate(PROMPTS)
        ]

    plain = answers(make_engine(target), requests())
    for policy, batch in (("fixed:4", 64), ("auto", 2), ("threshold:0.4", 1)):
        engine = make_engine(
            target,
            drafter=drafters[drafter],
            prompt_lookup=drafter.endswith("+ngram"),
            policy=policy,
            max_batch_size=batch,
        )
        assert answers(engine, requests()) == plain, policy


@pytest.mark.parametrize("rule", ["block", "rejection", "coupled"])
@pytest.mark.parametrize("drafter", ["ngram", "good-vanilla", "reduced", "dflash", "reduced+ngram"])
def test_sampled_tokens_follow_the_target(
    target: Path, drafters: dict[str, str], drafter: str, rule: str
) -> None:
    """The second and third token, drafted and verified, are distributed as plain decoding's."""
    params = {"temperature": 1.3, "top_k": 4, "max_tokens": 3}
    prompt = [9, 4, 9, 4, 9, 4, 9, 4, 9]
    engine = make_engine(
        target,
        drafter=drafters[drafter],
        prompt_lookup=drafter.endswith("+ngram"),
        policy="fixed:2",
        rule=rule,
        max_batch_size=256,
    )
    plain = make_engine(target, max_batch_size=256)
    tallies = []
    for which, first_seed in ((plain, 0), (engine, 100_000)):
        tally: dict[tuple[int, ...], int] = {}
        seeded = [make_request(prompt, seed=first_seed + i, **params) for i in range(1000)]
        for answer in answers(which, seeded):
            key = tuple(answer[1:])
            tally[key] = tally.get(key, 0) + 1
        tallies.append(tally)
    keys = sorted({*tallies[0], *tallies[1]})
    reference = np.array([tallies[0].get(key, 0) for key in keys], float)
    observed = np.array([tallies[1].get(key, 0) for key in keys], float)
    # Two samples of one law: chi-square of homogeneity over cells that are large enough.
    large = reference + observed >= 10
    pooled = (reference + observed)[large]
    statistic = float((((reference - observed)[large] ** 2) / pooled).sum())
    degrees = int(large.sum()) - 1
    assert statistic < degrees + 5.0 * np.sqrt(2.0 * degrees) + 5.0


def test_the_first_token_follows_the_targets_distribution(target: Path) -> None:
    engine = make_engine(target, max_batch_size=256)
    prompt = [5, 6, 7]
    tokens = [
        answer[0]
        for answer in answers(
            engine, [make_request(prompt, temperature=1.0, max_tokens=1, seed=i) for i in range(3000)]
        )
    ]
    logits = _first_logits(engine, prompt)
    probs = np.exp(logits - logits.max())
    assert_distributed_as(np.bincount(tokens, minlength=len(probs)), probs / probs.sum())


def _first_logits(engine: Engine, prompt: list[int]) -> np.ndarray:
    from dspark.executors.interface import StepBatch

    count = len(prompt)
    rows = np.arange(count, dtype=np.int32)
    output = engine.target.forward(
        StepBatch(
            tokens=np.array(prompt, np.int32),
            positions=rows,
            query_start=np.array([0, count], np.int32),
            context_len=np.zeros(1, np.int32),
            page_table=np.zeros((1, 1), np.int32),
            slots=rows,
            logit_rows=np.array([count - 1], np.int32),
        )
    )
    return output.logits[0].astype(np.float64)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_chunks_preemption_and_page_size_change_nothing(
    target: Path, drafters: dict[str, str], executor: str
) -> None:
    requests = [make_request([(i * 7 + j) % 50 for j in range(20)], max_tokens=40) for i in range(6)]
    plain = answers(make_engine(target, executor=executor), requests)
    for settings in (
        {"max_step_tokens": 3},
        {"page_size": 1, "max_step_tokens": 7},
        {"page_size": 4, "cache_bytes": _bytes_for(target, pages=26, page_size=4, executor=executor)},
    ):
        engine = make_engine(
            target, drafter=drafters["good-vanilla"], policy="fixed:3", executor=executor, **settings
        )
        assert answers(engine, requests) == plain, settings
        if "cache_bytes" in settings:
            assert engine.stats().num_preemptions > 0


def _bytes_for(target: Path, *, pages: int, page_size: int, executor: str) -> int:
    engine = make_engine(target, executor=executor)
    # Target cache plus that of a two-layer drafter of about the same heads.
    return pages * engine.target.cache_page_bytes(page_size) * 4 // 3


def test_a_prefix_is_found_again_and_changes_nothing(target: Path, drafters: dict[str, str]) -> None:
    prompt = [(i * 3) % 50 for i in range(40)]
    engine = make_engine(target, drafter=drafters["good-vanilla"], policy="fixed:3", page_size=4)
    first = run(engine, [make_request(prompt)])[0]
    before = engine.stats().num_cached_prompt_tokens
    second = run(engine, [make_request(prompt)])[0]
    assert second.token_ids == first.token_ids
    assert engine.stats().num_cached_prompt_tokens - before == 36  # all full pages but the last token's
    assert [step.draft for step in second.steps] == [step.draft for step in first.steps], (
        "the drafter's context did not come with the pages"
    )


def test_step_records_account_for_every_token(target: Path, drafters: dict[str, str]) -> None:
    for drafter, policy in (("ngram", "fixed:3"), ("good-rnn", "fixed:9"), ("good-vanilla", "threshold:0.6")):
        (done,) = run(
            make_engine(target, drafter=drafters[drafter], policy=policy),
            [make_request([3, 5], max_tokens=50)],
        )
        assert all(0 <= s.accepted <= s.verify_len <= len(s.draft) for s in done.steps)
        before_last = 1 + sum(step.accepted + 1 for step in done.steps[:-1])
        assert before_last < len(done.token_ids) == 50 <= before_last + done.steps[-1].accepted + 1
        if policy == "fixed:9":
            assert {step.verify_len for step in done.steps} == {4}, (
                "fixed:K verifies min(K, block) every step"
            )


def test_max_tokens_is_never_passed_by_an_accepted_run(target: Path, drafters: dict[str, str]) -> None:
    engine = make_engine(target, drafter=drafters["good-vanilla"], policy="fixed:4")
    for max_tokens in range(1, 12):
        (done,) = run(engine, [make_request([3, 5], max_tokens=max_tokens)])
        assert (len(done.token_ids), done.finish_reason) == (max_tokens, "length")


def test_an_end_token_inside_an_accepted_run_ends_the_answer_there(
    target: Path, drafters: dict[str, str]
) -> None:
    (plain,) = answers(make_engine(target), [make_request([3, 5], max_tokens=40)])
    engine = make_engine(target, drafter=drafters["good-vanilla"], policy="fixed:4")
    for end_id in sorted(set(plain)):
        (done,) = run(engine, [make_request([3, 5], max_tokens=40, ignore_eos=False, end_id=end_id)])
        assert done.token_ids == plain[: plain.index(end_id) + 1]
        assert done.finish_reason == "stop"


def test_one_token_answers_and_full_contexts_work(tmp_path: Path) -> None:
    target = write_tiny_target(tmp_path / "short", max_context_len=16)
    engine = make_engine(target, drafter="ngram", policy="fixed:8")
    (done,) = run(engine, [make_request([1] * 12, max_tokens=4)])
    assert len(done.token_ids) == 4
    (one,) = run(engine, [make_request([1] * 15, max_tokens=1)])
    assert (len(one.token_ids), one.steps) == (1, ())


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "input_ids"),
        ([50], {}, "input_ids"),
        ([-1], {}, "input_ids"),
        ([1] * 512, {}, "input_ids"),
        ([1], {"max_tokens": 512}, "max_tokens"),
        ([1], {"end_id": 50}, "end_id"),
        ([1], {"bad_words_ids": ((50,),)}, "bad_words"),
        ([1], {"stop_words": ("x",)}, "stop_words"),
    ],
)
def test_what_can_never_be_served_is_refused_by_name(
    target: Path, prompt: list[int], params: dict[str, object], field: str
) -> None:
    engine = make_engine(target)
    with pytest.raises(RequestError) as refused:
        engine.add(make_request(prompt, **params))
    assert refused.value.field == field
    assert not engine.has_work


def test_cancel_gives_pages_back_within_one_step(target: Path) -> None:
    engine = make_engine(target, drafter="ngram", policy="fixed:4", max_batch_size=2)
    outputs: list[RequestOutput] = []
    gone: set[int] = set()

    def request(index: int) -> Request:
        return Request(
            prompt_ids=(1, 2, 3),
            params=SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True),
            emit=outputs.append,
            is_cancelled=lambda: index in gone,
        )

    ids = [engine.add(request(index)) for index in range(4)]  # two run, two wait
    engine.step()
    gone.update({0, 3})
    engine.cancel(ids[1])
    engine.step()
    cancelled = [o.request_id for o in outputs if o.finish_reason == "cancelled"]
    assert sorted(cancelled) == [ids[0], ids[1], ids[3]]
    engine.cancel(ids[2])
    assert engine.stats().pages_held == 0
    assert not engine.has_work


def test_a_request_that_fails_fails_alone(target: Path) -> None:
    engine = make_engine(target)
    calls = 0

    def forward(batch: object, original: object = engine.target.forward) -> object:
        nonlocal calls
        output = original(batch)  # type: ignore[operator]
        calls += 1
        if calls == 3:
            output.logits[0] = np.nan
            output.finite[0] = False
        return output

    engine.target.forward = forward  # type: ignore[method-assign,assignment]
    bad, good = complete_all(engine, [make_request([1, 2]), make_request([3, 4])])
    assert bad.error is not None and "NaN" in str(bad.error)
    assert good.error is None and len(good.token_ids) == 24
    assert engine.stats().pages_held == 0


def test_a_fault_of_our_own_in_one_request_is_logged_with_its_place(
    target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit = TokenSampler.commit

    def broken(sampler: TokenSampler, token_ids: list[int]) -> None:
        commit(sampler, token_ids)
        if sampler.num_tokens == 7:
            raise IndexError("out of bounds")

    monkeypatch.setattr(TokenSampler, "commit", broken)
    bad, good = complete_all(make_engine(target), [make_request([1, 2]), make_request([3], max_tokens=4)])
    assert isinstance(bad.error, IndexError)
    assert good.error is None and len(good.token_ids) == 4
    [record] = [record for record in caplog.records if record.exc_info is not None]
    assert record.name == "dspark.engine" and record.getMessage() == "request 1 failed"


@pytest.mark.skipif(not native_available(), reason="no native executor on this machine")
@pytest.mark.parametrize("drafter", ["ngram", "good-vanilla"])
def test_the_native_executor_answers_without_torch(
    target: Path, drafters: dict[str, str], drafter: str
) -> None:
    code = (
        "import sys; from dspark.cli import main; "
        f"status = main(['generate', '--target', {str(target)!r}, '--drafter', {drafters[drafter]!r}, "
        "'--prompt-ids', '3,5,7', '--max-tokens', '8', '--json']); "
        "sys.exit(status or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["output_ids"]) == 8
