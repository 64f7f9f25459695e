"""What is recorded of traffic: whole lines in whole files within their bytes, and whatever fails, answers go on."""

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from dspark.config import LEAST_RECORD_BYTES, ServeConfig, load_serve_config
from dspark.engine.stats import EngineStats
from dspark.errors import ConfigError, EngineError
from dspark.request import RequestOutput, SamplingParams
from dspark.serving.checks import load_checked_config
from dspark.serving.telemetry import Telemetry
from dspark.serving.traffic import ServedAnswer, TrafficRecorder, open_recorder, prepare_folder
from dspark_build.traffic import TrafficLimits, read_traffic

MIB = 1 << 20
HEAD = {"format_version": 1, "target_hash": "ab12"}


def answer(*output_ids, prompt=(1, 2, 3), temperature=0.7):
    return ServedAnswer(prompt_ids=prompt, output_ids=output_ids, temperature=temperature)


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.001)


def files(folder):
    return sorted(folder.glob("*"))


def answers(path):
    """Return a file's answers; its first line must be right, its last one whole."""
    text = path.read_text()
    assert text.endswith("\n")
    head, *rest = map(json.loads, text.splitlines())
    assert head == HEAD
    return rest


def all_answers(folder):
    return [one for path in files(folder) for one in answers(path)]


