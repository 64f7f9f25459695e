"""GGUF files: the container, dequantisation, and the model in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from dspark.errors import CheckpointError
from dspark.models.config import RopeConfig, TargetConfig
from dspark.models.gguf_file import GgufFile
from dspark.models.loading import load_target
from support.tiny_models import Weights, random_weights, tiny_config, write_tiny_gguf

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")


def _write_raw(path: Path, type_name: str, shape: tuple[int, int], seed: int) -> np.ndarray[Any, Any]:
    """Write one tensor of random blocks with finite scales; return its bytes [rows, bytes]."""
    kind = gguf.GGMLQuantizationType[type_name]
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // block_len, block_bytes), np.uint8)
    halves = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [block_bytes - 2]}
    for at in halves.get(type_name, []):
        blocks[:, at : at + 2] = rng.standard_normal((len(blocks), 1)).astype("<f2").view(np.uint8)
    raw = blocks.reshape(shape[0], -1)
    if type_name in ("F32", "F16", "BF16"):
        raw = gguf.quantize(rng.standard_normal(shape).astype(np.float32), kind).view(np.uint8)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return raw


@pytest.mark.parametrize("type_name", TYPES)
def test_dequantised_tensors_equal_the_gguf_packages_own(tmp_path: Path, type_name: str) -> None:
    raw = _write_raw(tmp_path / "t.gguf", type_name, (48, 512), seed=TYPES.index(type_name))
    file = GgufFile(tmp_path / "t.gguf")

    ours = file.float32("x.weight")

    theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType[type_name]).reshape(48, 512)
    assert ours.dtype == np.float32 and ours.flags.c_contiguous and ours.flags.writeable
    assert file.tensors["x.weight"].shape == (48, 512)
    np.testing.assert_array_equal(ours, theirs)


def test_header_equals_what_the_gguf_package_reads(tmp_path: Path) -> None:
    config = tiny_config()
    path = write_tiny_gguf(
        tmp_path / "t.gguf",
        config,
        random_weights(config),
        fields={"x.words": ["a", "", "häh"], "x.bytes": [1.5, -2.5], "x.flag": True, "x.text": "ü"},
    )
    reader = gguf.GGUFReader(path)
    file = GgufFile(path)

    theirs = {key: f.contents() for key, f in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == theirs
    assert {t.name: t.data_offset for t in reader.tensors} == {t.name: t.start for t in file.tensors.values()}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_weights_come_back_half_split_under_canonical_names(tmp_path: Path, architecture: str) -> None:
    config = tiny_config(architecture=architecture)
    weights = random_weights(config, seed=3)
    loaded = load_target(write_tiny_gguf(tmp_path / "t.gguf", config, weights))

    assert set(loaded.weights.names()) == set(weights)
    for name, values in weights.items():
        np.testing.assert_array_equal(loaded.weights.float32(name), values)
    assert loaded.config.decoder == config.decoder
    assert loaded.config.vocab_size == config.vocab_size and not loaded.config.tie_word_embeddings
    assert loaded.tokenizer is None


def test_llama_rows_are_stored_interleaved(tmp_path: Path) -> None:
    """Guards the writer that the test above relies on: pair j of a head is rows 2j and 2j+1 in the file."""
    config = tiny_config(num_heads=2, num_kv_heads=1, head_dim=8)
    weights = random_weights(config)
    file = GgufFile(write_tiny_gguf(tmp_path / "t.gguf", config, weights))

    stored, ours = file.float32("blk.0.attn_q.weight"), weights["layers.0.self_attn.q_proj.weight"]
    for head in range(2):
        for pair in range(4):
            np.testing.assert_array_equal(stored[8 * head + 2 * pair], ours[8 * head + pair])
            np.testing.assert_array_equal(stored[8 * head + 2 * pair + 1], ours[8 * head + 4 + pair])


def test_a_file_without_a_head_is_tied(tmp_path: Path) -> None:
    config = tiny_config(tie=True)
    loaded = load_target(write_tiny_gguf(tmp_path / "t.gguf", config, random_weights(config)))
    assert loaded.config.tie_word_embeddings
    assert "lm_head.weight" not in loaded.weights.names()


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({}, RopeConfig()),
        ({"llama.rope.scaling.type": "none"}, RopeConfig()),
        ({"llama.rope.scaling.factor": 4.0}, RopeConfig(scaling="linear", factor=4.0)),
        ({"llama.rope.scale_linear": 2.0}, RopeConfig(scaling="linear", factor=2.0)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 8.0,
                "llama.rope.scaling.original_context_length": 64,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            RopeConfig(scaling="yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=16.0),
        ),
    ],
)
def test_rope_scaling_keys_are_read(tmp_path: Path, fields: dict[str, Any], rope: RopeConfig) -> None:
    config = tiny_config()
    path = write_tiny_gguf(tmp_path / "t.gguf", config, random_weights(config), fields=fields)
    assert load_target(path).config.decoder.rope == rope


def test_rope_freqs_are_read_as_divisors(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config) | {"rope_freqs.weight": np.array([1, 2, 4, 8], np.float32)}
    loaded = load_target(write_tiny_gguf(tmp_path / "t.gguf", config, weights))
    assert loaded.config.decoder.rope.frequency_divisors == (1.0, 2.0, 4.0, 8.0)
    assert "rope_freqs.weight" not in loaded.weights.names()


def _refused(path: Path, config: TargetConfig, weights: Weights, fields: dict[str, Any], *words: str) -> None:
    write_tiny_gguf(path, config, weights, fields=fields)
    with pytest.raises(CheckpointError) as raised:
        load_target(path)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"general.architecture": "gemma"}, ("general.architecture", "'gemma'", "'qwen3'")),
        ({"llama.expert_count": 8}, ("llama.expert_count", "8", "0")),
        ({"llama.attention.sliding_window": 128}, ("llama.attention.sliding_window", "128")),
        ({"llama.logit_scale": 0.5}, ("llama.logit_scale", "0.5")),
        ({"llama.new_maths": 1}, ("llama.new_maths", "not known")),
        ({"llama.rope.dimension_count": 4}, ("llama.rope.dimension_count", "4", "8")),
        ({"llama.rope.scaling.type": "longrope"}, ("rope.scaling.type", "'longrope'", "'yarn'")),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0},
            ("original_context_length", "missing"),
        ),
        ({"llama.rope.scaling.yarn_ext_factor": 0.5}, ("yarn_ext_factor", "0.5")),
        ({"llama.block_count": 4}, ("missing", "layers.3.")),
        ({"llama.block_count": 2}, ("left over", "layers.2.")),
        ({"llama.feed_forward_length": 63}, ("[64, 32]", "[63, 32]")),
        ({"llama.attention.head_count_kv": 3}, ("4 query heads", "3 key heads")),
        ({"llama.embedding_length": "32"}, ("embedding_length", "'32'")),
        ({"split.count": 2}, ("split.count", "2")),
        ({"tokenizer.ggml.eos_token_id": 50}, ("eos_token_id", "50", "49")),
        ({"tokenizer.ggml.model": "bert"}, ("tokenizer.ggml.model", "'bert'", "'gpt2'")),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    config = tiny_config()
    _refused(tmp_path / "t.gguf", config, random_weights(config), fields, *words)


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config) | {"layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}
    _refused(tmp_path / "t.gguf", config, weights, {}, "blk.0.attn_q.bias")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config)
    del weights["layers.1.mlp.up_proj.weight"]
    _refused(tmp_path / "t.gguf", config, weights, {}, "missing", "layers.1.mlp.up_proj.weight")


def test_other_quantisations_are_refused_by_name(tmp_path: Path) -> None:
    config = tiny_config()
    write_tiny_gguf(tmp_path / "t.gguf", config, random_weights(config), quant="Q5_0")
    with pytest.raises(
        CheckpointError, match=r"Q5_0, allowed are F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K"
    ):
        load_target(tmp_path / "t.gguf")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:0],
        lambda data: b"GGML" + data[4:],
        lambda data: data[:4] + b"\x09\0\0\0" + data[8:],
        lambda data: data[:200],
        lambda data: data[: len(data) - 4096],
        lambda data: data[:16] + b"\xff" * 8 + data[24:],
        lambda data: data[:24] + b"\xff" * 8 + data[32:],
    ],
    ids=["empty", "magic", "version", "header cut", "tensors cut", "field count", "key length"],
)
def test_damaged_files_are_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    config = tiny_config()
    path = write_tiny_gguf(tmp_path / "t.gguf", config, random_weights(config))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match="t.gguf"):
        load_target(path)
