"""What serving costs: perf_analyzer's figures through a real server against the same load on the engine in process.

    python -m dspark_build.bench_served --concurrency 1 4 16 32

Both run what model_repository/dspark/1/model.yaml says, in turn, plain and with the server's own policy, on the same
prompts in the same order; both are started anew a few times, since which memory a process gets makes its steps some
percent faster or slower for as long as it lives. As it stands it takes some eight minutes and prints one table. Users
each wait for their answer and ask again; times are taken where the client, or here the receiver of the outputs, sees
them. Throughput is that of the time in which every user had a request open: neither a client's own start nor the end,
when fewer and fewer are left, says anything of serving.
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

__all__ = ["figures_of", "main", "table_of"]

_MODES = {"plain": 0, "scheduled": -1}  # num_draft_tokens
_LIMIT_S = 120.0  # of one load
_WANTED = 0.92  # of the tokens/s in process


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


# Users and mode -> rounds, in process and served.
Cells = dict[tuple[int, str], list[tuple[Figures, Figures]]]


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
    """Run as a program; return 1 when a load could not be measured at all."""
    parser = argparse.ArgumentParser(prog="python -m dspark_build.bench_served", description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--mode", nargs="+", choices=_MODES, default=list(_MODES))
    parser.add_argument("--starts", type=int, default=2, help="of engine and server; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="after each start; default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--requests-per-user", type=int, default=4)
    parser.add_argument("--prompts", type=Path, default=Path("clients/prompts/eval.jsonl"))
    args = parser.parse_args(arguments)
    cells: Cells = {cell: [] for cell in itertools.product(args.concurrency, args.mode)}
    for _ in range(args.starts):
        _measure(cells, args)
    print(table_of(cells))
    return 0 if all(cells.values()) else 1


def _measure(cells: Cells, args: argparse.Namespace) -> None:
    """Start engine and server, and add rounds of every load."""
    prompts = [
        json.loads(line)["turns"][0].splitlines()[0] for line in args.prompts.read_text().splitlines()
    ][:32]
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
            for (users, mode), pairs in cells.items():
                for turn in range(args.rounds + 1):
                    here = in_process(runtime, prompts, args, users=users, num_draft_tokens=_MODES[mode])
                    try:
                        there = served(server.grpc_url, lines.name, args, users=users, mode=mode)
                    except subprocess.SubprocessError as error:  # perf_analyzer falls now and then
                        _say(f"{users} users, {mode}: a round is left out: {_reason(error)}")
                        continue
                    if turn:  # the first fills caches and curves
                        pairs.append((here, there))
                _say(f"{users} users, {mode}: {len(pairs)} rounds")
    finally:
        runtime.engine.close()


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


def table_of(cells: Cells) -> str:
    """Return medians of what was measured in process and served, and of their ratios round by round, as Markdown."""
    lines = [
        "| users | mode | tokens/s | ratio, rounds | first token p50, ms | between tokens, ms |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (users, mode), pairs in cells.items():
        if not pairs:
            lines.append(f"| {users} | {mode} | failed | | | |")
            continue
        ratios = sorted(there.tokens_per_s / here.tokens_per_s for here, there in pairs)
        wanted = f"{statistics.median(ratios):.3f}"
        if statistics.median(ratios) < _WANTED:
            wanted = f"**{wanted}**"
        spread = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        rate, first, between = (
            " -> ".join(f"{scale * median:.{digits}f}" for median in _medians(pairs, name))
            for name, scale, digits in (
                ("tokens_per_s", 1, 0),
                ("first_token_s", 1e3, 1),
                ("token_s", 1e3, 2),
            )
        )
        lines.append(f"| {users} | {mode} | {rate} | {wanted} ({spread}) | {first} | {between} |")
    return "\n".join(lines)


def _medians(pairs: Sequence[tuple[Figures, Figures]], name: str) -> Iterator[float]:
    """Yield a figure's median in process and served."""
    for side in range(2):
        yield statistics.median(getattr(pair[side], name) for pair in pairs)


def _reason(error: subprocess.SubprocessError) -> str:
    words = getattr(error, "stderr", None) or b""
    lines = words.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else str(error)


def _say(message: str) -> None:
    print(f"bench_served: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
