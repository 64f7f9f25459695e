"""`python -m dspark_build.bench_calibration`: how fast serving mends a wrong calibration, and a change of traffic.

Three runs of the real engine over one pair, N requests at a time, policy `auto`:

    learns     every offline temperature times 3; mixed traffic, code alone from half of the run, chat from 3/4
    stays      the same traffic and temperatures, and a calibrator that never learns
    fresh      the same traffic, from the right temperatures

Every forecast is kept with its label before the calibrator sees the label. The expected calibration error is that of
the last `WINDOW` steps over all positions; beside it stands what a perfect forecast would show on as many labels,
since few labels in a bin look like an error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import numpy as np
from dspark.calibration.online import OnlineCalibrator
from dspark.calibration.sts import ece, ece_of_perfect
from dspark.errors import ConfigError, DSparkError
from dspark.request import Request, RequestOutput, SamplingParams
from dspark.scheduling.cost_model import CostModel
from dspark.scheduling.interface import Bool, Float32, Float64, Kinds
from dspark.scheduling.scheduler import make_scheduler

from dspark_build.bench_pair import BenchPair, load_pair
from dspark_build.progress import ProgressLine, say

__all__ = ["CalibrationRun", "Recorder", "measure_windows", "run_bench_calibration"]

WINDOW = 500  # steps
_NUM_BINS = 10
_WRONG = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """One run; the lists have one entry for each window end."""

    name: str
    tokens_per_second: float
    accepted_len: float
    step: list[int]
    ece: list[float]
    ece_of_perfect: list[float]  # what the same number of labels shows when every forecast is right
    num_labels: list[int]


class Recorder:
    """A calibrator that keeps every forecast with its label.

    Arguments:
        inner: makes the forecasts.
        learns: hand the labels on to it.
    """

    def __init__(self, inner: OnlineCalibrator, *, learns: bool) -> None:
        self.inner, self.learns = inner, learns
        self.forecasts: list[Float64] = []  # of each step
        self.labels: list[Float64] = []

    def confidence(self, logits: Float32, *, sampled: Kinds) -> Float64:
        return self.inner.confidence(logits, sampled=sampled)

    def confidence_of_one(self, logits: Sequence[float], *, sampled: int) -> list[float]:
        return self.inner.confidence_of_one(logits, sampled=sampled)

    def observe(
        self, logits: Float32, labels: Float64, *, sampled: Kinds, usable: Bool, num_steps: int = 1
    ) -> None:
        forecast = self.inner.confidence(logits, sampled=sampled)
        known = ~np.isnan(labels) & ~np.isnan(forecast) & usable[:, None]
        for kept, values in ((self.forecasts, forecast[known]), (self.labels, labels[known])):
            kept.append(values)
            kept += [np.zeros(0)] * (num_steps - 1)  # the steps come some at a time
        if self.learns:
            self.inner.observe(logits, labels, sampled=sampled, usable=usable, num_steps=num_steps)

    def ece(self) -> Float64:
        return self.inner.ece()

    def deepest_starved(self) -> int:
        return self.inner.deepest_starved()


def measure_windows(
    recorder: Recorder, *, every: int
) -> tuple[list[int], list[float], list[float], list[int]]:
    """Return window ends, errors, errors of a perfect forecast and numbers of labels."""
    steps, errors, perfect, labels = [], [], [], []
    for end in range(every, len(recorder.labels) + 1, every):
        begin = max(0, end - WINDOW)
        p = np.concatenate(recorder.forecasts[begin:end])
        y = np.concatenate(recorder.labels[begin:end])
        steps.append(end)
        errors.append(ece(p, y, num_bins=_NUM_BINS))
        perfect.append(ece_of_perfect(p, num_bins=_NUM_BINS, seed=end))
        labels.append(int(p.size))
    return steps, errors, perfect, labels


def run_one(
    pair: BenchPair,
    name: str,
    recorder: Recorder,
    *,
    prompts: dict[str, list[tuple[int, ...]]],
    load: int,
    steps: int,
    temperature: float,
    tell: Callable[[float, str], None],
) -> CalibrationRun:
    """Serve `load` requests at a time for `steps` decoding steps with labels."""
    scheduler = make_scheduler(
        "auto",
        block_size=pair.block_size,
        has_confidence=True,
        cost_model=CostModel(pair.curve) if pair.curve is not None else None,
        calibrator=recorder,
    )
    engine = pair.engine(scheduler, max_batch_size=load)
    tokens = 0

    def emit(output: RequestOutput) -> None:
        nonlocal tokens
        tokens += len(output.token_ids)

    def kind() -> str:
        done = len(recorder.labels) / steps
        return "mixed" if done < 0.5 else "code" if done < 0.75 else "chat"

    requests = _requests(prompts, kind, temperature, emit)
    open_ids = [engine.add(next(requests)) for _ in range(load)]
    started = time.perf_counter()
    before = 0
    while len(recorder.labels) < steps:
        engine.step()
        now = engine.stats()
        if now.num_running + now.num_waiting < load:
            open_ids += [engine.add(next(requests)) for _ in range(load - now.num_running - now.num_waiting)]
        if len(recorder.labels) != before:
            before = len(recorder.labels)
            tell(before / steps, f"{name}, {kind()} traffic, step {before}")
    seconds = time.perf_counter() - started
    accepted = engine.stats().num_accepted_tokens
    for request_id in open_ids:
        engine.cancel(request_id)
    step, error, perfect, num_labels = measure_windows(recorder, every=WINDOW // 5)
    return CalibrationRun(
        name=name,
        tokens_per_second=tokens / seconds,
        accepted_len=tokens / max(tokens - accepted, 1),
        step=step,
        ece=error,
        ece_of_perfect=perfect,
        num_labels=num_labels,
    )


def _requests(
    prompts: dict[str, list[tuple[int, ...]]],
    kind: Callable[[], str],
    temperature: float,
    emit: Callable[[RequestOutput], None],
) -> Iterator[Request]:
    for index in count():
        of_kind = prompts[kind()]
        yield Request(
            prompt_ids=of_kind[index % len(of_kind)],
            params=SamplingParams(max_tokens=64 + index % 64, temperature=temperature, ignore_eos=True),
            emit=emit,
        )


def run_bench_calibration(args: argparse.Namespace) -> int:
    """Run the three and report.

    Raises:
        ConfigError: the drafter has no confidence head.
    """
    pair = load_pair(args.target, args.drafter, threads=args.threads, max_batch_size=args.load, tell=say)
    right = pair.calibrator()
    if right is None:
        raise ConfigError(
            f"--drafter: {pair.drafter_name} has no confidence head, so there is nothing to calibrate"
        )
    kinds = {"mixed": None, "code": ("code",), "chat": ("chat",)}
    prompts = {name: pair.prompts(args.prompts, sources=sources) for name, sources in kinds.items()}
    runs = []
    for name, factor, learns in (
        ("learns", _WRONG, True),
        ("stays", _WRONG, False),
        ("fresh", 1.0, True),
    ):
        line = ProgressLine()
        inner = OnlineCalibrator(
            block_size=pair.block_size,
            temperatures=(right.temperatures * factor).tolist(),
            greedy_temperatures=(right.greedy_temperatures * factor).tolist(),
        )
        runs.append(
            run_one(
                pair,
                name,
                Recorder(inner, learns=learns),
                prompts=prompts,
                load=args.load,
                steps=args.steps,
                temperature=args.temperature,
                tell=line.show,
            )
        )
        line.close()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n", encoding="utf-8")
    print(table(runs, args.steps))
    _draw(runs, args.steps, args.out.with_suffix(".png"))
    return 0


def table(runs: Sequence[CalibrationRun], steps: int) -> str:
    """Return the error of every run at moments that matter."""
    moments = [
        steps // 4,
        steps // 2,
        steps // 2 + steps // 8,
        3 * steps // 4,
        3 * steps // 4 + steps // 8,
        steps,
    ]
    lines = ["run     tokens/s  accepted length  " + "  ".join(f"ECE at {at:5d}" for at in moments)]
    for run in runs:
        at = [min(range(len(run.step)), key=lambda i: abs(run.step[i] - moment)) for moment in moments]
        figures = "  ".join(f"{run.ece[i]:5.1%} ({run.ece_of_perfect[i]:.1%})" for i in at)
        lines.append(f"{run.name:7} {run.tokens_per_second:8.1f} {run.accepted_len:16.2f}  {figures}")
    return "\n".join(lines) + "\n(in brackets: what perfect forecasts would show on as many labels)"


def _draw(runs: Sequence[CalibrationRun], steps: int, path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        say("no picture: matplotlib is not installed")
        return
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for run in runs:
        axes.plot(run.step, [100 * value for value in run.ece], label=run.name)
    first = runs[0]
    axes.plot(first.step, [100 * v for v in first.ece_of_perfect], "k:", label="perfect forecasts")
    axes.axhline(3, color="grey", linewidth=0.8)
    for at, word in ((0.0, "mixed"), (0.5, "code"), (0.75, "chat")):
        axes.axvline(at * steps, color="grey", linewidth=0.5)
        axes.text(at * steps, axes.get_ylim()[1], f" {word}", va="top")
    axes.set_xlabel("decoding steps with drafts")
    axes.set_ylabel(f"ECE of the last {WINDOW} steps, %")
    axes.set_ylim(bottom=0)
    axes.legend(loc="center right")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    say(f"wrote {path.with_suffix('.json')}, {path}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dspark_build.bench_calibration",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", default="models/SmolLM2-135M-Instruct.Q4_1.gguf", help="%(default)s")
    parser.add_argument("--drafter", default="auto", help="folder, or auto: the one in model_repository")
    parser.add_argument("--prompts", type=Path, default=Path("clients/prompts/eval.jsonl"))
    parser.add_argument("--load", type=int, default=4, help="requests at a time (%(default)s)")
    parser.add_argument("--steps", type=int, default=8000, help="of each run (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument("--threads", type=int, default=0, help="0 = one per core")
    parser.add_argument("--out", type=Path, default=Path("out/bench_calibration.json"))
    args = parser.parse_args(argv)
    try:
        return run_bench_calibration(args)
    except DSparkError as error:
        print(f"bench-calibration: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
