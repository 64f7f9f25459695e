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
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from dspark.calibration.online import OnlineCalibrator
from dspark.drafters.identity import drafter_identity
from dspark.errors import ConfigError, DSparkError
from dspark.request import Request, RequestOutput, SamplingParams
from dspark.scheduling.cost_model import CostModel
from dspark.scheduling.scheduler import make_scheduler

from dspark_build.bench_overhead import TimedScheduler, measure_overhead, overhead_table
from dspark_build.bench_pair import BenchPair, load_pair
from dspark_build.progress import ProgressLine, StopSignal, say

__all__ = ["Turn", "add_bench_load_arguments", "kept_turns", "run_bench_load", "save_turns"]

POLICIES = "none,fixed:1,fixed:2,fixed:3,fixed:5,fixed:7,auto"
_ANSWERS = {1: 3, 2: 2, 4: 2}  # of one run, for each of the N requests; else one
_PEER_S, _PEER_ROUNDS = 90.0, 2  # that the peer is given
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
    parser.add_argument("--rounds", type=int, default=4, help="least turns of each policy (%(default)s)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=14.0,
        help="of the whole sweep: more rounds are run while they last (%(default)g)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument("--threads", type=int, default=0, help="0 = one per core")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (%(default)s)")
    parser.add_argument("--no-peer", action="store_true", help="leave Hugging Face transformers out")
    parser.add_argument(
        "--out", type=Path, default=Path("out/bench_load.json"), help="loads in it that are not run are kept"
    )


def run_bench_load(args: argparse.Namespace) -> int:
    """Run the sweep; a table on standard output, JSON and a picture beside it.

    What was measured is saved after every round, so that an interrupted sweep keeps it.

    Raises:
        ConfigError: an option that cannot be used.
    """
    loads = [int(part) for part in args.loads.split(",") if part.isdigit()]
    if not loads or min(loads) < 1 or args.rounds < 1 or not args.minutes > 0.0:
        raise ConfigError(
            f"--loads, --rounds, --minutes: got {args.loads!r}, {args.rounds}, {args.minutes}; allowed are whole"
            " numbers >= 1, at least 1, and above 0"
        )
    ends_s = time.monotonic() + 60.0 * args.minutes - (0.0 if args.no_peer else _PEER_S)
    pair = load_pair(args.target, args.drafter, threads=args.threads, max_batch_size=max(loads), tell=say)
    prompts = pair.prompts(args.prompts)
    report = {
        "target": args.target,
        "drafter": pair.drafter_name,
        "drafter_hash": drafter_identity(pair.drafter_name),
        "executor": pair.target.name,
        "dtype": pair.target.dtype,
        "temperature": args.temperature,
    }
    turns = kept_turns(args.out, report, loads)
    with StopSignal() as stopped:
        _sweep(
            args,
            pair,
            prompts,
            loads,
            turns,
            ends_s=ends_s,
            save=partial(save_turns, args.out, report),
            stopped=stopped,
        )
        peer = None if args.no_peer or stopped() else _peer(args, pair, prompts)
    report["peer_tokens_per_second"] = peer
    save_turns(args.out, report, turns)
    print(table(turns))
    if peer is not None:
        for name, rate in peer.items():
            print(f"transformers, {name}, one request after the other: {rate:.1f} tokens/s")
        print(over_peer(turns, max(peer.values())))
    _draw(turns, args.out.with_suffix(".png"))
    if stopped():
        say("stopped early: the rounds that are missing were not run")
    return int(stopped())


def kept_turns(path: Path, report: dict[str, Any], loads: Sequence[int]) -> list[Turn]:
    """Return turns of an earlier run on the same pair, of loads that are not run now."""
    if not path.is_file():
        return []
    earlier = json.loads(path.read_text())
    if any(earlier.get(name) != value for name, value in report.items()):
        say(f"{path} is of another pair or temperature: it is replaced")
        return []
    return [Turn(**turn) for turn in earlier["turns"] if turn["load"] not in loads]


