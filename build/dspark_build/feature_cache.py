"""Target features of answer shards, cached in memory-mapped files.

For each answer shard: `features-N.bin`, bfloat16 rows [rows, L * d] of the stored layers (the last
decoder layer is always the last of them: the target's distribution is recomputed from it), and
`targets-N.npz` with the log-sum-exp and the arg-max of the target's logits at the rows that predict
answer tokens. The .npz is written last and says that the shard is whole. Everything here can be made
again from the answers by a target pass.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from dspark.errors import CheckpointError, NonFiniteError
from dspark.executors.interface import StepBatch, TargetExecutor
from dspark.models.config import TargetConfig

from dspark_build.answers import AnswerShard, shard_path
from dspark_build.files import write_atomically

__all__ = [
    "FeatureStore",
    "TargetHead",
    "cache_bytes",
    "feature_folder",
    "feature_paths",
    "make_features",
    "stored_layers",
    "write_features",
]

PAGE_SIZE = 16
PASS_ROWS = 1024  # rows of one target pass


class TargetHead:
    """The target's final norm and LM head, for its distribution at cached rows."""

    def __init__(
        self, *, norm: npt.NDArray[np.float32], eps: float, head: npt.NDArray[np.float32], dtype: torch.dtype
    ) -> None:
        self._norm = torch.from_numpy(norm)
        self._eps = eps
        self._head = torch.from_numpy(head).to(dtype)

    def hidden(self, last_layer: torch.Tensor) -> torch.Tensor:
        """Return the final-norm output [n, d] of last-layer rows, in the dtype of the head."""
        normed = torch.nn.functional.rms_norm(
            last_layer.float(), (last_layer.shape[-1],), self._norm, self._eps
        )
        return normed.to(self._head.dtype)

    def measure(self, last_layer: torch.Tensor) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Return log-sum-exp [n] and arg-max [n] over the whole vocabulary."""
        logits = torch.matmul(self.hidden(last_layer), self._head.t()).float()
        return torch.logsumexp(logits, -1).numpy(), logits.argmax(-1).to(torch.int32).numpy()


class FeatureStore:
    """Rows of one shard, memory-mapped."""

    def __init__(self, folder: Path, index: int, *, width: int) -> None:
        features, targets = feature_paths(folder, index)
        raw = np.memmap(features, np.int16, mode="c").reshape(-1, width)
        self.rows = torch.from_numpy(raw).view(torch.bfloat16)  # [rows, L*d]
        with np.load(targets) as stored:
            self.lse = torch.from_numpy(stored["lse"])  # [answer rows]
            self.argmax = torch.from_numpy(stored["argmax"].astype(np.int64))


def feature_folder(data: Path, layer_ids: tuple[int, ...]) -> Path:
    """Return where features of these layers are kept."""
    return data / ("features-" + "-".join(map(str, layer_ids)))


def stored_layers(data: Path) -> list[tuple[int, ...]]:
    """Return the layer sets whose features a data folder has, the one with most layers first.

    Raises:
        CheckpointError: none.
    """
    found = []
    for folder in data.glob("features-*"):
        ids = re.findall(r"(?<=-)-?\d+", folder.name)
        if folder.is_dir() and ids:
            found.append(tuple(map(int, ids)))
    if not found:
        raise CheckpointError(f"{data}: has no features; run `dspark-build data` to its end")
    return sorted(found, key=lambda layer_ids: (-len(layer_ids), layer_ids))


def feature_paths(folder: Path, index: int) -> tuple[Path, Path]:
    return folder / f"features-{index:05d}.bin", folder / f"targets-{index:05d}.npz"


def cache_bytes(shard: AnswerShard, *, width: int) -> int:
    """Return the size of a shard's feature file: one row for every token but the last of a sequence."""
    return (len(shard.tokens) - len(shard)) * width * 2


