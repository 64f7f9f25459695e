"""Checkpoints of heads that draft token by token from the target's hidden states: EAGLE-3 and MTP. No torch.

Both are one decoder layer whose row of position p sees the token there and a hidden state of the position before: the
target's, projected, where the target has computed it, and the head's own output (before its last norm) behind that.

EAGLE-3, as SpecForge, SGLang, vLLM and speculators write it: `fc` projects the concatenated outputs of three target
layers to h; the layer (`midlayer.` or `layers.0.`) attends with [input_layernorm(embedding) ; hidden_norm(h)] and adds
to h (to hidden_norm(h) where `norm_before_residual`). Which layers: `eagle_config.eagle_aux_hidden_state_layer_ids`
counts as we do, the key of this name at the top level counts the embedding output as 0, and without either they are
1, n/2 - 1 and n - 4 of n. A reduced vocabulary comes with `d2t` (offsets to the draft id); `t2d` says the same.

MTP, a layout of ours for one next-token module of DeepSeek's form over a Llama or Qwen3 layer (architectures
`LlamaMTPModel`, `Qwen3MTPModel`): h is the output of the target's last layer, normed with `target_norm.weight` where
the module was trained behind the target's final norm; the layer's input is eh_proj([enorm(embedding) ; hnorm(h)]).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dspark.drafters.checkpoint import SharedTables, read_draft_to_target
from dspark.drafters.layout import read_config_file
from dspark.errors import CheckpointError
from dspark.models.checks import require_neutral
from dspark.models.config import DecoderConfig, TargetConfig
from dspark.models.hf import read_decoder
from dspark.models.layout import check_tensors, decoder_tensors
from dspark.models.safetensors_file import SafetensorsSource

__all__ = ["HeadCheckpoint", "HeadConfig", "HeadKind", "head_tensors", "load_head_checkpoint"]

HeadKind = Literal["eagle3", "mtp"]
_MAPS = ("d2t", "t2d", "draft_to_target")
# Keys that change the maths, with the values under which they change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "bias": (False, None),
    "norm_before_fc": (False, None),
    "fc_norm": (False, None),
    "norm_output": (False, None),
    "use_aux_hidden_state": (True, None),
    "parallel_drafting": (False, None),
}
_WINDOW_KEYS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """What a head's config.json says, checked against the target."""

    kind: HeadKind
    decoder: DecoderConfig  # of one layer
    vocab_size: int  # V of the target
    draft_vocab_size: int  # Vd; equals vocab_size when not reduced
    target_layer_ids: tuple[int, ...]  # m feature layers, -1 = embedding output
    target_hidden_size: int
    norm_before_residual: bool = False  # EAGLE-3 alone


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCheckpoint(SharedTables):
    """A checked head, weights still on disk under the names of `head_tensors`."""

    config: HeadConfig
    has_target_norm: bool


