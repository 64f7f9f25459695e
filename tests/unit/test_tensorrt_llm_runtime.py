"""Requests through TensorRT-LLM's interface, on a fake of it whose answers are those of our own engine."""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dspark import runtime as runtime_module
from dspark.config import ServeConfig
from dspark.engine.thread import EngineThread
from dspark.errors import CapacityError, ConfigError, EngineError, RequestError
from dspark.executors import tensorrt_llm_loading
from dspark.request import Request, RequestOutput, SamplingParams, TokenLogProb
from dspark.runtime import Runtime, build_engine, load_runtime
from dspark.scheduling.cost_model import CapacityFile, CostCurve, Fingerprint
from dspark.serving.contract import OUTPUTS
from support import fake_pb_utils
from support.engines import make_engine, make_request, run
from support.fake_tensorrt_llm import (
    DSparkDecodingConfig,
    FakeLanguageModel,
    Logprob,
    NGramDecodingConfig,
    install,
)
from support.tiny_drafters import write_good_drafter
from support.tiny_models import random_weights, tiny_config, write_tiny_gguf, write_tiny_target

CONTEXT = 128
CURVE = CostCurve(
    target_tokens=(1, 8, 64), verify_s=(0.001, 0.002, 0.016), num_blocks=(1, 4), draft_s=(1e-4, 3e-4)
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_tiny_target(home / "target", num_layers=2, max_context_len=CONTEXT, with_tokenizer=True)
    write_good_drafter(home / "drafter", home / "target", noise=0.1)
    return home


@pytest.fixture(scope="module")
def plain(home: Path) -> Callable[[list[int]], list[int]]:
    """Return what the target says to a prompt, far beyond its end tokens."""
    engine, known = make_engine(home / "target", cache_bytes=1 << 24), {}

    def answer(prompt: list[int]) -> list[int]:
        if tuple(prompt) not in known:
            most = CONTEXT - len(prompt)
            known[tuple(prompt)] = run(engine, [make_request(prompt, max_tokens=most)])[0].token_ids
        return known[tuple(prompt)]

    return answer


@pytest.fixture
def start(
    home: Path, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Runtime]]:
    install(monkeypatch, plain)
    monkeypatch.setattr(tensorrt_llm_loading, "state_dir", lambda: tmp_path / "state")
    started: list[Runtime] = []

    def make(*, base: Path | None = None, **changes: Any) -> Runtime:
        values: dict[str, Any] = {"executor": "tensorrt_llm", "drafter": "none", "capacity": "none"}
        config = ServeConfig(target=str(home / "target"), **{**values, **changes})
        started.append(load_runtime(config, base=base))
        return started[-1]

    yield make
    for runtime in started:
        runtime.engine.close()


class Asked:
    """One request and what came back."""

    def __init__(self, prompt: list[int], **fields: Any) -> None:
        own = {name: fields.pop(name) for name in ("is_cancelled", "deadline_s") if name in fields}
        defaults = {"max_tokens": 20, "temperature": 0.0}
        self.outputs: list[RequestOutput] = []
        self.ended, self.began = threading.Event(), threading.Event()
        self.request = Request(
            prompt_ids=tuple(prompt), params=SamplingParams(**{**defaults, **fields}), emit=self._emit, **own
        )

    def _emit(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        self.began.set()
        if output.final:
            self.ended.set()

    def of(self, engine: Any) -> Asked:
        self.id = engine.submit(self.request)
        return self

    def wait(self) -> Asked:
        assert self.ended.wait(60)
        assert [output.final for output in self.outputs] == [False] * (len(self.outputs) - 1) + [True]
        assert {output.request_id for output in self.outputs} == {self.id}
        return self

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    @property
    def answer(self) -> tuple[Any, ...]:
        tokens = [token for output in self.outputs for token in output.token_ids]
        return tokens, "".join(output.text or "" for output in self.outputs), self.last.finish_reason


def model() -> FakeLanguageModel:
    assert FakeLanguageModel.made is not None
    return FakeLanguageModel.made


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [26, 5, 35, 89, 79, 32, 38, 46], [264]]


