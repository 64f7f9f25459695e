"""The contenders of `bench` that generate in this process: our engine with either executor, and transformers."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from dspark.config import load_serve_config
from dspark.engine.engine import Engine
from dspark.executors.interface import StepBatch
from dspark.generate import complete_all
from dspark.request import Request, SamplingParams
from dspark.runtime import build_engine

__all__ = ["engine_rate", "load_engine", "load_peer", "pass_seconds", "read_bandwidth"]

Prompts = Sequence[Sequence[int]]
_CONTEXT = 64  # cached tokens behind which a pass is timed


def load_engine(settings: dict[str, object]) -> Engine:
    """Return an engine that nobody runs yet; the environment has no say."""
    return build_engine(load_serve_config(overrides=settings, environ={}))


def engine_rate(
    engine: Engine, prompts: Prompts, max_tokens: int, *, num_drafts: int, ignore_eos: bool = True
) -> float:
    """Return output tokens per second of all prompts together, greedy; prefill counts.

    Arguments:
        num_drafts: most drafts verified per step; 0 = plain, -1 = the policy decides.
        ignore_eos: go on to `max_tokens`; behind its own end a model writes what no user ever sees.
    """
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos, num_draft_tokens=num_drafts
    )
    requests = [Request(prompt_ids=tuple(p), params=params, emit=lambda _output: None) for p in prompts]
    started = time.perf_counter()
    done = complete_all(engine, requests)
    return sum(len(one.token_ids) for one in done) / (time.perf_counter() - started)


def pass_seconds(engine: Engine, num_rows: int, *, repeats: int = 5) -> float:
    """Return the median seconds of a pass over a chain of `num_rows` rows behind 64 cached tokens, logits of all."""
    page_size, vocab_size = engine.limits.page_size, engine.target.config.vocab_size
    positions = np.arange(_CONTEXT, _CONTEXT + num_rows, dtype=np.int32)
    batch = StepBatch(
        tokens=((positions * 7919) % vocab_size).astype(np.int32),
        positions=positions,
        query_start=np.array([0, num_rows], np.int32),
        context_len=np.array([_CONTEXT], np.int32),
        page_table=np.arange(-(-(_CONTEXT + num_rows) // page_size), dtype=np.int32)[None],
        slots=positions.copy(),
        logit_rows=np.arange(num_rows, dtype=np.int32),
    )
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        engine.target.forward(batch)
        taken.append(time.perf_counter() - started)
    return float(np.median(taken))


class PeerRate(Protocol):
    """What `engine_rate` measures, by another program."""

    def __call__(
        self, prompts: Prompts, max_tokens: int, *, ends: Collection[int] = ()
    ) -> float: ...  # pragma: no cover


def load_peer(target: str, *, dtype: str, threads: int) -> PeerRate | None:
    """Return `engine_rate`'s measurement through Hugging Face transformers' `generate`, same dtype and threads.

    Prompts of unequal length are padded on the left, as its users do it. Without `ends`, ids that end an answer, every
    answer goes on to `max_tokens`; with them the batch does until its last answer has ended, and tokens up to the ends
    count. None where it is not installed.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        print("transformers is not installed: the peer is left out (make bench installs it)", file=sys.stderr)
        return None
    torch.set_num_threads(threads)
    path = Path(target)
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    if path.suffix != ".gguf":
        where = {"pretrained_model_name_or_path": target}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))

    def rate(prompts: Prompts, max_tokens: int, *, ends: Collection[int] = ()) -> float:
        longest = max(map(len, prompts))
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, longest - len(prompt) :] = 1
        until = {"eos_token_id": sorted(ends)} if ends else {"min_new_tokens": max_tokens}
        started = time.perf_counter()
        with torch.inference_mode():
            answers = model.generate(
                ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, **until
            )
        seconds = time.perf_counter() - started
        counts = [num_until(answer, ends) for answer in answers[:, longest:].tolist()]
        assert ends or counts == [max_tokens] * len(prompts)
        return sum(counts) / seconds

    return rate


def num_until(answer: Sequence[int], ends: Collection[int]) -> int:
    """Return how many tokens an answer has up to the first that ends it, with it; all of them where none does."""
    return next((i for i, token in enumerate(answer, 1) if token in ends), len(answer))


def read_bandwidth(threads: int) -> tuple[float, str]:
    """Return bytes per second that `threads` threads read from memory, and by what it was measured.

    The native code's own reader where it runs; a threaded sum of numpy's, which is slower, elsewhere.
    """
    from dspark_plugins.native import isa, native_available

    if native_available():
        from dspark_plugins.native.binding import Pool

        return Pool(threads).read_bandwidth(), f"native reader, {isa()}"
    from concurrent.futures import ThreadPoolExecutor

    parts = np.array_split(np.ones(1 << 27, np.float32), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            started = time.perf_counter()
            list(pool.map(np.sum, parts))
            best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - started))
    return best, "threaded numpy.sum"
