"""What a real server answers: streams, single answers, sampling, errors, cancels."""

import json
import urllib.error
import urllib.request

import numpy as np
import pytest
from support.server import CONTEXT_LEN, Ask, ask, command, until

pytestmark = pytest.mark.server

GREEDY = {"temperature": 0.0, "ignore_eos": True}
LONG = {**GREEDY, "max_tokens": 3000, "stream": True}


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 5}, {"seed": 2**64 - 1, "top_p": 0.9}])
def test_deltas_joined_equal_the_single_answer(server, sampling):
    request = {"text_input": "The quick brown fox", "max_tokens": 120, "ignore_eos": True, **sampling}
    single, streamed = ask(server, **request), ask(server, **request, stream=True)
    assert single.error is None and streamed.error is None
    assert len(single.texts) == 1 and len(streamed.texts) > 1
    # A random model writes random bytes: every delta decoding as UTF-8 (Ask does it) is the test of split characters.
    assert streamed.text == single.text and streamed.ids == single.ids
    assert len(single.ids) == 120
    assert (single.finals, streamed.finals) == (1, 1)


def test_speculation_does_not_change_the_answer(server):
    request = {
        "messages": json.dumps([{"role": "user", "content": "ab ab ab ab ab ab ab ab"}]),
        "max_tokens": 200,
        **GREEDY,
    }
    plain = ask(server, **request, num_draft_tokens=0, return_perf_metrics=True)
    speculative = ask(server, **request, return_perf_metrics=True)
    assert speculative.ids == plain.ids
    assert plain.last["total_draft_tokens"][0] == 0
    assert speculative.last["total_accepted_draft_tokens"][0] > 0


def test_all_forms_of_prompt_are_the_same_prompt(server):
    answers = [
        ask(server, text_input="aaa", max_tokens=8, **GREEDY, return_num_input_tokens=True),
        ask(server, sampling_parameters='{"text_input": "aaa"}', max_tokens=8, **GREEDY),
        ask(server, parameters={"text_input": "aaa", "max_tokens": 8}, **GREEDY),
    ]
    assert answers[0].ids == answers[1].ids == answers[2].ids
    assert answers[0].last["num_input_tokens"][0] > 0


def test_seeds_decide_the_answer_and_are_reported(server):
    request = {"text_input": "x", "max_tokens": 40, "ignore_eos": True, "return_perf_metrics": True}
    first, again, other = (ask(server, **request, seed=seed) for seed in (3, 3, 4))
    assert first.ids == again.ids != other.ids
    assert json.loads(first.last["spec_decode_metrics"][0])["seed"] == 3
    drawn = [json.loads(ask(server, **request).last["spec_decode_metrics"][0])["seed"] for _ in range(2)]
    assert drawn[0] != drawn[1]


def test_the_answer_ends_before_a_stop_word(server):
    request = {"text_input": "stop here", "max_tokens": 60, **GREEDY, "return_finish_reason": True}
    whole = ask(server, **request).text
    word = whole[20:23]
    cut = whole[: whole.index(word)]
    for stream in (False, True):
        reply = ask(server, **request, stop_words=[word], stream=stream)
        assert reply.text == cut
        assert reply.last["finish_reason"][0] == b"stop"


def test_sixteen_streams_at_once_and_half_of_them_cancelled(server):
    cancelled = command(server, "hold")["num_cancelled"]  # until all sixteen have come
    asked = [Ask(server, text_input=f"number {i}", max_tokens=40, stream=True, **GREEDY) for i in range(8)]
    leaving = [Ask(server, text_input=f"leaving {i}", **LONG) for i in range(8)]
    until(lambda: command(server, "stats")["open"] == 16)
    command(server, "slow")
    for stream in (*asked, *leaving):
        stream.next()
    assert command(server, "stats")["peak_running"] == 16
    for stream in leaving:
        stream.cancel()
    until(lambda: command(server, "stats")["num_cancelled"] == cancelled + 8)
    replies = [stream.wait() for stream in asked]
    assert [reply.error for reply in replies] == [None] * 8
    assert [len(reply.ids) for reply in replies] == [40] * 8
    assert [reply.finals for reply in replies] == [1] * 8
    alone = ask(server, text_input="number 3", max_tokens=40, **GREEDY)
    assert replies[3].ids == alone.ids


