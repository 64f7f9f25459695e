"""What cached tokens cost the target: a pass of many sequences, each of some rows, behind contexts of several lengths.

The pages of the sequences lie scattered over the cache, as they do in a server that has run for a while.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import numpy as np
from dspark.errors import DSparkError
from dspark.executors.interface import StepBatch, TargetExecutor
from dspark_plugins.native.threads import default_num_threads

from dspark_build.bench_engine import load_engine

__all__ = ["decoding_pass", "main", "measure"]

DEFAULT_TARGET = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHORTEST = 16  # cached tokens of the pass that the others are held against


def decoding_pass(
    num_sequences: int, context_len: int, *, num_rows: int = 1, page_size: int, vocab_size: int
) -> StepBatch:
    """Return a pass of `num_rows` rows for each of `num_sequences` sequences behind `context_len` cached tokens."""
    pages_each = -(-(context_len + num_rows) // page_size)
    pages = np.random.default_rng(0).permutation(num_sequences * pages_each).astype(np.int32)
    table = pages.reshape(num_sequences, pages_each)
    rows = np.arange(num_sequences * num_rows, dtype=np.int32)
    positions = np.arange(context_len, context_len + num_rows, dtype=np.int32)
    return StepBatch(
        tokens=(rows * 7919 % vocab_size).astype(np.int32),
        positions=np.tile(positions, num_sequences),
        query_start=np.arange(0, num_sequences * num_rows + 1, num_rows, dtype=np.int32),
        context_len=np.full(num_sequences, context_len, np.int32),
        page_table=table,
        slots=(table[:, positions // page_size] * page_size + positions % page_size).ravel().astype(np.int32),
        logit_rows=rows,
    )


def measure(target: TargetExecutor, passes: dict[int, StepBatch], rounds: int) -> dict[int, float]:
    """Return the median seconds of each pass, all taken in turn: one that warms and two that count."""
    taken: dict[int, list[float]] = {length: [] for length in passes}
    for _ in range(rounds):
        for length, batch in passes.items():
            target.forward(batch)
            for _ in range(2):
                started = time.perf_counter()
                target.forward(batch)
                taken[length].append(time.perf_counter() - started)
    return {length: float(np.median(times)) for length, times in taken.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each length of the context."""
    parser = argparse.ArgumentParser(
        prog="python -m dspark_build.bench_contexts", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--target", default=DEFAULT_TARGET, help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", help="float32, bfloat16 or int8; default: %(default)s")
    parser.add_argument("--sequences", type=int, default=16, help="default: %(default)s")
    parser.add_argument(
        "--rows", type=int, default=1, help="of each, as verified drafts are; default: %(default)s"
    )
    parser.add_argument(
        "--contexts", default="128,512,1024", help="cached tokens of each; default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=default_num_threads(), help="default: %(default)s")
    args = parser.parse_args(argv)
    settings = {"target": args.target, "dtype": args.dtype, "drafter": "none", "num_threads": args.threads}
    try:
        engine = load_engine(settings)
    except DSparkError as error:
        print(f"bench_contexts: {error}", file=sys.stderr)
        return 1
    page_size, config = engine.limits.page_size, engine.target.config
    lengths = sorted({_SHORTEST, *map(int, args.contexts.split(","))})
    passes = {
        length: decoding_pass(
            args.sequences, length, num_rows=args.rows, page_size=page_size, vocab_size=config.vocab_size
        )
        for length in lengths
    }
    seconds = measure(engine.target, passes, args.rounds)
    shape = f"{args.sequences} sequences of {args.rows} rows"
    print(f"{engine.target.name} {engine.target.dtype}, {shape}, {args.threads} threads")
    for length in lengths:
        line = f"{length:6} cached tokens each: {1e3 * seconds[length]:6.2f} ms"
        if length > _SHORTEST:
            more = args.sequences * args.rows * (length - _SHORTEST)
            line += f", {1e6 * (seconds[length] - seconds[_SHORTEST]) / more:.3f} us a row and token"
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
