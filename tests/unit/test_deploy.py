"""What deploy/ asks for exists: every metric named in the scrape rules and the dashboard is one that is served."""

import argparse
import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from dspark.config import load_serve_config
from dspark.serving.contract import MODEL_NAME
from dspark.serving.metrics import METRICS_BY_NAME, exposed_names
from dspark.serving.options import add_serve_arguments

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


# ---- container and Kubernetes ----------------------------------------------------------------------------

KUBERNETES = {path.name: yaml.safe_load(path.read_text()) for path in (DEPLOY / "kubernetes").glob("*.yaml")}
POD = KUBERNETES["deployment.yaml"]["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]
PORTS = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def serve_parser():
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return parser


def docker_json(word):
    return json.loads(re.search(rf"^{word} (\[.*\])$", DOCKERFILE, re.MULTILINE)[1])


def served_options():
    """Return the options that the pod starts `dspark serve` with, read by its own parser."""
    entry = docker_json("ENTRYPOINT")
    assert entry[:2] == ["dspark", "serve"]
    return serve_parser().parse_args([*entry[2:], *CONTAINER["args"]])


def test_the_container_starts_with_options_that_dspark_serve_has():
    options = serve_parser().parse_args([*docker_json("ENTRYPOINT")[2:], *docker_json("CMD")])
    assert options.host == "0.0.0.0" and options.openai_port == 9000
    exposed = set(map(int, re.search(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)[1].split()))
    served = {
        options.http_port,
        options.grpc_port,
        options.metrics_port,
        options.openai_port,
        options.dashboard_port,
    }
    assert exposed == served


def test_the_container_copies_only_what_is_there():
    root = DEPLOY.parent
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE):
        *sources, _ = line.split()
        assert all((root / source).exists() for source in sources), line
    extras = re.search(r"'\.\[(.*)\]'", DOCKERFILE)[1].split(",")
    declared = (root / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in declared for extra in extras)


def test_pods_listen_where_the_service_and_the_probes_look():
    options = served_options()
    assert {
        "http": options.http_port, "grpc": options.grpc_port, "metrics": options.metrics_port,
        "openai": options.openai_port,
    } == PORTS  # fmt: skip
    for port in KUBERNETES["service.yaml"]["spec"]["ports"]:
        assert PORTS[port["targetPort"]] == port["port"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert CONTAINER[probe]["httpGet"]["port"] in PORTS
    assert CONTAINER["readinessProbe"]["httpGet"]["path"] == f"/v2/models/{MODEL_NAME}/ready"
    annotations = POD["metadata"]["annotations"]
    assert int(annotations["prometheus.io/port"]) == PORTS["metrics"]


def test_labels_select_the_pods():
    labels = POD["metadata"]["labels"]
    assert KUBERNETES["deployment.yaml"]["spec"]["selector"]["matchLabels"] == labels
    assert KUBERNETES["service.yaml"]["spec"]["selector"] == labels


def test_a_pod_may_drain_before_it_is_killed():
    assert POD["spec"]["terminationGracePeriodSeconds"] > served_options().drain_timeout + 15


def test_settings_in_the_environment_are_settings():
    environment = {entry["name"]: entry["value"] for entry in CONTAINER["env"]}
    config = load_serve_config(None, environ=environment)
    assert config.target == "/models/target" and config.max_queue_size == 256
    known = {f"DSPARK_{field.name.upper()}" for field in dataclasses.fields(config)}
    assert set(environment) <= known


def test_the_autoscaler_reads_a_served_gauge_of_this_deployment():
    scaler = KUBERNETES["autoscaler.yaml"]["spec"]
    (metric,) = scaler["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert METRICS_BY_NAME[name].kind == "gauge"
    assert scaler["scaleTargetRef"]["name"] == KUBERNETES["deployment.yaml"]["metadata"]["name"]
    (rule,) = KUBERNETES["adapter-rule.yaml"]["rules"]["custom"]
    assert rule["name"]["as"] == name and rule["seriesQuery"].startswith(name + "{")


def test_volumes_are_declared_and_mounted():
    mounted = {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert mounted == {volume["name"] for volume in POD["spec"]["volumes"]}
