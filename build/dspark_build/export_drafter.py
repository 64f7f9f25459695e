"""A DFlash / DSpark drafter as one ONNX graph: context of new rows, block pass, sequential head, draws, confidence."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from dspark.drafters.checkpoint import DrafterCheckpoint
from dspark.drafters.greedy_confidence import device_weights
from dspark.executors.tensorrt_bindings import (
    Binding,
    Precision,
    SampleHead,
    drafter_bindings,
    head_precision,
    shared_tables,
)
from onnx import TensorProto

from dspark_build.export_block_sample import block_sample_function, block_sample_inputs
from dspark_build.export_bodies import block_attention_function
from dspark_build.export_decoder import DecoderGraph
from dspark_build.export_graph import DOMAIN, finished_model, plugin_attributes
from dspark_build.export_weights import WeightFile

__all__ = ["drafter_model"]


class _Drafter(DecoderGraph):
    """Adds what a drafter has beside its layers.

    Arguments:
        shared: tensors of the target's file by name, `embed_tokens` and, where not tied, `lm_head`.
        target_head: [V, d] fp32, whose rows a reduced vocabulary takes.
    """

    def __init__(
        self,
        checkpoint: DrafterCheckpoint,
        file: WeightFile,
        precision: Precision,
        shared: Mapping[str, TensorProto],
        target_head: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    ) -> None:
        super().__init__(checkpoint.config.decoder, checkpoint.weights, file, precision)
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self._target_head = target_head
        self._tied = "lm_head" not in shared
        self.shared = shared_tables(
            self.config,
            precision=precision,
            tied=self._tied,
            own_embedding=checkpoint.own_embedding,
            own_head=checkpoint.own_head,
        )
        for table in self.shared:
            file.share(shared[table.name])

    def embedding(self) -> str:
        if self.checkpoint.own_embedding:
            array = self.weights.float32("embed_tokens.weight")
            return self.stored("drafter.embed_tokens", array, head_precision(self.precision))
        return "embed_tokens"

    def head(self) -> str:
        kind = head_precision(self.precision)
        if self.checkpoint.own_head or self.checkpoint.draft_to_target is not None:
            return self.stored("drafter.lm_head", self.checkpoint.head(self._target_head), kind)
        return "embed_tokens" if self._tied else "lm_head"

    def block_input(self, table: str) -> str:
        """Return fp32 embeddings [R * G, d] of every anchor followed by masks."""
        g, config = self.g, self.config
        anchors = g.op("Unsqueeze", "anchors", g.ints(1))
        shape = g.op("Concat", g.size("anchors", 0), g.ints(config.block_size - 1), axis=0)
        masks = g.op("Expand", g.constant(np.array([[config.mask_token_id]], np.int32)), shape)
        ids = g.op("Reshape", g.op("Concat", anchors, masks, axis=1), g.ints(-1))
        return g.to(g.to(g.op("Gather", table, ids), self.precision), "fp32")

    def context(self) -> str:
        """Return the new rows [N, d] that keys and values of every layer come from."""
        fused = self.g.linear(self.g.to("features", self.precision), self.matrix("fc"))
        return self.g.to(self.normed(self.g.to(fused, "fp32"), "hidden_norm"), self.precision)

    def attention(
        self, x: str, context: str, layer: int, page_size: int, tables: tuple[str, str, str, str]
    ) -> str:
        """Return [R * G, Hq * D] of one layer over normed rows."""
        g, decoder, block_size = self.g, self.decoder, self.config.block_size
        weights = {part: self.matrix(f"layers.{layer}.self_attn.{part}_proj") for part in "qkv"}
        counts = {"q": decoder.num_heads, "k": decoder.num_kv_heads, "v": decoder.num_kv_heads}
        q, k, v = (
            g.op(
                "Reshape",
                self.heads(x, layer, part, weights[part]),
                g.ints(-1, block_size, counts[part], decoder.head_dim),
            )
            for part in "qkv"
        )
        new_k, new_v = (self.heads(context, layer, part, weights[part]) for part in "kv")
        window = self.config.sliding_windows[layer] if self.config.sliding_windows else None
        attended, _ = g.op_of(
            "DSparkBlockAttention",
            *(q, k, v, f"kv_cache.{layer}", *tables[:2], new_k, new_v, *tables[2:], "new_slots"),
            *("page_table", "context_len", "anchor_positions"),
            outputs=[g.fresh("attended"), f"kv_cache.{layer}.out"],
            domain=DOMAIN,
            page_size=page_size,
            scale=decoder.head_dim**-0.5,
            window=window or 0,
            **plugin_attributes(),
        )
        return g.op("Reshape", attended, g.ints(-1, decoder.num_heads * decoder.head_dim))

    def sample(self, head: SampleHead) -> None:
        """Add drafts, their distributions and confidences."""
        g = self.g
        names = block_sample_inputs(head)
        given = {name: self.sample_weight(name) for name in names}
        g.op_of(
            "DSparkBlockSample",
            *("base_logits", g.to("hidden", self.precision), "anchors", "num_drafts"),
            g.op("Add", "anchor_positions", g.constant(np.array(1, np.int32))),
            *("seeds", "temperature", "top_k", "top_p", "min_p", "coupled"),
            *given.values(),
            outputs=["draft_tokens", "num_tokens", "draft_probs", "confidence_logits"],
            domain=DOMAIN,
            head=head.head,
            confidence=head.confidence,
            mapped=int(head.mapped),
            previous=int(head.previous),
            **plugin_attributes(),
        )

    def sample_weight(self, name: str) -> str:
        """Store one of the operation's weights under the operation's own name for it."""
        mix = "gate_proj" if self.config.markov_head_type == "gated" else "joint_proj"
        where = {
            "markov_in": "markov_head.markov_w1.weight",
            "markov_out": "markov_head.markov_w2.weight",
            "mix_weight": f"markov_head.{mix}.weight",
            "mix_bias": f"markov_head.{mix}.bias",
            "confidence_weight": "confidence_head.proj.weight",
        }
        if name == "confidence_bias":
            bias = self.weights.float32("confidence_head.proj.bias")
            return self.file.add(name, bias, TensorProto.FLOAT)
        if name == "greedy_confidence":
            return self.file.add(
                name,
                device_weights(self.checkpoint.greedy_confidence(), self.config.block_size),
                TensorProto.FLOAT,
            )
        maps = {
            "draft_to_target": self.checkpoint.draft_to_target,
            "previous_rows": self.checkpoint.previous_to_row,
        }
        if name in maps:
            array = maps[name]
            assert array is not None
            return self.file.add(name, array.astype(np.int32), TensorProto.INT32)
        weight = self.weights.float32(where[name])
        return self.stored(name, weight[0] if name == "confidence_weight" else weight)


def drafter_model(
    checkpoint: DrafterCheckpoint,
    file: WeightFile,
    *,
    precision: Precision,
    page_size: int,
    target_tensors: Mapping[str, TensorProto],
    target_head: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
) -> tuple[onnx.ModelProto, tuple[Binding, ...]]:
    """Return the graph of a drafter and its bindings; its own weights are in `file`.

    Arguments:
        target_tensors: initializers of the target's graph by name, which the drafter points at where it has no table
            of its own.
        target_head: [V, d] fp32 LM head of the target.
    """
    t = _Drafter(checkpoint, file, precision, target_tensors, target_head)
    g, config = t.g, checkpoint.config
    table, head_weight = t.embedding(), t.head()
    hidden, context = t.block_input(table), t.context()
    slots = g.constant(np.arange(config.block_size, dtype=np.int32))
    positions = g.op("Add", g.op("Unsqueeze", "anchor_positions", g.ints(1)), slots)
    tables = (*t.tables(positions), *t.tables("new_positions"))
    for layer in range(config.decoder.num_layers):
        normed = g.to(t.normed(hidden, f"layers.{layer}.input_layernorm"), precision)
        attended = t.attention(normed, context, layer, page_size, tables)
        hidden = t.behind_attention(hidden, attended, layer)
    kind = head_precision(precision)
    final = g.to(t.normed(hidden, "norm"), kind)
    wide = g.to(g.linear(final, head_weight), "fp32")
    g.op("Reshape", wide, g.ints(-1, config.block_size, config.draft_vocab_size), name="base_logits")
    shape = g.ints(-1, config.block_size, config.decoder.hidden_size)
    g.op("Reshape", g.to(final, "fp32"), shape, name="hidden")
    head = SampleHead.of(config, previous=checkpoint.previous_to_row is not None)
    t.sample(head)
    bindings = drafter_bindings(config, precision=precision, shared=t.shared)
    functions = [block_attention_function(), block_sample_function(head)]
    return finished_model(g, "drafter", bindings, file.tensors, functions), bindings
