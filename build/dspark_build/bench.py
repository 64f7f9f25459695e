"""`make bench`: what the engine is wanted to do on this machine, line by line, each with whether it holds.

Contenders take their turn in every round, so that a machine that drifts drifts for all of them; figures are medians
over rounds, ratios medians of the rounds' own ratios. Nothing here is a test: a busy machine fails no build.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dspark.engine.engine import Engine
from dspark.errors import ConfigError, DSparkError
from dspark.models.tokenizer import Tokenizer

from dspark_build.bench_engine import (
    PeerRate,
    engine_rate,
    load_engine,
    load_peer,
    pass_seconds,
    read_bandwidth,
)
from dspark_build.bench_lines import Line, median, spread, table
from dspark_build.bench_memory import MEMORY_ALLOWANCE_BYTES, measure_memory, num_weights, short_prompts
from dspark_build.bench_prompts import MIXED, NEW, REPEATING, chat_ids
from dspark_build.bench_server import ServedEngine

__all__ = ["SECTIONS", "main"]

DEFAULT_DRAFTER = "model_repository/dspark/1/drafter"
DEFAULT_TARGET = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_BEFORE_LOOPS = 128  # tokens; longer new text of a small model repeats itself, and is new no more
_GROWTH_BYTES = 8e6  # allocators round; a leak of a request's worth, 10 kB, would be 10 MB


def say(message: str) -> None:
    """Print one line of progress on standard error."""
    print(message, file=sys.stderr, flush=True)


class Bench:
    """What all sections share: the settings, one engine for each executor, the round's prompts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.settings: dict[str, object] = {
            "target": args.target,
            "drafter": "ngram",
            "num_threads": args.threads,
        }
        self._engines: dict[str, Engine] = {}
        self._peer: PeerRate | None = None

    def engine(self, executor: str = "auto", **settings: object) -> Engine:
        """Return the engine of one executor and other settings, loaded when it is first asked for."""
        name = " ".join([executor, *map(str, settings.values())])
        if name not in self._engines:
            say(f"loading {name}")
            self._engines[name] = load_engine({**self.settings, "executor": executor, **settings})
        return self._engines[name]

    def peer(self) -> PeerRate | None:
        """Return transformers' `generate` in the target's dtype; None where it is left out or not installed."""
        if self._peer is None and not self.args.no_peer:
            self._peer = load_peer(self.args.target, dtype=self.peer_dtype(), threads=self.args.threads)
        return self._peer

    def peer_dtype(self) -> str:
        dtype = self.engine().target.dtype
        return dtype if dtype != "int8" else "bfloat16"

    def prompts(self, texts: Sequence[str], round_number: int) -> list[tuple[int, ...]]:
        tokenizer: Tokenizer | None = self.engine().tokenizer
        if tokenizer is None:
            raise ConfigError(f"target: got {self.args.target}, allowed is one with a tokenizer")
        return chat_ids(tokenizer, texts, round_number)

    def rounds(self, runs: Callable[[int], dict[str, Callable[[], float]]]) -> dict[str, list[float]]:
        """Run every contender once a round; the first round warms up and is dropped."""
        results: dict[str, list[float]] = {}
        for round_number in range(self.args.rounds + 1):
            for name, run in runs(round_number).items():
                value = run()
                results.setdefault(name, [])
                if round_number:
                    results[name].append(value)
                shown = f"{value:.1f} tokens/s" if value >= 1 else f"{1e3 * value:.2f} ms"
                say(f"round {round_number} of {self.args.rounds}: {name} {shown}")
        return results


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratio of every round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def ratio_line(name: str, above: Sequence[float], below: Sequence[float], how: str, at_least: float) -> Line:
    each = ratios(above, below)
    return Line(
        name=name, value=median(each), unit="times", how=f"{how}; rounds {spread(each)}", at_least=at_least
    )


def rate_line(name: str, rates: Sequence[float]) -> Line:
    return Line(name=name, value=median(rates), unit="tokens/s", how=f"rounds {spread(rates)}")


