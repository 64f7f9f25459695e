"""The tokenizer of a Hugging Face folder: tokenizer.json and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dspark.errors import CheckpointError
from dspark.models.chat_template import ChatTemplate
from dspark.models.hf import read_json
from dspark.models.tokenizer import Tokenizer, decoder_family

__all__ = ["read_hf_tokenizer"]

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_hf_tokenizer(folder: Path, *, eos_ids: Sequence[int]) -> Tokenizer | None:
    """Read the folder's tokenizer; None where there is no tokenizer.json.

    Raises:
        CheckpointError: for files that cannot be read, a decoder of an unknown kind, a broken chat template,
            or a vocabulary in another format only.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [
            name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).is_file()
        ]
        if others:
            raise CheckpointError(
                f"{folder}: found {others[0]} but no tokenizer.json, which is the one format allowed"
            )
        return None
    try:
        text = path.read_text("utf-8")
        decoder = json.loads(text).get("decoder")
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the tokenizers package raises plain Exception
        raise CheckpointError(f"{path}: cannot be read ({str(error)[:200]})") from error
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    family, leading_space_stripped = decoder_family(decoder, where=str(path))
    settings = _optional(folder / "tokenizer_config.json")
    named = _named_tokens(_optional(folder / "special_tokens_map.json") | settings)
    bos = named.get("bos_token")
    return Tokenizer(
        backend,
        family=family,
        leading_space_stripped=leading_space_stripped,
        eos_ids=eos_ids,
        bos_id=None if bos is None else backend.token_to_id(bos),
        chat_template=_chat_template(folder, settings, named),
        special_ids=eos_ids,
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return bos_token and the like as texts; they are written as a text or as an object with `content`."""
    named = {}
    for name in _NAMED_TOKENS:
        value = settings.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[name] = content
    return named


def _chat_template(folder: Path, settings: dict[str, Any], named: dict[str, str]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    tool_template: str | None = None
    template: str | None
    if path.is_file():
        where, template = str(path), path.read_text("utf-8")
    else:
        where, given = str(folder / "tokenizer_config.json"), settings.get("chat_template")
        if isinstance(given, list):
            by_name = {
                str(entry.get("name")): entry.get("template") for entry in given if isinstance(entry, dict)
            }
            template, tool_template = by_name.get("default"), by_name.get("tool_use")
        else:
            template = given
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"{where}: chat_template is a {type(template).__name__}, allowed is a text")
    if template is None:
        return None
    return ChatTemplate(template, tool_template=tool_template, special_tokens=named, where=where)
