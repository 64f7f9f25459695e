"""`dspark-client simulate`: plan machines one does not have.

Runs policies under loads on a cost curve and writes one JSON file and two pictures: throughput against the
speed each user sees, and verify length against load.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from dspark.errors import ConfigError
from dspark.scheduling.cost_model import CapacityFile, CostCurve
from dspark.scheduling.policy import parse_policy
from dspark.scheduling.simulation import RunResult, simulate
from dspark.scheduling.traffic import Acceptance, arrivals_of, load_acceptance

__all__ = ["EXAMPLES", "add_simulate_arguments", "client_command", "run_simulate"]

EXAMPLES = ("cpu", "gpu")
_POLICIES = "none,fixed:1,fixed:3,fixed:7,auto"
_LOADS = ("closed:1", "closed:4", "closed:16", "closed:64", "closed:256")


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--capacity",
        default="gpu",
        metavar="FILE",
        help="capacity.json of `dspark-build profile`, or an example: cpu, gpu (default: %(default)s)",
    )
    parser.add_argument(
        "--acceptance",
        default="mixed",
        metavar="FILE",
        help="kinds of traffic or recorded blocks; mixed = code, maths and chat (default: %(default)s)",
    )
    parser.add_argument(
        "--arrivals",
        nargs="+",
        default=list(_LOADS),
        metavar="LOAD",
        help="closed:N (always N requests), poisson:RATE (per second), or a file of arrival times",
    )
    parser.add_argument(
        "--policies", default=_POLICIES, metavar="LIST", help="with commas between (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=1500, metavar="N", help="per run (default: %(default)s)")
    parser.add_argument("--max-batch", type=int, default=1024, metavar="R", help="default: %(default)s")
    parser.add_argument(
        "--max-step-tokens",
        type=int,
        default=8192,
        metavar="T",
        help="rows of one pass (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=Path("out/simulate"), metavar="DIR", help="default: %(default)s"
    )


def run_simulate(args: argparse.Namespace) -> int:
    """Simulate every policy under every load; results go to --out, a table to standard output.

    Raises:
        ConfigError: an option or file that cannot be used, by name.
    """
    for name in ("steps", "max_batch", "max_step_tokens"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: got {getattr(args, name)}, allowed is at least 1")
    curve = _curve(args.capacity)
    acceptance = _acceptance(args.acceptance)
    policies = args.policies.split(",")
    for policy in policies:
        parse_policy(policy, block_size=acceptance.block_size)
    for load in args.arrivals:
        arrivals_of(load, acceptance, seed=args.seed)  # the last one is refused before the first is run
    results = []
    print(_HEADER)
    for load in args.arrivals:
        for policy in policies:
            requests, closed = arrivals_of(load, acceptance, seed=args.seed)
            result = simulate(
                policy=policy,
                arrivals=load,
                requests=requests,
                closed=closed,
                curve=curve,
                acceptance=acceptance,
                num_steps=args.steps,
                max_batch_size=args.max_batch,
                max_step_tokens=args.max_step_tokens,
                seed=args.seed,
            )
            results.append(result)
            print(_row(result), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    content = {
        "capacity": args.capacity,
        "acceptance": args.acceptance,
        "steps": args.steps,
        "seed": args.seed,
        "runs": [asdict(result) for result in results],
    }
    (args.out / "simulate.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    written = [args.out / "simulate.json", *_draw(results, args.out)]
    print("wrote " + ", ".join(str(path) for path in written), file=sys.stderr)
    return 0


def _curve(name: str) -> CostCurve:
    if name in EXAMPLES:
        with resources.as_file(resources.files("dspark.scheduling") / "curves" / f"{name}.json") as path:
            return CapacityFile.load(path).curve
    return CapacityFile.load(Path(name)).curve


def _acceptance(name: str) -> Acceptance:
    if name == "mixed":
        with resources.as_file(resources.files("dspark.scheduling") / "curves" / "mixed.json") as path:
            return load_acceptance(path)
    return load_acceptance(Path(name))


_COLUMNS = (("load", 14), ("policy", 14), ("tokens/s", 10), ("per user", 9), ("verify", 7), ("drafted", 8))
_HEADER = " ".join(f"{name:>{width}}" for name, width in (*_COLUMNS, ("tokens/step", 12)))


def _row(r: RunResult) -> str:
    return (
        f"{r.arrivals:>14} {r.policy:>14} {r.tokens_per_second:10.1f} {r.user_tokens_per_second:9.1f}"
        f" {r.mean_verify_len:7.2f} {r.drafted_share:8.0%} {r.accepted_len:12.2f}"
    )


def _draw(results: Sequence[RunResult], out: Path) -> list[Path]:
    """Draw the two pictures; without matplotlib there are none, and that is said."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no pictures: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return []
    pictures = {
        "throughput.png": ("tokens/s of one user", "tokens/s of all users"),
        "verify_len.png": ("sequences decoding", "drafts verified per sequence and step"),
    }
    for name, (x_label, y_label) in pictures.items():
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        for policy in dict.fromkeys(r.policy for r in results):
            mine = sorted((r for r in results if r.policy == policy), key=lambda r: r.mean_running)
            if name == "throughput.png":
                x, y = [r.user_tokens_per_second for r in mine], [r.tokens_per_second for r in mine]
            else:
                x, y = [r.mean_running for r in mine], [r.mean_verify_len for r in mine]
            width = 2.5 if policy == "auto" else 1.2
            axes.plot(x, y, marker="o", label=policy, linewidth=width)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_xscale("log", base=2)
        if name == "throughput.png":
            axes.set_yscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(out / name, dpi=120)
        plt.close(figure)
    return [out / name for name in pictures]


class _SimulateCommand:
    """What the entry point `simulate` of the group `dspark_client.commands` gives."""

    add_arguments = staticmethod(add_simulate_arguments)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Simulate; what cannot be used is one line on standard error and status 2."""
        try:
            return run_simulate(args)
        except ConfigError as error:
            print(f"dspark-client simulate: {error}", file=sys.stderr)
            return 2


client_command = _SimulateCommand()
