"""Which tensors a target has and how large they are, from its configuration alone."""

from __future__ import annotations

from collections.abc import Mapping

from dspark.errors import CheckpointError
from dspark.models.config import DecoderConfig, TargetConfig

__all__ = ["check_tensors", "decoder_tensors", "target_tensors"]

Shape = tuple[int, ...]


def decoder_tensors(decoder: DecoderConfig) -> dict[str, Shape]:
    """Return canonical name -> shape of the decoder layers and the final norm."""
    d, inner, dim = decoder.hidden_size, decoder.intermediate_size, decoder.head_dim
    q, kv = decoder.num_heads * dim, decoder.num_kv_heads * dim
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (q, d),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, q),
        "post_attention_layernorm.weight": (d,),
        "mlp.gate_proj.weight": (inner, d),
        "mlp.up_proj.weight": (inner, d),
        "mlp.down_proj.weight": (d, inner),
    }
    if decoder.qk_norm:
        layer |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    tensors = {
        f"layers.{i}.{name}": shape for i in range(decoder.num_layers) for name, shape in layer.items()
    }
    tensors["norm.weight"] = (d,)
    return tensors


def target_tensors(config: TargetConfig) -> dict[str, Shape]:
    """Return canonical name -> shape of every tensor of the target."""
    table = (config.vocab_size, config.decoder.hidden_size)
    tensors = {"embed_tokens.weight": table, **decoder_tensors(config.decoder)}
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = table
    return tensors


def check_tensors(found: Mapping[str, Shape], wanted: Mapping[str, Shape], *, where: str) -> None:
    """Refuse a checkpoint whose tensors are not exactly those its configuration asks for.

    Raises:
        CheckpointError: naming missing and left-over tensors, or the first wrong shape with both values.
    """
    missing = sorted(set(wanted) - set(found))
    extra = sorted(set(found) - set(wanted))
    if missing or extra:
        parts = [
            f"{len(names)} {word} ({_few(names)})"
            for names, word in ((missing, "missing"), (extra, "left over"))
            if names
        ]
        raise CheckpointError(
            f"{where}: the tensors are not those of the configuration: {' and '.join(parts)}"
        )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise CheckpointError(
                f"{where}: tensor {name!r} has shape {list(found[name])}, "
                f"the configuration asks for {list(shape)}"
            )


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
