"""Guides are compiled beside everything else, and no longer than they may take."""

import json
import queue
import signal
import sys
import threading

import psutil
import pytest
from dspark.errors import CapacityError, RequestError
from dspark.sampling import grammar
from dspark.sampling.grammar import try_guide
from dspark.sampling.guide_trial import GuideTrial
from dspark.serving.guides import GuideDesk

# All of these must be found in one text. Each further one doubles what the library needs: twelve take seconds.
ENDLESS = json.dumps({"type": "string", "allOf": [{"pattern": f".*a{n}.*"} for n in range(40)]})


@pytest.fixture
def trial():
    trial = GuideTrial(limit_s=0.3)
    yield trial
    trial.close()


@pytest.fixture
def desk():
    desks = []

    def make(compile_guide, **options):
        desks.append(GuideDesk(lambda: compile_guide, limit_s=0.3, **options))
        return desks[-1]

    yield make
    for each in desks:
        each.close()


def told(desk, kind, guide):
    """Submit a guide; return the queue on which its grammar or error comes."""
    came = queue.SimpleQueue()
    desk.submit(kind, guide, then=came.put, failed=came.put)
    return came


def test_a_guide_that_takes_for_ever_is_ended_and_the_next_one_is_tried(trial):
    assert trial.passes("regex", "a+b")
    pid = trial._process.pid
    assert trial.passes("json", None) and trial.passes("json_schema", '{"type": "integer"}')
    assert trial._process.pid == pid, "one process serves them all"
    assert trial.passes("json_schema", ENDLESS) is False
    assert not psutil.pid_exists(pid)
    assert trial.passes("regex", "a+b")


@pytest.mark.parametrize(("kind", "guide"), [("regex", "("), ("json_schema", "{"), ("regex", "(" * 50_000)])
def test_a_wrong_guide_passes_since_the_compiler_says_what_is_wrong(trial, kind, guide):
    assert trial.passes(kind, guide)


def test_what_takes_too_long_is_refused_by_field_and_holds_no_other_up(desk):
    compiled = []
    both = desk(lambda kind, guide: compiled.append((kind, guide)) or "grammar")
    slow = told(both, "json_schema", ENDLESS)
    assert told(both, "regex", "a+").get(timeout=60) == "grammar"  # by the other thread
    error = slow.get(timeout=60)
    assert isinstance(error, RequestError) and error.field == "guided_decoding_guide"
    assert "within 0.3 s" in str(error) and compiled == [("regex", "a+")]


def test_a_guide_is_tried_once(desk, monkeypatch):
    tried = []
    monkeypatch.setattr(
        GuideTrial, "passes", lambda _self, _kind, guide: tried.append(guide) or guide == "good"
    )
    one = desk(lambda _kind, guide: guide)
    for _ in range(3):
        assert told(one, "regex", "good").get(timeout=60) == "good"
        assert isinstance(told(one, "regex", "bad").get(timeout=60), RequestError)
    assert sorted(tried) == ["bad", "good"]


def test_a_trial_that_says_nothing_of_the_guide_is_not_remembered(desk, monkeypatch):
    results = [None, True]
    monkeypatch.setattr(GuideTrial, "passes", lambda _self, _kind, _guide: results.pop(0))
    one = desk(lambda _kind, guide: guide)
    assert isinstance(told(one, "regex", "a").get(timeout=60), CapacityError)
    assert told(one, "regex", "a").get(timeout=60) == "a"


def test_a_process_that_was_killed_says_nothing_of_the_guide(trial):
    assert trial.passes("regex", "a")
    trial._process.send_signal(signal.SIGSTOP)  # so that it cannot answer before it ends
    threading.Timer(0.2, trial._process.kill).start()
    assert trial.passes("regex", "b") is None
    assert trial.passes("regex", "b")


def test_without_the_library_the_compiler_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    try_guide("regex", "a")


def test_what_is_too_long_for_the_compiler_is_not_tried(monkeypatch):
    tried = []
    monkeypatch.setattr(grammar, "_source", lambda *guide: tried.append(guide) or 1 / 0)
    try_guide("regex", "a" * (grammar.MOST_GUIDE_BYTES + 1))
    with pytest.raises(ZeroDivisionError):
        try_guide("regex", "a")
    assert len(tried) == 1


def test_without_a_process_guides_are_compiled_all_the_same(desk, monkeypatch, caplog):
    def cannot(_self, _kind, _guide):
        raise OSError("no processes left")

    monkeypatch.setattr(GuideTrial, "passes", cannot)
    assert told(desk(lambda _kind, guide: guide), "regex", "a").get(timeout=60) == "a"
    assert "untried" in caplog.text


