"""One `tritonserver` with the dspark model: started, waited for, drained, stopped, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from dspark.errors import ConfigError, EngineError
from dspark.serving.contract import MODEL_NAME, UNBATCHED_MODEL_NAME
from dspark.serving.paths import default_model_repository, state_dir
from dspark.serving.spans import ENDPOINT_VARIABLE
from dspark.serving.tritonserver import TritonInstall, find_tritonserver
from dspark.serving.watch import RUN_DIR_VARIABLE, RunDir

__all__ = ["ServerOptions", "ServerProcess", "choose_ports"]

_POLL_S: Final = 0.05
# Lines of the server's log that our model wrote: I1129 20:30:11.123456 4711 triton_model.py:180] "reading
# ..."
_MODEL_LINE: Final = re.compile(r'^[IWE]\d{4} \S+ \d+ triton_model\.py:\d+\] "?(.*?)"?$')
# One line, line ends escaped; behind the message comes where it was raised.
_LOAD_ERROR: Final = re.compile(
    rf"failed to load '{MODEL_NAME}' version \d+: (?:\w+: )?(?:TritonModelException: )?(.*?)(?:\\n\\nAt:|\"?$)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a server is started. A port of 0 takes a free one."""

    host: str = "127.0.0.1"
    grpc_port: int = 8001
    http_port: int = 8000
    metrics_port: int = 8002
    model_repository: Path | None = None  # None = the clone's
    log_file: Path | None = None  # None = in the state folder
    start_timeout_s: float = 600.0
    drain_timeout_s: float = 60.0  # running requests may take so long to end when the server stops
    kill_timeout_s: float = 5.0  # then the server may take so long to exit before it is killed
    otlp_url: str | None = None  # where spans of requests go; None = nowhere
    trace_rate: int = 1  # one request in so many is traced
    triton_arguments: tuple[str, ...] = ()

    def trace_arguments(self) -> tuple[str, ...]:
        """Return what makes Triton send its own spans."""
        if self.otlp_url is None:
            return ()
        settings = (
            "mode=opentelemetry",
            "level=TIMESTAMPS",
            f"rate={self.trace_rate}",
            f"opentelemetry,url={self.otlp_url}",
            "opentelemetry,resource=service.name=dspark",
            "opentelemetry,bsp_schedule_delay=1000",
        )
        return tuple(f"--trace-config={setting}" for setting in settings)


