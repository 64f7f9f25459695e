"""Examples that training reads from what `dspark-build data` made."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from dspark.errors import CheckpointError, ConfigError
from dspark.models.config import TargetConfig
from dspark.models.loading import TargetCheckpoint

from dspark_build.answers import AnswerShard, shard_path
from dspark_build.feature_cache import (
    FeatureStore,
    TargetHead,
    feature_folder,
    feature_paths,
    stored_layers,
)
from dspark_build.manifest import DataManifest, load_manifest
from dspark_build.training_batch import Example

__all__ = ["HELD_OUT_EVERY", "Dataset", "target_head"]

Array = npt.NDArray[np.int64]

HELD_OUT_EVERY = 40  # prompts with this divisor of their index are never trained on
HOT = 0.9  # from this temperature on an answer is a hot one


class Dataset:
    """Examples of data folders; features stay on disk until an example is asked for.

    Arguments:
        folders: made by `dspark-build data`; shards without features are left out.
        target: must be the target they were made with.
        layer_ids: feature layers the drafter wants, among the stored ones.
        head: final norm of the target, for its hidden states.
        repeat_hot: how often an answer that was drawn at temperature 0.9 or above counts among those that are
            trained on; the others count once.

    Raises:
        CheckpointError: no manifest, another target, layers that are not stored, nothing finished.
        ConfigError: `repeat_hot` below 1.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        target: TargetConfig,
        layer_ids: tuple[int, ...],
        head: TargetHead,
        repeat_hot: int = 1,
    ) -> None:
        if repeat_hot < 1:
            raise ConfigError(f"--repeat-hot: got {repeat_hot}, allowed is 1 or more")
        self._width = target.decoder.hidden_size
        self._head = head
        self._shards: list[AnswerShard] = []
        self._stores: list[FeatureStore] = []
        self._columns: list[list[slice] | None] = []  # of the wanted layers in each store; None = all of it
        self._row_start: list[Array] = []  # first feature row of each sequence
        self._answer_start: list[Array] = []  # first answer row of each sequence
        self._manifests = [self._open(folder, target=target, layer_ids=layer_ids) for folder in folders]
        parts: tuple[list[list[tuple[int, int]]], ...] = ([], [])
        first = 0
        for folder, (manifest, features, stored) in zip(folders, self._manifests, strict=True):
            self._add_shards(folder, features, stored, num_shards=manifest.num_shards, layer_ids=layer_ids)
            for part, held_out in zip(parts, (False, True), strict=True):
                part.append(self._usable(range(first, len(self._shards)), held_out=held_out))
            first = len(self._shards)
        self.train = [
            key
            for part in parts[0]
            for key in part
            for _ in range(repeat_hot if self.temperature(key) >= HOT else 1)
        ]
        self.held_out = _in_turn(parts[1])
        if not self.train:
            raise CheckpointError(
                f"{', '.join(map(str, folders))}: has no finished shard to train on; run `dspark-build data` to its end"
            )

    @staticmethod
    def _open(
        folder: Path, *, target: TargetConfig, layer_ids: tuple[int, ...]
    ) -> tuple[DataManifest, Path, tuple[int, ...]]:
        """Return a folder's manifest, where its features are and of which layers."""
        manifest = load_manifest(folder)
        if manifest.target_hash != target.model_hash:
            raise CheckpointError(
                f"{folder}: was made for target {manifest.target_hash}, this target is {target.model_hash}"
            )
        sets = stored_layers(folder)
        stored = next((ids for ids in reversed(sets) if set(layer_ids) <= set(ids)), None)
        if stored is None:
            raise CheckpointError(f"{folder}: has features of layers {sets}, asked for are {list(layer_ids)}")
        return manifest, feature_folder(folder, stored), stored

    def _add_shards(
        self,
        folder: Path,
        features: Path,
        stored: tuple[int, ...],
        *,
        num_shards: int,
        layer_ids: tuple[int, ...],
    ) -> None:
        d = self._width
        columns = None
        if layer_ids != stored:
            columns = [slice(stored.index(i) * d, stored.index(i) * d + d) for i in layer_ids]
        for index in range(num_shards):
            if not all(
                path.exists() for path in (shard_path(folder, index), *feature_paths(features, index))
            ):
                continue
            shard = AnswerShard.load(shard_path(folder, index))
            self._shards.append(shard)
            self._stores.append(FeatureStore(features, index, width=len(stored) * d))
            self._columns.append(columns)
            lengths = np.diff(shard.offsets) - 1
            self._row_start.append(np.concatenate([[0], np.cumsum(lengths)]))
            answer_rows = lengths - (shard.prompt_len - 1)
            self._answer_start.append(np.concatenate([[0], np.cumsum(answer_rows)]))

    def _usable(self, shards: Iterable[int], *, held_out: bool) -> list[tuple[int, int]]:
        """Return the keys of answers of two tokens or more whose prompts are, or are not, held out."""
        return [
            (number, i)
            for number in shards
            for i, rows in enumerate(np.diff(self._answer_start[number]))
            if rows >= 2 and (self._shards[number].prompt_id[i] % HELD_OUT_EVERY == 0) == held_out
        ]

    @property
    def content_hash(self) -> str:
        """Digest of the manifest and of which shards are there: a run is resumed on the same examples
        only.
        """
        manifests = "|".join(str(manifest) for manifest, _, _ in self._manifests)
        text = f"{manifests}|{[len(shard.tokens) for shard in self._shards]}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def num_answer_tokens(self) -> int:
        return sum(shard.num_answer_tokens for shard in self._shards)

    def token_counts(self, vocab_size: int) -> Array:
        """Return how often each token occurs in answers that are trained on [V]."""
        counts = np.zeros(vocab_size, np.int64)
        for number, i in self.train:
            shard = self._shards[number]
            counts += np.bincount(shard.sequence(i)[shard.prompt_len[i] :], minlength=vocab_size)
        return counts

    def temperature(self, key: tuple[int, int]) -> float:
        """Return the temperature that an answer was drawn at."""
        number, i = key
        return float(self._shards[number].temperature[i])

    def example(self, key: tuple[int, int]) -> Example:
        """Read one example; `key` is an entry of `train` or `held_out`."""
        number, i = key
        shard, store = self._shards[number], self._stores[number]
        first, last = int(self._row_start[number][i]), int(self._row_start[number][i + 1])
        rows = store.rows[first:last]
        prompt_len = int(shard.prompt_len[i])
        answers = slice(int(self._answer_start[number][i]), int(self._answer_start[number][i + 1]))
        columns = self._columns[number]
        features = rows if columns is None else torch.cat([rows[:, c] for c in columns], dim=1)
        return Example(
            tokens=shard.sequence(i).astype(np.int64),
            prompt_len=prompt_len,
            features=features,
            target_hidden=self._head.hidden(rows[prompt_len - 1 :, -self._width :]),
            target_lse=store.lse[answers],
            target_argmax=store.argmax[answers],
        )


def _in_turn(parts: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Return the keys of all folders, dealt out in turn, so that the first ones are of every folder."""
    return [key for keys in zip_longest(*parts) for key in keys if key is not None]


def target_head(checkpoint: TargetCheckpoint, *, dtype: torch.dtype) -> TargetHead:
    """Return the target's final norm and LM head."""
    weights = checkpoint.weights
    tied = checkpoint.config.tie_word_embeddings
    return TargetHead(
        norm=weights.float32("norm.weight"),
        eps=checkpoint.config.decoder.rms_norm_eps,
        head=weights.float32("embed_tokens.weight" if tied else "lm_head.weight"),
        dtype=dtype,
    )
