"""engine.json: what a folder of plans was built from, and for what."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.errors import CheckpointError
from dspark.executors.tensorrt_manifest import EXPORT_NAME, ExportedFile, load_export

__all__ = ["ENGINE_NAME", "EngineManifest", "PlanFile", "load_engine_manifest", "whole_engine"]

ENGINE_NAME = "engine.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """One plan."""

    file: ExportedFile
    num_layers: int
    num_plugins: int  # nodes; each is one layer in every profile
    kernels: dict[str, int]  # compiled forms of each kernel
    kinds: dict[str, int]  # layers of each kind, over all profiles
    bindings: list[dict[str, Any]]  # as in export.json
    profiles: list[dict[str, Any]]  # name, and [least, usual, most] of every dimension
    build_s: float


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
    peak_bytes: int  # most memory of the process while building
    format_version: int = FORMAT_VERSION

    def text(self) -> str:
        """Return the manifest as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"


def load_engine_manifest(folder: Path) -> EngineManifest:
    """Read a folder's manifest.

    Raises:
        CheckpointError: there is none, or it is of another format.
    """
    path = folder / ENGINE_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format_version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version must be {FORMAT_VERSION}, got {raw['format_version']!r}"
            )
        plans = tuple(PlanFile(**plan | {"file": ExportedFile(**plan["file"])}) for plan in raw["plans"])
        layers = tuple(raw["feature_layer_ids"])
        return EngineManifest(**raw | {"plans": plans, "feature_layer_ids": layers})
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder}: has no {ENGINE_NAME}; make it with `dspark-build engine`"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error


def whole_engine(folder: Path) -> EngineManifest:
    """Read a folder's manifests and every plan.

    Raises:
        CheckpointError: a file is missing, or a plan is cut short or not the one that was built; names both values.
    """
    manifest = load_engine_manifest(folder)
    if load_export(folder).files != tuple(plan.file for plan in manifest.plans):
        raise CheckpointError(f"{folder / EXPORT_NAME}: is not of these plans; build the engine again")
    for plan in manifest.plans:
        path = folder / plan.file.name
        size = path.stat().st_size if path.is_file() else -1
        if size != plan.file.num_bytes:
            found = "is missing" if size < 0 else f"has {size}"
            raise CheckpointError(
                f"{path}: must have {plan.file.num_bytes} bytes, {found}; build the engine again"
            )
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != plan.file.sha256:
            raise CheckpointError(
                f"{path}: sha256 must be {plan.file.sha256[:16]}..., got {digest[:16]}...; build the engine again"
            )
    return manifest
