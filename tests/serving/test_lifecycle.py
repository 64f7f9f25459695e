"""How a server starts, stops, breaks and comes back; nothing may be left running."""

import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from dspark.errors import ConfigError, EngineError
from support.server import (
    Ask,
    Serve,
    ask,
    children,
    command,
    is_running,
    model_process,
    server_process,
    shared_memory,
    until,
)  # fmt: skip

pytestmark = pytest.mark.server

LONG = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 3000, "stream": True}


def test_engine_death_fails_every_stream_and_a_reload_brings_the_model_back(repository):
    with server_process(repository) as server:
        command(server, "slow")
        streams = [Ask(server, text_input=f"number {i}", **LONG) for i in range(8)]
        for stream in streams:
            stream.next()
        command(server, "die")
        replies = [stream.wait() for stream in streams]
        assert all("[UNAVAILABLE]" in (reply.error or "") for reply in replies)
        late = ask(server, text_input="x")
        assert late.error is not None and "[UNAVAILABLE]" in late.error

        (repository / "dspark" / "1" / "model.py").touch()
        assert server._http("/v2/repository/models/dspark/load", body={}, timeout_s=60) is not None
        assert ask(server, text_input="x", max_tokens=3).error is None
        pids, regions = [server.pid, *children(server.pid)], shared_memory(server.pid)
        assert regions
    until(lambda: not any(is_running(pid) for pid in pids))
    assert not any(region.exists() for region in regions)


def test_running_requests_end_when_the_server_stops_in_time(repository):
    server = server_process(repository)
    with server:
        command(server, "slow")
        running = Ask(server, text_input="x", **{**LONG, "max_tokens": 60})
        running.next()
        with ThreadPoolExecutor(1) as reader:
            read = reader.submit(running.wait)
            assert server.stop(drain_timeout_s=20)
        reply = read.result()
    assert reply.error is None and len(reply.ids) == 60 and reply.finals == 1


def test_a_client_that_keeps_a_finished_stream_open_does_not_keep_the_server(repository):
    server = server_process(repository, kill_timeout_s=1.0)
    with server:
        idle = Ask(server, text_input="x", max_tokens=3)
        while not idle.next():
            pass
        pids = [server.pid, *children(server.pid)]
        assert server.stop(drain_timeout_s=20)
    until(lambda: not any(is_running(pid) for pid in pids))
    idle.cancel()


def test_requests_that_outlive_the_drain_get_an_error_and_the_server_ends(repository):
    server = server_process(repository)
    with server:
        command(server, "slow")
        running = Ask(server, text_input="x", **LONG)
        running.next()
        pids = [server.pid, *children(server.pid)]
        started_s = time.monotonic()
        assert not server.stop(drain_timeout_s=0.5)
        assert time.monotonic() - started_s < 60
        reply = running.wait()
    assert len(reply.ids) < 3000 and reply.error is not None and "[UNAVAILABLE]" in reply.error
    until(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_dspark_serve_stops_cleanly_on_a_signal(repository, tmp_path, number):
    with Serve("--model-repository", repository, "--log-file", tmp_path / "log") as serve:
        serve.until_says("ready: grpc 127.0.0.1:")
        pids = serve.children()
        assert len(pids) >= 2  # the server and the model's process
        serve.process.send_signal(number)
        assert serve.ends() == 0, serve.said
        until(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.parametrize("victim", ["launcher", "server"])
def test_nothing_outlives_a_killed_process(repository, tmp_path, victim):
    given = ["--model-repository", repository, "--log-file", tmp_path / "log", "--max-restarts", 0]
    with Serve(*given) as serve:
        serve.until_says("ready: grpc 127.0.0.1:")
        pids = serve.children()
        regions = shared_memory(pids[0])
        assert regions
        os.kill(serve.process.pid if victim == "launcher" else pids[0], signal.SIGKILL)
        until(lambda: not any(is_running(pid) for pid in pids))
        assert serve.ends() == (-signal.SIGKILL if victim == "launcher" else 1)
        assert not any(region.exists() for region in regions)
        if victim == "server":
            assert "ended on its own" in serve.said


def test_a_model_process_that_does_not_notice_its_servers_end_is_killed_with_it(repository):
    """Such as one that waits for the dead server's answer and lets no other thread run."""
    server = server_process(repository)
    with server:
        model = model_process(server.pid)
        os.kill(model, signal.SIGSTOP)  # it notices nothing
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: server.poll() is not None)
        assert is_running(model)
    until(lambda: not is_running(model))


def test_a_model_that_cannot_load_is_reported_in_its_own_words(repository, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text('{"model_type": "mamba"}')
    given = [
        "--model-repository",
        repository,
        "--target",
        tmp_path / "target",
        "--log-file",
        tmp_path / "log",
    ]
    with Serve(*given) as serve:
        assert serve.ends() == 1
        assert "[INVALID_ARG] " in serve.said and "model.safetensors" in serve.said
        assert "Traceback" not in serve.said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
        (["--target", "x", "--policy", ""], "policy"),
        (["--max-batch-size", "0"], "max_batch_size: got 0, allowed is"),
        (["--grpc-port", "70000"], "grpc-port: got 70000"),
        (["--model-repository", "/nowhere"], "model-repository: got /nowhere, allowed is"),
    ],
)
def test_dspark_serve_refuses_what_it_cannot_start(repository, arguments, said):
    if "--model-repository" not in arguments:
        arguments = ["--model-repository", repository, *arguments]
    with Serve(*arguments) as serve:
        assert serve.ends() == 2
        assert said in serve.said and "Traceback" not in serve.said


