"""Answers and their target features in one pass: what decoding computes anyway is kept, not made again.

Lanes of the target's cache each hold one question. Every pass feeds one token of each running answer and
the prompts of newcomers; hidden states of all rows, the log-sum-exp and the arg-max of every sampled row
go into the files that `answers.py` and `feature_cache.py` define. A shard is written when the last of its
answers ends, so a stopped run loses at most the answers of unfinished shards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from dspark.errors import NonFiniteError
from dspark.executors.interface import StepBatch, TargetExecutor

from dspark_build.answers import AnswerShard, Question, shard_path
from dspark_build.feature_cache import PAGE_SIZE, feature_paths, write_features

__all__ = ["make_answers_with_features"]

Int32 = npt.NDArray[np.int32]

PREFILL_ROWS = 384  # prompt rows of one pass, at least one whole prompt


@dataclass(slots=True)
class _Lane:
    """One answer being made."""

    shard: int
    place: int  # in its shard
    question: Question
    tokens: list[int]
    fed: int = 0  # tokens whose K/V are in the cache
    features: list[torch.Tensor] = field(default_factory=list)
    lse: list[float] = field(default_factory=list)
    argmax: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.question.seed)

    rng: np.random.Generator = field(init=False)


def make_answers_with_features(
    data: Path,
    folder: Path,
    plan: Sequence[Sequence[Question]],
    target: TargetExecutor,
    *,
    max_tokens: int,
    eos_ids: frozenset[int],
    num_lanes: int,
    tell: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> None:
    """Make every shard that has no answers yet, with features. A stop is honoured after each pass.

    Arguments:
        data: folder of the answers.
        folder: where features go.
        target: has no cache yet; its feature layers are the stored ones.
        num_lanes: questions decoded together.

    Raises:
        NonFiniteError: the target gave logits or features that are not finite.
        CapacityError: the disk is full; finished shards are kept.
    """
    missing = [index for index in range(len(plan)) if not shard_path(data, index).exists()]
    if not missing:
        return
    longest = max(len(question.prompt_ids) for index in missing for question in plan[index]) + max_tokens
    lane_pages = -(-longest // PAGE_SIZE)
    target.allocate_cache(num_pages=num_lanes * lane_pages, page_size=PAGE_SIZE)
    waiting = _queue(plan, missing)
    lanes: list[_Lane | None] = [None] * num_lanes
    done: dict[int, dict[int, _Lane]] = {index: {} for index in missing}
    started, tokens_made, shards_made = time.monotonic(), 0, 0
    while not should_stop():
        _fill(lanes, waiting)
        running = [(at, lane) for at, lane in enumerate(lanes) if lane is not None]
        if not running:
            return
        tokens_made += _pass(running, target, lane_pages=lane_pages)
        for at, lane in running:
            if lane.tokens[-1] in eos_ids or len(lane.tokens) - len(lane.question.prompt_ids) >= max_tokens:
                lanes[at] = None
                done[lane.shard][lane.place] = lane
                if len(done[lane.shard]) == len(plan[lane.shard]):
                    _write(data, folder, lane.shard, done.pop(lane.shard))
                    shards_made += 1
                    elapsed = time.monotonic() - started
                    tell(
                        f"answers: {shards_made} of {len(missing)} shards, {tokens_made} tokens, "
                        f"{tokens_made / elapsed:.0f} tokens/s, "
                        f"{elapsed / shards_made * (len(missing) - shards_made) / 60:.1f} min left"
                    )


def _queue(plan: Sequence[Sequence[Question]], missing: Sequence[int]) -> Iterator[_Lane]:
    for index in missing:
        for place, question in enumerate(plan[index]):
            yield _Lane(index, place, question, list(question.prompt_ids))


def _fill(lanes: list[_Lane | None], waiting: Iterator[_Lane]) -> None:
    """Put waiting questions into free lanes, as many as one pass may prefill."""
    rows = 0
    for at, lane in enumerate(lanes):
        if lane is None and rows < PREFILL_ROWS:
            lanes[at] = fresh = next(waiting, None)
            rows += PREFILL_ROWS if fresh is None else len(fresh.tokens)


def _pass(running: Sequence[tuple[int, _Lane]], target: TargetExecutor, *, lane_pages: int) -> int:
    """Feed what each lane has not fed yet and sample one token for each; return how many."""
    lengths = [len(lane.tokens) - lane.fed for _, lane in running]
    start = np.cumsum([0, *lengths]).astype(np.int32)
    table = np.stack([np.arange(lane_pages) + at * lane_pages for at, _ in running]).astype(np.int32)
    positions = np.concatenate([np.arange(lane.fed, len(lane.tokens)) for _, lane in running])
    first_slot = np.repeat([at * lane_pages * PAGE_SIZE for at, _ in running], lengths)
    output = target.forward(
        StepBatch(
            tokens=np.array([t for _, lane in running for t in lane.tokens[lane.fed :]], np.int32),
            positions=positions.astype(np.int32),
            query_start=start,
            context_len=np.array([lane.fed for _, lane in running], np.int32),
            page_table=table,
            slots=(first_slot + positions).astype(np.int32),
            logit_rows=start[1:] - 1,
        )
    )
    assert output.features is not None, "the target was made with feature layers"
    if not output.finite.all() or not np.isfinite(output.features).all():
        raise NonFiniteError("the target gave values that are not finite; is the checkpoint sound?")
    features = torch.from_numpy(output.features).to(torch.bfloat16)
    lse = torch.logsumexp(torch.from_numpy(output.logits), -1).tolist()
    for row, (_, lane) in enumerate(running):
        lane.features.append(features[start[row] : start[row + 1]])
        lane.lse.append(lse[row])
        lane.argmax.append(int(output.argmax[row]))
        lane.fed = len(lane.tokens)
        lane.tokens.append(_draw(output.logits[row], lane))
    return len(running)


def _draw(logits: npt.NDArray[np.float32], lane: _Lane) -> int:
    if lane.question.temperature == 0.0:
        return lane.argmax[-1]
    shifted = (logits - logits.max()) * np.float32(1.0 / lane.question.temperature)
    cumulative = np.cumsum(np.exp(shifted), dtype=np.float64)
    at = int(np.searchsorted(cumulative, lane.rng.random() * cumulative[-1], side="right"))
    return min(at, len(logits) - 1)


def _write(data: Path, folder: Path, index: int, lanes: dict[int, _Lane]) -> None:
    """Write features, then the answers: a shard whose answers are there is whole."""
    ordered = [lanes[place] for place in sorted(lanes)]
    write_features(
        feature_paths(folder, index),
        (rows for lane in ordered for rows in lane.features),
        lse=np.concatenate([np.array(lane.lse, np.float32) for lane in ordered]),
        argmax=np.concatenate([np.array(lane.argmax, np.int32) for lane in ordered]),
    )
    AnswerShard.of_answers(
        [lane.question for lane in ordered],
        [lane.tokens[len(lane.question.prompt_ids) :] for lane in ordered],
    ).save(shard_path(data, index))
