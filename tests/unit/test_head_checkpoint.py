"""Checkpoints of EAGLE-3 and MTP heads: told apart by their files, read with every check, refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dspark.drafters.feature_heads import load_head_checkpoint
from dspark.drafters.kinds import check_kind, drafter_kind
from dspark.drafters.loading import peek_drafter
from dspark.errors import CheckpointError, ConfigError
from dspark.models.loading import load_target
from safetensors.numpy import load_file, save_file
from support.tiny_drafters import write_tiny_drafter
from support.tiny_heads import write_tiny_head
from support.tiny_models import write_tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), num_layers=8)


@pytest.fixture
def eagle(tmp_path: Path, target: Path) -> Path:
    return write_tiny_head(tmp_path / "eagle", target, kind="eagle3", draft_vocab=30, own_tables=True)


@pytest.fixture
def mtp(tmp_path: Path, target: Path) -> Path:
    return write_tiny_head(tmp_path / "mtp", target, kind="mtp")


def change(folder: Path, **fields: object) -> None:
    """Set fields of config.json; None takes them away."""
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit(folder: Path, work: Callable[[dict[str, Any]], object]) -> None:
    """Change tensors in place."""
    tensors = load_file(folder / "model.safetensors")
    work(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(folder: Path, target: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        peek_drafter(str(folder), load_target(target).config)
    return str(caught.value)


def test_kinds_are_told_apart_by_their_files(tmp_path: Path, target: Path, eagle: Path, mtp: Path) -> None:
    write_tiny_drafter(tmp_path / "dspark", target)
    assert [drafter_kind(str(p)) for p in (tmp_path / "dspark", target, eagle, mtp, "none", "ngram")] == [
        *("dspark", "draft_model", "eagle3", "mtp", "none", "ngram")
    ]
    change(eagle, architectures=["LlamaForCausalLM"])  # EAGLE's own repository
    assert drafter_kind(str(eagle)) == "eagle3"
    change(eagle, architectures=["Eagle3Speculator"], draft_vocab_size=None, speculators_model_type="eagle3")
    assert drafter_kind(str(eagle)) == "eagle3"


@pytest.mark.parametrize(
    ("executor", "allowed"),
    [("tensorrt", "draft_model"), ("onnxruntime", "draft_model"), ("tensorrt_llm", "dspark")],
)
def test_engines_refuse_what_they_cannot_draft_with(executor: str, allowed: str) -> None:
    check_kind(allowed, executor=executor)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"eagle3.*{executor}.*{allowed}"):
        check_kind("eagle3", executor=executor)
    check_kind("eagle3", executor="torch")


def test_speculators_layout_is_read(target: Path, eagle: Path) -> None:
    plain = load_head_checkpoint(eagle, kind="eagle3", target=load_target(target).config).config
    fields = json.loads((eagle / "config.json").read_text())
    top = ("architectures", "draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids")
    nested = {key: value for key, value in fields.items() if key not in top}
    written = {key: fields[key] for key in top} | {"transformer_layer_config": nested}
    (eagle / "config.json").write_text(json.dumps(written | {"target_hidden_size": None}))
    edit(eagle, lambda t: t.update({k.replace("midlayer.", "layers.0."): t.pop(k) for k in list(t)}))
    found = load_head_checkpoint(eagle, kind="eagle3", target=load_target(target).config)
    assert found.config == plain
    assert found.draft_to_target is not None and len(found.draft_to_target) == 30


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 4, 8]}, (-1, 3, 7)),
        ({"eagle_aux_hidden_state_layer_ids": None}, (1, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 7]}}, (0, 4, 7)),
        (
            {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"use_aux_hidden_state": True}},
            (1, 3, 4),
        ),
    ],
)
def test_each_spelling_of_the_layers_counts_its_own_way(
    target: Path, eagle: Path, fields: dict[str, object], layers: tuple[int, ...]
) -> None:
    change(eagle, **fields)
    assert peek_drafter(str(eagle), load_target(target).config).feature_layer_ids == layers


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vocab_size": 60}, ["vocab_size", "60", "50"]),
        ({"target_hidden_size": 64}, ["target_hidden_size", "64", "32"]),
        ({"hidden_size": 64}, ["layernorm.weight", "[32]", "[64]"]),
        ({"num_hidden_layers": 2}, ["num_hidden_layers", "2", "1"]),
        ({"draft_vocab_size": 51}, ["draft_vocab_size", "51", "50"]),
        ({"draft_vocab_size": 29}, ["draft_to_target", "29", "30"]),
        ({"norm_before_fc": True}, ["norm_before_fc", "True"]),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ["use_aux_hidden_state", "False"]),
        ({"attention_bias": True}, ["attention_bias", "True"]),
        ({"use_sliding_window": True}, ["layer_types"]),
        ({"eagle_aux_hidden_state_layer_ids": [0, 4, 9]}, ["eagle_aux_hidden_state_layer_ids", "9", "8"]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, ["eagle_aux_hidden_state_layer_ids", "[1, 1, 2]"]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, ["fc.weight", "[32, 96]", "[32, 64]"]),
        ({"norm_before_residual": "yes"}, ["norm_before_residual", "yes"]),
    ],
)
def test_configurations_that_do_not_fit_are_refused_with_both_values(
    target: Path, eagle: Path, fields: dict[str, object], words: list[str]
) -> None:
    change(eagle, **fields)
    message = refused(eagle, target)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda t: t.pop("fc.weight"), ["missing", "fc.weight"]),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), ["missing", "hidden_norm"]),
        (lambda t: t.update({"mask_hidden": np.zeros((1, 96), np.float32)}), ["left over", "mask_hidden"]),
        (lambda t: t.update({"norm.weight": np.ones(31, np.float32)}), ["norm.weight", "[31]", "[32]"]),
        (
            lambda t: t.update({"midlayer.self_attn.q_proj.weight": np.ones((32, 32), np.float32)}),
            ["q_proj", "[32, 32]", "[32, 64]"],
        ),
        (lambda t: t.pop("d2t"), ["draft_vocab_size", "30", "50"]),
        (lambda t: t.update({"d2t": t["d2t"] + 30}), ["draft_to_target", "50"]),
        (lambda t: t.update({"t2d": np.zeros(49, bool)}), ["t2d", "[49]", "[50]"]),
        (
            lambda t: t.update({"layers.0.hidden_norm.weight": np.ones(32, np.float32)}),
            ["twice", "midlayer.hidden_norm"],
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    target: Path, eagle: Path, work: Callable[[dict[str, Any]], object], words: list[str]
) -> None:
    edit(eagle, work)
    message = refused(eagle, target)
    assert all(word in message for word in words), message


def test_a_head_of_another_width_needs_tables_of_its_own(tmp_path: Path, target: Path) -> None:
    folder = write_tiny_head(tmp_path / "narrow", target, kind="eagle3", hidden_size=24)
    message = refused(folder, target)
    assert "missing" in message and "embed_tokens.weight" in message and "lm_head.weight" in message


def test_mtp_heads_read_the_last_layer_and_are_checked_alike(target: Path, mtp: Path) -> None:
    assert peek_drafter(str(mtp), load_target(target).config)[:2] == ((7,), 5)
    change(mtp, hidden_size=24)
    message = refused(mtp, target)
    assert "hidden_size" in message and "24" in message and "32" in message
    change(mtp, hidden_size=32)
    edit(mtp, lambda t: t.pop("eh_proj.weight"))
    assert "eh_proj.weight" in refused(mtp, target)
