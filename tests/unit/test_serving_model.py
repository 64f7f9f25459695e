"""The Triton model over a fake Python backend and a fake engine."""

import gc
import importlib
import json
import random
import sys
import threading
import time

import numpy as np
import pytest
from dspark.errors import CapacityError, ConfigError
from dspark.serving.contract import OUTPUTS
from dspark.serving.guides import GuideDesk
from support import fake_pb_utils
from support.fake_engine import FakeEngine, fake_runtime, perf
from support.fake_pb_utils import Request
from support.malformed import malformed_tensors

ALL = [spec.name for spec in OUTPUTS]


def text(value):
    return np.array([[value.encode()]], dtype=object)


def request(**kwargs):
    parameters = kwargs.pop("parameters", {})
    return Request({"text_input": text("hi")}, parameters, outputs=kwargs.pop("outputs", ALL), **kwargs)


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.001)


def finals(asked):
    return sum(final for _, final in asked.sent)


@pytest.fixture
def triton_model(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_pb_utils)
    monkeypatch.delitem(sys.modules, "dspark.serving.triton_model", raising=False)
    module = importlib.import_module("dspark.serving.triton_model")
    monkeypatch.setattr(module, "watch_parents", lambda _run_dir, _served, **_named: None)
    yield module
    sys.modules.pop("dspark.serving.triton_model", None)


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def model(triton_model, engine, monkeypatch, tmp_path):
    given = {}

    def load_runtime(config, **_options):
        given.update(config=config)
        return fake_runtime(engine)

    monkeypatch.setattr(triton_model, "load_runtime", load_runtime)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.yaml").write_text("target: hub/from-file\nmax_batch_size: 3\n")
    model = triton_model.TritonPythonModel()
    model.initialize(arguments(tmp_path, {"max_batch_size": "5"}))
    model.given = given
    yield model
    model.finalize()


def arguments(path, parameters=None):
    config = {"parameters": {name: {"string_value": value} for name, value in (parameters or {}).items()}}
    return {
        "model_config": json.dumps(config),
        "model_repository": str(path),
        "model_version": "1",
        "model_name": "dspark",
    }


def test_settings_come_from_model_yaml_then_config_pbtxt(model):
    assert model.given["config"].target == "hub/from-file"
    assert model.given["config"].max_batch_size == 5


@pytest.mark.parametrize("asked_for", [True, False])
def test_answers_are_kept_where_the_settings_say_so_and_nowhere_else(
    triton_model, engine, monkeypatch, tmp_path, asked_for
):
    monkeypatch.setattr(triton_model, "load_runtime", lambda _config, **_options: fake_runtime(engine))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.yaml").write_text(f"target: hub/x\nrecord: {'kept' if asked_for else 'none'}\n")
    model = triton_model.TritonPythonModel()
    model.initialize(arguments(tmp_path))
    asked = request(parameters={"temperature": 0.5, "stream": True})
    altered = request(parameters={"frequency_penalty": 1.0})
    model.execute([asked, altered])
    for index in range(2):
        engine.answer(["a", "b", "c"], index=index)
    until(lambda: finals(asked) and finals(altered))
    model.finalize()
    sent = [token for answer, _ in asked.sent for token in answer.outputs["output_ids"].ravel().tolist()]
    kept = [path.read_text().splitlines() for path in tmp_path.glob("*/traffic-*")]
    if asked_for:
        ((head, line),) = kept
        assert json.loads(head) == {"format_version": 1, "target_hash": "ab12"}
        assert json.loads(line) == {"prompt_ids": list(b"hi"), "output_ids": sent, "temperature": 0.5}
    else:
        assert kept == [] and {path.name for path in tmp_path.iterdir()} == {"1"}


@pytest.mark.usefixtures("model")
def test_what_was_loaded_is_out_of_the_collectors_sight():
    assert gc.get_freeze_count() > 10_000


