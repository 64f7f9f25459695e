"""Response streams: what leaves, in which order, and exactly one final flag whatever happens."""

import threading
import time

import pytest
from dspark.errors import EngineError, RequestError
from dspark.request import RequestOutput, SpecMetrics
from dspark.serving.contract import OUTPUTS
from dspark.serving.parse import ModelLimits, parse_request
from dspark.serving.stream import Outbox, wire_error
from support.fake_engine import ByteCodec


class Sender:
    """Records everything; `blocked` holds up sending, `broken` makes it raise."""

    def __init__(self, *, broken=False):
        self.sent, self.errors, self.finals = [], [], 0
        self.gone = False
        self.broken = broken
        self.free = threading.Event()
        self.free.set()

    def send(self, arrays, *, final):
        self.free.wait(5)
        if self.broken:
            raise RuntimeError("the pipe is full")
        assert not self.finals, "sent after the final flag"
        self.sent.append({name: array.ravel().tolist() for name, array in arrays.items()})
        self.finals += final

    def fail(self, code, message):
        self.free.wait(5)
        assert not self.finals, "sent after the final flag"
        self.errors.append((code, message))
        self.finals += 1

    def is_cancelled(self):
        return self.gone

    @property
    def text(self):
        return b"".join(answer["text_output"][0] for answer in self.sent).decode()


@pytest.fixture
def outbox():
    box = Outbox(engine_alive=lambda: True, responses_per_s=1e6)
    yield box
    box.close()


def opened(outbox, *, stream=True, sender=None, **fields):
    sender = sender or Sender()
    opened_stream = outbox.open(sender, client_id=fields.pop("client_id", ""))
    opened_stream.parsed = parse_request(
        {},
        {"text_input": "hello", "stream": stream, **fields},
        requested_outputs=[spec.name for spec in OUTPUTS],
        tokenizer=ByteCodec(),
        limits=ModelLimits(vocab_size=256, max_context_len=64),
    )
    return opened_stream, sender


def out(text, *ids, **fields):
    return RequestOutput(request_id=1, token_ids=ids, text=text, **fields)


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.001)


def test_deltas_joined_are_the_single_answer(outbox):
    outputs = [out("Hé", 1), out("", 2), out("l lo", 3, 4), out(" w", 5, finish_reason="stop")]
    streamed, streaming = opened(outbox)
    single, answering = opened(outbox, stream=False)
    for output in outputs:
        streamed.emit(output)
        single.emit(output)
    until(lambda: streaming.finals and answering.finals)
    assert len(answering.sent) == 1
    assert streaming.text == answering.text == "Hél lo w"
    assert [token for answer in streaming.sent for token in answer["output_ids"]] == [1, 2, 3, 4, 5]
    assert streaming.finals == answering.finals == 1


def test_what_piles_up_behind_a_slow_sender_leaves_as_one_response(outbox):
    stream, sender = opened(outbox)
    sender.free.clear()
    stream.emit(out("a", 1))
    until(lambda: stream._queued_for_s is None)  # the outbox holds the first and is stuck with it
    for index in range(2, 10):
        stream.emit(out("b", index))
    stream.emit(out("c", 10, finish_reason="length"))
    sender.free.set()
    until(lambda: sender.finals)
    assert [answer["text_output"] for answer in sender.sent] == [[b"a"], [b"b" * 8 + b"c"]]


def test_responses_are_joined_when_there_would_be_too_many_but_first_and_last_leave_at_once():
    outbox = Outbox(engine_alive=lambda: True, responses_per_s=0.001)  # one stream: one response in 1000 s
    stream, sender = opened(outbox)
    for index in range(8):
        stream.emit(out("a", index))
        until(lambda: sender.sent)
    stream.emit(out("z", 9, finish_reason="stop"))
    until(lambda: sender.finals)
    assert [answer["text_output"] for answer in sender.sent] == [[b"a"], [b"aaaaaaaz"]]
    outbox.close()


