"""A drafter written out one position at a time in float64, and a bench that sets the real one beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from dspark.drafters.checkpoint import DrafterCheckpoint, load_drafter_checkpoint
from dspark.executors.interface import DraftBatch
from dspark.executors.torch_drafter import TorchBlockDrafter
from dspark.models.config import DrafterConfig, TargetConfig

from support.tiny_drafters import write_tiny_drafter

__all__ = ["PAGE_SIZE", "Bench", "Dense"]

PAGE_SIZE = 4


class Dense:
    """One sequence, no cache, no batch, no torch."""

    def __init__(self, checkpoint: DrafterCheckpoint, embedding: np.ndarray, head: np.ndarray) -> None:
        self.config: DrafterConfig = checkpoint.config
        self.tensors = {
            name: checkpoint.weights.float32(name).astype(np.float64)
            for name in checkpoint.weights.names()
            if name != "draft_to_target"
        }
        self.embedding, self.head = embedding.astype(np.float64), head.astype(np.float64)
        self.rows = checkpoint.previous_to_row

    def w(self, name: str) -> np.ndarray:
        return self.tensors[name + ".weight"]

    def norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + self.config.decoder.rms_norm_eps) * weight

    def rope(self, x: np.ndarray, position: int) -> np.ndarray:
        half = len(x) // 2
        out = np.empty_like(x)
        for j in range(half):
            angle = position * self.config.decoder.rope.theta ** (-2.0 * j / len(x))
            out[j] = x[j] * np.cos(angle) - x[j + half] * np.sin(angle)
            out[j + half] = x[j + half] * np.cos(angle) + x[j] * np.sin(angle)
        return out

    def heads(self, x: np.ndarray, layer: str, part: str, position: int | None) -> np.ndarray:
        """Project one row and return its heads [H, D], normed and rotated where a position is given."""
        decoder = self.config.decoder
        rows = (self.w(f"{layer}.self_attn.{part}_proj") @ x).reshape(-1, decoder.head_dim)
        if position is None:
            return rows
        if decoder.qk_norm:
            rows = np.stack([self.norm(row, self.w(f"{layer}.self_attn.{part}_norm")) for row in rows])
        return np.stack([self.rope(row, position) for row in rows])

    def block(self, features: np.ndarray, anchor: int, anchor_position: int) -> tuple[np.ndarray, np.ndarray]:
        config, decoder = self.config, self.config.decoder
        context = [
            self.norm(self.w("fc") @ row, self.w("hidden_norm")) for row in features.astype(np.float64)
        ]
        tokens = [anchor] + [config.mask_token_id] * (config.block_size - 1)
        x = np.stack([self.embedding[token] for token in tokens])
        for index in range(decoder.num_layers):
            layer, window = f"layers.{index}", config.sliding_windows[index]
            normed = [self.norm(row, self.w(f"{layer}.input_layernorm")) for row in x]
            everything = list(enumerate(context)) + [
                (anchor_position + slot, row) for slot, row in enumerate(normed)
            ]
            keys = [self.heads(row, layer, "k", position) for position, row in everything]
            values = [self.heads(row, layer, "v", None) for _, row in everything]
            for slot, row in enumerate(normed):
                position = anchor_position + slot
                query = self.heads(row, layer, "q", position)
                joined = []
                for head in range(decoder.num_heads):
                    kv = head // (decoder.num_heads // decoder.num_kv_heads)
                    scores = np.array([query[head] @ key[kv] for key in keys]) / np.sqrt(decoder.head_dim)
                    for column in range(len(context)):
                        if window is not None and position - column >= window:
                            scores[column] = -np.inf
                    weights = np.exp(scores - scores.max())
                    weights /= weights.sum()
                    joined.append(sum(w * value[kv] for w, value in zip(weights, values, strict=True)))
                x[slot] = x[slot] + self.w(f"{layer}.self_attn.o_proj") @ np.concatenate(joined)
            for slot in range(config.block_size):
                row = self.norm(x[slot], self.w(f"{layer}.post_attention_layernorm"))
                gate, up = self.w(f"{layer}.mlp.gate_proj") @ row, self.w(f"{layer}.mlp.up_proj") @ row
                x[slot] = x[slot] + self.w(f"{layer}.mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * up)
        hidden = np.stack([self.norm(row, self.w("norm")) for row in x])
        return hidden, hidden @ self.head.T

    def w1(self, token: int) -> np.ndarray:
        return self.w("markov_head.markov_w1")[token if self.rows is None else self.rows[token]]

    def bias(
        self, token: int, hidden: np.ndarray, state: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        w2, before = self.w("markov_head.markov_w2"), self.w1(token)
        kind = self.config.markov_head_type
        if kind == "vanilla":
            return w2 @ before, None
        if kind == "gated":
            mixed = self.w("markov_head.gate_proj") @ np.concatenate([hidden, before])
            gate = _sigmoid(mixed + self.tensors["markov_head.gate_proj.bias"])
            return w2 @ (gate * before), None
        assert state is not None
        mixed = self.w("markov_head.joint_proj") @ np.concatenate([state, before, hidden])
        mixed = mixed + self.tensors["markov_head.joint_proj.bias"]
        r = self.config.markov_rank
        gate, candidate, output = _sigmoid(mixed[:r]), np.tanh(mixed[r : 2 * r]), np.tanh(mixed[2 * r :])
        return w2 @ output, gate * state + (1 - gate) * candidate

    def confidence(self, token: int, hidden: np.ndarray) -> float:
        seen = hidden
        if self.config.confidence_head_with_markov:
            seen = np.concatenate([hidden, self.w1(token)])
        return float((self.w("confidence_head.proj") @ seen + self.tensors["confidence_head.proj.bias"])[0])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class Bench:
    """A drafter on disk, loaded, beside its dense twin, with sequences laid out over shuffled pages."""

    def __init__(self, folder: Path, target: TargetConfig, *, dtype: str = "float32", **kind: object) -> None:
        write_tiny_drafter(folder, target, **kind)  # type: ignore[arg-type]
        self.rng = np.random.default_rng(7)
        shape = (target.vocab_size, target.decoder.hidden_size)
        self.embedding = self.rng.standard_normal(shape).astype(np.float32)
        self.lm_head = (self.rng.standard_normal(shape) / 4).astype(np.float32)
        self.checkpoint = load_drafter_checkpoint(folder, target=target)
        self.executor = TorchBlockDrafter(
            self.checkpoint, target_embedding=self.embedding, target_head=self.lm_head, dtype=dtype
        )
        self.dense = Dense(
            self.checkpoint, self.checkpoint.embedding(self.embedding), self.checkpoint.head(self.lm_head)
        )
        self.width = len(self.checkpoint.config.target_layer_ids) * target.decoder.hidden_size

    def features(self, num_rows: int) -> np.ndarray:
        return self.rng.standard_normal((num_rows, self.width)).astype(np.float32)

    def batch(self, context_lens: list[int]) -> tuple[DraftBatch, list[np.ndarray]]:
        """Allocate, poison what must not be read, and return a batch with slots of every sequence's context.
        Allocate, poison what must not be read, and return a batch with slots of every sequence's context."""
        num_pages = [length // PAGE_SIZE + 3 for length in context_lens]
        self.executor.allocate_cache(num_pages=sum(num_pages) + 2, page_size=PAGE_SIZE)
        self.executor._k_cache.fill_(float("nan"))
        self.executor._v_cache.fill_(float("nan"))
        free = self.rng.permutation(sum(num_pages) + 2).astype(np.int32)
        table = np.full((len(context_lens), max(num_pages)), -1, np.int32)
        slots, used = [], 0
        for row, (length, count) in enumerate(zip(context_lens, num_pages, strict=True)):
            table[row, :count] = free[used : used + count]
            used += count
            at = np.arange(length)
            slots.append((table[row, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE).astype(np.int32))
        lens = np.array(context_lens, np.int32)
        anchors = self.rng.integers(0, self.checkpoint.config.vocab_size, len(lens)).astype(np.int32)
        return DraftBatch(anchors=anchors, anchor_positions=lens, context_len=lens, page_table=table), slots

    def append(self, features: np.ndarray, slots: np.ndarray, start: int = 0) -> None:
        positions = np.arange(start, start + len(features), dtype=np.int32)
        self.executor.append_context(
            features=features, positions=positions, slots=slots[start : start + len(features)]
        )
