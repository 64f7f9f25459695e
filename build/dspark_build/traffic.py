"""Answers that a server recorded (setting `record`), as data to train on.

Each file begins with a line that names its format and target; every other line is one answer. Files are read line by
line, the newest first, and no further than is of use. Lines that are torn (a killed server, a full disk) and files of
other targets are passed over and told. Answers to one prompt stay together: they are learnt from, or rated, or checked.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dspark.errors import CheckpointError, ConfigError

from dspark_build.answers import AnswerShard, Question, shard_path
from dspark_build.manifest import DataManifest, load_manifest, open_manifest
from dspark_build.training_data import HELD_OUT_EVERY

__all__ = [
    "RecordedAnswer",
    "TrafficLimits",
    "TrafficParts",
    "read_part",
    "read_traffic",
    "split_traffic",
    "write_part",
]

FORMAT_VERSION = 1
SHARD_SIZE = 64  # a shard's features are in memory while they are made
_PARTS = 10  # a tenth of the prompts rates, a tenth checks, the rest is learnt from
_MOST_TEMPERATURE = 1e30  # which a float32 holds
_LEAST_TOKENS = 2  # of an answer: the first comes from the prompt's pass, a drafter drafts those behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """One request as it was served."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    temperature: float

    def __len__(self) -> int:
        """Return the tokens of prompt and answer."""
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficLimits:
    """Which answers are of use."""

    max_sequence: int  # tokens of prompt and answer
    max_prompt: int  # tokens of the prompt
    max_tokens: int  # of prompts and answers all together; the newest are taken

    def allow(self, answer: RecordedAnswer) -> bool:
        """Return whether an answer by itself is of use."""
        return (
            len(answer.prompt_ids) <= self.max_prompt
            and len(answer) <= self.max_sequence
            and len(answer.output_ids) >= _LEAST_TOKENS
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficParts:
    """Answers by what they are for; no prompt is in two of them."""

    learn: list[RecordedAnswer]
    rate: list[RecordedAnswer]  # the confidence head is fitted on what the rest never saw
    check: list[RecordedAnswer]  # calibration, and whether the new drafter is the better one


def read_traffic(
    folders: Iterable[Path],
    *,
    target_hash: str,
    vocab_size: int,
    limits: TrafficLimits,
    tell: Callable[[str], None],
) -> list[RecordedAnswer]:
    """Return every answer of use once, oldest first. Servers may go on writing meanwhile.

    Arguments:
        tell: takes a line on what was left out.

    Raises:
        ConfigError: a folder without recorded answers, or a line that is no answer.
        CheckpointError: all files are of another target.
    """
    files = [_TrafficFile(path, vocab_size=vocab_size, tell=tell) for path in _files(folders)]
    newest = _Newest(limits)
    for number, file in enumerate(files, 1):
        newest.take(file.answers(target_hash))
        if newest.is_full:
            tell(
                f"traffic: the newest answers are taken, of {limits.max_tokens} tokens at most; "
                f"{len(files) - number} older files are not read"
            )
            break
    others = [file.other_target for file in files if file.other_target is not None]
    if others and not newest.num_read:
        raise CheckpointError(
            f"--traffic: was recorded with target {', '.join(sorted(set(others)))}, this target is {target_hash}; "
            "name the target that was served"
        )
    if others:
        tell(
            f"traffic: {len(others)} files are passed over, recorded with target {', '.join(sorted(set(others)))}"
        )
    if newest.num_unfit:
        tell(
            f"traffic: {newest.num_unfit} of {newest.num_read} answers are left out: they end behind "
            f"{limits.max_sequence} tokens, their prompt has over {limits.max_prompt}, or they have fewer than "
            f"{_LEAST_TOKENS}"
        )
    return newest.oldest_first()


class _Newest:
    """Answers of use, until they are as many as wanted. Files are given the newest first, their lines oldest first."""

    def __init__(self, limits: TrafficLimits) -> None:
        self.num_read = 0
        self.num_unfit = 0
        self.is_full = False  # there were more
        self._limits = limits
        self._found: dict[RecordedAnswer, None] = {}  # the newest first
        self._room = limits.max_tokens

    def take(self, answers: Iterable[RecordedAnswer]) -> None:
        """Take in a file."""
        kept: deque[RecordedAnswer] = deque()
        num_tokens = 0
        for answer in answers:
            self.num_read += 1
            if not self._limits.allow(answer):
                self.num_unfit += 1
            elif answer not in self._found:
                kept.append(answer)
                num_tokens += len(answer)
            while num_tokens > self._room:
                num_tokens -= len(kept.popleft())
                self.is_full = True
        for answer in reversed(kept):
            if answer not in self._found:
                self._found[answer] = None
                self._room -= len(answer)

    def oldest_first(self) -> list[RecordedAnswer]:
        return list(self._found)[::-1]


def _files(folders: Iterable[Path]) -> list[Path]:
    """Return the files of all folders, the newest first."""
    paths: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                f"--traffic: got {folder}, allowed is a folder that `dspark serve --record` wrote"
            )
        files = [path for path in folder.glob("traffic-*.jsonl") if path.is_file()]
        if not files:
            raise ConfigError(
                f"--traffic: {folder} holds no traffic-*.jsonl; serve with `dspark serve --record {folder}` first"
            )
        paths |= dict.fromkeys(path.resolve() for path in files)
    return sorted(paths, key=_age, reverse=True)


