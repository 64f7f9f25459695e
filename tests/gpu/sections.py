"""The sections of a run, in order; each fills the results and asks how much time is left."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from dspark.errors import ConfigError
from dspark.executors.interface import TargetExecutor
from dspark.models.loading import load_target
from dspark_build.kernel_report import loads_of
from dspark_plugins.kernels.chips import CHIPS
from dspark_plugins.kernels.sets import SHAPES
from dspark_plugins.tensorrt.driver import DriverLauncher, Launcher, runs_on
from dspark_plugins.tensorrt.forms import pick
from dspark_plugins.tensorrt.module import tensorrt_name
from dspark_plugins.tensorrt.operation import Buffer, Fill, Operation
from dspark_plugins.tensorrt.operations import OPERATIONS
from torch import Tensor

from gpu.cases import Case, awkward_cases, load_case, moved
from gpu.decode import PAGE, greedy
from gpu.device import capture, measure_speed, seconds_of
from gpu.results import Check, Results, Timing
from gpu.scheduled import compare_scheduled

__all__ = ["SECTIONS", "difference"]

TimeLeft = Callable[[], float]  # seconds

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}
_DEVICE = "cuda"  # a test puts the CPU here
_MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
_DRAFTER = Path(__file__).parents[2] / "model_repository" / "dspark" / "1" / "drafter"
_PROMPTS = ([1, 4, 7, 9, 12], [3], [5, 6, 8] * 11, [2, 9])


def outputs_of(case: Case, device: str) -> list[Tensor]:
    """Run a case with arguments of its own; return what it gives and what it wrote in place."""
    given = moved(case.arguments, device)
    out = case.op(*given)
    made = list(out) if isinstance(out, tuple) else [out]
    if case.num_rows is not None:
        made[0] = made[0][: case.num_rows]
    if case.written is not None:
        made.append(given[case.written])
    if "block_sample" in case.name:
        made = _meaningful_draws(made, given[6])
    return [x.cpu() for x in made]


def _meaningful_draws(made: list[Tensor], temperature: Tensor) -> list[Tensor]:
    """Leave out what is undefined: q of greedy blocks and behind the last draft."""
    tokens, num_tokens, probs, rated = made
    inside = torch.arange(probs.shape[1], device=probs.device)[None] < num_tokens[:, None]
    kept = inside & (temperature > 0)[:, None]
    return [tokens, num_tokens, torch.where(kept[..., None], probs, 0.0), rated]


def difference(mine: Tensor, theirs: Tensor) -> float:
    """Return the largest distance, NaN at the same places being equal; infinity where only one has them."""
    if mine.shape != theirs.shape or not torch.equal(mine.isnan(), theirs.isnan()):
        return float("inf")
    both = (mine.double().nan_to_num() - theirs.double().nan_to_num()).abs()
    return float(both.max()) if both.numel() else 0.0


def kernels(results: Results, time_left: TimeLeft) -> None:
    """Kernels equal their plain versions, give the same bits twice, and again from a CUDA graph."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for case in awkward_cases(dtype):
            if time_left() < 0:
                results.left_out.append(f"kernels from {_NAMES[dtype]} {case.name} on: no time left")
                return
            name = f"{_NAMES[dtype]} {case.name}"
            mine, plain = outputs_of(case, "cuda"), outputs_of(case, "cpu")
            worst = max(difference(a, b) for a, b in zip(mine, plain, strict=True))
            allowed = _TOLERANCE[dtype]
            results.checks.append(
                Check("kernels", name, worst <= allowed, f"off by {worst:.2e}, allowed {allowed}")
            )
            again = outputs_of(case, "cuda")
            same = all(difference(a, b) == 0 for a, b in zip(mine, again, strict=True))
            results.checks.append(Check("kernels", f"{name}, twice", same, "bits differ"))
        _graphs(results, dtype)


