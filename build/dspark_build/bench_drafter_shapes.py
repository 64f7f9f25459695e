"""What a drafter of a given shape costs beside its target, before anyone trains it: `bench_native --drafter-shapes`.

Weights are random, which costs what trained ones cost. A step of one request drafts one greedy block and appends the
features of the rows that the step before committed, so both are timed, in turn with a target pass of one row.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from dspark.drafters.checkpoint import load_drafter_checkpoint, save_drafter_checkpoint, tensor_shapes
from dspark.executors.interface import DraftBatch
from dspark.executors.native_drafter import NativeBlockDrafter
from dspark.executors.native_target import NativeTarget
from dspark.models.config import DrafterConfig, TargetConfig

__all__ = [
    "COMMITTED_ROWS",
    "DrafterCost",
    "DrafterShape",
    "measure_drafter",
    "measure_shapes",
    "shape_table",
]

COMMITTED_ROWS = 3  # appended in a step: the anchor and two accepted drafts
_PAGES, _PAGE_SIZE, _CONTEXT = 32, 16, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterShape:
    """What decides the cost of a drafter."""

    num_layers: int
    draft_vocab_size: int  # Vd
    markov_rank: int  # r
    block_size: int  # G


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCost:
    """Median milliseconds at one request."""

    block_ms: float  # one greedy block: layers, head, sequential head, confidence
    append_ms: float  # features of COMMITTED_ROWS rows into the drafter's cache
    target_ms: float  # one row through the target

    @property
    def ratio(self) -> float:
        """Drafting of one step over a target pass."""
        return (self.block_ms + self.append_ms) / self.target_ms


def write_random_drafter(folder: Path, target: TargetConfig, shape: DrafterShape) -> DrafterConfig:
    """Write a drafter of this shape with a vanilla head, three feature layers and random weights."""
    last = target.decoder.num_layers - 1
    config = DrafterConfig(
        decoder=replace(target.decoder, num_layers=shape.num_layers),
        vocab_size=target.vocab_size,
        block_size=shape.block_size,
        target_layer_ids=(1, last // 2, last - 2),
        mask_token_id=target.vocab_size - 1,
        markov_rank=shape.markov_rank,
        enable_confidence_head=True,
        sliding_windows=(None,) * shape.num_layers,
        draft_vocab_size=shape.draft_vocab_size,
    )
    rng = np.random.default_rng(0)
    tensors = {
        name: np.ones(size, np.float32)
        if name.endswith("norm.weight")
        else (0.02 * rng.standard_normal(size)).astype(np.float32)
        for name, size in tensor_shapes(config, previous="draft").items()
    }
    mapping = np.arange(shape.draft_vocab_size, dtype=np.int32)
    save_drafter_checkpoint(folder, config, tensors, draft_to_target=mapping)
    return config


def measure_drafter(
    folder: str | Path, target: NativeTarget, run_target: Callable[[], object], rounds: int, *, dtype: str
) -> DrafterCost:
    """Time one drafter beside its target, in turn.

    Arguments:
        target: made with the drafter's feature layers or not; only threads, embedding and head are used.
        run_target: one row through it.
    """
    checkpoint = load_drafter_checkpoint(folder, target=target.config)
    drafter = NativeBlockDrafter(checkpoint, dtype=dtype, target=target)
    drafter.allocate_cache(num_pages=_PAGES, page_size=_PAGE_SIZE)
    width = len(checkpoint.config.target_layer_ids) * target.config.decoder.hidden_size
    features = np.random.default_rng(1).standard_normal((_CONTEXT, width)).astype(np.float32)
    places = np.arange(_CONTEXT, dtype=np.int32)
    drafter.append_context(features=features, positions=places, slots=places)
    batch = DraftBatch(
        anchors=np.array([5], np.int32),
        anchor_positions=np.array([_CONTEXT], np.int32),
        context_len=np.array([_CONTEXT], np.int32),
        page_table=np.arange(_PAGES, dtype=np.int32)[None],
    )
    count = np.array([checkpoint.config.block_size], np.int32)
    work: dict[str, Callable[[], object]] = {
        "target": run_target,
        "block": lambda: drafter.draft_greedy(batch, num_drafts=count),
        "append": lambda: drafter.append_context(
            features=features[:COMMITTED_ROWS],
            positions=places[-COMMITTED_ROWS:],
            slots=places[-COMMITTED_ROWS:],
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, call in work.items():
            started = time.perf_counter()
            call()
            if number:
                times[name].append(1e3 * (time.perf_counter() - started))
    block, append, one = (statistics.median(times[name]) for name in ("block", "append", "target"))
    return DrafterCost(block_ms=block, append_ms=append, target_ms=one)


def measure_shapes(
    target: NativeTarget, run_target: Callable[[], object], rounds: int
) -> Iterator[tuple[DrafterShape, DrafterCost]]:
    """Yield the cost of every shape worth training, cheapest first."""
    for layers, vocab, rank, block in product((1, 2), (8192, 12288), (64, 128, 256), (5, 7)):
        shape = DrafterShape(num_layers=layers, draft_vocab_size=vocab, markov_rank=rank, block_size=block)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "drafter"
            write_random_drafter(path, target.config, shape)
            yield shape, measure_drafter(path, target, run_target, rounds, dtype=target.dtype)


def shape_table(costs: list[tuple[DrafterShape, DrafterCost]]) -> str:
    """Return the costs as text, one shape a line."""
    lines = [
        f"{'layers':>6}{'Vd':>8}{'rank':>6}{'block':>7}{'block ms':>10}{'append ms':>11}{'of a target row':>17}"
    ]
    for shape, cost in costs:
        lines.append(
            f"{shape.num_layers:6}{shape.draft_vocab_size:8}{shape.markov_rank:6}{shape.block_size:7}"
            f"{cost.block_ms:10.2f}{cost.append_ms:11.2f}{cost.ratio:17.3f}"
        )
    return "\n".join(lines)
