"""EAGLE-3 and MTP heads through the real engine: what speculation may not change, and that drafts are the formulas'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from dspark.config import ServeConfig
from dspark.drafters.loading import load_drafter, peek_drafter
from dspark.engine.engine import Engine
from dspark.errors import ConfigError
from dspark.executors.torch_cuda import load_pair_on
from dspark.generate import Completion
from dspark.models.loading import load_target
from dspark.request import Request
from dspark.scheduling.scheduler import make_scheduler
from dspark_plugins.native import native_available
from support.dense_head import DenseHead
from support.engines import answers, make_engine, make_request, run
from support.samples import assert_samples_follow_the_target
from support.tiny_heads import write_bigram_target, write_good_head, write_tiny_head
from support.tiny_models import write_tiny_target

EXECUTORS = ["torch", *(["native"] if native_available() else [])]
PROMPTS = [[3, 5, 7], [1], list(range(40)), [9, 9, 9, 9, 9, 9, 9], [4, 8, 15, 16, 23, 42] * 4]
HEADS: dict[str, dict[str, object]] = {
    "eagle3": {"kind": "eagle3"},
    "eagle3-reduced": {"kind": "eagle3", "draft_vocab": 30, "own_tables": True},
    "eagle3-narrow": {"kind": "eagle3", "hidden_size": 24, "own_tables": True, "qk_norm": True},
    "eagle3-normed": {"kind": "eagle3", "norm_before_residual": True, "layer_ids": (1,)},
    "mtp": {"kind": "mtp"},
    "mtp-behind-norm": {"kind": "mtp", "target_norm": True, "draft_vocab": 30, "own_tables": True},
}
GOOD = ["good-eagle3", "good-mtp"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), num_layers=2)


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    written = {name: write_tiny_head(folder / name, target, **values) for name, values in HEADS.items()}  # type: ignore[arg-type]
    return written | {
        f"good-{kind}": write_good_head(folder / f"good-{kind}", target, kind=kind)  # type: ignore[arg-type]
        for kind in ("eagle3", "mtp")
    }


def assert_drafted_by_the_formulas(dense: DenseHead, request: Request, done: Completion) -> None:
    """Every draft of every step is what the head says of the text so far, computed from scratch."""
    text, drafted = [*request.prompt_ids, done.token_ids[0]], 0
    for step in done.steps:
        if step.draft:
            assert list(step.draft) == dense.drafts(text, len(step.draft))
            drafted += len(step.draft)
        text = [
            *request.prompt_ids,
            *done.token_ids[: len(text) - len(request.prompt_ids) + step.accepted + 1],
        ]
    assert drafted > 10


@pytest.mark.parametrize("head", [*HEADS, *GOOD])
def test_drafts_are_those_of_the_formulas(target: Path, heads: dict[str, Path], head: str) -> None:
    dense = DenseHead(heads[head], target)
    engine = make_engine(target, drafter=heads[head], policy="fixed:3", page_size=4)
    requests = [make_request(prompt, max_tokens=12) for prompt in PROMPTS]
    for request, done in zip(requests, run(engine, requests), strict=True):
        assert_drafted_by_the_formulas(dense, request, done)
    assert engine.stats().num_drafter_faults == 0


@pytest.mark.parametrize(
    ("head", "executor"),
    [
        *((head, "torch") for head in (*HEADS, *GOOD)),
        *((head, EXECUTORS[-1]) for head in ("eagle3", "good-mtp")),
    ],
)
def test_greedy_speculative_output_equals_plain_output(
    target: Path, heads: dict[str, Path], head: str, executor: str
) -> None:
    requests = [make_request(prompt) for prompt in PROMPTS]
    plain = answers(make_engine(target, executor=executor), requests)
    for policy, length in (("fixed:2", 5), ("fixed:5", 5), ("auto", 3)):
        engine = make_engine(
            target, drafter=heads[head], policy=policy, executor=executor, num_draft_tokens=length
        )
        assert answers(engine, requests) == plain, policy
        assert [answers(engine, [request])[0] for request in requests[:3]] == plain[:3], policy
        assert engine.stats().num_drafter_faults == 0


@pytest.mark.parametrize("head", GOOD)
def test_a_head_that_knows_the_targets_rule_is_right(tmp_path: Path, target: Path, head: str) -> None:
    bigrams = write_bigram_target(tmp_path / "bigrams", target)
    folder = write_good_head(tmp_path / "head", bigrams, kind=head.removeprefix("good-"))  # type: ignore[arg-type]
    engine = make_engine(bigrams, drafter=folder, policy="fixed:5")
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 4}):
        run(engine, [make_request(prompt, max_tokens=40, **params) for prompt in PROMPTS])
    stats = engine.stats()
    assert stats.num_accepted_tokens / stats.num_draft_tokens > 0.9


@pytest.mark.parametrize("head", GOOD)
def test_good_heads_are_accepted_so_that_the_laws_mean_something(
    target: Path, heads: dict[str, Path], head: str
) -> None:
    engine = make_engine(target, drafter=heads[head], policy="fixed:4")
    run(engine, [make_request(prompt, max_tokens=60) for prompt in PROMPTS])
    stats = engine.stats()
    assert 0.2 < stats.num_accepted_tokens / stats.num_spec_steps < 3.5


@pytest.mark.parametrize("head", ["good-eagle3", "mtp"])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_step_tokens": 3},
        {"page_size": 1, "max_step_tokens": 7},
        {"page_size": 4, "pages": 26},
    ],
)
def test_chunks_preemption_and_page_size_change_neither_answers_nor_drafts(
    target: Path, heads: dict[str, Path], head: str, settings: dict[str, int]
) -> None:
    requests = [make_request([(i * 7 + j) % 50 for j in range(20)], max_tokens=40) for i in range(6)]
    plain = answers(make_engine(target), requests)
    given: dict[str, object] = {key: value for key, value in settings.items() if key != "pages"}
    if "pages" in settings:
        given["cache_bytes"] = settings["pages"] * _page_bytes(make_engine(target, drafter=heads[head]), 4)
    engine = make_engine(target, drafter=heads[head], policy="fixed:3", **given)
    done = run(engine, requests)
    assert [one.token_ids for one in done] == plain
    assert (engine.stats().num_preemptions > 0) == ("pages" in settings)
    dense = DenseHead(heads[head], target)
    for request, one in list(zip(requests, done, strict=True))[-2:]:  # the youngest are preempted first
        assert_drafted_by_the_formulas(dense, request, one)


def _page_bytes(engine: Engine, page_size: int) -> int:
    return engine.target.cache_page_bytes(page_size) + engine.drafter.cache_page_bytes(page_size)


@pytest.mark.parametrize("head", ["eagle3", "mtp"])
def test_prompts_that_go_on_differently_share_pages_and_draft_by_the_formulas(
    target: Path, heads: dict[str, Path], head: str
) -> None:
    shared = [(i * 3) % 50 for i in range(40)]
    engine = make_engine(target, drafter=heads[head], policy="fixed:3", page_size=4)
    dense = DenseHead(heads[head], target)
    for rest in ([], [7, 7], [21, 8, 1, 1, 2]):
        request = make_request([*shared, *rest], max_tokens=16)
        (done,) = run(engine, [request])
        assert_drafted_by_the_formulas(dense, request, done)
    assert engine.stats().num_cached_prompt_tokens == 2 * 40


@pytest.mark.parametrize(
    ("head", "rule"),
    [
        ("good-eagle3", "block"),
        ("good-eagle3", "coupled"),
        ("eagle3-reduced", "block"),
        ("good-mtp", "block"),
    ],
)
def test_sampled_tokens_follow_the_target(target: Path, heads: dict[str, Path], head: str, rule: str) -> None:
    engine = make_engine(target, drafter=heads[head], policy="fixed:2", rule=rule, max_batch_size=256)
    assert_samples_follow_the_target(engine)
    assert engine.stats().num_accepted_tokens > (5 if head == "eagle3-reduced" else 50)


@pytest.mark.parametrize("head", GOOD)
def test_a_named_seed_gives_the_plain_answer(target: Path, heads: dict[str, Path], head: str) -> None:
    def requests() -> list[Request]:
        return [make_request(prompt, temperature=0.9, seed=index) for index, prompt in enumerate(PROMPTS)]

    plain = answers(make_engine(target), requests())
    for policy, batch in (("fixed:4", 64), ("auto", 2)):
        engine = make_engine(target, drafter=heads[head], policy=policy, max_batch_size=batch)
        assert answers(engine, requests()) == plain, policy


@pytest.mark.parametrize("kind", ["good-eagle3", "good-mtp", "draft_model"])
def test_targets_of_fixed_shapes_are_drafted_for_alike(
    target: Path, heads: dict[str, Path], kind: str
) -> None:
    """What runs on a GPU beside the torch executor's graphs, run on the CPU."""
    spec = str(heads.get(kind, target))
    checkpoint, config = (
        load_target(target),
        ServeConfig(target=str(target), dtype="float32", max_batch_size=4),
    )
    outline = peek_drafter(spec, checkpoint.config, num_draft_tokens=4)
    fixed = load_pair_on("cpu", checkpoint, spec=spec, outline=outline, config=config).target
    drafter = load_drafter(
        spec,
        target=checkpoint.config,
        target_executor=fixed,
        executor="torch",
        dtype="auto",
        num_draft_tokens=4,
    )
    plain = make_engine(target, drafter=spec, policy="fixed:4", num_draft_tokens=4)
    for part in (fixed, drafter):
        part.allocate_cache(num_pages=64, page_size=16)
    engine = Engine(
        target=fixed,
        drafter=drafter,
        scheduler=make_scheduler("fixed:4", block_size=4, has_confidence=False),
        limits=replace(plain.limits, max_batch_size=4, num_pages=64),
    )
    requests = [make_request(prompt) for prompt in PROMPTS]
    mine, theirs = run(engine, requests), run(plain, requests)
    assert [done.token_ids for done in mine] == [done.token_ids for done in theirs]
    assert [[step.draft for step in done.steps] for done in mine] == [
        [step.draft for step in done.steps] for done in theirs
    ]


