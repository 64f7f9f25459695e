"""Answers that a server recorded (setting `record`), as data to train on.

Each file begins with a line that names its format and target; every other line is one answer. What a killed server left
of a last line is passed over. Answers to one prompt stay together: they are learnt from, or rated, or checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.errors import CheckpointError, ConfigError

from dspark_build.answers import AnswerShard, Question, shard_path
from dspark_build.manifest import DataManifest, load_manifest, open_manifest
from dspark_build.training_data import HELD_OUT_EVERY

__all__ = ["RecordedAnswer", "TrafficParts", "read_part", "read_traffic", "split_traffic", "write_part"]

FORMAT_VERSION = 1
SHARD_SIZE = 256
_PARTS = 10  # a tenth of the prompts rates, a tenth checks, the rest is learnt from


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """One request as it was served."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficParts:
    """Answers by what they are for; no prompt is in two of them."""

    learn: list[RecordedAnswer]
    rate: list[RecordedAnswer]  # the confidence head is fitted on what the rest never saw
    check: list[RecordedAnswer]  # calibration, and whether the new drafter is the better one


def read_traffic(folders: Iterable[Path], *, target_hash: str, vocab_size: int) -> list[RecordedAnswer]:
    """Return every answer once, oldest first.

    Raises:
        ConfigError: a folder without recorded answers, or a line that is none.
        CheckpointError: a file of another target.
    """
    found: dict[RecordedAnswer, None] = {}
    for folder in folders:
        files = sorted(folder.glob("traffic-*.jsonl"))
        if not files:
            raise ConfigError(
                f"--traffic: {folder} holds no traffic-*.jsonl; serve with `dspark serve --record {folder}` first"
            )
        for path in files:
            found.update(dict.fromkeys(_read(path, target_hash=target_hash, vocab_size=vocab_size)))
    return list(found)


def _read(path: Path, *, target_hash: str, vocab_size: int) -> list[RecordedAnswer]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--traffic: {path} cannot be read: {error}") from error
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):  # empty, or torn when the server was killed
                break
            raise ConfigError(f"--traffic: {path} line {number}: not JSON ({error})") from error
    head = entries[0] if entries else None
    if head is None:
        return []
    if not isinstance(head, dict) or head.get("format_version") != FORMAT_VERSION:
        raise ConfigError(
            f"--traffic: {path} line 1: got {lines[0][:80]!r}, allowed is format_version {FORMAT_VERSION}"
        )
    if head.get("target_hash") != target_hash:
        raise CheckpointError(
            f"{path}: was recorded with target {head.get('target_hash')}, this target is {target_hash}"
        )
    return [_answer(entry, path, number, vocab_size) for number, entry in enumerate(entries[1:], 2)]


def _answer(entry: object, path: Path, number: int, vocab_size: int) -> RecordedAnswer:
    wanted = f"prompt_ids and output_ids, lists of ids from 0 to {vocab_size - 1}, and temperature"
    fields = entry if isinstance(entry, dict) else {}
    ids = [fields.get("prompt_ids"), fields.get("output_ids")]
    temperature = fields.get("temperature")
    good = all(
        isinstance(part, list) and part and all(type(i) is int and 0 <= i < vocab_size for i in part)
        for part in ids
    )
    if not good or not isinstance(temperature, int | float) or not temperature >= 0.0:
        raise ConfigError(f"--traffic: {path} line {number}: got {str(entry)[:80]!r}, allowed is {wanted}")
    prompt_ids, output_ids = (tuple(part) for part in ids if part)
    return RecordedAnswer(prompt_ids=prompt_ids, output_ids=output_ids, temperature=float(temperature))


def split_traffic(answers: Sequence[RecordedAnswer]) -> TrafficParts:
    """Deal answers out by a digest of their prompt: the same prompt goes the same way in every run."""
    parts = TrafficParts(learn=[], rate=[], check=[])
    for answer in answers:
        digest = hashlib.sha256(repr(answer.prompt_ids).encode()).digest()
        kind = int.from_bytes(digest[:4], "big") % _PARTS
        (parts.rate if kind == 0 else parts.check if kind == 1 else parts.learn).append(answer)
    return parts


def read_part(folder: Path) -> list[RecordedAnswer]:
    """Return the answers that `write_part` wrote."""
    answers = []
    for index in range(load_manifest(folder).num_shards):
        shard = AnswerShard.load(shard_path(folder, index))
        for i in range(len(shard)):
            ids, start = shard.sequence(i).tolist(), int(shard.prompt_len[i])
            answers.append(
                RecordedAnswer(
                    prompt_ids=tuple(ids[:start]),
                    output_ids=tuple(ids[start:]),
                    temperature=float(shard.temperature[i]),
                )
            )
    return answers


def write_part(
    folder: Path, answers: Sequence[RecordedAnswer], *, target_hash: str, held_out: bool = False
) -> None:
    """Write a data folder as `dspark-build data --only answers` does.

    Arguments:
        held_out: number the prompts as ones that no training learns from.

    Raises:
        ConfigError: the folder holds other answers.
    """
    numbers: dict[tuple[int, ...], int] = {}
    questions = [
        Question(
            prompt_id=numbers.setdefault(a.prompt_ids, len(numbers)) * (HELD_OUT_EVERY if held_out else 1),
            prompt_ids=a.prompt_ids,
            temperature=a.temperature,
            seed=0,
        )
        for a in answers
    ]
    open_manifest(
        folder,
        DataManifest(
            target_hash=target_hash,
            prompts_hash=hashlib.sha256(
                repr([(a.prompt_ids, a.output_ids) for a in answers]).encode()
            ).hexdigest(),
            num_prompts=len(numbers),
            max_tokens=max(len(a.output_ids) for a in answers),
            max_prompt_tokens=max(len(a.prompt_ids) for a in answers),
            temperatures=tuple(sorted({a.temperature for a in answers})),
            answers_per_prompt=1,
            shard_size=SHARD_SIZE,
            seed=0,
            num_shards=-(-len(answers) // SHARD_SIZE),
        ),
    )
    for index in range(0, len(answers), SHARD_SIZE):
        path = shard_path(folder, index // SHARD_SIZE)
        if not path.exists():
            outputs = [a.output_ids for a in answers[index : index + SHARD_SIZE]]
            AnswerShard.of_answers(questions[index : index + SHARD_SIZE], outputs).save(path)
