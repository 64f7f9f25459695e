"""Hugging Face folders: configuration in both spellings, safetensors, refusals."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dspark.errors import CheckpointError
from dspark.models.config import RopeConfig
from dspark.models.fingerprint import fingerprint
from dspark.models.loading import load_target
from support.tiny_models import hf_fields, random_weights, tiny_config, write_safetensors, write_tiny_target

LLAMA3 = RopeConfig(
    theta=500000.0,
    scaling="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


def _edit(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_folder_comes_back_as_written(tmp_path: Path, architecture: str, num_shards: int) -> None:
    folder = write_tiny_target(
        tmp_path,
        architecture=architecture,
        num_shards=num_shards,
        seed=5,
        eos_ids=(7, 9),
        bos_id=1,
        rope=LLAMA3,
    )
    loaded = load_target(folder)

    config = tiny_config(architecture=architecture, eos_ids=(7, 9), bos_id=1, rope=LLAMA3)
    assert loaded.config.decoder == config.decoder
    assert (loaded.config.eos_ids, loaded.config.bos_id, loaded.tokenizer) == ((7, 9), 1, None)
    weights = random_weights(config, seed=5)
    assert set(loaded.weights.names()) == set(weights)
    for name, values in weights.items():
        np.testing.assert_array_equal(loaded.weights.float32(name), values)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_half_precision_is_widened_exactly(tmp_path: Path, dtype: str) -> None:
    values = np.array([[0.0, -0.0, 1.0, -1.5, 3.140625, 2.0**-14, np.inf, -np.inf]], np.float32)
    write_safetensors(tmp_path / "model.safetensors", {"x": values}, dtype=dtype)
    from dspark.models.safetensors_file import open_safetensors

    source = open_safetensors(tmp_path)
    assert source.storage_dtype("x") == dtype and source.shape("x") == (1, 8)
    np.testing.assert_array_equal(source.float32("x").view(np.uint32), values.view(np.uint32))


def test_files_are_those_the_safetensors_package_reads(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    folder = write_tiny_target(tmp_path)
    theirs = safetensors.load_file(folder / "model.safetensors")
    source = load_target(folder).weights
    for name, values in theirs.items():
        np.testing.assert_array_equal(source.float32(name.removeprefix("model.")), values)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_the_old_rope_spelling_means_the_same(tmp_path: Path, key: str) -> None:
    new = load_target(write_tiny_target(tmp_path / "new", rope=LLAMA3)).config.decoder.rope
    old_folder = write_tiny_target(tmp_path / "old")
    scaling = {key: "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    _edit(
        old_folder,
        rope_parameters=None,
        rope_theta=500000.0,
        rope_scaling=scaling | {"original_max_position_embeddings": 64},
    )
    assert load_target(old_folder).config.decoder.rope == new == LLAMA3


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path, eos_ids=(3,))
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 3]}')
    assert load_target(folder).config.eos_ids == (4, 3)


def test_a_tied_head_that_was_saved_is_left_out_when_equal_and_refused_when_not(tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path, tie=True)
    weights = {f"model.{name}": values for name, values in random_weights(tiny_config(tie=True)).items()}
    head = weights["model.embed_tokens.weight"].copy()
    write_safetensors(folder / "model.safetensors", weights | {"lm_head.weight": head})
    assert "lm_head.weight" not in load_target(folder).weights.names()

    head[0, 0] += 1
    write_safetensors(folder / "model.safetensors", weights | {"lm_head.weight": head})
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_target(folder)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "gemma2"}, ("model_type", "'gemma2'", "'llama'")),
        ({"architectures": ["LlamaForSequenceClassification"]}, ("architectures", "LlamaForCausalLM")),
        ({"attention_bias": True}, ("attention_bias", "True", "False")),
        ({"mlp_bias": True}, ("mlp_bias", "True", "False")),
        ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'", "'silu'")),
        ({"sliding_window": 128}, ("sliding_window", "128")),
        ({"layer_types": ["sliding_attention"] * 3}, ("layer_types", "sliding_attention")),
        ({"num_local_experts": 8}, ("num_local_experts", "8")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "gptq")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ({"rope_interleaved": True}, ("rope_interleaved", "True")),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ("rope_type", "'dynamic'", "yarn")),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, ("rope_type", "'longrope'")),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1}},
            ("low_freq_factor",),
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, ("factor", "missing")),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ("per layer type",)),
        ({"num_key_value_heads": 3}, ("4 query heads", "3 key heads")),
        ({"head_dim": 7}, ("head_dim", "7", "even")),
        ({"hidden_size": "32"}, ("hidden_size", "'32'")),
        ({"vocab_size": None}, ("vocab_size", "missing")),
        ({"rms_norm_eps": -1.0}, ("rms_norm_eps", "-1.0")),
        ({"eos_token_id": 50}, ("eos_token_id", "50", "49")),
        ({"num_hidden_layers": 4}, ("missing", "layers.3.")),
        ({"num_hidden_layers": 2}, ("left over", "layers.2.")),
        ({"intermediate_size": 65}, ("[64, 32]", "[65, 32]")),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    folder = write_tiny_target(tmp_path)
    _edit(folder, **fields)
    with pytest.raises(CheckpointError) as raised:
        load_target(folder)
    for word in words:
        assert word in str(raised.value)


def test_qwen3_with_its_sliding_window_switched_on_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path, architecture="qwen3")
    _edit(folder, sliding_window=128, use_sliding_window=False)
    load_target(folder)
    _edit(folder, use_sliding_window=True)
    with pytest.raises(CheckpointError, match="use_sliding_window is True"):
        load_target(folder)


def test_damaged_safetensors_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for broken in (b"", whole[:4], whole[:-8], b"\xff" * 8 + whole[8:], whole[:8] + b"[" + whole[9:]):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match="model.safetensors"):
            load_target(folder)


def test_other_dtypes_and_missing_shards_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_target(tmp_path, num_shards=2)
    shard = next(iter(sorted(folder.glob("model-*.safetensors"))))
    whole = shard.read_bytes()
    shard.write_bytes(whole.replace(b'"F32"', b'"F64"', 1))
    with pytest.raises(CheckpointError, match="dtype F64, allowed are F32, F16, BF16"):
        load_target(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"names the shard '{shard.name}'"):
        load_target(folder)


def test_paths_that_are_no_target_are_refused_without_the_network(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder or file"):
        load_target(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no config.json"):
        load_target(tmp_path)
    (tmp_path / "x.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"x\.bin is a file"):
        load_target(tmp_path / "x.bin")
    (tmp_path / "config.json").write_text("[]")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="model.safetensors"):
        load_target(tmp_path)


def test_a_hub_that_cannot_be_reached_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(name: str, **_: object) -> str:
        raise ConnectionError(f"no route to host for {name}")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(CheckpointError, match="org/name: .*no route to host"):
        load_target("org/name")


def test_the_hash_follows_the_content_and_not_the_name(tmp_path: Path) -> None:
    first = load_target(write_tiny_target(tmp_path / "a", seed=1)).config.model_hash
    same = load_target(write_tiny_target(tmp_path / "b", seed=1)).config.model_hash
    other_weights = load_target(write_tiny_target(tmp_path / "c", seed=2)).config.model_hash
    folder = write_tiny_target(tmp_path / "d", seed=1)
    _edit(folder, rms_norm_eps=1e-6)
    other_config = load_target(folder).config.model_hash
    assert first == same and len({first, other_weights, other_config}) == 3


def test_large_files_are_hashed_by_samples_that_include_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "large"
    size = 3 << 30  # a sparse file
    with path.open("wb") as file:
        file.truncate(size)
    started = time.perf_counter()
    digests = [fingerprint([path])]
    assert time.perf_counter() - started < 5  # the whole file would take longer, by far
    for at in (0, size - 1):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"x")
        digests.append(fingerprint([path]))
    assert len(set(digests)) == 3


def test_config_fields_survive_a_round_trip(tmp_path: Path) -> None:
    yarn = RopeConfig(
        scaling="yarn", factor=4.0, original_max_position_embeddings=128, mscale=0.7, mscale_all_dim=1.3
    )
    config = tiny_config(rope=yarn)
    assert hf_fields(config)["rope_parameters"]["mscale"] == 0.7
    assert load_target(write_tiny_target(tmp_path, rope=yarn)).config.decoder.rope == yarn
