"""Drafter checkpoints for tests: random ones of every kind, and one whose drafts are often right."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from dspark.drafters.checkpoint import save_drafter_checkpoint, tensor_shapes
from dspark.models.config import DecoderConfig, DrafterConfig, RopeConfig, TargetConfig
from dspark.models.loading import load_target

__all__ = ["Head", "tiny_target_config", "write_good_drafter", "write_tiny_drafter"]

Float32 = npt.NDArray[np.float32]
Head = Literal["vanilla", "gated", "rnn", "none"]


def tiny_target_config(
    *,
    vocab_size: int = 50,
    hidden_size: int = 32,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    qk_norm: bool = False,
) -> TargetConfig:
    """Return the configuration of a target that exists only as far as a drafter looks at it."""
    decoder = DecoderConfig(
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        qk_norm=qk_norm,
        rope=RopeConfig(theta=1000.0),
    )
    return TargetConfig(
        architecture="qwen3" if qk_norm else "llama",
        decoder=decoder,
        vocab_size=vocab_size,
        tie_word_embeddings=True,
        max_context_len=256,
    )


def write_tiny_drafter(
    folder: Path,
    target: TargetConfig | str | Path,
    *,
    block_size: int = 4,
    head: Head = "vanilla",
    rank: int = 6,
    confidence: bool = True,
    confidence_with_markov: bool = True,
    target_layer_ids: tuple[int, ...] = (0, 1),
    num_layers: int = 2,
    seed: int = 0,
    draft_vocab: int | None = None,
    small_w1: bool = False,
    sliding_windows: tuple[int | None, ...] | None = None,
    own_embedding: bool = False,
    own_head: bool = False,
    greedy_confidence: bool = False,
) -> DrafterConfig:
    """Write a drafter with random weights and return its configuration.

    Arguments:
        target: configuration or folder of the target.
        head: "none" is rank 0.
        draft_vocab: Vd of a reduced vocabulary, random tokens of the target's.
        small_w1: index markov_w1 by the draft vocabulary.
    """
    target = _config(target)
    rng = np.random.default_rng(seed)
    markov_rank = 0 if head == "none" else rank
    config = DrafterConfig(
        decoder=_decoder(target, num_layers),
        vocab_size=target.vocab_size,
        block_size=block_size,
        target_layer_ids=target_layer_ids,
        mask_token_id=target.vocab_size - 1,
        markov_rank=markov_rank,
        markov_head_type="vanilla" if head == "none" else head,
        enable_confidence_head=confidence,
        confidence_head_with_markov=confidence_with_markov and markov_rank > 0,
        sliding_windows=sliding_windows or (None,) * num_layers,
        draft_vocab_size=draft_vocab or target.vocab_size,
    )
    shapes = tensor_shapes(config, previous="draft" if small_w1 else "target")
    d = target.decoder.hidden_size
    if own_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, d)
    if own_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, d)
    if greedy_confidence:
        shapes["confidence_head.greedy.weight"] = (block_size, 3)
    tensors = {name: _random(rng, name, shape) for name, shape in shapes.items()}
    mapping = None
    if draft_vocab is not None:
        mapping = np.sort(rng.permutation(target.vocab_size)[:draft_vocab]).astype(np.int32)
    save_drafter_checkpoint(folder, config, tensors, draft_to_target=mapping, dtype="float32")
    return config


def write_good_drafter(
    folder: Path,
    target: str | Path,
    *,
    block_size: int = 4,
    head: Head = "vanilla",
    noise: float = 0.0,
    confidence: bool = True,
    target_layer_ids: tuple[int, ...] = (0, 1),
    draft_vocab: int | None = None,
    seed: int = 0,
) -> DrafterConfig:
    """Write a drafter that says what the target would say if its layers added nothing: the bigram in its
    residual.

    W1[x] is the target's final norm over the embedding of x and W2 its LM head, so B_k are the logits of a
    target with no layers; the block itself says nothing (its final norm is 0). How often it is right depends
    on how much the target's layers add to the embedding, and falls with `noise`, which is relative to W1.
    """
    assert head != "none", "the sequential head is all that is good about it"
    checkpoint = load_target(target)
    weights, decoder = checkpoint.weights, checkpoint.config.decoder
    d, vocab_size = decoder.hidden_size, checkpoint.config.vocab_size
    embedding = weights.float32("embed_tokens.weight")
    lm_head = embedding if checkpoint.config.tie_word_embeddings else weights.float32("lm_head.weight")
    rng = np.random.default_rng(seed)
    w1 = embedding / np.sqrt((embedding**2).mean(-1, keepdims=True) + decoder.rms_norm_eps)
    w1 *= weights.float32("norm.weight")
    w1 = w1 + noise * w1.std() * rng.standard_normal(w1.shape)
    config = DrafterConfig(
        decoder=_decoder(checkpoint.config, 1),
        vocab_size=vocab_size,
        block_size=block_size,
        target_layer_ids=target_layer_ids,
        mask_token_id=vocab_size - 1,
        markov_rank=d,
        markov_head_type=head,
        enable_confidence_head=confidence,
        confidence_head_with_markov=confidence,
        sliding_windows=(None,),
        draft_vocab_size=draft_vocab or vocab_size,
        target_hash=checkpoint.config.model_hash or None,
    )
    mapping = None
    if draft_vocab is not None:
        mapping = np.sort(rng.permutation(vocab_size)[:draft_vocab]).astype(np.int32)
    tensors = {name: _random(rng, name, shape) for name, shape in tensor_shapes(config).items()}
    tensors["norm.weight"] = np.zeros(d, np.float32)
    tensors["markov_head.markov_w1.weight"] = w1.astype(np.float32)
    tensors["markov_head.markov_w2.weight"] = lm_head if mapping is None else lm_head[mapping]
    if head == "gated":  # the gate stands open
        tensors["markov_head.gate_proj.weight"] = np.zeros((d, 2 * d), np.float32)
        tensors["markov_head.gate_proj.bias"] = np.full(d, 30.0, np.float32)
    if head == "rnn":  # output = W1[x], small enough for tanh to be a line; W2 undoes the scale
        scale = np.float32(0.01)
        joint = np.zeros((3 * d, 3 * d), np.float32)
        joint[2 * d :, d : 2 * d] = scale * np.eye(d, dtype=np.float32)
        tensors["markov_head.joint_proj.weight"] = joint
        tensors["markov_head.joint_proj.bias"] = np.zeros(3 * d, np.float32)
        tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"] / scale
    save_drafter_checkpoint(folder, config, tensors, draft_to_target=mapping, dtype="float32")
    return config


def _config(target: TargetConfig | str | Path) -> TargetConfig:
    return target if isinstance(target, TargetConfig) else load_target(target).config


def _decoder(target: TargetConfig, num_layers: int) -> DecoderConfig:
    decoder = target.decoder
    return DecoderConfig(
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        num_layers=num_layers,
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        rms_norm_eps=decoder.rms_norm_eps,
        qk_norm=decoder.qk_norm,
        rope=decoder.rope,
    )


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Float32:
    values = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("norm.weight"):
        return (1.0 + 0.2 * values).astype(np.float32)
    if len(shape) == 1:
        return np.float32(0.2) * values
    if name.endswith(("markov_w1.weight", "markov_w2.weight")):
        return values
    return (values / np.sqrt(shape[-1])).astype(np.float32)