@dataclass(slots=True)
class ServerProcess:
    """A running server; a context manager that starts on entry and stops on exit.

    Arguments:
        settings: settings of the model that win over model.yaml ("target", "drafter", ...); None = not given.
        progress: told what happens while the server starts and stops.
    """

    options: ServerOptions = ServerOptions()
    settings: Mapping[str, object] = field(default_factory=dict)
    progress: Callable[[str], None] = lambda _message: None
    grpc_port: int = field(default=0, init=False)
    http_port: int = field(default=0, init=False)
    metrics_port: int = field(default=0, init=False)
    log_path: Path = field(default=Path(), init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _run_dir: RunDir | None = field(default=None, init=False)
    _hurry: threading.Event = field(default_factory=threading.Event, init=False)

    def __enter__(self) -> ServerProcess:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop(drain_timeout_s=0.0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(drain_timeout_s=self.options.drain_timeout_s if kind is None else 0.0)

    @property
    def grpc_url(self) -> str:
        return f"{self._reachable_host}:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        return f"http://{self._reachable_host}:{self.http_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self._reachable_host}:{self.metrics_port}/metrics"

    @property
    def pid(self) -> int:
        """Process id of the server.

        Raises:
            EngineError: when it was not started.
        """
        return self._running_process().pid

    def poll(self) -> int | None:
        """Return the server's exit status, None while it runs."""
        return self._running_process().poll()

    # ---- start ----

    def start(self) -> None:
        """Start the server and return at once.

        Raises:
            ConfigError: no server found, a port that is taken, no such model repository, a folder that cannot be
                written.
        """
        try:
            self._start()
        except OSError as error:
            raise ConfigError(
                f"{error.filename or state_dir()}: {error.strerror}; allowed is a state folder {state_dir()} (and a "
                "--log-file) that can be written, with space left"
            ) from error

    def _start(self) -> None:
        install = find_tritonserver()
        repository = self._checked_repository()
        self.grpc_port, self.http_port, self.metrics_port = choose_ports(
            self.options.host,
            {
                "grpc-port": self.options.grpc_port,
                "http-port": self.options.http_port,
                "metrics-port": self.options.metrics_port,
            },
        )
        run_root = state_dir() / "run"
        run_root.mkdir(parents=True, exist_ok=True)
        RunDir.sweep(run_root)
        path = Path(tempfile.mkdtemp(prefix="server-", dir=run_root))
        self._run_dir = RunDir.create(path, overrides=self.settings)
        self.log_path = self.options.log_file or state_dir() / "logs" / f"tritonserver-{self.grpc_port}.log"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.progress(f"starting {install.binary} (log: {self.log_path})")
        if self.log_path.exists():  # of an earlier server: the last words of one that died
            self.log_path.replace(self.log_path.with_name(self.log_path.name + ".previous"))
        with self.log_path.open("wb") as log:
            self._process = self._spawn(install, repository, log)

    def restart(self) -> None:
        """Kill what is left and start anew on the same ports; return at once.

        Raises:
            ConfigError: as `start`.
        """
        if self._process is not None:
            self._kill_group(self._process)
            self._process.wait()
        self._clean_up()
        self.options = replace(
            self.options, grpc_port=self.grpc_port, http_port=self.http_port, metrics_port=self.metrics_port
        )
        self.start()

    def revive(self) -> None:
        """Start anew and wait until the model answers. Raises ConfigError, EngineError."""
        self.restart()
        self.wait_ready()

    def fault(self) -> str | None:
        """Return why the server can serve no more, None while it can. Costs two system calls."""
        status = self.poll()
        if status is not None:
            return f"tritonserver ended on its own with status {status}"
        if self._run_dir is not None and self._run_dir.model_was_lost:
            dead = self._run_dir.was_said("dead")
            return "the engine died" if dead else "the model's process was lost"
        return None

    def wait_ready(self) -> None:
        """Wait until the model answers, telling the progress of loading.

        Raises:
            EngineError: the server ended or took longer than `start_timeout_s`; with the model's own words.
        """
        end_s = time.monotonic() + self.options.start_timeout_s
        told = 0
        while True:
            # In this order: what the server wrote before it ended is then in what is read below.
            status = self.poll()
            ready = status is None and self.is_ready()
            told = self._tell_progress(told)
            if ready:
                return
            if status is not None:
                raise EngineError(
                    f"tritonserver ended with status {status} while loading: {self.failure_reason()}"
                )
            if time.monotonic() > end_s:
                raise EngineError(
                    f"the model was not ready after {self.options.start_timeout_s:g} s; see {self.log_path}"
                )
            time.sleep(_POLL_S)

    def is_ready(self) -> bool:
        """Ask the server whether the model is ready."""
        return self._http(f"/v2/models/{MODEL_NAME}/ready", timeout_s=2.0) is not None

    def failure_reason(self) -> str:
        """Return why loading failed, from the server's log: the model's own words where there are any."""
        text = self.log_path.read_text(errors="replace")
        match = _LOAD_ERROR.search(text)
        if match is not None:
            return match[1].replace("\\n", "\n").replace('\\"', '"').strip()
        errors = [line for line in text.splitlines() if re.match(r"E\d{4} |error", line)]
        lines = errors[-5:] or text.splitlines()[-5:]
        return "\n".join([*lines, f"(the whole log: {self.log_path})"])

    def _checked_repository(self) -> Path:
        repository = (self.options.model_repository or default_model_repository()).resolve()
        if not (repository / MODEL_NAME / "config.pbtxt").is_file():
            raise ConfigError(
                f"model-repository: got {repository}, allowed is a folder with {MODEL_NAME}/config.pbtxt"
            )
        return repository

    def _spawn(self, install: TritonInstall, repository: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
        assert self._run_dir is not None
        options = self.options
        exit_timeout_s = int(options.kill_timeout_s) + 30
        command = [
            str(install.binary),
            f"--model-repository={repository}",
            "--model-control-mode=explicit",
            f"--load-model={MODEL_NAME}",
            *_unbatched_arguments(repository),
            f"--http-address={options.host}",
            f"--http-port={self.http_port}",
            f"--grpc-address={options.host}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-address={options.host}",
            f"--metrics-port={self.metrics_port}",
            f"--exit-timeout-secs={exit_timeout_s}",
            f"--backend-config=python,shm-region-prefix-name={self._run_dir.shm_prefix}",
            *options.trace_arguments(),
            *options.triton_arguments,
        ]
        if install.backend_dir is not None:
            command.insert(1, f"--backend-directory={install.backend_dir}")
        environment = install.environment()
        environment[RUN_DIR_VARIABLE] = str(self._run_dir.path)
        if options.otlp_url is not None:
            environment[ENDPOINT_VARIABLE] = options.otlp_url  # the model sends the spans of its own
        # A session of its own: Ctrl-C in the terminal is for the launcher, which drains first.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )

    def _tell_progress(self, told: int) -> int:
        """Pass on what the model logged since line `told`; return the number of whole lines seen."""
        lines = self.log_path.read_text(errors="replace").split("\n")[:-1]
        for line in lines[told:]:
            match = _MODEL_LINE.match(line)
            if match is not None and line[0] != "E":  # errors are told once, by whoever waits
                self.progress(match[1])
        return len(lines)

    # ---- stop ----

    def stop(self, *, drain_timeout_s: float | None = None) -> bool:
        """Take nothing new, let what runs end, stop the server; return whether every request could end.

        Arguments:
            drain_timeout_s: how long running requests may take; the rest gets an error. None = as the options
                say.
        """
        drained = True
        if self._process is not None and self._process.poll() is None:
            drained = self._drain(
                self.options.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
            )
            self._end(self._process)
        elif self._process is not None:
            self._kill_group(self._process)  # a model process that has not noticed its server's end
        self._clean_up()
        return drained

    def hurry(self) -> None:
        """Cut short the drain of a `stop` that another thread is in: what still runs gets an error now."""
        self._hurry.set()

    def _drain(self, timeout_s: float) -> bool:
        """Drain the model, by our own means: Triton's unload and exit both hang on a client's idle stream."""
        if not self.is_ready():  # still loading, or lost: nothing can be open
            return True
        assert self._run_dir is not None
        try:
            self._run_dir.say("drain")
        except OSError:  # a disk that is full or read-only by now: stopping must not depend on it
            return False
        if self._wait_drained(timeout_s):
            return True
        self._run_dir.say("stop")
        self._hurry.clear()
        self._wait_drained(self.options.kill_timeout_s)
        return False

    def _wait_drained(self, timeout_s: float) -> bool:
        assert self._run_dir is not None
        end_s = time.monotonic() + timeout_s
        while self.poll() is None:
            if self._run_dir.was_said("drained"):
                return True
            if time.monotonic() >= end_s or self._hurry.is_set():
                return False
            time.sleep(_POLL_S)
        return False

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(self.options.kill_timeout_s)
        except subprocess.TimeoutExpired:
            # It waits for clients that keep their streams open; no answer is owed to them any more.
            self.progress("ending tritonserver, which waits for idle clients")
        self._kill_group(process)
        process.wait()

    @staticmethod
    def _kill_group(process: subprocess.Popen[bytes]) -> None:
        """Kill the server and the model's process, should the server have left it behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def _clean_up(self) -> None:
        if self._run_dir is not None:
            self._run_dir.remove()
            self._run_dir = None

    # ---- small things ----

    @property
    def _reachable_host(self) -> str:
        return "127.0.0.1" if self.options.host == "0.0.0.0" else self.options.host

    def _running_process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise EngineError("the server was not started")
        return self._process

    def _http(self, path: str, *, body: object = None, timeout_s: float) -> bytes | None:
        """Return the body of a good answer, None for any other and where nobody answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.http_url + path, data=data)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout_s) as response:
                content: bytes = response.read()
                return content
        except (OSError, urllib.error.URLError):
            return None


def _unbatched_arguments(repository: Path) -> tuple[str, ...]:
    """Return what loads the model for clients without a batch dimension, where the repository has it."""
    there = (repository / UNBATCHED_MODEL_NAME / "config.pbtxt").is_file()
    return (f"--load-model={UNBATCHED_MODEL_NAME}",) if there else ()


def choose_ports(host: str, wanted: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ports, free ones in place of 0; all are held until the last is chosen, so that they differ.

    Raises:
        ConfigError: naming a port that is out of range or taken.
    """
    with contextlib.ExitStack() as held:
        ports = []
        for name, port in wanted.items():
            if not 0 <= port <= 65535:
                raise ConfigError(f"{name}: got {port}, allowed is 0 (a free one) to 65535")
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen(1)
            except OSError as error:
                raise ConfigError(
                    f"{name}: got {port} on {host}, which cannot be used ({error.strerror}); allowed is a "
                    "free port, or 0 to let one be chosen"
                ) from None
            ports.append(probe.getsockname()[1])
    return tuple(ports)
