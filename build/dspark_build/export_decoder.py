"""What the graphs of target and drafter share: weights in the wanted type, projections, RoPE tables, norms, MLP."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
from dspark.errors import ConfigError
from dspark.executors.tensorrt_bindings import Precision
from dspark.models.config import DecoderConfig, WeightSource
from dspark.models.rope import inverse_frequencies
from onnx import TensorProto

from dspark_build.export_graph import ELEMENT_TYPES, Graph
from dspark_build.export_weights import WeightFile

__all__ = ["DecoderGraph"]

_TYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


class DecoderGraph:
    """Writes the layers of one model into a graph and their weights into a file."""

    def __init__(
        self, decoder: DecoderConfig, weights: WeightSource, file: WeightFile, precision: Precision
    ) -> None:
        self.decoder, self.weights, self.file, self.precision = decoder, weights, file, precision
        self.g = Graph()

    # Weights

    def stored(self, name: str, array: npt.NDArray[np.float32], precision: Precision | None = None) -> str:
        """Store an array in a type, that of the network unless told.

        Raises:
            ConfigError: fp16 cannot hold it.
        """
        kind = precision or self.precision
        with np.errstate(over="ignore"):  # told below
            cast = array.astype(_TYPES[kind])
        if kind == "fp16" and not np.isfinite(cast).all():
            most = np.abs(array).max()
            raise ConfigError(
                f"--precision: {name} has values up to {most:g}, which fp16 (up to 65504) cannot hold; "
                f"allowed is {'fp32' if self.precision == 'bf16' else 'bf16 or fp32'}"
            )
        return self.file.add(name, cast, ELEMENT_TYPES[kind])

    def matrix(self, name: str, precision: Precision | None = None) -> str:
        """Store `name`.weight in a type, that of the network unless told."""
        return self.stored(name, self.weights.float32(f"{name}.weight"), precision)

    def vector(self, name: str) -> str:
        """Store `name`.weight in fp32, once."""
        if any(tensor.name == name for tensor in self.file.tensors):
            return name
        return self.file.add(name, self.weights.float32(f"{name}.weight"), TensorProto.FLOAT)

    # Parts of a layer

    def tables(self, positions: str) -> tuple[str, str]:
        """Return cos and sin [..., D/2] fp32 of integer positions [...]."""
        g, decoder = self.g, self.decoder
        frequencies, factor = inverse_frequencies(decoder.rope, decoder.head_dim)
        at = g.op("Unsqueeze", g.to(positions, "fp32"), g.ints(-1))
        angles = g.op("Mul", at, g.constant(frequencies))
        cos, sin = g.op("Cos", angles), g.op("Sin", angles)
        if factor != 1.0:
            cos, sin = (g.op("Mul", x, g.number(factor, np.float32)) for x in (cos, sin))
        return cos, sin

    def heads(self, x: str, layer: int, part: str, weight: str) -> str:
        """Return rows [n, d] projected to heads [n, H, D]; queries and keys normed (then fp32) where the model does."""
        g, decoder = self.g, self.decoder
        count = decoder.num_heads if part == "q" else decoder.num_kv_heads
        found = g.op("Reshape", g.linear(x, weight), g.ints(-1, count, decoder.head_dim))
        if not decoder.qk_norm or part == "v":
            return found
        norm = self.vector(f"layers.{layer}.self_attn.{part}_norm")
        return g.rms_norm(g.to(found, "fp32"), norm, decoder.rms_norm_eps)

    def mlp(self, x: str, layer: int) -> str:
        """Return the gated MLP of rows [n, d]."""
        g, at = self.g, f"layers.{layer}.mlp."
        gate, up = (g.linear(x, self.matrix(f"{at}{name}_proj")) for name in ("gate", "up"))
        active = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
        return g.linear(active, self.matrix(f"{at}down_proj"))

    def normed(self, x: str, name: str) -> str:
        """Return fp32 rows normed, fp32."""
        return self.g.rms_norm(x, self.vector(name), self.decoder.rms_norm_eps)

    def behind_attention(self, hidden: str, attended: str, layer: int) -> str:
        """Return fp32 rows [n, d] after a layer whose attention gave `attended` [n, Hq * D]."""
        g, at = self.g, f"layers.{layer}."
        output = g.linear(attended, self.matrix(f"{at}self_attn.o_proj"))
        hidden = g.op("Add", hidden, g.to(output, "fp32"))
        normed = g.to(self.normed(hidden, f"{at}post_attention_layernorm"), self.precision)
        return g.op("Add", hidden, g.to(self.mlp(normed, layer), "fp32"))
