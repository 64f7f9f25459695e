"""Turns a GGUF file of a Llama or Qwen3 model into a `TargetConfig` and a `WeightSource`.

llama.cpp stores Llama's query and key rows with the two halves of each head interleaved; here they are put
back into the half-split order. Qwen3 is stored half-split already.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.errors import CheckpointError
from dspark.models.checks import checked_target, require_neutral
from dspark.models.config import DecoderConfig, RopeConfig, TargetConfig
from dspark.models.gguf_file import GgufFile
from dspark.models.layout import check_tensors, target_tensors

__all__ = ["GgufTarget", "read_gguf_config"]

_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_ROPE_FREQS = "rope_freqs.weight"

# Keys below "<architecture>." that are read, and those that must hold a value that changes nothing.
_READ = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "vocab_size",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scale_linear",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",
    "tensor_data_layout",
]
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.use_alibi": (False,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


class GgufTarget:
    """The tensors of a GGUF file under canonical names; a `WeightSource`."""

    def __init__(self, file: GgufFile, config: TargetConfig) -> None:
        """Map the names and check them against the configuration.

        Raises:
            CheckpointError: for unknown, missing or left-over tensors and wrong shapes.
        """
        self._file = file
        self._config = config
        self._stored = {_canonical(file, name): name for name in file.tensors if name != _ROPE_FREQS}
        shapes = {name: file.tensors[stored].shape for name, stored in self._stored.items()}
        check_tensors(shapes, target_tensors(config), where=str(file.path))

    def names(self) -> tuple[str, ...]:
        return tuple(self._stored)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        if name not in self._stored:
            raise CheckpointError(f"{self._file.path}: no tensor named {name!r}")
        values = self._file.float32(self._stored[name])
        heads = self._interleaved_heads(name)
        return values if heads is None else _half_split(values, heads)

    def _interleaved_heads(self, name: str) -> int | None:
        if self._config.architecture != "llama":
            return None
        if name.endswith("self_attn.q_proj.weight"):
            return self._config.decoder.num_heads
        return self._config.decoder.num_kv_heads if name.endswith("self_attn.k_proj.weight") else None


def read_gguf_config(file: GgufFile, *, model_hash: str = "") -> TargetConfig:
    """Read the target's configuration from the metadata.

    Raises:
        CheckpointError: naming the key, its value and what is allowed.
    """
    where = str(file.path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ("llama", "qwen3"):
        raise CheckpointError(
            f"{where}: general.architecture is {architecture!r}, allowed are 'llama' and 'qwen3'"
        )
    prefix = f"{architecture}."
    fields = {key[len(prefix) :]: value for key, value in file.metadata.items() if key.startswith(prefix)}
    unknown = sorted(set(fields) - set(_READ) - set(_NEUTRAL))
    if unknown:
        raise CheckpointError(
            f"{where}: {prefix}{unknown[0]} is {fields[unknown[0]]!r}: "
            "this key may change the maths and is not known here"
        )
    require_neutral(fields, _NEUTRAL, where=where, prefix=prefix)
    read = _Fields(fields, where, prefix)
    hidden_size, num_heads = read.whole("embedding_length"), read.whole("attention.head_count")
    head_dim = read.whole("attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if read.whole(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{where}: {prefix}{key} is {fields[key]}, allowed is the head size {head_dim}"
            )
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{where}: the tensor 'token_embd.weight' is missing")
    decoder = DecoderConfig(
        hidden_size=hidden_size,
        intermediate_size=read.whole("feed_forward_length"),
        num_layers=read.whole("block_count"),
        num_heads=num_heads,
        num_kv_heads=read.whole("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=_shortest_float32(read.real("attention.layer_norm_rms_epsilon")),
        qk_norm=architecture == "qwen3",
        rope=_read_rope(read, file, head_dim),
    )
    end_keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    config = TargetConfig(
        architecture=architecture,
        decoder=decoder,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        tie_word_embeddings="output.weight" not in file.tensors,
        max_context_len=read.whole("context_length"),
        bos_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=tuple(dict.fromkeys(int(file.metadata[key]) for key in end_keys if key in file.metadata)),
        model_hash=model_hash,
    )
    return checked_target(config, where=where)


def _read_rope(read: _Fields, file: GgufFile, head_dim: int) -> RopeConfig:
    theta = read.real("rope.freq_base", 10000.0)
    factor = read.real("rope.scaling.factor", read.real("rope.scale_linear", 1.0))
    kind = read.fields.get("rope.scaling.type", "linear")
    divisors: tuple[float, ...] = ()
    if _ROPE_FREQS in file.tensors:
        divisors = tuple(float(x) for x in file.float32(_ROPE_FREQS).ravel())
        if len(divisors) != head_dim // 2 or not all(x > 0 for x in divisors):
            raise CheckpointError(
                f"{read.where}: {_ROPE_FREQS} has {len(divisors)} entries, "
                f"allowed are {head_dim // 2} positive ones"
            )
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return RopeConfig(theta=theta, frequency_divisors=divisors)
    if kind == "linear":
        return RopeConfig(theta=theta, scaling="linear", factor=factor, frequency_divisors=divisors)
    if kind == "yarn" and not divisors:
        return RopeConfig(
            theta=theta,
            scaling="yarn",
            factor=factor,
            original_max_position_embeddings=read.whole("rope.scaling.original_context_length"),
            beta_fast=read.real("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=read.real("rope.scaling.yarn_beta_slow", 1.0),
        )
    raise CheckpointError(
        f"{read.where}: {read.prefix}rope.scaling.type is {kind!r}"
        f"{' together with ' + _ROPE_FREQS if divisors else ''}, "
        "allowed are 'none', 'linear', and 'yarn' without that tensor"
    )


class _Fields:
    """Typed access to the keys of one architecture."""

    def __init__(self, fields: Mapping[str, Any], where: str, prefix: str) -> None:
        self.fields, self.where, self.prefix = fields, where, prefix

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.fields.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(
                f"{self.where}: {self.prefix}{key} is {_given(value)}, allowed is one whole number"
            )
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.fields.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(
                f"{self.where}: {self.prefix}{key} is {_given(value)}, allowed is one number"
            )
        return float(value)


def _given(value: object) -> str:
    return "missing" if value is None else repr(value)[:80]


def _shortest_float32(value: float) -> float:
    """Return the decimal that was meant: GGUF keeps 1e-5 as the nearest float32."""
    return float(str(np.float32(value)))


def _canonical(file: GgufFile, name: str) -> str:
    block = _BLOCK_NAME.fullmatch(name)
    if block and block[2] in _LAYER:
        return f"layers.{block[1]}.{_LAYER[block[2]]}.weight"
    stem = name.removesuffix(".weight")
    if name.endswith(".weight") and stem in _TOP:
        return f"{_TOP[stem]}.weight"
    raise CheckpointError(f"{file.path}: tensor {name!r} is not one of a Llama or Qwen3 model")


def _half_split(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Return rows (head, pair, half) as (head, half, pair)."""
    rows, width = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, width)