class _Tensors:
    """The tensors of a folder under canonical names; a `WeightSource`."""

    def __init__(self, source: SafetensorsSource, *, where: str) -> None:
        self.source, self._where = source, where
        self._stored: dict[str, str] = {}
        for stored in source.names():
            name = (
                f"layers.0.{stored.removeprefix('midlayer.')}" if stored.startswith("midlayer.") else stored
            )
            if name in self._stored:
                raise CheckpointError(
                    f"{where}: {name} is found twice, as {self._stored[name]} and as {stored}"
                )
            self._stored[name] = stored

    def names(self) -> tuple[str, ...]:
        return tuple(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(self._stored[name])

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        if name not in self._stored:
            raise CheckpointError(f"{self._where}: no tensor named {name!r}")
        return self.source.float32(self._stored[name])


def load_head_checkpoint(folder: str | Path, *, kind: HeadKind, target: TargetConfig) -> HeadCheckpoint:
    """Open a head's folder and check it against the target; weights are read later.

    Raises:
        CheckpointError: anything missing, left over, of the wrong shape or made for another target; the message names
            the key or tensor and both values.
    """
    folder, where = Path(folder), str(folder)
    flat = read_config_file(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{where}: a drafter needs *.safetensors files, found none")
    tensors = _Tensors(SafetensorsSource(files, strip_prefix="model."), where=where)
    names = set(tensors.names())
    qk_norm = any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in names)
    config = _config(flat, kind=kind, target=target, qk_norm=qk_norm, where=where)
    mapping = read_draft_to_target(
        tensors.source, vocab_size=config.vocab_size, draft_vocab_size=config.draft_vocab_size
    )
    _check(tensors, config, where=where)
    return HeadCheckpoint(
        folder=folder,
        weights=tensors,
        draft_to_target=mapping,
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        config=config,
        has_target_norm="target_norm.weight" in names,
    )


def head_tensors(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a checkpoint must have, the layer's as `layers.0.`."""
    d, m = config.decoder.hidden_size, len(config.target_layer_ids)
    shapes = decoder_tensors(config.decoder)
    if config.kind == "mtp":
        return shapes | {"enorm.weight": (d,), "hnorm.weight": (d,), "eh_proj.weight": (d, 2 * d)}
    for name in "qkv":
        rows, _ = shapes[f"layers.0.self_attn.{name}_proj.weight"]
        shapes[f"layers.0.self_attn.{name}_proj.weight"] = (rows, 2 * d)
    return shapes | {"fc.weight": (d, m * config.target_hidden_size), "layers.0.hidden_norm.weight": (d,)}


def _check(tensors: _Tensors, config: HeadConfig, *, where: str) -> None:
    """Refuse tensors that are not exactly the configuration's; a table may be left to a target as wide as the head."""
    d = config.decoder.hidden_size
    tables = {"embed_tokens.weight": (config.vocab_size, d), "lm_head.weight": (config.draft_vocab_size, d)}
    found = {name: tensors.shape(name) for name in tensors.names() if name not in _MAPS}
    wanted: dict[str, tuple[int, ...]] = head_tensors(config)
    wanted |= {
        name: shape for name, shape in tables.items() if name in found or d != config.target_hidden_size
    }
    if config.kind == "mtp" and "target_norm.weight" in found:
        wanted["target_norm.weight"] = (d,)
    check_tensors(found, wanted, where=where)
    if "t2d" in tensors.names() and tensors.shape("t2d") != (config.vocab_size,):
        raise CheckpointError(
            f"{where}: tensor 't2d' has shape {list(tensors.shape('t2d'))}, the vocabulary asks for "
            f"{[config.vocab_size]}"
        )


def _config(
    flat: Mapping[str, Any], *, kind: HeadKind, target: TargetConfig, qk_norm: bool, where: str
) -> HeadConfig:
    nested = flat.get("eagle_config") or {}
    for fields in (flat, nested):
        require_neutral(fields, _NEUTRAL, where=where)
    plain = {key: value for key, value in flat.items() if key not in _WINDOW_KEYS}
    if flat.get("use_sliding_window") or set(flat.get("layer_types") or ()) - {"full_attention"}:
        raise CheckpointError(f"{where}: layer_types is {flat.get('layer_types')}, allowed is full_attention")
    decoder = read_decoder(plain, qk_norm=qk_norm, where=where)
    if decoder.num_layers != 1:
        raise CheckpointError(f"{where}: num_hidden_layers is {decoder.num_layers}, allowed is 1")
    width_key = "target_hidden_size" if kind == "eagle3" and flat.get("target_hidden_size") else "hidden_size"
    for key, ours, theirs in (
        ("vocab_size", flat.get("vocab_size"), target.vocab_size),
        (width_key, flat.get(width_key), target.decoder.hidden_size),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"{where}: {key}: the drafter has {ours}, the target {theirs}; it was made for another target"
            )
    draft_vocab_size = flat.get("draft_vocab_size") or target.vocab_size
    if not isinstance(draft_vocab_size, int) or not 1 <= draft_vocab_size <= target.vocab_size:
        raise CheckpointError(
            f"{where}: draft_vocab_size is {draft_vocab_size!r}, allowed is 1 to {target.vocab_size}"
        )
    before = nested.get("norm_before_residual", flat.get("norm_before_residual")) or False
    if before not in (True, False) or (before and kind == "mtp"):
        raise CheckpointError(f"{where}: norm_before_residual is {before!r}, allowed is true or false")
    return HeadConfig(
        kind=kind,
        decoder=decoder,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_layer_ids=_layer_ids(flat, nested, kind=kind, target=target, where=where),
        target_hidden_size=target.decoder.hidden_size,
        norm_before_residual=bool(before),
    )


def _layer_ids(
    flat: Mapping[str, Any], nested: Mapping[str, Any], *, kind: HeadKind, target: TargetConfig, where: str
) -> tuple[int, ...]:
    num_layers = target.decoder.num_layers
    if kind == "mtp":
        return (num_layers - 1,)
    key = "eagle_aux_hidden_state_layer_ids"
    said, shift = (nested.get(key), 0) if nested.get(key) else (flat.get(key), 1)
    ids = said or [1, num_layers // 2 - 1, num_layers - 4]
    shift = shift if said else 0
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{where}: {key} is {ids!r}, allowed is a list of whole numbers")
    ours = tuple(i - shift for i in ids)
    if min(ours) < -1 or max(ours) >= num_layers or len(set(ours)) != len(ours):
        raise CheckpointError(
            f"{where}: {key} is {said or 'not given, so ' + str(ids)}, allowed are different layers of the target, "
            f"which has {num_layers}"
        )
    return ours