def _graphs(results: Results, dtype: torch.dtype) -> None:
    for case in list(awkward_cases(dtype))[::3]:
        given = moved(case.arguments, "cuda")
        graph, out = capture(lambda case=case, given=given: case.op(*given))
        first = out[0] if isinstance(out, tuple) else out
        first.zero_()
        graph.replay()
        torch.cuda.synchronize()
        eager = outputs_of(case, "cuda")[0]
        got = first[: case.num_rows].cpu() if case.num_rows is not None else first.cpu()
        same = difference(got, eager) == 0
        results.checks.append(
            Check("kernels", f"{_NAMES[dtype]} {case.name}, in a graph", same, "bits differ")
        )


def timings(results: Results, time_left: TimeLeft) -> None:
    """Time a layer's launches at the sizes of real models, beside the least they could take here."""
    speed = measure_speed()
    results.machine["copy"] = f"{speed.bytes_per_s / 1e12:.2f} TB/s, measured"
    results.machine["bf16 product"] = f"{speed.flops_per_s / 1e12:.0f} TFLOP/s, measured"
    for name in ("SmolLM2-135M", "Qwen3-4B"):
        for load in loads_of(SHAPES[name]):
            if time_left() < 0:
                results.left_out.append(f"timings from {name} {load.what} on: no time left")
                return
            case = load_case(load.what, SHAPES[name], num=16, context=2048, block=7, rank=256)
            given = moved(case.arguments, "cuda")
            floor_s, bound = speed.floor(load.num_bytes, load.flops)
            taken = seconds_of(lambda case=case, given=given: case.op(*given))
            results.timings.append(Timing("timings", f"{name}, {load.what}", taken, floor_s, bound))


def driver(results: Results, time_left: TimeLeft) -> None:
    """Kernels compiled ahead of time, started as plugins start them, equal the ones compiled here."""
    from dspark_build.engine_kernels import KernelCompiler

    major, minor = torch.cuda.get_device_capability()
    fitting = [sm for sm in CHIPS if runs_on(sm, 10 * major + minor)]
    if not fitting:
        results.left_out.append(f"driver: no kernels for compute capability {major}.{minor}")
        return
    compiler, launcher = KernelCompiler(max(fitting), num_jobs=4), DriverLauncher()
    for dtype, case in product((torch.float16,), awkward_cases(torch.float16)):
        if time_left() < 0:
            results.left_out.append(f"driver from {case.name} on: no time left")
            return
        node = Node(*_as_node(case, moved(case.arguments, "cuda")), compiler, launcher)
        node.start(torch.cuda.current_stream().cuda_stream)
        made, expected = node.results(case), outputs_of(case, "cuda")
        worst = max(difference(a, b) for a, b in zip(made, expected, strict=True))
        allowed = _TOLERANCE[dtype]
        results.checks.append(
            Check("driver", case.name, worst <= allowed, f"off by {worst:.2e}, allowed {allowed}")
        )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            node.start(torch.cuda.current_stream().cuda_stream)
        node.clear()
        graph.replay()
        torch.cuda.synchronize()
        same = all(difference(a, b) == 0 for a, b in zip(node.results(case), made, strict=True))
        results.checks.append(Check("driver", f"{case.name}, in a graph", same, "bits differ"))


def _as_node(case: Case, given: list[Any]) -> tuple[Operation, list[Tensor]]:
    """Return the operation of a graph's node and its inputs, in the contract's order (docs/tensorrt.md)."""
    if "schedule" in case.name:
        return OPERATIONS["DSparkSchedule"]({}), given
    if "verify" in case.name:
        *tensors, max_depth = given
        there = {"tree": tensors[3], "probs": tensors[4], "mapped": tensors[6]}
        values = {"max_depth": max_depth} | {name: int(x is not None) for name, x in there.items()}
        return OPERATIONS["DSparkVerify"](values), [x for x in tensors if x is not None]
    if "block_sample" in case.name:
        rank, width = (0 if given[11] is None else given[11].shape[1]), given[1].shape[2]
        head = 0 if not rank else 1 if given[13] is None else 2 if len(given[13]) == rank else 3
        confidence = 2 if rank and len(given[15]) > width else 1
        maps = {"mapped": int(given[18] is not None), "previous": int(given[19] is not None)}
        values = {"head": head, "confidence": confidence, **maps}
        return OPERATIONS["DSparkBlockSample"](values), [x for x in given if x is not None]
    *tensors, page_size, scale, window = given
    values = {"page_size": page_size, "scale": scale, "window": window}
    if "block_attention" in case.name:
        return OPERATIONS["DSparkBlockAttention"](values), tensors
    if tensors[11] is None:
        tensors[11] = torch.zeros(len(tensors[0]), 0, dtype=torch.int32, device=tensors[0].device)
    return OPERATIONS["DSparkPagedAttention"](values), tensors