@pytest.mark.parametrize("state", ["a file", "a folder without space"])
def test_a_state_folder_that_cannot_be_written_is_named(repository, tmp_path, monkeypatch, state):
    folder = tmp_path / ".dspark"
    monkeypatch.setattr("dspark.serving.process.state_dir", lambda: folder)
    if state == "a file":
        folder.write_text("")
    else:

        def full(_path, *_args, **_options):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_text", full)
    server = server_process(repository)
    server.options = replace(server.options, log_file=None)
    with pytest.raises(ConfigError, match=rf"{re.escape(str(folder))}.*; allowed is a state folder"):
        server.start()
    assert server.stop()
    assert not folder.is_dir() or not list((folder / "run").iterdir())


def test_a_server_stops_when_its_folder_cannot_be_written_any_more(repository, monkeypatch):
    server = server_process(repository)
    with server:
        pids = [server.pid, *children(server.pid)]

        def read_only(_path, *_args, **_options):
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(Path, "touch", read_only)
    until(lambda: not any(is_running(pid) for pid in pids))


def test_a_taken_port_is_named(repository):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = server_process(repository, http_port=port)
        with pytest.raises(ConfigError, match=f"http-port: got {port} on 127.0.0.1, which cannot be used"):
            server.start()
        assert server.stop()


@pytest.mark.parametrize("name", ["dashboard-port", "openai-port"])
def test_a_taken_port_is_refused_before_anything_is_loaded(repository, name):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Serve("--model-repository", repository, f"--{name}", port) as serve:
            assert serve.ends() == 2
    assert f"{name}: got {port} on 127.0.0.1, which cannot be used" in serve.said
    assert "or 0 to let one be chosen" in serve.said and "starting" not in serve.said


def test_one_port_given_twice_is_refused(repository):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = ("--http-port", port, "--dashboard-port", port)
    with Serve("--model-repository", repository, *given) as serve:
        assert serve.ends() == 2
    assert f"dashboard-port: got {port} on 127.0.0.1, which cannot be used" in serve.said


@pytest.mark.parametrize("options", [(), ("--dashboard-port", 0)])
def test_the_live_page_finds_a_free_port(repository, tmp_path, options):
    """By itself where its usual one is taken, or where a free one was asked for."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody else's: just as well
            taken.bind(("127.0.0.1", 8003))
            taken.listen()
        given = ("--model-repository", repository, "--log-file", tmp_path / "log")
        with Serve(*given, *options) as serve:
            url = re.search(r"http://127\.0\.0\.1:(\d+)/", serve.until_says("live page: "))
            assert url is not None and url[1] != "8003"
            with urllib.request.urlopen(url[0], timeout=10) as response:
                assert b"<title>dspark</title>" in response.read()
            serve.process.send_signal(signal.SIGTERM)
            assert serve.ends() == 0


def test_a_server_that_was_not_started_says_so():
    with pytest.raises(EngineError, match="not started"):
        server_process(Path()).pid  # noqa: B018


def test_every_problem_of_the_settings_is_told_at_once(repository, tmp_path):
    """By the launcher, and by the model itself where there is no launcher."""
    folder = tmp_path / "repository"
    shutil.copytree(repository, folder)
    model_yaml = folder / "dspark" / "1" / "model.yaml"
    model_yaml.write_text("target: /nowhere/x.gguf\npolicy: fixed:many\npage_size: 0\ndrafter: /nowhere\n")
    with Serve("--model-repository", folder, "--max-batch-size", 0) as serve:
        assert serve.ends() == 2
    server = server_process(folder)
    with pytest.raises(EngineError) as caught, server:
        pass
    for said in (serve.said, str(caught.value)):
        for problem in (
            "policy: got 'fixed:many', allowed is ",
            "page_size: got 0, allowed is ",
            "target: got /nowhere/x.gguf, which is not there; allowed is ",
            "drafter: got /nowhere, which is no folder; allowed is ",
        ):
            assert problem in said
    assert "max_batch_size: got 0, allowed is " in serve.said


def test_a_reload_loses_no_running_stream(repository, tmp_path):
    """The old model answers what it has begun, the new one what comes; then the old one's process ends."""
    folder = tmp_path / "repository"
    shutil.copytree(repository, folder)
    with server_process(folder) as server:
        alone = ask(server, text_input="number 0", temperature=0.0, ignore_eos=True, max_tokens=100)
        old = psutil.Process(model_process(server.pid))
        command(server, "slow")
        running = [
            Ask(server, text_input="number 0", **{**LONG, "max_tokens": 100}),
            Ask(server, text_input="number 1", **LONG),
        ]
        for stream in running:
            stream.next()
        (folder / "dspark" / "1" / "model.py").touch()
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(server._http, "/v2/repository/models/dspark/load", body={}, timeout_s=60)
            assert loading.result(60) is not None
        assert old.is_running(), "its streams are not at their end"
        new = psutil.Process(model_process(server.pid, but=old.pid))
        assert command(server, "stats")["num_running"] == 0, "the new model answers"
        assert ask(server, text_input="x", max_tokens=3).error is None
        running.pop().cancel()
        reply = running.pop().wait()
        assert reply.error is None and reply.ids == alone.ids and reply.finals == 1
        until(lambda: not is_running(old.pid))
        assert new.is_running() and server.fault() is None
        assert ask(server, text_input="x", max_tokens=3).error is None
