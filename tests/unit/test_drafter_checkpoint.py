"""Drafter checkpoints: what is written is read, what does not fit is refused with both values named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dspark.drafters.checkpoint import load_drafter_checkpoint, save_drafter_checkpoint, tensor_shapes
from dspark.drafters.identity import drafter_identity
from dspark.errors import CheckpointError
from dspark.models.config import DrafterConfig, RopeConfig, TargetConfig
from dspark.models.safetensors_file import SafetensorsSource, write_tensors
from safetensors.numpy import load_file, save_file
from support.tiny_drafters import tiny_target_config, write_tiny_drafter

TARGET = tiny_target_config()


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_tensors(folder: Path, **changes: np.ndarray | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, array in changes.items():
        if array is None:
            del tensors[name]
        else:
            tensors[name] = array
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_drafter(tmp_path / "drafter", TARGET)
    return tmp_path / "drafter"


def refuse(folder: Path, *parts: str, target: TargetConfig = TARGET) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_drafter_checkpoint(folder, target=target)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


# Round trips


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("windows", [(None, None), (8, None)])
def test_written_configuration_is_read_back(tmp_path: Path, head: Any, qk_norm: bool, windows: Any) -> None:
    target = tiny_target_config(qk_norm=qk_norm)
    written = write_tiny_drafter(tmp_path / "d", target, head=head, sliding_windows=windows)
    assert load_drafter_checkpoint(tmp_path / "d", target=target).config == written


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(scaling="linear", factor=2.0),
        RopeConfig(
            theta=5e5,
            scaling="llama3",
            factor=8.0,
            original_max_position_embeddings=64,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        RopeConfig(scaling="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.2),
        RopeConfig(frequency_divisors=(1.0, 1.0, 2.0, 8.0)),
    ],
)
def test_every_rope_is_read_back(tmp_path: Path, rope: RopeConfig) -> None:
    target = replace(TARGET, decoder=replace(TARGET.decoder, rope=rope))
    write_tiny_drafter(tmp_path / "d", target)
    assert load_drafter_checkpoint(tmp_path / "d", target=target).config.decoder.rope == rope


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 24), ("float16", 11), ("bfloat16", 8)])
def test_written_tensors_are_read_back_to_the_last_stored_bit(tmp_path: Path, dtype: Any, bits: int) -> None:
    config = write_tiny_drafter(tmp_path / "a", TARGET)
    first = load_drafter_checkpoint(tmp_path / "a", target=TARGET)
    tensors = {name: first.weights.float32(name) for name in tensor_shapes(config)}
    save_drafter_checkpoint(tmp_path / "b", config, tensors, dtype=dtype)
    second = load_drafter_checkpoint(tmp_path / "b", target=TARGET)
    stored = {name: second.weights.float32(name) for name in tensors}
    for name, array in tensors.items():
        assert np.abs(stored[name] - array).max() <= np.abs(array).max() * 2.0**-bits
    save_drafter_checkpoint(tmp_path / "c", config, stored, dtype=dtype)
    assert (tmp_path / "b/model.safetensors").read_bytes() == (tmp_path / "c/model.safetensors").read_bytes()


def test_bfloat16_is_what_torch_stores(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    values = np.random.default_rng(0).standard_normal((50, 7)).astype(np.float32)
    write_tensors(tmp_path / "model.safetensors", {"x": values}, float_format="bfloat16")
    stored = load_torch(tmp_path / "model.safetensors")["x"]
    assert stored.dtype == torch.bfloat16
    assert torch.equal(stored, torch.from_numpy(values).to(torch.bfloat16))
    assert np.array_equal(
        SafetensorsSource([*tmp_path.glob("*.safetensors")]).float32("x"), stored.float().numpy()
    )


@pytest.mark.parametrize("small_w1", [False, True])
def test_reduced_vocabulary_is_read_back(tmp_path: Path, small_w1: bool) -> None:
    config = write_tiny_drafter(tmp_path / "d", TARGET, draft_vocab=12, small_w1=small_w1)
    checkpoint = load_drafter_checkpoint(tmp_path / "d", target=TARGET)
    assert checkpoint.config == config and config.draft_vocab_size == 12
    mapping = checkpoint.draft_to_target
    assert mapping is not None and mapping.dtype == np.int32 and (np.diff(mapping) > 0).all()
    head = np.arange(50 * 32, dtype=np.float32).reshape(50, 32)
    assert np.array_equal(checkpoint.head(head), head[mapping])
    rows = checkpoint.previous_to_row
    assert checkpoint.weights.float32("markov_head.markov_w1.weight").shape == (13 if small_w1 else 50, 6)
    assert (rows is None) == (not small_w1)
    if rows is not None:
        assert rows[mapping].tolist() == list(range(12))
        assert set(np.delete(rows, mapping).tolist()) == {12}


def test_full_vocabulary_shares_the_targets_arrays(folder: Path) -> None:
    checkpoint = load_drafter_checkpoint(folder, target=TARGET)
    embedding, head = np.zeros((50, 32), np.float32), np.ones((50, 32), np.float32)
    assert checkpoint.embedding(embedding) is embedding and checkpoint.head(head) is head
    with pytest.raises(CheckpointError, match="lm_head"):
        checkpoint.head(None)


def test_calibration_beside_the_weights_is_found(folder: Path) -> None:
    assert load_drafter_checkpoint(folder, target=TARGET).calibration_path is None
    (folder / "calibration.json").write_text("{}")
    assert load_drafter_checkpoint(folder, target=TARGET).calibration_path == folder / "calibration.json"


def test_saving_over_a_checkpoint_replaces_it_whole(tmp_path: Path) -> None:
    write_tiny_drafter(tmp_path / "d", TARGET, head="rnn")
    (tmp_path / "d/calibration.json").write_text("{}")
    config = write_tiny_drafter(tmp_path / "d", TARGET, head="gated", block_size=7)
    checkpoint = load_drafter_checkpoint(tmp_path / "d", target=TARGET)
    assert checkpoint.config == config
    assert checkpoint.calibration_path is None  # it was measured on other weights
    assert [entry.name for entry in tmp_path.iterdir()] == ["d"]


def test_failed_save_leaves_the_old_checkpoint_and_no_litter(tmp_path: Path) -> None:
    config = write_tiny_drafter(tmp_path / "d", TARGET)
    before = {entry.name: entry.read_bytes() for entry in (tmp_path / "d").iterdir()}
    tensors = {name: np.full(shape, 1e9, np.float32) for name, shape in tensor_shapes(config).items()}
    with pytest.raises(CheckpointError, match="float16"):
        save_drafter_checkpoint(tmp_path / "d", config, tensors, dtype="float16")
    assert {entry.name: entry.read_bytes() for entry in (tmp_path / "d").iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["d"]


# Published layouts


def published(config: DrafterConfig) -> dict[str, Any]:
    """The config.json that DeepSpec writes for such a drafter."""
    decoder = config.decoder
    return {
        "architectures": ["Qwen3DSparkModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "confidence_head_with_markov": True,
        "dtype": "bfloat16",
        "enable_confidence_head": True,
        "head_dim": decoder.head_dim,
        "hidden_act": "silu",
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "layer_types": ["full_attention"] * decoder.num_layers,
        "markov_head_type": "vanilla",
        "markov_rank": config.markov_rank,
        "mask_token_id": config.mask_token_id,
        "max_position_embeddings": 256,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_anchors": 512,
        "num_attention_heads": decoder.num_heads,
        "num_hidden_layers": decoder.num_layers,
        "num_key_value_heads": decoder.num_kv_heads,
        "num_target_layers": 3,
        "rms_norm_eps": decoder.rms_norm_eps,
        "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
        "sliding_window": None,
        "target_layer_ids": list(config.target_layer_ids),
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


QWEN = tiny_target_config(qk_norm=True)


@pytest.fixture
def deepspec(tmp_path: Path) -> tuple[Path, DrafterConfig]:
    folder = tmp_path / "published"
    config = write_tiny_drafter(folder, QWEN, own_embedding=True, own_head=True)
    (folder / "config.json").write_text(json.dumps(published(config)))
    return folder, config


def test_deepspec_layout_is_read(deepspec: tuple[Path, DrafterConfig]) -> None:
    folder, config = deepspec
    checkpoint = load_drafter_checkpoint(folder, target=QWEN)
    assert checkpoint.config == config
    assert checkpoint.own_embedding and checkpoint.own_head


def test_prefixed_names_are_read(deepspec: tuple[Path, DrafterConfig]) -> None:
    folder, _ = deepspec
    tensors = load_file(folder / "model.safetensors")
    save_file({f"model.{name}": array for name, array in tensors.items()}, folder / "model.safetensors")
    assert load_drafter_checkpoint(folder, target=QWEN).weights.names() == tuple(sorted(tensors))


def test_shards_are_read_as_one(deepspec: tuple[Path, DrafterConfig]) -> None:
    folder, _ = deepspec
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    whole = drafter_identity(str(folder))
    (folder / "model.safetensors").unlink()
    for index, part in enumerate((names[::2], names[1::2])):
        save_file(
            {name: tensors[name] for name in part}, folder / f"model-0000{index + 1}-of-00002.safetensors"
        )
    weights = load_drafter_checkpoint(folder, target=QWEN).weights
    assert all(np.array_equal(weights.float32(name), tensors[name]) for name in names)
    parts = drafter_identity(str(folder))
    assert parts != whole
    save_file({name: -tensors[name] for name in names[1::2]}, folder / "model-00002-of-00002.safetensors")
    assert drafter_identity(str(folder)) not in (whole, parts)


def test_speculators_layout_is_read(deepspec: tuple[Path, DrafterConfig]) -> None:
    folder, config = deepspec
    flat = published(config)
    ours = ("block_size", "markov_rank", "markov_head_type", "mask_token_id")
    ours += ("enable_confidence_head", "confidence_head_with_markov")
    nested = {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "sample_from_anchor": True,
        "draft_vocab_size": 50,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "transformer_layer_config": {
            key: value for key, value in flat.items() if key not in (*ours, "architectures")
        },
        **{key: flat[key] for key in ours},
    }
    del nested["transformer_layer_config"]["target_layer_ids"]
    (folder / "config.json").write_text(json.dumps(nested))
    assert load_drafter_checkpoint(folder, target=QWEN).config == config


def test_offsets_of_a_reduced_vocabulary_are_added_to_the_draft_id(tmp_path: Path) -> None:
    write_tiny_drafter(tmp_path / "d", TARGET, draft_vocab=10)
    mapping = load_drafter_checkpoint(tmp_path / "d", target=TARGET).draft_to_target
    assert mapping is not None
    offsets = mapping.astype(np.int64) - np.arange(10)
    edit_tensors(tmp_path / "d", draft_to_target=None, d2t=offsets)
    read = load_drafter_checkpoint(tmp_path / "d", target=TARGET).draft_to_target
    assert read is not None and read.tolist() == mapping.tolist()


@pytest.mark.parametrize("block", ["dflash_config", "dspark_config"])
def test_nested_keys_are_read_and_must_not_contradict(folder: Path, block: str) -> None:
    edit(folder, mask_token_id=None, **{block: {"mask_token_id": 49, "target_layer_ids": [0, 1]}})
    assert load_drafter_checkpoint(folder, target=TARGET).config.mask_token_id == 49
    edit(folder, **{block: {"target_layer_ids": [0, 2]}})
    refuse(folder, "target_layer_ids", "[0, 1]", "[0, 2]", block)


# The slot convention


def test_deepspec_keys_alone_tell_the_slot_convention(folder: Path) -> None:
    edit(folder, sample_from_anchor=None, architectures=None)
    load_drafter_checkpoint(folder, target=TARGET)


@pytest.mark.parametrize(
    "changes",
    [
        {"sample_from_anchor": False},
        {"sample_from_anchor": None, "architectures": ["DFlashDraftModel"]},
        {"sample_from_anchor": None, "architectures": ["DSparkDraftModel"]},
        {"sample_from_anchor": None, "markov_rank": None, "dspark_config": {"markov_rank": 6}},
        {"sample_from_anchor": None, "markov_rank": None, "dflash_config": {"mask_token_id": 49}},
    ],
)
def test_other_or_unknown_slot_convention_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder, **changes)
    refuse(folder, "slot convention", "every slot predicts", "only the masks predict")


# Refusals


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"vocab_size": 51}, ["vocab_size", "51", "50"]),
        ({"hidden_size": 64}, ["hidden_size", "64", "32"]),
        ({"target_layer_ids": [0, 3]}, ["target_layer_ids", "3", "2"]),
        ({"target_layer_ids": [-2, 0]}, ["target_layer_ids", "-2", "-1"]),
        ({"target_layer_ids": [0, 0]}, ["target_layer_ids", "[0, 0]"]),
        ({"target_layer_ids": []}, ["target_layer_ids", "[]"]),
        ({"target_layer_ids": "01"}, ["target_layer_ids", "'01'"]),
        ({"num_target_layers": 5}, ["num_target_layers", "5", "3"]),
        ({"target_hash": "abc"}, ["target_hash", "abc", "def"]),
        ({"block_size": 0}, ["block_size", "0", ">= 1"]),
        ({"block_size": True}, ["block_size", "True"]),
        ({"block_size": None}, ["block_size", "nothing"]),
        ({"mask_token_id": 50}, ["mask_token_id", "50"]),
        ({"mask_token_id": -1}, ["mask_token_id", "-1"]),
        ({"mask_token_id": None}, ["mask_token_id", "nothing"]),
        ({"markov_head_type": "lstm"}, ["markov_head_type", "lstm", "vanilla"]),
        ({"markov_head_type": None}, ["markov_head_type", "None"]),
        ({"markov_rank": -1}, ["markov_rank", "-1"]),
        ({"markov_rank": 0}, ["confidence_head_with_markov", "markov_rank 0"]),
        ({"confidence_head_with_markov": None}, ["confidence_head_with_markov", "nothing"]),
        ({"enable_confidence_head": "yes"}, ["enable_confidence_head", "yes"]),
        ({"draft_vocab_size": 12}, ["draft_vocab_size", "12", "50", "draft_to_target"]),
        ({"draft_vocab_size": 60}, ["draft_vocab_size", "60", "50"]),
        ({"markov_previous_vocab": "draft"}, ["markov_previous_vocab", "draft_to_target"]),
        ({"markov_previous_vocab": "both"}, ["markov_previous_vocab", "both"]),
        ({"model_type": "gemma4_text"}, ["model_type", "gemma4_text"]),
        ({"model_type": "qwen3"}, ["missing", "q_norm"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"attention_bias": True}, ["attention_bias", "True"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"dflash_config": {"causal": True}}, ["causal", "True"]),
        ({"num_key_value_heads": 3}, ["4", "3"]),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, ["rope_type", "dynamic"]),
        ({"layer_types": ["full_attention", "mamba"]}, ["layer_types", "mamba"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "2"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_window", "nothing"]),
        (
            {
                "layer_types": ["full_attention", "sliding_attention"],
                "sliding_window": 8,
                "sliding_window_non_causal": False,
            },
            ["sliding_window_non_causal"],
        ),
        ({"layer_types": None, "use_sliding_window": True}, ["layer_types"]),
        ({"format_version": 2}, ["format_version", "1", "2"]),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, ["missing", "layers.2."]),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, ["left over", "layers.1."]),
        ({"enable_confidence_head": False}, ["left over", "confidence_head.proj.weight"]),
    ],
)
def test_configuration_that_does_not_fit_is_refused(
    folder: Path, changes: dict[str, Any], parts: list[str]
) -> None:
    edit(folder, **changes)
    refuse(folder, *parts, target=replace(TARGET, model_hash="def"))


def test_every_tensor_is_needed(tmp_path: Path) -> None:
    target = tiny_target_config(qk_norm=True)
    config = write_tiny_drafter(tmp_path / "d", target, head="rnn")
    original = load_file(tmp_path / "d/model.safetensors")
    for name in tensor_shapes(config):
        save_file(
            {key: array for key, array in original.items() if key != name}, tmp_path / "d/model.safetensors"
        )
        refuse(tmp_path / "d", "missing", name, target=target)


def test_every_shape_is_checked(tmp_path: Path) -> None:
    target = tiny_target_config(qk_norm=True)
    config = write_tiny_drafter(tmp_path / "d", target, head="gated")
    original = load_file(tmp_path / "d/model.safetensors")
    for name, shape in tensor_shapes(config).items():
        wrong = np.zeros((shape[0] + 1, *shape[1:]), np.float32)
        save_file(original | {name: wrong}, tmp_path / "d/model.safetensors")
        refuse(tmp_path / "d", name, str(list(shape)), str(list(wrong.shape)), target=target)


def test_weights_that_rate_arg_max_drafts_are_optional(folder: Path, tmp_path: Path) -> None:
    assert load_drafter_checkpoint(folder, target=tiny_target_config()).greedy_confidence() is None
    config = write_tiny_drafter(tmp_path / "d", tiny_target_config(), greedy_confidence=True)
    weights = load_drafter_checkpoint(tmp_path / "d", target=tiny_target_config()).greedy_confidence()
    assert weights is not None and weights.shape == (config.block_size, 3)
    edit_tensors(tmp_path / "d", **{"confidence_head.greedy.weight": np.zeros((2, 3), np.float32)})
    refuse(tmp_path / "d", "confidence_head.greedy.weight", f"[{config.block_size}, 3]", "[2, 3]")
    edit(tmp_path / "d", enable_confidence_head=False)
    refuse(tmp_path / "d", "left over", "confidence_head.greedy.weight")


def test_left_over_tensor_is_refused(folder: Path) -> None:
    edit_tensors(folder, **{"layers.0.self_attn.sinks": np.zeros(4, np.float32)})
    refuse(folder, "left over", "layers.0.self_attn.sinks")


@pytest.mark.parametrize(
    ("mapping", "part"),
    [
        (np.arange(11, dtype=np.int32), "[11]"),
        (np.array([*range(9), 50], np.int32), "50"),
        (np.array([0, 0, *range(2, 10)], np.int32), "rise"),
        (np.arange(10, dtype=np.float32), "F32"),
    ],
)
def test_wrong_draft_vocabulary_is_refused(tmp_path: Path, mapping: np.ndarray, part: str) -> None:
    write_tiny_drafter(tmp_path / "d", TARGET, draft_vocab=10)
    edit_tensors(tmp_path / "d", draft_to_target=mapping)
    refuse(tmp_path / "d", "draft_to_target", part)


def test_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", "nowhere")
    refuse(tmp_path, "config.json")
    write_tiny_drafter(tmp_path / "d", TARGET)
    (tmp_path / "d/model.safetensors").unlink()
    refuse(tmp_path / "d", "safetensors")


@pytest.mark.parametrize(
    "damage", [b"", b"\x05", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b'\x08\0\0\0\0\0\0\0{"a": 1}']
)
def test_damaged_file_is_refused(folder: Path, damage: bytes) -> None:
    (folder / "model.safetensors").write_bytes(damage)
    refuse(folder, "model.safetensors")


def test_file_cut_short_is_refused(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-8])
    refuse(folder, "model.safetensors", "the file gives bytes")


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_configuration_that_is_no_object_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    refuse(folder, "config.json")


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    config = write_tiny_drafter(tmp_path / "d", TARGET)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(config).items()}
    tensors["norm.weight"][3] = np.nan
    with pytest.raises(CheckpointError, match="norm.weight"):
        save_drafter_checkpoint(tmp_path / "e", config, tensors)