def _age(path: Path) -> tuple[int, str]:
    created = path.name.split("-")[1]  # milliseconds, in the names that servers give
    return int(created) if created.isdecimal() else 0, path.name


class _TrafficFile:
    """One file, read line by line."""

    def __init__(self, path: Path, *, vocab_size: int, tell: Callable[[str], None]) -> None:
        self.other_target: str | None = None  # set where the file is of one
        self._path = path
        self._vocab_size = vocab_size
        self._tell = tell

    def answers(self, target_hash: str) -> Iterator[RecordedAnswer]:
        """Yield the file's answers; none where it is of another target, or was removed meanwhile."""
        try:
            with self._path.open("rb") as file:
                if self._begins_well(file.readline(), file, target_hash):
                    yield from self._lines(file)
        except FileNotFoundError:
            return  # the server made room
        except OSError as error:
            raise ConfigError(f"--traffic: {self._path} cannot be read: {error}") from error

    def _begins_well(self, line: bytes, file: BinaryIO, target_hash: str) -> bool:
        head = _parsed(line)
        if head is None and not file.read(1):
            return False  # empty, or torn in its first line
        if not isinstance(head, dict) or head.get("format_version") != FORMAT_VERSION:
            raise ConfigError(
                f"--traffic: {self._path} line 1: got {line[:80]!r}, allowed is format_version {FORMAT_VERSION}; "
                "move the file elsewhere"
            )
        if head.get("target_hash") != target_hash:
            self.other_target = str(head.get("target_hash"))
        return self.other_target is None

    def _lines(self, file: BinaryIO) -> Iterator[RecordedAnswer]:
        torn = []
        for number, line in enumerate(file, 2):
            entry = _parsed(line)
            if entry is None:
                torn.append(number)
                continue
            yield _answer(entry, self._path, number, self._vocab_size)
        if torn:
            self._tell(
                f"traffic: {self._path}: passed over {len(torn)} torn lines (no JSON), the first is {torn[0]}"
            )


def _parsed(line: bytes) -> object:
    """Return a line's content; None for one that is torn."""
    try:
        found: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if found is not None else {}


def _answer(entry: object, path: Path, number: int, vocab_size: int) -> RecordedAnswer:
    fields = entry if isinstance(entry, dict) else {}
    ids = [fields.get("prompt_ids"), fields.get("output_ids")]
    temperature = _temperature(fields.get("temperature"))
    good = all(
        isinstance(part, list) and part and all(type(i) is int and 0 <= i < vocab_size for i in part)
        for part in ids
    )
    if not good or temperature is None:
        raise ConfigError(
            f"--traffic: {path} line {number}: got {str(entry)[:80]!r}, allowed is prompt_ids and output_ids, lists "
            f"of ids from 0 to {vocab_size - 1}, and a temperature of 0 or more; remove the line"
        )
    prompt_ids, output_ids = (tuple(part) for part in ids if part)
    return RecordedAnswer(prompt_ids=prompt_ids, output_ids=output_ids, temperature=temperature)


def _temperature(given: object) -> float | None:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= _MOST_TEMPERATURE:
        return None
    return float(given)


def split_traffic(
    answers: Sequence[RecordedAnswer], *, learnt: Container[tuple[int, ...]] = frozenset()
) -> TrafficParts:
    """Deal answers out by a digest of their prompt: the same prompt goes the same way in every run.

    Arguments:
        learnt: prompts that are learnt from in any case, so that nothing is rated or checked with them.
    """
    parts = TrafficParts(learn=[], rate=[], check=[])
    for answer in answers:
        digest = hashlib.sha256(repr(answer.prompt_ids).encode()).digest()
        kind = -1 if answer.prompt_ids in learnt else int.from_bytes(digest[:4], "big") % _PARTS
        (parts.rate if kind == 0 else parts.check if kind == 1 else parts.learn).append(answer)
    return parts


def read_part(folder: Path) -> Iterator[RecordedAnswer]:
    """Yield the answers that `write_part` or `dspark-build data` wrote."""
    for index in range(load_manifest(folder).num_shards):
        if not shard_path(folder, index).exists():  # left out, or not made yet
            continue
        shard = AnswerShard.load(shard_path(folder, index))
        for i in range(len(shard)):
            ids, start = shard.sequence(i).tolist(), int(shard.prompt_len[i])
            yield RecordedAnswer(
                prompt_ids=tuple(ids[:start]),
                output_ids=tuple(ids[start:]),
                temperature=float(shard.temperature[i]),
            )


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