def test_a_joined_response_leaves_when_its_time_has_come():
    outbox = Outbox(engine_alive=lambda: True, responses_per_s=20.0)
    stream, sender = opened(outbox)
    started_s = time.monotonic()
    for index in range(3):
        stream.emit(out("a", index))
        until(lambda: sender.sent)
    until(lambda: sender.text == "aaa")
    assert time.monotonic() - started_s > 0.045, "the second before its time"
    stream.emit(out("", finish_reason="stop"))
    outbox.close()


def test_what_has_piled_up_leaves_for_all_streams_at_one_time():
    """Each waking of the server and of its clients costs a step that runs on the same cores."""
    outbox = Outbox(engine_alive=lambda: True, responses_per_s=0.001)
    both = [opened(outbox) for _ in range(2)]
    for stream, sender in both:
        stream.emit(out("a", 1))
        until(lambda sender=sender: sender.sent)
    for stream, _ in both:
        stream.emit(out("b", 2))
    assert len(outbox._queue) == 2 and len({due_s for due_s, _, _ in outbox._queue}) == 1
    for stream, _ in both:
        stream.emit(out("c", 3, finish_reason="stop"))
    for _, sender in both:
        until(lambda sender=sender: sender.finals)
        assert [answer["text_output"] for answer in sender.sent] == [[b"a"], [b"bc"]]
    outbox.close()


def test_text_held_back_travels_with_what_completes_it(outbox):
    stream, sender = opened(outbox)
    stream.emit(out("", 1))
    stream.emit(out("é", 2))
    until(lambda: sender.sent)
    assert sender.sent[0] == {"text_output": ["é".encode()], "output_ids": [1, 2]}


def test_models_without_tokenizer_stream_ids(outbox):
    stream, sender = opened(outbox)
    stream.emit(out(None, 7))
    until(lambda: sender.sent)
    assert sender.sent[0] == {"text_output": [b""], "output_ids": [7]}


def test_input_is_put_in_front_once(outbox):
    stream, sender = opened(outbox, exclude_input_in_output=False)
    for text in "ab":
        stream.emit(out(text, 1))
        until(lambda text=text: sender.text.endswith(text))
    stream.emit(out("", finish_reason="stop"))
    until(lambda: sender.finals)
    assert sender.text == "helloab"


def test_last_answer_says_why_and_how(outbox):
    stream, sender = opened(
        outbox,
        stream=False,
        return_finish_reason=True,
        return_perf_metrics=True,
        return_num_output_tokens=True,
    )
    metrics = SpecMetrics(
        num_spec_steps=4,
        num_draft_tokens=8,
        num_accepted_draft_tokens=6,
        acceptance_histogram=[1, 0, 3],
        seed=2**63,
    )
    stream.emit(out("x", 1, 2, finish_reason="stop", metrics=metrics))
    until(lambda: sender.finals)
    answer = sender.sent[0]
    assert answer["finish_reason"] == [b"stop"] and answer["num_output_tokens"] == [2]
    assert answer["acceptance_rate"] == [0.75] and answer["total_draft_tokens"] == [8]
    assert answer["spec_decode_metrics"] == [
        b'{"mean_acceptance_length": 2.5, "draft_acceptance_rate": 0.75, "num_spec_steps": 4, '
        b'"num_draft_tokens": 8, '
        b'"num_accepted_draft_tokens": 6, "acceptance_histogram": [1, 0, 3], "seed": 9223372036854775808}'
    ]


def test_an_error_after_deltas_is_the_last_thing_sent(outbox):
    stream, sender = opened(outbox)
    stream.emit(out("a", 1))
    stream.fail(EngineError("gone"))
    stream.emit(out("b", 2, finish_reason="stop"))
    stream.fail(EngineError("again"))
    until(lambda: sender.finals)
    assert sender.text == "a"
    assert sender.errors == [("UNAVAILABLE", "[UNAVAILABLE] gone")]


