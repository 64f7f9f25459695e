"""What `dspark doctor` finds, on a machine made for each case."""

import argparse
import json
import resource
import socket

import pytest
from dspark import doctor_checks
from dspark.cli import main
from dspark.doctor import run_doctor
from dspark.doctor_checks import machine_findings, model_findings, package_findings, port_findings
from support.tiny_drafters import write_good_drafter
from support.tiny_heads import write_tiny_head
from support.tiny_models import write_tiny_target


@pytest.fixture
def version_dir(tmp_path):
    folder = tmp_path / "repository" / "dspark" / "1"
    folder.mkdir(parents=True)
    target = write_tiny_target(tmp_path / "target", with_tokenizer=True, max_context_len=4096)
    write_good_drafter(folder / "drafter", target)
    (folder / "model.yaml").write_text(
        f"target: {target}\ncache_bytes: 64MiB\ndtype: float32\npolicy: none\n"
    )
    return folder


def found(findings):
    return {finding.name: finding for finding in findings}


def settle(version_dir, **settings):
    text = (version_dir / "model.yaml").read_text()
    (version_dir / "model.yaml").write_text(text + "".join(f"{k}: {v}\n" for k, v in settings.items()))
    return found(model_findings(version_dir))


def test_a_model_that_can_be_served(version_dir):
    told = found(model_findings(version_dir))
    assert list(told) == ["settings", "target", "executor", "drafter", "cache", "memory"]
    assert not any(finding.bad for finding in told.values())
    assert "float32" in told["executor"].text and "(of auto): fits the target" in told["drafter"].text
    pages = int(told["cache"].text.split()[0])
    assert (
        f"{pages} pages of 16 tokens, {pages * 16 / 4096:.1f} times the context of 4096" in told["cache"].text
    )


@pytest.mark.parametrize("kind", ["auto", "eagle3", "mtp", "draft_model", "ngram"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_page_budget_is_the_engines_own(version_dir, tmp_path, kind, dtype):
    from dspark.runtime import build_engine
    from dspark.serving.checks import load_checked_config

    drafter: object = kind
    if kind in ("eagle3", "mtp"):
        pytest.importorskip("torch", reason="heads run in torch")
        drafter = write_tiny_head(tmp_path / "head", tmp_path / "target", kind=kind)
    elif kind == "draft_model":
        drafter = tmp_path / "target"
    told = settle(version_dir, cache_bytes="8MiB", dtype=dtype, drafter=drafter)
    config = load_checked_config(version_dir / "model.yaml", {}, base=version_dir, environ={})
    engine = build_engine(config, base=version_dir)
    assert told["cache"].text.startswith(f"{engine.limits.num_pages} pages of ")


def test_an_engine_decides_its_own_memory(version_dir):
    told = settle(version_dir, executor="onnxruntime", engine=version_dir)
    assert "onnxruntime" in told["executor"].text and "memory" not in told


def test_every_problem_of_the_settings_is_a_finding(version_dir):
    (version_dir / "model.yaml").write_text("target: /nowhere.gguf\npolicy: x\npage_size: 0\n")
    told = list(model_findings(version_dir))
    assert [finding.name for finding in told] == ["settings"] * 3 and all(finding.bad for finding in told)


def test_a_target_that_cannot_be_read_is_bad(version_dir, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "mamba"}')
    told = settle(version_dir, target=tmp_path / "other")
    assert told["target"].bad and "executor" not in told


def test_a_drafter_of_another_target_is_bad(version_dir, tmp_path):
    other = write_tiny_target(tmp_path / "second", with_tokenizer=True, max_context_len=64, hidden_size=64)
    told = settle(version_dir, target=other, drafter=version_dir / "drafter")
    assert told["drafter"].bad and "does not fit" in told["drafter"].text
    told = settle(version_dir, drafter="auto")
    assert not told["drafter"].bad and "ngram (of auto)" in told["drafter"].text


@pytest.mark.parametrize(
    ("settings", "name", "text"),
    [
        ({"cache_bytes": 100}, "cache", "cache_bytes: got 100, allowed is at least"),
        (
            {"max_context_len": 9999},
            "context",
            "max_context_len: got 9999, allowed is at most the model's 4096",
        ),
    ],
)
def test_limits_the_model_cannot_keep_are_bad(version_dir, settings, name, text):
    told = settle(version_dir, **settings)
    assert told[name].bad and told[name].text.startswith(text)


def test_caches_larger_than_the_memory_are_bad(version_dir, monkeypatch):
    monkeypatch.setattr(doctor_checks, "_available_bytes", lambda: 1 << 20)
    told = settle(version_dir)
    assert told["memory"].bad and "lower cache_bytes" in told["memory"].text


def test_available_memory_is_at_most_the_machines():
    assert 0 < doctor_checks._available_bytes() < 1 << 50


def test_ports_are_free_or_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        told = found(port_findings("127.0.0.1", {"grpc": taken.getsockname()[1], "http": 0}))
    grpc, http = told.values()
    assert grpc.bad and grpc.text.startswith("grpc: taken on 127.0.0.1") and not http.bad
    assert "--grpc-port 0" in grpc.text


def test_a_machine_without_shared_memory_or_files_is_bad(tmp_path, monkeypatch):
    assert not any(finding.bad for finding in machine_findings() if finding.name != "tritonserver")
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (256, 4096))
    told = found(machine_findings(shared=tmp_path / "gone"))
    assert (
        told["shared memory"].bad and told["open files"].bad and "1024 are wanted" in told["open files"].text
    )
    monkeypatch.setattr(doctor_checks, "_LEAST_SHARED_BYTES", 1 << 60)
    assert "--shm-size" in found(machine_findings(shared=tmp_path))["shared memory"].text


def test_packages_are_named_with_their_version():
    told = found(package_findings())
    assert told["numpy"].text[0].isdigit() and not told["numpy"].bad


def test_the_status_says_whether_a_server_would_start(version_dir, capsys):
    repository = str(version_dir.parents[1])
    main(["doctor", "--json", "--model-repository", repository])
    told = json.loads(capsys.readouterr().out)
    # Ports are the machine's business, not this test's.
    assert not [one for one in told if one["bad"] and not one["name"].startswith("port")]
    (version_dir / "model.yaml").write_text("target: /nowhere.gguf\n")
    assert main(["doctor", "--model-repository", repository]) == 1
    shown = capsys.readouterr().out
    assert "BAD  settings" in shown and "findings are bad: " in shown and "settings" in shown.splitlines()[-1]


@pytest.mark.server
def test_start_and_stop_are_timed(version_dir, capsys):
    (version_dir.parent / "config.pbtxt").write_text(_config())
    (version_dir / "model.py").write_text("from dspark.serving.triton_model import TritonPythonModel\n")
    run_doctor(
        argparse.Namespace(model_repository=version_dir.parents[1], host="127.0.0.1", start=True, json=True)
    )
    told = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    for name in ("ready", "first answer", "stopped"):
        assert float(told[name]["text"].split()[1]) > 0
    (version_dir / "model.py").write_text("nonsense\n")
    run_doctor(
        argparse.Namespace(model_repository=version_dir.parents[1], host="127.0.0.1", start=True, json=True)
    )
    told = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert told["start"]["bad"] and "nonsense" in told["start"]["text"]


def _config():
    from dspark.serving.contract import config_pbtxt

    return config_pbtxt()
