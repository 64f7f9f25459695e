"""`make bench-load`: every policy under every load, in turns, on the real pair.

One load is N requests at any time: whoever ends is replaced by the next prompt (code, maths and chat in turn). A run
counts the tokens of N whole answers or more from the moment all N decode; prompts of newcomers are part of it, one for
each answer (a shorter run meets more prompts under one policy than under another). All policies share
one target and one drafter, and take turns, so that a machine that drifts drifts for all of them; `auto` keeps what it
has learnt from turn to turn, as a server does.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from dspark.calibration.online import OnlineCalibrator
from dspark.errors import ConfigError, DSparkError
from dspark.request import Request, RequestOutput, SamplingParams
from dspark.scheduling.cost_model import CostModel
from dspark.scheduling.scheduler import make_scheduler

from dspark_build.bench_overhead import TimedScheduler, measure_overhead, overhead_table
from dspark_build.bench_pair import BenchPair, load_pair
from dspark_build.progress import ProgressLine, say

__all__ = ["add_bench_load_arguments", "run_bench_load"]

POLICIES = "none,fixed:1,fixed:2,fixed:3,fixed:5,fixed:7,auto"
_ANSWERS = {1: 3, 2: 2, 4: 2}  # of one run, for each of the N requests; else one
_HALF = (4, 32)  # up to the first and from the second load on answers are half as long


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One run of one policy under one load."""

    load: int
    policy: str
    round: int
    tokens_per_second: float
    mean_verify_len: float  # drafts verified per sequence and step
    accepted_len: float  # tokens per sequence and step, the added one among them
    steps: int
    step_s: float  # mean
    cost_model_error: float  # median, relative; 0 for policies without a cost model
    calibration_ece: float  # mean over positions; 0 without a calibrator
    scheduler_s: float = 0.0  # mean of a step: policy, calibrator and cost model


def add_bench_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--target", default="models/SmolLM2-135M-Instruct.Q4_1.gguf", help="%(default)s")
    parser.add_argument(
        "--drafter",
        default="auto",
        help="folder, ngram, or auto: the trained one in model_repository, else ngram",
    )
    parser.add_argument("--prompts", type=Path, default=Path("clients/prompts/eval.jsonl"))
    parser.add_argument("--loads", default="1,2,4,8,16,32,64", help="requests at a time (%(default)s)")
    parser.add_argument("--policies", default=POLICIES, help="%(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each policy (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument("--threads", type=int, default=0, help="0 = one per core")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (%(default)s)")
    parser.add_argument("--no-peer", action="store_true", help="leave Hugging Face transformers out")
    parser.add_argument(
        "--out", type=Path, default=Path("out/bench_load.json"), help="loads in it that are not run are kept"
    )


def run_bench_load(args: argparse.Namespace) -> int:
    """Run the sweep; a table on standard output, JSON and a picture beside it.

    Raises:
        ConfigError: an option that cannot be used.
    """
    loads = [int(part) for part in args.loads.split(",") if part.isdigit()]
    if not loads or min(loads) < 1 or args.rounds < 1:
        raise ConfigError(f"--loads: got {args.loads!r}, allowed are whole numbers >= 1; --rounds at least 1")
    pair = load_pair(args.target, args.drafter, threads=args.threads, max_batch_size=max(loads), tell=say)
    prompts = pair.prompts(args.prompts)
    schedulers = {policy: _scheduler(policy, pair) for policy in args.policies.split(",")}
    kept = json.loads(args.out.read_text())["turns"] if args.out.is_file() else []
    turns = [Turn(**turn) for turn in kept if turn["load"] not in loads]
    line = ProgressLine()
    total, done = len(loads) * args.rounds * len(schedulers), 0
    for load in loads:
        for number in range(args.rounds):
            order = list(schedulers)
            for policy in order[number % len(order) :] + order[: number % len(order)]:
                line.show(done / total, f"{load} at a time, round {number + 1}, {policy}", force=True)
                turns.append(
                    run_turn(
                        pair, prompts, schedulers[policy], load, number, args.max_tokens, args.temperature
                    )
                )
                done += 1
    line.close()
    peer = None if args.no_peer else _peer(args, pair, prompts)
    report = {
        "target": args.target,
        "drafter": pair.drafter_name,
        "executor": pair.target.name,
        "dtype": pair.target.dtype,
        "temperature": args.temperature,
        "peer_tokens_per_second": peer,
        "turns": [asdict(turn) for turn in turns],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(turns))
    if peer is not None:
        for name, rate in peer.items():
            print(f"transformers, {name}, one request after the other: {rate:.1f} tokens/s")
        print(over_peer(turns, max(peer.values())))
    _draw(turns, args.out.with_suffix(".png"))
    return 0