def test_garbage_is_swept_up_while_the_model_serves(triton_model, monkeypatch):
    monkeypatch.setattr(triton_model, "_SWEEP_INTERVAL_S", 0.001)
    stopping = threading.Event()
    before = gc.get_stats()[2]["collections"]
    sweeper = threading.Thread(target=triton_model._sweep, args=(stopping,))
    sweeper.start()
    until(lambda: gc.get_stats()[2]["collections"] > before + 1)
    stopping.set()
    sweeper.join(60)
    assert not sweeper.is_alive()


def test_a_model_that_cannot_load_says_why(triton_model, tmp_path, monkeypatch):
    def load_runtime(_config, **_options):
        raise ConfigError("target: no such file")

    monkeypatch.setattr(triton_model, "load_runtime", load_runtime)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.yaml").write_text("target: hub/x\n")
    broken = triton_model.TritonPythonModel()
    with pytest.raises(fake_pb_utils.TritonModelException, match=r"\[INVALID_ARG\] target: no such file"):
        broken.initialize(arguments(tmp_path))
    broken.finalize()


def test_execute_submits_and_answers_later(model, engine):
    asked = request(parameters={"stream": True, "return_perf_metrics": True})
    assert model.execute([asked]) is None
    assert engine.requests[0].prompt_ids == tuple(b"hi") and not asked.sent
    engine.answer(["a", "b"])
    until(lambda: finals(asked))
    assert b"".join(r.outputs["text_output"][0] for r, _ in asked.sent) == b"ab"
    assert perf(asked.sent[-1][0].outputs)["seed"] == 17


def test_a_bad_request_is_answered_and_the_others_go_on(model, engine):
    bad, good = request(parameters={"top_p": 2}), request()
    model.execute([bad, good])
    engine.answer(["fine"])
    until(lambda: finals(bad) and finals(good))
    error = bad.sent[0][0].error
    assert error.code == fake_pb_utils.TritonError.INVALID_ARG
    assert str(error) == "[INVALID_ARG] top_p: got 2.0, allowed is a number in (0, 1]"
    assert good.sent[0][0].outputs["text_output"][0] == b"fine"


def test_a_full_queue_is_unavailable_at_once(model, engine):
    engine.refuses = CapacityError("the queue is full")
    asked = request()
    model.execute([asked])
    until(lambda: finals(asked))
    assert asked.sent[0][0].error.code == fake_pb_utils.TritonError.UNAVAILABLE


def test_a_fault_of_our_own_fails_one_request_as_internal(model, engine):
    engine.refuses = ZeroDivisionError("oops")
    asked = request()
    model.execute([asked])
    until(lambda: finals(asked))
    assert str(asked.sent[0][0].error) == "[INTERNAL] ZeroDivisionError: oops"
    engine.refuses = None
    again = request()
    model.execute([again])
    engine.answer(["fine"])
    until(lambda: finals(again))


def test_only_requested_outputs_are_sent(model, engine):
    asked = request(outputs=["text_output", "finish_reason"])
    model.execute([asked])
    engine.answer(["x"])
    until(lambda: finals(asked))
    assert set(asked.sent[0][0].outputs) == {"text_output", "finish_reason"}


def test_a_gone_client_cancels_its_request(model, engine):
    asked = request()
    model.execute([asked])
    assert not engine.requests[0].is_cancelled()
    asked.gone = True
    until(engine.requests[0].is_cancelled)
    engine.answer([""], finish_reason="cancelled")
    until(lambda: finals(asked))


def test_stop_cancels_the_request_of_the_same_id(model, engine):
    running, other = request(request_id="a"), request(request_id="b")
    stop = Request({"stop": np.array([[True]])}, outputs=ALL, request_id="a")
    model.execute([running, other])
    model.execute([stop])
    until(lambda: finals(stop))
    assert engine.requests[0].is_cancelled() and not engine.requests[1].is_cancelled()
    assert len(stop.sent) == 1 and stop.sent[0][0].error is None


def test_stop_without_an_id_is_refused(model):
    stop = Request({"stop": np.array([[True]])}, outputs=ALL)
    model.execute([stop])
    until(lambda: finals(stop))
    assert "request id" in str(stop.sent[0][0].error)


