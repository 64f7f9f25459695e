"""The live page against a real server: what it serves, and what a browser shows of it."""

import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from dspark.serving import dashboard as dashboard_module
from dspark.serving.dashboard import Dashboard
from support.server import ask

pytestmark = pytest.mark.server
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def looks_see_work(monkeypatch):
    """Hold every look back until eight blocks were verified, and eight tokens told, since the one before.

    The browser's virtual time waits for the network alone: its seconds may pass in a few real milliseconds. Both,
    since a look may fall between the writing of one counter and the next.
    """
    of_server, seen = dashboard_module._metrics, np.zeros(2)
    counters = rb"dspark_spec_decode_num_drafts_total", rb"dspark_generation_tokens_total"

    def counts(body):
        found = [re.findall(rb"^" + name + rb"\S* (\S+)$", body, re.MULTILINE) for name in counters]
        return np.array([sum(map(float, values)) for values in found])

    def metrics(url):
        end_s = time.monotonic() + 10
        while True:
            status, body, kind = of_server(url)
            if (counts(body) >= seen + 8).all() or time.monotonic() > end_s:
                seen[:] = counts(body)
                return status, body, kind
            time.sleep(0.05)

    monkeypatch.setattr(dashboard_module, "_metrics", metrics)


@pytest.fixture
def dashboard(server):
    made = Dashboard(host="127.0.0.1", port=0, metrics_url=server.metrics_url)
    yield made
    made.close()


def get(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def test_page_script_and_metrics_come_from_one_origin(dashboard):
    assert "<title>dspark</title>" in get(dashboard.url)
    assert "function figures" in get(dashboard.url + "figures.js")
    assert "dspark_steps_total" in get(dashboard.url + "metrics?now")
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(dashboard.url + "../secret")
    with caught.value as error:
        assert error.code == 404


def test_a_server_that_is_gone_is_said():
    made = Dashboard(host="127.0.0.1", port=0, metrics_url="http://127.0.0.1:1/metrics")
    try:
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(made.url + "metrics")
        with caught.value as error:
            assert error.code == 503 and b"no metrics" in error.read()
    finally:
        made.close()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.usefixtures("looks_see_work")
def test_a_browser_shows_the_figures(dashboard, server, tmp_path):
    busy = threading.Event()

    def load():
        while not busy.is_set():
            ask(server, text_input="ab ab ab", max_tokens=200, temperature=0.0, ignore_eos=True)

    working = threading.Thread(target=load)
    working.start()
    try:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path}",
            "--window-size=1200,900",
        ]
        command = [BROWSER, *options, "--virtual-time-budget=12000"]
        shot = tmp_path / "page.png"
        subprocess.run(
            [*command, f"--screenshot={shot}", dashboard.url], capture_output=True, timeout=90, check=True
        )
        page = subprocess.run(
            [*command, "--dump-dom", dashboard.url], capture_output=True, text=True, timeout=90, check=True
        ).stdout
    finally:
        busy.set()
        working.join()
    assert 'id="state">live, every two seconds' in page
    tiles = dict(re.findall(r'id="tile-([a-z-]+)">([^<]*)<', page))
    assert float(tiles["tokens"]) > 0 and float(tiles["accepted"]) >= 1.0, tiles
    charts = dict(re.findall(r'id="chart-([a-z]+)"[^>]*>(.*?)</svg>', page))
    drawn = {
        "rate": "<polyline",
        "requests": "<polyline",
        "positions": "<rect",
        "load": "<circle",
        "phases": "<rect",
    }
    assert charts.keys() == {*drawn, "reliability"} and "NaN" not in page
    assert all(shape in charts[name] for name, shape in drawn.items())
    for name in ("rate", "requests"):
        none, half, top = map(float, re.findall(r'text-anchor="end">([\d.]+)<', charts[name])[:3])
        assert (none, 2 * half) == (0.0, top), "the axis says what is at its middle"
    assert shot.read_bytes().startswith(b"\x89PNG") and shot.stat().st_size > 10_000