@pytest.mark.parametrize("ends", ["length", "end token", "stop token", "stop text", "context", "end_id"])
def test_answers_end_where_those_of_our_engine_end(
    ends: str, home: Path, plain: Any, start: Callable[..., Runtime]
) -> None:
    runtime = start()
    ours = EngineThread(make_engine(home / "target", cache_bytes=1 << 24))
    ours.start()
    try:
        for prompt in PROMPTS:
            answer = plain(prompt)
            assert runtime.tokenizer is not None
            fields: dict[str, Any] = {
                "length": {"ignore_eos": True},
                "end token": {"max_tokens": 60},
                "stop token": {"stop_token_ids": (answer[5], answer[9])},
                "stop text": {
                    "ignore_eos": True,
                    "stop_words": (runtime.tokenizer.decode(answer[3:6]) or "never",),
                },
                "context": {"max_tokens": CONTEXT - len(prompt), "ignore_eos": True},
                "end_id": {"end_id": answer[4]},
            }[ends]
            theirs, mine = (Asked(prompt, **fields).of(one).wait() for one in (runtime.engine, ours))
            assert theirs.answer == mine.answer
            assert theirs.answer[0] == answer[: len(theirs.answer[0])]
            assert len(theirs.outputs) > 1 or len(theirs.answer[0]) < 5
    finally:
        ours.close()
    stats = runtime.engine.stats()
    assert stats.num_generation_tokens > 0 and stats.num_running == runtime.engine.num_open == 0
    assert all(params.detokenize is False for _, params in model().asked)


def test_many_requests_stream_at_once_and_are_counted(home: Path, start: Callable[..., Runtime]) -> None:
    runtime = start(drafter=str(home / "drafter"), policy="fixed:4", max_batch_size=3)
    asked = [Asked(PROMPTS[i % 4], max_tokens=17, ignore_eos=True).of(runtime.engine) for i in range(12)]
    for one in asked:
        one.wait()
        metrics = one.last.metrics
        assert metrics is not None and one.last.finish_reason == "length" and len(one.answer[0]) == 17
        # The first token comes of the prompt; each later response is one step.
        assert metrics.num_accepted_draft_tokens == 16 - metrics.num_spec_steps
        assert metrics.num_draft_tokens == 4 * metrics.num_spec_steps
        assert sum(metrics.acceptance_histogram) == metrics.num_spec_steps > 0
        assert metrics.first_token_time_ns <= metrics.last_token_time_ns
    stats = runtime.engine.stats()
    assert stats.num_generation_tokens == 12 * 17
    assert stats.num_accepted_tokens == sum(one.last.metrics.num_accepted_draft_tokens for one in asked)  # type: ignore[union-attr]
    assert len({params.seed for _, params in model().asked}) == 12
    assert model().arguments["max_num_tokens"] == 256 + 3 * 5


def test_log_probabilities_go_with_their_tokens(start: Callable[..., Runtime]) -> None:
    runtime = start()
    model().log_probs = lambda token: {token: Logprob(-float(token), 2), 0: Logprob(-0.25, 1)}  # type: ignore[method-assign]
    done = Asked(PROMPTS[0], max_tokens=9, ignore_eos=True, logprobs=1).of(runtime.engine).wait()
    for output in done.outputs:
        assert output.log_probs == tuple(
            TokenLogProb(-float(token), 2, ((0, -0.25),)) for token in output.token_ids
        )


