"""`make bench-native`: one pass of the native target against the machine's own bound and against its peers.

    read bandwidth       a plain sum over memory with the same threads: weight bytes / bandwidth is the bound
    native               float32, bfloat16, int8
    torch                this project's torch executor, float32 and bfloat16
    onnxruntime          the same decoder exported to ONNX, float32; int8 weights by its own quantiser
    llama.cpp            Q8_0 made from the same file, and the file itself, through llama-cpp-python

Everything runs in one process and takes its turn in every round, so a machine that drifts drifts for all. Every pass
has n rows over 64 cached tokens, and logits of all n rows. Peers that are not installed are named with how to get them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from dspark.drafters.loading import load_drafter, peek_drafter
from dspark.errors import DSparkError
from dspark.executors.interface import DraftBatch, StepBatch, TargetExecutor
from dspark.executors.native_drafter import NativeBlockDrafter
from dspark.executors.native_target import NativeTarget
from dspark.models.loading import TargetCheckpoint, load_target
from dspark_plugins.native import isa, native_unavailable_reason
from dspark_plugins.native.binding import Pool
from dspark_plugins.native.threads import default_num_threads

__all__ = ["main"]

DEFAULT_TARGET = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT, PAGE_SIZE = 64, 16


class Contender(Protocol):
    """One way to run the pass. `weight_bytes` is 0 where it is not known."""

    name: str
    weight_bytes: int

    def run(self, num_rows: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Line:
    """Median milliseconds of one contender by number of rows."""

    name: str
    weight_bytes: int
    milliseconds: dict[int, float]


def pass_over(num_rows: int, vocab_size: int) -> StepBatch:
    """Return a chain of `num_rows` rows behind CONTEXT cached tokens."""
    positions = np.arange(CONTEXT, CONTEXT + num_rows, dtype=np.int32)
    num_pages = -(-(CONTEXT + num_rows) // PAGE_SIZE)
    return StepBatch(
        tokens=((positions * 7919) % vocab_size).astype(np.int32),
        positions=positions,
        query_start=np.array([0, num_rows], np.int32),
        context_len=np.array([CONTEXT], np.int32),
        page_table=np.arange(num_pages, dtype=np.int32)[None],
        slots=positions.copy(),
        logit_rows=np.arange(num_rows, dtype=np.int32),
    )


class ExecutorContender:
    """A target executor of this project."""

    def __init__(self, name: str, target: TargetExecutor, weight_bytes: int, most: int) -> None:
        self.name, self.weight_bytes, self._target = name, weight_bytes, target
        target.allocate_cache(num_pages=-(-(CONTEXT + most) // PAGE_SIZE), page_size=PAGE_SIZE)

    def run(self, num_rows: int) -> None:
        self._target.forward(pass_over(num_rows, self._target.config.vocab_size))


class LlamaContender:
    """A GGUF file through llama.cpp."""

    def __init__(self, name: str, path: Path, threads: int, most: int) -> None:
        from llama_cpp import Llama

        self.name, self.weight_bytes = name, path.stat().st_size
        self._llama = Llama(
            str(path),
            n_ctx=CONTEXT + most,
            n_batch=max(most, CONTEXT),
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=True,
            verbose=False,
        )
        self._llama.eval([1] * CONTEXT)

    def run(self, num_rows: int) -> None:
        self._llama.n_tokens = CONTEXT  # eval drops the cache behind it
        self._llama.eval([(CONTEXT + i) * 7919 % self._llama.n_vocab() for i in range(num_rows)])


class OnnxContender:
    """The decoder through ONNX Runtime: ids [1, n] and cached keys and values in, logits [1, n, V] out."""

    def __init__(self, name: str, path: Path, checkpoint: TargetCheckpoint, threads: int) -> None:
        import onnxruntime

        self.name, self.weight_bytes = name, path.stat().st_size
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        decoder, self._vocab_size = checkpoint.config.decoder, checkpoint.config.vocab_size
        shape = (decoder.num_layers, 2, decoder.num_kv_heads, CONTEXT, decoder.head_dim)
        self._past = np.full(shape, 0.01, np.float32)

    def run(self, num_rows: int) -> None:
        ids = np.arange(num_rows, dtype=np.int64)[None] * 7919 % self._vocab_size
        self._session.run(None, {"ids": ids, "past": self._past})


@contextmanager
def optional(what: str, install: str) -> Iterator[None]:
    """Leave a contender out, with a line on standard error, where its package is missing."""
    try:
        yield
    except ImportError as error:
        print(f"{what} left out: {error}; install it with: {install}", file=sys.stderr)


def contenders(
    checkpoint: TargetCheckpoint, path: Path, *, threads: int, most: int, wanted: set[str], out: Path
) -> list[Contender]:
    """Load everything that takes part."""
    found: list[Contender] = []
    config, weights = checkpoint.config, checkpoint.weights
    if "native" in wanted:
        for dtype in ("float32", "bfloat16", "int8"):
            native = NativeTarget(config, weights, dtype=dtype, num_threads=threads)
            found.append(ExecutorContender(f"native {dtype}", native, native.weight_bytes, most))
    if "torch" in wanted:
        with optional("torch", "pip install torch"):
            from dspark.executors.torch_target import TorchTarget

            for dtype in ("float32", "bfloat16"):
                torch = TorchTarget(config, weights, dtype=dtype, num_threads=threads)
                found.append(ExecutorContender(f"torch {dtype}", torch, 0, most))
    if "onnxruntime" in wanted:
        with optional("onnxruntime", "pip install onnxruntime onnx"):
            from dspark_build.bench_onnx import export_decoder, quantise_decoder

            plain = export_decoder(checkpoint, out / "bench_decoder.onnx", context_len=CONTEXT)
            found.append(OnnxContender("onnxruntime float32", plain, checkpoint, threads))
            small = quantise_decoder(plain, out / "bench_decoder_int8.onnx")
            found.append(OnnxContender("onnxruntime int8", small, checkpoint, threads))
    if "llama.cpp" in wanted and path.suffix == ".gguf":
        with optional("llama.cpp", "pip install llama-cpp-python (builds from source, needs cmake)"):
            import llama_cpp  # noqa: F401  # before the file is made for nothing

            q8 = requantised(path, out / "bench_q8_0.gguf")
            found.append(LlamaContender("llama.cpp Q8_0", q8, threads, most))
            found.append(LlamaContender(f"llama.cpp {path.stem.split('.')[-1]}", path, threads, most))
    return found


def requantised(source: Path, path: Path) -> Path:
    """Write the GGUF file again with its matrices in Q8_0, unless it is there already."""
    if path.is_file():
        return path
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(path, architecture)
    for name, held in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        sub_type = held.types[1] if len(held.types) > 1 else None
        writer.add_key_value(name, held.contents(), held.types[0], sub_type)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(found: list[Contender], rows: list[int], rounds: int, threads: int) -> tuple[float, list[Line]]:
    """Return bytes per second read from memory and the medians, all taken in turn."""
    pool = Pool(threads)
    for contender in found:
        contender.run(max(rows))
    reads: list[float] = []
    times: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds):
        print(f"\rround {number + 1} of {rounds} ", end="", file=sys.stderr, flush=True)
        reads.append(pool.read_bandwidth())
        for contender in found:
            for num_rows in rows:
                contender.run(num_rows)  # the caches are another contender's
                seconds = timed(lambda run=contender.run, count=num_rows: run(count))  # type: ignore[misc]
                times.setdefault((contender.name, num_rows), []).append(seconds)
    print(file=sys.stderr)
    lines = [
        Line(c.name, c.weight_bytes, {n: 1e3 * statistics.median(times[c.name, n]) for n in rows})
        for c in found
    ]
    return statistics.median(reads), lines


def measure_drafter(
    checkpoint: TargetCheckpoint, folder: str, threads: int, rounds: int
) -> tuple[float, float]:
    """Return milliseconds of one greedy block and of one target row, bfloat16, one sequence, in turn."""
    outline = peek_drafter(folder, checkpoint.config)
    target = NativeTarget(
        checkpoint.config,
        checkpoint.weights,
        dtype="bfloat16",
        feature_layer_ids=outline.feature_layer_ids,
        num_threads=threads,
    )
    drafter = load_drafter(
        folder, target=checkpoint.config, target_executor=target, executor="native", dtype="bfloat16"
    )
    executor = getattr(drafter, "executor", None)
    if not isinstance(executor, NativeBlockDrafter):
        raise SystemExit(f"--drafter: got {folder!r}, allowed is the folder of a block drafter")
    for part in (target, executor):
        part.allocate_cache(num_pages=8, page_size=PAGE_SIZE)
    batch = DraftBatch(
        anchors=np.array([5], np.int32),
        anchor_positions=np.array([CONTEXT], np.int32),
        context_len=np.array([CONTEXT], np.int32),
        page_table=np.arange(8, dtype=np.int32)[None],
    )
    count, one = np.array([outline.block_size], np.int32), pass_over(1, checkpoint.config.vocab_size)
    blocks, passes = [], []
    for _ in range(rounds):
        passes.append(timed(lambda: target.forward(one)))
        blocks.append(timed(lambda: executor.draft_greedy(batch, num_drafts=count)))
    return 1e3 * statistics.median(blocks), 1e3 * statistics.median(passes)


def table(bandwidth: float, lines: list[Line], rows: list[int]) -> str:
    """Return the report; `bound` is the time to read the weights once."""
    head = (
        f"{'':22}{'MB':>7}{'bound':>8}" + "".join(f"{f'{n} rows':>10}" for n in rows) + f"{'1 / bound':>11}"
    )
    out = [f"memory read {bandwidth / 1e9:.1f} GB/s, kernels {isa()}; milliseconds, medians", head]
    for line in lines:
        bound = 1e3 * line.weight_bytes / bandwidth
        known = f"{line.weight_bytes / 1e6:7.0f}{bound:8.1f}" if line.weight_bytes else " " * 15
        times = "".join(f"{line.milliseconds[n]:10.1f}" for n in rows)
        ratio = f"{line.milliseconds[rows[0]] / bound:11.2f}" if line.weight_bytes else ""
        out.append(f"{line.name:22}{known}{times}{ratio}")
    return "\n".join(out)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dspark_build.bench_native", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--target", default=DEFAULT_TARGET, help="default %(default)s")
    parser.add_argument("--drafter", help="folder of a block drafter to measure beside the target")
    parser.add_argument("--rows", default="1,8,16,32,64", help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=default_num_threads(), help="default %(default)s")
    parser.add_argument("--only", default="native,torch,onnxruntime,llama.cpp", help="default %(default)s")
    parser.add_argument("--out", type=Path, default=Path("out/bench_native.json"), help="default %(default)s")
    args = parser.parse_args(arguments)
    rows = sorted({1, *(int(n) for n in args.rows.split(","))})
    reason = native_unavailable_reason()
    if reason is not None:
        print(f"no native code here: {reason}", file=sys.stderr)
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        checkpoint = load_target(args.target)
        found = contenders(
            checkpoint,
            Path(args.target),
            threads=args.threads,
            most=rows[-1],
            wanted=set(args.only.split(",")),
            out=args.out.parent,
        )
        bandwidth, lines = measure(found, rows, args.rounds, args.threads)
        drafter = (
            measure_drafter(checkpoint, args.drafter, args.threads, args.rounds) if args.drafter else None
        )
    except DSparkError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(bandwidth, lines, rows))
    report: dict[str, Any] = {
        "read_bytes_per_s": bandwidth,
        "isa": isa(),
        "threads": args.threads,
        "context_len": CONTEXT,
        "passes": [
            {"name": line.name, "weight_bytes": line.weight_bytes, "milliseconds": line.milliseconds}
            for line in lines
        ],
    }
    if drafter is not None:
        report["drafter"] = {"block_ms": drafter[0], "target_row_ms": drafter[1]}
        print(f"drafter: a greedy block {drafter[0]:.2f} ms, {drafter[0] / drafter[1]:.2f} of a target row")
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
