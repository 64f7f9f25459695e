"""What goes wrong in the world, against a real server: nothing hangs, nothing leaks, nobody else is harmed."""

import json
import random
import re
import time

import psutil
import pytest
from support.malformed import malformed_tensors
from support.server import Ask, ask, children, command, server_process, until

pytestmark = pytest.mark.server

GREEDY = {"temperature": 0.0, "ignore_eos": True}
LONG = {**GREEDY, "max_tokens": 3000, "stream": True}


def test_malformed_requests_are_answered_and_harm_no_running_stream(server):
    rng = random.Random(7)
    alone = ask(server, text_input="steady", max_tokens=400, **GREEDY)
    steady = Ask(server, text_input="steady", max_tokens=400, stream=True, **GREEDY)
    answered = 0
    for _ in range(120):
        tensors = {name: array for name, array in malformed_tensors(rng).items() if array.size}
        tensors["timeout_ms"] = 200
        reply = ask(server, **tensors)
        assert reply.error is not None or reply.finals == 1
        answered += 1
    assert answered == 120
    assert steady.wait().ids == alone.ids


def test_a_full_queue_refuses_at_once_and_lets_go_again(repository):
    limits = {"max_batch_size": 1, "max_queue_size": 2}
    with server_process(repository, settings=limits) as server:
        command(server, "slow")
        running = Ask(server, text_input="x", **LONG)
        running.next()
        waiting = [Ask(server, text_input="x", max_tokens=3, **GREEDY) for _ in range(2)]
        until(lambda: command(server, "stats")["num_waiting"] == 2)
        started_s = time.monotonic()
        refused = ask(server, text_input="x", max_tokens=3)
        assert time.monotonic() - started_s < 1.0
        assert (
            refused.error is not None
            and "[UNAVAILABLE]" in refused.error
            and "max_queue_size" in refused.error
        )
        # One that waits can be cancelled, and one can have its time run out there.
        waiting.pop().cancel()
        until(lambda: command(server, "stats")["num_waiting"] == 1)
        late = ask(server, text_input="x", max_tokens=3, timeout_ms=200, return_finish_reason=True)
        assert late.last["finish_reason"][0] == b"timeout" and late.ids == []
        running.cancel()
        assert waiting.pop().wait().error is None
        assert command(server, "fast")["pages_held"] == 0


def test_a_slow_reader_loses_nothing_and_holds_nobody_up(server):
    slow = Ask(server, text_input="slow reader", max_tokens=1500, stream=True, **GREEDY)
    started_s = time.monotonic()
    assert ask(server, text_input="other", max_tokens=50, **GREEDY).error is None
    assert time.monotonic() - started_s < 5
    time.sleep(0.5)
    reply = slow.wait()
    assert len(reply.ids) == 1500 and reply.finals == 1


def test_hundreds_of_cancels_leave_no_page_and_no_memory_behind(server):
    def resident():
        return sum(psutil.Process(pid).memory_info().rss for pid in (server.pid, *children(server.pid)))

    def round_of(count):
        for index in range(count):
            stream = Ask(server, text_input=f"cancel {index}", **LONG)
            stream.next()
            stream.cancel()
        until(lambda: command(server, "stats")["open"] == 0)

    round_of(60)  # what is allocated once
    before = resident()
    round_of(150)
    assert command(server, "stats")["pages_held"] == 0
    assert resident() < before * 1.05 + (8 << 20)


def test_every_request_leaves_one_line_with_its_id_in_the_log(server):
    Ask(server, request_id="first", text_input="x", max_tokens=5, **GREEDY).wait()
    Ask(server, request_id="second", text_input="x", top_p=7.0).wait()
    Ask(server, request_id="third", text_input="x", timeout_ms=30, **LONG).wait()

    def lines(name):
        entries = re.findall(r'"request (\{.*\})"$', server.log_path.read_text(), re.MULTILINE)
        told = [json.loads(json.loads(f'"{entry}"')) for entry in entries]  # the server quotes what it logs
        return [entry for entry in told if entry["id"] == name]

    until(lambda: lines("third"))
    (first,), (second,), (third,) = lines("first"), lines("second"), lines("third")
    assert first["end"] == "length" and first["output_tokens"] == 5 and first["input_tokens"] > 0
    assert 0 < first["first_token_ms"] <= first["total_ms"]
    assert second["end"] == "refused" and second["code"] == "INVALID_ARG" and "top_p" in second["error"]
    assert third["end"] == "timeout"