def measure_passes(bench: Bench) -> Iterator[Line]:
    """One row against the machine's bound; eight rows and sixteen against one."""
    executors = ["auto", *(() if bench.engine().target.name == "torch" else ("torch",))]
    runs: dict[str, Callable[[], float]] = {}
    bandwidths: list[float] = []
    source = ""
    for executor in executors:
        engine = bench.engine(executor)
        for rows in (1, 8, 16):
            runs[f"{engine.target.name} {rows}"] = lambda e=engine, n=rows: pass_seconds(e, n)  # type: ignore[misc]

    def turns(_round: int) -> dict[str, Callable[[], float]]:
        nonlocal source
        bandwidth, source = read_bandwidth(bench.args.threads)
        bandwidths.append(bandwidth)
        return runs

    seconds = bench.rounds(turns)
    bandwidth = median(bandwidths[1:])
    yield Line(name="memory read", value=bandwidth / 1e9, unit="GB/s", how=source)
    for executor in executors:
        target = bench.engine(executor).target
        bound_s = num_weights(target.config) * _BYTES[target.dtype] / bandwidth
        name = f"{target.name}, {target.dtype}"
        one, eight, sixteen = (seconds[f"{target.name} {rows}"] for rows in (1, 8, 16))
        times = [1e3 * median(each) for each in (one, eight, sixteen)]
        how = f"{times[0]:.1f} ms for 1 row; reading the weights takes {1e3 * bound_s:.1f} ms"
        yield Line(
            name=f"{name}: a row over its bound",
            value=median(one) / bound_s,
            unit="times",
            how=how,
            at_most=3.0,
        )
        for rows, each, at_most in ((8, eight, 1.5), (16, sixteen, None)):
            yield Line(
                name=f"{name}: {rows} rows over 1 row",
                value=median(ratios(each, one)),
                unit="times",
                how=f"{1e3 * median(each):.1f} ms for {rows} rows",
                at_most=at_most,
            )


def measure_engines(bench: Bench) -> Iterator[Line]:
    """One request and sixteen different ones, either executor, against transformers."""
    ours = bench.engine()
    torch = None if ours.target.name == "torch" else bench.engine("torch")
    peer, most = bench.peer(), bench.args.max_tokens

    def turns(round_number: int) -> dict[str, Callable[[], float]]:
        many = bench.prompts(MIXED, round_number)
        # The single request is one of the sixteen: it has a round number of its own, or it would be found cached.
        single = bench.prompts(MIXED[2:3], 100 + round_number)
        runs: dict[str, Callable[[], float]] = {
            "ours, 1 request": lambda: engine_rate(ours, single, most, num_drafts=0),
            "ours, 16 requests": lambda: engine_rate(ours, many, most, num_drafts=0),
        }
        if torch is not None:
            runs["torch executor, 1 request"] = lambda: engine_rate(torch, single, most, num_drafts=0)
            runs["torch executor, 16 requests"] = lambda: engine_rate(torch, many, most, num_drafts=0)
        if peer is not None:
            runs["transformers, 1 request"] = lambda: peer(single, most)
            runs["transformers, 16 requests"] = lambda: peer(many, most)
        return runs

    rates = bench.rounds(turns)
    for name, values in rates.items():
        yield rate_line(name, values)
    one, many = rates["ours, 1 request"], rates["ours, 16 requests"]
    yield ratio_line("16 requests over 1", many, one, "tokens/s", 5.0)
    if torch is not None:
        t_one, t_many = rates["torch executor, 1 request"], rates["torch executor, 16 requests"]
        yield ratio_line("torch executor: 16 requests over 1", t_many, t_one, "tokens/s", 5.0)
    if peer is not None:
        p_one, p_many = rates["transformers, 1 request"], rates["transformers, 16 requests"]
        how = f"{bench.peer_dtype()} for both"
        yield ratio_line("over transformers, 1 request", one, p_one, how, 1.0)
        how = f"{how}, {most} tokens of each and none more"
        yield ratio_line("over transformers, 16 requests of one length", many, p_many, how, 6.0)