def test_whoever_takes_the_grammar_may_fail(desk):
    came = queue.SimpleQueue()

    def then(_grammar):
        raise RequestError("x", 1, "nothing")

    desk(lambda _kind, guide: guide).submit("regex", "a", then=then, failed=came.put)
    assert came.get(timeout=60).field == "x"


def test_the_compiler_is_made_once_and_nobody_waits_for_it():
    made, may, prepared = [], threading.Event(), []

    def make():
        made.append(threading.current_thread().name)
        assert may.wait(60)
        return lambda _kind, guide: guide

    one = GuideDesk(make, limit_s=0.3, prepared=lambda: prepared.append(True))
    came = [told(one, "regex", "a"), told(one, "regex", "b")]
    assert all(each.empty() for each in came)
    may.set()
    assert [each.get(timeout=60) for each in came] == ["a", "b"]
    one.close()
    assert len(made) == len(prepared) == 1 and made[0].startswith("dspark-guides")


def test_a_compiler_that_cannot_be_made_fails_those_that_need_it(caplog):
    def make():
        raise MemoryError("no room")

    one = GuideDesk(make)
    assert isinstance(told(one, "regex", "a").get(timeout=60), MemoryError)
    one.close()
    assert caplog.text.count("guides cannot be compiled") == 1


def test_closing_ends_threads_and_processes(desk):
    one = desk(lambda _kind, guide: guide)
    assert told(one, "regex", "a").get(timeout=60) == "a"
    mine = [child for child in psutil.Process().children() if "guide_trial" in " ".join(child.cmdline())]
    assert mine
    one.close()
    psutil.wait_procs(mine, timeout=60)
    assert not any(child.is_running() for child in mine)
    assert not any(thread.name.startswith("dspark-guides") for thread in threading.enumerate())


def test_whoever_waits_no_more_is_told_at_once_however_long_the_guides_before_take():
    may, over, late = threading.Event(), threading.Event(), queue.SimpleQueue()
    told = queue.SimpleQueue()

    def compile_guide(_kind, guide):
        assert may.wait(60)
        return guide

    one = GuideDesk(lambda: compile_guide, limit_s=0.3)
    for guide in ("first", "second", "third"):  # two of them occupy the desk's threads
        one.submit(
            "regex",
            guide,
            then=told.put,
            failed=told.put,
            is_over=lambda guide=guide: guide != "second" and over.is_set(),
            over=lambda guide=guide: late.put(guide),
        )
    over.set()
    gone = sorted(late.get(timeout=60) for _ in range(2))
    assert gone == ["first", "third"] and told.empty()
    may.set()
    one.submit("regex", "fourth", then=told.put, failed=told.put)
    assert sorted(told.get(timeout=60) for _ in range(2)) == ["fourth", "second"]
    one.close()
    assert told.empty() and late.empty(), "each is told once"


def test_who_waits_too_long_for_a_guide_is_told_so_and_the_next_one_is_served():
    may, told = threading.Event(), queue.SimpleQueue()
    one = GuideDesk(lambda: lambda _kind, guide: may.wait(60) and guide, limit_s=0.3, longest_wait_s=0.2)
    for guide in ("first", "second", "third"):
        one.submit("regex", guide, then=told.put, failed=told.put)
    for _ in range(3):
        error = told.get(timeout=60)
        assert isinstance(error, CapacityError) and "within 0.2 s" in str(error)
    may.set()
    one._longest_wait_s = 60.0
    one.submit("regex", "fourth", then=told.put, failed=told.put)
    assert told.get(timeout=60) == "fourth"
    one.close()
    assert told.empty(), "each is told once"


def test_a_guide_in_use_never_waits_behind_new_ones(monkeypatch):
    may, told = threading.Event(), queue.SimpleQueue()

    def passes(_trial, _kind, guide):
        assert guide == "known" or may.wait(60)
        return True

    monkeypatch.setattr(GuideTrial, "passes", passes)
    one = GuideDesk(lambda: lambda _kind, guide: guide)
    one.submit("regex", "known", then=told.put, failed=told.put)
    assert told.get(timeout=60) == "known"
    for index in range(5):
        one.submit("regex", f"new {index}", then=told.put, failed=told.put)
    one.submit("regex", "known", then=told.put, failed=told.put)
    assert told.get(timeout=60) == "known"
    may.set()
    assert {told.get(timeout=60) for _ in range(5)} == {f"new {index}" for index in range(5)}
    one.close()
