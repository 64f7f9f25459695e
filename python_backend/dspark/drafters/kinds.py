"""What kind of drafter a setting names, from its name or its config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from dspark.errors import ConfigError
from dspark.models.hf import read_json

__all__ = ["DrafterKind", "check_kind", "drafter_kind"]

DrafterKind = Literal["none", "ngram", "dspark", "draft_model", "eagle3", "mtp"]

_LANGUAGE_MODELS = (["LlamaForCausalLM"], ["Qwen3ForCausalLM"])
_MTP = (["LlamaMTPModel"], ["Qwen3MTPModel"])
_ENGINES_DRAFT = {  # what executors that do not run checkpoints can draft with
    "tensorrt": ("none", "ngram", "dspark", "draft_model"),
    "onnxruntime": ("none", "ngram", "dspark", "draft_model"),
    "tensorrt_llm": ("none", "ngram", "dspark"),
}
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


def check_kind(kind: DrafterKind, *, executor: str) -> None:
    """Refuse a drafter that an executor cannot serve beside its target.

    Raises:
        ConfigError: naming both.
    """
    allowed = _ENGINES_DRAFT.get(executor)
    if allowed is not None and kind not in allowed:
        raise ConfigError(
            f"drafter: got one of kind {kind}, allowed with executor {executor} are {', '.join(allowed)}"
        )


def _of_config(fields: Mapping[str, Any]) -> DrafterKind:
    architectures = fields.get("architectures")
    if any(key in fields for key in _DSPARK_KEYS):
        return "dspark"
    named = isinstance(architectures, list) and any("eagle3" in str(name).lower() for name in architectures)
    # EAGLE's own repository calls its heads LlamaForCausalLM; no language model has a draft vocabulary.
    if named or fields.get("speculators_model_type") == "eagle3" or _is_early_eagle(fields):
        return "eagle3"
    if architectures in _MTP:
        return "mtp"
    return "draft_model" if architectures in _LANGUAGE_MODELS else "dspark"


def _is_early_eagle(fields: Mapping[str, Any]) -> bool:
    return fields.get("architectures") in _LANGUAGE_MODELS and "draft_vocab_size" in fields
