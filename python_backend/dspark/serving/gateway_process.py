"""The OpenAI-compatible gateway as a child process of `dspark serve`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

from dspark.errors import ConfigError, EngineError

__all__ = ["GatewayProcess"]

_START_TIMEOUT_S: Final = 30.0


class GatewayProcess:
    """See the module's text. A port is held from `start` to `stop`; the process may be started anew between.

    Arguments:
        grpc_url: of the server behind it.
        host, port: to listen on; not 0.
        model_name: what clients call the model.
        log_file: its log; appended to.
        drain_timeout_s: running answers may take so long to end when it stops.

    Raises:
        ConfigError: its packages are not installed.
    """

    def __init__(
        self,
        *,
        grpc_url: str,
        host: str,
        port: int,
        model_name: str,
        log_file: Path,
        drain_timeout_s: float,
    ) -> None:
        missing = [
            name for name in ("starlette", "uvicorn", "tritonclient") if not importlib.util.find_spec(name)
        ]
        if missing:
            raise ConfigError(
                f"openai-port: the gateway needs {', '.join(missing)}, not installed here; install "
                "dspark-triton[gateway]"
            )
        self.host = host
        self.port = port
        self.log_file = log_file
        self._command = [
            *(sys.executable, "-m", "dspark.gateway", "--url", grpc_url, "--host", host, "--port", str(port)),
            *(
                "--model-name",
                model_name,
                "--drain-timeout",
                str(int(drain_timeout_s)),
                "--parent",
                str(os.getpid()),
            ),
        ]
        self._drain_timeout_s = drain_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{host}:{self.port}/v1"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            EngineError: it ended, or never answered.
        """
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        end_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < end_s:
            if self._process.poll() is not None:
                break
            if self._answers():
                return
            time.sleep(0.05)
        self.stop(drain=False)
        raise EngineError(f"the gateway did not start; see {self.log_file}")

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        return None if self._process is None else self._process.poll()

    def fault(self) -> str | None:
        """Return why it serves no more, None while it does."""
        status = self.poll()
        return None if status is None else f"the gateway ended on its own with status {status}"

    def revive(self) -> None:
        """Start it anew. Raises EngineError."""
        self.start()

    def end(self) -> None:
        """Take no more requests; return at once."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def stop(self, *, drain: bool = True) -> None:
        """Stop it; with `drain` running answers may end first."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(self._drain_timeout_s + 2.0 if drain else 1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}/models", timeout=2.0):
                return True
        except (OSError, urllib.error.URLError):
            return False
