"""The thread that owns an engine: who begins together, who may wait, who is let in."""

import threading
import time
from types import SimpleNamespace

import pytest
from dspark.engine import thread as thread_module
from dspark.engine.stats import EngineStats
from dspark.engine.thread import EngineThread
from dspark.errors import CapacityError, EngineError
from dspark.request import Request, RequestOutput, SamplingParams


class Engine:
    """Answers every request with one token in the first step after `may_step`; keeps who was in which step."""

    limits = SimpleNamespace(num_pages=4)

    def __init__(self):
        self.steps, self._requests = [], []
        self.may_step = threading.Event()
        self.may_step.set()
        self.stepped_s = 0.0

    @property
    def has_work(self):
        return bool(self._requests)

    def check(self, request):
        pass

    def add(self, request):
        self._requests.append(request)
        return len(self._requests)

    def cancel(self, request_id):
        request = self._requests.pop(request_id - 1)
        request.emit(RequestOutput(request_id=0, finish_reason="cancelled"))

    def step(self):
        assert self.may_step.wait(60)
        time.sleep(0.001)
        self.steps.append(len(self._requests))
        ended, self._requests = self._requests, []
        for request in ended:
            request.emit(RequestOutput(request_id=0, token_ids=(1,), finish_reason="length"))
        self.stepped_s = time.monotonic()

    def stats(self):
        return EngineStats(num_running=len(self._requests))


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def served(engine):
    serving = EngineThread(engine, max_queue_size=3)
    serving.start()
    yield serving
    engine.may_step.set()
    serving.close()


def ask(served, place=None):
    """Submit a request; return what is set at its end."""
    ended = threading.Event()

    def take(output):
        if output.final:
            ended.set()

    served.submit(Request(prompt_ids=(1,), params=SamplingParams(), emit=take), place=place)
    return ended


def fill(served, place):
    for _ in range(5):
        ask(served, place)


def answered(served, count):
    for ended in [ask(served) for _ in range(count)]:
        assert ended.wait(60)


def patient(monkeypatch, *, gap_s, s):
    monkeypatch.setattr(thread_module, "_LONGEST_GAP_S", gap_s)
    monkeypatch.setattr(thread_module, "_LONGEST_S", s)


def pretend(served, engine, *, step_s, num_ended):
    """Have a step of `step_s` seconds just over that brought so many answers to their end."""
    while served._ended_s < engine.stepped_s:
        time.sleep(0.001)
    served._step_s, served._ended_s, served._num_ended = step_s, time.monotonic(), num_ended


def test_requests_that_come_together_to_an_idle_engine_begin_in_one_step(served, engine, monkeypatch):
    patient(monkeypatch, gap_s=0.5, s=60.0)
    answered(served, 1)
    pretend(served, engine, step_s=20.0, num_ended=0)
    answered(served, 3)
    assert engine.steps == [1, 3]


def test_as_many_as_have_just_ended_are_waited_for_and_nobody_once_they_are_here(served, engine, monkeypatch):
    patient(monkeypatch, gap_s=60.0, s=60.0)
    answered(served, 1)
    for _ in range(3):
        pretend(served, engine, step_s=100.0, num_ended=3)
        answered(served, 3)  # not 50 s later
    assert engine.steps == [1, 3, 3, 3]


def test_who_keeps_coming_delays_the_first_one_by_a_moment_only(served, engine, monkeypatch):
    patient(monkeypatch, gap_s=1.0, s=0.1)
    served._max_queue_size = 10_000
    answered(served, 1)
    pretend(served, engine, step_s=1000.0, num_ended=0)
    first = ask(served)
    end = time.monotonic() + 40
    while not first.is_set():
        assert time.monotonic() < end, "the first one waits for ever"
        ask(served)
        time.sleep(0.005)


def test_a_cancel_or_the_end_cuts_the_wait_for_others_short(served, engine, monkeypatch):
    patient(monkeypatch, gap_s=60.0, s=60.0)
    answered(served, 1)
    pretend(served, engine, step_s=100.0, num_ended=2)
    ended = ask(served)
    served.cancel(2)
    assert ended.wait(40)
    pretend(served, engine, step_s=100.0, num_ended=2)
    ended = ask(served)
    served.close()
    assert ended.is_set()


def test_a_place_that_is_held_counts_as_waiting_until_it_is_used_or_given_back(served, engine):
    places = [served.hold_place() for _ in range(3)]
    assert served.stats().num_waiting == 3
    with pytest.raises(CapacityError, match="max_queue_size is 3"):
        ask(served)
    with pytest.raises(CapacityError, match="3 requests wait"):
        served.hold_place()
    places[0].give_back()
    places[0].give_back()
    answered(served, 1)
    engine.may_step.clear()
    held = [ask(served, place) for place in places[1:]]  # these had been let in
    with pytest.raises(CapacityError):  # this has no place any more
        fill(served, places[0])
    engine.may_step.set()
    assert all(ended.wait(60) for ended in held)


def test_who_holds_a_place_is_waited_for_and_let_in_while_the_engine_drains(served):
    place = served.hold_place()
    assert not served.drain(0.0)
    with pytest.raises(EngineError):
        served.hold_place()
    assert ask(served, place).wait(60)
    assert served.drain(60.0)
    with pytest.raises(EngineError):
        ask(served, place)
