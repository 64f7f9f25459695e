"""`dspark serve`: start a server, say where it listens, stop it cleanly on SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from dspark.config import DTYPES, EXECUTORS, load_serve_config
from dspark.errors import ConfigError, DSparkError
from dspark.serving.contract import MODEL_NAME
from dspark.serving.paths import default_model_repository, resolve_paths
from dspark.serving.process import ServerOptions, ServerProcess

__all__ = ["add_serve_arguments", "run_serve"]

_SETTINGS: Final = (
    "target",
    "drafter",
    "dtype",
    "executor",
    "policy",
    "max_batch_size",
    "max_context_len",
    "max_step_tokens",
    "cache_bytes",
    "num_threads",
    "max_queue_size",
)


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dspark serve`."""
    model = parser.add_argument_group(
        "model (what is not given comes from DSPARK_* variables and model.yaml)"
    )
    model.add_argument("--target", metavar="DIR|FILE.gguf", help="the model to serve")
    model.add_argument("--drafter", metavar="DIR|none|ngram|auto", help="what proposes tokens")
    model.add_argument("--dtype", choices=DTYPES)
    model.add_argument("--executor", choices=EXECUTORS)
    model.add_argument(
        "--policy", metavar="auto|none|fixed:K|threshold:P", help="how many drafts are verified"
    )
    model.add_argument("--max-batch-size", type=int, metavar="R", help="sequences decoded together")
    model.add_argument("--max-context-len", type=int, metavar="N", help="tokens of prompt and answer")
    model.add_argument("--max-step-tokens", type=int, metavar="N", help="prompt tokens computed in one step")
    model.add_argument("--max-queue-size", type=int, metavar="N", help="requests that may wait")
    model.add_argument("--cache-bytes", metavar="BYTES", help="all caches together, e.g. 1GiB")
    model.add_argument("--num-threads", type=int, metavar="N", help="0 = one per core")
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    for name, port in (("grpc", 8001), ("http", 8000), ("metrics", 8002)):
        server.add_argument(
            f"--{name}-port",
            type=int,
            default=port,
            metavar="PORT",
            help="0 = a free one (default: %(default)s)",
        )
    server.add_argument("--model-repository", type=Path, metavar="DIR", help="default: the clone's")
    server.add_argument(
        "--log-file", type=Path, metavar="FILE", help="the server's log (default: .dspark/logs/)"
    )
    server.add_argument(
        "--start-timeout", type=float, default=600.0, metavar="SECONDS", help="default: %(default)g"
    )
    server.add_argument(
        "--drain-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long running requests may take to end when the server stops (default: %(default)g)",
    )
    server.add_argument(
        "--run",
        metavar="COMMAND",
        help="run this command when the server is ready (it finds the address in DSPARK_URL), stop the server "
        "when it ends, and return its exit status",
    )
    server.add_argument(
        "--triton-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="passed on to tritonserver; may be repeated",
    )


def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal comes; return 0 stopped as asked, 1 failed, 2 cannot be started so."""
    stop = _StopSignals()
    try:
        server = ServerProcess(options=_options(args), settings=_checked_settings(args), progress=_say)
    except DSparkError as error:
        _say(f"error: {error}")
        return 2
    try:
        with stop.installed():
            server.start()
            with stop.interrupting():
                server.wait_ready()
            _announce(server)
            if args.run is not None:
                return _run_command(args.run, server, stop)
            status = _wait(server, stop)
            return _stop(server, stop) if status is None else _ended(server, status)
    except _Stopped:
        _say("stopped while loading")
        return 0
    except DSparkError as error:
        _say(f"error: {error}")
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        server.stop(drain_timeout_s=0.0)


def _options(args: argparse.Namespace) -> ServerOptions:
    return ServerOptions(
        host=args.host,
        grpc_port=args.grpc_port,
        http_port=args.http_port,
        metrics_port=args.metrics_port,
        model_repository=args.model_repository,
        log_file=args.log_file,
        start_timeout_s=args.start_timeout,
        drain_timeout_s=args.drain_timeout,
        triton_arguments=tuple(args.triton_arg),
    )


def _checked_settings(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings given as options, after reading all of them as the model will.

    Raises:
        ConfigError: listing every problem, before any server is started.
    """
    given = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None}
    version_dir = (args.model_repository or default_model_repository()) / MODEL_NAME / "1"
    model_yaml = version_dir / "model.yaml"
    config = load_serve_config(model_yaml if model_yaml.is_file() else None, given)
    resolved = resolve_paths(config, base=version_dir)
    if Path(resolved.target).suffix == ".gguf" and not Path(resolved.target).is_file():
        raise ConfigError(
            f"target: got {config.target}, which is not there; allowed is a Hugging Face folder, a .gguf "
            "file or a hub name (`make setup` fetches the demo model)"
        )
    # Absolute from here on: the server may run in another working folder.
    given.update(target=resolved.target, drafter=resolved.drafter)
    return given


class _Stopped(BaseException):
    """A signal came while the server was loading."""


class _StopSignals:
    """SIGINT and SIGTERM as an event. A second signal means: do not wait for running requests."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.count = 0
        self._interrupts = False

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.asked.set()
        if self._interrupts:
            self._interrupts = False
            raise _Stopped

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Catch the signals for the length of a `with` block."""
        before = {number: signal.signal(number, self.handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise _Stopped when a signal comes in this `with` block, or came before it."""
        self._interrupts = True
        try:
            if self.asked.is_set():
                raise _Stopped
            yield
        finally:
            self._interrupts = False


def _wait(server: ServerProcess, stop: _StopSignals) -> int | None:
    """Wait for a signal (None) or for the server to end on its own (its exit status)."""
    while not stop.asked.wait(0.5):
        status = server.poll()
        if status is not None:
            return status
    return None


def _run_command(command: str, server: ServerProcess, stop: _StopSignals) -> int:
    """Run a command beside the server; return its exit status once both have ended."""
    environment = {**os.environ, "DSPARK_URL": server.grpc_url}
    with subprocess.Popen(shlex.split(command), env=environment) as process:
        while process.poll() is None:
            if stop.asked.wait(0.1):
                process.terminate()
                break
        status = process.wait()
    _stop(server, stop)
    return status


def _stop(server: ServerProcess, stop: _StopSignals) -> int:
    _say("stopping: running requests may end (once more Ctrl-C: at once)")
    drained = threading.Thread(target=server.stop, name="dspark-stop")
    drained.start()
    while drained.is_alive():
        drained.join(0.1)
        if stop.count > 1:
            server.hurry()
    _say("stopped")
    return 0


def _ended(server: ServerProcess, status: int) -> int:
    _say(f"error: tritonserver ended on its own with status {status}; see {server.log_path}")
    return 1


def _announce(server: ServerProcess) -> None:
    _say(f"ready: grpc {server.grpc_url}, http {server.http_url}, metrics {server.metrics_url}")
    _say(f'try: dspark-client generate --url {server.grpc_url} "Once upon a time"')


def _say(message: str) -> None:
    print(f"dspark serve: {message}", file=sys.stderr, flush=True)
