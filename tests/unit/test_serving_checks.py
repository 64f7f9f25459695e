"""Every problem of the settings is told at once, with field, value and what is allowed."""

import argparse

import pytest
import yaml
from dspark.errors import ConfigError
from dspark.serving.checks import load_checked_config
from dspark.serving.options import add_serve_arguments, checked_settings
from dspark.serving.paths import default_model_repository


@pytest.fixture
def base(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    (tmp_path / "curve.json").write_text("{}")
    return tmp_path


def problems(base, text, overrides=None, environ=None):
    (base / "model.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_checked_config(base / "model.yaml", overrides or {}, base=base, environ=environ or {})
    return str(caught.value).splitlines()


def test_what_is_right_is_read_and_made_absolute(base):
    (base / "model.yaml").write_text("target: target\ncapacity: curve.json\npolicy: fixed:3\n")
    config = load_checked_config(base / "model.yaml", {}, base=base, environ={"DSPARK_PAGE_SIZE": "8"})
    assert config.target == str(base / "target") and config.page_size == 8 and config.policy == "fixed:3"


def test_every_setting_of_the_shipped_file_is_an_option_too():
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    known = vars(parser.parse_args([]))
    shipped = yaml.safe_load((default_model_repository() / "dspark/1/model.yaml").read_text(encoding="utf-8"))
    assert [name for name in shipped if name not in known] == []
    given = parser.parse_args(["--page-size", "8", "--target", "org/name", "--drafter", "none"])
    assert checked_settings(given)["page_size"] == 8


@pytest.mark.parametrize("value", ["9" * 400, "9" * 400 + "TB", str(2**63), 2**63])
def test_bytes_beyond_any_machine_are_refused_by_name(base, value):
    told = problems(base, "target: target", {"cache_bytes": value})
    assert [line.startswith("options: cache_bytes: got ") for line in told] == [True]


def test_a_hub_name_may_be_a_target(base):
    assert load_checked_config(None, {"target": "org/name"}, base=base, environ={}).target == "org/name"


def test_problems_of_every_kind_and_source_are_told_at_once(base):
    text = """
target: /nowhere/model.gguf
drafter: /nowhere/drafter
policy: fixed:many
capacity: gone.json
calibration: gone.json
learned_calibration: /
max_batch_size: 0
page_size: wide
cache_bytes: 5 parsecs
dtype: int8
drafter_dtype: int8
colour: red
"""
    told = problems(base, text, {"executor": "torch", "rule": "luck"}, {"DSPARK_MAX_QUEUE_SIZE": "-1"})
    yaml = str(base / "model.yaml")
    begins = [
        f"{yaml}: policy: got 'fixed:many', allowed is none, fixed:K",
        f"{yaml}: max_batch_size: got 0, allowed is a whole number from 1",
        f"{yaml}: page_size: got 'wide', allowed is",
        f"{yaml}: cache_bytes: got '5 parsecs', allowed is",
        f"{yaml}: unknown setting 'colour', allowed are target,",
        "environment: max_queue_size: got '-1', allowed is",
        "options: rule: got 'luck', allowed is one of auto,",
        "target: got /nowhere/model.gguf, which is not there; allowed is",
        "drafter: got /nowhere/drafter, which is no folder; allowed is",
        "capacity: got 'gone.json', allowed is a file, auto or none",
        "calibration: got 'gone.json', allowed is a file, auto or none",
        "learned_calibration: got '/', which is a folder; allowed is",
        "dtype: got 'int8', allowed with the torch executor is auto, float32, bfloat16, float16",
        "drafter_dtype: got 'int8', allowed with the torch executor is auto, float32, bfloat16, float16",
    ]
    assert len(told) == len(begins)
    for line, begin in zip(told, begins, strict=True):
        assert line.startswith(begin), (line, begin)


@pytest.mark.parametrize(
    ("target", "wrong"),
    [
        ("", "target: got '', allowed is a non-empty text"),
        ("null", "target: not given"),
        ("./gone", "which is not there"),
        ("a/b/c", "which is not there"),
        ("curve.json", "a file that is no .gguf"),
        ("target/..", "a folder without config.json"),
    ],
)
def test_targets_that_cannot_be_there(base, target, wrong):
    (told,) = problems(base, f"target: {target if target else repr(target)}")
    assert wrong in told


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("a: [", "cannot be read"),
        ("a: " + 5000 * "[", "cannot be read"),
        ("- 1", "got a list, allowed is a mapping"),
    ],
)
def test_a_file_that_cannot_be_read_does_not_hide_the_rest(base, text, wrong):
    told = "\n".join(problems(base, text, {"policy": "x"}))
    assert wrong in told and "options: policy: got 'x'" in told
    assert "target: not given" not in told  # the file may well name it


def test_an_engine_is_wanted_where_one_is_to_run(base):
    text = "target: target\nexecutor: onnxruntime\n"
    (told,) = problems(base, text)
    assert told.startswith("engine: got '', allowed with the onnxruntime executor is an engine's folder")
    (base / "model.yaml").write_text(text + "engine: target\n")
    assert load_checked_config(base / "model.yaml", {}, base=base, environ={}).engine == str(base / "target")
