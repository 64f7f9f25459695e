"""What launcher and model process tell each other beside Triton, and what keeps either from outliving the other.

Three gaps of Triton are closed here. Its Python backend leaves a model process behind when the server is
killed. It cannot be told to drain: an unload, and SIGTERM as well, wait for ever for a client that keeps a
finished stream open. And a model cannot be told that the time to drain is over. One daemon thread in the
model process looks around five times a second: at its server, at its launcher, and at the files of a folder
that the launcher made.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

__all__ = ["RUN_DIR_VARIABLE", "RunDir", "Served", "process_started", "watch_parents"]

# Not DSPARK_...: those are settings of the model.
RUN_DIR_VARIABLE: Final = "_DSPARK_RUN_DIR"
_INTERVAL_S: Final = 0.2
_GRACE_S: Final = 5.0
_STALE_S: Final = 60.0
_PROCESS: Final = "process."  # start of the names of files that say who runs

_log = logging.getLogger("dspark.serving")


class Served(Protocol):
    """What can be asked of a model, from the watching thread; each call returns at once."""

    def begin_drain(self) -> None:
        """Take no more requests."""

    def stop_running(self) -> None:
        """Fail every open request."""

    def num_open(self) -> int:
        """Return the number of requests without a final answer."""

    def is_dead(self) -> bool:
        """Say whether it was loaded and its engine has died since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """The launcher's folder. It says `drain`, then perhaps `stop`; the model says `drained`, or `dead`.

    The model's process writes down who it is, since the server notices neither its end nor its engine's.

    `overrides` are the settings given on the launcher's command line; they win over the model's own files.
    """

    path: Path
    launcher_pid: int
    launcher_started: str  # tells the launcher from a later process of the same id
    overrides: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def create(cls, path: Path, *, overrides: Mapping[str, object]) -> RunDir:
        """Write the folder of this process, which is the launcher."""
        pid = os.getpid()
        run_dir = cls(
            path=path, launcher_pid=pid, launcher_started=process_started(pid) or "", overrides=overrides
        )
        content = {"pid": pid, "started": run_dir.launcher_started, "overrides": dict(overrides)}
        try:
            (path / "run.json").write_text(json.dumps(content, default=str))
        except OSError:
            run_dir.remove()
            raise
        return run_dir

    @classmethod
    def of_environment(cls) -> RunDir | None:
        """Return the launcher's folder; None when the server was started without the launcher."""
        given = os.environ.get(RUN_DIR_VARIABLE)
        if not given:
            return None
        content = json.loads((Path(given) / "run.json").read_text())
        return cls(
            path=Path(given),
            launcher_pid=content["pid"],
            launcher_started=content["started"],
            overrides=content["overrides"],
        )

    @classmethod
    def sweep(cls, root: Path) -> None:
        """Remove what launchers left that were killed together with their servers, shared memory included.

        A folder that has just been made is left alone, since its launcher may be about to write into it, and so is one
        whose server has not ended yet.
        """
        for path in root.iterdir():
            with contextlib.suppress(OSError, ValueError, KeyError):
                content = json.loads((path / "run.json").read_text())
                old = time.time() - path.stat().st_mtime > _STALE_S
                processes = [content, *(_read(one) for one in path.glob(f"{_PROCESS}*"))]
                lives = any(one and process_started(one["pid"]) == one["started"] for one in processes)
                if old and not lives:
                    cls(path=path, launcher_pid=0, launcher_started="").remove()

    @property
    def launcher_lives(self) -> bool:
        return process_started(self.launcher_pid) == self.launcher_started

    def say(self, word: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # the other side has cleaned up
            (self.path / word).touch()

    def was_said(self, word: str) -> bool:
        return (self.path / word).exists()

    def process_begins(self, name: str) -> None:
        """Write down that this process is the one of a model."""
        pid = os.getpid()
        fresh = self.path / f"new.{pid}"
        with contextlib.suppress(FileNotFoundError):  # the launcher has cleaned up
            fresh.write_text(json.dumps({"pid": pid, "started": process_started(pid)}))
            os.replace(fresh, self.path / f"{_PROCESS}{name}")

    def process_ends(self, name: str) -> None:
        """Say that this process ends as it should."""
        path = self.path / f"{_PROCESS}{name}"
        with contextlib.suppress(FileNotFoundError):
            if _read(path).get("pid") == os.getpid():
                path.unlink()

    @property
    def model_was_lost(self) -> bool:
        """True when a model's process has ended without saying so, or the engine has died."""
        processes = (_read(path) for path in self.path.glob(f"{_PROCESS}*"))
        return self.was_said("dead") or any(
            process and process_started(process["pid"]) != process["started"] for process in processes
        )

    @property
    def shm_prefix(self) -> str:
        """Start of the names of the server's shared memory regions."""
        return f"dspark-{self.path.name}"

    def remove(self) -> None:
        """Remove the folder, and the shared memory that a killed server leaves behind."""
        for region in Path("/dev/shm").glob(f"{self.shm_prefix}*"):
            region.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)


def watch_parents(run_dir: RunDir | None, served: Served | None, *, name: str) -> None:
    """Start the watch of a model process: exit with the server, end the server with its launcher, drain and stop.

    Arguments:
        served: None leaves server and launcher to the process that serves, and only exits with the server.
        name: tells this process from others of the same server.
    """
    if run_dir is not None:
        run_dir.process_begins(name)
    threading.Thread(
        target=_watch, args=(os.getppid(), run_dir, served), name="dspark-watch", daemon=True
    ).start()


def _watch(server_pid: int, run_dir: RunDir | None, served: Served | None) -> None:
    while os.getppid() == server_pid:
        time.sleep(_INTERVAL_S)
        if run_dir is None or served is None:
            continue
        if served.is_dead():
            run_dir.say("dead")
        if not run_dir.launcher_lives:
            _log.warning("the launcher has gone: ending the server")
            served.stop_running()
            _end_server(server_pid, run_dir)
        if run_dir.was_said("drain"):
            _drain(server_pid, run_dir, served)
            return
    os._exit(1)


def _drain(server_pid: int, run_dir: RunDir, served: Served) -> None:
    """Take no more requests, say when the last has ended; stay until the server goes."""
    served.begin_drain()
    stopped = drained = False
    while os.getppid() == server_pid:
        if not stopped and (run_dir.was_said("stop") or not run_dir.launcher_lives):
            stopped = True
            _log.warning("the time to drain is over: failing %d open requests", served.num_open())
            served.stop_running()
        if not drained and served.num_open() == 0:
            drained = True
            run_dir.say("drained")
        if not run_dir.launcher_lives:
            _end_server(server_pid, run_dir)
        time.sleep(_INTERVAL_S / 10)
    os._exit(1)


def _end_server(server_pid: int, run_dir: RunDir) -> None:
    """End the server that started this process and clean up, since the launcher cannot; then end this process."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(server_pid, number)
        end_s = time.monotonic() + _GRACE_S
        while time.monotonic() < end_s and os.getppid() == server_pid:
            time.sleep(0.05)
    run_dir.remove()
    os._exit(1)


def _read(path: Path) -> dict[str, Any]:
    """Return what a file of the folder holds; nothing where it has gone."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return content


def process_started(pid: int) -> str | None:
    """Return when a process started (clock ticks since boot), None when it has ended (zombies have)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
