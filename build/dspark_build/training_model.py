"""The drafter as a trainable module: the serving maths (algorithm.md, section 2) over packed batches.

Parameter names are those of the checkpoint layout, so that `state_dict` is what is saved. The target's
embedding, final norm and LM head are held as frozen buffers outside the state. Matrix products run in the
compute dtype; the residual stream, norms, softmax and parameters are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from dspark.models.config import DecoderConfig, DrafterConfig
from dspark.models.rope import inverse_frequencies
from torch import Tensor, nn
from torch.nn import functional

from dspark_build.block_attention import block_attention
from dspark_build.drafting_loss import HeadInputs, LossWeights, SlotStats, head_loss
from dspark_build.training_batch import PackedBatch

__all__ = ["BatchResult", "BlockPass", "DrafterModel", "FrozenTarget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenTarget:
    """What training needs of the target's weights."""

    embedding: Tensor  # [V, d] float32
    head: Tensor  # [Vd, d] LM head rows of the draft vocabulary, compute dtype
    draft_to_target: Tensor  # [Vd] int64 ascending
    target_to_draft: Tensor  # [V] int64, Vd for tokens outside

    @classmethod
    def build(
        cls,
        *,
        embedding: npt.NDArray[np.float32],
        head: npt.NDArray[np.float32],
        draft_to_target: npt.NDArray[np.int32],
        dtype: torch.dtype,
        device: torch.device,
    ) -> FrozenTarget:
        mapping = torch.from_numpy(draft_to_target.astype(np.int64))
        inverse = torch.full((head.shape[0],), len(draft_to_target), dtype=torch.int64)
        inverse[mapping] = torch.arange(len(draft_to_target))
        return cls(
            embedding=torch.from_numpy(embedding).to(device),
            head=torch.from_numpy(head[draft_to_target]).to(device, dtype),
            draft_to_target=mapping.to(device),
            target_to_draft=inverse.to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPass:
    """The drafter's outputs at every slot."""

    hidden: Tensor  # [B, G, d] h_k, float32
    transition: Tensor | None  # [B, G, r] what is multiplied with W2, None at rank 0
    confidence_logits: Tensor | None  # [B, G]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """Loss of one batch and what was seen at its slots; the stats are of `slot` only."""

    loss: Tensor  # scalar
    confidence_loss: Tensor  # scalar, detached
    stats: SlotStats  # [P]
    confidence_logits: Tensor | None  # [P] detached
    slot: Tensor  # [P] flat indices into [B, G]


class _RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class _Linear(nn.Module):
    """A product without bias in the dtype of its input; the parameter stays float32."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


class _Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        d, hd = config.hidden_size, config.head_dim
        self.head_dim = hd
        self.q_proj = _Linear(d, config.num_heads * hd)
        self.k_proj = _Linear(d, config.num_kv_heads * hd)
        self.v_proj = _Linear(d, config.num_kv_heads * hd)
        self.o_proj = _Linear(config.num_heads * hd, d)
        self.q_norm = _RmsNorm(hd, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = _RmsNorm(hd, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, block: Tensor, context: Tensor, rope: _Rope, batch: PackedBatch) -> Tensor:
        """Attend from block rows [B*G, d] to context rows [C, d] and their own block."""
        num_context = context.shape[0]
        B, G = batch.previous.shape
        rows = torch.cat([context, block])
        key = self.k_proj(rows).unflatten(-1, (-1, self.head_dim))
        value = self.v_proj(rows).unflatten(-1, (-1, self.head_dim))
        query = self.q_proj(block).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query = rope.rotate(query, slice(num_context, None)).to(block.dtype)
        key = rope.rotate(key, slice(None)).to(block.dtype)
        out = block_attention(
            query.unflatten(0, (B, G)),
            key[:num_context],
            value[:num_context],
            key[num_context:].unflatten(0, (B, G)),
            value[num_context:].unflatten(0, (B, G)),
            context_start=batch.context_start,
            block_start=batch.block_start,
            anchor_positions=batch.anchor_positions,
        )
        projected: Tensor = self.o_proj(out.reshape(B * G, -1))
        return projected


class _Mlp(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = _Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class _Layer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = _RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)

    def forward(self, x: Tensor, context: Tensor, rope: _Rope, batch: PackedBatch) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x).to(context.dtype), context, rope, batch).float()
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x).to(context.dtype)).float()
        return y


class _MarkovHead(nn.Module):
    """The sequential head; W1 has a row for every draft token and one for all others."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        r, d = config.markov_rank, config.decoder.hidden_size
        self.kind = config.markov_head_type
        reduced = config.draft_vocab_size < config.vocab_size
        self.markov_w1 = nn.Embedding(config.draft_vocab_size + (1 if reduced else 0), r)
        self.markov_w2 = _Linear(r, config.draft_vocab_size)
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        nn.init.zeros_(self.markov_w2.weight)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(d + r, r)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * r + d, 3 * r)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return what is multiplied with W2 [B, G, r], teacher-forced. embedded [B, G, r], hidden [B, G,
        d].
        """
        if self.kind == "vanilla":
            return embedded
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1)))
            return gate * embedded
        state = torch.zeros_like(embedded[:, 0])
        outputs = []
        for k in range(embedded.shape[1]):
            z = self.joint_proj(torch.cat([state, embedded[:, k], hidden[:, k]], dim=-1))
            gate, candidate, output = z.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1.0 - gate) * torch.tanh(candidate)
            outputs.append(torch.tanh(output))
        return torch.stack(outputs, dim=1)


class _ConfidenceHead(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width = config.decoder.hidden_size
        self.with_markov = config.confidence_head_with_markov and config.markov_rank > 0
        self.proj = nn.Linear(width + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        if self.with_markov:
            assert embedded is not None, "a confidence head with the Markov embedding needs one"
            hidden = torch.cat([hidden, embedded], dim=-1)
        projected: Tensor = self.proj(hidden).squeeze(-1)
        return projected


class _Rope:
    """Rotation of rows whose positions are fixed for the batch: context rows, then block rows."""

    def __init__(self, positions: Tensor, frequencies: Tensor, factor: float) -> None:
        angle = positions.float()[:, None] * frequencies[None, :]
        self.cos = (angle.cos() * factor)[:, None, :]  # [rows, 1, hd/2]
        self.sin = (angle.sin() * factor)[:, None, :]

    def rotate(self, x: Tensor, rows: slice) -> Tensor:
        """Rotate heads [n, heads, hd] by the positions of `rows`, float32."""
        left, right = x.float().chunk(2, dim=-1)
        cos, sin = self.cos[rows], self.sin[rows]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class DrafterModel(nn.Module):
    """A DFlash / DSpark drafter over a frozen target.

    Arguments:
        config: full attention only; `draft_vocab_size` is Vd.
        frozen: the target's part.
        compute_dtype: float32 or bfloat16, the dtype of matrix products.
    """

    def __init__(self, config: DrafterConfig, frozen: FrozenTarget, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        decoder = config.decoder
        d, m = decoder.hidden_size, len(config.target_layer_ids)
        self.config = config
        self.frozen = frozen
        self.compute_dtype = compute_dtype
        self.fc = _Linear(m * d, d)
        self.hidden_norm = _RmsNorm(d, decoder.rms_norm_eps)
        self.norm = _RmsNorm(d, decoder.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(decoder) for _ in range(decoder.num_layers))
        self.markov_head = _MarkovHead(config) if config.markov_rank else None
        self.confidence_head = _ConfidenceHead(config) if config.enable_confidence_head else None
        frequencies, self._rope_factor = inverse_frequencies(decoder.rope, decoder.head_dim)
        self._frequencies = torch.from_numpy(frequencies).to(frozen.embedding.device)

    def block_pass(self, batch: PackedBatch) -> BlockPass:
        """Run every block of the batch, teacher-forced."""
        G = self.config.block_size
        device = batch.anchor_tokens.device
        context = self.hidden_norm(self.fc(batch.features.to(self.compute_dtype)).float()).to(
            self.compute_dtype
        )
        slot = torch.arange(G, device=device)
        positions = (batch.anchor_positions[:, None] + slot[None, :]).reshape(-1)
        rope = _Rope(torch.cat([batch.context_positions, positions]), self._frequencies, self._rope_factor)
        tokens = torch.full((batch.num_blocks, G), self.config.mask_token_id, device=device)
        tokens[:, 0] = batch.anchor_tokens
        x = self.frozen.embedding[tokens.reshape(-1)]
        for layer in self.layers:
            x = layer(x, context, rope, batch)
        hidden = self.norm(x).unflatten(0, (-1, G))
        embedded = transition = None
        if self.markov_head is not None:
            embedded = self.markov_head.markov_w1(self.previous_rows(batch.previous))
            transition = self.markov_head(embedded, hidden)
        confidence = None if self.confidence_head is None else self.confidence_head(hidden, embedded)
        return BlockPass(hidden=hidden, transition=transition, confidence_logits=confidence)

    def previous_rows(self, tokens: Tensor) -> Tensor:
        """Return the row of markov_w1 of target token ids."""
        return self.frozen.target_to_draft[tokens]

    def logits(self, output: BlockPass) -> Tensor:
        """Return U_k + B_k [B, G, Vd] in float32; training itself never holds them all."""
        logits = functional.linear(output.hidden.to(self.compute_dtype), self.frozen.head).float()
        if output.transition is not None and self.markov_head is not None:
            logits = logits + self.markov_head.markov_w2(output.transition.to(self.compute_dtype)).float()
        return logits

    def loss(
        self,
        batch: PackedBatch,
        weights: LossWeights,
        *,
        keep: Tensor | None = None,
        want_greedy: bool = False,
    ) -> BatchResult:
        """Return the loss of algorithm.md, section 7, over the batch.

        Arguments:
            keep: [B, G] share of times each slot was kept when slots are sampled (0 = dropped); its weight
                is divided by that share, so the expected gradient stays. None = all.
            want_greedy: also return the arg-max of q at each slot.
        """
        output = self.block_pass(batch)
        B, G = batch.previous.shape
        device = batch.previous.device
        step_weight = torch.exp(-torch.arange(G, device=device) / weights.decay).expand(B, G)
        total = (step_weight * batch.valid).sum()
        use = batch.valid if keep is None else batch.valid & (keep > 0)
        if keep is not None:
            step_weight = step_weight / keep.clamp(min=1e-6)
        slot = use.reshape(-1).nonzero()[:, 0]
        target_to_draft = self.frozen.target_to_draft
        labels = target_to_draft[batch.labels.reshape(-1)[slot]]
        labels = labels.masked_fill(labels == self.config.draft_vocab_size, -1)
        weight = (step_weight.reshape(-1)[slot] / total).float()
        inputs = HeadInputs(
            head=self.frozen.head,
            labels=labels,
            weight=weight,
            target_row=batch.target_row.reshape(-1)[slot],
            target_hidden=batch.target_hidden.to(self.compute_dtype),
            target_lse=batch.target_lse,
        )
        transition = output_weight = None
        if output.transition is not None and self.markov_head is not None:
            transition = output.transition.flatten(0, 1)[slot]
            output_weight = self.markov_head.markov_w2.weight
        loss, stats = head_loss(
            output.hidden.flatten(0, 1)[slot],
            transition,
            output_weight,
            inputs=inputs,
            weights=weights,
            want_greedy=want_greedy,
        )
        confidence = None
        confidence_loss = torch.zeros((), device=device)
        if output.confidence_logits is not None:
            logits = output.confidence_logits.reshape(-1)[slot]
            label = stats.acceptance.clamp(0.0, 1.0)
            each = functional.binary_cross_entropy_with_logits(logits, label, reduction="none")
            confidence_loss = (each * weight).sum()
            loss = loss + weights.confidence * confidence_loss
            confidence = logits.detach()
        return BatchResult(
            loss=loss,
            confidence_loss=confidence_loss.detach(),
            stats=stats,
            confidence_logits=confidence,
            slot=slot,
        )