@pytest.mark.parametrize(
    ("kwargs", "limit_s"), [({"parameters": {"timeout_ms": 1500}}, 1.5), ({"timeout_us": 2_000_000}, 2)]
)
def test_time_limits_become_deadlines(model, engine, kwargs, limit_s):
    before = time.monotonic()
    model.execute([request(**kwargs)])
    assert before + limit_s <= engine.requests[0].deadline_s <= time.monotonic() + limit_s


def test_a_thousand_malformed_requests_are_each_answered_once_and_harm_no_other(model, engine):
    rng = random.Random(20261130)
    asked = [
        Request(malformed_tensors(rng), outputs=ALL, request_id=rng.choice(("", "a"))) for _ in range(1000)
    ]
    good = request()
    model.execute([*asked[:500], good, *asked[500:]])
    submitted = len(engine.requests)
    for index in range(submitted):
        engine.answer(["fine"], index=index)
    until(lambda: all(finals(one) for one in (*asked, good)))
    assert all(finals(one) == 1 for one in asked)
    errors = [str(one.sent[-1][0].error) for one in asked if one.sent[-1][0].error is not None]
    assert all(error.startswith("[INVALID_ARG] ") and ", allowed is " in error for error in errors), [
        error for error in errors if not error.startswith("[INVALID_ARG] ")
    ]
    assert len(errors) > 600 and 1 < submitted < 400
    assert good.sent[0][0].outputs["text_output"][0] == b"fine"
    assert model.num_open() == 0


def test_finalize_ends_what_is_open(model, engine):
    asked = request()
    model.execute([asked])
    model.finalize()
    assert finals(asked) == 1 and asked.sent[0][0].error.code == fake_pb_utils.TritonError.UNAVAILABLE
    assert not engine.alive


@pytest.mark.parametrize("end", ["timeout", "cancelled"])
def test_a_request_whose_guide_is_not_compiled_yet_ends_when_it_should(model, engine, monkeypatch, end):
    may = threading.Event()
    monkeypatch.setattr(model, "_guides", GuideDesk(lambda: may.wait(60) and None))
    guide = {
        "guided_decoding_guide_type": "regex",
        "guided_decoding_guide": "a+",
        "return_finish_reason": True,
    }
    asked = request(parameters={**guide, "timeout_ms": 50 if end == "timeout" else 60_000})
    model.execute([asked])
    asked.gone = end == "cancelled"
    until(lambda: finals(asked))
    assert asked.sent[0][0].outputs["finish_reason"][0] == end.encode()
    may.set()
    model._guides.close()
    assert len(asked.sent) == 1 and not engine.requests and not engine.places


@pytest.mark.parametrize("end", ["submitted", "guide refused", "engine refuses", "waited too long"])
def test_a_request_holds_its_place_while_its_guide_is_compiled_and_no_longer(model, engine, monkeypatch, end):
    may = threading.Event()

    def compile_guide(_kind, _guide):
        assert may.wait(60)
        if end == "guide refused":
            raise CapacityError("not now")

    patience = 2.0 if end == "waited too long" else 60.0
    monkeypatch.setattr(model, "_guides", GuideDesk(lambda: compile_guide, longest_wait_s=patience))
    engine.refuses = CapacityError("the queue is full") if end == "engine refuses" else None
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+"}
    asked = request(parameters=guide)
    model.execute([asked])
    assert len(engine.places) == 1 and not asked.sent
    if end != "waited too long":
        may.set()
    until(lambda: not engine.places)
    if end == "submitted":
        until(lambda: engine.requests)
        engine.answer(["a"])
    until(lambda: finals(asked))
    may.set()
    model._guides.close()
    assert finals(asked) == 1
    error = asked.sent[0][0].error
    assert (error is None) == (end == "submitted")
    assert error is None or error.code == fake_pb_utils.TritonError.UNAVAILABLE


def test_a_guided_request_is_refused_at_once_when_the_queue_is_full(model, engine):
    engine.full = CapacityError("the queue is full")
    asked = request(parameters={"guided_decoding_guide_type": "json"})
    model.execute([asked])
    until(lambda: finals(asked))
    assert asked.sent[0][0].error.code == fake_pb_utils.TritonError.UNAVAILABLE
    assert not engine.requests and not model._guides._open
