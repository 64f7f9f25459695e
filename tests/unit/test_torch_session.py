"""The torch executors' passes of a GPU, on the CPU: fixed shapes, padding, capture and replay, one table for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dspark.config import load_serve_config
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.drafters.ngram import NgramDrafter
from dspark.engine.admission import EngineLimits
from dspark.engine.engine import Engine
from dspark.errors import CapacityError, ConfigError, EngineError
from dspark.executors.device import chosen_device
from dspark.executors.interface import DraftBatch
from dspark.executors.tensorrt_buckets import EngineShapes
from dspark.executors.tensorrt_loading import EnginePair, engine_shapes
from dspark.executors.torch_cuda import pair_on, torch_device
from dspark.executors.torch_drafter import TorchBlockDrafter
from dspark.executors.torch_target import TorchTarget
from dspark.models.loading import load_target
from dspark.scheduling.scheduler import make_scheduler
from support.engines import answers, make_engine, make_request
from support.step_batches import ragged_step
from support.tiny_drafters import write_good_drafter, write_tiny_drafter
from support.tiny_models import write_tiny_target

PAGE = 4
SHAPES = replace(
    engine_shapes(max_sequences=4, max_step_tokens=8, max_context_len=64, page_size=PAGE, block_size=4),
    graph_tokens=8,
)


class Recorded:
    """A run that was recorded: does it again, whatever else happened meanwhile."""

    def __init__(self, run: Callable[[], None], log: list[str]) -> None:
        self._run, self._log = run, log

    def replay(self) -> None:
        self._log.append("replay")
        self._run()


class Home:
    """A target and a drafter that is right now and then."""

    def __init__(self, folder: Path, *, qk_norm: bool = False, **drafter: Any) -> None:
        architecture = "qwen3" if qk_norm else "llama"
        write_tiny_target(folder / "target", architecture=architecture, max_context_len=64, tie=True)
        if drafter:
            write_tiny_drafter(folder / "drafter", folder / "target", **drafter)
        else:
            write_good_drafter(folder / "drafter", folder / "target", noise=0.1)
        self.folder, self.log = folder, [""]
        self.target = load_target(folder / "target")
        self.drafter = load_drafter_checkpoint(folder / "drafter", target=self.target.config)

    def pair(self, shapes: EngineShapes = SHAPES) -> EnginePair:
        self.log = []

        def capture(run: Callable[[], None]) -> Recorded:
            self.log.append("capture")
            return Recorded(run, self.log)

        return pair_on(
            torch.device("cpu"),
            self.target,
            self.drafter,
            dtype="float32",
            shapes=shapes,
            page_size=PAGE,
            capture=capture,
        )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_passes_of_fixed_shapes_equal_the_plain_ones(qk_norm: bool, tmp_path: Path) -> None:
    made = Home(tmp_path, qk_norm=qk_norm)
    target = made.pair().target
    plain = TorchTarget(
        made.target.config, made.target.weights, dtype="float32", feature_layer_ids=target.feature_layer_ids
    )
    for executor in (target, plain):
        executor.allocate_cache(num_pages=18, page_size=PAGE)
    target._runner._host[:] = 255  # NaN in every float: nothing may be read that was not written
    rng, context = np.random.default_rng(0), [0, 0, 0]
    steps = ([7, 1, 3], [1, 1, 1], [1, 5, 1], [2, 1, 1], [5, 5, 5])
    for rows in steps:
        batch = ragged_step(rng, rows, context, page_size=PAGE)
        mine, theirs = target.forward(batch), plain.forward(batch)
        np.testing.assert_allclose(mine.logits, theirs.logits, atol=1e-4)
        np.testing.assert_allclose(mine.features, theirs.features, atol=1e-4)
        np.testing.assert_array_equal(mine.argmax, theirs.argmax)
        assert mine.finite.all()
        context = [have + more for have, more in zip(context, rows, strict=True)]
    small = sum(sum(rows) <= SHAPES.graph_tokens for rows in steps)
    assert made.log.count("replay") == small


def test_a_tree_of_fixed_shape_equals_the_plain_one(home: Home) -> None:
    target = home.pair().target
    plain = TorchTarget(home.target.config, home.target.weights, dtype="float32")
    chain = ragged_step(np.random.default_rng(1), [5, 3], [0, 0], page_size=PAGE)
    tree = replace(chain, ancestors=(1 | (1 << chain.positions)).astype(np.int32)[:, None])
    outputs = []
    for executor in (target, plain):
        executor.allocate_cache(num_pages=12, page_size=PAGE)
        outputs.append([executor.forward(batch).logits for batch in (chain, tree)])
    np.testing.assert_allclose(outputs[0], outputs[1], atol=1e-4)
    assert np.abs(outputs[0][0] - outputs[0][1]).max() > 0.1


@pytest.mark.parametrize(
    ("head", "more"),
    [
        ("vanilla", {"sliding_windows": (3, None)}),
        ("gated", {"draft_vocab": 20, "greedy_confidence": True}),
        ("rnn", {"own_embedding": True, "own_head": True}),
        ("none", {"confidence_with_markov": False}),
    ],
)
def test_blocks_of_fixed_shape_equal_the_plain_ones(head: Any, more: dict[str, Any], tmp_path: Path) -> None:
    made = Home(tmp_path, head=head, rank=6, **more)
    drafter = made.pair().drafter
    assert drafter is not None
    embedding = made.target.weights.float32("embed_tokens.weight")
    plain = TorchBlockDrafter(
        made.drafter, target_embedding=embedding, target_head=embedding, dtype="float32"
    )
    rng, found = np.random.default_rng(2), []
    features = rng.standard_normal((9, 64)).astype(np.float32)
    at = np.arange(9, dtype=np.int32)
    batch = DraftBatch(
        anchors=np.array([4, 7, 1], np.int32),
        anchor_positions=np.array([9, 3, 0], np.int32),
        context_len=np.array([9, 3, 0], np.int32),
        page_table=np.array([[0, 1, 2], [0, -1, -1], [-1, -1, -1]], np.int32),
    )
    for executor in (drafter.executor, plain):
        executor.allocate_cache(num_pages=4, page_size=PAGE)
        executor.append_context(features=features, positions=at, slots=at)
        greedy = executor.draft_greedy(batch, num_drafts=np.array([4, 2, 1], np.int32))
        found.append((executor.draft(batch), greedy))
    for mine, theirs in zip(found[0][0].__dataclass_fields__, found[1][0].__dataclass_fields__, strict=True):
        np.testing.assert_allclose(getattr(found[0][0], mine), getattr(found[1][0], theirs), atol=1e-4)
    (_, mine_greedy), (_, their_greedy) = found
    np.testing.assert_array_equal(mine_greedy.num_tokens, their_greedy.num_tokens)
    for row, count in enumerate(mine_greedy.num_tokens):
        np.testing.assert_array_equal(mine_greedy.tokens[row, :count], their_greedy.tokens[row, :count])
        np.testing.assert_allclose(
            mine_greedy.confidence_logits[row, :count], their_greedy.confidence_logits[row, :count], atol=1e-4
        )


def test_answers_of_an_engine_are_those_of_plain_torch(home: Home) -> None:
    limits = EngineLimits(
        max_batch_size=4, max_context_len=64, max_step_tokens=8, num_pages=48, page_size=PAGE
    )
    target, drafter = home.pair()
    assert drafter is not None
    for part in (target, drafter):
        part.allocate_cache(num_pages=limits.num_pages, page_size=PAGE)
    captured = home.log.count("capture")
    assert captured > 10
    engine = Engine(
        target=target,
        drafter=drafter,
        scheduler=make_scheduler(
            "fixed:3", block_size=4, has_confidence=False, cost_model=None, calibrator=None
        ),
        limits=limits,
    )
    plain = make_engine(
        home.folder / "target", drafter=home.folder / "drafter", policy="fixed:3", page_size=PAGE
    )
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [6]]
    params = [{}, {}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.0, "top_p": 0.9, "seed": 6}]
    mine, theirs = (
        answers(
            one, [make_request(p, max_tokens=20, **more) for p, more in zip(prompts, params, strict=True)]
        )
        for one in (engine, plain)
    )
    assert mine == theirs
    assert engine.stats().num_drafter_faults == 0 and engine.stats().num_accepted_tokens > 0
    assert home.log.count("capture") == captured, "nothing is captured while it serves"


def test_looked_up_drafts_are_verified_where_the_logits_are(home: Home) -> None:
    limits = EngineLimits(
        max_batch_size=4, max_context_len=64, max_step_tokens=8, num_pages=48, page_size=PAGE
    )
    shapes = replace(SHAPES, graph_tokens=0)
    target, none = pair_on(
        torch.device("cpu"), home.target, None, dtype="float32", shapes=shapes, page_size=PAGE
    )
    assert none is None and target.longest_chain and not target.schedules
    target.allocate_cache(num_pages=limits.num_pages, page_size=PAGE)
    verified, run_verified = [], target.forward_verified

    def counted(batch: Any, verify: Any) -> Any:
        verified.append(int(verify.row_start[-1]))
        return run_verified(batch, verify)

    target.forward_verified = counted  # type: ignore[method-assign]
    scheduler = make_scheduler("fixed:3", block_size=4, has_confidence=False)
    engine = Engine(target=target, drafter=NgramDrafter(block_size=4), scheduler=scheduler, limits=limits)
    plain = make_engine(home.folder / "target", page_size=PAGE)
    prompts = [[3, 1, 4, 1, 5] * 3, [9, 2]]
    params = [{}, {"temperature": 0.8, "seed": 5}]
    mine, theirs = (
        answers(
            one, [make_request(p, max_tokens=30, **more) for p, more in zip(prompts, params, strict=True)]
        )
        for one in (engine, plain)
    )
    assert mine == theirs
    assert engine.stats().num_accepted_tokens > 0 and len(verified) > 5


def test_target_and_drafter_hold_one_table(home: Home) -> None:
    pair = home.pair()
    assert pair.drafter is not None
    target: Any = pair.target
    executor: Any = pair.drafter.executor
    model, blocks = target._runner.session._model, executor._runner.session._model
    assert blocks._embedding is model._embedding and blocks._head is model._embedding


def test_calls_in_another_order_than_they_were_captured_do_not_mix(home: Home) -> None:
    target = home.pair().target
    target.allocate_cache(num_pages=24, page_size=PAGE)
    wanted: dict[tuple[int, ...], Any] = {}
    for _ in range(2):
        for rows in ([1], [4], [1, 1], [8], [2, 2]):
            batch = ragged_step(np.random.default_rng(len(rows)), rows, [0] * len(rows), page_size=PAGE)
            logits = target.forward(batch).logits
            np.testing.assert_array_equal(logits, wanted.setdefault(tuple(rows), logits))


# What is refused


def test_no_memory_and_a_failing_pass_are_told(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = home.pair().target
    with pytest.raises(CapacityError, match=r"buffers and caches need \d+ bytes on cpu"):
        target.allocate_cache(num_pages=1 << 40, page_size=PAGE)
    target = home.pair(replace(SHAPES, graph_tokens=0)).target
    target.allocate_cache(num_pages=24, page_size=PAGE)

    def fail(_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(target._runner.session._model, "device_pass", fail)
    with pytest.raises(
        EngineError, match=r"torch on cpu failed at a call of tokens \[2\], .*: an illegal memory"
    ):
        target.forward(ragged_step(np.random.default_rng(0), [2], [0], page_size=PAGE))


@pytest.mark.parametrize(
    ("executor", "device", "found"),
    [
        ("auto", "auto", "cpu"),
        ("torch", "auto", "cpu"),
        ("torch", "cuda", "cuda:0"),
        ("auto", "cuda:3", "cuda:3"),
        ("tensorrt", "auto", "cuda:0"),
        ("tensorrt", "cuda:1", "cuda:1"),
        ("native", "cpu", "cpu"),
        ("tensorrt", "cpu", "allowed with executor tensorrt is auto, cuda, cuda:N"),
        ("native", "cuda:1", "got 'cuda:1', allowed with executor native is auto, cpu; GPUs are for torch"),
        ("onnxruntime", "cuda", "allowed with executor onnxruntime is auto, cpu"),
        ("tensorrt_llm", "cuda", "CUDA_VISIBLE_DEVICES chooses its GPUs"),
    ],
)
def test_an_executor_runs_where_it_can(executor: str, device: str, found: str) -> None:
    if "allowed" not in found and "chooses" not in found:
        assert chosen_device(executor, device) == found
        return
    with pytest.raises(ConfigError, match=found):
        chosen_device(executor, device)


def test_a_device_is_a_word_of_three_kinds() -> None:
    given = {"target": "x", "device": "gpu0"}
    with pytest.raises(ConfigError, match="device: got 'gpu0', allowed is auto, cpu, cuda, cuda:N"):
        load_serve_config(None, given, environ={})
    assert load_serve_config(None, given | {"device": "cuda:1"}, environ={}).device == "cuda:1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_told(home: Home) -> None:
    with pytest.raises(
        ConfigError, match=r"device: got 'cuda:0', allowed here are cpu: torch .* finds no CUDA GPU"
    ):
        torch_device("cuda:0")
    with pytest.raises(ConfigError, match="device: got 'cuda:1', allowed here are cpu"):
        make_engine(home.folder / "target", device="cuda:1")
