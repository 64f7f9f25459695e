"""Keeps served answers in a folder, from which the drafter can be retrained (setting `record`).

Each file begins with a line of format version and target; every further line is one answer, written whole:
`{"prompt_ids": [...], "output_ids": [...], "temperature": 0.7}`. Kept are answers that ended by themselves and that the
target drew from its own distribution. One thread writes; nothing here makes an answer wait or fail. What cannot be
written is dropped and counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dspark.config import ServeConfig
from dspark.errors import ConfigError
from dspark.request import RequestOutput, SamplingParams

__all__ = ["ServedAnswer", "TrafficRecorder", "open_recorder", "prepare_folder"]

_log: Final = logging.getLogger("dspark.serving")
_FORMAT_VERSION: Final = 1
_FILE_BYTES: Final = 16 << 20
_FILE_SHARE: Final = 8  # of what all files may take, one takes at most this part
_MOST_QUEUED: Final = 256
_LEAST_TOKENS: Final = 2  # the first comes from the prompt's pass; a drafter drafts those behind it
_RETRY_S: Final = 60.0
_CLOSE_S: Final = 5.0
_NAME: Final = re.compile(r"traffic-(\d+)-\d+\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAnswer:
    """One answer as it was sent; fields are those of its line."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]  # with the end token, where the target gave one
    temperature: float  # 0 = greedy


def prepare_folder(record: str) -> None:
    """Make the folder that setting `record` names, where it names one, and see that it can be written.

    Raises:
        ConfigError: naming the folder and what is wrong with it.
    """
    if record == "none":
        return
    folder = Path(record)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"record: got {record!r}, which cannot be written ({error.strerror}); allowed is none or a folder "
            "that this user may make and write"
        ) from error


def open_recorder(config: ServeConfig, *, target_hash: str) -> TrafficRecorder | None:
    """Start recording where the settings ask for it; None where nothing is kept.

    Arguments:
        target_hash: `TargetConfig.model_hash` of what is served.
    """
    if config.record == "none":
        return None
    _log.info(
        "record: token ids of prompts and answers are kept in %s (at most %d bytes) to retrain the drafter",
        config.record,
        config.record_bytes,
    )
    return TrafficRecorder(Path(config.record), target_hash=target_hash, most_bytes=config.record_bytes)


