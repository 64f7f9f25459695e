"""The settings of a model that is to be served, checked as far as can be without loading it, all problems at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from dspark.config import ENGINE_EXECUTORS, EXECUTOR_DTYPES, ServeConfig, read_settings
from dspark.errors import ConfigError
from dspark.serving.paths import resolve_paths

__all__ = ["load_checked_config"]


def load_checked_config(
    model_yaml: Path | None,
    overrides: Mapping[str, object],
    *,
    base: Path,
    environ: Mapping[str, str] = os.environ,
) -> ServeConfig:
    """Read settings and make their paths absolute.

    Arguments:
        model_yaml: None = there is none.
        overrides: what wins over file and environment.
        base: folder of model.yaml, in which relative paths are looked up, too.

    Raises:
        ConfigError: listing every problem: of values, of files that are not there, of values that do not go together.
    """
    values, problems = read_settings(model_yaml, overrides, environ=environ)
    known = ServeConfig(**values)  # type: ignore[arg-type]  # each value went through its own parser
    resolved = resolve_paths(known, base=base)
    problems += _problems(resolved, given=set(values), base=base)
    if problems:
        raise ConfigError("\n".join(problems))
    return resolved


def _problems(config: ServeConfig, *, given: set[str], base: Path) -> Iterator[str]:
    """Yield what is wrong with settings that can each be read; only `given` ones are looked at."""
    if "target" in given and (wrong := _wrong_target(config.target)):
        yield (
            f"target: got {config.target}, {wrong}; allowed is a Hugging Face folder, a .gguf file or a hub name "
            "(`make setup` fetches the demo model)"
        )
    drafter = Path(config.drafter).expanduser()
    found = drafter.suffix == ".gguf" if drafter.is_file() else (drafter / "config.json").is_file()
    if config.drafter not in ("auto", "none", "ngram") and not found:
        where = "has no config.json" if drafter.is_dir() else "is no folder"
        yield (
            f"drafter: got {config.drafter}, which {where}; allowed is auto, none, ngram or a drafter's folder"
        )
    for name, folders in (("capacity", (Path(), base)), ("calibration", (Path(),))):
        value = str(getattr(config, name))
        path = Path(value).expanduser()
        if value not in ("auto", "none") and not any((folder / path).is_file() for folder in folders):
            yield f"{name}: got {value!r}, allowed is a file, auto or none"
    learned = config.learned_calibration
    if learned not in ("auto", "none") and Path(learned).expanduser().is_dir():
        yield f"learned_calibration: got {learned!r}, which is a folder; allowed is a file, auto or none"
    if config.record != "none" and (wrong := _wrong_record(Path(config.record))):
        yield (
            f"record: got {config.record!r}, {wrong}; allowed is none or a folder that this user may make and write"
        )
    engine = Path(config.engine).expanduser()
    if config.executor in ENGINE_EXECUTORS and not (
        config.engine and any((folder / engine).is_dir() for folder in (Path(), base))
    ):
        yield f"engine: got {config.engine!r}, allowed with the {config.executor} executor is an engine's folder"
    if config.executor == "auto":
        return
    for name, allowed in (
        ("dtype", EXECUTOR_DTYPES.get(config.executor)),
        ("drafter_dtype", EXECUTOR_DTYPES.get(config.executor, ("auto",))),
    ):
        value = getattr(config, name)
        if allowed is not None and value not in allowed:
            yield f"{name}: got {value!r}, allowed with the {config.executor} executor is {', '.join(allowed)}"


def _wrong_record(folder: Path) -> str | None:
    """Return why answers cannot be kept there, as far as looking can tell; None where they may be."""
    nearest = folder
    while not os.path.exists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    where = "which" if nearest == folder else f"whose parent {nearest}"
    if not nearest.is_dir():
        return f"{where} is no folder"
    return None if os.access(nearest, os.W_OK | os.X_OK) else f"{where} cannot be written"


def _wrong_target(target: str) -> str | None:
    """Return what is wrong with a target; None for one that may be there, or may be a hub name."""
    path = Path(target).expanduser()
    if path.is_dir():
        return None if (path / "config.json").is_file() else "a folder without config.json"
    if path.is_file():
        return None if path.suffix == ".gguf" else "a file that is no .gguf"
    looks_like_path = path.suffix == ".gguf" or path.is_absolute() or target.startswith((".", "~"))
    return "which is not there" if looks_like_path or target.count("/") != 1 else None
