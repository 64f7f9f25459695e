"""The target model as one ONNX graph over a ragged batch (design.md, section 4)."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from dspark.executors.tensorrt_bindings import Precision, head_precision, target_bindings
from dspark.models.config import TargetConfig, WeightSource
from dspark.models.rope import inverse_frequencies
from onnx import TensorProto, helper

from dspark_build.export_bodies import paged_attention_function
from dspark_build.export_graph import (
    DOMAIN,
    ELEMENT_TYPES,
    IR_VERSION,
    OPSET,
    Graph,
    plugin_attributes,
    value_info,
)
from dspark_build.export_weights import WeightFile

__all__ = ["target_model"]

_TYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


class _Target:
    """Writes the layers of one model into a graph and their weights into a file."""

    def __init__(
        self, config: TargetConfig, weights: WeightSource, file: WeightFile, precision: Precision
    ) -> None:
        self.config, self.weights, self.file, self.precision = config, weights, file, precision
        self.g = Graph()

    def matrix(self, name: str, precision: Precision | None = None, stored: str | None = None) -> str:
        kind = precision or self.precision
        array: npt.NDArray[np.generic] = self.weights.float32(f"{name}.weight").astype(_TYPES[kind])
        return self.file.add(stored or name, array, ELEMENT_TYPES[kind])

    def vector(self, name: str) -> str:
        return self.file.add(name, self.weights.float32(f"{name}.weight"), TensorProto.FLOAT)

    def tables(self) -> tuple[str, str]:
        """Return cos and sin [T, D/2]."""
        g, decoder = self.g, self.config.decoder
        frequencies, factor = inverse_frequencies(decoder.rope, decoder.head_dim)
        positions = g.op("Unsqueeze", g.to("positions", "fp32"), g.ints(1))
        angles = g.op("Mul", positions, g.constant(frequencies))
        cos, sin = g.op("Cos", angles), g.op("Sin", angles)
        if factor != 1.0:
            cos, sin = (g.op("Mul", x, g.number(factor, np.float32)) for x in (cos, sin))
        return cos, sin

    def attention(self, x: str, layer: int, page_size: int, tables: tuple[str, str]) -> str:
        g, decoder = self.g, self.config.decoder
        at = f"layers.{layer}.self_attn."
        heads = {"q": decoder.num_heads, "k": decoder.num_kv_heads, "v": decoder.num_kv_heads}
        parts = {
            name: g.op(
                "Reshape", g.linear(x, self.matrix(f"{at}{name}_proj")), g.ints(-1, count, decoder.head_dim)
            )
            for name, count in heads.items()
        }
        if decoder.qk_norm:
            for name in "qk":
                wide = g.to(parts[name], "fp32")
                parts[name] = g.rms_norm(wide, self.vector(f"{at}{name}_norm"), decoder.rms_norm_eps)
        cache = f"kv_cache.{layer}"
        attended, _ = g.op_of(
            "DSparkPagedAttention",
            *(parts["q"], parts["k"], parts["v"], cache, *tables),
            *("page_table", "query_start", "context_len", "slots", "positions", "ancestors"),
            outputs=[g.fresh("attended"), f"{cache}.out"],
            domain=DOMAIN,
            page_size=page_size,
            scale=decoder.head_dim**-0.5,
            window=0,
            **plugin_attributes(),
        )
        flat = g.op("Reshape", attended, g.ints(-1, decoder.num_heads * decoder.head_dim))
        return g.linear(flat, self.matrix(f"{at}o_proj"))

    def mlp(self, x: str, layer: int) -> str:
        g, at = self.g, f"layers.{layer}.mlp."
        gate, up = (g.linear(x, self.matrix(f"{at}{name}_proj")) for name in ("gate", "up"))
        active = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
        return g.linear(active, self.matrix(f"{at}down_proj"))

    def normed(self, x: str, name: str) -> str:
        return self.g.rms_norm(x, self.vector(name), self.config.decoder.rms_norm_eps)

    def ends(self, hidden: str, table: str) -> None:
        """Add logits, arg-max and finiteness of the wanted rows."""
        g, kind = self.g, head_precision(self.precision)
        rows = self.normed(g.op("Gather", hidden, "logit_rows"), "norm")
        head = table if self.config.tie_word_embeddings else self.matrix("lm_head", kind)
        logits = g.op("Cast", g.linear(g.to(rows, kind), head), name="logits", to=TensorProto.FLOAT)
        best = g.op("ArgMax", logits, axis=-1, keepdims=0)
        g.op("Cast", best, name="argmax", to=TensorProto.INT32)
        wrong = g.to(g.op("Or", g.op("IsNaN", logits), g.op("IsInf", logits)), "i32")
        worst = g.op("ReduceMax", wrong, g.ints(-1), keepdims=0)
        g.op("Sub", g.constant(np.array(1, np.int32)), worst, name="finite")


def target_model(
    config: TargetConfig,
    weights: WeightSource,
    file: WeightFile,
    *,
    precision: Precision,
    page_size: int,
    feature_layer_ids: Sequence[int] = (),
) -> onnx.ModelProto:
    """Return the graph of the target; its weights are in `file`.

    Arguments:
        feature_layer_ids: layers whose outputs are given back, -1 = the embedding output.
    """
    t = _Target(config, weights, file, precision)
    g, kind = t.g, head_precision(precision)
    table = t.matrix("embed_tokens", kind)
    hidden = g.to(g.to(g.op("Gather", table, "tokens"), precision), "fp32")
    taken = {-1: hidden}
    tables = t.tables()
    for layer in range(config.decoder.num_layers):
        normed = g.to(t.normed(hidden, f"layers.{layer}.input_layernorm"), precision)
        attended = t.attention(normed, layer, page_size, tables)
        hidden = g.op("Add", hidden, g.to(attended, "fp32"))
        normed = g.to(t.normed(hidden, f"layers.{layer}.post_attention_layernorm"), precision)
        hidden = g.op("Add", hidden, g.to(t.mlp(normed, layer), "fp32"))
        taken[layer] = hidden
    if feature_layer_ids:
        g.op("Concat", *(taken[i] for i in feature_layer_ids), name="features", axis=1)
    t.ends(hidden, table)
    bindings = target_bindings(config, precision=precision, feature_layer_ids=tuple(feature_layer_ids))
    graph = helper.make_graph(
        g.nodes,
        "target",
        [value_info(b) for b in bindings if b.kind in ("input", "cache")],
        [value_info(b) for b in bindings if b.kind == "output"]
        + [value_info(b, name=b.alias) for b in bindings if b.kind == "cache"],
        file.tensors,
    )
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
        functions=[paged_attention_function()],
        ir_version=IR_VERSION,
        producer_name="dspark-build",
    )