@pytest.mark.parametrize("head", GOOD)
def test_half_precision_drafts_nearly_alike(target: Path, heads: dict[str, Path], head: str) -> None:
    counts = []
    for dtype in ("float32", "bfloat16"):
        engine = make_engine(target, drafter=heads[head], policy="fixed:4", drafter_dtype=dtype)
        run(engine, [make_request(prompt, max_tokens=60) for prompt in PROMPTS])
        assert engine.drafter.runner.dtype == dtype  # type: ignore[attr-defined]
        counts.append(engine.stats().num_accepted_tokens)
    assert counts[1] > 0.7 * counts[0]


@pytest.mark.skipif(not native_available(), reason="no native executor on this machine")
def test_a_head_beside_a_native_int8_target_takes_a_type_that_torch_has(
    target: Path, heads: dict[str, Path]
) -> None:
    engine = make_engine(target, drafter=heads["good-mtp"], policy="fixed:3", executor="native", dtype="int8")
    assert engine.drafter.runner.dtype in ("bfloat16", "float32")  # type: ignore[attr-defined]
    run(engine, [make_request([3, 5, 7])])
    assert engine.stats().num_drafter_faults == 0
    with pytest.raises(ConfigError, match="int8"):
        make_engine(target, drafter=heads["good-mtp"], executor="native", drafter_dtype="int8")
