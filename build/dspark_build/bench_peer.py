"""One peer of `bench_native` in its own process and environment, since the peers' packages do not fit ours.

    python bench_peer.py llama FILE THREADS CONTEXT MOST
    python bench_peer.py onnx FILE THREADS CONTEXT VOCAB_SIZE LAYERS KV_HEADS HEAD_DIM
    python bench_peer.py export TARGET FOLDER CONTEXT          writes the two ONNX files of the target

The first two answer every line `ROWS WARM TIMED` on standard input with the seconds of the timed passes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path


def pass_times(run: Callable[[], object], *, warm: int, timed: int) -> list[float]:
    """Return the seconds of `timed` passes, one after the other, behind `warm` that are not timed."""
    times = []
    for _ in range(warm + timed):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return times[warm:]


def llama(path: str, threads: int, context: int, most: int) -> Callable[[int], object]:
    from llama_cpp import Llama

    model = Llama(
        path,
        n_ctx=context + most,
        n_batch=max(most, context),
        n_ubatch=max(most, context),
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=True,
        verbose=False,
    )
    model.eval([1] * context)

    def run(num_rows: int) -> None:
        model.n_tokens = context  # eval drops the cache behind it
        model.eval([(context + i) * 7919 % model.n_vocab() for i in range(num_rows)])

    return run


def onnx(path: str, threads: int, context: int, *sizes: int) -> Callable[[int], object]:
    import numpy as np
    import onnxruntime

    vocab_size, layers, kv_heads, head_dim = sizes
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    past = np.full((layers, 2, kv_heads, context, head_dim), 0.01, np.float32)

    def run(num_rows: int) -> object:
        ids = np.arange(num_rows, dtype=np.int64)[None] * 7919 % vocab_size
        return session.run(None, {"ids": ids, "past": past})

    return run


def export(target: str, folder: str, context: int) -> None:
    from dspark.models.loading import load_target

    from dspark_build.bench_onnx import export_decoder, quantise_decoder

    plain = export_decoder(load_target(target), Path(folder) / "bench_decoder.onnx", context_len=context)
    quantise_decoder(plain, Path(folder) / "bench_decoder_int8.onnx")


def main() -> int:
    kind, path, *rest = sys.argv[1:]
    if kind == "export":
        export(path, rest[0], int(rest[1]))
        return 0
    numbers = [int(value) for value in rest]
    run = llama(path, *numbers) if kind == "llama" else onnx(path, *numbers)
    print("ready", flush=True)
    for line in sys.stdin:
        num_rows, warm, timed = map(int, line.split())
        print("seconds", *pass_times(lambda n=num_rows: run(n), warm=warm, timed=timed), flush=True)  # type: ignore[misc]
    return 0


if __name__ == "__main__":
    sys.exit(main())