class TrafficRecorder:
    """See the module's text.

    A file that cannot be written is left, with one line in the log, and a new one is tried `retry_s` later. Two
    recorders may share a folder, as while a model is reloaded: each leaves room for the other's file. A file that was
    moved away or cut by somebody is left to him, and a new one is begun.

    Arguments:
        folder: exists and can be written, see `prepare_folder`. One that vanishes is not made again.
        most_bytes: what all files of the folder may take; the oldest go first.
        retry_s: seconds.
    """

    def __init__(self, folder: Path, *, target_hash: str, most_bytes: int, retry_s: float = _RETRY_S) -> None:
        self.num_recorded = 0  # answers written
        self.num_dropped = 0  # answers that should have been
        self._folder = folder
        self._header = _line({"format_version": _FORMAT_VERSION, "target_hash": target_hash})
        self._most_bytes = most_bytes
        self._file_bytes = min(_FILE_BYTES, most_bytes // _FILE_SHARE)
        self._retry_s = retry_s
        self._wake = threading.Condition()
        self._queue: deque[ServedAnswer] = deque()
        self._closed = False
        # Of the writing thread alone.
        self._file: int | None = None  # descriptor
        self._path = folder
        self._size = 0  # bytes of the file
        self._created_ms = 0
        self._resumes_s = -math.inf  # on time.monotonic()'s clock: when writing is tried again
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="dspark-record", daemon=True)
        self._thread.start()

    # ---- any thread ----

    def listen(
        self,
        emit: Callable[[RequestOutput], None],
        *,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
    ) -> Callable[[RequestOutput], None]:
        """Return what takes one request's outputs: passes them to `emit`, and records the answer when it is whole.

        Answers whose distribution is not the target's own (penalties, guides and whatever else the calibrator leaves
        aside) are not recorded.
        """
        if params.alters_logits:
            return emit
        output_ids: list[int] = []

        def take(output: RequestOutput) -> None:
            emit(output)
            output_ids.extend(output.token_ids)
            if output.finish_reason in ("stop", "length") and len(output_ids) >= _LEAST_TOKENS:
                self.add(
                    ServedAnswer(
                        prompt_ids=prompt_ids, output_ids=tuple(output_ids), temperature=params.temperature
                    )
                )

        return take

    def add(self, answer: ServedAnswer) -> None:
        """Have an answer written; never waits, never raises."""
        with self._wake:
            if self._closed or len(self._queue) >= _MOST_QUEUED:
                self.num_dropped += 1
                return
            self._queue.append(answer)
            self._wake.notify()

    def close(self) -> None:
        """Write what is queued and stop."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(_CLOSE_S)
        _log.info("record: %d answers kept, %d dropped", self.num_recorded, self.num_dropped)

    # ---- the writing thread ----

    def _run(self) -> None:
        while (answer := self._next()) is not None:
            self._write(answer)
        self._end_file()

    def _next(self) -> ServedAnswer | None:
        """Wait for an answer; None = closed, and all is written."""
        with self._wake:
            while not (self._queue or self._closed):
                self._wake.wait()
            return self._queue.popleft() if self._queue else None

    def _write(self, answer: ServedAnswer) -> None:
        written = False
        if time.monotonic() >= self._resumes_s:
            try:
                written = self._append(_answer_line(answer))
            except (
                Exception
            ) as error:  # whatever it is, the thread goes on and the next answer is tried later
                self._pause(error)
        with self._wake:  # `add` counts, too
            self.num_recorded += written
            self.num_dropped += not written

    def _append(self, line: bytes) -> bool:
        """Write one answer's line, into a new file where it must be; return False for one that no file can hold."""
        if len(self._header) + len(line) > self._file_bytes:
            return False
        if self._file is not None and (
            self._size + len(line) > self._file_bytes or not self._is_ours(self._file)
        ):
            self._end_file()
        if self._file is None:
            self._begin_file()
        self._put(line)
        if self._failing:
            self._failing = False
            _log.info("record: answers are kept again in %s", self._folder)
        return True

    def _is_ours(self, file: int) -> bool:
        """Return whether the file is where it was begun, as long as it was left: not removed, moved or cut."""
        try:
            there = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return False
        here = os.fstat(file)
        return os.path.samestat(here, there) and here.st_size == self._size

    def _pause(self, error: Exception) -> None:
        self._end_file()
        self._resumes_s = time.monotonic() + self._retry_s
        if not self._failing:
            self._failing = True
            _log.warning(
                "record: %s cannot be written (%s); serving goes on, answers are not kept meanwhile",
                self._folder,
                (isinstance(error, OSError) and error.strerror) or repr(error),
            )

    def _begin_file(self) -> None:
        self._make_room()
        self._created_ms = max(time.time_ns() // 1_000_000, self._created_ms + 1)
        while self._file is None:
            self._path = self._folder / f"traffic-{self._created_ms}-{os.getpid()}.jsonl"
            try:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                self._created_ms += 1
        self._size = 0
        self._put(self._header)

    def _put(self, data: bytes) -> None:
        """Write all of it or, where that fails, nothing."""
        assert self._file is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def _end_file(self) -> None:
        """Close the file, if there is one; one without answers goes."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            if self._size <= len(self._header) and self._is_ours(self._file):
                self._path.unlink()
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._file = None

    def _make_room(self) -> None:
        """Remove the oldest files, until a whole new one fits, and another recorder's."""
        found: list[tuple[int, Path, int]] = []  # creation, path, bytes
        for path in self._folder.iterdir():
            if name := _NAME.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found.append((int(name[1]), path, status.st_size))
        total = sum(size for _, _, size in found)
        for _, path, size in sorted(found):
            if total <= self._most_bytes - 2 * self._file_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def _answer_line(answer: ServedAnswer) -> bytes:
    """Return an answer's line; by hand, since `asdict` copies every id while the engine's thread waits for this one."""
    return _line(
        {
            "prompt_ids": answer.prompt_ids,
            "output_ids": answer.output_ids,
            "temperature": answer.temperature,
        }
    )


def _line(fields: dict[str, object]) -> bytes:
    return json.dumps(fields).encode() + b"\n"
