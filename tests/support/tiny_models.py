"""Writes tiny random targets to disk, as Hugging Face folders and as GGUF files.

Their logits are spread over several units, so that greedy decoding is not decided by rounding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from dspark.models.config import DecoderConfig, RopeConfig, TargetConfig
from dspark.models.layout import target_tensors
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = [
    "CHAT_TEMPLATE",
    "DictWeights",
    "hf_fields",
    "random_weights",
    "tiny_config",
    "tiny_tokenizer",
    "write_safetensors",
    "write_tiny_gguf",
    "write_tiny_target",
]

Weights = dict[str, npt.NDArray[np.float32]]

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CORPUS = (
    "The quick brown fox jumps over the lazy dog. The capital of France is Paris, that of Spain is Madrid.",
    "Speculative decoding drafts tokens and verifies them; accepted ones are kept, others are drawn anew.",
    "def add(left, right):\n    return left + right\n\nprint(add(1, 2))  # 3\n",
)


class DictWeights:
    """A `WeightSource` over arrays in memory."""

    def __init__(self, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
        self._weights = weights

    def names(self) -> tuple[str, ...]:
        return tuple(self._weights)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        return self._weights[name].copy()


def tiny_config(
    *,
    architecture: str = "llama",
    vocab_size: int = 50,
    hidden_size: int = 32,
    intermediate_size: int | None = None,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    tie: bool = False,
    rope: RopeConfig | None = None,
    max_context_len: int = 512,
    bos_id: int | None = None,
    eos_ids: tuple[int, ...] = (),
) -> TargetConfig:
    """Return the configuration of a tiny target."""
    assert architecture in ("llama", "qwen3")
    return TargetConfig(
        architecture="qwen3" if architecture == "qwen3" else "llama",
        decoder=DecoderConfig(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size or 2 * hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=1e-5,
            qk_norm=architecture == "qwen3",
            rope=rope or RopeConfig(),
        ),
        vocab_size=vocab_size,
        tie_word_embeddings=tie,
        max_context_len=max_context_len,
        bos_id=bos_id,
        eos_ids=eos_ids,
    )


def random_weights(config: TargetConfig, *, seed: int = 0, scale: float = 3.0) -> Weights:
    """Return canonical tensors; `scale` is the standard deviation of the logits.

    Matrices keep the size of what goes through them, and queries and keys are enlarged, so that attention
    looks at few positions and every layer matters.
    """
    rng = np.random.default_rng(seed)
    weights: Weights = {}
    for name, shape in target_tensors(config).items():
        if len(shape) == 1:
            values = 1.0 + 0.1 * rng.standard_normal(shape)
        else:
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            is_head = name == "lm_head.weight" or (
                name == "embed_tokens.weight" and config.tie_word_embeddings
            )
            values = rng.standard_normal(shape) / np.sqrt(shape[1]) * (scale if is_head else gain)
            if name == "embed_tokens.weight" and not config.tie_word_embeddings:
                values = rng.standard_normal(shape)
        weights[name] = values.astype(np.float32)
    return weights


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]], *, dtype: str = "F32") -> None:
    """Write one safetensors file; `dtype` BF16 rounds to nearest even, F16 rounds as numpy does."""
    header: dict[str, Any] = {}
    blobs = []
    at = 0
    for name, values in tensors.items():
        blob = _stored(values, dtype)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def _stored(values: npt.NDArray[Any], dtype: str) -> bytes:
    if dtype == "BF16":
        bits = values.astype("<f4").view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def write_tiny_target(
    folder: Path,
    *,
    architecture: str = "llama",
    vocab_size: int = 50,
    hidden_size: int = 32,
    intermediate_size: int | None = None,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    seed: int = 0,
    tie: bool = False,
    rope: RopeConfig | None = None,
    max_context_len: int = 512,
    bos_id: int | None = None,
    eos_ids: tuple[int, ...] = (),
    with_tokenizer: bool = False,
    scale: float = 3.0,
    dtype: str = "F32",
    num_shards: int = 1,
) -> Path:
    """Write a Hugging Face folder with random weights and return it.

    With a tokenizer the vocabulary is at least 300, and <|im_end|> ends the answer unless `eos_ids` says
    otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if with_tokenizer:
        vocab_size = max(vocab_size, 300)
        tokenizer = tiny_tokenizer(vocab_size)
        _write_tokenizer(folder, tokenizer)
        eos_ids = eos_ids or (tokenizer.token_to_id("<|im_end|>"),)
    config = tiny_config(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tie=tie,
        rope=rope,
        max_context_len=max_context_len,
        bos_id=bos_id,
        eos_ids=eos_ids,
    )
    (folder / "config.json").write_text(json.dumps(hf_fields(config), indent=1))
    weights = random_weights(config, seed=seed, scale=scale)
    stored = {
        name if name == "lm_head.weight" else f"model.{name}": values for name, values in weights.items()
    }
    if num_shards == 1:
        write_safetensors(folder / "model.safetensors", stored, dtype=dtype)
        return folder
    names = list(stored)
    weight_map = {}
    for i in range(num_shards):
        shard = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        write_safetensors(folder / shard, {name: stored[name] for name in names[i::num_shards]}, dtype=dtype)
        weight_map |= dict.fromkeys(names[i::num_shards], shard)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def hf_fields(config: TargetConfig) -> dict[str, Any]:
    """Return config.json's fields in the new RoPE spelling."""
    decoder, rope = config.decoder, config.decoder.rope
    parameters: dict[str, Any] = {"rope_type": rope.scaling, "rope_theta": rope.theta}
    if rope.scaling != "default":
        parameters["factor"] = rope.factor
    if rope.scaling in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.scaling == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(rope, name) is not None:
                parameters[name] = getattr(rope, name)
    return {
        "architectures": ["Qwen3ForCausalLM" if config.architecture == "qwen3" else "LlamaForCausalLM"],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": decoder.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_context_len,
        "rope_parameters": parameters,
        "attention_bias": False,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
        "torch_dtype": "float32",
    }


