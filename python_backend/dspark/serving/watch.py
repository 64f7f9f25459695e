"""Keeps a model process from outliving its server, and its server from outliving the launcher.

Triton's Python backend leaves a model process behind when the server is killed; the launcher cannot reach
the model when the time to drain is over. Both are cured by one daemon thread that looks around twice a
second.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["RUN_DIR_VARIABLE", "RunDir", "watch_parents"]

# Not DSPARK_...: those are settings of the model.
RUN_DIR_VARIABLE: Final = "_DSPARK_RUN_DIR"
_INTERVAL_S: Final = 0.5
_GRACE_S: Final = 10.0

_log = logging.getLogger("dspark.serving")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """What launcher and model tell each other, as files of one folder.

    `overrides` are the settings given on the launcher's command line; they win over the model's own files.
    """

    path: Path
    launcher_pid: int
    overrides: Mapping[str, object] = field(default_factory=dict)

    def write(self) -> None:
        content = {"launcher_pid": self.launcher_pid, "overrides": dict(self.overrides)}
        (self.path / "run.json").write_text(json.dumps(content, default=str))

    @classmethod
    def of_environment(cls) -> RunDir | None:
        """Return the launcher's folder; None when the server was started without the launcher."""
        given = os.environ.get(RUN_DIR_VARIABLE)
        if not given:
            return None
        path = Path(given)
        content = json.loads((path / "run.json").read_text())
        return cls(path=path, launcher_pid=content["launcher_pid"], overrides=content["overrides"])

    def ask_to_stop(self) -> None:
        """Ask the model to fail what is still running."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / "stop").touch()

    @property
    def stop_asked(self) -> bool:
        return (self.path / "stop").exists()


def watch_parents(run_dir: RunDir | None, *, on_stop: Callable[[], None]) -> threading.Thread:
    """Start the watch: exit with the server, end the server with its launcher, stop when asked.

    `on_stop` is called once, from the watching thread.
    """
    server_pid = os.getppid()
    thread = threading.Thread(
        target=_watch, args=(server_pid, run_dir, on_stop), name="dspark-watch", daemon=True
    )
    thread.start()
    return thread


def _watch(server_pid: int, run_dir: RunDir | None, on_stop: Callable[[], None]) -> None:
    stopped = False
    while True:
        time.sleep(_INTERVAL_S)
        if os.getppid() != server_pid:
            os._exit(1)
        if run_dir is None:
            continue
        launcher_gone = not _is_running(run_dir.launcher_pid)
        if not stopped and (launcher_gone or run_dir.stop_asked):
            stopped = True
            _log.warning(
                "stopping: %s", "the launcher has gone" if launcher_gone else "the time to drain is over"
            )
            on_stop()
        if launcher_gone:
            _end_server(server_pid)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _end_server(server_pid: int) -> None:
    """End the server that started this process, and with it this process."""
    for sig, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        if os.getppid() != server_pid:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(server_pid, sig)
        end_s = time.monotonic() + patience_s
        while time.monotonic() < end_s and os.getppid() == server_pid:
            time.sleep(0.1)
    os._exit(1)
