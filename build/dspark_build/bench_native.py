"""`make bench-native`: one pass of the native target against the machine's own bound and against its peers.

    read bound           a plain sum over the contender's own packed weights, same threads, in the same turn
    native               float32, bfloat16, int8
    eager PyTorch        transformers' Llama with the same sizes, float32 and bfloat16
    onnxruntime          the same decoder exported to ONNX, float32; int8 weights by its own quantiser
    llama.cpp            Q8_0 and Q4_0 made from the same file, through llama-cpp-python

Everything takes its turn in every round, so a machine that drifts drifts for all. A turn is WARM passes that are not
timed (the caches are another contender's, its threads are asleep) and TIMED that are; reads of the weights are warmed
and timed alike, and a bound's ratio is of pass and read of one turn. ONNX Runtime and llama.cpp run, and time
themselves, in processes of their own, since their packages do not fit ours. Every pass has n rows over 64 cached
tokens, and logits of all n rows. What is wanted is printed below the table with whether it holds.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from dspark.errors import ConfigError, DSparkError
from dspark.executors.interface import StepBatch
from dspark.executors.native_target import NativeTarget
from dspark.models.loading import TargetCheckpoint, load_target
from dspark_plugins.native import isa, native_unavailable_reason
from dspark_plugins.native.binding import Pool
from dspark_plugins.native.threads import default_num_threads

from dspark_build.bench_drafter_shapes import DrafterCost, measure_drafter, measure_shapes, shape_table
from dspark_build.bench_neighbours import measure_neighbours, neighbour_lines
from dspark_build.bench_peer import pass_times

__all__ = ["main"]

DEFAULT_TARGET = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT, PAGE_SIZE = 64, 16
WARM, TIMED = 3, 3  # passes of one turn
_PEER = Path(__file__).with_name("bench_peer.py")


class Contender(Protocol):
    """One way to run the pass. `weight_bytes` is 0 where it is not known."""

    name: str
    weight_bytes: int

    def times(self, num_rows: int) -> list[float]:
        """Return the seconds of TIMED passes behind WARM ones."""
        ...


@dataclass(frozen=True, slots=True)
class Line:
    """Median milliseconds of one contender by number of rows.

    `read_ms` is the median time of reading its weights once and `over_bound` the median over rounds of one row's time
    over it; both are 0 where only the machine's bandwidth is known.
    """

    name: str
    weight_bytes: int
    milliseconds: dict[int, float]
    read_ms: float = 0.0
    over_bound: float = 0.0

    def bound_ms(self, bandwidth: float) -> float:
        return self.read_ms or 1e3 * self.weight_bytes / bandwidth

    def one_row_over_bound(self, bandwidth: float) -> float:
        return self.over_bound or self.milliseconds[1] / self.bound_ms(bandwidth)


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
    """A native target."""

    def __init__(self, name: str, target: NativeTarget, most: int) -> None:
        self.name, self.weight_bytes, self._target = name, target.weight_bytes, target
        target.allocate_cache(num_pages=-(-(CONTEXT + most) // PAGE_SIZE), page_size=PAGE_SIZE)

    def times(self, num_rows: int) -> list[float]:
        batch = pass_over(num_rows, self._target.config.vocab_size)
        return pass_times(lambda: self._target.forward(batch), warm=WARM, timed=TIMED)

    def read_times(self) -> list[float]:
        """Return the seconds of TIMED plain reads of all weights behind WARM ones."""
        return [float(s) for s in self._target.arena.read_seconds(self._target.pool, WARM + TIMED)[WARM:]]


class PeerContender:
    """A peer in a process of its own (bench_peer.py), which waits on a pipe between its turns."""

    def __init__(self, name: str, python: Path, kind: str, path: Path, numbers: list[int]) -> None:
        self.name, self.weight_bytes = name, path.stat().st_size
        command = [str(python), str(_PEER), kind, str(path), *map(str, numbers)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line("ready")

    def times(self, num_rows: int) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_rows} {WARM} {TIMED}\n")
        self._process.stdin.flush()
        return [float(seconds) for seconds in self._line("seconds ").split()[1:]]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _line(self, start: str) -> str:
        """Return the next line that starts so; libraries may print lines of their own."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise ConfigError(f"{self.name}: the peer ended with status {self._process.wait()}, see above")


