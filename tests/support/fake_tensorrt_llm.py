"""The part of TensorRT-LLM's LLM API that is used, as its public reference writes it (1.4.0rc4; `SamplingParams`,
`CompletionOutput` and `RequestOutput` of the undated page).

Arguments that the reference does not have are refused by Python itself. Answers come from a function: this fake knows
nothing of models.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

__all__ = ["FakeLanguageModel", "Logprob", "install"]


@dataclass(kw_only=True)
class DSparkDecodingConfig:
    max_draft_len: int | None = None
    max_total_draft_tokens: int | None = None
    speculative_model: str | Path | None = None
    moe_backend: str | None = None
    moe_tactic: str | None = None
    max_concurrency: int | None = None
    draft_len_schedule: dict[int, int] | None = None
    load_format: str | None = None
    acceptance_rate_window_size: int | None = None
    acceptance_rate_threshold: float | None = None
    use_rejection_sampling: bool = False
    allow_advanced_sampling: bool = False
    advanced_sampling_mode: str = "full"
    enable_penalty: bool = False
    spec_dec_variant: int = 1
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    block_size: int | None = None
    markov_rank: int | None = None
    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = None
    enable_confidence_scheduling: bool = False
    confidence_cost_table_path: str | None = None
    confidence_calibration_path: str | None = None
    confidence_min_predicted_gain: float = 0.04
    enable_fused_confidence_scheduler: bool = True
    attention_backend: str = "AUTO"


@dataclass(kw_only=True)
class NGramDecodingConfig:
    max_draft_len: int | None = None
    max_matching_ngram_size: int = 2
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True
    use_rejection_sampling: bool = False
    enable_penalty: bool = False


@dataclass(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_p: float | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "timeout", "cancelled"] | None = None
    stop_reason: int | str | None = None


Answer = Callable[[list[int]], Sequence[int]]  # prompt -> tokens, as many as there ever are
Ticks = Callable[[int], int]  # how many tokens the n-th response brings


class RequestOutput:
    """A generation under way: iterating gives itself, with more tokens each time."""

    def __init__(self, model: FakeLanguageModel, prompt: list[int], params: SamplingParams) -> None:
        self.outputs = [CompletionOutput(0)]
        self.error: str | None = None
        self.aborted = False
        self._model, self._params = model, params
        self._steps: Iterator[None] = self._run(list(model.answer(prompt)))

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        await asyncio.sleep(0)
        while self._model.held.is_set():
            await asyncio.sleep(0.005)
        try:
            next(self._steps)
        except StopIteration:
            raise StopAsyncIteration from None
        return self

    def abort(self) -> None:
        self.aborted = True

    def _run(self, tokens: list[int]) -> Iterator[None]:
        params, output = self._params, self.outputs[0]
        ends = {*(params.stop_token_ids or []), *([] if params.ignore_eos else [params.end_id])}
        count = 0
        while not self.aborted and output.finish_reason is None:
            for token in tokens[len(output.token_ids) :][: self._model.ticks(count)]:
                output.token_ids.append(token)
                if params.logprobs is not None:
                    output.logprobs.append(self._model.log_probs(token))
                if token in ends:
                    output.finish_reason = "stop"
                elif len(output.token_ids) >= params.max_tokens:
                    output.finish_reason = "length"
                if output.finish_reason is not None:
                    break
            count += 1
            if self._model.fault is not None and count == 3:
                if isinstance(self._model.fault, Exception):
                    raise self._model.fault
                self.error = self._model.fault
                return
            yield


class FakeLanguageModel:
    """`LLM`: one for each test; what it was made with and asked is kept."""

    answer: Answer = staticmethod(lambda _prompt: [])  # type: ignore[assignment]
    ticks: Ticks = staticmethod(lambda step: 1 if step == 0 else 1 + step % 3)  # type: ignore[assignment]
    log_probs: Callable[[int], dict[int, Logprob]] = staticmethod(lambda token: {token: Logprob(-0.5, 1)})  # type: ignore[assignment]
    made: FakeLanguageModel | None = None

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,  # noqa: ARG002
        tokenizer_mode: Literal["auto", "slow"] = "auto",  # noqa: ARG002
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,  # noqa: ARG002
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,  # noqa: ARG002
        tokenizer_revision: str | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        unknown = set(kwargs) - {
            "pipeline_parallel_size",
            "moe_expert_parallel_size",
            "kv_cache_config",
            "enable_chunked_prefill",
            "max_batch_size",
            "max_num_tokens",
            "max_seq_len",
            "speculative_config",
        }
        if unknown:
            raise ValueError(f"extra fields not permitted: {sorted(unknown)}")
        self.arguments = {
            "model": model,
            "skip_tokenizer_init": skip_tokenizer_init,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
            **kwargs,
        }
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.generations: list[RequestOutput] = []
        self.held = threading.Event()  # set = nothing moves
        self.fault: Exception | str | None = None  # what the third response of each request brings
        self.shut_down = False
        FakeLanguageModel.made = self

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        *,
        streaming: bool = False,
    ) -> RequestOutput:
        assert streaming and sampling_params is not None
        assert asyncio.get_running_loop() is not None  # its queue belongs to the loop it is made in
        self.asked.append((inputs, sampling_params))
        self.generations.append(RequestOutput(self, inputs, sampling_params))
        return self.generations[-1]

    def shutdown(self) -> None:
        self.shut_down = True


def install(monkeypatch: Any, answer: Answer) -> type[FakeLanguageModel]:
    """Make `import tensorrt_llm` find this; return the class whose `made` is the language model."""
    kind = type("LLM", (FakeLanguageModel,), {"answer": staticmethod(answer)})
    trt, api = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.llmapi")
    trt.__dict__.update(LLM=kind, SamplingParams=SamplingParams, llmapi=api, __version__="1.4.0rc4")
    api.__dict__.update(DSparkDecodingConfig=DSparkDecodingConfig, NGramDecodingConfig=NGramDecodingConfig)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", trt)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", api)
    monkeypatch.setattr(FakeLanguageModel, "made", None)
    return kind