def save_turns(path: Path, report: dict[str, Any], turns: Sequence[Turn]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    document = {**report, "turns": [asdict(turn) for turn in turns]}
    unfinished.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _sweep(
    args: argparse.Namespace,
    pair: BenchPair,
    prompts: Sequence[tuple[int, ...]],
    loads: Sequence[int],
    turns: list[Turn],
    *,
    ends_s: float,
    save: Callable[[Sequence[Turn]], None],
    stopped: Callable[[], bool],
) -> None:
    """Run the rounds of every load: `--rounds` of them, and more where its share of the time is not over.

    The highest load comes first: its rounds take longest, and what it takes beyond its share the others do without.

    Arguments:
        turns: those of this run are added, a whole round at a time.
        ends_s: when all should be over, on time.monotonic()'s clock.
    """
    schedulers = {policy: _scheduler(policy, pair) for policy in args.policies.split(",")}
    order, line = list(schedulers), ProgressLine()
    for place, load in enumerate(sorted(loads, reverse=True)):
        began_s = time.monotonic()
        share_s = max(ends_s - began_s, 0.0) / (len(loads) - place)
        for number in count():
            took_s = time.monotonic() - began_s
            if number >= args.rounds and took_s * (number + 1) / number > share_s:
                break
            of_round = []
            for policy in order[number % len(order) :] + order[: number % len(order)]:
                line.show(
                    (place + min(took_s / max(share_s, took_s, 1.0), 1.0)) / len(loads),
                    f"{load} at a time, round {number + 1}, {policy}",
                    force=True,
                )
                gc.collect()
                of_round.append(
                    run_turn(
                        pair, prompts, schedulers[policy], load, number, args.max_tokens, args.temperature
                    )
                )
                if stopped():
                    line.close()
                    return
            turns += of_round
            save(turns)
    line.close()


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
    """Return medians in tokens/s, a row for each load, with what `auto` makes of the best and of none.

    Those two are medians of the ratios of single rounds: what a round met, its prompts and the machine's mood, it met
    under all policies.
    """
    policies = list(dict.fromkeys(turn.policy for turn in turns))
    lines = [
        " load  rounds" + "".join(f"{policy:>10}" for policy in policies) + "  auto/best fixed  auto/none"
        "  of auto's step: policy  foreseen within"
    ]
    loads = sorted({turn.load for turn in turns})
    for load in loads:
        rates = {policy: median_rate(turns, load, policy) for policy in policies}
        fixed = {policy: rate for policy, rate in rates.items() if policy != "auto" and rate == rate}
        rounds = len({turn.round for turn in turns if turn.load == load})
        line = f"{load:5d}{rounds:8d}" + "".join(f"{rates[policy]:10.1f}" for policy in policies)
        if rates.get("auto", 0.0) > 0.0 and fixed:
            best = max(fixed, key=lambda policy: fixed[policy])
            line += f"{median_ratio(turns, load, 'auto', best):17.3f}"
            line += f"{median_ratio(turns, load, 'auto', 'none'):11.3f}" if "none" in fixed else " " * 11
            mine = [turn for turn in turns if turn.load == load and turn.policy == "auto"]
            share = statistics.median(turn.scheduler_s / turn.step_s for turn in mine)
            line += f"{share:24.2%}{statistics.median(turn.cost_model_error for turn in mine):17.1%}"
        lines.append(line)
    if "none" in policies:
        lines.append(
            "over none, geometric mean of all loads: "
            + ", ".join(f"{policy} {over_none(turns, policy):.3f}" for policy in policies if policy != "none")
        )
    return "\n".join(lines)


def median_ratio(turns: Sequence[Turn], load: int, policy: str, other: str) -> float:
    """Return the median over rounds of one policy's tokens/s over another's; NaN where they share no round."""
    rate = {(t.policy, t.round): t.tokens_per_second for t in turns if t.load == load}
    ratios = [
        value / rate[other, number]
        for (name, number), value in rate.items()
        if name == policy and (other, number) in rate
    ]
    return statistics.median(ratios) if ratios else float("nan")


def over_none(turns: Sequence[Turn], policy: str) -> float:
    """Return the geometric mean, over the loads that a policy was run at, of its tokens/s over those of none."""
    ratios = [median_ratio(turns, load, policy, "none") for load in sorted({turn.load for turn in turns})]
    known = [ratio for ratio in ratios if ratio == ratio]
    return statistics.geometric_mean(known) if known else float("nan")


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
    for number in range(min(args.rounds, _PEER_ROUNDS)):
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
