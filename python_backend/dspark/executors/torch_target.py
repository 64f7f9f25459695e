"""Runs a Llama or Qwen3 target in PyTorch: the fallback on CPUs, the reference, and the CUDA path.

One pass is some twenty calls a layer whatever the batch holds; sequences are told apart in the attention
alone. The residual stream, the norms, RoPE and the logits are float32, matrices and caches are of the chosen
dtype. `forward` attends in plain PyTorch; `device_pass` with `dspark::paged_attention`, over fixed shapes and
with nothing that waits, so that it can be a CUDA graph (torch_session.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from dspark_plugins.ops import paged_attention as paged_attention_op
from dspark_plugins.ops import verify
from dspark_plugins.ops.scheduled_rows import scheduled_rows
from dspark_plugins.reference.paged_attention import (
    AttentionPlan,
    paged_attention,
    plan_attention,
    write_cache,
)
from dspark_plugins.reference.rope import rope_tables, rotate
from torch.nn import functional as F

from dspark.errors import CapacityError, ConfigError
from dspark.executors.dtype import torch_dtype
from dspark.executors.interface import Float32, Int32, StepBatch, TargetOutput
from dspark.executors.tensorrt_bindings import VERIFY_DEPTH
from dspark.executors.torch_linear import Linear, of_few_sizes
from dspark.models.config import TargetConfig, WeightSource
from dspark.models.rope import inverse_frequencies

__all__ = ["TorchTarget"]

_HEAD_BLOCK = 512  # rows of a tied table that are multiplied at a time


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor  # [d] float32
    qkv: Linear  # d -> (H + 2 Hkv) * D
    qk_norm: torch.Tensor | None  # [H + Hkv, D] float32
    output: Linear  # H * D -> d
    mlp_norm: torch.Tensor  # [d] float32
    gate_up: Linear  # d -> 2 * intermediate
    down: Linear  # intermediate -> d


class TorchTarget:
    """The target model on one device; a `TargetExecutor`."""

    name = "torch"

    def __init__(
        self,
        config: TargetConfig,
        weights: WeightSource,
        *,
        dtype: str,
        feature_layer_ids: Sequence[int] = (),
        device: str = "cpu",
        num_threads: int | None = None,
    ) -> None:
        """Load the weights, one tensor at a time.

        Arguments:
            dtype: float32, bfloat16 or float16, of matrices, activations and caches.
            feature_layer_ids: layers whose outputs every pass returns; -1 = the embedding output.
            num_threads: CPU threads of the whole process; None leaves torch's setting.

        Raises:
            ConfigError: for an unknown dtype or a feature layer that does not exist.
            CheckpointError: for a missing tensor.
        """
        self.config = config
        self.dtype = dtype
        self.feature_layer_ids = tuple(feature_layer_ids)
        num_layers = config.decoder.num_layers
        for layer_id in self.feature_layer_ids:
            if not -1 <= layer_id < num_layers:
                raise ConfigError(f"feature layer is {layer_id}, allowed is -1 to {num_layers - 1}")
        self._dtype = torch_dtype(dtype)
        self._device = torch.device(device)
        self._weights = weights
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        frequencies, self._rope_factor = inverse_frequencies(config.decoder.rope, config.decoder.head_dim)
        self._frequencies = torch.from_numpy(frequencies).to(self._device)
        self._caches: list[torch.Tensor] = []  # per layer [num_slots, 2, Hkv, D]
        self._page_size = 0
        self._target_to_draft: torch.Tensor | None = None  # [V]
        with torch.inference_mode():
            self._layers = [self._load_layer(i) for i in range(num_layers)]
            self._norm = self._vector("norm.weight")
            self._embedding, self._head, self._head_table = self._load_ends()

    # Loading

    def _vector(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self._weights.float32(name)).to(self._device)

    def _matrix(self, *names: str) -> torch.Tensor:
        """Return matrices [out, in] stacked along `out`, in the compute dtype."""
        parts = [torch.from_numpy(self._weights.float32(name)).to(self._dtype) for name in names]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self._device)

    def _load_layer(self, index: int) -> _Layer:
        decoder, prefix = self.config.decoder, f"layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qk_norm = None
        if decoder.qk_norm:
            q_norm, k_norm = (self._vector(f"{attention}{name}_norm.weight") for name in ("q", "k"))
            qk_norm = torch.cat(
                [q_norm.expand(decoder.num_heads, -1), k_norm.expand(decoder.num_kv_heads, -1)]
            )
        return _Layer(
            input_norm=self._vector(f"{prefix}input_layernorm.weight"),
            qkv=_linear(self._matrix(*(f"{attention}{name}_proj.weight" for name in "qkv"))),
            qk_norm=qk_norm,
            output=_linear(self._matrix(f"{attention}o_proj.weight")),
            mlp_norm=self._vector(f"{prefix}post_attention_layernorm.weight"),
            gate_up=_linear(self._matrix(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight")),
            down=_linear(self._matrix(f"{mlp}down_proj.weight")),
        )

    def _load_ends(self) -> tuple[torch.Tensor, Linear, torch.Tensor | None]:
        """Return the embedding [V, d], the LM head, float32 [M, d] -> float32 [M, V], and its table where that is
        kept as it was; a tied table is held once.

        Logits rounded to 8 bits would tie by the dozen. CUDA multiplies in the compute dtype and keeps the
        float32 sums; the CPU has no such call, so there the head is float32, and a tied embedding with it.
        """
        tied, on_cpu = self.config.tie_word_embeddings, self._device.type == "cpu"
        if tied and on_cpu:
            table = self._vector("embed_tokens.weight")
            return table, _plain_head(table), table
        embedding = self._matrix("embed_tokens.weight")
        if on_cpu:
            return embedding, _linear(self._vector("lm_head.weight")), None
        matrix = embedding if tied else self._matrix("lm_head.weight")
        if self._dtype == torch.float32:
            return embedding, lambda x: F.linear(x, matrix), matrix
        return embedding, lambda x: torch.mm(x.to(self._dtype), matrix.t(), out_dtype=torch.float32), matrix

    def tables(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return embedding and head [V, d] where both are kept in the compute dtype, None elsewhere."""
        head = self._head_table
        if head is None or not self._embedding.dtype == head.dtype == self._dtype:
            return None
        return self._embedding, head

    def embedding_and_head(self) -> tuple[Float32, Float32]:
        embedding = self._weights.float32("embed_tokens.weight")
        return embedding, embedding if self.config.tie_word_embeddings else self._weights.float32(
            "lm_head.weight"
        )

    # Caches

    def cache_page_bytes(self, page_size: int) -> int:
        decoder = self.config.decoder
        per_token = 2 * decoder.num_kv_heads * decoder.head_dim * self._dtype.itemsize
        return decoder.num_layers * page_size * per_token

    def allocate_cache(self, *, num_pages: int, page_size: int) -> None:
        """Allocate the caches.

        Raises:
            CapacityError: when the device has not that much memory.
        """
        decoder = self.config.decoder
        shape = (num_pages * page_size, 2, decoder.num_kv_heads, decoder.head_dim)
        try:
            self._caches = [
                torch.zeros(shape, dtype=self._dtype, device=self._device) for _ in range(decoder.num_layers)
            ]
        except RuntimeError as error:  # torch's allocators raise this, and subclasses of it
            need = num_pages * self.cache_page_bytes(page_size)
            raise CapacityError(
                f"a cache of {num_pages} pages of {page_size} tokens needs {need} bytes on "
                f"{self._device}: {error}"
            ) from error
        self._page_size = page_size

    def move_cache(self, *, from_slots: Int32, to_slots: Int32) -> None:
        """Copy K/V of every layer from slot to slot [N], as if one after the other in order.

        A slot that was written is not read behind that: nodes of a tree move towards its root.
        """
        source, place = self._to_device(from_slots).long(), self._to_device(to_slots).long()
        for cache in self._caches:
            cache.index_copy_(0, place, cache.index_select(0, source))

    # The pass

    def forward(self, batch: StepBatch) -> TargetOutput:
        assert self._caches, "allocate_cache comes before the first pass"
        with torch.inference_mode():
            return self._forward(batch)

    def _forward(self, batch: StepBatch) -> TargetOutput:
        plan = plan_attention(
            query_start=batch.query_start,
            context_len=batch.context_len,
            page_table=batch.page_table,
            page_size=self._page_size,
            slots=batch.slots,
            positions=batch.positions,
            ancestors=batch.ancestors,
            dtype=self._dtype,
            device=self._device,
        )
        cos, sin = rope_tables(self._to_device(batch.positions), self._frequencies, self._rope_factor)
        slots = self._to_device(batch.slots).long()

        def attend(layer: _Layer, index: int, x: torch.Tensor) -> torch.Tensor:
            return self._attention(layer, self._caches[index], x, plan, slots, cos, sin)

        hidden, features = self._layers_over(self._to_device(batch.tokens), attend)
        return self._output(
            hidden.index_select(0, self._to_device(batch.logit_rows)),
            None if features is None else features.cpu().numpy(),
        )

    def device_pass(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Run a pass over tensors by the names of `target_bindings`, padding rows included, and return its outputs."""
        laid_out: dict[str, torch.Tensor] = {}
        if "kinds" in inputs:
            if len(inputs["kinds"]):
                laid_out = scheduled_rows(inputs, page_size=self._page_size)
            else:
                laid_out = {"verify_len": inputs["kinds"]}  # there are none
            inputs = {**inputs, **laid_out}
        masks = inputs["ancestors"] if inputs["ancestors"].shape[1] else None
        cos, sin = rope_tables(inputs["positions"], self._frequencies, self._rope_factor)
        places = [inputs[name] for name in ("page_table", "query_start", "context_len", "slots", "positions")]
        dim, page_size = self.config.decoder.head_dim, self._page_size

        def attend(layer: _Layer, index: int, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self._queries_keys_values(layer, x)
            tables = cos[:, 0].contiguous(), sin[:, 0].contiguous()
            cache = inputs[f"kv_cache.{index}"]
            out = paged_attention_op(q, k, v, cache, *tables, *places, masks, page_size, dim**-0.5, 0)
            return layer.output(out.flatten(1))

        hidden, features = self._layers_over(inputs["tokens"], attend)
        logits = self._logits(hidden.index_select(0, inputs["logit_rows"]))
        finite = torch.stack(logits.aminmax(dim=-1)).isfinite().all(dim=0)
        made = {"logits": logits, "argmax": logits.argmax(dim=-1), "finite": finite}
        if "verify_start" in inputs:
            made |= self._verified(logits, inputs)
        if "verify_len" in laid_out:
            made["verify_len"] = laid_out["verify_len"]
        return made if features is None else made | {"features": features}

    def _verified(self, logits: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what the chains of a pass are judged to be, over its logits [M, V]."""
        has_probs = "prob_rows" in inputs
        accepted, path, next_token = verify(
            logits,
            inputs["tokens"].index_select(0, inputs["logit_rows"]),
            inputs["verify_start"],
            None,
            inputs["draft_probs"] if has_probs else None,
            inputs["prob_rows"] if has_probs else None,
            self._target_to_draft if has_probs else None,
            *(inputs[name] for name in ("first_positions", "seeds", "temperature")),
            *(inputs[name] for name in ("top_k", "top_p", "min_p", "coupled")),
            VERIFY_DEPTH,
        )
        return {"accepted": accepted, "path": path, "next_token": next_token}

    def know_drafts(self, draft_to_target: Int32 | None) -> None:
        """Tell the [Vd] target ids of a reduced draft vocabulary to a target that verifies in `device_pass`."""
        if draft_to_target is not None:
            entries = np.full(self.config.vocab_size, -1, np.int32)
            entries[draft_to_target] = np.arange(len(draft_to_target), dtype=np.int32)
            self._target_to_draft = self._to_device(entries)

    def use_pages(self, page_size: int) -> None:
        """Tell the page size to a target whose caches come with every `device_pass`."""
        self._page_size = page_size

    def _layers_over(
        self, tokens: torch.Tensor, attend: Callable[[_Layer, int, torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return hidden [T, d] behind all layers and the features [T, m * d] of rows of tokens [T].

        Arguments:
            attend: from a layer, its index and normed rows to what is added to the residual stream.
        """
        hidden = F.embedding(tokens, self._embedding).to(self._dtype).float()
        taken = {-1: hidden.clone()} if -1 in self.feature_layer_ids else {}
        for index, layer in enumerate(self._layers):
            hidden += attend(layer, index, self._normed(hidden, layer.input_norm))
            hidden += self._mlp(layer, self._normed(hidden, layer.mlp_norm))
            if index in self.feature_layer_ids:
                taken[index] = hidden.clone()
        return hidden, torch.cat([taken[i] for i in self.feature_layer_ids], dim=1) if taken else None

    def _queries_keys_values(
        self, layer: _Layer, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q [T, H, D], k and v [T, Hkv, D] before RoPE; q and k float32 behind a QK norm."""
        decoder = self.config.decoder
        num_heads, num_kv_heads, dim = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
        qkv = layer.qkv(x).view(-1, num_heads + 2 * num_kv_heads, dim)
        queries_keys, values = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
        if layer.qk_norm is not None:
            queries_keys = F.rms_norm(queries_keys.float(), (dim,), eps=decoder.rms_norm_eps) * layer.qk_norm
        return queries_keys[:, :num_heads], queries_keys[:, num_heads:], values

    def _attention(
        self,
        layer: _Layer,
        cache: torch.Tensor,
        x: torch.Tensor,
        plan: AttentionPlan,
        slots: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        decoder = self.config.decoder
        num_heads, num_kv_heads, dim = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
        qkv = layer.qkv(x).view(-1, num_heads + 2 * num_kv_heads, dim)
        queries_keys = qkv[:, : num_heads + num_kv_heads]
        if layer.qk_norm is not None:
            queries_keys = F.rms_norm(queries_keys.float(), (dim,), eps=decoder.rms_norm_eps) * layer.qk_norm
        qkv[:, : num_heads + num_kv_heads] = rotate(queries_keys, cos, sin)
        write_cache(cache, qkv[:, num_heads:].view(-1, 2, num_kv_heads, dim), slots)
        return layer.output(paged_attention(qkv[:, :num_heads], cache, plan, scale=dim**-0.5))

    def _mlp(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(x).chunk(2, dim=-1)
        return layer.down(F.silu(gate).mul_(up))

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.decoder.rms_norm_eps).to(self._dtype)

    def _output(self, rows: torch.Tensor, features: Float32 | None) -> TargetOutput:
        logits = self._logits(rows)
        if not len(rows):
            none = np.empty(0, np.int32)
            return TargetOutput(
                logits=logits.cpu().numpy(), argmax=none, finite=none.astype(bool), features=features
            )
        lowest, highest = logits.aminmax(dim=-1)  # NaN goes through both
        return TargetOutput(
            logits=logits.cpu().numpy(),
            argmax=logits.argmax(dim=-1).to(torch.int32).cpu().numpy(),
            finite=(lowest.isfinite() & highest.isfinite()).cpu().numpy(),
            features=features,
        )

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [M, V] float32 of hidden rows [M, d]."""
        return self._head(F.rms_norm(rows, self._norm.shape, self._norm, self.config.decoder.rms_norm_eps))

    def _to_device(self, array: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _linear(weight: torch.Tensor) -> Linear:
    """Return x -> x @ weight.T, with the weight laid out for the CPU's matrix kernels where they take its
    dtype.
    """
    if not _prepacks(weight):
        return lambda x: F.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return of_few_sizes(lambda x: multiply(x, packed, None, "none", [], ""))


def _plain_head(table: torch.Tensor) -> Linear:
    """Return x [M, d] -> x @ table.T [M, V] over a table [V, d] that stays as it is, so that rows can be looked up.

    One product over all of V would first copy the table into a layout of its own; products over blocks that fit
    into the cache do not, and take about as long as with a table that was laid out before.
    """
    vocab_size, width = table.shape
    num_blocks = vocab_size // _HEAD_BLOCK
    blocks = table[: num_blocks * _HEAD_BLOCK].view(num_blocks, _HEAD_BLOCK, width)
    rest = table[num_blocks * _HEAD_BLOCK :]

    def multiply(x: torch.Tensor) -> torch.Tensor:
        if not num_blocks:
            return F.linear(x, rest)
        columns = x.t().expand(num_blocks, width, len(x))
        whole = torch.bmm(blocks, columns).permute(2, 0, 1).reshape(len(x), -1)  # [M, num_blocks * block]
        return torch.cat((whole, F.linear(x, rest)), dim=1) if len(rest) else whole

    return multiply


def _prepacks(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True
