"""`dspark-build profile`: the cost curve of a target and drafter on this machine, into capacity.json.

What is measured, and how, is in `dspark.scheduling.measurement`; this file loads the pair, tells its
progress and draws the curve.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dspark.capacity import fingerprint_of, measure_pair
from dspark.config import NUM_DRAFT_TOKENS, load_serve_config
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.interface import Drafter
from dspark.drafters.loading import load_drafter, peek_drafter
from dspark.errors import ConfigError
from dspark.executors.interface import TargetExecutor
from dspark.executors.loading import choose_executor, make_target
from dspark.models.loading import load_target
from dspark.scheduling.cost_model import CapacityFile, CostCurve
from dspark.scheduling.measurement import pages_needed

from dspark_build.progress import ProgressLine, say

__all__ = ["add_profile_arguments", "run_profile"]

_PAGE_SIZE = 16


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--target", required=True, help="Hugging Face folder or GGUF file")
    parser.add_argument(
        "--drafter", default="none", help="drafter folder, ngram or none (default %(default)s)"
    )
    parser.add_argument(
        "--num-draft-tokens",
        type=int,
        default=NUM_DRAFT_TOKENS,
        metavar="N",
        help="drafts of one step by a smaller model, EAGLE-3 or MTP (default %(default)s)",
    )
    parser.add_argument(
        "--draft-tree", type=int, default=0, metavar="N", help="most drafts of a tree; 0 = chains (default)"
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
    target, drafter = _load(args)
    most = args.max_tokens or args.max_batch * (1 + drafter.block_size)
    say(f"target {args.target} on {target.name}, {target.dtype}; drafter {drafter.name}; up to {most} rows")
    num_pages = pages_needed(max_target_tokens=most, page_size=_PAGE_SIZE)
    for part in (target, drafter):
        part.allocate_cache(num_pages=num_pages, page_size=_PAGE_SIZE)
    line = ProgressLine()
    curve = measure_pair(
        target,
        drafter,
        num_pages=num_pages,
        page_size=_PAGE_SIZE,
        max_batch_size=args.max_batch,
        max_context_len=target.config.max_context_len,
        max_target_tokens=most,
        seconds=args.seconds,
        progress=line.show,
    )
    line.close()
    fingerprint = fingerprint_of(
        target,
        drafter=args.drafter,
        num_draft_tokens=args.num_draft_tokens,
        tree_size=args.draft_tree,
        num_threads=args.threads,
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    CapacityFile(fingerprint=fingerprint, curve=curve).save(args.out)
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


def _load(args: argparse.Namespace) -> tuple[TargetExecutor, Drafter]:
    """Load the pair as a server with these settings would; no cache is allocated."""
    config = load_serve_config(
        overrides={
            "target": args.target,
            "drafter": args.drafter,
            "num_draft_tokens": args.num_draft_tokens,
            "draft_tree": args.draft_tree,
            "executor": args.executor,
            "dtype": args.dtype,
            "num_threads": args.threads,
        },
        environ={},
    )
    checkpoint = load_target(config.target)
    outline = peek_drafter(config.drafter, checkpoint.config, num_draft_tokens=config.num_draft_tokens)
    executor = choose_executor(config.executor)
    target = make_target(
        checkpoint,
        executor=executor,
        dtype=config.dtype,
        layer_ids=outline.feature_layer_ids,
        config=config,
    )
    drafter = load_drafter(
        config.drafter,
        target=checkpoint.config,
        target_executor=target,
        executor=executor,
        dtype="auto",
        num_draft_tokens=config.num_draft_tokens,
    )
    if config.draft_tree:
        if not isinstance(drafter, DSparkDrafter):
            raise ConfigError(
                f"--draft-tree: got {config.draft_tree}, allowed with drafter {drafter.name} is 0"
            )
        drafter.use_trees(config.draft_tree)
    return target, drafter


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
