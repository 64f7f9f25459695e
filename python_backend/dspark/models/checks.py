"""What every checkpoint must satisfy before anything is built from it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dspark.errors import CheckpointError
from dspark.models.config import DecoderConfig, TargetConfig

__all__ = ["checked_decoder", "checked_target", "require_neutral"]


def require_neutral(
    fields: Mapping[str, object], neutral: Mapping[str, tuple[object, ...]], *, where: str, prefix: str = ""
) -> None:
    """Refuse fields that would change the maths in a way that is not implemented.

    Arguments:
        fields: what the checkpoint says.
        neutral: field -> values under which the field changes nothing.

    Raises:
        CheckpointError: naming the field, its value and what is allowed.
    """
    for name, values in neutral.items():
        if name in fields and not any(_same(fields[name], value) for value in values):
            allowed = " or ".join(repr(value) for value in values)
            raise CheckpointError(f"{where}: {prefix}{name} is {fields[name]!r}, allowed is {allowed}")


def _same(given: object, value: object) -> bool:
    """Compare without taking False for 0."""
    return given == value and isinstance(given, bool) == isinstance(value, bool)


def checked_decoder(decoder: DecoderConfig, *, where: str) -> DecoderConfig:
    """Return `decoder` when its sizes fit together.

    Raises:
        CheckpointError: naming the field, its value and what is allowed.
    """
    sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    for name in sizes:
        if getattr(decoder, name) < 1:
            raise CheckpointError(
                f"{where}: {name} is {getattr(decoder, name)}, allowed is a positive number"
            )
    if decoder.num_heads % decoder.num_kv_heads:
        raise CheckpointError(
            f"{where}: {decoder.num_heads} query heads for {decoder.num_kv_heads} key heads, "
            "allowed is a multiple"
        )
    if decoder.head_dim % 2:
        raise CheckpointError(f"{where}: head_dim is {decoder.head_dim}, allowed is an even number")
    if not (math.isfinite(decoder.rms_norm_eps) and decoder.rms_norm_eps >= 0):
        raise CheckpointError(
            f"{where}: rms_norm_eps is {decoder.rms_norm_eps}, allowed is a finite number >= 0"
        )
    rope = decoder.rope
    if not (math.isfinite(rope.theta) and rope.theta > 1):
        raise CheckpointError(f"{where}: rope_theta is {rope.theta}, allowed is a finite number > 1")
    if not (math.isfinite(rope.factor) and rope.factor > 0):
        raise CheckpointError(f"{where}: the RoPE factor is {rope.factor}, allowed is a finite number > 0")
    if rope.scaling in ("llama3", "yarn") and rope.original_max_position_embeddings < 1:
        raise CheckpointError(
            f"{where}: original_max_position_embeddings is {rope.original_max_position_embeddings}, "
            "allowed is a positive number"
        )
    if rope.scaling == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor:
        raise CheckpointError(
            f"{where}: low_freq_factor is {rope.low_freq_factor} and high_freq_factor "
            f"{rope.high_freq_factor}, "
            "allowed is 0 < low < high"
        )
    if rope.scaling == "yarn" and not 0 < rope.beta_slow <= rope.beta_fast:
        raise CheckpointError(
            f"{where}: beta_slow is {rope.beta_slow} and beta_fast {rope.beta_fast}, "
            "allowed is 0 < beta_slow <= beta_fast"
        )
    return decoder


def checked_target(config: TargetConfig, *, where: str) -> TargetConfig:
    """Return `config` when its sizes fit together.

    Raises:
        CheckpointError: naming the field, its value and what is allowed.
    """
    checked_decoder(config.decoder, where=where)
    for name in ("vocab_size", "max_context_len"):
        if getattr(config, name) < 1:
            raise CheckpointError(f"{where}: {name} is {getattr(config, name)}, allowed is a positive number")
    ids = (() if config.bos_id is None else (("bos_token_id", config.bos_id),)) + tuple(
        ("eos_token_id", token) for token in config.eos_ids
    )
    for name, token in ids:
        if not 0 <= token < config.vocab_size:
            raise CheckpointError(f"{where}: {name} is {token}, allowed is 0 to {config.vocab_size - 1}")
    return config
