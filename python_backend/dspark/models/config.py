"""What a checkpoint says about its model, once, in our words. No torch, no files.

The loaders (`hf`, `gguf_target`, `drafters.checkpoint`) fill these; executors read them. Anything that would
change the maths and is not held here must be refused by the loader.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["DecoderConfig", "DrafterConfig", "RopeConfig", "TargetConfig", "WeightSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base and, by `scaling`, the parameters of Hugging Face's `rope_parameters`."""

    theta: float = 10000.0
    scaling: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None = derived from the factor
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    frequency_divisors: tuple[float, ...] = ()  # [head_dim / 2], what GGUF calls rope_freqs; () = none


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A stack of decoder layers of the Llama / Qwen3 kind (pre-norm, GQA, SwiGLU, half-split RoPE)."""

    hidden_size: int  # d
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qk_norm: bool  # RMSNorm over head_dim of every query and key head before RoPE (Qwen3)
    rope: RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """The target model."""

    architecture: Literal["llama", "qwen3"]
    decoder: DecoderConfig
    vocab_size: int  # V
    tie_word_embeddings: bool
    max_context_len: int  # tokens, prompt and answer together
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    model_hash: str = ""  # hex digest over the checkpoint's weights and configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """A DFlash / DSpark drafter (algorithm.md, section 2)."""

    decoder: DecoderConfig
    vocab_size: int  # V of the target
    block_size: int  # G
    target_layer_ids: tuple[int, ...]  # m feature layers, -1 = embedding output
    mask_token_id: int
    markov_rank: int  # r, 0 = no sequential head
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = True
    sliding_windows: tuple[int | None, ...] = field(default=())  # per layer; None = full attention
    draft_vocab_size: int = 0  # Vd; equals vocab_size when not reduced
    target_hash: str | None = None  # model_hash of the target it was made for, where the checkpoint says so


class WeightSource(Protocol):
    """Tensors of a checkpoint under canonical names.

    Canonical names are Hugging Face's without the leading `model.`: `embed_tokens.weight`,
    `layers.0.self_attn.q_proj.weight`, `layers.0.self_attn.q_norm.weight`, `layers.0.input_layernorm.weight`,
    `layers.0.mlp.gate_proj.weight`, `norm.weight`, `lm_head.weight` (absent when tied). Linear weights are
    [out, in]; RoPE is the half-split kind whatever the file holds (GGUF's Llama order is undone by the
    loader).
    """

    def names(self) -> tuple[str, ...]: ...

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """Return one tensor, exactly widened or dequantised to float32, C-contiguous. Not cached.

        Raises:
            CheckpointError: when there is no tensor of this name.
        """
