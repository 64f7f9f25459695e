"""The wire contract as one table: every input and output, and the two config.pbtxt made from it.

Knows names, types and defaults; does not know how a value is checked (`parse`) or answered (`stream`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

__all__ = [
    "ALIASES",
    "INPUTS",
    "INPUTS_BY_NAME",
    "MODEL_NAME",
    "OUTPUTS",
    "UNBATCHED_MODEL_NAME",
    "InputSpec",
    "OutputSpec",
    "config_pbtxt",
    "unbatched_config_pbtxt",
]

MODEL_NAME: Final = "dspark"
UNBATCHED_MODEL_NAME: Final = "vllm_model"  # where vLLM's published client looks

WireType = Literal["BOOL", "INT32", "INT64", "UINT32", "UINT64", "FP32", "STRING"]

_NUMPY: Final[dict[str, type]] = {
    "BOOL": np.bool_,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "STRING": np.object_,
}


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One declared input. `many` inputs have dims [-1], the others [1]; the batch dimension is always 1.

    `alias_of` names the field that this tensor is another spelling of.
    """

    name: str
    wire_type: WireType
    about: str
    many: bool = False
    alias_of: str | None = None

    @property
    def field(self) -> str:
        return self.alias_of or self.name


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """One declared output; `numpy_type` is what its array must be made with."""

    name: str
    wire_type: WireType
    about: str
    many: bool = False

    @property
    def numpy_type(self) -> type:
        return _NUMPY[self.wire_type]


INPUTS: Final[tuple[InputSpec, ...]] = (
    InputSpec("text_input", "STRING", "the prompt as text"),
    InputSpec("input_ids", "INT32", "the prompt as token ids, used as they are", many=True),
    InputSpec("messages", "STRING", "the prompt as JSON chat messages"),
    InputSpec("tools", "STRING", "JSON list of tools, handed to the chat template with the messages"),
    InputSpec("stream", "BOOL", "deltas as they come, or exactly one answer"),
    InputSpec("streaming", "BOOL", "the same as stream", alias_of="stream"),
    InputSpec("max_tokens", "INT32", "1 .. context left; 256 when not sent"),
    InputSpec("request_output_len", "INT32", "the same as max_tokens", alias_of="max_tokens"),
    InputSpec("min_tokens", "INT32", "no stop before so many tokens"),
    InputSpec("min_length", "INT32", "the same as min_tokens", alias_of="min_tokens"),
    InputSpec("temperature", "FP32", "0 = greedy; 1 when not sent"),
    InputSpec("top_k", "INT32", "0 = off"),
    InputSpec("top_p", "FP32", "in (0, 1]"),
    InputSpec("min_p", "FP32", "in [0, 1)"),
    InputSpec("seed", "UINT64", "drawn when not sent, and reported"),
    InputSpec("random_seed", "UINT64", "the same as seed", alias_of="seed"),
    InputSpec("repetition_penalty", "FP32", "> 0; 1 = off"),
    InputSpec("presence_penalty", "FP32", "in [-2, 2]; 0 = off"),
    InputSpec("frequency_penalty", "FP32", "in [-2, 2]; 0 = off"),
    InputSpec("stop_words", "STRING", "texts that end the answer", many=True),
    InputSpec("stop", "BOOL", "true cancels the running request of this request id"),
    InputSpec("bad_words", "STRING", "texts that must not be produced", many=True),
    InputSpec("end_id", "INT32", "ends the answer in place of the model's own end tokens"),
    InputSpec("ignore_eos", "BOOL", "end tokens do not end the answer"),
    InputSpec("exclude_input_in_output", "BOOL", "true when not sent"),
    InputSpec(
        "num_draft_tokens",
        "INT32",
        "most drafts verified per step; 0 = no speculation, -1 = scheduler decides",
    ),
    InputSpec("return_log_probs", "BOOL", "cum_log_probs and output_log_probs"),
    InputSpec("return_cumulative_logprob", "BOOL", "cumulative_logprob"),
    InputSpec("return_logprobs", "BOOL", "logprobs; also without alternatives"),
    InputSpec("return_num_input_tokens", "BOOL", "num_input_tokens"),
    InputSpec("return_num_output_tokens", "BOOL", "num_output_tokens"),
    InputSpec("return_finish_reason", "BOOL", "finish_reason"),
    InputSpec("return_perf_metrics", "BOOL", "timestamps, acceptance, spec_decode_metrics"),
    InputSpec("logprobs", "INT32", "alternatives per token, 0 to 20"),
    InputSpec(
        "guided_decoding_guide_type", "STRING", "what the answer must follow: json, json_schema or regex"
    ),
    InputSpec("guided_decoding_guide", "STRING", "the JSON schema or regular expression"),
    InputSpec("priority", "INT32", "higher runs earlier"),
    InputSpec("timeout_ms", "INT32", "0 = none"),
    # Sent by clients of TensorRT-LLM's models. Only the value that changes nothing is taken.
    InputSpec("beam_width", "INT32", "1"),
    InputSpec("num_return_sequences", "INT32", "1"),
    InputSpec("return_context_logits", "BOOL", "false"),
    InputSpec("return_generation_logits", "BOOL", "false"),
    InputSpec("use_draft_logits", "BOOL", "false"),
    InputSpec("pad_id", "INT32", "any; nothing is padded here"),
    InputSpec("length_penalty", "FP32", "any; it weighs beams, of which there is one"),
    InputSpec("sampling_parameters", "STRING", "JSON object with any of the names above"),
)

