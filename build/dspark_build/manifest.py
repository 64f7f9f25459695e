"""What a data folder was made from. A folder made from something else is refused, naming both values."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dspark.errors import CheckpointError, ConfigError

from dspark_build.files import write_text

__all__ = ["DataManifest", "load_manifest", "open_manifest"]

FORMAT_VERSION = 1
NAME = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataManifest:
    """Settings of a data folder; every field decides what its files hold."""

    target_hash: str
    prompts_hash: str  # over the texts, in order
    num_prompts: int
    max_tokens: int  # of an answer
    max_prompt_tokens: int  # longer prompts were left out
    temperatures: tuple[float, ...]
    answers_per_prompt: int
    shard_size: int
    seed: int
    num_shards: int
    format_version: int = FORMAT_VERSION


def open_manifest(folder: Path, wanted: DataManifest) -> None:
    """Create the manifest, or check that the one that is there says the same.

    Raises:
        ConfigError: the folder was made with another setting; names it and both values.
    """
    path = folder / NAME
    if not path.exists():
        write_text(path, json.dumps(asdict(wanted), indent=2) + "\n")
        return
    found = load_manifest(folder)
    for field in fields(DataManifest):
        here, asked = getattr(found, field.name), getattr(wanted, field.name)
        if here != asked:
            raise ConfigError(
                f"{path}: was made with {field.name} {here!r}, asked for is {asked!r}; "
                "use another --out or the same "
                "settings"
            )


def load_manifest(folder: Path) -> DataManifest:
    """Read the manifest of a data folder.

    Raises:
        CheckpointError: there is none, or it is of another format.
    """
    path = folder / NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: has no {NAME}; make it with `dspark-build data`") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    names = {field.name for field in fields(DataManifest)}
    if not isinstance(raw, dict) or set(raw) != names or raw["format_version"] != FORMAT_VERSION:
        version = raw.get("format_version") if isinstance(raw, dict) else None
        raise CheckpointError(
            f"{path}: format_version must be {FORMAT_VERSION} with its fields, got {version!r}"
        )
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
    return DataManifest(**values)
