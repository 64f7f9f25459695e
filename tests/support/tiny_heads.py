"""EAGLE-3 and MTP heads for tests: random ones of every kind, and ones that say what a target's embedding says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from dspark.drafters.feature_heads import HeadConfig, HeadKind, head_tensors
from dspark.models.config import DecoderConfig, RopeConfig, TargetConfig
from dspark.models.loading import load_target
from safetensors.numpy import save_file

__all__ = ["write_bigram_target", "write_good_head", "write_tiny_head"]

Tensors = dict[str, npt.NDArray[Any]]


def write_tiny_head(
    folder: Path,
    target: Path,
    *,
    kind: HeadKind,
    layer_ids: tuple[int, ...] = (0, 1, -1),
    hidden_size: int | None = None,
    draft_vocab: int | None = None,
    qk_norm: bool = False,
    norm_before_residual: bool = False,
    own_tables: bool = False,
    target_norm: bool = False,
    seed: int = 0,
) -> Path:
    """Write a head with random weights as its publishers do (EAGLE-3: `midlayer.`, int64 d2t, bool t2d).

    Arguments:
        layer_ids: target layers of EAGLE-3's features, -1 = the embedding output.
        hidden_size: of the head, where it is not the target's.
        draft_vocab: Vd of a reduced vocabulary, random tokens of the target's.
        own_tables: embedding and LM head of its own.
        target_norm: of MTP: the module was trained behind the target's final norm.
    """
    checkpoint = load_target(target).config
    config = _config(
        checkpoint,
        kind,
        layer_ids,
        hidden_size=hidden_size,
        draft_vocab=draft_vocab,
        qk_norm=qk_norm,
        norm_before_residual=norm_before_residual,
    )
    rng = np.random.default_rng(seed)
    d = config.decoder.hidden_size
    shapes = head_tensors(config)
    if own_tables:
        shapes |= {
            "embed_tokens.weight": (config.vocab_size, d),
            "lm_head.weight": (config.draft_vocab_size, d),
        }
    if target_norm:
        shapes["target_norm.weight"] = (d,)
    tensors: Tensors = {name: _random(rng, shape) for name, shape in shapes.items()}
    if own_tables:
        tensors["embed_tokens.weight"] *= np.float32(d**0.5)
        tensors["lm_head.weight"] *= np.float32(3.0)
    if draft_vocab is not None:
        mapping = np.sort(rng.permutation(config.vocab_size)[:draft_vocab])
        tensors["d2t"] = mapping - np.arange(draft_vocab)
        tensors["t2d"] = np.isin(np.arange(config.vocab_size), mapping)
    return _write(folder, config, tensors)


def write_good_head(
    folder: Path, target: Path, *, kind: HeadKind, layer_ids: tuple[int, ...] = (0, 1, -1)
) -> Path:
    """Write a head whose output is the normed embedding of its token, so that its logits are the target's bigrams.

    EAGLE-3's layer can only add to the hidden state it is given, so its values are the embedding less that state, and
    its one head looks at its own row alone: no other row's token is as like it.
    """
    checkpoint = load_target(target)
    weights, d = checkpoint.weights, checkpoint.config.decoder.hidden_size
    decoder = _decoder(checkpoint.config.decoder, d, num_heads=1, head_dim=d, qk_norm=False)
    config = HeadConfig(
        kind=kind,
        decoder=decoder,
        vocab_size=checkpoint.config.vocab_size,
        draft_vocab_size=checkpoint.config.vocab_size,
        target_layer_ids=layer_ids,
        target_hidden_size=d,
    )
    tensors: Tensors = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else np.zeros(shape, np.float32)
        for name, shape in head_tensors(config).items()
    }
    eye, none = np.eye(d, dtype=np.float32), np.zeros((d, d), np.float32)
    tensors["norm.weight"] = weights.float32("norm.weight")
    if kind == "mtp":
        tensors["eh_proj.weight"] = np.hstack([eye, none])
    else:
        for name in "qk":
            tensors[f"layers.0.self_attn.{name}_proj.weight"] = np.hstack([20.0 * eye, none]).astype(
                np.float32
            )
        tensors["layers.0.self_attn.v_proj.weight"] = np.hstack([eye, -eye])
        tensors["layers.0.self_attn.o_proj.weight"] = eye
    return _write(folder, config, tensors)


def write_bigram_target(folder: Path, source: Path) -> Path:
    """Write a target whose layers add nothing to the embedding, otherwise `source`."""
    from support.tiny_models import write_safetensors

    weights = load_target(source).weights
    folder.mkdir(parents=True)
    (folder / "config.json").write_text((source / "config.json").read_text())
    stored = {}
    for name in weights.names():
        silent = name.endswith(("o_proj.weight", "down_proj.weight"))
        values = weights.float32(name) * np.float32(0.0 if silent else 1.0)
        stored[name if name == "lm_head.weight" else f"model.{name}"] = values
    write_safetensors(folder / "model.safetensors", stored)
    return folder


def _config(
    target: TargetConfig,
    kind: HeadKind,
    layer_ids: tuple[int, ...],
    *,
    hidden_size: int | None,
    draft_vocab: int | None,
    qk_norm: bool,
    norm_before_residual: bool,
) -> HeadConfig:
    d = hidden_size or target.decoder.hidden_size
    return HeadConfig(
        kind=kind,
        decoder=_decoder(target.decoder, d, num_heads=4, head_dim=8, qk_norm=qk_norm),
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab or target.vocab_size,
        target_layer_ids=layer_ids if kind == "eagle3" else (target.decoder.num_layers - 1,),
        target_hidden_size=target.decoder.hidden_size,
        norm_before_residual=norm_before_residual,
    )


def _decoder(
    target: DecoderConfig, hidden_size: int, *, num_heads: int, head_dim: int, qk_norm: bool
) -> DecoderConfig:
    return DecoderConfig(
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=max(num_heads // 2, 1),
        head_dim=head_dim,
        rms_norm_eps=target.rms_norm_eps,
        qk_norm=qk_norm,
        rope=RopeConfig(theta=1000.0),
    )


def _write(folder: Path, config: HeadConfig, tensors: Tensors) -> Path:
    decoder = config.decoder
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if config.kind == "eagle3" else "LlamaMTPModel"],
        "model_type": "qwen3" if decoder.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": decoder.rms_norm_eps,
        "rope_theta": decoder.rope.theta,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    if config.draft_vocab_size != config.vocab_size:
        fields["draft_vocab_size"] = config.draft_vocab_size
    if config.kind == "eagle3":
        fields |= {
            "norm_before_residual": config.norm_before_residual,
            "target_hidden_size": config.target_hidden_size,
            # At the top level the embedding output counts as 0.
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    stored = {
        name.replace("layers.0.", "midlayer.") if config.kind == "eagle3" else name: np.ascontiguousarray(
            values
        )
        for name, values in tensors.items()
    }
    save_file(stored, folder / "model.safetensors")
    return folder


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    values = rng.standard_normal(shape)
    values = 1.0 + 0.2 * values if len(shape) == 1 else values / np.sqrt(shape[-1]) * 1.5
    return values.astype(np.float32)
