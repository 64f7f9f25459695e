"""The target's decoder as a plain ONNX graph, so that ONNX Runtime can be measured beside our own pass.

Made for measuring alone: one sequence, a fixed number of cached tokens, no paging. Nodes are the ones that ONNX
Runtime's own optimiser knows; the numbers are those of the model.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from dspark.errors import ConfigError
from dspark.models.loading import TargetCheckpoint
from dspark.models.rope import inverse_frequencies
from onnx import TensorProto, helper, numpy_helper

__all__ = ["export_decoder", "quantise_decoder"]


class _Graph:
    """Collects nodes and constants; every method returns the name of a value."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, npt.NDArray[Any]] = {}

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def constant(self, array: npt.NDArray[Any]) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.ascontiguousarray(array)
        return name

    def floats(self, *values: float) -> str:
        return self.constant(np.array(values, np.float32))

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def norm(self, x: str, weight: npt.NDArray[np.float32], eps: float) -> str:
        square = self.op("ReduceMean", self.op("Mul", x, x), self.ints(-1), keepdims=1)
        root = self.op("Sqrt", self.op("Add", square, self.floats(eps)))
        return self.op("Mul", self.op("Div", x, root), self.constant(weight))

    def linear(self, x: str, *weights: npt.NDArray[np.float32]) -> str:
        return self.op("MatMul", x, self.constant(np.concatenate(weights).T))


def export_decoder(checkpoint: TargetCheckpoint, path: Path, *, context_len: int) -> Path:
    """Write the graph: ids [1, n] int64, past [L, 2, Hkv, context_len, D] -> logits [1, n, V].

    Raises:
        ConfigError: a target with QK norm, which this graph does not hold.
    """
    config, weights = checkpoint.config, checkpoint.weights
    decoder = config.decoder
    if decoder.qk_norm:
        raise ConfigError(f"bench: the ONNX peer is made for llama targets, got {config.architecture}")
    heads, kv_heads, dim = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
    g, eps = _Graph(), decoder.rms_norm_eps
    frequencies, factor = inverse_frequencies(decoder.rope, dim)
    angles = np.arange(4096, dtype=np.float32)[:, None] * frequencies
    count = g.op("Slice", g.op("Shape", "ids"), g.ints(1), g.ints(2))
    last = g.op("Add", count, g.ints(context_len))

    def table(values: npt.NDArray[np.float32]) -> str:
        return g.op("Slice", g.constant(values * np.float32(factor)), g.ints(context_len), last, g.ints(0))

    cos, sin = table(np.cos(angles)), table(np.sin(angles))
    rows = np.arange(1024)[:, None]
    future = np.where(np.arange(1024 + context_len)[None] > rows + context_len, -1e9, 0.0).astype(np.float32)
    bounds = g.op("Concat", count, last, axis=0)
    mask = g.op("Slice", g.constant(future), g.ints(0, 0), bounds, g.ints(0, 1))

    def rotate(x: str) -> str:
        a = g.op("Slice", x, g.ints(0), g.ints(dim // 2), g.ints(3))
        b = g.op("Slice", x, g.ints(dim // 2), g.ints(dim), g.ints(3))
        left = g.op("Sub", g.op("Mul", a, cos), g.op("Mul", b, sin))
        right = g.op("Add", g.op("Mul", b, cos), g.op("Mul", a, sin))
        return g.op("Concat", left, right, axis=3)

    def repeated(x: str) -> str:  # [1, Hkv, s, D] -> [1, H, s, D]
        wide = g.op("Unsqueeze", x, g.ints(2))
        tiled = g.op("Tile", wide, g.ints(1, 1, heads // kv_heads, 1, 1))
        return g.op("Reshape", tiled, g.ints(1, heads, -1, dim))

    embedding = weights.float32("embed_tokens.weight")
    x = g.op("Gather", g.constant(embedding), "ids")
    for layer in range(decoder.num_layers):
        at = f"layers.{layer}."

        def w(name: str, at: str = at) -> npt.NDArray[np.float32]:
            return weights.float32(f"{at}{name}.weight")

        y = g.norm(x, w("input_layernorm"), eps)
        qkv = g.linear(y, *(w(f"self_attn.{name}_proj") for name in "qkv"))
        split = g.op("Reshape", qkv, g.ints(1, -1, heads + 2 * kv_heads, dim))
        split = g.op("Transpose", split, perm=[0, 2, 1, 3])
        ends = (0, heads, heads + kv_heads, heads + 2 * kv_heads)
        q, k, v = (g.op("Slice", split, g.ints(a), g.ints(b), g.ints(1)) for a, b in pairwise(ends))
        past = [g.op("Gather", g.op("Gather", "past", g.ints(layer)), g.ints(i), axis=1) for i in (0, 1)]
        old = [g.op("Reshape", one, g.ints(1, kv_heads, context_len, dim)) for one in past]
        keys = repeated(g.op("Concat", old[0], rotate(k), axis=2))
        values = repeated(g.op("Concat", old[1], v, axis=2))
        scores = g.op("MatMul", rotate(q), g.op("Transpose", keys, perm=[0, 1, 3, 2]))
        scores = g.op("Add", g.op("Mul", scores, g.floats(dim**-0.5)), mask)
        mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), values)
        mixed = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), g.ints(1, -1, heads * dim))
        x = g.op("Add", x, g.linear(mixed, w("self_attn.o_proj")))
        y = g.norm(x, w("post_attention_layernorm"), eps)
        gate = g.linear(y, w("mlp.gate_proj"))
        active = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), g.linear(y, w("mlp.up_proj")))
        x = g.op("Add", x, g.linear(active, w("mlp.down_proj")))
    head = embedding if config.tie_word_embeddings else weights.float32("lm_head.weight")
    logits = g.linear(g.norm(x, weights.float32("norm.weight"), eps), head)
    shape = (decoder.num_layers, 2, kv_heads, context_len, dim)
    graph = helper.make_graph(
        g.nodes,
        "decoder",
        [
            helper.make_tensor_value_info("ids", TensorProto.INT64, [1, "n"]),
            helper.make_tensor_value_info("past", TensorProto.FLOAT, list(shape)),
        ],
        [helper.make_tensor_value_info(logits, TensorProto.FLOAT, [1, "n", config.vocab_size])],
        [numpy_helper.from_array(array, name) for name, array in g.constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, str(path))
    return path


def quantise_decoder(plain: Path, path: Path) -> Path:
    """Write the graph with int8 weights and activations quantised as they come, by ONNX Runtime's own tool."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        plain, path, weight_type=QuantType.QInt8, per_channel=True, op_types_to_quantize=["MatMul"]
    )
    return path
