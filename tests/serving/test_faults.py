"""What goes wrong in the world, against a real server: nothing hangs, nothing leaks, nobody else is harmed."""

import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from dspark.serving.contract import UNBATCHED_MODEL_NAME
from support.malformed import damage_message, malformed_parameters, malformed_tensors
from support.raw_stream import RawChannel, ids_of
from support.server import CONTEXT_LEN, Ask, ask, command, server_process, until, until_idle

pytestmark = pytest.mark.server

GREEDY = {"temperature": 0.0, "ignore_eos": True}
LONG = {**GREEDY, "max_tokens": 3000, "stream": True}


# ---- requests that cannot be read ------------------------------------------------------------------------


def one_malformed(channel, rng):
    """Send one; return how it was answered. It hangs at most until the stream's own limit, which then says so."""
    tensors = {"text_input": np.array([[b"hi"]], object), **malformed_tensors(rng)}
    given = {name: array for name, array in tensors.items() if array.size}
    message = channel.message(**{**given, "timeout_ms": 200}, parameters=malformed_parameters(rng))
    if rng.random() < 0.3:
        damage_message(rng, message)
    try:
        responses = list(channel.send(message))
    except grpc.RpcError as error:
        return error.code().name
    assert responses, message
    if responses[-1].error_message:
        return "refused by the model" if responses[-1].error_message.startswith("[") else "refused by Triton"
    ids_of(responses)
    return "answered"


def test_a_thousand_malformed_requests_are_each_answered_and_harm_no_running_stream(server):
    alone = ask(server, text_input="steady", max_tokens=400, **GREEDY)
    steady = Ask(server, text_input="steady", max_tokens=400, stream=True, **GREEDY)

    def some(seed):
        rng = random.Random(seed)
        with RawChannel(server.grpc_url) as channel:
            return [one_malformed(channel, rng) for _ in range(125)]

    with ThreadPoolExecutor(8) as pool:
        answers = [answer for share in pool.map(some, range(8)) for answer in share]
    assert len(answers) == 1000
    assert set(answers) == {"refused by the model", "refused by Triton", "answered"}
    assert answers.count("refused by the model") > 300 and answers.count("refused by Triton") > 50
    assert steady.wait().ids == alone.ids


BAD_BODIES = [
    b"", b"{", b"\xff\xfe", b"null", b"[]", b'"text"', b"{}", b'{"text_input": 5}', b'{"text_input": "\xff\xfe"}',
    b'{"text_input": "\\ud800"}', b'{"text_input": ["a", "b"]}',
    b'{"text_input": {"a": 1}}', b'{"text_input": "a", "max_tokens": 1e99}', b'{"text_input": "a", "stop_words": 5}',
    b'{"text_input": "a", "parameters": 5}', b'{"text_input": "a", "max_tokens": "x"}', b"[" * 20_000,
    b'{"text_input": "a", "sampling_parameters": "{\\"max_tokens\\": -1}"}',
]  # fmt: skip


@pytest.mark.parametrize("path", ["generate", "generate_stream", "infer"])
def test_bodies_that_cannot_be_read_are_refused(server, path):
    for body in BAD_BODIES:
        status, text = posted(server, path, body)
        assert status >= 400 or "error" in text, (body[:60], status, text)
    assert ask(server, text_input="hi", max_tokens=3, **GREEDY).error is None


def test_text_that_is_no_utf8_is_refused_by_name(server):
    bad = np.array([[b"caf\xe9 \xff"]], object)
    for name in (
        "text_input",
        "messages",
        "sampling_parameters",
        "stop_words",
        "bad_words",
        "guided_decoding_guide",
    ):
        prompt = {} if name in ("text_input", "messages") else {"text_input": "hi"}
        error = ask(server, **prompt, **{name: bad}).error
        assert f"[INVALID_ARG] {name}: got " in error and "valid UTF-8" in error, error


