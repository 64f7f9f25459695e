"""A second way into the model's process: requests that another model of the same server hands in (`forward`).

Each request is one connection over a socket that only this user can open. It begins with a `Handed` and goes on with
`Answer`s up to a final one; whatever the other side says later, or its end, means that the client has left. What comes
out of the door looks like a request of Triton's, so that everything behind it is the same.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dspark.errors import ConfigError
from dspark.serving.watch import process_started

__all__ = ["Answer", "Door", "Handed", "HandedRequest", "door_path", "open_door"]

_log = logging.getLogger("dspark.serving")
_PATIENCE_S: Final = 5.0  # between a connection and its request, which are one call of the other side
_HUNG_AFTER_S: Final = (
    1.0  # of waiting for the other side to read, its buffer being full; nobody else is answered then
)
_STAYS_HUNG_S: Final = 5.0  # whoever has a full buffer is not waited for again within this
_BREATH_S: Final = 0.05  # before another try, with no file descriptor free
_STALE_S: Final = 60.0  # an age at which a door that is being opened is open
_BACKLOG: Final = 1024  # requests that come at once

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """One request as it crosses; everything as Triton gave it."""

    inputs: dict[str, Array]
    parameters: str  # JSON
    outputs: tuple[str, ...]
    request_id: str
    timeout_us: int
    trace: str | None  # context of Triton's span


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One response as it crosses; with `error`, its code and message, there are no outputs."""

    outputs: dict[str, Array]
    final: bool
    error: tuple[str, str] | None = None


def door_path(server_pid: int) -> Path:
    """Return where the door of a server's model is, in a folder of this user's alone.

    Both processes of a server find the same name, and no two servers share one, be they in containers that number
    processes alike and have one folder for temporary files: it is a digest of the machine's boot, the container's
    process ids, and the server's id and start among them.

    Raises:
        ConfigError: the folder is somebody else's, or others may write to it.
        OSError: it cannot be made.
    """
    folder = Path(tempfile.gettempdir()) / f"dspark-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or folder.is_symlink():
        raise ConfigError(
            f"{folder}: got one that others can use, allowed is a folder of mode 700 of this user's"
        )
    server = f"{os.readlink('/proc/self/ns/pid')} {server_pid} {process_started(server_pid)}"
    return folder / f"{_boot()}-{hashlib.sha256(server.encode()).hexdigest()[:16]}"


def _boot() -> str:
    """Return the start of what names this boot of this machine, which all of its containers share."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


@dataclass(slots=True)
class _OtherSide:
    """What is known of the process that hands in."""

    hung_until_s: float = 0.0  # on time.monotonic()'s clock


class HandedRequest:
    """What the model asks of a request, and its response sender, over the connection that it came by.

    One whose answers are not read counts as cancelled, since whoever sends for all requests must not wait for it.
    """

    def __init__(self, connection: Connection, handed: Handed, other_side: _OtherSide) -> None:
        self._connection = connection
        self._handed = handed
        self._other_side = other_side

    def inputs(self) -> list[Any]:
        given = self._handed.inputs.items()
        return [
            SimpleNamespace(name=lambda name=name: name, as_numpy=lambda array=array: array)
            for name, array in given
        ]

    def parameters(self) -> str:
        return self._handed.parameters

    def requested_output_names(self) -> tuple[str, ...]:
        return self._handed.outputs

    def request_id(self) -> str:
        return self._handed.request_id

    def timeout(self) -> int:
        return self._handed.timeout_us

    def trace(self) -> Any:
        return SimpleNamespace(get_context=lambda: self._handed.trace)

    # ---- its sender; of the outbox's thread alone ----

    def send(self, arrays: Mapping[str, npt.NDArray[np.generic]], *, final: bool) -> None:
        self._answer(Answer(outputs=dict(arrays), final=final))

    def fail(self, code: str, message: str) -> None:
        self._answer(Answer(outputs={}, final=True, error=(code, message)))

    def is_cancelled(self) -> bool:
        return self._connection.closed or self._connection.poll(0)

    def _answer(self, answer: Answer) -> None:
        try:
            if time.monotonic() < self._other_side.hung_until_s and not _takes(self._connection):
                raise BlockingIOError
            self._connection.send(answer)
        except OSError as error:  # the other side has ended, or hangs with a part of this
            if isinstance(error, BlockingIOError):
                self._other_side.hung_until_s = time.monotonic() + _STAYS_HUNG_S
                _log.error("vllm_model reads no answers; a request of it is dropped")
            self._connection.close()  # which is_cancelled tells
        if answer.final:
            self._connection.close()


class Door:
    """Listens until it is closed.

    Arguments:
        path: of the socket; one that is there belongs to a model that is being replaced.
        take: gets each request, in the door's thread; never raises.
    """

    def __init__(self, path: Path, take: Callable[[HandedRequest], object]) -> None:
        _sweep(path.parent)
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(fresh))
        self._socket.listen(_BACKLOG)
        self._inode = fresh.stat().st_ino
        fresh.replace(path)
        self._path = path
        self._take = take
        self._closing = False
        self._other_side = _OtherSide()
        self._thread = threading.Thread(target=self._run, name="dspark-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more; requests that are in go on."""
        self._closing = True
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:  # else a successor's
                self._path.unlink()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, as closing does not
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._closing:
            try:
                accepted, _ = self._socket.accept()
            except OSError:  # closed, or no file descriptor is free
                time.sleep(0.0 if self._closing else _BREATH_S)
                continue
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_HUNG_AFTER_S))
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(_PATIENCE_S))
            connection = Connection(accepted.detach())
            try:
                handed = connection.recv() if connection.poll(_PATIENCE_S) else None
            except (OSError, EOFError):  # whoever knocked has gone
                handed = None
            except Exception:  # what cannot be unpickled; the next one may be right
                _log.exception("what came in by the door is no request")
                handed = None
            if handed is None:
                connection.close()
            else:
                self._take(HandedRequest(connection, handed, self._other_side))


def open_door(server_pid: int, take: Callable[[HandedRequest], object]) -> Door | None:
    """Return the door of a server's model; None, said in the log, where it cannot be: the model serves without."""
    try:
        return Door(door_path(server_pid), take)
    except (OSError, ConfigError) as error:
        _log.error("vllm_model cannot reach this model: %s", error)
        return None


def _takes(connection: Connection) -> bool:
    """Say whether an answer can be sent without waiting; a closed connection takes it, with an error."""
    if connection.closed:
        return True
    poll = select.poll()  # unlike select.select with any file descriptor
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(0))


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def _sweep(folder: Path) -> None:
    """Remove the doors of servers that were killed: nobody listens there. One that is just being opened is left."""
    for door in folder.glob(f"{_boot()}-*"):
        with contextlib.suppress(OSError):  # another sweeps, too; or it is no socket
            if time.time() - door.lstat().st_mtime > _STALE_S and not _is_answered(door):
                door.unlink(missing_ok=True)


def _is_answered(door: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        knock.setblocking(False)  # a full queue of those who knock is a sign of life
        return knock.connect_ex(str(door)) != errno.ECONNREFUSED
