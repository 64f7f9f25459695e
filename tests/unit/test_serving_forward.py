"""Requests to the model without a batch dimension: handed over, answered, cancelled, failed when nobody is there."""

import os
import socket
import threading
import time
from multiprocessing.connection import Client

import numpy as np
import pytest
from dspark.errors import ConfigError
from dspark.serving import door, forward
from dspark.serving.door import Door, Handed, door_path
from dspark.serving.forward import ForwardingModel
from dspark.serving.watch import RunDir
from support import fake_pb_utils


class Request(fake_pb_utils.Request):
    def trace(self):
        return self

    def get_context(self):
        return "span"


class Forwarding(ForwardingModel):
    backend = fake_pb_utils


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(door.tempfile, "gettempdir", lambda: str(tmp_path))
    return door_path(os.getppid())


@pytest.fixture
def model(path, monkeypatch):  # noqa: ARG001  (where the door is)
    monkeypatch.setattr(forward, "watch_parents", lambda _run_dir, _served, **_named: None)
    made = Forwarding()
    made.initialize({})
    yield made
    made.finalize()
    assert not made._thread.is_alive()


@pytest.fixture
def taken(path):
    """Requests that came out of the door."""
    came = []
    listening = Door(path, came.append)
    yield came
    listening.close()


def request(**options):
    return Request(
        {"text_input": np.array([b"hi"], object)}, {"top_k": 3}, outputs=["text_output"], **options
    )


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.001)


def test_a_request_comes_out_as_it_went_in_with_a_batch_dimension(model, taken):
    model.execute([request(request_id="mine", timeout_us=5)])
    until(lambda: taken)
    (one,) = taken
    (tensor,) = one.inputs()
    assert tensor.name() == "text_input" and tensor.as_numpy().tolist() == [[b"hi"]]
    assert one.parameters() == '{"top_k": 3}' and one.requested_output_names() == ("text_output",)
    assert (one.request_id(), one.timeout(), one.trace().get_context()) == ("mine", 5, "span")
    one.fail("INTERNAL", "enough")


def test_answers_come_back_in_order_and_end_once(model, taken):
    asked = [request() for _ in range(8)]
    model.execute(asked)
    until(lambda: len(taken) == 8)
    for number in range(3):
        for place, one in enumerate(taken):
            one.send({"text_output": np.array([b"%d:%d" % (place, number)], object)}, final=number == 2)
    until(lambda: all(any(final for _, final in each.sent) for each in asked))
    order = {each.sent[0][0].outputs["text_output"][0][:1]: each for each in asked}
    assert len(order) == 8
    for place, each in order.items():
        assert [r.outputs["text_output"][0] for r, _ in each.sent] == [place + b":%d" % k for k in range(3)]
        assert [final for _, final in each.sent] == [False, False, True]


def test_errors_keep_their_code_and_message(model, taken):
    asked = request()
    model.execute([asked])
    until(lambda: taken)
    taken[0].fail("INVALID_ARG", "[INVALID_ARG] top_k: got -1")
    until(lambda: asked.sent)
    ((response, final),) = asked.sent
    assert final and response.error.code == fake_pb_utils.TritonError.INVALID_ARG
    assert str(response.error) == "[INVALID_ARG] top_k: got -1"


def test_a_client_that_has_gone_is_told_to_the_other_side_which_ends_the_answer(model, taken):
    stays, goes = request(), request()
    model.execute([stays, goes])
    until(lambda: len(taken) == 2)
    assert not any(one.is_cancelled() for one in taken)
    goes.gone = True
    until(lambda: taken[1].is_cancelled())
    assert not taken[0].is_cancelled() and not goes.sent
    for one in taken:
        one.send({}, final=True)
    until(lambda: stays.sent and goes.sent)
    assert taken[1].is_cancelled(), "its connection is closed"


def test_among_many_each_is_asked_in_turn_whether_its_client_is_there(model, taken, monkeypatch):
    monkeypatch.setattr(forward, "_MOST_POLLS", 1)
    asked = [request() for _ in range(4)]
    model.execute(asked)
    until(lambda: len(taken) == 4)
    for k in (3, 0):
        asked[k].gone = True
        until(taken[k].is_cancelled)
    assert not taken[1].is_cancelled() and not taken[2].is_cancelled()
    for handed in taken:
        handed.send({}, final=True)
    until(lambda: not model._open)


def test_the_other_side_is_told_once_however_long_it_takes(model, taken, monkeypatch):
    monkeypatch.setattr(forward, "_POLL_INTERVAL_S", 0.001)
    goes = request()
    goes.gone = True
    model.execute([goes])
    until(lambda: taken and taken[0].is_cancelled())
    assert taken[0]._connection.recv() == "the client has gone"
    time.sleep(0.05)
    assert not taken[0]._connection.poll(0)
    taken[0].send({}, final=True)
    until(lambda: goes.sent)
    assert not model._open and not model._told


def test_a_response_that_cannot_be_sent_fails_its_own_request_alone(model, taken, monkeypatch):
    bad, good = request(), request()
    model.execute([bad])
    until(lambda: taken)
    model.execute([good])
    until(lambda: len(taken) == 2)
    respond = model._respond

    def refuses(sender, answer):
        if sender is next(iter(model._open.values()), None):
            raise RuntimeError("no")
        respond(sender, answer)

    monkeypatch.setattr(model, "_respond", refuses)
    taken[0].send({}, final=False)
    until(lambda: bad.sent)
    monkeypatch.setattr(model, "_respond", respond)
    assert bad.sent[0][1] and bad.sent[0][0].error.code == fake_pb_utils.TritonError.INTERNAL
    until(taken[0].is_cancelled)
    taken[1].send({}, final=True)
    until(lambda: good.sent)
    assert good.sent[0][0].error is None


