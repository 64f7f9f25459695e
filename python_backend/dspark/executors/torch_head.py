"""Runs an EAGLE-3 or MTP head in torch, on the CPU or a GPU; a `FeatureRunner`.

The row of position p is written to that position's own slot, although RoPE takes it for position p - 1: what it sees
is the token there and the hidden state before it. So a full page depends on the tokens up to its end alone and can be
found again, whatever follows. Hidden states lie beside K/V, one for each slot: the target's, projected, once it has
computed them, and the head's own output until then.
"""

from __future__ import annotations

import numpy as np
import torch
from dspark_plugins.reference.paged_attention import paged_attention, plan_attention, write_cache
from dspark_plugins.reference.rope import rope_tables, rotate
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from dspark.drafters.feature_heads import HeadCheckpoint
from dspark.errors import CapacityError
from dspark.executors.dtype import torch_dtype
from dspark.executors.interface import Float32, Int32, StepBatch, TargetOutput
from dspark.executors.torch_linear import linear
from dspark.models.rope import inverse_frequencies

__all__ = ["TorchHead"]


class TorchHead:
    """One head with its cache.

    Arguments:
        checkpoint: the head.
        target_embedding, target_head: [V, d] float32, used where the checkpoint has none of its own.
        dtype: float32, bfloat16 or float16, of weights, caches and products.
        device: where everything lives.
        num_threads: CPU threads of the whole process; None leaves torch's setting.

    Raises:
        ConfigError: an unknown dtype.
        CheckpointError: a missing tensor.
    """

    name = "torch"

    def __init__(
        self,
        checkpoint: HeadCheckpoint,
        *,
        target_embedding: Float32,
        target_head: Float32,
        dtype: str,
        device: str = "cpu",
        num_threads: int | None = None,
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.config = config = checkpoint.config
        self.dtype = dtype
        self._dtype, self._device = torch_dtype(dtype), torch.device(device)
        self._weights = checkpoint.weights
        frequencies, self._rope_factor = inverse_frequencies(config.decoder.rope, config.decoder.head_dim)
        self._frequencies = torch.from_numpy(frequencies).to(self._device)
        self._embedding = self._tensor(checkpoint.embedding(target_embedding))  # [V, d]
        self._head = self._tensor(checkpoint.head(target_head))  # [Vd, d]
        self._kv = self._hidden = torch.empty(0)  # [num_slots, 2, Hkv, D], [num_slots, d]
        self._page_size = 0
        with torch.inference_mode():
            self._load(has_target_norm=checkpoint.has_target_norm)

    def _load(self, *, has_target_norm: bool) -> None:
        eagle = self.config.kind == "eagle3"
        self._project = self._weight("fc") if eagle else None  # [d, m * target d]
        self._target_norm = self._weight("target_norm") if has_target_norm else None
        self._token_norm = self._weight("layers.0.input_layernorm" if eagle else "enorm")
        self._hidden_norm = self._weight("layers.0.hidden_norm" if eagle else "hnorm")
        self._join = None if eagle else self._weight("eh_proj")  # [d, 2 d]
        self._input_norm = None if eagle else self._weight("layers.0.input_layernorm")
        attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
        self._qkv = torch.cat([self._weight(f"{attention}{name}_proj") for name in "qkv"])
        self._qk_norms = None
        if self.config.decoder.qk_norm:
            self._qk_norms = tuple(self._weight(f"{attention}{name}_norm") for name in "qk")
        self._o = self._weight(f"{attention}o_proj")
        self._post_norm = self._weight("layers.0.post_attention_layernorm")
        self._gate_up = torch.cat([self._weight(f"{mlp}gate_proj"), self._weight(f"{mlp}up_proj")])
        self._down = self._weight(f"{mlp}down_proj")
        self._norm = self._weight("norm")

    # Caches

    def allocate_cache(self, *, num_pages: int, page_size: int) -> None:
        """Allocate K/V and hidden states.

        Raises:
            CapacityError: when the device has not that much memory.
        """
        decoder, num_slots = self.config.decoder, num_pages * page_size
        shapes = (num_slots, 2, decoder.num_kv_heads, decoder.head_dim), (num_slots, decoder.hidden_size)
        try:
            self._kv, self._hidden = (
                torch.zeros(shape, dtype=self._dtype, device=self._device) for shape in shapes
            )
        except RuntimeError as error:  # torch's allocators raise this, and subclasses of it
            need = num_pages * self.cache_page_bytes(page_size)
            raise CapacityError(
                f"the drafter's cache of {num_pages} pages of {page_size} tokens needs {need} bytes on "
                f"{self._device}: {error}"
            ) from error
        self._page_size = page_size

    def cache_page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page, K/V and hidden states."""
        decoder = self.config.decoder
        row = 2 * decoder.num_kv_heads * decoder.head_dim + decoder.hidden_size
        return page_size * row * self._dtype.itemsize

    @torch.inference_mode()
    def append_features(self, *, features: Float32, slots: Int32) -> None:
        """Project features [N, m * d] of committed rows and keep them in `slots` [N]."""
        hidden = self._tensor(features)
        if self._project is not None:
            hidden = linear(hidden, self._project)
        elif self._target_norm is not None:
            hidden = self._normed(hidden, self._target_norm)
        self._hidden.index_copy_(0, self._ids(slots), hidden)

    # The pass

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> TargetOutput:
        """Run rows at positions from 1 up; those with logits leave their hidden state in their slot."""
        decoder = self.config.decoder
        heads = decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads
        owner = np.repeat(np.arange(len(batch.context_len)), np.diff(batch.query_start))
        before = self._slots_of(batch.page_table[owner], batch.positions - 1)
        residual, x = self._inputs(self._ids(batch.tokens), self._hidden[self._ids(before)])
        plan = plan_attention(
            query_start=batch.query_start,
            context_len=batch.context_len - 1,
            page_table=self._rows_behind_the_first(batch),
            page_size=1,
            slots=batch.slots,
            positions=batch.positions,
            dtype=self._dtype,
            device=self._device,
        )
        tables = rope_tables(self._ids(batch.positions - 1), self._frequencies, self._rope_factor)
        q, k, v = linear(x, self._qkv).view(len(x), sum(heads), decoder.head_dim).split(heads, dim=1)
        if self._qk_norms is not None:
            q, k = (self._normed(part, norm) for part, norm in zip((q, k), self._qk_norms, strict=True))
        q, k = (rotate(part, *tables).to(self._dtype) for part in (q, k))
        write_cache(self._kv, torch.stack((k, v), dim=1), self._ids(batch.slots))
        attended = paged_attention(q, self._kv, plan, scale=decoder.head_dim**-0.5)
        hidden = residual + linear(attended, self._o)
        gate, up = linear(self._normed(hidden, self._post_norm), self._gate_up).chunk(2, dim=-1)
        hidden = hidden + linear(silu(gate) * up, self._down)
        wanted = hidden[self._ids(batch.logit_rows)]
        self._hidden.index_copy_(0, self._ids(batch.slots[batch.logit_rows]), wanted)
        return self._output(linear(self._normed(wanted, self._norm), self._head).float())

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the layer adds to [T, d] and what it attends with [T, d or 2 d]."""
        normed = self._normed(hidden, self._hidden_norm)
        joined = torch.cat([self._normed(self._embedding[tokens], self._token_norm), normed], dim=-1)
        if self._join is None:
            return (normed if self.config.norm_before_residual else hidden), joined
        assert self._input_norm is not None
        residual = linear(joined, self._join)
        return residual, self._normed(residual, self._input_norm)

    def _rows_behind_the_first(self, batch: StepBatch) -> Int32:
        """Return the slots of positions 1, 2, ... of each sequence [R, most context]: the first has no row."""
        positions = np.arange(1, max(int(batch.context_len.max()), 2))
        return self._slots_of(
            batch.page_table, np.broadcast_to(positions, (len(batch.page_table), len(positions)))
        )

    def _slots_of(self, page_table: Int32, positions: Int32) -> Int32:
        """Return the slots of positions [N] or [N, L] by the page table of each [N, pages]."""
        columns = positions.reshape(len(page_table), -1)
        pages = np.take_along_axis(
            page_table, np.minimum(columns // self._page_size, page_table.shape[1] - 1), axis=1
        )
        slots = pages * self._page_size + columns % self._page_size
        return slots.reshape(positions.shape).astype(np.int32)

    def _output(self, logits: Tensor) -> TargetOutput:
        rows: Float32 = logits.cpu().numpy()
        argmax = rows.argmax(axis=-1).astype(np.int32)
        finite = np.isfinite(rows).all(axis=-1)
        return TargetOutput(logits=rows, argmax=argmax, finite=finite, features=None)

    # Small things

    def _tensor(self, array: Float32) -> Tensor:
        return torch.from_numpy(array).to(device=self._device, dtype=self._dtype)

    def _weight(self, name: str) -> Tensor:
        return self._tensor(self._weights.float32(f"{name}.weight"))

    def _ids(self, array: Int32) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self.config.decoder.rms_norm_eps)
