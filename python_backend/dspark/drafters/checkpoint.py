"""Drafter checkpoints: load with every check, save atomically. No torch.

The tensors are DeepSpec's (`tensor_shapes` names each one with its shape). Two additions of ours shrink a
drafter for a small target, where the vocabulary outweighs everything else, and one rates its arg-max drafts better:

* a reduced draft vocabulary of Vd tokens: tensor `draft_to_target` int32 [Vd], ascending target ids.
  markov_w2 and an own lm_head then have Vd rows; without an own lm_head the target's rows are gathered. The
  speculators layout's `d2t` (offsets to add to the draft id) is read as well;
* `markov_previous_vocab: "draft"`: markov_w1 has Vd + 1 rows, one for each draft token and row Vd for all
  others. At V = 49152, Vd = 12288, r = 256 in float16 that is 6 MB in place of 25;
* `confidence_head.greedy.weight` [G, 3], optional: see greedy_confidence.py.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dspark.drafters.layout import (
    PreviousVocab,
    config_to_json,
    parse_config,
    previous_vocab,
    read_config_file,
)
from dspark.errors import CheckpointError
from dspark.models.config import DrafterConfig, TargetConfig, WeightSource
from dspark.models.layout import decoder_tensors
from dspark.models.safetensors_file import FloatFormat, SafetensorsSource, write_tensors

__all__ = [
    "DrafterCheckpoint",
    "SharedTables",
    "load_drafter_checkpoint",
    "read_draft_to_target",
    "save_drafter_checkpoint",
    "tensor_shapes",
]

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

_OPTIONAL = ("embed_tokens.weight", "lm_head.weight")
_GREEDY_CONFIDENCE = "confidence_head.greedy.weight"
_VOCABULARY = ("draft_to_target", "d2t", "t2d")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTables:
    """A drafter's folder, and its embedding and LM head: its own, or the target's.

    `draft_to_target` maps draft ids to target ids, None when the vocabulary is the target's.
    """

    folder: Path
    weights: WeightSource
    draft_to_target: Int32 | None  # [Vd] ascending
    own_embedding: bool
    own_head: bool

    def embedding(self, target_embedding: Float32) -> Float32:
        """Return the input embedding [V, d]: the checkpoint's own, else the target's array itself."""
        return self.weights.float32("embed_tokens.weight") if self.own_embedding else target_embedding

    def head(self, target_head: Float32 | None) -> Float32:
        """Return the LM head [Vd, d]: the checkpoint's own, else the target's array (its rows when reduced).

        Raises:
            CheckpointError: neither has one.
        """
        if self.own_head:
            return self.weights.float32("lm_head.weight")
        if target_head is None:
            raise CheckpointError(
                f"{self.folder}: has no lm_head.weight, so the target's is needed; got none"
            )
        return target_head if self.draft_to_target is None else target_head[self.draft_to_target]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCheckpoint(SharedTables):
    """A checked drafter, weights still on disk under the names of `tensor_shapes`.

    `previous_to_row` maps a target id to its row of markov_w1, None when the row is the id.
    """

    config: DrafterConfig
    previous_to_row: Int32 | None  # [V]
    calibration_path: Path | None  # calibration.json beside the weights

    def greedy_confidence(self) -> Float32 | None:
        """Return the weights [G, 3] that rate arg-max drafts (greedy_confidence.py), None where there are none."""
        names = self.weights.names()
        return self.weights.float32(_GREEDY_CONFIDENCE) if _GREEDY_CONFIDENCE in names else None


def tensor_shapes(config: DrafterConfig, *, previous: PreviousVocab = "target") -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a checkpoint must have. Linear weights are [out, in]."""
    d, r = config.decoder.hidden_size, config.markov_rank
    vd = config.draft_vocab_size or config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (d, len(config.target_layer_ids) * d),
        "hidden_norm.weight": (d,),
        **decoder_tensors(config.decoder),
    }
    if r:
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size if previous == "target" else vd + 1, r)
        shapes["markov_head.markov_w2.weight"] = (vd, r)
        if config.markov_head_type == "gated":  # input [h ; W1[x]]
            shapes |= {"markov_head.gate_proj.weight": (r, d + r), "markov_head.gate_proj.bias": (r,)}
        if config.markov_head_type == "rnn":  # input [s ; W1[x] ; h], output gate, candidate, output
            shapes |= {
                "markov_head.joint_proj.weight": (3 * r, 2 * r + d),
                "markov_head.joint_proj.bias": (3 * r,),
            }
    if config.enable_confidence_head:  # input [h ; W1[x]] or h
        width = d + (r if config.confidence_head_with_markov else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def load_drafter_checkpoint(folder: str | Path, *, target: TargetConfig) -> DrafterCheckpoint:
    """Open a drafter folder and check it against the target; weights are read later, tensor by tensor.

    Raises:
        CheckpointError: anything missing, left over, of the wrong shape, made for another target or of
            another slot convention; the message names the key or tensor and both values.
    """
    folder = Path(folder)
    flat = read_config_file(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: a drafter needs *.safetensors files, found none")
    tensors = SafetensorsSource(files, strip_prefix="model.")
    names = tensors.names()
    has_qk_norm = any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in names)
    config = parse_config(flat, target=target, has_qk_norm=has_qk_norm)
    previous = previous_vocab(flat)
    mapping = read_draft_to_target(
        tensors, vocab_size=config.vocab_size, draft_vocab_size=config.draft_vocab_size
    )
    if previous == "draft" and mapping is None:
        raise CheckpointError(
            "markov_previous_vocab: draft needs a reduced vocabulary (draft_to_target), got none"
        )
    _check_tensors(tensors, config, previous)
    calibration = folder / "calibration.json"
    return DrafterCheckpoint(
        folder=folder,
        config=config,
        weights=tensors,
        draft_to_target=mapping,
        previous_to_row=_previous_rows(mapping, config)
        if previous == "draft" and mapping is not None
        else None,
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        calibration_path=calibration if calibration.is_file() else None,
    )


def save_drafter_checkpoint(
    folder: str | Path,
    config: DrafterConfig,
    tensors: Mapping[str, Float32],
    *,
    draft_to_target: Int32 | None = None,
    dtype: FloatFormat = "float16",
) -> None:
    """Write config.json and model.safetensors; an existing folder is replaced as a whole, by a rename.

    Arguments:
        tensors: those of `tensor_shapes`, and embed_tokens.weight [V, d] or lm_head.weight [Vd, d] where the
            drafter has its own, and confidence_head.greedy.weight [G, 3] where arg-max drafts are rated by their
            own probability too. Whether markov_w1 covers the target's vocabulary or the draft's is seen from
            its rows.
        draft_to_target: [Vd] ascending target ids, for a reduced vocabulary.
        dtype: how floats are stored.

    Raises:
        CheckpointError: names, shapes or values that could not be loaded again.
    """
    folder = Path(folder)
    config = replace(config, draft_vocab_size=config.draft_vocab_size or config.vocab_size)
    w1 = tensors.get("markov_head.markov_w1.weight")
    reduced = draft_to_target is not None and w1 is not None and len(w1) == config.draft_vocab_size + 1
    previous: PreviousVocab = "draft" if reduced else "target"
    shapes = {name: array.shape for name, array in tensors.items()}
    _check_shapes(shapes, config, previous)
    stored: dict[str, npt.NDArray[np.generic]] = dict(tensors)
    if draft_to_target is not None:
        _check_mapping(
            draft_to_target, vocab_size=config.vocab_size, draft_vocab_size=config.draft_vocab_size
        )
        stored["draft_to_target"] = draft_to_target.astype(np.int32)
    elif config.draft_vocab_size != config.vocab_size:
        raise CheckpointError(
            f"draft_vocab_size: {config.draft_vocab_size} of {config.vocab_size} tokens needs "
            "draft_to_target, got none"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        write_tensors(fresh / "model.safetensors", stored, float_format=dtype)
        text = dumps(config_to_json(config, previous=previous) | {"torch_dtype": dtype}, indent=2)
        (fresh / "config.json").write_text(text + "\n", encoding="utf-8")
        fresh.chmod(0o755)
        _replace_folder(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _replace_folder(fresh: Path, folder: Path) -> None:
    if not folder.exists():
        os.rename(fresh, folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    os.rename(folder, old)  # an empty folder may be renamed over
    os.rename(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)


def _check_tensors(tensors: SafetensorsSource, config: DrafterConfig, previous: PreviousVocab) -> None:
    shapes = {name: tensors.shape(name) for name in tensors.names() if name not in _VOCABULARY}
    _check_shapes(shapes, config, previous)


def _check_shapes(
    shapes: Mapping[str, tuple[int, ...]], config: DrafterConfig, previous: PreviousVocab
) -> None:
    wanted = tensor_shapes(config, previous=previous)
    d = config.decoder.hidden_size
    optional = dict(zip(_OPTIONAL, ((config.vocab_size, d), (config.draft_vocab_size, d)), strict=True))
    if config.enable_confidence_head:
        optional[_GREEDY_CONFIDENCE] = (config.block_size, 3)
    missing = sorted(wanted.keys() - shapes.keys())
    left_over = sorted(shapes.keys() - wanted.keys() - optional.keys())
    if missing or left_over:
        raise CheckpointError(
            f"tensors do not fit the configuration: missing {_some(missing)}; left over {_some(left_over)}"
        )
    for name, shape in shapes.items():
        expected = wanted.get(name) or optional[name]
        if tuple(shape) != expected:
            raise CheckpointError(f"{name}: must be {list(expected)}, got {list(shape)}")


def _some(names: list[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def read_draft_to_target(
    tensors: SafetensorsSource, *, vocab_size: int, draft_vocab_size: int
) -> Int32 | None:
    """Return the target ids [Vd] of a reduced vocabulary, None for the full one.

    Raises:
        CheckpointError: a reduced vocabulary without them, or ids that are not ascending target ids.
    """
    names = tensors.names()
    given = [name for name in ("draft_to_target", "d2t") if name in names]
    if len(given) > 1:
        raise CheckpointError("draft_to_target: given twice, also as d2t")
    if not given:
        if draft_vocab_size != vocab_size:
            raise CheckpointError(
                f"draft_vocab_size: {draft_vocab_size} of {vocab_size} tokens needs the tensor "
                "draft_to_target, got none"
            )
        return None
    mapping = tensors.int32(given[0])
    if given[0] == "d2t":
        mapping = mapping + np.arange(mapping.size, dtype=np.int32)
    _check_mapping(mapping, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size)
    identity = mapping.size == vocab_size
    return None if identity else mapping


def _check_mapping(mapping: Int32, *, vocab_size: int, draft_vocab_size: int) -> None:
    if mapping.shape != (draft_vocab_size,):
        raise CheckpointError(
            f"draft_to_target: must be [{draft_vocab_size}] (draft_vocab_size), got {list(mapping.shape)}"
        )
    if mapping[0] < 0 or mapping[-1] >= vocab_size or not (np.diff(mapping) > 0).all():
        raise CheckpointError(
            f"draft_to_target: must rise from 0 or more to below vocab_size {vocab_size}, got "
            f"{mapping[0]} .. {mapping[-1]}"
        )


def _previous_rows(mapping: Int32, config: DrafterConfig) -> Int32:
    rows = np.full(config.vocab_size, mapping.size, np.int32)
    rows[mapping] = np.arange(mapping.size, dtype=np.int32)
    return rows