def test_prompts_of_any_size_are_refused_at_once(server):
    """Also those of which the tokens alone would take seconds, over every protocol."""
    most = CONTEXT_LEN - 1
    for size in (CONTEXT_LEN * 4, 8 << 20):
        text = "x" * size
        error = ask(server, text_input=text).error
        assert "[INVALID_ARG] text_input: got 'a " in error and "allowed is at most" in error
        messages = json.dumps([{"role": "user", "content": text}])
        assert "[INVALID_ARG] messages: got 'a " in ask(server, messages=messages).error
        status, said = posted(server, "generate_stream", json.dumps({"text_input": text}).encode())
        assert status == 400 and "[INVALID_ARG] text_input" in said
    messages = json.dumps([{"role": "user", "content": ""}] * 50_000)
    assert "[INVALID_ARG] messages: got 'a chat of 50000 messages'" in ask(server, messages=messages).error
    ids = np.ones((1, 1 << 20), np.int32)
    assert f"allowed is at most {most} tokens" in ask(server, input_ids=ids).error


def posted(server, path, body):
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    connection.request("POST", f"/v2/models/dspark/{path}", body)
    response = connection.getresponse()
    text = response.read().decode("utf-8", "replace")
    connection.close()
    return response.status, text


# ---- readers that are slow, or gone ----------------------------------------------------------------------


def test_a_slow_reader_loses_nothing_and_holds_nobody_up(server):
    """Its answer, megabytes of alternatives, is larger than what the connection takes before it is read."""
    alone = ask(server, text_input="slow reader", max_tokens=1500, **GREEDY)
    with RawChannel(server.grpc_url) as channel:
        call = channel.stream(
            text_input="slow reader",
            max_tokens=1500,
            stream=True,
            logprobs=20,
            return_log_probs=True,
            **GREEDY,
        )
        first = next(call)
        assert ask(server, text_input="other", max_tokens=50, **GREEDY).error is None
        until_idle(server)  # the engine is through with it, and its pages are back
        rest = list(call)
    assert ids_of([first, *rest]) == alone.ids
    assert sum(response.ByteSize() for response in rest) > 1 << 20


def test_a_reader_that_never_reads_can_be_left(server):
    with RawChannel(server.grpc_url) as channel:
        call = channel.stream(text_input="deaf", logprobs=20, return_log_probs=True, **LONG)
        next(call)
        until_idle(server)
        call.cancel()
    assert ask(server, text_input="hi", max_tokens=3, **GREEDY).error is None


def killed_client(server):
    """Start a client in a process of its own, kill it while it reads."""
    code = "import sys; from dspark_client.cli import main; sys.exit(main(sys.argv[1:]))"
    asked = ["generate", "hi", "--max-tokens", "3000", "--ignore-eos", "--url", server.grpc_url]
    with subprocess.Popen([sys.executable, "-c", code, *asked], stdout=subprocess.DEVNULL) as client:
        try:
            until(lambda: command(server, "stats")["num_running"] == 1)
        finally:
            os.kill(client.pid, signal.SIGKILL)


def closed_channel(server):
    with RawChannel(server.grpc_url) as channel:
        next(channel.stream(text_input="x", **LONG))


def closed_connection(server, model="dspark"):
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps({"text_input": "x", **LONG}))
    until(lambda: command(server, "stats")["num_running"] == 1)
    connection.close()


def closed_connection_of_vllms_client(server):
    closed_connection(server, UNBATCHED_MODEL_NAME)


def cancelled_stream_of_vllms_client(server):
    asked = Ask(server, model=UNBATCHED_MODEL_NAME, text_input="x", **LONG)
    asked.next()
    asked.cancel()


def cancelled_wait_of_vllms_client(server):
    """It has had no response yet."""
    command(server, "hold")
    asked = Ask(server, model=UNBATCHED_MODEL_NAME, text_input="x", **LONG)
    until(lambda: command(server, "stats")["open"] == 1)
    asked.cancel()
    command(server, "slow")


@pytest.mark.parametrize(
    "leave",
    [
        killed_client,
        closed_channel,
        closed_connection,
        closed_connection_of_vllms_client,
        cancelled_stream_of_vllms_client,
        cancelled_wait_of_vllms_client,
    ],
)
def test_a_client_that_goes_away_gives_its_pages_back(server, leave):
    cancelled = command(server, "slow")["num_cancelled"]
    leave(server)
    until(lambda: command(server, "stats")["num_cancelled"] == cancelled + 1)
    until_idle(server)


