"""The wire contract's table, its config.pbtxt, and the model folder that goes with it."""

from pathlib import Path

import pytest
import yaml
from dspark.config import load_serve_config
from dspark.request import SAMPLING_FIELDS
from dspark.serving.contract import (
    ALIASES,
    INPUTS,
    INPUTS_BY_NAME,
    OUTPUTS,
    UNBATCHED_MODEL_NAME,
    config_pbtxt,
    unbatched_config_pbtxt,
)

REPOSITORY = Path(__file__).parents[2] / "model_repository" / "dspark"


def test_committed_config_is_the_generated_one():
    assert (REPOSITORY / "config.pbtxt").read_text() == config_pbtxt()
    unbatched = REPOSITORY.with_name(UNBATCHED_MODEL_NAME) / "config.pbtxt"
    assert unbatched.read_text() == unbatched_config_pbtxt()


def test_every_input_is_optional_and_declared_once():
    for specs in (INPUTS, OUTPUTS):
        names = [spec.name for spec in specs]
        assert len(names) == len(set(names))
    # One name is both: vLLM's clients ask for `logprobs` alternatives and read them from `logprobs`.
    assert {spec.name for spec in INPUTS} & {spec.name for spec in OUTPUTS} == {"logprobs"}
    inputs_text, outputs_text = config_pbtxt().split("\noutput [\n")
    for spec in INPUTS:
        dims = "[ -1 ]" if spec.many else "[ 1 ]"
        line = f'{{ name: "{spec.name}", data_type: TYPE_{spec.wire_type}, dims: {dims}, optional: true }}'
        assert line in inputs_text
    assert "optional" not in outputs_text


def test_triton_itself_reads_the_config():
    text_format = pytest.importorskip("google.protobuf.text_format")
    model_config = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    config = text_format.Parse(config_pbtxt(), model_config.ModelConfig())
    assert config.name == "dspark" and config.backend == "python"
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 1
    assert [entry.name for entry in config.input] == [spec.name for spec in INPUTS]
    assert all(entry.optional for entry in config.input)


def test_the_model_without_a_batch_dimension_declares_the_same():
    text_format = pytest.importorskip("google.protobuf.text_format")
    model_config = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    config = text_format.Parse(unbatched_config_pbtxt(), model_config.ModelConfig())
    batched = text_format.Parse(config_pbtxt(), model_config.ModelConfig())
    assert config.max_batch_size == 0 and config.model_transaction_policy.decoupled
    assert config.input == batched.input and config.output == batched.output


def test_sampling_parameters_are_all_on_the_wire():
    not_by_name = {"stop_token_ids", "bad_words_ids"}  # made from end_id and bad_words
    assert set(INPUTS_BY_NAME) >= SAMPLING_FIELDS - not_by_name


def test_aliases_name_declared_inputs_of_the_same_type():
    for alias, name in ALIASES.items():
        assert INPUTS_BY_NAME[alias].wire_type == INPUTS_BY_NAME[name].wire_type


def test_model_py_is_one_import():
    code = [
        line
        for line in (REPOSITORY / "1" / "model.py").read_text().splitlines()
        if line.startswith(("from", "import"))
    ]
    assert code == ["from dspark.serving.triton_model import TritonPythonModel as TritonPythonModel"]


def test_model_yaml_holds_known_settings_and_their_defaults():
    path = REPOSITORY / "1" / "model.yaml"
    given = yaml.safe_load(path.read_text())
    config = load_serve_config(path, environ={})
    chosen = {name: given[name] for name in ("target", "prompt_lookup", "touch_cache")}
    bare = load_serve_config(None, chosen, environ={})
    assert config == bare, "model.yaml must say what happens without it, but for what it chooses"
