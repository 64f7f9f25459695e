"""What the live page works out of two scrapes; its own JavaScript, run by node where there is one."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import dspark.serving
import pytest
from dspark.serving.metrics import PHASES, exposed_names

PAGE = Path(dspark.serving.__file__).parent / "page"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
L = 'model="dspark",version="1"'

BEFORE = f"""# HELP dspark_steps_total steps
dspark_generation_tokens_total{{{L}}} 100
dspark_spec_decode_num_drafts_total{{{L}}} 10
dspark_spec_decode_num_draft_tokens_total{{{L}}} 40
dspark_spec_decode_num_accepted_tokens_total{{{L}}} 20
dspark_spec_verify_tokens_total{{{L}}} 60
other_metric 5
"""
NOW = f"""dspark_generation_tokens_total{{{L}}} 300
dspark_spec_decode_num_drafts_total{{{L}}} 20
dspark_spec_decode_num_draft_tokens_total{{{L}}} 70
dspark_spec_decode_num_accepted_tokens_total{{{L}}} 45
dspark_spec_verify_tokens_total{{{L}}} 105
dspark_spec_decode_num_accepted_tokens_per_pos_total{{{L},position="10"}} 2
dspark_spec_decode_num_accepted_tokens_per_pos_total{{{L},position="0"}} 18
dspark_num_requests_running{{{L}}} 3
dspark_num_requests_waiting{{{L}}} 1
dspark_kv_cache_usage{{{L}}} 0.25
dspark_time_to_first_token_seconds_bucket{{{L},le="0.1"}} 0
dspark_time_to_first_token_seconds_bucket{{{L},le="0.5"}} 4
dspark_time_to_first_token_seconds_bucket{{{L},le="+Inf"}} 4
dspark_reliability_drafts_total{{bin="7",{L}}} 4
dspark_reliability_confidence_total{{bin="7",{L}}} 3
dspark_reliability_accepted_total{{bin="7",{L}}} 2
dspark_step_seconds_sum{{{L},phase="verify"}} 8
dspark_step_seconds_count{{{L},phase="verify"}} 4
"""


def figures(before, now, seconds):
    code = (
        f"const f = require({json.dumps(str(PAGE / 'figures.js'))});"
        f"const parse = f.parseMetrics; console.log(JSON.stringify(f.figures("
        f"parse({json.dumps(before)}), parse({json.dumps(now)}), {seconds})))"
    )
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@needs_node
def test_rates_and_ratios_are_of_what_was_gained():
    told = figures(BEFORE, NOW, 2)
    assert told["tokensPerSecond"] == 100
    assert told["acceptedLength"] == 1 + 25 / 10
    assert told["verifyLength"] == 30 / (45 - 30)
    assert (told["running"], told["waiting"], told["cache"]) == (3, 1, 0.25)
    assert told["ttft"] == pytest.approx(0.3)  # half of what fell between 0.1 and 0.5
    assert told["positions"] == [{"position": 0, "share": 0.9}, {"position": 10, "share": 0.1}]
    assert told["reliability"] == [{"forecast": 0.75, "accepted": 0.5, "drafts": 4}]
    assert [p["seconds"] for p in told["phases"]] == [None, None, 2, None, None]


@needs_node
def test_nothing_is_said_where_nothing_happened():
    told = figures("", "", 2)
    assert told["tokensPerSecond"] == 0 and told["positions"] == [] and told["reliability"] == []
    assert all(told[name] is None for name in ("acceptedLength", "verifyLength", "ttft", "perToken"))


def test_the_page_names_served_metrics_and_phases_only():
    script = (PAGE / "figures.js").read_text()
    names = set(re.findall(r"dspark_[a-z_]+[a-z]", script))
    histograms = {name for name in names if name not in exposed_names()}
    assert all(name + "_bucket" in exposed_names() for name in histograms)
    assert json.dumps(list(PHASES)) in script


def test_the_page_asks_nobody_but_its_own_server():
    page = (PAGE / "index.html").read_text()
    assert "http://" not in page and "https://" not in page and 'src="figures.js"' in page
