"""A real tritonserver with a tiny model, and a client that shows every response."""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as grpc_client
from dspark.serving.contract import (
    INPUTS_BY_NAME,
    MODEL_NAME,
    UNBATCHED_MODEL_NAME,
    config_pbtxt,
    unbatched_config_pbtxt,
)
from dspark.serving.process import ServerOptions, ServerProcess
from dspark.serving.watch import RUN_DIR_VARIABLE

from support.tiny_drafters import write_good_drafter
from support.tiny_models import write_tiny_target

ROOT = Path(__file__).parents[2]
CONTEXT_LEN = 4096
SETTINGS: dict[str, object] = {
    "drafter": "auto",
    "policy": "fixed:4",
    "dtype": "float32",
    "num_threads": 1,
    "cache_bytes": 1 << 26,
}


def make_repository(folder: Path) -> Path:
    """Write a tiny target and a model repository that serves it; return the repository."""
    target = write_tiny_target(folder / "target", with_tokenizer=True, max_context_len=CONTEXT_LEN, scale=2.0)
    version = folder / "repository" / "dspark" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(config_pbtxt())
    shutil.copy(Path(__file__).with_name("server_model.py"), version / "model.py")
    unbatched = folder / "repository" / UNBATCHED_MODEL_NAME
    (unbatched / "1").mkdir(parents=True)
    (unbatched / "config.pbtxt").write_text(unbatched_config_pbtxt())
    shutil.copy(
        ROOT / "model_repository" / UNBATCHED_MODEL_NAME / "1" / "model.py", unbatched / "1" / "model.py"
    )
    write_good_drafter(version / "drafter", target)  # what `auto` finds
    lines = [f"{name}: {value}" for name, value in {"target": target, **SETTINGS}.items()]
    (version / "model.yaml").write_text("\n".join(lines) + "\n")
    return folder / "repository"


def server_process(
    repository: Path, *, settings: dict[str, object] | None = None, **options: Any
) -> ServerProcess:
    log_file = repository.parent / f"server-{time.monotonic_ns()}.log"
    given = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "start_timeout_s": 60.0, **options}
    return ServerProcess(
        options=ServerOptions(model_repository=repository, log_file=log_file, **given),
        settings=settings or {},
    )


@dataclass
class Reply:
    """Everything that came back for one request."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)  # outputs of the last answer
    error: str | None = None
    finals: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Ask:
    """One request on a stream of its own. `wait` reads to the end, `cancel` stops reading and leaves."""

    def __init__(
        self,
        server: ServerProcess,
        *,
        request_id: str = "",
        parameters: dict[str, Any] | None = None,
        model: str = MODEL_NAME,
        **inputs: Any,
    ) -> None:
        self.reply = Reply()
        self._client = grpc_client.InferenceServerClient(server.grpc_url)
        self._received: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(
            lambda result, error: self._received.put((result, error)), stream_timeout=60
        )
        self._client.async_stream_infer(
            model,
            [tensor(name, value, batched=model == MODEL_NAME) for name, value in inputs.items()],
            request_id=request_id,
            parameters=parameters,
            enable_empty_final_response=True,
        )

    def next(self, timeout_s: float = 60) -> bool:
        """Read one response; return whether it was the last."""
        result, error = self._received.get(timeout=timeout_s)
        if error is not None:
            self.reply.error = str(error.message())
            return True
        response = result.get_response()
        final = response.parameters["triton_final_response"].bool_param
        self.reply.finals += final
        outputs = {output.name: result.as_numpy(output.name).ravel() for output in response.outputs}
        if outputs:
            self.reply.last = outputs
            self.reply.texts.append(outputs["text_output"][0].decode("utf-8"))
            self.reply.ids.extend(outputs["output_ids"].tolist() if "output_ids" in outputs else [])
        return bool(final)

    def wait(self) -> Reply:
        while not self.next():
            pass
        self._client.stop_stream()
        self._client.close()
        while not self._received.empty():  # anything behind the last answer is a fault
            self.reply.finals += 100
            self._received.get()
        return self.reply

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


def ask(server: ServerProcess, **inputs: Any) -> Reply:
    return Ask(server, **inputs).wait()


def tensor(name: str, value: Any, *, batched: bool = True) -> Any:
    """Make an input from a Python value, [1, n] or, where it is not `batched`, [n]; an array is sent as it is."""
    spec = INPUTS_BY_NAME[name]
    wire_type = "BYTES" if spec.wire_type == "STRING" else spec.wire_type
    if not isinstance(value, np.ndarray):
        values = value if isinstance(value, list) else [value]
        dtype = {"BYTES": np.object_, "BOOL": np.bool_, "FP32": np.float32, "UINT64": np.uint64}.get(
            wire_type, np.int32
        )
        raw = [v.encode() if isinstance(v, str) else v for v in values] if wire_type == "BYTES" else values
        value = np.array([raw] if batched else raw, dtype=dtype)
    made = grpc_client.InferInput(name, list(value.shape), wire_type)
    made.set_data_from_numpy(value)
    return made


def command(server: ServerProcess, name: str) -> dict[str, Any]:
    """Use the test model's back door; return the engine's counters."""
    counters: dict[str, Any] = json.loads(ask(server, parameters={"test_command": name}, text_input="-").text)
    return counters


def until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    """Wait for what must happen; the limit is for what never does, on however busy a machine."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def until_idle(server: ServerProcess) -> dict[str, Any]:
    """Wait until no request is open and every page is back; return the counters of then.

    All in one look: the counters are of the engine's last step, which an answer may leave before.
    """
    counters: dict[str, Any] = {}

    def idle() -> bool:
        counters.update(command(server, "stats"))
        return not any(counters[name] for name in ("open", "num_running", "num_waiting", "pages_held"))

    try:
        until(idle)
    except AssertionError:
        raise AssertionError(f"never idle: {counters}") from None
    return counters