OUTPUTS: Final[tuple[OutputSpec, ...]] = (
    OutputSpec("text_output", "STRING", "every answer; a delta when streaming"),
    OutputSpec("output_ids", "INT32", "token ids of this answer", many=True),
    OutputSpec("num_input_tokens", "UINT32", "tokens of the prompt"),
    OutputSpec("num_output_tokens", "UINT32", "tokens of this answer"),
    OutputSpec("finish_reason", "STRING", "on the last answer: stop, length, cancelled, timeout"),
    OutputSpec("cum_log_probs", "FP32", "log probability of the answer so far"),
    OutputSpec("output_log_probs", "FP32", "log probability of each token of this answer", many=True),
    OutputSpec("cumulative_logprob", "FP32", "the same as cum_log_probs"),
    OutputSpec(
        "logprobs",
        "STRING",
        "JSON list, for each token of this answer {token id: {logprob, rank, decoded_token, bytes}}, the token first",
    ),
    OutputSpec("acceptance_rate", "FP32", "accepted / verified drafts"),
    OutputSpec("total_accepted_draft_tokens", "INT32", "accepted drafts"),
    OutputSpec("total_draft_tokens", "INT32", "verified drafts"),
    OutputSpec("kv_cache_alloc_total_blocks", "INT32", "pages that the request held"),
    OutputSpec("kv_cache_alloc_new_blocks", "INT32", "pages that were computed for it"),
    OutputSpec("kv_cache_reused_blocks", "INT32", "pages that were found again"),
    OutputSpec("arrival_time_ns", "INT64", "when the request came"),
    OutputSpec("first_scheduled_time_ns", "INT64", "when it first ran"),
    OutputSpec("first_token_time_ns", "INT64", "when its first token was there"),
    OutputSpec("last_token_time_ns", "INT64", "when its last token was there"),
    OutputSpec("spec_decode_metrics", "STRING", "JSON: acceptance figures and the seed"),
)

INPUTS_BY_NAME: Final[dict[str, InputSpec]] = {spec.name: spec for spec in INPUTS}
ALIASES: Final[dict[str, str]] = {spec.name: spec.alias_of for spec in INPUTS if spec.alias_of is not None}

_HEADER = """\
# Made from dspark/serving/contract.py; a test holds the two together. Regenerate with
#   python -m dspark.serving.contract > model_repository/dspark/config.pbtxt
name: "{name}"
backend: "python"
# One sequence per request; batching is the engine's (continuous, inside the model).
max_batch_size: 1
model_transaction_policy {{ decoupled: true }}
instance_group [ {{ count: 1, kind: KIND_CPU }} ]
# What to load stands in 1/model.yaml. Any of its keys may be set here too, and then wins over the file:
#   parameters {{ key: "target" value {{ string_value: "/models/my-model" }} }}
"""


_UNBATCHED_HEADER = """\
# Made from dspark/serving/contract.py; a test holds the two together. Regenerate with
#   python -m dspark.serving.contract {name} > model_repository/{name}/config.pbtxt
#
# The same model for clients that send no batch dimension, as vLLM's do: `[1]` instead of `[1, 1]`. A small process
# adds the dimension, hands the request to the model `{served}`, and tells it when the client has gone.
name: "{name}"
backend: "python"
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
instance_group [ {{ count: 1, kind: KIND_CPU }} ]
"""


def config_pbtxt() -> str:
    """Return the text of model_repository/dspark/config.pbtxt."""
    return _HEADER.format(name=MODEL_NAME) + "\n" + _tensors_pbtxt()


def unbatched_config_pbtxt() -> str:
    """Return the text of model_repository/vllm_model/config.pbtxt."""
    header = _UNBATCHED_HEADER.format(name=UNBATCHED_MODEL_NAME, served=MODEL_NAME)
    return header + "\n" + _tensors_pbtxt()


def _tensors_pbtxt() -> str:
    """Return the declarations of all inputs and outputs."""
    lines = []
    for kind, specs in (("input", INPUTS), ("output", OUTPUTS)):
        lines.append(f"{kind} [")
        entries = []
        for spec in specs:
            dims = "-1" if spec.many else "1"
            optional = ", optional: true" if kind == "input" else ""
            entry = (
                f'  {{ name: "{spec.name}", data_type: TYPE_{spec.wire_type}, dims: [ {dims} ]{optional} }}'
            )
            entries.append((entry, spec.about))
        for index, (entry, about) in enumerate(entries):
            lines.append(f"  # {about}\n{entry}{',' if index + 1 < len(entries) else ''}")
        lines.append("]")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    unbatched = sys.argv[1:] == [UNBATCHED_MODEL_NAME]
    print(unbatched_config_pbtxt() if unbatched else config_pbtxt(), end="")