class Node:
    """What a plugin's `enqueue` starts, on tensors of torch; everything is allocated and loaded before it starts."""

    def __init__(self, operation: Operation, inputs: list[Tensor], compiler: Any, launcher: Launcher) -> None:
        shapes, dtypes = [tuple(x.shape) for x in inputs], [_NAMES[x.dtype] for x in inputs]
        by_name, device = {name: dtype for dtype, name in _NAMES.items()}, inputs[0].device
        self.inputs, self.launcher, self.aliases = inputs, launcher, operation.aliases
        self.made = [
            torch.zeros(shape, dtype=by_name[dtype], device=device)
            for shape, dtype in zip(
                operation.output_shapes(shapes), operation.output_dtypes(dtypes), strict=True
            )
        ]
        for output, source in operation.aliases.items():
            self.made[output] = inputs[source]
        self.forms = compiler(operation.variants(shapes, dtypes))
        self.scratch = [
            torch.empty(max(n, 16), dtype=torch.uint8, device=device) for n in operation.scratch(shapes)
        ]
        given, out = (
            [Buffer(x.data_ptr(), tuple(x.shape), _NAMES[x.dtype]) for x in part]
            for part in (inputs, self.made)
        )
        places = [x.data_ptr() for x in self.scratch]
        self.steps = list(operation.launches(given, out, places, launcher.num_multiprocessors()))
        for step in self.steps:
            if not isinstance(step, Fill):
                launcher.load(pick(self.forms, step.variant))

    def start(self, stream: int) -> None:
        for step in self.steps:
            if isinstance(step, Fill):
                self.launcher.fill(step.address, step.num_words, stream)
            elif 0 not in step.grid:
                self.launcher.launch(pick(self.forms, step.variant), step.grid, step.arguments, stream)

    def clear(self) -> None:
        """Forget what was written, but for caches."""
        for i, made in enumerate(self.made):
            if i not in self.aliases:
                made.zero_()

    def results(self, case: Case) -> list[Tensor]:
        """Return copies of the outputs as `outputs_of` gives them."""
        made = [x.cpu() for x in self.made]
        if "block_sample" in case.name:
            made = _meaningful_draws(made, self.inputs[6].cpu())
        if case.num_rows is not None:
            made[0] = made[0][: case.num_rows]
        return [x.clone() for x in made]


def executor(results: Results, time_left: TimeLeft) -> None:
    """The torch executor decodes the CPU's greedy tokens on this GPU: plain, with our operations, and from graphs."""
    from dspark.executors.tensorrt_loading import engine_shapes
    from dspark.executors.torch_cuda import pair_on
    from dspark.executors.torch_target import TorchTarget

    if not _MODEL.exists():
        results.left_out.append(f"executor: {_MODEL.name} is not in models/ (make setup puts it there)")
        return
    checkpoint = load_target(_MODEL)
    shapes = engine_shapes(
        max_sequences=16, max_step_tokens=256, max_context_len=256, page_size=PAGE, block_size=7
    )

    def plain(device: str, dtype: str) -> TargetExecutor:
        return TorchTarget(checkpoint.config, checkpoint.weights, dtype=dtype, device=device)

    def by_graphs(graph_tokens: int, dtype: str) -> TargetExecutor:
        sizes = replace(shapes, graph_tokens=graph_tokens)
        return pair_on(
            torch.device(_DEVICE), checkpoint, None, dtype=dtype, shapes=sizes, page_size=PAGE
        ).target

    kinds: dict[str, Callable[[str], TargetExecutor]] = {
        "plain": lambda dtype: plain(_DEVICE, dtype),
        "operations, eager": lambda dtype: by_graphs(0, dtype),
        "operations, graphs": lambda dtype: by_graphs(64, dtype),
    }
    right = greedy(plain("cpu", "float32"), _PROMPTS, num_tokens=16).tokens
    for kind, make in kinds.items():
        if time_left() < 0:
            results.left_out.append(f"executor from {kind} on: no time left")
            return
        mine = greedy(make("float32"), _PROMPTS, num_tokens=16).tokens
        for i, (a, b) in enumerate(zip(mine, right, strict=True)):
            told = f"{a} on the GPU, {b} on the CPU"
            results.checks.append(Check("executor", f"{kind}, greedy tokens of prompt {i}", a == b, told))
        run = greedy(make("bfloat16"), _PROMPTS * 4, num_tokens=16)
        what = f"SmolLM2-135M, torch, bf16, {kind}, 16 rows, whole pass"
        results.timings.append(Timing("executor", what, run.step_s))


