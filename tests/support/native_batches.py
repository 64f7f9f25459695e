"""Batches over any page layout, and a slow decoder in float64 that shares no code with the executors."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from dspark.executors.interface import StepBatch
from dspark.models.config import TargetConfig

__all__ = ["Row", "Sequence", "one_sequence", "reference_logits", "step_batch"]

Float64 = npt.NDArray[np.float64]
Weights = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a tree: its token, and which rows of this pass it sees (itself not named)."""

    token: int
    seen: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Sequence:
    """What one sequence has cached, and the pages it owns."""

    pages: list[int]
    cached: list[int] = field(default_factory=list)  # token ids


def step_batch(
    parts: list[tuple[Sequence, list[int]]], *, page_size: int, trees: dict[int, list[Row]] | None = None
) -> StepBatch:
    """Return one pass over the next tokens of each sequence; part i is a tree where `trees` has one."""
    trees = trees or {}
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    masks: list[int] = []
    for index, (sequence, chain) in enumerate(parts):
        context = len(sequence.cached)
        rows = trees.get(index) or [Row(token=t, seen=tuple(range(i))) for i, t in enumerate(chain)]
        for local, row in enumerate(rows):
            at = context + local  # rows of a tree take slots in their order, positions by their depth
            tokens.append(row.token)
            positions.append(context + len(row.seen))
            slots.append(sequence.pages[at // page_size] * page_size + at % page_size)
            masks.append(sum(1 << j for j in (*row.seen, local)))
        starts.append(len(tokens))
    width = max(len(sequence.pages) for sequence, _ in parts)
    table = np.full((len(parts), width), -1, np.int32)
    for index, (sequence, _) in enumerate(parts):
        table[index, : len(sequence.pages)] = sequence.pages
    words = (max(np.diff(starts)) + 31) // 32
    ancestors = None
    if trees:
        bits = [[(mask >> (32 * w)) & 0xFFFFFFFF for w in range(words)] for mask in masks]
        ancestors = np.array(bits, np.uint32).view(np.int32)
    return StepBatch(
        tokens=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        query_start=np.array(starts, np.int32),
        context_len=np.array([len(sequence.cached) for sequence, _ in parts], np.int32),
        page_table=table,
        slots=np.array(slots, np.int32),
        logit_rows=np.arange(len(tokens), dtype=np.int32),
        ancestors=ancestors,
    )


def one_sequence(token_ids: list[int], *, page_size: int) -> StepBatch:
    """Return the whole sequence as one prefill over pages 0, 1, 2..."""
    pages = list(range(-(-len(token_ids) // page_size)))
    return step_batch([(Sequence(pages=pages), token_ids)], page_size=page_size)


def reference_logits(
    config: TargetConfig, weights: Weights, token_ids: list[int]
) -> tuple[Float64, list[Float64]]:
    """Return logits [T, V] and the residual after the embedding and after every layer, all in float64."""
    decoder = config.decoder
    heads, kv_heads, dim = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
    count = len(token_ids)

    def w(name: str) -> Float64:
        return weights[name].astype(np.float64)

    def norm(x: Float64, weight: Float64) -> Float64:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + decoder.rms_norm_eps) * weight

    angle = np.arange(count)[:, None] / decoder.rope.theta ** (np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def rotate(x: Float64) -> Float64:
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w("embed_tokens.weight")[token_ids]
    residuals = [x]
    future = np.triu(np.ones((count, count), bool), 1)
    for layer in range(decoder.num_layers):
        at = f"layers.{layer}."
        y = norm(x, w(f"{at}input_layernorm.weight"))
        q, k, v = (
            (y @ w(f"{at}self_attn.{name}_proj.weight").T).reshape(count, -1, dim) for name in ("q", "k", "v")
        )
        if decoder.qk_norm:
            q, k = norm(q, w(f"{at}self_attn.q_norm.weight")), norm(k, w(f"{at}self_attn.k_norm.weight"))
        q, k = rotate(q), rotate(k).repeat(heads // kv_heads, 1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(dim)
        scores[:, future] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        mixed = np.einsum("hts,shd->thd", p, v.repeat(heads // kv_heads, 1)).reshape(count, -1)
        x = x + mixed @ w(f"{at}self_attn.o_proj.weight").T
        y = norm(x, w(f"{at}post_attention_layernorm.weight"))
        gate, up = y @ w(f"{at}mlp.gate_proj.weight").T, y @ w(f"{at}mlp.up_proj.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w(f"{at}mlp.down_proj.weight").T
        residuals.append(x)
    head = w("embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight")
    return norm(x, w("norm.weight")) @ head.T, residuals
