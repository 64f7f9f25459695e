"""The command-line client against a real server."""

import io
import json
import os
import select
import signal
import subprocess
import sys

import pytest
from dspark_client.cli import main
from dspark_client.connection import Connection, RequestFailedError, ServerUnavailableError
from support.server import command, until_idle

pytestmark = pytest.mark.server

GREEDY = ["--temperature", "0", "--ignore-eos"]


def run(server, *arguments):
    return main([*arguments, "--url", server.grpc_url])


def test_generate_prints_the_text_and_a_remark(server, capsys):
    assert run(server, "generate", "The quick", "--max-tokens", "20", *GREEDY) == 0
    streamed = capsys.readouterr()
    assert "[20 tokens, " in streamed.err and "ended by length]" in streamed.err
    assert run(server, "generate", "The quick", "--max-tokens", "20", "--no-stream", *GREEDY) == 0
    assert capsys.readouterr().out == streamed.out


def test_generate_prints_one_json_object(server, capsys):
    assert run(server, "generate", "hi", "--max-tokens", "9", "--json", "--seed", "7", "--ignore-eos") == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["output_ids"]) == answer["num_output_tokens"] == 9
    assert (answer["seed"], answer["finish_reason"]) == (7, "length")
    assert answer["first_token_s"] > 0 and answer["tokens_per_second"] > 0


def test_generate_reads_standard_input_and_uses_the_chat_template(server, capsys, monkeypatch):
    counts = []
    for options in ([], ["--chat"], ["--system", "Be brief."]):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
        assert run(server, "generate", "-", "--max-tokens", "2", "--json", *options) == 0
        counts.append(json.loads(capsys.readouterr().out)["num_input_tokens"])
    assert counts[0] < counts[1] < counts[2]


def test_a_refused_request_is_one_line_and_status_1(server, capsys):
    assert run(server, "generate", "hi", "--top-p", "2") == 1
    assert (
        capsys.readouterr().err
        == "dspark-client: [INVALID_ARG] top_p: got 2.0, allowed is a number in (0, 1]\n"
    )


def test_a_model_that_is_not_there_is_one_line_and_status_2(server, capsys):
    assert run(server, "generate", "hi", "--model", "other") == 2
    assert capsys.readouterr().err.startswith(
        f"dspark-client: the server at {server.grpc_url} has no model 'other'"
    )


def test_chat_keeps_the_conversation(server, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nand then?\n/retry\n/reset\n/help\nhello\n/quit\n"))
    assert run(server, "chat", "--max-tokens", "5", *GREEDY) == 0
    said = capsys.readouterr()
    assert said.err.count("[5 tokens, ") == 4
    lines = said.out.splitlines()
    assert lines[0] == lines[-1]  # forgotten, so answered as at first


def test_a_connection_answers_again_after_an_error_and_after_leaving(server):
    with Connection(server.grpc_url) as connection:
        with pytest.raises(RequestFailedError, match="INVALID_ARG"):
            connection.generate("hi", options={"top_p": 2.0}).run()
        leaving = iter(connection.generate("hi", options={"max_tokens": 3000, "ignore_eos": True}))
        next(leaving)
        with pytest.raises(RequestFailedError, match="already answering"):
            next(iter(connection.generate("hi")))
        leaving.close()
        assert (
            len(connection.generate("hi", options={"max_tokens": 3, "ignore_eos": True}).run().output_ids)
            == 3
        )
    until_idle(server)


def test_a_time_out_is_told_and_frees_the_server(server):
    command(server, "slow")
    with Connection(server.grpc_url, timeout_s=0.3) as connection:
        generation = connection.generate("hi", options={"max_tokens": 3000, "ignore_eos": True})
        with pytest.raises(RequestFailedError, match=r"no answer within 0\.3 s"):
            generation.run()
    until_idle(server)


def test_ctrl_c_stops_the_answer_and_frees_the_pages(server):
    command(server, "slow")
    program = "import sys; from dspark_client.cli import main; sys.exit(main(sys.argv[1:]))"
    asked = ["generate", "hi", "--max-tokens", "3000", "--url", server.grpc_url, *GREEDY]
    client = subprocess.Popen(
        [sys.executable, "-c", program, *asked],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A test run in the background of a shell ignores SIGINT, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert select.select([client.stdout], [], [], 60)[0], "it never said anything"
        assert os.read(client.stdout.fileno(), 1)
        client.send_signal(signal.SIGINT)
        _, said = client.communicate(timeout=60)
    finally:
        client.kill()  # no more than a word to one that has ended
        client.communicate(timeout=60)
    assert client.returncode == 130 and b"Traceback" not in said
    until_idle(server)


def test_the_demo_compares_and_writes_its_figures(server, tmp_path, capsys):
    out = tmp_path / "out" / "demo.json"
    assert run(server, "demo", "--rounds", "1", "--max-tokens", "24", "--out", str(out)) == 0
    said = capsys.readouterr().out
    assert "token for token" in said and "Next:" in said
    cases = json.loads(out.read_text())["cases"]
    assert [case["name"] for case in cases] == ["edit", "story"]
    for case in cases:
        assert case["identical"] is True
        assert case["plain"]["spec_decode_metrics"]["num_draft_tokens"] == 0
        assert case["ratio"] > 0


def test_a_server_that_goes_away_is_told(server):
    with Connection(server.grpc_url, model="dspark") as connection:
        connection.check_ready()
    with Connection("127.0.0.1:9") as connection, pytest.raises(ServerUnavailableError):
        connection.generate("hi").run()