@pytest.fixture
def recorder(tmp_path):
    made = []

    def make(most_bytes=LEAST_RECORD_BYTES, **options):
        made.append(TrafficRecorder(tmp_path, target_hash="ab12", most_bytes=most_bytes, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def settle(recorder, number):
    """Wait until the fate of so many answers is known."""
    until(lambda: recorder.num_recorded + recorder.num_dropped == number)


# ---- what is written ----


def test_an_answer_is_a_line_behind_the_one_that_names_the_target(recorder, tmp_path):
    before_ms = time.time_ns() // 1_000_000
    one = recorder()
    one.add(answer(5, 6, 0))
    one.add(answer(7, 8, temperature=0.0))
    one.close()
    (path,) = files(tmp_path)
    assert answers(path) == [
        {"prompt_ids": [1, 2, 3], "output_ids": [5, 6, 0], "temperature": 0.7},
        {"prompt_ids": [1, 2, 3], "output_ids": [7, 8], "temperature": 0.0},
    ]
    kind, created_ms, pid = path.stem.split("-")
    assert (kind, path.suffix, int(pid)) == ("traffic", ".jsonl", os.getpid())
    assert before_ms <= int(created_ms) <= time.time_ns() // 1_000_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_no_file_before_the_first_answer(recorder, tmp_path):
    recorder().close()
    assert files(tmp_path) == []


def test_files_are_full_one_after_the_other_and_the_oldest_go_first(recorder, tmp_path):
    other = tmp_path / "notes.jsonl"  # not ours: neither counted nor removed
    other.write_bytes(b"x" * 40_000)
    most_bytes = 80_000
    one = recorder(most_bytes)
    sizes = []
    for index in range(600):
        one.add(answer(index, *range(100)))
        settle(one, index + 1)
        sizes.append(sum(path.stat().st_size for path in tmp_path.glob("traffic-*")))
    one.close()
    assert one.num_recorded == 600 and max(sizes) <= most_bytes and min(sizes[300:]) > most_bytes / 2
    *full, _last = paths = sorted(tmp_path.glob("traffic-*"))
    line_bytes = full[0].stat().st_size // len(full[0].read_text().splitlines())
    assert all(most_bytes / 8 - 2 * line_bytes < path.stat().st_size <= most_bytes / 8 for path in full)
    kept = [line["output_ids"][0] for path in paths for line in answers(path)]
    assert kept == list(range(600 - len(kept), 600))
    assert other.exists()


def test_two_recorders_of_one_folder_stay_within_its_bytes(tmp_path):
    pair = [TrafficRecorder(tmp_path, target_hash="ab12", most_bytes=80_000) for _ in range(2)]
    for index in range(300):
        for one in pair:
            one.add(answer(index, *range(100)))
            settle(one, index + 1)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 80_000
    for one in pair:
        one.close()
        assert (one.num_recorded, one.num_dropped) == (300, 0)
    assert {line["output_ids"][0] for line in all_answers(tmp_path)} >= set(range(280, 300))


def test_files_have_16_mib_where_the_folder_may_have_much_more(recorder):
    assert recorder(1 << 30)._file_bytes == 16 * MIB and recorder(64 * MIB)._file_bytes == 8 * MIB


def test_what_only_bears_the_name_of_a_file_of_ours_is_left_alone(recorder, tmp_path):
    folder, link = tmp_path / "traffic-1-1.jsonl", tmp_path / "traffic-2-1.jsonl"
    folder.mkdir()
    (folder / "kept").write_bytes(b"x" * 100_000)
    link.symlink_to(folder / "kept")
    one = recorder(8_000)
    for index in range(100):
        one.add(answer(index, *range(50)))
        settle(one, index + 1)
    assert one.num_recorded == 100 and (folder / "kept").exists() and link.is_symlink()


@pytest.mark.parametrize("meddle", ["moved", "cut", "more", "moved folder"])
def test_a_file_that_somebody_took_is_left_to_him_and_a_new_one_begun(tmp_path, meddle):
    folder = tmp_path / "kept"
    folder.mkdir()
    one = TrafficRecorder(folder, target_hash="ab12", most_bytes=MIB, retry_s=0.0)
    one.add(answer(1, 1))
    settle(one, 1)
    (path,) = files(folder)
    if meddle == "moved":
        path.rename(tmp_path / "taken")
    elif meddle == "moved folder":
        folder.rename(tmp_path / "away")
        folder.mkdir()
    elif meddle == "cut":
        os.truncate(path, 0)
    else:
        with path.open("a") as file:
            file.write("{")
    one.add(answer(2, 2))
    one.close()
    assert [line["output_ids"] for line in answers(files(folder)[-1])] == [[2, 2]]
    assert one.num_recorded == 2 and b"\0" not in b"".join(map(Path.read_bytes, files(folder)))


def test_an_answer_that_cannot_be_told_does_not_end_recording(recorder, tmp_path, caplog):
    one = recorder(retry_s=0.0)
    one.add(answer(object(), 1))
    one.add(answer(1, 2))
    one.close()
    assert [line["output_ids"] for line in all_answers(tmp_path)] == [[1, 2]]
    assert (one.num_recorded, one.num_dropped) == (1, 1) and "not JSON serializable" in caplog.text


def test_an_answer_that_no_file_can_hold_is_dropped(recorder, tmp_path):
    one = recorder(8_000)
    one.add(answer(*range(1000)))
    one.add(answer(1, 2))
    one.close()
    assert (one.num_recorded, one.num_dropped) == (1, 1) and len(all_answers(tmp_path)) == 1


def test_what_a_killed_process_left_stays_and_a_new_file_is_begun(recorder, tmp_path):
    torn = tmp_path / "traffic-1700000000000-7.jsonl"
    torn.write_text(json.dumps(HEAD) + '\n{"prompt_ids": [1, 2')
    one = recorder()
    one.add(answer(5, 6))
    one.close()
    assert torn.read_text().endswith('{"prompt_ids": [1, 2')
    first, second = files(tmp_path)
    assert first == torn and [line["output_ids"] for line in answers(second)] == [[5, 6]]


def test_a_killed_process_leaves_what_was_written_and_nothing_half(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from dspark.serving.traffic import ServedAnswer, TrafficRecorder
one = TrafficRecorder(Path(sys.argv[1]), target_hash="ab12", most_bytes=1 << 24)
while one.num_recorded < 50:
    one.add(ServedAnswer(prompt_ids=(1,), output_ids=tuple(range(50)), temperature=0.0))
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    assert ended.returncode == -9
    (path,) = files(tmp_path)
    lines = path.read_text().split("\n")
    assert len([json.loads(line) for line in lines[:-1]]) >= 51  # all but what may be torn


def test_retraining_reads_what_was_recorded(recorder, tmp_path):
    (tmp_path / "traffic-1700000000000-7.jsonl").write_text(json.dumps(HEAD) + '\n{"prompt_ids": [1, 2')
    one = recorder(16_000)
    for index in range(40):
        one.add(answer(*range(30), index, temperature=0.7 * (index % 2)))
        settle(one, index + 1)
    one.close()
    assert len(files(tmp_path)) > 3
    limits = TrafficLimits(max_sequence=64, max_prompt=64, max_tokens=10**6)
    read = read_traffic([tmp_path], target_hash="ab12", vocab_size=64, limits=limits, tell=print)
    assert [(found.prompt_ids, found.output_ids[-1], found.temperature) for found in read] == [
        ((1, 2, 3), index, 0.7 * (index % 2)) for index in range(40)
    ]


# ---- which answers ----

WHOLE = [
    RequestOutput(request_id=1, token_ids=(5, 6)),
    RequestOutput(request_id=1, token_ids=(0,), finish_reason="stop"),
]


def heard(recorder, outputs, **params):
    """Send one request's outputs past the recorder; return what came out behind it."""
    passed = []
    take = recorder.listen(passed.append, prompt_ids=(9,), params=SamplingParams(**params))
    for output in outputs:
        take(output)
    return passed


def test_whole_answers_are_recorded_as_they_were_sent(recorder, tmp_path):
    one = recorder()
    assert heard(one, WHOLE, temperature=0.5) == WHOLE
    cut = [RequestOutput(request_id=1, token_ids=(3, 4), finish_reason="length")]
    assert heard(one, cut, temperature=0.0, top_p=0.5, stop_words=("x",)) == cut
    one.close()
    assert all_answers(tmp_path) == [
        {"prompt_ids": [9], "output_ids": [5, 6, 0], "temperature": 0.5},
        {"prompt_ids": [9], "output_ids": [3, 4], "temperature": 0.0},
    ]


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"min_tokens": 1},
        {"bad_words_ids": ((5,),)},
        {"guided_decoding_guide_type": "json"},
    ],
)
def test_answers_to_altered_distributions_are_left_out(recorder, tmp_path, params):
    one = recorder()
    assert heard(one, WHOLE, **params) == WHOLE
    one.close()
    assert files(tmp_path) == [] and one.num_dropped == 0


