"""Reads Hugging Face folders of Llama and Qwen3 models: `config.json` in its old and new spelling,
safetensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.errors import CheckpointError
from dspark.models.checks import checked_decoder, checked_target, require_neutral
from dspark.models.config import DecoderConfig, RopeConfig, TargetConfig
from dspark.models.layout import check_tensors, target_tensors
from dspark.models.safetensors_file import SafetensorsSource

__all__ = ["HfTarget", "read_decoder", "read_hf_config", "read_json", "read_rope"]

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_ROPE_SCALINGS = ("default", "linear", "llama3", "yarn")

# Fields that change the maths of these models, with the values under which they change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention_bias": (False, None),
    "qkv_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False, None),
    "no_rope_layers": (None, []),
    "quantization_config": (None,),
    "compression_config": (None,),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (1.0, None),
    "residual_multiplier": (1.0, None),
    "logits_scaling": (1.0, None),
    "logit_scale": (1.0, None),
    "clip_qkv": (None,),
    "attention_chunk_size": (None,),
    "is_decoder_causal": (True, None),
}
_IGNORED_TENSOR = re.compile(
    r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)  # derived, saved by old versions


class HfTarget:
    """The tensors of a folder under canonical names; a `WeightSource`."""

    def __init__(self, source: SafetensorsSource, config: TargetConfig, *, where: str) -> None:
        """Map the names and check them against the configuration.

        Raises:
            CheckpointError: for missing or left-over tensors, wrong shapes, and a tied head that is not the
                embedding.
        """
        self._source = source
        self._where = where
        self._stored = {
            name.removeprefix("model."): name
            for name in source.names()
            if not _IGNORED_TENSOR.fullmatch(name.removeprefix("model."))
        }
        if config.tie_word_embeddings and "lm_head.weight" in self._stored:
            self._drop_tied_head()
        shapes = {name: source.shape(stored) for name, stored in self._stored.items()}
        check_tensors(shapes, target_tensors(config), where=where)

    def names(self) -> tuple[str, ...]:
        return tuple(self._stored)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        if name not in self._stored:
            raise CheckpointError(f"{self._where}: no tensor named {name!r}")
        return self._source.float32(self._stored[name])

    def _drop_tied_head(self) -> None:
        """Leave a head out that was saved although it is the embedding; refuse one that differs from it."""
        same = "embed_tokens.weight" in self._stored and np.array_equal(
            self.float32("lm_head.weight"), self.float32("embed_tokens.weight")
        )
        if not same:
            raise CheckpointError(
                f"{self._where}: tie_word_embeddings is true, but lm_head.weight is there and differs "
                "from embed_tokens.weight"
            )
        del self._stored["lm_head.weight"]


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        CheckpointError: when the file is missing, no JSON, or no object.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, allowed is a JSON object")
    return content


def read_hf_config(folder: Path, *, model_hash: str = "") -> TargetConfig:
    """Read the target's configuration from `config.json` and, for the end tokens, `generation_config.json`.

    Raises:
        CheckpointError: naming the field, its value and what is allowed.
    """
    path = folder / "config.json"
    fields = read_json(path)
    architecture = fields.get("model_type")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(f"{path}: model_type is {architecture!r}, allowed are 'llama' and 'qwen3'")
    classes = fields.get("architectures")
    if classes is not None and classes != [_ARCHITECTURES[architecture]]:
        raise CheckpointError(
            f"{path}: architectures is {classes!r}, allowed is {[_ARCHITECTURES[architecture]]!r}"
        )
    generation = folder / "generation_config.json"
    ends = read_json(generation) if generation.is_file() else {}
    config = TargetConfig(
        architecture=architecture,
        decoder=read_decoder(fields, qk_norm=architecture == "qwen3", where=str(path)),
        vocab_size=_whole(fields, "vocab_size", str(path)),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        max_context_len=_whole(fields, "max_position_embeddings", str(path)),
        bos_id=_bos(fields.get("bos_token_id"), str(path)),
        eos_ids=_token_ids(ends.get("eos_token_id") or fields.get("eos_token_id"), str(path)),
        model_hash=model_hash,
    )
    return checked_target(config, where=str(path))


def read_decoder(fields: Mapping[str, Any], *, qk_norm: bool, where: str) -> DecoderConfig:
    """Read the decoder stack that `config.json` fields describe; `where` names the file in errors.

    Raises:
        CheckpointError: naming the field, its value and what is allowed.
    """
    require_neutral(fields, _NEUTRAL, where=where)
    _require_full_attention(fields, where)
    hidden_size, num_heads = (
        _whole(fields, "hidden_size", where),
        _whole(fields, "num_attention_heads", where),
    )
    default_head_dim = hidden_size // max(num_heads, 1)
    if qk_norm and fields.get("head_dim") is None:
        default_head_dim = 128  # Qwen3's own default
    decoder = DecoderConfig(
        hidden_size=hidden_size,
        intermediate_size=_whole(fields, "intermediate_size", where),
        num_layers=_whole(fields, "num_hidden_layers", where),
        num_heads=num_heads,
        num_kv_heads=_whole(fields, "num_key_value_heads", where, num_heads),
        head_dim=_whole(fields, "head_dim", where, default_head_dim),
        rms_norm_eps=_real(fields, "rms_norm_eps", where, 1e-6),
        qk_norm=qk_norm,
        rope=read_rope(fields, where=where),
    )
    return checked_decoder(decoder, where=where)


def read_rope(fields: Mapping[str, Any], *, where: str) -> RopeConfig:
    """Read `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old).

    Raises:
        CheckpointError: naming the field, its value and what is allowed.
    """
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{where}: the RoPE parameters are {given!r}, allowed is a JSON object")
    if given and all(isinstance(value, Mapping) for value in given.values()):
        raise CheckpointError(
            f"{where}: rope_parameters are given per layer type {sorted(given)}, allowed is one set for all"
        )
    scaling = given.get("rope_type", given.get("type", "default"))
    if scaling not in _ROPE_SCALINGS:
        raise CheckpointError(f"{where}: rope_type is {scaling!r}, allowed are {', '.join(_ROPE_SCALINGS)}")
    require_neutral(given, {"partial_rotary_factor": (1.0, None), "mrope_section": (None,)}, where=where)
    known = {"default": set(), "linear": {"factor"}, "llama3": _LLAMA3_FIELDS, "yarn": _YARN_FIELDS}[scaling]
    unknown = sorted(
        set(given) - known - {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section"}
    )
    if unknown:
        raise CheckpointError(
            f"{where}: {unknown[0]} is {given[unknown[0]]!r}, which rope_type {scaling!r} does not know; "
            f"allowed are {sorted(known)}"
        )
    theta = _real(given, "rope_theta", where, _real(fields, "rope_theta", where, 10000.0))
    if scaling == "default":
        return RopeConfig(theta=theta)
    values: dict[str, Any] = {"theta": theta, "scaling": scaling, "factor": _real(given, "factor", where)}
    if scaling == "linear":
        return RopeConfig(**values)
    original = fields.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    values["original_max_position_embeddings"] = (
        _whole(fields, "max_position_embeddings", where)
        if original is None
        else _whole({"original_max_position_embeddings": original}, "original_max_position_embeddings", where)
    )
    if scaling == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            values[name] = _real(given, name, where)
        return RopeConfig(**values)
    for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
        if given.get(name) is not None:
            values[name] = _real(given, name, where)
    values["truncate"] = bool(given.get("truncate", True))
    return RopeConfig(**values)


_LLAMA3_FIELDS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
_YARN_FIELDS = {
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
}


def _require_full_attention(fields: Mapping[str, Any], where: str) -> None:
    kinds = fields.get("layer_types")
    if kinds is not None and set(kinds) - {"full_attention"}:
        raise CheckpointError(
            f"{where}: layer_types is {sorted(set(kinds))}, allowed is 'full_attention' for every layer"
        )
    window = fields.get("sliding_window")
    if window is not None and fields.get("model_type") != "qwen3":  # Qwen3 has its own switch, checked before
        raise CheckpointError(f"{where}: sliding_window is {window!r}, allowed is null")


def _whole(fields: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{where}: {name} is {_given(value)}, allowed is a whole number")
    return value


def _real(fields: Mapping[str, Any], name: str, where: str, default: float | None = None) -> float:
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{where}: {name} is {_given(value)}, allowed is a number")
    return float(value)


def _given(value: object) -> str:
    return "missing" if value is None else repr(value)[:80]


def _bos(value: object, where: str) -> int | None:
    ids = _token_ids(value, where)
    return ids[0] if ids else None


def _token_ids(value: object, where: str) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise CheckpointError(f"{where}: token ids are {value!r}, allowed are whole numbers")
    return tuple(dict.fromkeys(ids))
