"""A DFlash / DSpark drafter in torch: the reference, the fallback on CPU, the path on CUDA.

One pass runs all blocks flattened to [R * G] rows. Context keys and values of every layer come from one
product, written when features are committed; a block reads them and leaves nothing behind. Knows no requests
and no sampling beyond arg-max. `device_pass` does all of it with `dspark::block_attention` and
`dspark::block_sample`, over fixed shapes and with nothing that waits, so that it can be a CUDA graph
(torch_session.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from dspark_plugins.ops import block_attention as block_attention_op
from dspark_plugins.ops import block_sample
from dspark_plugins.reference.block_attention import block_attention
from dspark_plugins.reference.rope import rope_tables, rotate
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from dspark.drafters.checkpoint import DrafterCheckpoint
from dspark.drafters.greedy_confidence import device_weights, rate_greedy
from dspark.drafters.interface import GreedyBlock
from dspark.executors.dtype import torch_dtype
from dspark.executors.interface import BlockOutput, DraftBatch, Float32, Int32
from dspark.executors.torch_linear import linear
from dspark.models.config import WeightSource
from dspark.models.rope import inverse_frequencies

__all__ = ["TorchBlockDrafter"]


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor  # [d]
    post_norm: Tensor  # [d]
    q: Tensor  # [Hq * D, d]
    kv: Tensor  # [2 * Hkv * D, d], a view into the context projection of all layers
    o: Tensor  # [d, Hq * D]
    gate_up: Tensor  # [2 * ff, d]
    down: Tensor  # [d, ff]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    window: int | None


class TorchBlockDrafter:
    """Runs one drafter checkpoint; a `BlockDrafterExecutor` and a `GreedyBlockExecutor`.

    Arguments:
        checkpoint: the drafter.
        target_embedding: [V, d] float32, used where the checkpoint has no embedding of its own; not copied in
            float32.
        target_head: [V, d] float32, used where the checkpoint has no head of its own; not copied in float32
            with the full vocabulary. None is allowed when the checkpoint has one.
        dtype: float32, bfloat16 or float16, of weights, caches and products.
        device: where everything lives.
        tables: the target's embedding and head on that device, in this dtype; taken as they are where the checkpoint
            has none of its own, so that they are there once.

    Raises:
        ConfigError: an unknown dtype.
        CheckpointError: no head anywhere.
    """

    name = "torch"

    def __init__(
        self,
        checkpoint: DrafterCheckpoint,
        *,
        target_embedding: Float32,
        target_head: Float32 | None,
        dtype: str,
        device: str = "cpu",
        tables: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.config = config = checkpoint.config
        self.dtype = dtype
        self._dtype, self._device = torch_dtype(dtype), torch.device(device)
        self._page_size = 0
        self.greedy_confidence = checkpoint.greedy_confidence()
        decoder = config.decoder
        frequencies, self._rope_factor = inverse_frequencies(decoder.rope, decoder.head_dim)
        self._frequencies = torch.from_numpy(frequencies).to(self._device)  # [D / 2] float32
        given = (None, None) if tables is None else tables
        whole_head = not checkpoint.own_head and checkpoint.draft_to_target is None
        embedding = None if checkpoint.own_embedding else given[0]
        head = given[1] if whole_head else None
        self._embedding = (  # [V, d]
            self._tensor(checkpoint.embedding(target_embedding)) if embedding is None else embedding
        )
        self._head = self._tensor(checkpoint.head(target_head)) if head is None else head  # [Vd, d]
        weights = checkpoint.weights
        self._fc = self._weight(weights, "fc.weight")
        self._hidden_norm = self._weight(weights, "hidden_norm.weight")
        self._norm = self._weight(weights, "norm.weight")
        self._context_kv, self._layers = self._load_layers(weights)
        self._draft_to_target = self._index(checkpoint.draft_to_target)
        self._previous_to_row = self._index(checkpoint.previous_to_row)
        self._load_heads(weights)

    def _tensor(self, array: Float32) -> Tensor:
        return torch.from_numpy(array).to(device=self._device, dtype=self._dtype)

    def _weight(self, weights: WeightSource, name: str) -> Tensor:
        return self._tensor(weights.float32(name))

    def _index(self, array: Int32 | None) -> Tensor | None:
        return None if array is None else torch.from_numpy(array.astype(np.int64)).to(self._device)

    def _load_layers(self, weights: WeightSource) -> tuple[Tensor, list[_Layer]]:
        """Return the key and value projection of all layers [L * 2 * Hkv * D, d] and the layers, which view
        into it."""
        decoder = self.config.decoder
        indices = range(decoder.num_layers)

        def load(index: int, name: str) -> Tensor:
            return self._weight(weights, f"layers.{index}.{name}.weight")

        parts = ("self_attn.k_proj", "self_attn.v_proj")
        context_kv = torch.cat([load(index, part) for index in indices for part in parts])
        kv = context_kv.view(decoder.num_layers, -1, decoder.hidden_size)
        windows = self.config.sliding_windows or (None,) * decoder.num_layers
        layers = [
            _Layer(
                input_norm=load(index, "input_layernorm"),
                post_norm=load(index, "post_attention_layernorm"),
                q=load(index, "self_attn.q_proj"),
                kv=kv[index],
                o=load(index, "self_attn.o_proj"),
                gate_up=torch.cat([load(index, "mlp.gate_proj"), load(index, "mlp.up_proj")]),
                down=load(index, "mlp.down_proj"),
                q_norm=load(index, "self_attn.q_norm") if decoder.qk_norm else None,
                k_norm=load(index, "self_attn.k_norm") if decoder.qk_norm else None,
                window=windows[index],
            )
            for index in indices
        ]
        return context_kv, layers

    def _load_heads(self, weights: WeightSource) -> None:
        config = self.config
        self._w1 = self._w2 = self._mix = self._mix_bias = self._confidence = None
        self._confidence_bias = 0.0
        if config.markov_rank:
            self._w1 = self._weight(weights, "markov_head.markov_w1.weight")
            self._w2 = self._weight(weights, "markov_head.markov_w2.weight")
            mix = {"gated": "gate_proj", "rnn": "joint_proj"}.get(config.markov_head_type)
            if mix is not None:
                self._mix = self._weight(weights, f"markov_head.{mix}.weight")
                self._mix_bias = self._weight(weights, f"markov_head.{mix}.bias")
        if config.enable_confidence_head:
            self._confidence = self._weight(weights, "confidence_head.proj.weight")
            self._confidence_bias = float(weights.float32("confidence_head.proj.bias")[0])
            greedy = device_weights(self.greedy_confidence, config.block_size)
            self._greedy_weights = torch.from_numpy(greedy).to(self._device)

    # Caches

    def allocate_cache(self, *, num_pages: int, page_size: int) -> None:
        """Allocate context keys and values of every layer, [L, num_slots, Hkv, D] each."""
        decoder = self.config.decoder
        shape = (decoder.num_layers, num_pages * page_size, decoder.num_kv_heads, decoder.head_dim)
        self.use_pages(page_size)
        self._k_cache = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._v_cache = torch.zeros(shape, dtype=self._dtype, device=self._device)

    def cache_page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page over all layers, keys and values."""
        decoder = self.config.decoder
        row = decoder.num_kv_heads * decoder.head_dim * self._dtype.itemsize
        return 2 * decoder.num_layers * page_size * row

    @torch.inference_mode()
    def append_context(self, *, features: Float32, positions: Int32, slots: Int32) -> None:
        """Write the context keys and values of features [N, m*d] into `slots` [N] of every layer."""
        if not len(features):
            return
        keys, values = self._context_rows(self._tensor(features)).unbind(2)
        tables = self._tables(self._ids(positions))
        at = self._ids(slots)
        for index, layer in enumerate(self._layers):
            key = self._rotated(self._head_norm(keys[:, index], layer.k_norm), tables)
            self._k_cache[index].index_copy_(0, at, key)
            self._v_cache[index].index_copy_(0, at, values[:, index].contiguous())

    def _context_rows(self, features: Tensor) -> Tensor:
        """Return keys and values [N, L, 2, Hkv, D] of features [N, m * d], neither normed nor rotated."""
        decoder = self.config.decoder
        hidden = rms_norm(
            linear(features, self._fc), (decoder.hidden_size,), self._hidden_norm, decoder.rms_norm_eps
        )
        shape = (len(features), decoder.num_layers, 2, decoder.num_kv_heads, decoder.head_dim)
        return linear(hidden, self._context_kv).view(shape)

    # The block

    @torch.inference_mode()
    def draft(self, batch: DraftBatch) -> BlockOutput:
        """Run the block pass of every sequence."""
        hidden, logits = self._block(batch)
        return BlockOutput(base_logits=logits.float().cpu().numpy(), hidden=hidden.float().cpu().numpy())

    def _block(self, batch: DraftBatch) -> tuple[Tensor, Tensor]:
        """Return hidden [R, G, d] after the final norm and base logits [R, G, Vd]."""
        num_sequences, block_size = len(batch.anchors), self.config.block_size
        anchor_positions = self._ids(batch.anchor_positions)
        tables = self._tables(self._slot_positions(anchor_positions))
        page_table, context_len = self._ids(batch.page_table), self._ids(batch.context_len)

        def attend(layer: _Layer, index: int, q: Tensor, kv: Tensor) -> Tensor:
            q = self._rotated(self._head_norm(q, layer.q_norm), tables)
            k = self._rotated(self._head_norm(kv[:, 0], layer.k_norm), tables)
            return block_attention(
                q.view(num_sequences, block_size, *q.shape[1:]),
                k.view(num_sequences, block_size, *k.shape[1:]),
                kv[:, 1].reshape(num_sequences, block_size, *k.shape[1:]),
                self._k_cache[index],
                self._v_cache[index],
                page_table=page_table,
                context_len=context_len,
                anchor_positions=anchor_positions,
                page_size=self._page_size,
                window=layer.window,
            )

        hidden, logits = self._layers_over(self._embedding[self._ids(self._block_ids(batch.anchors))], attend)
        return hidden.view(num_sequences, block_size, -1), logits.view(num_sequences, block_size, -1)

    def _layers_over(
        self, x: Tensor, attend: Callable[[_Layer, int, Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return hidden [R * G, d] after the final norm and base logits [R * G, Vd] of embeddings [R * G, d].

        Arguments:
            attend: from a layer, its index, q [R * G, H, D] and kv [R * G, 2, Hkv, D], neither normed nor rotated,
                to what was attended, [R * G, H * D] in any shape.
        """
        decoder = self.config.decoder
        width, eps = (decoder.hidden_size,), decoder.rms_norm_eps
        for index, layer in enumerate(self._layers):
            normed = rms_norm(x, width, layer.input_norm, eps)
            q = linear(normed, layer.q).view(-1, decoder.num_heads, decoder.head_dim)
            kv = linear(normed, layer.kv).view(-1, 2, decoder.num_kv_heads, decoder.head_dim)
            attended = attend(layer, index, q, kv)
            x = x + linear(attended.reshape(x.shape[0], -1), layer.o)
            normed = rms_norm(x, width, layer.post_norm, eps)
            gate, up = linear(normed, layer.gate_up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, layer.down)
        hidden = rms_norm(x, width, self._norm, eps)
        return hidden, linear(hidden, self._head)

    def _slot_positions(self, anchor_positions: Tensor) -> Tensor:
        """Return the positions [R * G] of all slots."""
        offsets = torch.arange(self.config.block_size, device=self._device)
        return (anchor_positions[:, None] + offsets).reshape(-1)

    def _block_ids(self, anchors: Int32) -> Int32:
        """Return the tokens [R * G] of every anchor followed by G - 1 masks."""
        ids = np.full((len(anchors), self.config.block_size), self.config.mask_token_id, np.int32)
        ids[:, 0] = anchors
        return ids.reshape(-1)

    # The same on a device, without a wait

    def use_pages(self, page_size: int) -> None:
        """Tell the page size to a drafter whose caches come with every `device_pass`."""
        self._page_size = page_size

    def device_pass(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Write new context rows and draft over tensors by the names of `drafter_bindings`; return its outputs."""
        config = self.config
        num_sequences, block_size = len(inputs["anchors"]), config.block_size
        anchor_positions = inputs["anchor_positions"]
        flat_tables = self._tables(self._slot_positions(anchor_positions))
        tables = [table.view(num_sequences, block_size, -1) for table in flat_tables]
        new_tables = [table[:, 0].contiguous() for table in self._tables(inputs["new_positions"])]
        context = self._context_rows(inputs["features"].to(self._dtype))
        places = [inputs[name] for name in ("new_slots", "page_table", "context_len")]
        scale = config.decoder.head_dim**-0.5

        def attend(layer: _Layer, index: int, q: Tensor, kv: Tensor) -> Tensor:
            new_k = self._head_norm(context[:, index, 0], layer.k_norm)
            k, v = (part.unflatten(0, (num_sequences, block_size)) for part in kv.unbind(1))
            attended: Tensor = block_attention_op(
                self._head_norm(q, layer.q_norm).unflatten(0, (num_sequences, block_size)),
                self._head_norm(k, layer.k_norm),
                v,
                inputs[f"kv_cache.{index}"],
                *tables,
                new_k,
                context[:, index, 1],
                *new_tables,
                *places,
                anchor_positions,
                self._page_size,
                scale,
                layer.window or 0,
            )
            return attended

        masks = torch.full_like(inputs["anchors"], config.mask_token_id)[:, None]
        ids = torch.cat([inputs["anchors"][:, None], masks.expand(-1, block_size - 1)], 1)
        flat, logits = self._layers_over(self._embedding[ids.reshape(-1).long()], attend)
        hidden, base = (x.unflatten(0, (num_sequences, block_size)) for x in (flat, logits))
        return self._drawn(inputs, base, hidden) | {"base_logits": base, "hidden": hidden}

    def _drawn(self, inputs: Mapping[str, Tensor], base: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        """Return what the sequential head draws of base logits [R, G, Vd] and hidden [R, G, d]."""
        maps = (self._draft_to_target, self._previous_to_row)
        weight = None if self._confidence is None else self._confidence[0]
        bias = greedy = None
        if weight is not None:
            greedy = self._greedy_weights
            bias = torch.full((1,), self._confidence_bias, dtype=torch.float32, device=self._device)
        drawn = block_sample(
            base,
            hidden,
            *(inputs["anchors"], inputs["num_drafts"], inputs["anchor_positions"] + 1),
            *(inputs[name] for name in ("seeds", "temperature", "top_k", "top_p", "min_p", "coupled")),
            *(self._w1, self._w2, self._mix, self._mix_bias, weight, bias, greedy),
            *(None if one is None else one.to(torch.int32) for one in maps),
        )
        names = ("draft_tokens", "num_tokens", "draft_probs", "confidence_logits")
        return dict(zip(names, drawn, strict=True))

    # Heads

    def initial_state(self, num_sequences: int) -> Float32 | None:
        """Return s_0 [R, r] = 0 of the RNN head, None for the others."""
        if self.config.markov_rank and self.config.markov_head_type == "rnn":
            return np.zeros((num_sequences, self.config.markov_rank), np.float32)
        return None

    @torch.inference_mode()
    def head_step(
        self, *, previous: Int32, hidden: Float32, state: Float32 | None
    ) -> tuple[Float32 | None, Float32 | None]:
        """Return B_k [R, Vd] (None at rank 0) and the next state [R, r] (None unless RNN)."""
        embedded = self._previous(self._ids(previous))
        if embedded is None:
            return None, None
        before = None if state is None else self._tensor(state)
        bias, after = self._bias(embedded, self._tensor(hidden), before)
        return bias.cpu().numpy(), None if after is None else after.float().cpu().numpy()

    @torch.inference_mode()
    def confidence_logits(self, *, previous: Int32, hidden: Float32) -> Float32 | None:
        """Return the logits of c_k [R], None without a confidence head."""
        logits = self._confidence_of(self._previous(self._ids(previous)), self._tensor(hidden))
        return None if logits is None else logits.cpu().numpy()

    @torch.inference_mode()
    def draft_greedy(self, batch: DraftBatch, *, num_drafts: Int32) -> GreedyBlock:
        """Draft whole greedy blocks without logits leaving torch; `num_drafts` [R], each at least 1."""
        hidden, base = self._block(batch)
        num_sequences, block_size = base.shape[:2]
        tokens = np.zeros((num_sequences, block_size), np.int32)
        confidence = None if self._confidence is None else np.zeros((num_sequences, block_size), np.float32)
        finite = np.ones((num_sequences, block_size), np.bool_)
        initial = self.initial_state(num_sequences)
        state = None if initial is None else self._tensor(initial)
        previous = self._ids(batch.anchors)
        for k in range(int(num_drafts.max(initial=0))):
            logits, embedded = base[:, k].float(), self._previous(previous)
            if embedded is not None:
                bias, state = self._bias(embedded, hidden[:, k], state)
                logits = logits + bias
            step_confidence = self._confidence_of(embedded, hidden[:, k])
            best, previous = logits.max(dim=-1)
            finite[:, k] = best.isfinite().cpu().numpy()
            if step_confidence is not None and confidence is not None:
                rated = step_confidence.cpu().numpy()
                if self.greedy_confidence is not None:
                    log_q = (best - logits.logsumexp(-1)).cpu().numpy()
                    rated = rate_greedy(self.greedy_confidence[k], rated, log_q)
                confidence[:, k] = rated
                finite[:, k] &= np.isfinite(confidence[:, k])
            if self._draft_to_target is not None:
                previous = self._draft_to_target[previous]
            tokens[:, k] = previous.cpu().numpy()
        num_finite = np.where(finite.all(axis=1), block_size, finite.argmin(axis=1))
        num_tokens = np.minimum(num_finite, num_drafts).astype(np.int32)
        return GreedyBlock(tokens=tokens, num_tokens=num_tokens, confidence_logits=confidence)

    def _previous(self, tokens: Tensor) -> Tensor | None:
        """Return W1[x_{k-1}] [R, r], None at rank 0."""
        if self._w1 is None:
            return None
        return self._w1[tokens if self._previous_to_row is None else self._previous_to_row[tokens]]

    def _bias(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return B_k [R, Vd] float32 and the next RNN state (algorithm.md, section 2.2)."""
        assert self._w2 is not None
        if self._mix is None:
            return linear(embedded, self._w2).float(), None
        if self.config.markov_head_type == "gated":
            gate = torch.sigmoid(linear(torch.cat([hidden, embedded], -1), self._mix, self._mix_bias))
            return linear(gate * embedded, self._w2).float(), None
        assert state is not None
        joint = linear(torch.cat([state, embedded, hidden], -1), self._mix, self._mix_bias)
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        after = gate * state + (1 - gate) * torch.tanh(candidate)
        return linear(torch.tanh(output), self._w2).float(), after

    def _confidence_of(self, embedded: Tensor | None, hidden: Tensor) -> Tensor | None:
        """Return the confidence logits [R] float32."""
        if self._confidence is None:
            return None
        seen = hidden
        if self.config.confidence_head_with_markov:
            assert embedded is not None
            seen = torch.cat([hidden, embedded], -1)
        return linear(seen, self._confidence)[:, 0].float() + self._confidence_bias

    # Small things

    def _ids(self, array: Int32) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)

    def _head_norm(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        decoder = self.config.decoder
        return heads if weight is None else rms_norm(heads, (decoder.head_dim,), weight, decoder.rms_norm_eps)

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [N, 1, D / 2] float32."""
        return rope_tables(positions, self._frequencies, self._rope_factor)

    def _rotated(self, heads: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(heads, *tables).to(self._dtype)