@pytest.mark.parametrize(
    "last",
    [
        RequestOutput(request_id=1, token_ids=(0,), finish_reason="cancelled"),
        RequestOutput(request_id=1, token_ids=(0,), finish_reason="timeout"),
        RequestOutput(request_id=1, error=EngineError("gone")),
    ],
    ids=["cancelled", "timeout", "error"],
)
def test_answers_that_did_not_end_by_themselves_are_left_out(recorder, tmp_path, last):
    one = recorder()
    assert heard(one, [WHOLE[0], last]) == [WHOLE[0], last]
    heard(one, [RequestOutput(request_id=2, token_ids=(7,), finish_reason="stop")])  # a single token
    one.close()
    assert files(tmp_path) == [] and one.num_dropped == 0


# ---- whatever fails, answers go on ----


def test_a_full_queue_drops_and_counts_and_never_waits(recorder, tmp_path):
    one = recorder()
    stuck, free = threading.Event(), threading.Event()
    write = one._write

    def slow(answer):
        stuck.set()
        assert free.wait(60)
        write(answer)

    one._write = slow
    one.add(answer(0, 0))
    assert stuck.wait(60)
    for index in range(300):
        one.add(answer(1, index))
    assert one.num_dropped == 300 - 256
    free.set()
    one.close()  # what is queued is written
    assert one.num_recorded == 257
    assert [line["output_ids"][1] for line in all_answers(tmp_path)] == [0, *range(256)]


def test_after_its_end_a_recorder_takes_nothing(recorder, tmp_path):
    one = recorder()
    one.close()
    one.add(answer(1, 2))
    assert files(tmp_path) == [] and one.num_dropped == 1


def test_a_folder_that_vanishes_pauses_recording_with_one_line(tmp_path, caplog):
    caplog.set_level(logging.INFO, "dspark.serving")
    folder = tmp_path / "kept"
    prepare_folder(str(folder))
    one = TrafficRecorder(folder, target_hash="ab12", most_bytes=MIB, retry_s=0.02)
    one.add(answer(1, 1))
    settle(one, 1)
    shutil.rmtree(folder)
    for count in range(2, 5):
        one.add(answer(2, 2))
        settle(one, count)
        time.sleep(0.03)  # tried again each time
    assert (one.num_recorded, one.num_dropped) == (1, 3) and not folder.exists()
    assert caplog.text.count("cannot be written (No such file or directory)") == 1
    folder.mkdir()
    one.add(answer(3, 3))
    one.close()
    assert [line["output_ids"] for line in all_answers(folder)] == [[3, 3]]
    assert "answers are kept again" in caplog.text and "2 answers kept, 3 dropped" in caplog.text


def test_while_paused_nothing_is_tried(recorder, tmp_path):
    one = recorder(retry_s=3600.0)
    one._folder = tmp_path / "gone"
    one.add(answer(1, 1))
    settle(one, 1)
    (tmp_path / "gone").mkdir()
    one.add(answer(1, 1))
    settle(one, 2)
    assert one.num_dropped == 2 and files(tmp_path / "gone") == []