def test_cancelled_and_late_requests_end_at_once_and_stop_the_generation(
    start: Callable[..., Runtime],
) -> None:
    runtime = start()
    model().ticks = lambda step: int(step < 3)  # type: ignore[method-assign]  # then nothing ever
    left = threading.Event()
    many = {"max_tokens": 100, "ignore_eos": True}
    by_id = Asked(PROMPTS[0], **many).of(runtime.engine)
    by_client = Asked(PROMPTS[1], **many, is_cancelled=left.is_set).of(runtime.engine)
    by_id.began.wait(60), by_client.began.wait(60)
    model().held.set()  # nothing moves any more: an end does not wait for TensorRT-LLM
    late = Asked(PROMPTS[2], **many, deadline_s=time.monotonic() + 0.1).of(runtime.engine)
    runtime.engine.cancel(by_id.id)
    left.set()
    for one, reason in ((by_id, "cancelled"), (by_client, "cancelled"), (late, "timeout")):
        assert one.wait().last.finish_reason == reason
    assert all(generation.aborted for generation in model().generations)
    assert runtime.engine.stats().num_cancelled == 2 and runtime.engine.num_open == 0
    model().held.clear()
    model().ticks = lambda _step: 1  # type: ignore[method-assign]
    runtime.engine.cancel(by_id.id)  # no error, and nothing follows
    assert Asked(PROMPTS[3]).of(runtime.engine).wait().last.error is None
    assert by_id.outputs[-1].final


@pytest.mark.parametrize("fault", [ValueError("no such block"), "the worker is gone"])
def test_a_request_that_fails_fails_alone(fault: Exception | str, start: Callable[..., Runtime]) -> None:
    runtime = start()
    model().fault = fault
    failed = Asked(PROMPTS[0], max_tokens=50, ignore_eos=True).of(runtime.engine).wait()
    assert isinstance(failed.last.error, EngineError) and failed.last.finish_reason is None
    assert str(fault) in str(failed.last.error)
    model().fault = None
    assert Asked(PROMPTS[0]).of(runtime.engine).wait().last.error is None
    assert runtime.engine.stats().num_failed == 1 and runtime.engine.alive


def test_a_receiver_that_fails_ends_its_request(start: Callable[..., Runtime]) -> None:
    runtime = start()

    def emit(_output: RequestOutput) -> None:
        raise OSError("gone")

    request = Asked(PROMPTS[0], max_tokens=50, ignore_eos=True).request
    runtime.engine.submit(Request(prompt_ids=request.prompt_ids, params=request.params, emit=emit))
    until(lambda: runtime.engine.num_open == 0)
    assert model().generations[0].aborted and runtime.engine.alive


def test_the_doors_refuse_what_cannot_be_served(start: Callable[..., Runtime]) -> None:
    runtime = start(max_batch_size=1, max_queue_size=1, max_context_len=64)
    assert runtime.limits.max_context_len == 64 == model().arguments["max_seq_len"]
    for field, asked in {
        "input_ids": Asked([10**6]),
        "max_tokens": Asked([1], max_tokens=64),
        "num_draft_tokens": Asked([1], num_draft_tokens=3),
    }.items():
        with pytest.raises(RequestError, match=f"{field}: got"):
            asked.of(runtime.engine)
    model().held.set()
    kept = [Asked([1]).of(runtime.engine) for _ in range(2)]
    with pytest.raises(CapacityError, match="the queue is full: 1 requests wait, max_queue_size is 1"):
        Asked([1]).of(runtime.engine)
    assert (runtime.engine.stats().num_running, runtime.engine.stats().num_waiting) == (1, 1)
    assert not runtime.engine.drain(0.0)
    with pytest.raises(EngineError, match="takes no more requests"):
        Asked([1]).of(runtime.engine)
    runtime.engine.close()
    for one in kept:
        assert isinstance(one.wait().last.error, EngineError)
    assert model().shut_down and not runtime.engine.alive and not runtime.engine.died
    with pytest.raises(EngineError, match="takes no more requests"):
        Asked([1]).of(runtime.engine)


