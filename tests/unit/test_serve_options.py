"""The options of `dspark serve`: those of the model win over model.yaml, and drafting has all of `dspark generate`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from dspark.errors import ConfigError
from dspark.generate import add_generate_arguments
from dspark.serving.options import add_serve_arguments, checked_settings
from support.tiny_models import write_tiny_target


def parsed(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return parser.parse_args(list(given))


def options_of(add: object) -> set[str]:
    parser = argparse.ArgumentParser()
    add(parser)  # type: ignore[operator]
    return {text for action in parser._actions for text in action.option_strings}


def test_drafting_options_are_those_of_generate() -> None:
    drafting = {o for o in options_of(add_generate_arguments) if "draft" in o or "lookup" in o}
    assert len(drafting) >= 4 and drafting <= options_of(add_serve_arguments)


def test_drafting_options_reach_the_model_and_what_is_not_given_does_not(tmp_path: Path) -> None:
    (tmp_path / "dspark" / "1").mkdir(parents=True)
    write_tiny_target(tmp_path / "target")
    (tmp_path / "dspark" / "1" / "model.yaml").write_text("prompt_lookup: true\n")
    place = ("--model-repository", str(tmp_path), "--target", str(tmp_path / "target"))
    settings = checked_settings(
        parsed(*place, "--draft-tree", "8", "--no-prompt-lookup", "--num-draft-tokens", "3")
    )
    assert settings["draft_tree"] == 8 and settings["num_draft_tokens"] == 3
    assert settings["prompt_lookup"] is False
    assert not {"draft_tree", "num_draft_tokens", "prompt_lookup"} & set(checked_settings(parsed(*place)))
    with pytest.raises(ConfigError, match="draft_tree.*65"):
        checked_settings(parsed(*place, "--draft-tree", "65"))


def test_the_folder_of_recorded_answers_is_told_to_the_server_as_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = ("--target", "org/name", "--drafter", "none")
    settings = checked_settings(parsed(*place, "--record", "kept", "--record-bytes", "64MiB"))
    assert settings["record"] == str(tmp_path / "kept") and settings["record_bytes"] == "64MiB"
    assert checked_settings(parsed(*place, "--record", "none"))["record"] == "none"
    assert "record" not in checked_settings(parsed(*place))