def _scheduler(policy: str, pair: BenchPair) -> TimedScheduler:
    return TimedScheduler(
        make_scheduler(
            policy,
            block_size=pair.block_size,
            has_confidence=pair.has_confidence,
            cost_model=CostModel(pair.curve) if pair.curve is not None else None,
            calibrator=pair.calibrator(),
        )
    )


def run_turn(
    pair: BenchPair,
    prompts: Sequence[tuple[int, ...]],
    scheduler: TimedScheduler,
    load: int,
    number: int,
    max_tokens: int,
    temperature: float,
) -> Turn:
    """Keep `load` requests running until enough tokens came, in an engine of its own."""
    engine = pair.engine(scheduler, max_batch_size=load)
    produced = 0
    begun: set[int] = set()

    def emit(output: RequestOutput) -> None:
        nonlocal produced
        produced += len(output.token_ids)
        begun.add(output.request_id)

    requests = _requests(prompts, number, load, max_tokens, temperature, emit)
    open_ids = [engine.add(next(requests)) for _ in range(load)]
    while len(begun) < load:
        engine.step()
    wanted = produced + load * _ANSWERS.get(load, 1) * _answer_len(load, max_tokens)
    before, started_tokens, started_scheduler_s = asdict(engine.stats()), produced, scheduler.seconds
    started = time.perf_counter()
    while produced < wanted:
        engine.step()
        now = engine.stats()
        for _ in range(load - now.num_running - now.num_waiting):
            open_ids.append(engine.add(next(requests)))
    seconds = time.perf_counter() - started
    tokens, scheduler_s = produced - started_tokens, scheduler.seconds - started_scheduler_s
    after = asdict(engine.stats())
    for request_id in open_ids:
        engine.cancel(request_id)
    gone = {name: after[name] - before[name] for name in after}
    accepted = gone["num_accepted_tokens"]
    sequence_steps = max(tokens - accepted, 1)
    model, calibrator = scheduler.cost_model, scheduler.calibrator
    ece = calibrator.ece() if isinstance(calibrator, OnlineCalibrator) else None
    known = [] if ece is None else [value for value in ece.tolist() if value == value]
    return Turn(
        load=load,
        policy=scheduler.policy,
        round=number,
        tokens_per_second=tokens / seconds,
        mean_verify_len=gone["num_draft_tokens"] / sequence_steps,
        accepted_len=tokens / sequence_steps,
        steps=gone["num_steps"],
        step_s=seconds / max(gone["num_steps"], 1),
        cost_model_error=0.0 if model is None else model.error,
        calibration_ece=statistics.fmean(known) if known else 0.0,
        scheduler_s=scheduler_s / max(gone["num_steps"], 1),
    )