class EagerContender:
    """What eager PyTorch makes of the model: transformers' own Llama, one row at a time behind a cache."""

    def __init__(self, name: str, model: Any, cache: Any) -> None:
        self.name, self.weight_bytes, self._model, self._cache = name, 0, model, cache

    def times(self, num_rows: int) -> list[float]:
        return pass_times(lambda: self._run(num_rows), warm=WARM, timed=TIMED)

    def _run(self, num_rows: int) -> None:
        import torch

        with torch.inference_mode():
            ids = torch.arange(num_rows)[None] * 7919 % self._model.config.vocab_size
            self._model(input_ids=ids, past_key_values=self._cache, use_cache=True)
            self._cache.crop(-num_rows)


def eager_contenders(checkpoint: TargetCheckpoint, threads: int) -> list[Contender]:
    """Return transformers' Llama in float32 and bfloat16, with our weights."""
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    config, decoder = checkpoint.config, checkpoint.config.decoder
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=decoder.hidden_size,
            intermediate_size=decoder.intermediate_size,
            num_hidden_layers=decoder.num_layers,
            num_attention_heads=decoder.num_heads,
            num_key_value_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            rms_norm_eps=decoder.rms_norm_eps,
            rope_theta=decoder.rope.theta,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    ).eval()
    found: list[Contender] = []
    for dtype in (torch.float32, torch.bfloat16):
        own = copy.deepcopy(model).to(dtype)
        cache = DynamicCache(config=own.config)
        with torch.inference_mode():
            own(input_ids=torch.ones(1, CONTEXT, dtype=torch.long), past_key_values=cache, use_cache=True)
        found.append(EagerContender(f"eager PyTorch {str(dtype).removeprefix('torch.')}", own, cache))
    return found


@contextmanager
def optional(what: str, install: str) -> Iterator[None]:
    """Leave a contender out, with a line on standard error, where its package is missing."""
    try:
        yield
    except ImportError as error:
        print(f"{what} left out: {error}; install it with: {install}", file=sys.stderr)


def contenders(
    checkpoint: TargetCheckpoint,
    path: Path,
    *,
    threads: int,
    most: int,
    wanted: set[str],
    out: Path,
    python: Path,
) -> list[Contender]:
    """Load everything that takes part."""
    found: list[Contender] = []
    config, weights = checkpoint.config, checkpoint.weights
    if "native" in wanted:
        for dtype in ("float32", "bfloat16", "int8"):
            native = NativeTarget(config, weights, dtype=dtype, num_threads=threads)
            found.append(ExecutorContender(f"native {dtype}", native, most))
    if "torch" in wanted:
        with optional("eager PyTorch", "pip install transformers"):
            found += eager_contenders(checkpoint, threads)
    peers = {"onnxruntime", "llama.cpp"} & wanted
    if peers and not python.is_file():
        print(
            f"{', '.join(sorted(peers))} left out: no {python}; make bench-native makes it", file=sys.stderr
        )
        return found
    if "onnxruntime" in peers:
        found += onnx_contenders(checkpoint, path, threads=threads, out=out, python=python)
    if "llama.cpp" in peers and path.suffix == ".gguf":
        numbers = [threads, CONTEXT, most]
        for kind in ("Q8_0", "Q4_0"):
            file = requantised(path, out / f"bench_{kind.lower()}.gguf", kind)
            found.append(PeerContender(f"llama.cpp {kind}", python, "llama", file, numbers))
    return found