def test_the_triton_model_streams_and_cancels(
    home: Path, tmp_path: Path, start: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    del start  # installs the fake
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_pb_utils)
    monkeypatch.delitem(sys.modules, "dspark.serving.triton_model", raising=False)
    module = importlib.import_module("dspark.serving.triton_model")
    monkeypatch.setattr(module, "watch_parents", lambda _run_dir, _served, **_named: None)
    monkeypatch.delitem(sys.modules, "dspark.serving.triton_model")
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.yaml").write_text(
        f"target: {home / 'target'}\ndrafter: none\nexecutor: tensorrt_llm\ncapacity: none\n"
    )
    served = module.TritonPythonModel()
    served.initialize(
        {
            "model_config": "{}",
            "model_repository": str(tmp_path),
            "model_version": "1",
            "model_name": "dspark",
        }
    )
    try:
        names = [spec.name for spec in OUTPUTS]
        asked, gone = (
            fake_pb_utils.Request(
                {"input_ids": np.array([PROMPTS[0]], np.int32)},
                {"stream": True, "temperature": 0.0, "ignore_eos": True, "max_tokens": length},
                outputs=names,
            )
            for length in (20, 100)
        )
        model().ticks = lambda _step: time.sleep(0.01) or 2  # type: ignore[method-assign,func-returns-value]
        served.execute([asked])
        until(lambda: asked.sent and asked.sent[-1][1])
        text = b"".join(response.outputs["text_output"][0] for response, _ in asked.sent)
        tokens = np.concatenate([r.outputs["output_ids"].ravel() for r, _ in asked.sent])
        assert len(asked.sent) > 2 and len(tokens) == 20 and text
        model().held.set()
        served.execute([gone])
        gone.gone = True  # the client left; TensorRT-LLM moves no more
        until(lambda: gone.sent and gone.sent[-1][1])
        assert model().generations[-1].aborted
    finally:
        served.finalize()
    assert model().shut_down


# From settings


def test_settings_and_the_file_of_arguments_make_one_set(
    home: Path, tmp_path: Path, start: Callable[..., Runtime]
) -> None:
    (tmp_path / "llm.yaml").write_text("tensor_parallel_size: 4\nmoe_expert_parallel_size: 2\n")
    start(
        base=tmp_path, engine="llm.yaml", page_size=32, cache_bytes=5000, dtype="bfloat16", max_batch_size=8
    )
    assert model().arguments == {
        "model": str(home / "target"),
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 4,
        "moe_expert_parallel_size": 2,
        "dtype": "bfloat16",
        "enable_chunked_prefill": True,
        "kv_cache_config": {"max_gpu_total_bytes": 5000, "tokens_per_block": 32},
        "max_batch_size": 8,
        "max_num_tokens": 256 + 8,
        "max_seq_len": CONTEXT,
    }
    (tmp_path / "llm.yaml").write_text("kv_cache_config: {free_gpu_memory_fraction: 0.8}\n")
    start(base=tmp_path, engine="llm.yaml", drafter="ngram")
    assert model().arguments["kv_cache_config"] == {"free_gpu_memory_fraction": 0.8}
    assert isinstance(model().arguments["speculative_config"], NGramDecodingConfig)
    for text, wrong in {
        "max_seq_len: 5": "max_seq_len is not its to say; set max_context_len instead",
        "- 1": "got a list, allowed is a mapping",
        "a: [": "allowed with executor tensorrt_llm is a YAML file",
        "colour: red": r"TensorRT-LLM 1.4.0rc4 refuses its arguments: extra fields not permitted: \['colour'\]",
    }.items():
        (tmp_path / "llm.yaml").write_text(text)
        with pytest.raises(ConfigError, match=wrong):
            start(base=tmp_path, engine="llm.yaml")


