"""Where things lie: the clone, its model repository and state folder; paths relative to model.yaml."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dspark.config import ServeConfig

__all__ = ["clone_dir", "default_model_repository", "resolve_paths", "state_dir"]


def clone_dir() -> Path | None:
    """Return the folder of the clone this package runs from; None when it was installed as a wheel."""
    candidate = Path(__file__).resolve().parents[3]
    return candidate if (candidate / "model_repository" / "dspark" / "config.pbtxt").is_file() else None


def default_model_repository() -> Path:
    """Return the clone's model repository, else `model_repository` in the working folder."""
    return (clone_dir() or Path.cwd()) / "model_repository"


def state_dir() -> Path:
    """Return the folder for what a launcher writes: `.dspark` in the clone, else in the working folder."""
    return (clone_dir() or Path.cwd()) / ".dspark"


def resolve_paths(config: ServeConfig, *, base: Path) -> ServeConfig:
    """Return `config` with target, drafter, engine and record made absolute where they are paths.

    A relative path is looked up in the working folder, then in `base`, the folder of model.yaml. What is
    found in neither stays as it is (a hub name, or an error that the loader words better); the folder of `record`
    is made in the working folder then.
    """
    return replace(
        config,
        target=_resolve(config.target, base),
        drafter=_resolve(config.drafter, base),
        engine=_resolve(config.engine, base) if config.engine else "",
        record=_resolve_record(config.record, base),
    )


def _resolve_record(record: str, base: Path) -> str:
    return record if record == "none" else str(Path(_resolve(record, base)).expanduser().absolute())


def _resolve(name: str, base: Path) -> str:
    for folder in (Path.cwd(), base):
        path = folder / Path(name).expanduser()
        if name not in ("none", "ngram", "auto") and path.exists():
            return str(path.resolve())
    return name
