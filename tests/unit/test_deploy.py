"""What deploy/ asks for exists: every metric named in the scrape rules and the dashboard is one that is served."""

import json
import re
from pathlib import Path

import pytest
import yaml
from dspark.serving.metrics import METRICS_BY_NAME, exposed_names

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = yaml.safe_load((DEPLOY / "prometheus-alerts.yml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PANEL_QUERIES = [
    (panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]
]
QUERIES = [(rule["alert"], rule["expr"]) for rule in RULES] + PANEL_QUERIES


def metrics_in(expression):
    return set(re.findall(r"\bdspark_[a-z0-9_]+", expression))


def family_of(name):
    return METRICS_BY_NAME.get(name) or METRICS_BY_NAME[re.sub("_(bucket|sum|count)$", "", name)]


@pytest.mark.parametrize(("title", "expression"), QUERIES)
def test_every_query_names_served_metrics_and_is_well_formed(title, expression):
    names = metrics_in(expression)
    assert names <= exposed_names(), title
    assert names or expression.startswith("up{")
    for opening, closing in ("()", "[]", "{}"):
        assert expression.count(opening) == expression.count(closing)


@pytest.mark.parametrize(("title", "expression"), QUERIES)
def test_rates_are_taken_of_counters_and_quantiles_of_buckets(title, expression):
    rated = re.findall(r"rate\((dspark_[a-z0-9_]+)", expression)
    for name in rated:
        assert family_of(name).kind in ("counter", "histogram"), title
    for name in metrics_in(expression) - set(rated):
        assert family_of(name).kind == "gauge", title
    assert ("histogram_quantile" in expression) == any(name.endswith("_bucket") for name in rated)


@pytest.mark.parametrize(("title", "expression"), QUERIES)
def test_labels_in_queries_are_labels_of_the_metric(title, expression):
    known = {"le", "instance", "job", "model", "version"}
    for name in metrics_in(expression):
        known.update(family_of(name).labels)
    named = set(re.findall(r"[{,]\s*(\w+)\s*[!=]", expression))
    for group in re.findall(r"by \(([^)]*)\)", expression):
        named.update(label.strip() for label in group.split(","))
    assert named - {""} <= known, title


def test_every_metric_but_the_trivial_is_on_the_dashboard():
    shown = {family_of(name).name for _, expression in PANEL_QUERIES for name in metrics_in(expression)}
    assert shown == set(METRICS_BY_NAME)


def test_panels_do_not_overlap_and_have_their_own_ids():
    cells = [
        (panel["gridPos"]["x"] + dx, panel["gridPos"]["y"] + dy)
        for panel in DASHBOARD["panels"]
        for dx in range(panel["gridPos"]["w"])
        for dy in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_alerts_say_what_to_do_and_wait_before_they_fire():
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["annotations"]["summary"] and rule["labels"]["severity"] in ("page", "warn")
        assert re.fullmatch(r"\d+m", rule["for"])


def test_prometheus_scrapes_where_dspark_serve_listens_and_reads_the_alerts():
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "dspark" and job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8002"]}]
    assert all((DEPLOY / name).is_file() for name in config["rule_files"])