def serving(results: Results, time_left: TimeLeft) -> None:
    """An engine over the shipped pair answers on this GPU, speculative as plain, and its rates."""
    from support.engines import answers, make_engine, make_request

    if not _MODEL.exists():
        results.left_out.append(f"serving: {_MODEL.name} is not in models/ (make setup puts it there)")
        return
    given: dict[str, Any] = {
        "dtype": "float32",
        "device": _DEVICE,
        "cache_bytes": 1 << 28,
        "max_context_len": 512,
    }
    found: dict[str, list[list[int]]] = {}
    for policy in ("none", "fixed:4"):
        if time_left() < 0:
            results.left_out.append(f"serving from policy {policy} on: no time left")
            return
        engine = make_engine(_MODEL, drafter=_DRAFTER, policy=policy, max_batch_size=8, **given)
        requests = [make_request(prompt, max_tokens=64) for prompt in _PROMPTS * 2]
        begin = time.perf_counter()
        found[policy] = answers(engine, requests)
        seconds = time.perf_counter() - begin
        num_tokens = sum(len(answer) for answer in found[policy])
        what = f"SmolLM2-135M, torch, fp32, policy {policy}, 8 requests, a token"
        results.timings.append(Timing("serving", what, seconds / num_tokens))
    results.checks.append(
        Check(
            "serving",
            "speculative answers are the plain ones",
            found["none"] == found["fixed:4"],
            "tokens differ",
        )
    )


def scheduled(results: Results, time_left: TimeLeft) -> None:
    """Steps that wait once, over the shipped pair on this GPU: what the host would have laid out, and their seconds."""
    from dspark.drafters.checkpoint import load_drafter_checkpoint
    from dspark.engine.admission import EngineLimits
    from dspark.executors.tensorrt_loading import engine_shapes
    from dspark.executors.torch_cuda import pair_on

    if not _MODEL.exists():
        results.left_out.append(f"scheduled: {_MODEL.name} is not in models/ (make setup puts it there)")
        return
    checkpoint = load_target(_MODEL)
    drafter = load_drafter_checkpoint(str(_DRAFTER), target=checkpoint.config)
    limits = EngineLimits(
        max_batch_size=8, max_context_len=256, max_step_tokens=64, num_pages=160, page_size=PAGE
    )
    for graph_tokens, kind in ((0, "eager"), (64, "graphs")):
        if time_left() < 0:
            results.left_out.append(f"scheduled from {kind} on: no time left")
            return
        shapes = engine_shapes(
            max_sequences=limits.max_batch_size,
            max_step_tokens=limits.max_step_tokens,
            max_context_len=limits.max_context_len,
            page_size=PAGE,
            block_size=drafter.config.block_size,
        )
        pair = pair_on(
            torch.device(_DEVICE),
            checkpoint,
            drafter,
            dtype="float32",
            shapes=replace(shapes, graph_tokens=graph_tokens),
            page_size=PAGE,
        )
        compare_scheduled(
            results,
            "scheduled",
            pair,
            _PROMPTS * 2,
            what=f"SmolLM2-135M, torch, fp32, {kind}",
            limits=limits,
            num_tokens=48,
        )


