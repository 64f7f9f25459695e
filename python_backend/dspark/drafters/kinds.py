"""What kind of drafter a setting names, from its name or its config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from dspark.errors import ConfigError
from dspark.models.hf import read_json

__all__ = ["DrafterKind", "drafter_kind"]

DrafterKind = Literal["none", "ngram", "dspark", "draft_model"]

_LANGUAGE_MODELS = (["LlamaForCausalLM"], ["Qwen3ForCausalLM"])
_DSPARK_KEYS = ("block_size", "markov_rank", "dflash_config", "dspark_config")


def drafter_kind(spec: str) -> DrafterKind:
    """Return the kind of a drafter; a folder that says nothing else is taken for a DSpark checkpoint.

    Raises:
        ConfigError: neither a reserved name, nor a folder, nor a .gguf file.
        CheckpointError: a folder whose config.json cannot be read.
    """
    if spec in ("none", "ngram"):
        return cast(DrafterKind, spec)
    path = Path(spec).expanduser()
    if spec and path.is_file() and path.suffix == ".gguf":
        return "draft_model"
    if not spec or not path.is_dir():
        raise ConfigError(
            f"drafter: must be none, ngram or the folder of a checkpoint, or the .gguf file of a model; got {spec!r}"
        )
    return _of_config(read_json(path / "config.json")) if (path / "config.json").is_file() else "dspark"


def _of_config(fields: Mapping[str, Any]) -> DrafterKind:
    architectures = fields.get("architectures")
    if any(key in fields for key in _DSPARK_KEYS):
        return "dspark"
    return "draft_model" if architectures in _LANGUAGE_MODELS else "dspark"