def test_a_single_answer_that_fails_is_only_the_error(outbox):
    stream, sender = opened(outbox, stream=False)
    stream.emit(out("a", 1))
    stream.fail(RequestError("top_p", 2, "a number in (0, 1]"))
    until(lambda: sender.finals)
    assert not sender.sent
    assert sender.errors == [("INVALID_ARG", "[INVALID_ARG] top_p: got 2, allowed is a number in (0, 1]")]


def test_errors_of_our_own_code_are_internal_and_hit_one_stream_only(outbox, caplog):
    broken, breaking = opened(outbox, sender=Sender(broken=True))
    whole, fine = opened(outbox)
    for stream in (broken, whole):
        stream.emit(out("a", 1, finish_reason="stop"))
    until(lambda: breaking.finals and fine.finals)
    assert breaking.errors == [("INTERNAL", "[INTERNAL] RuntimeError: the pipe is full")]
    assert fine.text == "a" and "could not be sent" in caplog.text


def test_a_client_that_goes_is_noticed_within_a_fraction_of_a_second(outbox):
    stream, sender = opened(outbox)
    other, _ = opened(outbox)
    sender.gone = True
    until(stream.is_cancelled)
    assert not other.is_cancelled()


def test_streams_are_found_by_the_clients_id_until_they_end(outbox):
    stream, sender = opened(outbox, client_id="mine")
    opened(outbox, client_id="other")
    assert outbox.find("mine") == [stream]
    stream.emit(out("", finish_reason="cancelled"))
    until(lambda: sender.finals)
    until(lambda: not outbox.find("mine"))


def test_a_dead_engine_fails_every_stream():
    alive = True
    outbox = Outbox(engine_alive=lambda: alive)
    senders = [opened(outbox)[1] for _ in range(8)]
    alive = False
    until(lambda: all(sender.finals for sender in senders))
    assert all(code == "UNAVAILABLE" for sender in senders for code, _ in sender.errors)
    outbox.close()


def test_closing_ends_open_streams_and_later_ones():
    outbox = Outbox(engine_alive=lambda: True)
    _, sender = opened(outbox)
    outbox.close()
    assert sender.finals == 1 and sender.errors[0][0] == "UNAVAILABLE"
    assert not outbox._thread.is_alive()


def test_every_interleaving_of_endings_sends_one_final_flag(outbox):
    endings = [
        lambda stream: stream.emit(out("x", 1, finish_reason="stop")),
        lambda stream: stream.fail(EngineError("gone")),
        lambda stream: stream.emit(out("", finish_reason="cancelled")),
    ]
    streams = [opened(outbox, stream=index % 2 == 0) for index in range(30)]
    gate = threading.Barrier(len(endings))

    def end(action):
        for stream, _ in streams:
            gate.wait(5)
            action(stream)

    threads = [threading.Thread(target=end, args=(action,)) for action in endings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    until(lambda: all(sender.finals for _, sender in streams))
    assert [sender.finals for _, sender in streams] == [1] * 30


def test_wire_errors_repeat_their_code():
    assert wire_error(KeyError("x")) == ("INTERNAL", "[INTERNAL] KeyError: 'x'")
    assert wire_error(EngineError("gone")) == ("UNAVAILABLE", "[UNAVAILABLE] gone")


def test_many_streams_are_asked_in_turn_whether_their_clients_are_there(outbox):
    class Counting(Sender):
        asked = 0

        def is_cancelled(self):
            self.asked += 1
            return self.gone

    senders = [Counting() for _ in range(40)]
    streams = [opened(outbox, sender=sender)[0] for sender in senders]
    turns = [outbox._next_polled() for _ in range(40)]
    assert {len(turn) for turn in turns} == {outbox._most_polls}
    assert all(set(turns[k]).isdisjoint(turns[k + 1]) for k in range(39)) or outbox._most_polls > 20
    assert {stream for turn in turns for stream in turn} == set(streams)
    senders[-1].gone = True
    end = time.monotonic() + 60
    while not streams[-1].cancelled:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert max(sender.asked for sender in senders) - min(sender.asked for sender in senders) <= 2
    for stream in streams:
        stream.fail(RuntimeError("enough"))
