"""`dspark serve` starts anew what died, says so, and gives up on what dies again and again."""

import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from types import SimpleNamespace

import pytest
from dspark.errors import EngineError
from dspark.serving.supervisor import Supervisor
from support.server import Ask, ask, children, command, is_running, killed_at_the_end, until

LONG = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 3000, "stream": True}


class Serve:
    """`dspark serve` as a process of its own, with a gateway; `said` gathers what it tells."""

    def __init__(self, repository, log_file):
        code = "import sys; from dspark.cli import main; sys.exit(main(['serve', *sys.argv[1:]]))"
        ports = [f"--{name}-port=0" for name in ("grpc", "http", "metrics", "openai")]
        given = ["--model-repository", repository, "--log-file", log_file, "--drain-timeout", "5"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *ports, *map(str, given)], stderr=subprocess.PIPE, text=True
        )
        self.said = ""

    def until_says(self, word):
        limit = threading.Timer(90, self.process.kill)  # then its output ends, and with it the loop
        limit.start()
        try:
            for line in self.process.stderr:
                self.said += line
                if word in line:
                    return line
            raise AssertionError(f"never said {word!r}:\n{self.said}")
        finally:
            limit.cancel()


def model_process(server_pid):
    """Return the stub, by the name that Triton gives it."""
    for pid in children(server_pid):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"triton_python_backend_stub" in file.read().split(b"\0")[0]:
                return pid
    raise AssertionError("no stub")


@pytest.mark.server
def test_what_died_is_started_anew_on_the_same_ports(repository, tmp_path):
    serve = Serve(repository, tmp_path / "log")
    ready = serve.until_says("ready: grpc ")
    urls = re.search(r"grpc (\S+), http (\S+), metrics (\S+), openai (\S+)", ready)
    server = SimpleNamespace(grpc_url=urls[1])
    with killed_at_the_end([serve.process.pid]), serve.process:
        first = ask(server, text_input="x", max_tokens=9, temperature=0.0, ignore_eos=True)

        # The stub is killed in the middle of an answer: the client hears of it.
        triton = next(pid for pid in children(serve.process.pid) if is_triton(pid))
        running = Ask(server, text_input="x", **LONG)
        running.next()
        os.kill(model_process(triton), signal.SIGKILL)
        serve.until_says(": starting it anew")  # the model's process was lost, or tritonserver fell with it
        assert running.wait().error is not None
        serve.until_says("ready again")
        until(lambda: not is_running(triton))
        assert ask(server, text_input="x", max_tokens=9, temperature=0.0, ignore_eos=True).ids == first.ids

        # The gateway.
        gateway = next(pid for pid in children(serve.process.pid) if not is_triton(pid))
        os.kill(gateway, signal.SIGKILL)
        serve.until_says("the gateway ended on its own with status -9: starting it anew in 1 s")
        serve.until_says("ready again")
        with urllib.request.urlopen(f"{urls[4]}/models", timeout=10) as response:
            assert response.status == 200

        # The engine.
        command(server, "die")
        Ask(server, text_input="x", **LONG)
        serve.until_says("the engine died: starting it anew in 2 s")
        serve.until_says("ready again")
        assert ask(server, text_input="x", max_tokens=9, temperature=0.0, ignore_eos=True).ids == first.ids

        pids = children(serve.process.pid)
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(30) == 0
        until(lambda: not any(is_running(pid) for pid in pids))


def is_triton(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"tritonserver" in file.read().split(b"\0")[0]


class Fragile:
    """Dies whenever it is told to."""

    def __init__(self):
        self.dead, self.starts = False, 0

    def fault(self):
        return "it died" if self.dead else None

    def revive(self):
        self.dead, self.starts = False, self.starts + 1


def supervised(max_restarts):
    now, told, child = [0.0], [], Fragile()

    def sleep(seconds):
        now[0] += seconds

    supervisor = Supervisor(
        [child], max_restarts=max_restarts, say=told.append, clock=lambda: now[0], sleep=sleep
    )
    return supervisor, child, now, told


def test_what_lives_is_left_alone():
    supervisor, child, _, told = supervised(5)
    supervisor.look()
    assert child.starts == 0 and told == []


def test_restarts_wait_longer_each_time_and_end_at_the_limit():
    supervisor, child, now, told = supervised(4)
    waits = []
    for _ in range(4):
        child.dead, before = True, now[0]
        supervisor.look()
        waits.append(now[0] - before)
    assert waits == [0.0, 1.0, 2.0, 4.0] and child.starts == 4
    assert told[0] == "it died: starting it anew" and told[1].startswith("ready again")
    child.dead = True
    with pytest.raises(EngineError, match="it died, 4 restarts in 10 minutes"):
        supervisor.look()


def test_old_restarts_are_forgotten():
    supervisor, child, now, _ = supervised(1)
    for _ in range(3):
        child.dead = True
        supervisor.look()
        now[0] += 601
    assert child.starts == 3


def test_no_restarts_at_all_when_none_are_allowed():
    supervisor, child, _, _ = supervised(0)
    child.dead = True
    with pytest.raises(EngineError, match="^it died$"):
        supervisor.look()
    assert child.starts == 0