def tiny_tokenizer(vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with three special tokens on a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in _SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    settings = {"bos_token": None, "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_tiny_gguf(
    path: Path,
    config: TargetConfig,
    weights: Weights,
    *,
    quant: str = "F32",
    tokenizer: Tokenizer | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write a target as GGUF, Llama's query and key rows interleaved as llama.cpp does, and return the path.

    Arguments:
        quant: type of the matrices, as the `gguf` package can quantise it; vectors are always F32.
        fields: further metadata (ints, floats, texts, bools, lists of texts or numbers), replacing what is
            written.
    """
    decoder, prefix = config.decoder, config.architecture
    writer = gguf.GGUFWriter(path, prefix)
    values: dict[str, Any] = {
        f"{prefix}.block_count": decoder.num_layers,
        f"{prefix}.context_length": config.max_context_len,
        f"{prefix}.embedding_length": decoder.hidden_size,
        f"{prefix}.feed_forward_length": decoder.intermediate_size,
        f"{prefix}.attention.head_count": decoder.num_heads,
        f"{prefix}.attention.head_count_kv": decoder.num_kv_heads,
        f"{prefix}.attention.key_length": decoder.head_dim,
        f"{prefix}.attention.value_length": decoder.head_dim,
        f"{prefix}.attention.layer_norm_rms_epsilon": decoder.rms_norm_eps,
        f"{prefix}.rope.freq_base": decoder.rope.theta,
        f"{prefix}.rope.dimension_count": decoder.head_dim,
        f"{prefix}.vocab_size": config.vocab_size,
    }
    if tokenizer is not None:
        values |= _tokenizer_fields(tokenizer, config.vocab_size)
    for key, value in (values | dict(fields or {})).items():
        _add_field(writer, key, value)
    for name, tensor in weights.items():
        _add_tensor(writer, _gguf_name(name), _interleaved(name, tensor, config), quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tokenizer_fields(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    by_id = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokens = [by_id[i] for i in range(min(len(by_id), vocab_size))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in _SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: npt.NDArray[np.float32], quant: str) -> None:
    kind = gguf.GGMLQuantizationType[quant if values.ndim == 2 else "F32"]
    writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)


def _gguf_name(name: str) -> str:
    top = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
    if name in top or name == "lm_head.weight":
        return top.get(name, "output.weight")
    if not name.startswith("layers."):
        return name
    _, layer, rest = name.split(".", 2)
    for ours, theirs in (
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ):
        rest = rest.replace(ours, theirs)
    return f"blk.{layer}.{rest}"


def _interleaved(name: str, values: npt.NDArray[np.float32], config: TargetConfig) -> npt.NDArray[np.float32]:
    heads = {"q_proj": config.decoder.num_heads, "k_proj": config.decoder.num_kv_heads}.get(
        name.split(".")[-2], 0
    )
    if config.architecture != "llama" or not heads or values.ndim != 2:
        return values
    dim, width = config.decoder.head_dim, values.shape[1]
    mixed = np.empty((heads, dim, width), np.float32)
    halves = values.reshape(heads, dim, width)
    mixed[:, 0::2], mixed[:, 1::2] = halves[:, : dim // 2], halves[:, dim // 2 :]
    return mixed.reshape(values.shape)
