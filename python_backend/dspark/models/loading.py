"""Opens a target by path or hub name: a Hugging Face folder, a GGUF file, or `org/name`.

Only a hub name touches the network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dspark.errors import CheckpointError
from dspark.models.config import TargetConfig, WeightSource
from dspark.models.fingerprint import fingerprint
from dspark.models.gguf_file import GgufFile
from dspark.models.gguf_target import GgufTarget, read_gguf_config
from dspark.models.gguf_tokenizer import read_gguf_tokenizer
from dspark.models.hf import HfTarget, read_hf_config
from dspark.models.hf_tokenizer import read_hf_tokenizer
from dspark.models.safetensors_file import open_safetensors
from dspark.models.tokenizer import Tokenizer

__all__ = ["TargetCheckpoint", "load_target"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"]
_HUB_TOKENIZER_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]


@dataclass(frozen=True, slots=True)
class TargetCheckpoint:
    """A target that was found and checked; weights are read when asked for."""

    config: TargetConfig
    weights: WeightSource
    tokenizer: Tokenizer | None  # None where the folder has none


def load_target(path: str | Path) -> TargetCheckpoint:
    """Open a target and check configuration, tensor names, shapes and tokenizer.

    Arguments:
        path: a folder with config.json and safetensors, a .gguf file, or a hub name such as "org/name".

    Raises:
        CheckpointError: when it cannot be found or served, naming the field, its value and what is allowed.
    """
    found = Path(path).expanduser()
    if found.is_dir():
        return _load_folder(found)
    if found.is_file():
        if found.suffix != ".gguf":
            raise CheckpointError(f"{found} is a file, allowed are a folder, a .gguf file and a hub name")
        return _load_gguf(found)
    if _HUB_NAME.fullmatch(str(path)):
        return _load_folder(_download(str(path)))
    raise CheckpointError(f"{path}: no such folder or file")


def _load_folder(folder: Path) -> TargetCheckpoint:
    if not (folder / "config.json").is_file():
        ggufs = sorted(entry.name for entry in folder.glob("*.gguf"))
        hint = f"; name one of its GGUF files instead: {', '.join(ggufs[:3])}" if ggufs else ""
        raise CheckpointError(f"{folder}: there is no config.json{hint}")
    source = open_safetensors(folder)
    config = read_hf_config(folder, model_hash=fingerprint([folder / "config.json", *source.files]))
    weights = HfTarget(source, config, where=str(folder))
    return _checked(
        TargetCheckpoint(config, weights, read_hf_tokenizer(folder, eos_ids=config.eos_ids)), folder
    )


def _load_gguf(path: Path) -> TargetCheckpoint:
    file = GgufFile(path)
    config = read_gguf_config(file, model_hash=fingerprint([path]))
    weights = GgufTarget(file, config)
    return _checked(
        TargetCheckpoint(config, weights, read_gguf_tokenizer(file, eos_ids=config.eos_ids)), path
    )


def _checked(checkpoint: TargetCheckpoint, where: Path) -> TargetCheckpoint:
    tokenizer, vocab_size = checkpoint.tokenizer, checkpoint.config.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"{where}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"the model's vocabulary only {vocab_size}"
        )
    return checkpoint


def _download(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{name}: no such folder or file; to download it from the hub install dspark-triton[hub] "
            "(huggingface_hub is missing)"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=[*_HUB_FILES, *_HUB_TOKENIZER_FILES]))
    except Exception as error:  # the hub client raises many kinds, its own and its transport's
        raise CheckpointError(
            f"{name}: no such folder or file, and the hub did not give it "
            f"({type(error).__name__}: {str(error)[:200]})"
        ) from error
