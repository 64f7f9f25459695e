"""export.json: what a folder of exported graphs, or of plans, was made from, and whether it fits what is to be served.

Written by `dspark-build export` and `dspark-build engine`, read by both and by the runtime. Knows files, neither ONNX
nor TensorRT.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from dspark.errors import CheckpointError
from dspark.executors.tensorrt_bindings import Binding, Precision, VerifyShape

__all__ = [
    "ENGINE_NAME",
    "ENGINE_VERSION",
    "EXPORT_NAME",
    "ExportManifest",
    "ExportedFile",
    "check_files",
    "check_pair",
    "load_export",
    "manifest_of",
]

EXPORT_NAME = "export.json"
ENGINE_NAME = "engine.json"  # beside it where there are plans
ENGINE_VERSION = 4  # of engine.json
FORMAT_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """One file beside the manifest."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportManifest:
    """What the graphs are. `drafter_hash` is empty and `block_size` 0 without a drafter."""

    tools: dict[str, str]  # versions of dspark and onnx, opset of the operations
    inputs: str  # hash of all that the files were made from
    target_hash: str  # model_hash of the target
    drafter_hash: str  # digest of the drafter's folder
    precision: Precision
    page_size: int
    feature_layer_ids: tuple[int, ...]  # -1 = the embedding output
    block_size: int  # G
    verify: VerifyShape  # drafts that the target's graph verifies
    target_bindings: tuple[Binding, ...]
    drafter_bindings: tuple[Binding, ...]
    files: tuple[ExportedFile, ...]
    format_version: int = FORMAT_VERSION

    def text(self) -> str:
        """Return the manifest as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @property
    def made(self) -> str:
        """What the files are: plans, or graphs."""
        return "engine" if self._has_plans else "export"

    @property
    def mend(self) -> str:
        """What to do where they do not fit."""
        return "build the engine again" if self._has_plans else "export again"

    @property
    def _has_plans(self) -> bool:
        return any(file.name.endswith(".plan") for file in self.files)


@contextmanager
def manifest_of(folder: Path, name: str, version: int, command: str) -> Iterator[dict[str, Any]]:
    """Give what a manifest says, for code that may fail on it.

    Arguments:
        command: what makes such a folder.

    Raises:
        CheckpointError: there is none, it is of another format, or the code under `with` fails on it.
    """
    path = folder / name
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format_version"] != version:
            raise CheckpointError(
                f"{path}: format_version must be {version}, got {raw['format_version']!r}; make it again with "
                f"`{command}`"
            )
        yield raw
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: has no {name}; make it with `{command}`") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}; make it again with `{command}`") from error


def load_export(folder: Path) -> ExportManifest:
    """Read a folder's manifest.

    Raises:
        CheckpointError: there is none, or it is of another format.
    """
    has_plans = (folder / ENGINE_NAME).exists() or any(folder.glob("*.plan"))
    command = "dspark-build engine" if has_plans else "dspark-build export"
    with manifest_of(folder, EXPORT_NAME, FORMAT_VERSION, command) as raw:
        if raw["precision"] not in get_args(Precision):
            raise CheckpointError(
                f"{folder / EXPORT_NAME}: precision must be one of {', '.join(get_args(Precision))}, got "
                f"{raw['precision']!r}"
            )
        return ExportManifest(
            **raw
            | {
                "feature_layer_ids": tuple(raw["feature_layer_ids"]),
                "verify": VerifyShape(**raw["verify"]),
                "target_bindings": _bindings(raw["target_bindings"]),
                "drafter_bindings": _bindings(raw["drafter_bindings"]),
                "files": tuple(ExportedFile(**file) for file in raw["files"]),
            }
        )


def _bindings(raw: list[dict[str, Any]]) -> tuple[Binding, ...]:
    return tuple(Binding(**binding | {"shape": tuple(binding["shape"])}) for binding in raw)


def check_files(folder: Path, manifest: ExportManifest, *, contents: bool = False) -> None:
    """Check that every file is there and whole.

    Arguments:
        contents: compare hashes too, which reads everything: 2 GB a second and core where the processor has SHA.

    Raises:
        CheckpointError: names the file and both values.
    """
    for file in manifest.files:
        path = folder / file.name
        size = path.stat().st_size if path.is_file() else -1
        if size != file.num_bytes:
            found = "is missing" if size < 0 else f"has {size} bytes"
            raise CheckpointError(f"{path}: must have {file.num_bytes} bytes, {found}; {manifest.mend}")
    if not contents:
        return
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda file: _digest(folder / file.name), manifest.files)
    for file, digest in zip(manifest.files, digests, strict=True):
        if digest != file.sha256:
            raise CheckpointError(
                f"{folder / file.name}: sha256 must be {file.sha256[:16]}..., got {digest[:16]}...; {manifest.mend}"
            )


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def check_pair(
    manifest: ExportManifest,
    *,
    target_hash: str,
    drafter_hash: str,
    page_size: int,
    target_bindings: tuple[Binding, ...],
    drafter_bindings: tuple[Binding, ...],
) -> None:
    """Check that an export is of this target and drafter, with this page size, in our words.

    Arguments:
        drafter_hash: empty without a drafter; an export may hold one that is not used.
        target_bindings, drafter_bindings: what this version would export.

    Raises:
        CheckpointError: names the field and both values.
    """
    wanted: dict[str, tuple[object, object]] = {
        "target_hash": (manifest.target_hash, target_hash),
        "page_size": (manifest.page_size, page_size),
        "target_bindings": (manifest.target_bindings, target_bindings),
    }
    if drafter_hash:
        wanted["drafter_hash"] = (manifest.drafter_hash or "none", drafter_hash)
        wanted["drafter_bindings"] = (manifest.drafter_bindings, drafter_bindings)
    for field, (found, asked) in wanted.items():
        if found == asked:
            continue
        if isinstance(found, tuple) and isinstance(asked, tuple):
            found, asked = _first_difference(found, asked)
        mend = f"set page_size: {found}, or {manifest.mend}" if field == "page_size" else manifest.mend
        raise CheckpointError(
            f"{field}: the {manifest.made} was made for {found}, asked for is {asked}; {mend}"
        )


def _first_difference(
    found: tuple[Binding, ...], asked: tuple[Binding, ...]
) -> tuple[Binding | str, Binding | str]:
    for mine, theirs in zip(found, asked, strict=False):
        if mine != theirs:
            return mine, theirs
    return f"{len(found)} tensors", f"{len(asked)} tensors"