def test_nobody_behind_the_door_is_unavailable_at_once(model, taken, path):
    begun, late = request(), request()
    model.execute([begun])
    until(lambda: taken)
    taken[0]._connection.close()  # as the end of its process does
    until(lambda: begun.sent)
    path.unlink()
    model.execute([late])
    for asked in (begun, late):
        ((response, final),) = asked.sent
        assert final and response.error.code == fake_pb_utils.TritonError.UNAVAILABLE


def test_a_model_that_replaces_another_takes_the_door_over(model, path):
    first, second = [], []
    old = Door(path, first.append)
    new = Door(path, second.append)
    old.close()
    model.execute([request()])
    until(lambda: second)
    assert not first and path.exists()
    second[0].send({}, final=True)
    new.close()
    assert not path.exists()


def test_what_a_killed_server_left_is_swept_up_and_nothing_else(path):
    left, opening, other = (path.with_name(f"{path.name[:9]}{name}") for name in ("left", "opening", "other"))
    listening = Door(other, print)  # of a server in another container, whose process nobody sees here
    for killed in (left, opening):
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(killed))
    for old in (left, other):
        os.utime(old, (0, 0))
    Door(path, print).close()
    assert not left.exists() and opening.exists() and other.exists()
    listening.close()


def test_servers_of_one_number_in_two_containers_have_doors_of_their_own(path, monkeypatch):
    first, second = [], []
    one = Door(path, first.append)
    with monkeypatch.context() as patched:
        patched.setattr(door.os, "readlink", lambda _path: "pid:[2]")
        elsewhere = door_path(os.getppid())
    assert elsewhere.name != path.name
    other = Door(path.with_name(elsewhere.name), second.append)
    other.close()
    Client(str(path), family="AF_UNIX").send(
        Handed(inputs={}, parameters="{}", outputs=(), request_id="", timeout_us=0, trace=None)
    )
    until(lambda: first)
    first[0].send({}, final=True)
    one.close()
    assert not second


def test_a_folder_that_others_can_use_is_refused(path):
    path.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 700"):
        door_path(1)


def test_a_model_serves_without_a_door_that_cannot_be(path, monkeypatch, caplog):
    opened = door.open_door(4711, print)
    assert opened is not None
    opened.close()
    path.parent.chmod(0o777)
    assert door.open_door(4711, print) is None
    assert "vllm_model cannot reach this model" in caplog.text
    path.parent.chmod(0o700)
    monkeypatch.setattr(door.tempfile, "gettempdir", lambda: str(path.parent / ("x" * 120)))
    assert door.open_door(4711, print) is None


def test_whoever_knocks_without_a_request_is_let_go(path, monkeypatch, taken):
    from multiprocessing.connection import Client

    Client(str(path), family="AF_UNIX").close()
    with Client(str(path), family="AF_UNIX") as stranger:
        stranger.send_bytes(b"no pickle")
    asked = Forwarding()
    monkeypatch.setattr(forward, "watch_parents", lambda _run_dir, _served, **_named: None)
    asked.initialize({})
    asked.execute([request()])
    until(lambda: taken)
    taken[0].send({}, final=True)
    until(lambda: not asked._open)
    asked.finalize()
    assert "dspark-forward" not in [thread.name for thread in threading.enumerate()]


def test_whoever_reads_no_answers_holds_nobody_up_for_long(path, monkeypatch, taken, caplog):
    monkeypatch.setattr(door, "_HUNG_AFTER_S", 1.0)
    handed = Handed(inputs={}, parameters="{}", outputs=(), request_id="", timeout_us=0, trace=None)
    hanging = [Client(str(path), family="AF_UNIX") for _ in range(8)]
    for each in hanging:
        each.send(handed)
    until(lambda: len(taken) == 8)
    begun_s = time.monotonic()
    more = {"text_output": np.array([b"a" * 4096], object)}
    while not all(one.is_cancelled() for one in taken):
        for one in taken:
            one.send(more, final=False)
    assert caplog.text.count("reads no answers") == 8
    for one in taken:
        one.send(more, final=True)  # of nobody's concern any more
    for each in hanging:
        each.close()
    # A new request is answered.
    with Client(str(path), family="AF_UNIX") as well:
        well.send(handed)
        until(lambda: len(taken) == 9)
        taken[-1].send(more, final=True)
        assert well.recv().final
    assert time.monotonic() - begun_s < 6.0, "one was waited for, not each"


def test_only_what_killed_launchers_left_long_ago_is_removed(tmp_path):
    for name in ("mine", "old", "new", "ending"):
        (tmp_path / name).mkdir()
        RunDir.create(tmp_path / name, overrides={})
    RunDir.create(tmp_path / "ending", overrides={}).process_begins("serving")
    for name in ("old", "new", "ending"):
        written = tmp_path / name / "run.json"
        written.write_text(written.read_text().replace(str(os.getpid()), "4194304"))
    (tmp_path / "empty").mkdir()
    for name in ("mine", "old", "empty", "ending"):
        os.utime(tmp_path / name, (0, 0))
    RunDir.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "ending", "mine", "new"]


def test_the_launcher_notices_the_end_of_either_process(tmp_path):
    run_dir = RunDir.create(tmp_path, overrides={})
    assert not run_dir.model_was_lost
    run_dir.process_begins("serving")
    run_dir.process_begins("forwarding")
    assert not run_dir.model_was_lost
    lost = tmp_path / "process.forwarding"
    lost.write_text(lost.read_text().replace(str(os.getpid()), "4194304"))
    assert run_dir.model_was_lost
    lost.unlink()
    run_dir.process_ends("serving")
    assert not run_dir.model_was_lost and not list(tmp_path.glob("process.*"))