def measure_whole_answers(bench: Bench) -> Iterator[Line]:
    """Sixteen questions answered to their own ends, as users wait for them: plain, as served, and by transformers."""
    plain, peer = bench.engine(), bench.peer()
    served = bench.engine(drafter=bench.args.drafter)
    most = bench.args.max_answer
    ends = {*plain.target.config.eos_ids, *(plain.tokenizer.eos_ids if plain.tokenizer else ())}

    def turns(round_number: int) -> dict[str, Callable[[], float]]:
        prompts = bench.prompts(MIXED, 40 + round_number)
        runs: dict[str, Callable[[], float]] = {
            "whole answers, plain": lambda: engine_rate(plain, prompts, most, num_drafts=0, ignore_eos=False),
            "whole answers, drafter": lambda: engine_rate(
                served, prompts, most, num_drafts=-1, ignore_eos=False
            ),
        }
        if peer is not None:
            runs["whole answers, transformers"] = lambda: peer(prompts, most, ends=ends)
        return runs

    rates = bench.rounds(turns)
    for name, values in rates.items():
        yield rate_line(name, values)
    if peer is not None:
        how = f"{bench.peer_dtype()} for both, at most {most} tokens an answer"
        ours, theirs = rates["whole answers, drafter"], rates["whole answers, transformers"]
        yield ratio_line(
            "plain over transformers, 16 whole answers", rates["whole answers, plain"], theirs, how, 6.0
        )
        yield ratio_line("drafter over transformers, 16 whole answers", ours, theirs, how, 6.0)


def measure_ngram(bench: Bench) -> Iterator[Line]:
    """Prompt look-up against plain decoding at one request, on text that is copied and on text that is new."""
    engine, most = bench.engine(), min(bench.args.max_tokens, _BEFORE_LOOPS)
    kinds = {"repeats": REPEATING, "is new": NEW}

    def turns(round_number: int) -> dict[str, Callable[[], float]]:
        runs: dict[str, Callable[[], float]] = {}
        for kind, texts in kinds.items():
            for number, text in enumerate(texts):
                # Plain and look-up get a prompt of their own, equally long, and take the first turn alternately.
                for drafts in (0, -1) if round_number % 2 else (-1, 0):
                    prompt = bench.prompts([text], 1000 + 10 * round_number - drafts)
                    name = f"{kind} {number}, {'ngram' if drafts else 'plain'}"
                    runs[name] = lambda p=prompt, d=drafts: engine_rate(  # type: ignore[misc]
                        engine, p, most, num_drafts=d, ignore_eos=False
                    )
        return runs

    rates = bench.rounds(turns)
    for kind, texts in kinds.items():
        each = [
            median(ratios(rates[f"{kind} {number}, ngram"], rates[f"{kind} {number}, plain"]))
            for number in range(len(texts))
        ]
        shown = ", ".join(f"{value:.2f}" for value in each)
        how = f"whole answers, median of each of {len(texts)} prompts: {shown}"
        if kind == "repeats":
            yield Line(
                name=f"ngram over plain, text that {kind}",
                value=median(each),
                unit="times",
                how=how,
                at_least=1.5,
            )
        else:
            yield Line(
                name=f"ngram over plain, text that {kind}, worst",
                value=min(each),
                unit="times",
                how=how,
                at_least=0.95,
            )


def measure_server(bench: Bench) -> Iterator[Line]:
    """Sixteen gRPC streams through a real tritonserver against the same engine in process; the stub's memory."""
    engine, most = bench.engine(), bench.args.max_tokens
    with ServedEngine({**bench.settings, "cache_bytes": "256MiB"}, progress=say) as served:

        def turns(round_number: int) -> dict[str, Callable[[], float]]:
            many = bench.prompts(MIXED, 2000 + round_number)
            return {
                "in process, 16 requests": lambda: engine_rate(engine, many, most, num_drafts=0),
                "tritonserver, 16 streams": lambda: served.rate(many, most),
            }

        rates = bench.rounds(turns)
        inside, outside = rates.values()
        for name, values in rates.items():
            yield rate_line(name, values)
        yield ratio_line("tritonserver over in process", outside, inside, "16 streams, plain", 0.9)

        def many_short(count: int, seed: int) -> None:
            prompts = short_prompts(count, vocab_size=engine.target.config.vocab_size, seed=seed)
            for start in range(0, count, 16):
                served.rate(prompts[start : start + 16], 3)

        count = bench.args.memory_requests
        say(f"{count} short requests through the server")
        many_short(100, seed=1)
        warm = served.model_bytes()
        many_short(count, seed=2)
        grown = served.model_bytes() - warm
        how = f"{warm / 1e6:.0f} MB after 100 requests and all rounds; {count} more, 16 streams at once"
        yield Line(
            name="served model process, growth",
            value=grown / 1e6,
            unit="MB",
            how=how,
            at_most=_GROWTH_BYTES / 1e6,
        )


