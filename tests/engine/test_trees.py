"""Trees of drafts through the real engine: greedy answers stay what they were, and more of a step is accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dspark.calibration.tree import BlockCalibrator, TreeRater
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.interface import DraftBlock, DraftInput, DraftTree, TreeExecutor
from dspark.drafters.tree import grow_trees
from dspark.engine.engine import Engine
from dspark.executors.interface import DraftBatch
from dspark.request import Request, RequestOutput, SamplingParams
from dspark.sampling.transforms import TokenSampler
from dspark.sampling.verification import Verdict, verify_tree
from dspark.scheduling.acceptance import is_unrated
from dspark.scheduling.interface import StepObservation
from dspark.scheduling.tree_choice import TreeChoice
from dspark_plugins.native import native_available
from support.engines import answers, make_engine, make_request, run
from support.tiny_drafters import write_good_drafter, write_tiny_drafter
from support.tiny_models import write_tiny_target

EXECUTORS = ["torch", *(["native"] if native_available() else [])]
PROMPTS = [[3, 5, 7], [1], list(range(40)), [9, 9, 9, 9, 9, 9, 9], [4, 8, 15, 16, 23, 42] * 4]
SIZE = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), num_layers=2)


@pytest.fixture(scope="module")
def drafters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafters")
    for head in ("vanilla", "gated", "rnn"):
        write_good_drafter(folder / head, target, head=head)
    write_good_drafter(folder / "reduced", target, head="vanilla", draft_vocab=30)
    write_tiny_drafter(folder / "dflash", target, head="none", confidence=False)
    return {path.name: path for path in folder.iterdir()}


def engine_of(target: Path, drafter: Path, **settings: object) -> Engine:
    return make_engine(target, drafter=drafter, **{"draft_tree": SIZE, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("drafter", ["vanilla", "gated", "rnn", "reduced", "dflash"])
def test_greedy_answers_with_trees_equal_plain_ones(
    target: Path, drafters: dict[str, Path], drafter: str, executor: str
) -> None:
    requests = [make_request(prompt) for prompt in PROMPTS]
    plain = answers(make_engine(target, executor=executor), requests)
    for policy, lookup in (("fixed:3", False), (f"fixed:{SIZE}", True), ("auto", True)):
        engine = engine_of(target, drafters[drafter], executor=executor, policy=policy, prompt_lookup=lookup)
        assert engine.drafter.block_size == SIZE
        assert answers(engine, requests) == plain, policy
        assert [answers(engine, [request])[0] for request in requests] == plain, policy


@pytest.mark.parametrize("size", [1, 3, 4, 64])
def test_trees_may_be_smaller_than_a_chain_or_as_large(
    target: Path, drafters: dict[str, Path], size: int
) -> None:
    requests = [make_request(prompt) for prompt in PROMPTS]
    plain = answers(make_engine(target), requests)
    for policy in ("auto", "threshold:0.1"):
        engine = engine_of(target, drafters["vanilla"], policy=policy, draft_tree=size)
        done = run(engine, requests)
        assert [one.token_ids for one in done] == plain
        drafted = [len(step.draft) for one in done for step in one.steps]
        most = engine.drafter.block_size if policy == "auto" else size  # it drafts chains where they pay more
        assert max(drafted) <= most and engine.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_ratings_that_are_not_finite_cost_their_nodes_and_nothing_else(
    target: Path, drafters: dict[str, Path], executor: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [make_request(prompt, num_draft_tokens=5) for prompt in PROMPTS]
    plain = answers(make_engine(target, executor=executor), requests)
    engine = engine_of(target, drafters["vanilla"], executor=executor, policy="fixed:5")
    grown = DSparkDrafter._grow_trees

    def broken(self: DSparkDrafter, inputs: Sequence[DraftInput], batch: DraftBatch) -> DraftBlock:
        block = grown(self, inputs, batch)
        assert block.tree is not None and block.tree.rating is not None
        block.tree.rating[:, 2:] = value
        return block

    monkeypatch.setattr(DSparkDrafter, "_grow_trees", broken)
    done = run(engine, requests)
    assert [one.token_ids for one in done] == plain
    assert engine.stats().num_drafter_faults == 0
    assert {len(step.draft) for one in done for step in one.steps} <= {0, 1, 2}
    assert engine.stats().num_accepted_tokens > 0


def test_looked_up_chains_beside_trees_are_learnt_from_as_anywhere(
    target: Path, drafters: dict[str, Path]
) -> None:
    """Nodes of trees are told apart: of those the accepted ones are no prefix."""
    engine = engine_of(target, drafters["vanilla"], policy=f"fixed:{SIZE}", prompt_lookup=True)
    seen: list[StepObservation] = []
    engine.scheduler.observe = seen.append  # type: ignore[method-assign]
    engine.scheduler.verify_len = lambda **given: np.minimum(given["num_drafts"], 1)  # type: ignore[method-assign]
    run(engine, [make_request(prompt, max_tokens=100) for prompt in PROMPTS])
    num_looked_up = num_trees = num_cut_off = 0
    for step in seen:
        if step.confidence_logits is None:
            continue
        looked_up = is_unrated(step.confidence_logits, step.num_drafts)
        tree = (step.num_drafts > 0) & ~looked_up
        assert step.altered[tree].all() and not step.altered[looked_up].any()
        if tree.any() and looked_up.any():
            num_looked_up, num_trees = num_looked_up + looked_up.sum(), num_trees + tree.sum()
        for row in np.flatnonzero(looked_up & (step.accepted == 1)):
            assert step.soft_labels is not None
            assert np.isfinite(step.soft_labels[row, 1])
            num_cut_off += 1
    assert min(num_looked_up, num_trees, num_cut_off) > 0


def test_no_step_is_spent_on_teaching_the_calibrator_what_trees_cannot_tell(
    target: Path, drafters: dict[str, Path]
) -> None:
    engine = engine_of(target, drafters["vanilla"], policy="auto")
    calibrator = engine.scheduler.calibrator
    assert isinstance(calibrator, BlockCalibrator)
    calibrator.inner.deepest_starved = lambda: 4  # type: ignore[method-assign]
    seen: list[StepObservation] = []
    observe = engine.scheduler.observe
    engine.scheduler.observe = lambda step: (seen.append(step), observe(step))[1]  # type: ignore[method-assign]
    rate = TreeRater.rate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dspark.scheduling.load_aware._LOOK_EVERY", 1)
        patch.setattr(TreeChoice, "next_is_tree", lambda _self, _num: True)  # else chains are tried
        patch.setattr(TreeRater, "rate", lambda self, block: _hopeless(rate(self, block)))
        run(engine, [make_request([3, 5, 7])])
    assert any(step.num_drafts.any() for step in seen)
    assert not any(step.verify_len.any() for step in seen)


def _hopeless(block: DraftBlock) -> DraftBlock:
    assert block.confidence_logits is not None
    return replace(block, confidence_logits=np.full_like(block.confidence_logits, -1e3))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_tree_of_as_many_rows_accepts_more_than_a_chain(
    target: Path, drafters: dict[str, Path], executor: str
) -> None:
    accepted = {}
    for size in (0, SIZE):
        engine = make_engine(
            target, drafter=drafters["reduced"], executor=executor, policy="fixed:4", draft_tree=size
        )
        run(engine, [make_request(prompt, max_tokens=100) for prompt in PROMPTS])
        stats = engine.stats()
        accepted[size] = stats.num_accepted_tokens / stats.num_spec_steps
    assert accepted[SIZE] > accepted[0] > 0.2


def test_sampled_and_greedy_requests_side_by_side_get_chains_and_their_plain_answers(
    target: Path, drafters: dict[str, Path]
) -> None:
    requests = [
        make_request(prompt, **({} if index % 2 else {"temperature": 0.8, "seed": index}))
        for index, prompt in enumerate(PROMPTS)
    ]
    plain = answers(make_engine(target), requests)
    engine = engine_of(target, drafters["vanilla"], policy="fixed:4")
    assert answers(engine, requests) == plain


def test_log_probs_are_those_of_the_rows_on_the_accepted_path(
    target: Path, drafters: dict[str, Path]
) -> None:
    told = []
    for engine in (make_engine(target), engine_of(target, drafters["reduced"], policy=f"fixed:{SIZE}")):
        outputs: list[RequestOutput] = []
        for prompt in PROMPTS:
            asked = make_request(prompt, return_log_probs=True, logprobs=2)
            engine.add(Request(prompt_ids=asked.prompt_ids, params=asked.params, emit=outputs.append))
            while engine.step():
                pass
        told.append([entry for output in outputs for entry in output.log_probs])
    plain, trees = told
    assert len(trees) == 24 * len(PROMPTS)
    assert [entry.rank for entry in trees] == [entry.rank for entry in plain]
    np.testing.assert_allclose([e.log_prob for e in trees], [e.log_prob for e in plain], atol=1e-5)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_drafter_is_fed_the_rows_of_the_accepted_path_in_the_slots_of_their_positions(
    target: Path, drafters: dict[str, Path], executor: str
) -> None:
    fed: list[dict[int, tuple[int, np.ndarray]]] = []
    for size in (0, SIZE):
        engine = engine_of(
            target,
            drafters["reduced"],
            policy=f"fixed:{SIZE}",
            draft_tree=size,
            executor=executor,
            page_size=4,
        )
        rows: dict[int, tuple[int, np.ndarray]] = {}  # by position: slot and features

        def observe(
            *,
            features: np.ndarray,
            positions: np.ndarray,
            slots: np.ndarray,
            rows: dict[int, tuple[int, np.ndarray]] = rows,
            feed: Callable[..., None] = engine.drafter.observe,
        ) -> None:
            assert not set(positions.tolist()) & set(rows), "a row is fed once"
            rows.update(zip(positions.tolist(), zip(slots.tolist(), features, strict=True), strict=True))
            feed(features=features, positions=positions, slots=slots)

        engine.drafter.observe = observe  # type: ignore[method-assign]
        (done,) = run(engine, [make_request([3, 5, 7], max_tokens=100)])
        assert any(step.accepted for step in done.steps)
        fed.append(rows)
    chains, trees = fed
    shared = sorted(set(chains) & set(trees))  # the last step may end further on in one of them
    assert shared == list(range(len(shared))) and len(shared) >= 100
    for position in shared:
        assert trees[position][0] == chains[position][0]
        np.testing.assert_allclose(trees[position][1], chains[position][1], atol=1e-4)


def test_long_prompts_beside_trees_change_nothing(target: Path, drafters: dict[str, Path]) -> None:
    """Prefill rows share the pass, and its masks, with the nodes of trees."""
    prompts = [[3, 5, 7], list(range(49)) * 3, [2, 4], list(range(40, 0, -1)) * 2]
    requests = [make_request(prompt, max_tokens=40) for prompt in prompts]
    plain = answers(make_engine(target, max_step_tokens=40, max_batch_size=2), requests)
    engine = engine_of(
        target, drafters["vanilla"], policy=f"fixed:{SIZE}", max_step_tokens=40, max_batch_size=2
    )
    assert answers(engine, requests) == plain


@pytest.mark.skipif(not native_available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("drafter", ["vanilla", "reduced", "dflash"])
def test_native_trees_are_those_of_the_plain_form(
    target: Path, drafters: dict[str, Path], drafter: str
) -> None:
    engine = engine_of(target, drafters[drafter], executor="native", policy="fixed:4")
    assert isinstance(engine.drafter, DSparkDrafter)
    executor = engine.drafter.executor
    assert isinstance(executor, TreeExecutor) and executor.makes_trees
    run(engine, [make_request(list(range(16)))])  # leaves a context in the pages
    batch = DraftBatch(
        anchors=np.array([7, 9, 3], np.int32),
        anchor_positions=np.array([8, 3, 0], np.int32),
        context_len=np.array([8, 3, 0], np.int32),
        page_table=np.arange(3, dtype=np.int32)[:, None].repeat(1, axis=1),
    )
    num_nodes = np.array([SIZE, 5, 9], np.int32)
    fast = executor.draft_tree(batch, num_nodes=num_nodes, width=3, branch=4)
    plain = grow_trees(
        executor,
        batch,
        num_nodes=num_nodes,
        draft_to_target=engine.drafter.draft_to_target,
        width=3,
        branch=4,
    )
    assert fast.num_nodes.tolist() == plain.num_nodes.tolist() == num_nodes.tolist()
    for row, count in enumerate(num_nodes):
        for name in ("tokens", "parents", "depths", "ranks"):
            assert getattr(fast, name)[row, :count].tolist() == getattr(plain, name)[row, :count].tolist(), (
                name
            )
        np.testing.assert_allclose(fast.log_q[row, :count], plain.log_q[row, :count], atol=2e-5)
        if fast.rating is not None:
            assert plain.rating is not None
            np.testing.assert_allclose(fast.rating[row, :count], plain.rating[row, :count], atol=1e-5)


def sampler() -> TokenSampler:
    return TokenSampler(SamplingParams(temperature=0.0), seed=1, prompt_ids=(), vocab_size=8, eos_ids=())


def test_the_walk_follows_the_targets_own_tokens() -> None:
    """Nodes 0..4: 3 and 5 behind the anchor, 1 and 2 behind the 5, 6 behind that 2."""
    drafts, parents = [3, 5, 1, 2, 6], [-1, -1, 1, 1, 3]
    wanted = [5, 0, 2, 0, 6, 7]  # arg-max of the row behind the anchor and behind each node
    logits = np.eye(8, dtype=np.float32)[wanted]
    verdict = verify_tree(sampler(), logits, None, drafts, parents, position=0)
    assert verdict.path == (1, 3, 4) and verdict.token_ids == (5, 2, 6, 7) and verdict.accepted == 3
    nothing = verify_tree(
        sampler(), np.eye(8, dtype=np.float32)[[4, 0, 0, 0, 0, 0]], None, drafts, parents, position=0
    )
    assert nothing.path == () and nothing.token_ids == (4,)


def block_of(log_q: list[float], *, parents: list[int], ranks: list[int]) -> DraftBlock:
    size = len(log_q)
    depths = [0] * size
    for node, parent in enumerate(parents):
        depths[node] = 0 if parent < 0 else depths[parent] + 1
    tree = DraftTree(
        tokens=np.arange(10, 10 + size, dtype=np.int32)[None],
        parents=np.array([parents], np.int32),
        depths=np.array([depths], np.int32),
        ranks=np.array([ranks], np.int32),
        log_q=np.array([log_q], np.float32),
        rating=None,
        num_nodes=np.array([size], np.int32),
    )
    return DraftBlock(
        tokens=tree.tokens, num_tokens=tree.num_nodes, distributions=None, confidence_logits=None, tree=tree
    )


def test_nodes_are_ordered_by_survival_and_rated_by_its_ratios() -> None:
    block = TreeRater().rate(
        block_of(np.log([0.5, 0.9, 0.4, 0.3]).tolist(), parents=[-1, 0, -1, 1], ranks=[0, 0, 1, 0])
    )
    assert block.tree is not None
    # survivals 0.5, 0.45, 0.4, 0.135: the second choice behind the anchor stands before the deepest node
    assert block.tree.tokens.tolist() == [[10, 11, 12, 13]] and block.tree.parents.tolist() == [
        [-1, 0, -1, 1]
    ]
    confidence = block.confidence()
    assert confidence is not None
    np.testing.assert_allclose(np.cumprod(confidence[0]), [0.5, 0.45, 0.4, 0.135], atol=1e-5)
    swapped = TreeRater().rate(
        block_of(np.log([0.5, 0.2, 0.4, 0.9]).tolist(), parents=[-1, 0, -1, 2], ranks=[0, 0, 1, 0])
    )
    assert swapped.tree is not None
    assert swapped.tree.tokens.tolist() == [[10, 12, 13, 11]] and swapped.tree.parents.tolist() == [
        [-1, -1, 1, 0]
    ]


def test_a_drafter_that_is_too_sure_is_believed_less_after_a_while() -> None:
    rater, rng = TreeRater(), np.random.default_rng(0)

    def rated() -> float:
        confidence = rater.rate(block_of([np.log(0.9)], parents=[-1], ranks=[0])).confidence()
        assert confidence is not None
        return float(confidence[0, 0])

    assert rated() == pytest.approx(0.9, abs=1e-3)
    for _ in range(400):
        block = rater.rate(block_of([np.log(0.9)], parents=[-1], ranks=[0]))
        right = rng.random() < 0.6
        rater.observe(block, [Verdict(int(right), (10, 1) if right else (1,))], usable=np.array([True]))
    assert rated() == pytest.approx(0.6, abs=0.06)


def test_labels_come_from_every_child_of_the_path_whether_it_was_verified_or_not() -> None:
    rater = TreeRater()
    block = rater.rate(
        block_of(np.log([0.5, 0.4, 0.3, 0.2]).tolist(), parents=[-1, 0, -1, 1], ranks=[0, 0, 1, 0])
    )
    assert block.tree is not None
    rater.observe(block, [Verdict(1, (10, 11), path=(0,))], usable=np.array([True]))
    ((_, _, labels),) = rater._seen
    assert labels.tolist() == [
        True,
        False,
        True,
    ]  # 10, its sibling, and 11, which the added token shows to be right
