"""engine.json: what a folder of plans was built from, and for what."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.errors import CheckpointError
from dspark.executors.tensorrt_manifest import (
    ENGINE_NAME,
    ENGINE_VERSION,
    EXPORT_NAME,
    ExportedFile,
    check_files,
    load_export,
    manifest_of,
)

__all__ = ["EngineManifest", "PlanFile", "TableFile", "load_engine_manifest", "whole_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """One plan."""

    file: ExportedFile
    num_layers: int
    num_plugins: int  # nodes; each is one layer in every profile
    kernels: dict[str, int]  # compiled forms of each kernel
    spills: dict[
        str, int
    ]  # bytes that a thread of a form moves through memory for want of registers; those that do
    kinds: dict[str, int]  # layers of each kind, over all profiles
    bindings: list[dict[str, Any]]  # as in export.json
    profiles: list[dict[str, Any]]  # name, and [least, usual, most] of every dimension
    build_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFile:
    """Weights that both plans take as an input."""

    file: ExportedFile
    binding: str
    shape: tuple[int, int]  # as it is bound


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineManifest:
    """What the plans are."""

    tools: dict[str, str]  # versions of TensorRT, Triton's compiler, ptxas, dspark
    inputs: str  # hash of all that the plans were made from
    sm: int
    precision: str
    target_hash: str
    drafter_hash: str
    feature_layer_ids: tuple[int, ...]
    block_size: int
    page_size: int
    limits: dict[str, int]
    plans: tuple[PlanFile, ...]
    tables: tuple[TableFile, ...]
    peak_bytes: int  # most memory of the process while building
    format_version: int = ENGINE_VERSION

    @property
    def files(self) -> tuple[ExportedFile, ...]:
        """What the runtime reads beside the manifests."""
        return (*(plan.file for plan in self.plans), *(table.file for table in self.tables))

    def text(self) -> str:
        """Return the manifest as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"


def load_engine_manifest(folder: Path) -> EngineManifest:
    """Read a folder's manifest.

    Raises:
        CheckpointError: there is none, or it is of another format.
    """
    with manifest_of(folder, ENGINE_NAME, ENGINE_VERSION, "dspark-build engine") as raw:
        plans = tuple(PlanFile(**plan | {"file": ExportedFile(**plan["file"])}) for plan in raw["plans"])
        tables = tuple(
            TableFile(**one | {"file": ExportedFile(**one["file"]), "shape": tuple(one["shape"])})
            for one in raw["tables"]
        )
        layers = tuple(raw["feature_layer_ids"])
        return EngineManifest(**raw | {"plans": plans, "tables": tables, "feature_layer_ids": layers})


def whole_engine(folder: Path) -> EngineManifest:
    """Read a folder's manifests and every plan and table.

    Raises:
        CheckpointError: a file is missing, cut short or not the one that was built; names both values.
    """
    manifest, export = load_engine_manifest(folder), load_export(folder)
    if export.files != manifest.files:
        raise CheckpointError(f"{folder / EXPORT_NAME}: is not of these plans; build the engine again")
    check_files(folder, export, contents=True)
    return manifest