def onnx_contenders(
    checkpoint: TargetCheckpoint, path: Path, *, threads: int, out: Path, python: Path
) -> list[Contender]:
    """Export the decoder in the peers' environment and open it there, float32 and int8."""
    files = [out / "bench_decoder.onnx", out / "bench_decoder_int8.onnx"]
    if not all(file.is_file() for file in files):
        root = Path(__file__).parents[2]
        folders = [str(root / name) for name in ("build", "plugins", "python_backend")]
        subprocess.run(
            [str(python), str(_PEER), "export", str(path), str(out), str(CONTEXT)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
            check=True,
        )
    decoder = checkpoint.config.decoder
    sizes = [checkpoint.config.vocab_size, decoder.num_layers, decoder.num_kv_heads, decoder.head_dim]
    return [
        PeerContender(f"onnxruntime {name}", python, "onnx", file, [threads, CONTEXT, *sizes])
        for name, file in zip(("float32", "int8"), files, strict=True)
    ]


def requantised(source: Path, path: Path, matrix_kind: str) -> Path:
    """Write the GGUF file again with its matrices in Q8_0 or Q4_0, unless it is there already."""
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
        kind = gguf.GGMLQuantizationType[matrix_kind] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def measure(found: list[Contender], rows: list[int], rounds: int, threads: int) -> tuple[float, list[Line]]:
    """Return bytes per second read from memory and the medians, all taken in turn."""
    pool = Pool(threads)
    bandwidths: list[float] = []
    times: dict[tuple[str, int], list[float]] = {}
    reads: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    for number in range(rounds):
        print(f"\rround {number + 1} of {rounds} ", end="", file=sys.stderr, flush=True)
        bandwidths.append(pool.read_bandwidth())
        for contender in found:
            for num_rows in rows:
                seconds = contender.times(num_rows)
                times.setdefault((contender.name, num_rows), []).extend(seconds)
                if num_rows == 1 and isinstance(contender, ExecutorContender):
                    read = contender.read_times()
                    reads.setdefault(contender.name, []).extend(read)
                    ratio = statistics.median(seconds) / statistics.median(read)
                    ratios.setdefault(contender.name, []).append(ratio)
    print(file=sys.stderr)
    lines = [
        Line(
            contender.name,
            contender.weight_bytes,
            {n: 1e3 * statistics.median(times[contender.name, n]) for n in rows},
            1e3 * statistics.median(reads.get(contender.name, [0.0])),
            statistics.median(ratios.get(contender.name, [0.0])),
        )
        for contender in found
    ]
    return statistics.median(bandwidths), lines


def table(bandwidth: float, lines: list[Line], rows: list[int]) -> str:
    """Return the report; `bound` is the time to read the weights once, from `bandwidth` where it was not measured."""
    head = (
        f"{'':22}{'MB':>7}{'bound':>8}" + "".join(f"{f'{n} rows':>10}" for n in rows) + f"{'1 / bound':>11}"
    )
    out = [f"memory read {bandwidth / 1e9:.1f} GB/s, kernels {isa()}; milliseconds, medians", head]
    for line in lines:
        known = (
            f"{line.weight_bytes / 1e6:7.0f}{line.bound_ms(bandwidth):8.1f}"
            if line.weight_bytes
            else " " * 15
        )
        times = "".join(f"{line.milliseconds[n]:10.1f}" for n in rows)
        ratio = f"{line.one_row_over_bound(bandwidth):11.2f}" if line.weight_bytes else ""
        out.append(f"{line.name:22}{known}{times}{ratio}")
    return "\n".join(out)


def verdicts(bandwidth: float, lines: list[Line]) -> list[tuple[str, float, float]]:
    """Return what is wanted as (what, ratio, most allowed), for those lines that were measured."""
    by_name = {line.name: line for line in lines}
    found = []
    for dtype, growth in (("float32", 1.5), ("bfloat16", 1.5), ("int8", 1.9)):
        own = by_name.get(f"native {dtype}")
        if own is None:
            continue
        one = own.milliseconds[1]
        found.append((f"{dtype}: one row / read bound", own.one_row_over_bound(bandwidth), 1.3))
        if 8 in own.milliseconds:
            found.append((f"{dtype}: 8 rows / one row", own.milliseconds[8] / one, growth))
        rivals = {
            "float32": ("onnxruntime float32",),
            "bfloat16": ("eager PyTorch bfloat16",),
            "int8": ("llama.cpp Q8_0", "llama.cpp Q4_0", "onnxruntime int8"),
        }[dtype]
        for name in rivals:
            for rows in (1, 8, 16):
                if name in by_name and rows in own.milliseconds:
                    ratio = own.milliseconds[rows] / by_name[name].milliseconds[rows]
                    limit = 0.4 if name.startswith("eager") and rows == 1 else 1.0
                    found.append((f"{dtype}: {rows} rows / {name}", ratio, limit))
    return found


def one_row_target(checkpoint: TargetCheckpoint, dtype: str, threads: int) -> tuple[NativeTarget, StepBatch]:
    target = NativeTarget(checkpoint.config, checkpoint.weights, dtype=dtype, num_threads=threads)
    target.allocate_cache(num_pages=8, page_size=PAGE_SIZE)
    return target, pass_over(1, checkpoint.config.vocab_size)


def drafter_cost(
    checkpoint: TargetCheckpoint, folder: str, threads: int, rounds: int, *, dtype: str
) -> DrafterCost:
    target, one = one_row_target(checkpoint, "bfloat16", threads)
    return measure_drafter(folder, target, lambda: target.forward(one), rounds, dtype=dtype)


def print_neighbours(checkpoint: TargetCheckpoint, threads: int, seconds: float) -> int:
    def load() -> Callable[[], object]:
        target, one = one_row_target(checkpoint, "bfloat16", threads)
        return lambda: target.forward(one)

    for line in neighbour_lines(measure_neighbours(load, seconds=seconds)):
        print(line)
    return 0


def print_shapes(checkpoint: TargetCheckpoint, dtype: str, threads: int, rounds: int) -> int:
    target, one = one_row_target(checkpoint, dtype, threads)
    costs = list(measure_shapes(target, lambda: target.forward(one), rounds))
    print(f"{dtype}, kernels {isa()}, one request behind 256 tokens, median of {rounds} rounds")
    print(shape_table(costs))
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dspark_build.bench_native", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--target", default=DEFAULT_TARGET, help="default %(default)s")
    parser.add_argument("--drafter", help="folder of a block drafter to measure beside a bfloat16 target")
    parser.add_argument("--drafter-dtype", default="int8", help="of its weights, default %(default)s")
    parser.add_argument(
        "--neighbours",
        type=float,
        metavar="SECONDS",
        help="print only what a busy process on each core and a bfloat16 model leave each other",
    )
    parser.add_argument(
        "--drafter-shapes", metavar="DTYPE", help="print only what drafters of several shapes cost"
    )
    parser.add_argument(
        "--peers",
        type=Path,
        default=Path(".venv-peers/bin/python"),
        help="their interpreter, default %(default)s",
    )
    parser.add_argument("--rows", default="1,8,16,32,64", help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="default %(default)s")
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
        if args.drafter_shapes:
            return print_shapes(checkpoint, args.drafter_shapes, args.threads, args.rounds)
        if args.neighbours:
            return print_neighbours(checkpoint, args.threads, args.neighbours)
        found = contenders(
            checkpoint,
            Path(args.target),
            threads=args.threads,
            most=rows[-1],
            wanted=set(args.only.split(",")),
            out=args.out.parent,
            python=args.peers,
        )
        try:
            bandwidth, lines = measure(found, rows, args.rounds, args.threads)
        finally:
            for contender in found:
                if isinstance(contender, PeerContender):
                    contender.close()
        drafter = None
        if args.drafter:
            drafter = drafter_cost(
                checkpoint, args.drafter, args.threads, args.rounds, dtype=args.drafter_dtype
            )
    except DSparkError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(bandwidth, lines, rows))
    wanted = verdicts(bandwidth, lines)
    for what, ratio, limit in wanted:
        print(f"{what:44}{ratio:6.2f}  wanted at most {limit:.1f}: {'holds' if ratio <= limit else 'MISSED'}")
    report: dict[str, Any] = {
        "read_bytes_per_s": bandwidth,
        "isa": isa(),
        "threads": args.threads,
        "context_len": CONTEXT,
        "passes": [
            {
                "name": line.name,
                "weight_bytes": line.weight_bytes,
                "milliseconds": line.milliseconds,
                "read_ms": line.read_ms,
                "over_bound": line.over_bound,
            }
            for line in lines
        ],
    }
    if drafter is not None:
        report["drafter"] = {"block_ms": drafter.block_ms, "target_row_ms": drafter.target_ms}
        print(
            f"drafter, {args.drafter_dtype}: a greedy block {drafter.block_ms:.2f} ms, "
            f"{drafter.ratio:.2f} of a target row, append included"
        )
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
