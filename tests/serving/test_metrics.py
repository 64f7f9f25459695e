"""What a real server's /metrics tells: the counters agree with what the answers themselves say."""

import re
import time
import urllib.request

import pytest
from dspark.serving.metrics import METRICS, PHASES
from support.server import Ask, ask, command, until, until_idle

pytestmark = pytest.mark.server

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def scrape(server):
    """Return every series of ours: (name, labels but model and version) -> value, and the types of the families."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as response:
        text = response.read().decode()
    types = dict(re.findall(r"^# TYPE (dspark_\w+) (\w+)$", text, re.MULTILINE))
    values = {}
    for name, labels, value in re.findall(r"^(dspark_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        given = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert given.pop("model") == "dspark" and given.pop("version") == "1"
        values[name, *sorted(given.values())] = float(value)
    return values, types


def settled(server):
    """Scrape when all that was is written: the thread that writes began at least one round after the last request."""
    done = until_idle(server)["num_flushes"]
    until(lambda: command(server, "stats")["num_flushes"] >= done + 2)
    return scrape(server)[0]


def test_every_metric_is_exposed_with_its_type(server):
    ask(server, text_input="hello", max_tokens=5, **GREEDY)
    _, types = scrape(server)
    for spec in METRICS:
        # Series with further labels come with their first value, and this drafter's policy has no cost model.
        if not spec.labels:
            assert types[spec.name] == spec.kind, spec.name
    settled(server)
    assert scrape(server)[1]["dspark_step_seconds"] == "histogram"


def test_counters_agree_with_what_the_answers_say(server):
    before = settled(server)
    told_flags = {"return_perf_metrics": True, "return_num_input_tokens": True}
    replies = [
        ask(server, text_input=f"ab ab ab ab {i}", max_tokens=40, **told_flags, **GREEDY) for i in range(3)
    ]
    after = settled(server)

    def gained(*key):
        return after.get(key, 0.0) - before.get(key, 0.0)

    def told(name):
        return sum(int(reply.last[name][0]) for reply in replies)

    assert gained("dspark_generation_tokens_total") == sum(len(reply.ids) for reply in replies) == 120
    prompts = gained("dspark_prompt_tokens_total") + gained("dspark_cached_prompt_tokens_total")
    assert prompts == told("num_input_tokens")
    assert gained("dspark_spec_decode_num_draft_tokens_total") == told("total_draft_tokens") > 0
    accepted = told("total_accepted_draft_tokens")
    assert gained("dspark_spec_decode_num_accepted_tokens_total") == accepted > 0
    per_position = [gained("dspark_spec_decode_num_accepted_tokens_per_pos_total", str(k)) for k in range(8)]
    assert sum(per_position) == accepted
    assert per_position == sorted(per_position, reverse=True)
    steps = gained("dspark_steps_total")
    assert 0 < gained("dspark_spec_decode_num_drafts_total") <= steps
    decoded = gained("dspark_spec_verify_tokens_total") - told("total_draft_tokens")
    assert steps - 2 * len(replies) <= decoded <= steps  # one anchor a step, besides those of prompts alone
    assert gained("dspark_requests_completed_total") == 3
    assert gained("dspark_e2e_request_latency_seconds_count") == 3
    assert gained("dspark_time_to_first_token_seconds_count") == 3
    assert gained("dspark_time_per_output_token_seconds_count") == 3
    for phase in PHASES:
        assert gained("dspark_step_seconds_count", phase) > 0
    assert gained("dspark_step_seconds_sum", "verify") > 0
    assert after["dspark_num_requests_running",] == after["dspark_num_requests_waiting",] == 0
    assert after["dspark_kv_cache_usage",] == 0


def test_running_requests_and_pages_show_while_they_run(server):
    command(server, "slow")
    running = [Ask(server, text_input=f"n {i}", max_tokens=3000, stream=True, **GREEDY) for i in range(3)]
    for stream in running:
        stream.next()

    def shown(name):
        return scrape(server)[0].get((name,), 0.0)

    until(lambda: shown("dspark_num_requests_running") == 3 and 0 < shown("dspark_kv_cache_usage") <= 1)
    for stream in running:
        stream.cancel()
    until(lambda: shown("dspark_num_requests_running") == 0 and shown("dspark_kv_cache_usage") == 0)


def test_every_kind_of_end_is_counted(server):
    command(server, "slow")
    before = settled(server)
    leaving = Ask(server, text_input="x", max_tokens=3000, stream=True, **GREEDY)
    leaving.next()
    leaving.cancel()
    assert ask(server, text_input="x", top_p=7.0).error is not None
    ask(server, text_input="x", max_tokens=3000, timeout_ms=100, **GREEDY)
    command(server, "fast")
    after = settled(server)
    ends = ("dspark_requests_cancelled_total",), ("dspark_requests_failed_total", "invalid_arg"), (
        "dspark_requests_failed_total", "timeout",
    )  # fmt: skip
    assert [after.get(key, 0) - before.get(key, 0) for key in ends] == [1, 1, 1]


def test_a_drafter_that_fails_is_counted_and_costs_only_drafts(server):
    before = settled(server)
    asked = {"text_input": "fault", "max_tokens": 20, **GREEDY}
    drafted = ask(server, **asked)
    command(server, "no drafts")
    plain = ask(server, **asked)
    command(server, "fast")
    after = settled(server)
    assert plain.error is None and plain.ids == drafted.ids
    assert after["dspark_drafter_faults_total",] - before["dspark_drafter_faults_total",] > 5


def test_writing_metrics_takes_less_than_one_percent_of_the_time(server):
    command(server, "slow")  # steps of 20 ms, as a real model's
    streams = [Ask(server, text_input=f"time {i}", max_tokens=3000, stream=True, **GREEDY) for i in range(8)]
    for stream in streams:
        stream.next()
    before_s, started_s = command(server, "stats")["metrics_s"], time.monotonic()
    time.sleep(3)
    busy_s, elapsed_s = command(server, "stats")["metrics_s"] - before_s, time.monotonic() - started_s
    for stream in streams:
        stream.cancel()
    assert 0 < busy_s < 0.01 * elapsed_s
