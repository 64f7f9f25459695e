"""A real `tritonserver` and its clients beside the engine in process, for `bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import psutil
from dspark.errors import EngineError
from dspark.serving.process import ServerOptions, ServerProcess

__all__ = ["ServedEngine"]


class ServedEngine:
    """A server on free ports and a client process; a context manager.

    Arguments:
        settings: settings of the served model.
    """

    def __init__(self, settings: dict[str, object], *, progress: Callable[[str], None]) -> None:
        target = Path(str(settings["target"]))
        named = {**settings, "target": str(target.resolve()) if target.exists() else str(target)}
        options = ServerOptions(grpc_port=0, http_port=0, metrics_port=0)
        self._server = ServerProcess(options, settings=named, progress=progress)
        self._client: subprocess.Popen[str] | None = None

    def __enter__(self) -> ServedEngine:
        self._server.__enter__()
        try:
            self._client = subprocess.Popen(
                [sys.executable, "-m", "dspark_build.bench_streams", self._server.grpc_url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except BaseException:
            self._server.stop(drain_timeout_s=0.0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        client = self._client
        if client is not None and client.stdin is not None:
            client.stdin.close()
            try:
                client.wait(10.0)
            except subprocess.TimeoutExpired:
                client.kill()
                client.wait()
        self._server.__exit__(kind, value, traceback)

    def rate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Return output tokens per second of all prompts at once, plain greedy decoding, a stream for each.

        Raises:
            EngineError: a request failed; the client's words are on standard error.
        """
        client = self._client
        assert client is not None and client.stdin is not None and client.stdout is not None
        wanted = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens}
        client.stdin.write(json.dumps(wanted) + "\n")
        client.stdin.flush()
        line = client.stdout.readline()
        if not line:
            raise EngineError(f"the client ended with status {client.wait()}; its error is above")
        answer = json.loads(line)
        return float(answer["tokens"]) / float(answer["seconds"])

    def model_bytes(self) -> int:
        """Return the resident bytes of the process that holds the model: the largest below the server."""
        below = psutil.Process(self._server.pid).children(recursive=True)
        return max(int(process.memory_info().rss) for process in below)
