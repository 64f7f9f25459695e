"""`make bench`: speed and memory of this machine's engine, in one interleaved run, as a table and JSON.

Every figure is a median over rounds in which all contenders take their turn, so that a machine that drifts drifts for
all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from dspark.config import load_serve_config
from dspark.engine.engine import Engine
from dspark.generate import complete_all
from dspark.request import Request, SamplingParams
from dspark.runtime import build_engine

__all__ = ["main"]

DEFAULT_TARGET = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
STORY = "Tell a short story about a lighthouse keeper who finds a letter."
EDIT = (
    "Repeat this Python code exactly:\n```python\n"
    "def total(prices):\n    result = 0\n    for price in prices:\n"
    "        result = result + price\n    return result\n\n"
    "def mean(prices):\n    return total(prices) / len(prices)\n```"
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report. `rate` is tokens per second, median over rounds."""

    name: str
    rate: float


def read_bandwidth(num_bytes: int = 1 << 29, *, threads: int = 2) -> float:
    """Return bytes per second that `threads` threads read from memory, the best of five sums over a large array."""
    block = np.ones(num_bytes // 4, np.float32)
    parts = np.array_split(block, threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            started = time.perf_counter()
            list(pool.map(np.sum, parts))
            best = max(best, num_bytes / (time.perf_counter() - started))
    return best


def engine_rate(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, num_drafts: int) -> float:
    """Return output tokens per second of all prompts together, greedy."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, num_draft_tokens=num_drafts
    )
    requests = [Request(prompt_ids=tuple(p), params=params, emit=lambda _output: None) for p in prompts]
    started = time.perf_counter()
    done = complete_all(engine, requests)
    return sum(len(one.token_ids) for one in done) / (time.perf_counter() - started)


def peer_rate(target: str, threads: int) -> Callable[[Sequence[Sequence[int]], int], float] | None:
    """Return the same measurement through Hugging Face transformers in bfloat16, None where it is not installed."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        print("transformers is not installed: the peer is left out (make bench installs it)", file=sys.stderr)
        return None
    torch.set_num_threads(threads)
    folder = Path(target)
    model = AutoModelForCausalLM.from_pretrained(folder.parent, gguf_file=folder.name, dtype=torch.bfloat16)

    def rate(prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        ids = torch.tensor([list(p) for p in prompts])
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return len(prompts) * max_tokens / (time.perf_counter() - started)

    return rate


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dspark-build bench", description=__doc__)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-peer", action="store_true", help="leave Hugging Face transformers out")
    parser.add_argument("--out", type=Path, default=Path("out/bench.json"))
    args = parser.parse_args(argv)
    settings = {"target": args.target, "drafter": "ngram", "num_threads": args.threads}
    engine = build_engine(load_serve_config(overrides=settings, environ={}))
    assert engine.tokenizer is not None
    story = engine.tokenizer.apply_chat_template([{"role": "user", "content": STORY}])
    edit = engine.tokenizer.apply_chat_template([{"role": "user", "content": EDIT}])
    runs: dict[str, Callable[[], float]] = {
        "plain, 1 request": lambda: engine_rate(engine, [story], args.max_tokens, 0),
        "plain, 16 requests": lambda: engine_rate(engine, [story] * 16, args.max_tokens, 0),
        "ngram, 1 request, new text": lambda: engine_rate(engine, [story], args.max_tokens, -1),
        "plain, 1 request, edit": lambda: engine_rate(engine, [edit], args.max_tokens, 0),
        "ngram, 1 request, edit": lambda: engine_rate(engine, [edit], args.max_tokens, -1),
    }
    peer = None if args.no_peer else peer_rate(args.target, args.threads)
    if peer is not None:
        runs["transformers, 1 request"] = lambda: peer([story], args.max_tokens)
        runs["transformers, 16 requests"] = lambda: peer([story] * 16, args.max_tokens)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(args.rounds + 1):  # the first warms up
        for name, run in runs.items():
            rate = run()
            if round_number:
                rates[name].append(rate)
            print(f"round {round_number} of {args.rounds}: {name} {rate:.1f} tokens/s", file=sys.stderr)
    figures = [Figure(name, statistics.median(values)) for name, values in rates.items()]
    report = {
        "executor": engine.target.name,
        "dtype": engine.target.dtype,
        "threads": args.threads,
        "read_bandwidth_bytes_per_s": read_bandwidth(threads=args.threads),
        "max_tokens": args.max_tokens,
        "rounds": args.rounds,
        "figures": [asdict(figure) for figure in figures],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    width = max(len(figure.name) for figure in figures)
    print(f"{engine.target.name} executor, {engine.target.dtype}, {args.threads} threads")
    print(f"{'memory read':<{width}}  {report['read_bandwidth_bytes_per_s'] / 1e9:8.1f} GB/s")
    for figure in figures:
        print(f"{figure.name:<{width}}  {figure.rate:8.1f} tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
