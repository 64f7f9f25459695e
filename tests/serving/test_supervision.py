"""`dspark serve` starts anew what died, says so, and gives up on what dies again and again."""

import http.client
import json
import os
import re
import signal
import urllib.parse
import urllib.request
from types import SimpleNamespace

import pytest
from dspark.errors import EngineError
from dspark.serving.supervisor import Supervisor
from support.server import Ask, Serve, ask, command, command_line, is_running, model_process, until

LONG = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 3000, "stream": True}


@pytest.mark.server
def test_what_died_is_started_anew_on_the_same_ports(repository, tmp_path):
    given = ["--model-repository", repository, "--log-file", tmp_path / "log", "--drain-timeout", 5]
    with Serve(*given, openai=True) as serve:
        ready = serve.until_says("ready: grpc ")
        urls = re.search(r"grpc (\S+), http (\S+), metrics (\S+), openai (\S+)", ready)
        server = SimpleNamespace(grpc_url=urls[1])
        first = ask(server, text_input="x", max_tokens=9, temperature=0.0, ignore_eos=True)

        # The stub is killed in the middle of an answer: the client hears of it.
        triton = next(pid for pid in serve.children() if is_triton(pid))
        running = Ask(server, text_input="x", **LONG)
        running.next()
        connection, events = open_events(urls[4])
        assert events.readline().startswith(b"data: {")
        os.kill(model_process(triton), signal.SIGKILL)
        serve.until_says(": starting it anew")  # the model's process was lost, or tritonserver fell with it
        assert running.wait().error is not None
        assert_cut_short(connection, events)
        serve.until_says("ready again")
        until(lambda: not is_running(triton))
        assert ask(server, text_input="x", max_tokens=9, temperature=0.0, ignore_eos=True).ids == first.ids

        # The gateway.
        gateway = next(pid for pid in serve.children() if is_gateway(pid))
        os.kill(gateway, signal.SIGKILL)
        serve.until_says("the gateway ended on its own with status -9: starting it anew in 1 s")
        serve.until_says("ready again")
        with urllib.request.urlopen(f"{urls[4]}/models", timeout=60) as response:
            assert response.status == 200

        # The engine.
        command(server, "die")
        dying = Ask(server, text_input="x", **LONG)
        serve.until_says("the engine died: starting it anew in 2 s")
        assert dying.wait().error is not None
        serve.until_says("ready again")
        assert ask(server, text_input="x", max_tokens=9, temperature=0.0, ignore_eos=True).ids == first.ids

        pids = serve.children()
        serve.process.send_signal(signal.SIGTERM)
        assert serve.ends() == 0
        until(lambda: not any(is_running(pid) for pid in pids))


def open_events(url):
    """Ask the gateway for a long streamed answer; return the connection, and the response, whose status has come."""
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    body = {"model": "dspark", "prompt": "x", "ignore_eos": True, **LONG}
    connection.request("POST", f"{address.path}/completions", json.dumps(body))
    response = connection.getresponse()
    assert response.status == 200
    return connection, response


def assert_cut_short(connection, response):
    """Its last event is an error in OpenAI's shape, and behind it the body has no end."""
    with pytest.raises(http.client.IncompleteRead) as cut:
        response.read()
    connection.close()
    last = cut.value.partial.decode().strip().rpartition("data: ")[2]
    assert json.loads(last)["error"]["code"] == "unavailable", last


def is_triton(pid):
    return b"tritonserver" in b"".join(command_line(pid)[:1])


def is_gateway(pid):
    return b"dspark.gateway" in command_line(pid)


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
