"""An EAGLE-3 or MTP head written out row by row in float64: one sequence, no cache, no batch, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from dspark.drafters.feature_heads import HeadCheckpoint, load_head_checkpoint
from dspark.drafters.kinds import drafter_kind
from dspark.executors.interface import StepBatch
from dspark.executors.torch_target import TorchTarget
from dspark.models.loading import load_target

__all__ = ["DenseHead"]


class DenseHead:
    """A head beside its target; drafts greedily from a text alone."""

    def __init__(self, folder: Path, target: Path) -> None:
        loaded = load_target(target)
        kind = drafter_kind(str(folder))
        assert kind in ("eagle3", "mtp")
        self.checkpoint: HeadCheckpoint = load_head_checkpoint(folder, kind=kind, target=loaded.config)  # type: ignore[arg-type]
        self.config = self.checkpoint.config
        self.target = TorchTarget(
            loaded.config, loaded.weights, dtype="float32", feature_layer_ids=self.config.target_layer_ids
        )
        self.target.allocate_cache(num_pages=1, page_size=loaded.config.max_context_len)
        weights = self.checkpoint.weights
        floats = [name for name in weights.names() if name not in ("d2t", "t2d")]
        self._tensors = {name: weights.float32(name).astype(np.float64) for name in floats}
        embedding, head = self.target.embedding_and_head()
        self.embedding = self.checkpoint.embedding(embedding).astype(np.float64)
        self.head = self.checkpoint.head(head).astype(np.float64)

    def w(self, name: str) -> np.ndarray:
        return self._tensors[f"{name}.weight"]

    def norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + self.config.decoder.rms_norm_eps) * weight

    def drafts(self, text: Sequence[int], count: int) -> list[int]:
        """Return `count` greedy drafts behind a text whose last token is the anchor."""
        features = self._features(text[:-1])
        keys: list[np.ndarray] = []
        values: list[np.ndarray] = []
        for position in range(1, len(text)):
            out = self._row(text[position], self._projected(features[position - 1]), position, keys, values)
        drafted: list[int] = []
        while True:
            logits = self.head @ self.norm(out, self.w("norm"))
            best = int(logits.argmax())
            mapping = self.checkpoint.draft_to_target
            drafted.append(best if mapping is None else int(mapping[best]))
            if len(drafted) == count:
                return drafted
            out = self._row(drafted[-1], out, len(text) + len(drafted) - 1, keys, values)

    def _features(self, tokens: Sequence[int]) -> np.ndarray:
        rows = np.arange(len(tokens), dtype=np.int32)
        output = self.target.forward(
            StepBatch(
                tokens=np.array(tokens, np.int32),
                positions=rows,
                query_start=np.array([0, len(tokens)], np.int32),
                context_len=np.zeros(1, np.int32),
                page_table=np.zeros((1, 1), np.int32),
                slots=rows,
                logit_rows=rows[:0],
            )
        )
        assert output.features is not None
        return output.features.astype(np.float64)

    def _projected(self, feature: np.ndarray) -> np.ndarray:
        if self.config.kind == "eagle3":
            return self.w("fc") @ feature
        return self.norm(feature, self.w("target_norm")) if self.checkpoint.has_target_norm else feature

    def _row(
        self, token: int, before: np.ndarray, position: int, keys: list[np.ndarray], values: list[np.ndarray]
    ) -> np.ndarray:
        """Return the hidden state behind the layer; its key and value are appended."""
        decoder = self.config.decoder
        embedded = self.embedding[token]
        if self.config.kind == "eagle3":
            normed = self.norm(before, self.w("layers.0.hidden_norm"))
            residual = normed if self.config.norm_before_residual else before
            x = np.concatenate([self.norm(embedded, self.w("layers.0.input_layernorm")), normed])
        else:
            pair = [self.norm(embedded, self.w("enorm")), self.norm(before, self.w("hnorm"))]
            residual = self.w("eh_proj") @ np.concatenate(pair)
            x = self.norm(residual, self.w("layers.0.input_layernorm"))
        query, key, value = (
            (self.w(f"layers.0.self_attn.{name}_proj") @ x).reshape(-1, decoder.head_dim) for name in "qkv"
        )
        if decoder.qk_norm:
            query, key = (
                np.stack([self.norm(head, self.w(f"layers.0.self_attn.{name}_norm")) for head in heads])
                for name, heads in (("q", query), ("k", key))
            )
        keys.append(self._rotated(key, position - 1))
        values.append(value)
        attended = self._attend(self._rotated(query, position - 1), np.stack(keys), np.stack(values))
        hidden = residual + self.w("layers.0.self_attn.o_proj") @ attended
        x = self.norm(hidden, self.w("layers.0.post_attention_layernorm"))
        gate, up = self.w("layers.0.mlp.gate_proj") @ x, self.w("layers.0.mlp.up_proj") @ x
        return hidden + self.w("layers.0.mlp.down_proj") @ (gate / (1.0 + np.exp(-gate)) * up)

    def _attend(self, query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        out = []
        for index, head in enumerate(query):
            group = index * keys.shape[1] // len(query)
            scores = keys[:, group] @ head / np.sqrt(len(head))
            weights = np.exp(scores - scores.max())
            out.append(weights / weights.sum() @ values[:, group])
        return np.concatenate(out)

    def _rotated(self, heads: np.ndarray, position: int) -> np.ndarray:
        half = heads.shape[1] // 2
        angle = position * self.config.decoder.rope.theta ** (-np.arange(half) / half)
        first, second = heads[:, :half], heads[:, half:]
        return np.concatenate(
            [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)],
            1,
        )