def test_a_request_stops_another_by_its_id(server):
    command(server, "slow")
    running = Ask(server, request_id="long", text_input="x", return_finish_reason=True, **LONG)
    running.next()
    assert ask(server, request_id="long", stop=True).error is None
    reply = running.wait()
    assert reply.last["finish_reason"][0] == b"cancelled" and reply.finals == 1


def test_a_time_limit_ends_the_answer_with_what_there_is(server):
    command(server, "slow")
    reply = ask(server, text_input="x", timeout_ms=2000, return_finish_reason=True, **LONG)
    assert reply.last["finish_reason"][0] == b"timeout"
    assert 0 < len(reply.ids) < 3000


BAD = [
    ("text_input", ""), ("text_input", np.array([[b"\xff"]], object)), ("text_input", "x" * 40_000),
    ("input_ids", [-1]), ("input_ids", [10_000]), ("input_ids", np.empty((1, 0), np.int32)),
    ("input_ids", [1] * CONTEXT_LEN), ("messages", "{}"), ("messages", "nonsense"),
    ("max_tokens", 0), ("max_tokens", CONTEXT_LEN), ("request_output_len", -1), ("min_tokens", -1),
    ("temperature", -1.0), ("temperature", float("inf")), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5),
    ("min_p", 1.0), ("repetition_penalty", 0.0), ("presence_penalty", 9.0), ("frequency_penalty", float("nan")),
    ("stop_words", ["", "a"]), ("bad_words", ["a", ""]), ("end_id", 10_000), ("num_draft_tokens", -2), ("stop", True),
    ("logprobs", -1), ("logprobs", 21), ("beam_width", 2),
    ("guided_decoding_guide_type", "x"), ("timeout_ms", -1), ("sampling_parameters", "[]"),
    ("sampling_parameters", '{"nonsense": 1}'), ("sampling_parameters", '{"seed": -1}'),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_every_bad_field_is_refused_by_name_and_the_server_goes_on(server, stream):
    for field, value in BAD:
        prompt = {} if field in ("text_input", "input_ids", "messages") else {"text_input": "hi"}
        reply = ask(server, **prompt, **{field: value}, stream=stream)
        named = {"request_output_len": "max_tokens"}.get(field, "seed" if "seed" in str(value) else field)
        assert reply.error is not None, (field, value)
        assert f"[INVALID_ARG] {named}: got " in reply.error and ", allowed is " in reply.error, reply.error
        assert reply.finals == 0, "an error is the end"
    assert ask(server, text_input="hi", max_tokens=3, **GREEDY).error is None


def test_what_triton_itself_refuses_does_not_reach_the_model(server):
    reply = ask(server, text_input=np.array([[b"a"], [b"b"]], object))
    assert reply.error is not None and "batch" in reply.error


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_http_generate_answers(server, path):
    body = {
        "text_input": "hello",
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        "stream": path != "generate",
    }
    text = post(f"{server.http_url}/v2/models/dspark/{path}", body)
    if path == "generate":
        got = json.loads(text)["text_output"]
    else:
        events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
        got = "".join(event.get("text_output", "") for event in events)
    assert got == ask(server, text_input="hello", max_tokens=6, **GREEDY).text


def test_http_generate_names_the_bad_field(server):
    body = {"text_input": "hello", "top_p": 3.0}
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(f"{server.http_url}/v2/models/dspark/generate_stream", body)
    with caught.value as error:
        assert error.code == 400
        assert "[INVALID_ARG] top_p" in error.read().decode()


def post(url, body):
    request = urllib.request.Request(url, data=json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()