def make_features(
    data: Path,
    folder: Path,
    shards: Sequence[int],
    executor: Callable[[], TargetExecutor],
    head: Callable[[], TargetHead],
    *,
    tell: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> None:
    """Make the features of those answer shards that have none. A stop is honoured between shards.

    Arguments:
        data: folder of the answers.
        folder: where features go.
        shards: numbers of finished answer shards.
        executor: called once, when something is missing; a target whose feature layers are the stored ones.
    """
    missing = [index for index in shards if not feature_paths(folder, index)[1].exists()]
    if not missing:
        return
    target, target_head = executor(), head()
    pages = 2 * PASS_ROWS // PAGE_SIZE + target.config.max_context_len // PAGE_SIZE + 2
    target.allocate_cache(num_pages=pages, page_size=PAGE_SIZE)
    started, rows_made = time.monotonic(), 0
    for done, index in enumerate(missing, 1):
        if should_stop():
            return
        shard = AnswerShard.load(shard_path(data, index))
        _make_shard(shard, feature_paths(folder, index), target, target_head)
        rows_made += len(shard.tokens) - len(shard)
        elapsed = time.monotonic() - started
        tell(
            f"features: shard {done} of {len(missing)}, {rows_made} rows, {rows_made / elapsed:.0f} rows/s, "
            f"{elapsed / done * (len(missing) - done) / 60:.1f} min left"
        )


def _make_shard(
    shard: AnswerShard, paths: tuple[Path, Path], target: TargetExecutor, head: TargetHead
) -> None:
    lse: list[npt.NDArray[np.float32]] = [np.zeros(0, np.float32)]
    argmax: list[npt.NDArray[np.int32]] = [np.zeros(0, np.int32)]
    rows = list(_shard_rows(shard, target, head, lse, argmax))
    write_features(paths, rows, lse=np.concatenate(lse), argmax=np.concatenate(argmax))


def write_features(
    paths: tuple[Path, Path],
    rows: Iterable[torch.Tensor],
    *,
    lse: npt.NDArray[np.float32],
    argmax: npt.NDArray[np.int32],
) -> None:
    """Write the two files of a shard: bfloat16 feature rows, then what the target says at answer rows."""

    def write_rows(file: BinaryIO) -> None:
        for some in rows:
            file.write(some.contiguous().view(torch.int16).numpy().tobytes())

    write_atomically(paths[0], write_rows)
    write_atomically(paths[1], lambda file: np.savez(file, lse=lse, argmax=argmax))


def _shard_rows(
    shard: AnswerShard,
    target: TargetExecutor,
    head: TargetHead,
    lse: list[npt.NDArray[np.float32]],
    argmax: list[npt.NDArray[np.int32]],
) -> Iterator[torch.Tensor]:
    """Yield feature rows of a shard in order and append what the target says at answer rows."""
    d = target.config.decoder.hidden_size
    for group in _groups(shard):
        sequences = [shard.sequence(i)[:-1] for i in group]
        output = target.forward(whole_sequences(sequences, target.config))
        assert output.features is not None, "the target was made with feature layers"
        if not np.isfinite(output.features).all():
            raise NonFiniteError("the target gave features that are not finite; is the checkpoint sound?")
        rows = torch.from_numpy(output.features).to(torch.bfloat16)
        first = 0
        answer_rows = []
        for i, tokens in zip(group, sequences, strict=True):
            answer_rows.append(np.arange(first + int(shard.prompt_len[i]) - 1, first + len(tokens)))
            first += len(tokens)
        chosen = torch.from_numpy(np.concatenate(answer_rows))
        for at in chosen.split(256):
            each_lse, each_argmax = head.measure(rows[at, -d:])
            lse.append(each_lse)
            argmax.append(each_argmax)
        yield rows


def _groups(shard: AnswerShard) -> Iterator[list[int]]:
    """Yield sequences of one pass each: at most `PASS_ROWS` slots in whole pages, or a single longer one."""
    group: list[int] = []
    rows = 0
    for index in range(len(shard)):
        length = -(-(len(shard.sequence(index)) - 1) // PAGE_SIZE) * PAGE_SIZE
        if group and rows + length > PASS_ROWS:
            yield group
            group, rows = [], 0
        group.append(index)
        rows += length
    if group:
        yield group


def whole_sequences(sequences: list[npt.NDArray[np.int32]], config: TargetConfig) -> StepBatch:
    """Return one pass over whole sequences, each in pages of its own, without logits."""
    lengths = [len(tokens) for tokens in sequences]
    num_pages = [-(-length // PAGE_SIZE) for length in lengths]
    first_page = np.cumsum([0, *num_pages])
    table = np.full((len(sequences), max(num_pages)), -1, np.int32)
    for i, count in enumerate(num_pages):
        table[i, :count] = np.arange(first_page[i], first_page[i] + count)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    slots = np.concatenate([first_page[i] * PAGE_SIZE + np.arange(n) for i, n in enumerate(lengths)])
    assert max(lengths) <= config.max_context_len, "answers fit the context"
    return StepBatch(
        tokens=np.concatenate(sequences).astype(np.int32),
        positions=positions,
        query_start=np.cumsum([0, *lengths]).astype(np.int32),
        context_len=np.zeros(len(sequences), np.int32),
        page_table=table,
        slots=slots.astype(np.int32),
        logit_rows=np.zeros(0, np.int32),
    )
