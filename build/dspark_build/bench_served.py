"""What serving costs: perf_analyzer's figures through a real server against the same load on the engine in process.

    python -m dspark_build.bench_served --concurrency 1 4 16 32

Both run what model_repository/dspark/1/model.yaml says, in turn, plain and with the server's own policy, on the same
prompts in the same order. Users each wait for their answer and ask again; times are taken where the client, or here the
receiver of the outputs, sees them. Throughput is that of the time in which every user had a request open: neither a
client's own start nor the end, when fewer and fewer are left, says anything of serving.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dspark.request import Request, RequestOutput, SamplingParams
from dspark.runtime import Runtime, load_runtime
from dspark.serving.checks import load_checked_config
from dspark.serving.paths import default_model_repository
from dspark.serving.process import ServerOptions, ServerProcess

__all__ = ["main"]

_MODES = {"plain": 0, "scheduled": -1}  # num_draft_tokens
_LIMIT_S = 120.0  # of one load


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: when it was sent, when outputs came [n], each with how many tokens [n]. Seconds."""

    sent_s: float
    at_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    tokens_per_s: float
    first_token_s: float  # median from sending to the first output
    token_s: float  # median time between tokens


def figures_of(answers: Sequence[Answer], *, users: int) -> Figures:
    """Return what a load's requests say, in process and served alike.

    Outputs that come together were made since the one before: their tokens count evenly over that time.
    """
    sent = sorted(answer.sent_s for answer in answers)
    begin_s = sent[min(users, len(sent)) - 1]
    end_s = min(answer.at_s[-1] for answer in answers if answer.at_s[-1] > sent[-1])

    def share(start_s: float, stop_s: float) -> float:
        """Return how much of a time lies in the measured one."""
        if stop_s <= start_s:
            return float(begin_s <= stop_s <= end_s)
        return max(0.0, min(stop_s, end_s) - max(start_s, begin_s)) / (stop_s - start_s)

    tokens = 0.0
    for answer in answers:
        since_s = [answer.at_s[0], *answer.at_s]  # the first comes in one step, behind its prompt
        spans = zip(since_s, answer.at_s, answer.tokens, strict=False)
        tokens += sum(count * share(start_s, stop_s) for start_s, stop_s, count in spans)
    return Figures(
        tokens_per_s=tokens / (end_s - begin_s),
        first_token_s=statistics.median(answer.at_s[0] - answer.sent_s for answer in answers),
        token_s=statistics.median(
            (answer.at_s[-1] - answer.at_s[0]) / sum(answer.tokens[1:])
            for answer in answers
            if len(answer.tokens) > 1
        ),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(prog="python -m dspark_build.bench_served", description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--mode", nargs="+", choices=_MODES, default=list(_MODES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--requests-per-user", type=int, default=4)
    parser.add_argument("--prompts", type=Path, default=Path("clients/prompts/eval.jsonl"))
    args = parser.parse_args(arguments)
    prompts = [json.loads(line)["turns"][0].splitlines()[0] for line in args.prompts.open()][:32]
    version_dir = default_model_repository() / "dspark" / "1"
    config = load_checked_config(version_dir / "model.yaml", {}, base=version_dir)
    runtime = load_runtime(config, base=version_dir)
    try:
        with (
            ServerProcess(ServerOptions(grpc_port=0, http_port=0, metrics_port=0)) as server,
            tempfile.NamedTemporaryFile("w", suffix=".txt") as lines,
        ):
            lines.write("\n".join(prompts))
            lines.flush()
            for users, mode in itertools.product(args.concurrency, args.mode):
                pairs = []
                for _ in range(args.rounds + 1):
                    here = in_process(runtime, prompts, args, users=users, num_draft_tokens=_MODES[mode])
                    pairs.append((here, served(server.grpc_url, lines.name, args, users=users, mode=mode)))
                _tell(users, mode, pairs[1:])  # the first fills caches and curves
    finally:
        runtime.engine.close()
    return 0


def in_process(
    runtime: Runtime, prompts: Sequence[str], args: argparse.Namespace, *, users: int, num_draft_tokens: int
) -> Figures:
    """Put the load on the engine of this process.

    Raises:
        DSparkError: a request failed.
        queue.Empty: one took longer than it may.
    """
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    answers: list[Answer] = []
    texts = itertools.cycle(prompts)
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True, num_draft_tokens=num_draft_tokens
    )

    def ask() -> None:
        answer = Answer(time.perf_counter())
        answers.append(answer)

        def take(output: RequestOutput) -> None:
            if output.token_ids:
                answer.at_s.append(time.perf_counter())
                answer.tokens.append(len(output.token_ids))
            if output.final:
                ended.put(output.error)

        assert runtime.tokenizer is not None
        ids = tuple(runtime.tokenizer.encode(next(texts)))
        runtime.engine.submit(Request(prompt_ids=ids, params=params, emit=take))

    num_requests = max(8, users * args.requests_per_user)
    for _ in range(users):
        ask()
    for done in range(num_requests):
        error = ended.get(timeout=_LIMIT_S)
        if error is not None:
            raise error
        if done + users < num_requests:
            ask()
    return figures_of(answers, users=users)


def served(url: str, prompts: str, args: argparse.Namespace, *, users: int, mode: str) -> Figures:
    """Put the load on the server with `dspark-client load`.

    Raises:
        subprocess.CalledProcessError: it failed; its words are on standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, traces = Path(folder) / "load.json", Path(folder) / "traces.json"
        options: dict[str, object] = {
            "--url": url, "--mode": mode, "--concurrency": users, "--rounds": 1, "--prompts": prompts,
            "--max-tokens": args.max_tokens, "--requests-per-user": args.requests_per_user, "--out": out,
            "--traces": traces,
        }  # fmt: skip
        words = [str(word) for pair in options.items() for word in pair]
        command = [str(Path(sys.executable).with_name("dspark-client")), "load", *words]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=_LIMIT_S
        )
        (load,) = json.loads(traces.read_text())
    answers = [
        Answer(*(one[name] for name in ("sent_s", "response_s", "num_tokens"))) for one in load["requests"]
    ]
    return figures_of(answers, users=users)


def _tell(users: int, mode: str, pairs: Sequence[tuple[Figures, Figures]]) -> None:
    """Print the medians of what was measured in process and served, and how they compare round by round."""

    def median(name: str) -> Iterator[float]:
        for side in range(2):
            yield statistics.median(getattr(pair[side], name) for pair in pairs)

    ratios = sorted(there.tokens_per_s / here.tokens_per_s for here, there in pairs)
    here, there = median("tokens_per_s")
    first_here, first_there = median("first_token_s")
    token_here, token_there = median("token_s")
    print(
        f"{users:3d} users, {mode:9s}: {here:7.1f} -> {there:7.1f} tokens/s, ratio {statistics.median(ratios):.3f} "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f}); first token {1e3 * first_here:6.1f} -> {1e3 * first_there:6.1f} ms; "
        f"per token {1e3 * token_here:5.2f} -> {1e3 * token_there:5.2f} ms",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