def test_a_full_disk_leaves_whole_lines_and_the_next_try_a_new_file(tmp_path):
    """The limit on a file's size stands for the disk: the last line fits in part."""
    code = """
import resource, sys, time
from pathlib import Path
from dspark.serving.traffic import ServedAnswer, TrafficRecorder
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
one = TrafficRecorder(Path(sys.argv[1]), target_hash="ab12", most_bytes=1 << 24, retry_s=0.0)
def add(count):
    before = one.num_recorded + one.num_dropped
    for index in range(count):
        one.add(ServedAnswer(prompt_ids=(index,), output_ids=tuple(range(50)), temperature=0.0))
    while one.num_recorded + one.num_dropped < before + count:
        time.sleep(0.001)
limit(700)
add(3)
limit(10)  # not even a first line
add(2)
limit(resource.RLIM_INFINITY)
add(1)
one.close()
print(one.num_recorded, one.num_dropped)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    kept = [[line["prompt_ids"][0] for line in answers(path)] for path in files(tmp_path)]
    assert kept == [[0, 1], [0]]
    assert done.stdout.split() == ["3", "3"] and "Traceback" not in done.stderr


# ---- settings and metrics ----


def test_nothing_is_recorded_unless_asked_for():
    assert ServeConfig().record == "none"
    assert open_recorder(ServeConfig(), target_hash="ab12") is None


def test_the_folder_is_made_for_this_user_alone(tmp_path):
    folder = tmp_path / "deep" / "kept"
    prepare_folder(str(folder))
    prepare_folder(str(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and files(folder) == []
    one = open_recorder(ServeConfig(record=str(folder), record_bytes=MIB), target_hash="ab12")
    one.add(answer(1, 2))
    one.close()
    assert len(all_answers(folder)) == 1


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/none/there"])
def test_a_folder_that_cannot_be_made_is_named_with_what_is_allowed(tmp_path, place):
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / place)
    with pytest.raises(
        ConfigError, match=f"^record: got '{folder}', which cannot be written .*; allowed is none or"
    ):
        prepare_folder(folder)


@pytest.fixture
def base(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").mkdir(mode=0o500)
    return tmp_path


def problems(base, **given):
    with pytest.raises(ConfigError) as caught:
        load_checked_config(None, {"target": "org/name", **given}, base=base, environ={})
    return str(caught.value).splitlines()


def test_settings_name_what_is_wrong_with_the_folder_and_its_bytes(base):
    (told,) = problems(base, record=str(base / "file"))
    assert told == (
        f"record: got '{base}/file', which is no folder; allowed is none or a folder that this user may make and write"
    )
    (told,) = problems(base, record=str(base / "file" / "below"))
    assert told.startswith(f"record: got '{base}/file/below', whose parent {base}/file is no folder;")
    both = problems(base, record=str(base / "file"), record_bytes="1MiB")
    assert both[0] == f"options: record_bytes: got '1MiB', allowed is at least {16 * MIB} bytes (16MiB)"
    assert len(both) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_settings_name_a_folder_that_this_user_may_not_write(base):
    (told,) = problems(base, record=str(base / "locked"))
    assert told.startswith(f"record: got '{base}/locked', which cannot be written;")


def test_the_folder_is_absolute_whatever_the_servers_working_folder(base, monkeypatch):
    monkeypatch.chdir(base)
    config = load_checked_config(None, {"target": "org/name", "record": "kept"}, base=base, environ={})
    assert config.record == str(base / "kept") and not Path(config.record).exists()
    assert load_checked_config(None, {"target": "org/name"}, base=base, environ={}).record == "none"
    given = load_serve_config(None, {"target": "x", "record_bytes": "2GiB"}, environ={})
    assert given.record_bytes == 1 << 31


def test_kept_and_dropped_answers_are_counted_in_the_metrics(recorder):
    class Sink:
        def __init__(self):
            self.counted = {}

        def increment(self, name, amount, /, **_labels):
            self.counted[name] = self.counted.get(name, 0) + amount

        def set(self, _name, _value, /, **_labels):
            """Gauges are another test's."""

    one, sink = recorder(8_000), Sink()
    telemetry = Telemetry(sink, recorder=one)
    one.add(answer(*range(1000)))
    for count in range(2, 4):
        one.add(answer(1, 2))
        settle(one, count)
        telemetry.flush(EngineStats())
    assert sink.counted == {"dspark_recorded_answers_total": 2, "dspark_unrecorded_answers_total": 1}