class Serve:
    """`dspark serve` as a process of its own; a context manager that leaves nothing running.

    `said` gathers what it tells. Every wait ends: after `limit_s` the process is killed.
    """

    def __init__(self, *arguments: object, openai: bool = False, limit_s: float = 120.0) -> None:
        code = "import sys; from dspark.cli import main; sys.exit(main(['serve', *sys.argv[1:]]))"
        names = ("grpc", "http", "metrics", *(("openai",) if openai else ()))
        ports = [f"--{name}-port=0" for name in names]
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *ports, *map(str, arguments)], stderr=subprocess.PIPE, text=True
        )
        self.said = ""
        self._limit_s = limit_s
        self._seen: set[psutil.Process] = set()  # descendants, which a killed launcher may leave behind

    def __enter__(self) -> Serve:
        return self

    def __exit__(self, *_error: object) -> None:
        self.children()
        if self.process.poll() is None:
            self.process.kill()
        for descendant in self._seen:
            with contextlib.suppress(psutil.Error):  # it knows a later process of the same id
                descendant.kill()
        if self.process.stderr is not None:
            self.process.stderr.close()
        self.process.wait(self._limit_s)

    def children(self) -> list[int]:
        """Return the process ids of all descendants."""
        found = children(self.process.pid)
        for pid in found:
            with contextlib.suppress(psutil.Error):
                self._seen.add(psutil.Process(pid))
        return found

    def until_says(self, word: str) -> str:
        """Return the line that holds the word."""
        assert self.process.stderr is not None
        limit = threading.Timer(
            self._limit_s, self.process.kill
        )  # its output ends then, and with it the loop
        limit.start()
        try:
            for line in self.process.stderr:
                self.said += line
                if word in line:
                    self.children()
                    return line
            raise AssertionError(f"never said {word!r}:\n{self.said}")
        finally:
            limit.cancel()

    def ends(self) -> int:
        """Wait for its end; return its exit status."""
        self.children()
        _, rest = self.process.communicate(timeout=self._limit_s)
        self.said += rest
        return self.process.returncode


def children(pid: int) -> list[int]:
    """Return the process ids of all descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    found = [child for child, parent in parents.items() if parent == pid]
    return found + [grandchild for child in found for grandchild in children(child)]


def command_line(pid: int) -> list[bytes]:
    """Return the words that a process was started with."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended meanwhile
        return []


def model_process(server_pid: int, *, but: int | None = None, model: str = MODEL_NAME) -> int:
    """Return the stub of a model, by what Triton tells it.

    Arguments:
        but: the process of the same model that is meant to go.
    """
    for pid in children(server_pid):
        words = command_line(pid)
        stub = words and b"triton_python_backend_stub" in words[0]
        if stub and pid != but and any(f"/{model}/1/".encode() in word for word in words[1:]):
            return pid
    raise AssertionError(f"no stub of {model}")


def shared_memory(pid: int) -> list[Path]:
    """Return the shared memory regions of a server that a launcher started."""
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        name, _, value = entry.decode().partition("=")
        if name == RUN_DIR_VARIABLE:
            return sorted(Path("/dev/shm").glob(f"dspark-{Path(value).name}*"))
    raise AssertionError("not started by a launcher")


def is_running(pid: int) -> bool:
    """True while the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