def _answer_len(load: int, max_tokens: int) -> int:
    return max_tokens if _HALF[0] < load < _HALF[1] else max(max_tokens // 2, 1)


def _requests(
    prompts: Sequence[tuple[int, ...]],
    number: int,
    load: int,
    max_tokens: int,
    temperature: float,
    emit: Callable[[RequestOutput], None],
) -> Iterator[Request]:
    """Yield requests for ever, the same for every policy; the first `load` end at different times."""
    for index in count():
        length = _answer_len(load, max_tokens)
        if index < load:
            length = max(length * (1 + index) // load, 8)
        yield Request(
            prompt_ids=prompts[(number * 7 + index) % len(prompts)],
            params=SamplingParams(max_tokens=length, temperature=temperature, ignore_eos=True),
            emit=emit,
        )


def table(turns: Sequence[Turn]) -> str:
    """Return medians in tokens/s, a row for each load, with what `auto` makes of the best and of none."""
    policies = list(dict.fromkeys(turn.policy for turn in turns))
    lines = [
        " load " + "".join(f"{policy:>10}" for policy in policies) + "  auto/best fixed  auto/none"
        "  of auto's step: policy  foreseen within"
    ]
    for load in sorted({turn.load for turn in turns}):
        rates = {policy: median_rate(turns, load, policy) for policy in policies}
        fixed = [rate for policy, rate in rates.items() if policy != "auto"]
        line = f"{load:5d} " + "".join(f"{rates[policy]:10.1f}" for policy in policies)
        if "auto" in rates and fixed:
            line += f"{rates['auto'] / max(fixed):17.3f}"
            line += f"{rates['auto'] / rates['none']:11.3f}" if "none" in rates else " " * 11
            mine = [turn for turn in turns if turn.load == load and turn.policy == "auto"]
            share = statistics.median(turn.scheduler_s / turn.step_s for turn in mine)
            line += f"{share:24.2%}{statistics.median(turn.cost_model_error for turn in mine):17.1%}"
        lines.append(line)
    return "\n".join(lines)


def over_peer(turns: Sequence[Turn], rate: float) -> str:
    """Return how many times the peer's tokens/s `auto` serves under each load."""
    loads = sorted({turn.load for turn in turns if turn.policy == "auto"})
    ratios = (f"{load}: {median_rate(turns, load, 'auto') / rate:.1f}" for load in loads)
    return "auto over the best of them, times, by load: " + ", ".join(ratios)


def median_rate(turns: Sequence[Turn], load: int, policy: str) -> float:
    """Return tokens/s; NaN where it was not run."""
    rates = [t.tokens_per_second for t in turns if t.load == load and t.policy == policy]
    return statistics.median(rates) if rates else float("nan")


def _peer(
    args: argparse.Namespace, pair: BenchPair, prompts: Sequence[tuple[int, ...]]
) -> dict[str, float] | None:
    """Return tokens/s of Hugging Face transformers: plain, with prompt look-up, and with assisted generation.

    The latter two take one request at a time, so N of them one after the other are served at the rate of one.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        say("transformers is not installed: the peer is left out (make bench-load installs it)")
        return None
    if args.threads:
        torch.set_num_threads(args.threads)
    path = Path(args.target)
    dtype = torch.bfloat16 if pair.target.dtype == "bfloat16" else torch.float32
    options: dict[str, Any] = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    model = AutoModelForCausalLM.from_pretrained(path.parent if options else path, dtype=dtype, **options)
    modes: dict[str, dict[str, Any]] = {
        "plain": {},
        "prompt look-up": {"prompt_lookup_num_tokens": 10},
        "assisted by its own first layers": {
            "assistant_early_exit": max(pair.target.config.decoder.num_layers // 4, 1)
        },
    }
    rates: dict[str, list[float]] = {name: [] for name in modes}
    for number in range(args.rounds):
        for name, mode in modes.items():
            started, tokens = time.perf_counter(), 0
            for index in range(3):
                ids = torch.tensor([prompts[(number * 7 + index) % len(prompts)]])
                with torch.inference_mode():
                    answer = model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=64,
                        min_new_tokens=64,
                        do_sample=False,
                        pad_token_id=0,
                        **mode,
                    )
                tokens += answer.shape[1] - ids.shape[1]
            rates[name].append(tokens / (time.perf_counter() - started))
    del model
    gc.collect()
    return {name: statistics.median(values) for name, values in rates.items()}


def _draw(turns: Sequence[Turn], path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        say("no picture: matplotlib is not installed")
        return
    loads = sorted({turn.load for turn in turns})
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for policy in dict.fromkeys(turn.policy for turn in turns):
        ratio = [median_rate(turns, load, policy) / median_rate(turns, load, "none") for load in loads]
        axes.plot(loads, ratio, marker="o", label=policy, linewidth=2.5 if policy == "auto" else 1.2)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("requests at a time")
    axes.set_ylabel("tokens/s over those of none")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    say(f"wrote {path.with_suffix('.json')}, {path}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dspark_build.bench_load", description=__doc__)
    add_bench_load_arguments(parser)
    args = parser.parse_args(argv)
    print(overhead_table(measure_overhead()), flush=True)
    try:
        return run_bench_load(args)
    except DSparkError as error:
        print(f"bench-load: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
