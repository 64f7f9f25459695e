"""`dspark-build profile`: the cost curve of a target and drafter on this machine, into capacity.json.

What is measured, and how, is in `dspark.scheduling.measurement`; this file loads the pair, tells its
progress and draws the curve.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from dspark.config import ServeConfig
from dspark.drafters.interface import Drafter
from dspark.drafters.loading import load_drafter, peek_drafter
from dspark.errors import ConfigError
from dspark.executors.interface import TargetExecutor
from dspark.models.loading import load_target
from dspark.runtime import choose_executor, make_target, resolve_drafter
from dspark.scheduling.cost_model import CapacityFile, CostCurve, Fingerprint
from dspark.scheduling.machine import machine_name
from dspark.scheduling.measurement import Bench, measure_curve, pages_needed

from dspark_build.calibrate import drafter_hash
from dspark_build.progress import ProgressLine, say

__all__ = ["add_profile_arguments", "fingerprint_of", "profile_pair", "run_profile"]

_PAGE_SIZE = 16


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--target", required=True, help="Hugging Face folder or GGUF file")
    parser.add_argument(
        "--drafter", default="none", help="drafter folder, ngram or none (default %(default)s)"
    )
    parser.add_argument("--executor", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument("--dtype", default="auto", help="default %(default)s")
    parser.add_argument("--threads", type=int, default=0, help="0 = one per core")
    parser.add_argument("--max-batch", type=int, default=64, help="sequences at a time (default %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=0, help="rows of the largest pass; 0 = a full batch of full blocks"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="time to spend (default %(default)g)")
    parser.add_argument("--out", type=Path, default=Path("capacity.json"), help="default %(default)s")


def run_profile(args: argparse.Namespace) -> int:
    """Measure, write capacity.json and a picture beside it.

    Raises:
        ConfigError: an option that cannot be used, or a measured curve that is not one.
    """
    if not args.seconds > 0.0 or args.max_batch < 1 or args.max_tokens < 0:
        raise ConfigError("--seconds must be above 0, --max-batch at least 1, --max-tokens at least 0")
    config = ServeConfig(
        target=args.target,
        drafter=args.drafter,
        executor=args.executor,
        dtype=args.dtype,
        num_threads=args.threads,
    )
    checkpoint = load_target(config.target)
    spec = resolve_drafter(config.drafter, base=None)
    layer_ids, block_size = peek_drafter(spec, checkpoint.config)[:2]
    executor = choose_executor(config.executor)
    target = make_target(
        checkpoint, executor=executor, dtype=config.dtype, layer_ids=layer_ids, config=config
    )
    drafter = load_drafter(
        spec, target=checkpoint.config, target_executor=target, executor=executor, dtype=target.dtype
    )
    most = args.max_tokens or args.max_batch * (1 + block_size)
    say(f"target {args.target} on {target.name}, {target.dtype}; drafter {drafter.name}; up to {most} rows")
    line = ProgressLine()
    curve = profile_pair(
        target,
        drafter,
        max_target_tokens=most,
        max_blocks=args.max_batch,
        seconds=args.seconds,
        progress=lambda share, text: line.show(share, text),
    )
    line.close()
    hashed = drafter_hash(Path(spec)) if Path(spec).is_dir() else spec
    capacity = CapacityFile(fingerprint=fingerprint_of(target, drafter=hashed), curve=curve)
    capacity.save(args.out)
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        if size in curve.target_tokens:
            at = curve.target_tokens.index(size)
            seconds = curve.verify_s[at]
            times = seconds / curve.verify_s[0]
            say(f"{size:5d} rows {1e3 * seconds:8.2f} ms  {size / seconds:9.1f} rows/s  x{times:.2f}")
    for num, seconds in zip(curve.num_blocks, curve.draft_s, strict=True):
        say(f"{num:5d} blocks drafted {1e3 * seconds:8.2f} ms")
    pictures = _draw(curve, args.out.with_suffix(".png"))
    say("wrote " + ", ".join(str(path) for path in (args.out, *pictures)))
    return 0


def profile_pair(
    target: TargetExecutor,
    drafter: Drafter,
    *,
    max_target_tokens: int,
    max_blocks: int,
    seconds: float,
    progress: object = None,
) -> CostCurve:
    """Allocate caches for a pair that has none yet, and measure it. Arguments as `measure_curve`."""
    num_pages = pages_needed(max_target_tokens=max_target_tokens, page_size=_PAGE_SIZE)
    target.allocate_cache(num_pages=num_pages, page_size=_PAGE_SIZE)
    drafter.allocate_cache(num_pages=num_pages, page_size=_PAGE_SIZE)
    return measure_curve(
        Bench(target=target, drafter=drafter, page_size=_PAGE_SIZE),
        max_target_tokens=max_target_tokens,
        max_blocks=max_blocks,
        budget_s=seconds,
        clock=time.perf_counter,
        progress=progress if callable(progress) else (lambda _share, _text: None),
        max_context_len=target.config.max_context_len,
    )


def fingerprint_of(target: TargetExecutor, *, drafter: str) -> Fingerprint:
    """Return what a curve of this executor holds for.

    Arguments:
        drafter: hash of the drafter's folder, or its name.
    """
    return Fingerprint(
        machine=machine_name(),
        executor=target.name,
        dtype=target.dtype,
        num_threads=int(getattr(target, "num_threads", 0)),
        target_hash=target.config.model_hash,
        drafter=drafter,
    )


def _draw(curve: CostCurve, path: Path) -> list[Path]:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        say("no picture: matplotlib is not installed")
        return []
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(curve.target_tokens, [1e3 * s for s in curve.verify_s], marker=".", label="target pass (rows)")
    if curve.num_blocks:
        axes.plot(curve.num_blocks, [1e3 * s for s in curve.draft_s], marker=".", label="drafting (blocks)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("rows, blocks")
    axes.set_ylabel("milliseconds")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return [path]