# ---- limits ----------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_at_once_and_lets_go_again(repository):
    limits = {"max_batch_size": 1, "max_queue_size": 2}
    with server_process(repository, settings=limits) as server:
        command(server, "slow")
        running = Ask(server, text_input="x", **LONG)
        running.next()
        waiting = [Ask(server, text_input="x", max_tokens=3, **GREEDY) for _ in range(2)]
        until(lambda: command(server, "stats")["num_waiting"] == 2)
        refused = ask(server, text_input="x", max_tokens=3).error
        assert command(server, "stats")["num_waiting"] == 2, "it was not refused at once"
        assert "[UNAVAILABLE]" in refused and "max_queue_size" in refused
        # One that waits can be cancelled, and one can have its time run out there.
        waiting.pop().cancel()
        until(lambda: command(server, "stats")["num_waiting"] == 1)
        late = ask(server, text_input="x", max_tokens=3, timeout_ms=200, return_finish_reason=True)
        assert late.last["finish_reason"][0] == b"timeout" and late.ids == []
        running.cancel()
        assert waiting.pop().wait().error is None
        command(server, "fast")
        until_idle(server)


def test_what_nobody_waits_for_any_more_ends_at_the_limit(repository):
    """Triton does not look at the connection of a plain `/generate` before it answers; the limit frees its place."""
    with server_process(repository, settings={"max_request_ms": 1500}) as server:
        command(server, "slow")
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        body = json.dumps({"text_input": "x", **LONG, "stream": False})
        connection.request("POST", "/v2/models/dspark/generate", body)
        until(lambda: command(server, "stats")["num_running"] == 1)
        connection.close()
        until_idle(server)
        # A shorter limit of the request's own holds beside it, a longer one does not.
        shorter, longer = (
            ask(server, text_input="x", **LONG, timeout_ms=limit_ms, return_finish_reason=True)
            for limit_ms in (200, 60_000)
        )
        for reply in (shorter, longer):
            assert reply.last["finish_reason"][0] == b"timeout" and reply.finals == 1
        assert 0 <= len(shorter.ids) < len(longer.ids) < 3000


# ---- the log ---------------------------------------------------------------------------------------------


def test_every_request_leaves_one_line_with_its_id_in_the_log(server):
    Ask(server, request_id="first", text_input="x", max_tokens=5, **GREEDY).wait()
    Ask(server, request_id="second", text_input="x", top_p=7.0).wait()
    Ask(server, request_id="third", text_input="x", timeout_ms=30, **LONG).wait()

    def lines(name):
        entries = re.findall(r'"request (\{.*\})"$', Path(server.log_path).read_text(), re.MULTILINE)
        told = [json.loads(json.loads(f'"{entry}"')) for entry in entries]  # the server quotes what it logs
        return [entry for entry in told if entry["id"] == name]

    until(lambda: lines("third"))
    (first,), (second,), (third,) = lines("first"), lines("second"), lines("third")
    assert first["end"] == "length" and first["output_tokens"] == 5 and first["input_tokens"] > 0
    assert 0 < first["first_token_ms"] <= first["total_ms"]
    assert second["end"] == "refused" and second["code"] == "INVALID_ARG" and "top_p" in second["error"]
    assert third["end"] == "timeout"


# ---- guides ----------------------------------------------------------------------------------------------


def test_a_guide_that_takes_for_ever_is_refused_and_nobody_waits_for_it(server):
    """Patterns that a text must all match: each doubles what compiling takes, and forty would take ages."""
    patterns = [{"pattern": f".*a{n}.*"} for n in range(40)]
    guide = {
        "guided_decoding_guide_type": "json_schema",
        "guided_decoding_guide": json.dumps({"allOf": patterns}),
    }
    slow = Ask(server, text_input="x", **guide)
    other = ask(server, text_input="x", max_tokens=5, **GREEDY)
    assert other.error is None and len(other.ids) == 5
    assert not slow._received.qsize(), "the other one had not to wait"
    reply = slow.wait()
    assert reply.error.startswith("[INVALID_ARG] guided_decoding_guide: got ") and "within 1 s" in reply.error
    long = ask(
        server, text_input="x", guided_decoding_guide_type="regex", guided_decoding_guide="a" * (1 << 17)
    )
    assert "at most 65536 bytes" in long.error
