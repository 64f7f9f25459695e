"""Prompts: files (JSONL with `turns` and, where known, `source`), their tokens, and how warm they are asked.

Only the first user turn is asked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.errors import ConfigError
from dspark.models.loading import TargetCheckpoint

__all__ = ["Prompt", "fingerprint", "parse_temperatures", "read_prompts", "tokenize_prompts", "without"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question and the kind it belongs to."""

    text: str
    source: str


def read_prompts(files: Sequence[str | Path], *, limit: int | None = None) -> list[Prompt]:
    """Read prompt files in order; the same text twice is taken once.

    Arguments:
        limit: at most this many prompts.

    Raises:
        ConfigError: a file that is missing, empty or has a line that is not an object with `turns`.
    """
    prompts: dict[str, Prompt] = {}
    for name in files:
        path = Path(name)
        try:
            lines = path.read_text(encoding="utf-8").split("\n")  # U+2028 may stand inside a JSON text
        except OSError as error:
            raise ConfigError(f"prompts: cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"prompts: {path} is not UTF-8 text: {error.reason}") from error
        found = [_parse(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
        if not found:
            raise ConfigError(f'prompts: {path} is empty, wanted is JSONL with "turns": ["..."] on each line')
        for prompt in found:
            prompts.setdefault(fingerprint(prompt.text), prompt)
    return list(prompts.values())[:limit]


def without(prompts: Iterable[Prompt], excluded: Iterable[Prompt]) -> list[Prompt]:
    """Return the prompts whose text, up to case and spacing, is not among the excluded."""
    taboo = {fingerprint(prompt.text) for prompt in excluded}
    return [prompt for prompt in prompts if fingerprint(prompt.text) not in taboo]


def fingerprint(text: str) -> str:
    """Return a digest of the text that ignores case and spacing."""
    return hashlib.sha256(" ".join(text.lower().split()).encode()).hexdigest()


def tokenize_prompts(checkpoint: TargetCheckpoint, prompts: list[Prompt]) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt, through the target's chat template where it has one.

    Raises:
        ConfigError: the target has no tokenizer.
    """
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        raise ConfigError("target: has no tokenizer, and prompts are text; use a folder or file that has one")
    if tokenizer.has_chat_template:
        return [tuple(tokenizer.apply_chat_template([{"role": "user", "content": p.text}])) for p in prompts]
    return [tuple(tokenizer.encode(prompt.text)) for prompt in prompts]


def parse_temperatures(name: str, text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"{name}: got {text!r}, allowed are numbers with commas, such as 0,0.7,1.0"
        ) from error
    if not all(0.0 <= value <= 5.0 for value in values):
        raise ConfigError(f"{name}: got {text!r}, allowed are numbers from 0 to 5")
    return values


def _parse(line: str, path: Path, number: int) -> Prompt:
    wanted = 'a JSON object with "turns": ["..."]'
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"prompts: {path} line {number}: not JSON ({error.msg}), wanted is {wanted}"
        ) from error
    turns = entry.get("turns") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise ConfigError(f"prompts: {path} line {number}: got {line[:80]!r}, wanted is {wanted}")
    return Prompt(text=turns[0], source=str(entry.get("source", path.stem)))