def measure_resident(bench: Bench) -> Iterator[Line]:
    """What weights, caches and everything else take, and what a thousand requests add."""
    executors = ["auto", *(() if bench.engine().target.name == "torch" else ("torch",))]
    for executor in executors:
        say(f"memory of the {executor} executor over {bench.args.memory_requests} short requests")
        settings = {**bench.settings, "executor": executor, "cache_bytes": "64MiB"}
        report = measure_memory(settings, num_requests=bench.args.memory_requests)
        name = f"{report.executor}, {report.dtype}"
        yield Line(
            name=f"{name}: beside weights and caches",
            value=report.beside_bytes / 1e6,
            unit="MB",
            how=f"{report.end_bytes / 1e6:.0f} MB resident, weights once {report.weight_bytes / 1e6:.0f}, "
            f"caches {report.cache_bytes / 1e6:.0f}",
            at_most=MEMORY_ALLOWANCE_BYTES / 1e6,
        )
        yield Line(
            name=f"{name}: growth",
            value=report.growth_bytes / 1e6,
            unit="MB",
            how=f"over {report.num_requests} requests behind the first 100",
            at_most=_GROWTH_BYTES / 1e6,
        )


SECTIONS: dict[str, Callable[[Bench], Iterator[Line]]] = {
    "passes": measure_passes,
    "engines": measure_engines,
    "answers": measure_whole_answers,
    "ngram": measure_ngram,
    "server": measure_server,
    "memory": measure_resident,
}


@contextmanager
def reported(path: Path, report: dict[str, object], lines: Sequence[Line]) -> Iterator[None]:
    """Write what was measured, also when a later section fails."""
    try:
        yield
    finally:
        report["lines"] = [line.as_json() for line in lines]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dspark_build.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", default=DEFAULT_TARGET, help="default: %(default)s")
    parser.add_argument(
        "--rounds", type=int, default=3, help="behind one that warms up; default: %(default)s"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=256,
        help="tokens an answer; default: %(default)s, which is a request's own default",
    )
    parser.add_argument(
        "--max-answer", type=int, default=512, help="most tokens of a whole answer; default: %(default)s"
    )
    parser.add_argument(
        "--drafter", default=DEFAULT_DRAFTER, help="of the whole answers; default: %(default)s"
    )
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument(
        "--memory-requests",
        type=int,
        default=1000,
        help="requests that memory must not grow over; default: %(default)s",
    )
    parser.add_argument(
        "--only",
        default=",".join(SECTIONS),
        help="sections to run, with commas between them; default: %(default)s",
    )
    parser.add_argument("--no-peer", action="store_true", help="leave Hugging Face transformers out")
    parser.add_argument("--out", type=Path, default=Path("out/bench.json"), help="default: %(default)s")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections and print the table; 1 when a section could not be measured."""
    args = _parser().parse_args(argv)
    lines: list[Line] = []
    try:
        chosen = args.only.split(",")
        unknown = [name for name in chosen if name not in SECTIONS]
        if unknown:
            raise ConfigError(f"--only: got {unknown[0]!r}, allowed are {', '.join(SECTIONS)}")
        bench = Bench(args)
        target = bench.engine().target
        report: dict[str, object] = {
            "executor": target.name,
            "dtype": target.dtype,
            "threads": args.threads,
            "max_tokens": args.max_tokens,
            "rounds": args.rounds,
        }
        print(f"{args.target}: {target.name} executor, {target.dtype}, {args.threads} threads", flush=True)
        with reported(args.out, report, lines):
            for name in chosen:
                lines.extend(SECTIONS[name](bench))
    except DSparkError as error:
        print(table(lines) if lines else "", flush=True)
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(table(lines))
    missed = sum(line.holds is False for line in lines)
    print(f"{sum(line.holds is True for line in lines)} lines hold, {missed} do not; written to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