def test_curve_and_calibration_are_written_where_it_reads_them(
    home: Path, tmp_path: Path, start: Callable[..., Runtime]
) -> None:
    drafter = str(home / "drafter")
    probe = start(drafter=drafter, capacity="auto", base=tmp_path)  # no file anywhere: whole blocks
    assert not model().arguments["speculative_config"].enable_confidence_scheduling
    made_for = {
        "machine": "eight GPUs",
        "executor": "tensorrt_llm",
        "dtype": "bfloat16",
        "num_threads": 0,
        "target_hash": probe.target_config.model_hash,
        "drafter": runtime_module.drafter_identity(drafter),
    }
    CapacityFile(fingerprint=Fingerprint(**made_for), curve=CURVE).save(tmp_path / "capacity.json")
    calibration = {
        "format_version": 1,
        "block_size": 4,
        "target_hash": made_for["target_hash"],
        "drafter_hash": made_for["drafter"],
        "sts_temperatures": [1.5, 1.25, 2.0, 0.5],
    }
    (tmp_path / "fit.json").write_text(json.dumps(calibration))
    for capacity in ("auto", "capacity.json"):
        start(drafter=drafter, capacity=capacity, calibration=str(tmp_path / "fit.json"), base=tmp_path)
        config = model().arguments["speculative_config"]
        assert isinstance(config, DSparkDecodingConfig) and config.enable_confidence_scheduling
        assert config.confidence_cost_table_path and config.confidence_calibration_path
        table = json.loads(Path(config.confidence_cost_table_path).read_text())
        assert table["token_counts"] == [1, 8, 64] and table["step_time_ms"] == [1.0, 2.0, 16.0]
        assert table["batch_overhead_ms"] == pytest.approx([0.1, 0.3])
        fitted = json.loads(Path(config.confidence_calibration_path).read_text())
        assert fitted == {"sts_temperatures": [1.5, 1.25, 2.0, 0.5]}
    made_for["executor"] = "torch"
    CapacityFile(fingerprint=Fingerprint(**made_for), curve=CURVE).save(tmp_path / "capacity.json")
    start(drafter=drafter, capacity="auto", base=tmp_path)  # of another executor: left aside
    assert not model().arguments["speculative_config"].enable_confidence_scheduling
    with pytest.raises(ConfigError, match="executor is 'torch' in the file and 'tensorrt_llm' here"):
        start(drafter=drafter, capacity=str(tmp_path / "capacity.json"))


def test_settings_that_it_cannot_meet_are_refused(
    home: Path, tmp_path: Path, start: Callable[..., Runtime]
) -> None:
    for changes, wrong in (
        ({"dtype": "int8", "page_size": 24}, "dtype: got 'int8'.*\npage_size: got 24, .* a power of two"),
        ({"max_context_len": CONTEXT + 1}, f"max_context_len: got {CONTEXT + 1}, allowed is at most"),
        ({"drafter": str(home / "drafter"), "prompt_lookup": True}, "prompt_lookup: got true"),
        ({"drafter": str(home / "drafter"), "draft_tree": 8}, "draft_tree: got 8"),
        ({"drafter": str(home / "drafter"), "policy": "fixed:2"}, "policy: got 'fixed:2'"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            start(**changes)
    write_tiny_gguf(tmp_path / "tiny.gguf", tiny_config(), random_weights(tiny_config()))
    with pytest.raises(ConfigError, match=r"target: got .*tiny.gguf, allowed .* a folder or a hub name"):
        load_runtime(ServeConfig(target=str(tmp_path / "tiny.gguf"), executor="tensorrt_llm", drafter="none"))
    with pytest.raises(ConfigError, match="has an engine of its own; serve it with `dspark serve`"):
        build_engine(ServeConfig(target=str(home / "target"), executor="tensorrt_llm"))


def test_without_tensorrt_llm_it_says_what_is_missing(home: Path) -> None:
    pytest.importorskip("yaml")
    try:
        import tensorrt_llm  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="executor: tensorrt_llm needs TensorRT-LLM 1.4.0rc4 or later"):
            load_runtime(
                ServeConfig(
                    target=str(home / "target"), executor="tensorrt_llm", drafter="none", capacity="none"
                )
            )
    else:
        pytest.skip("TensorRT-LLM is installed here")