def engine(results: Results, time_left: TimeLeft) -> None:
    """Engines of a tiny pair build, load and give the torch executor's answers, plain and speculative."""
    from dspark_build.cli import main
    from dspark_build.engine_plan import check_architecture
    from support.tiny_drafters import write_good_drafter
    from support.tiny_models import write_tiny_target

    if tensorrt_name() is None:
        results.left_out.append("engine: TensorRT is not installed")
        return
    if time_left() < 60:
        results.left_out.append("engine: no time left")
        return
    major, minor = torch.cuda.get_device_capability()
    try:
        check_architecture(10 * major + minor, "fp32")
    except ConfigError as error:
        results.left_out.append(f"engine: {error}")
        return
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_tiny_target(home / "target", max_context_len=256, tie=True)
        write_good_drafter(home / "drafter", home / "target", noise=0.1)
        limits = {
            "max-batch": 4,
            "max-tokens": 64,
            "max-pages": 18,
            "page-size": PAGE,
            "sm": f"{major}{minor}",
        }
        words = [word for name, value in limits.items() for word in (f"--{name}", str(value))]
        pair = ["--target", str(home / "target"), "--drafter", str(home / "drafter")]
        status = main(["engine", *pair, "--out", str(home / "engine"), "--precision", "fp32", *words])
        results.checks.append(Check("engine", "builds for this GPU", status == 0, f"status {status}"))
        if not status:
            _served(results, home, executor="tensorrt", engine=str(home / "engine"))
            _scheduled_engine(results, home)


def _scheduled_engine(results: Results, home: Path) -> None:
    """Compare passes that the engines in `home` lay out with those that the host does."""
    from dspark.drafters.checkpoint import load_drafter_checkpoint
    from dspark.engine.admission import EngineLimits
    from dspark.executors.tensorrt_loading import built_engine, load_engine_pair

    target = load_target(home / "target")
    pair = load_engine_pair(
        home / "engine",
        target=target,
        drafter=load_drafter_checkpoint(home / "drafter", target=target.config),
        page_size=PAGE,
        shapes=built_engine(home / "engine").shapes,
    )
    limits = EngineLimits(
        max_batch_size=4, max_context_len=256, max_step_tokens=64, num_pages=64, page_size=PAGE
    )
    compare_scheduled(
        results, "engine", pair, _PROMPTS, what="tiny pair, tensorrt", limits=limits, num_tokens=24
    )


def _served(results: Results, home: Path, **settings: Any) -> None:
    """Compare the answers of engines over a pair in `home` with those of torch on the CPU."""
    from support.engines import answers, make_engine, make_request

    given: dict[str, Any] = {"page_size": PAGE, "max_batch_size": 4, "max_step_tokens": 64}
    asked = [*({} for _ in _PROMPTS[:-1]), {"temperature": 0.8, "seed": 5}]
    for policy, rule in (("none", "auto"), ("fixed:3", "auto"), ("fixed:3", "rejection")):
        found: dict[str, list[list[int]]] = {}
        for where, more in (("here", settings), ("torch on the CPU", {})):
            rules = given | {"rule": rule} | more
            made = make_engine(home / "target", drafter=home / "drafter", policy=policy, **rules)
            requests = [
                make_request(prompt, max_tokens=16, **params)
                for prompt, params in zip(_PROMPTS, asked, strict=True)
            ]
            begin = time.perf_counter()
            found[where] = answers(made, requests)
            seconds = (time.perf_counter() - begin) / sum(len(a) for a in found[where])
            if where == "here":
                what = f"tiny pair, {settings.get('executor')}, policy {policy}, rule {rule}, 4 requests, a token"
                results.timings.append(Timing("engine", what, seconds))
        mine, theirs = found["here"], found["torch on the CPU"]
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            told = f"{a} here, {b} from torch on the CPU"
            results.checks.append(Check("engine", f"policy {policy}, rule {rule}, answer {i}", a == b, told))


SECTIONS: dict[str, Callable[[Results, TimeLeft], None]] = {
    "kernels": kernels,
    "driver": driver,
    "timings": timings,
    "executor": executor,
    "serving": serving,
    "scheduled": scheduled,
    "engine": engine,
}
