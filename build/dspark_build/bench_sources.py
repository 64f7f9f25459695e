"""`make bench-drafter`: what the drafter brings to one reader, by kind of question, greedy, against plain decoding.

Every prompt of the file is answered plain, then with the drafter (policy `auto`), then with look-up in the prompt
before it, as it is served, and with trees if asked; the order turns from prompt to prompt. The answers must be the
same, token for token.
The time counts from the first token to the last, so it is of decoding alone; prefill is the same for all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dspark.calibration.tree import BlockCalibrator
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.lookup import LookupDrafter
from dspark.errors import ConfigError, DSparkError
from dspark.request import Request, RequestOutput, SamplingParams
from dspark.scheduling.cost_model import CostModel
from dspark.scheduling.interface import Calibrator
from dspark.scheduling.scheduler import make_scheduler

from dspark_build.bench_pair import BenchPair, load_pair
from dspark_build.progress import ProgressLine, say
from dspark_build.prompt_files import Prompt, read_prompts

__all__ = ["Answer", "Sum", "check_answers", "main", "table"]

PLAIN = "plain"
WANTED = {"code": 1.3, "maths": 1.3, "chat": 1.1}


@dataclass(slots=True)
class Sum:
    """What one contender did on the prompts of one source."""

    seconds: float = 0.0
    tokens: int = 0  # decoded, the first one not counted
    steps: int = 0
    ratios: list[float] = field(default_factory=list)  # plain seconds over these, for each prompt

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def accepted_len(self) -> float:
        return self.tokens / self.steps


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer and how long its decoding took."""

    tokens: tuple[int, ...]
    seconds: float
    steps: int


class Contender:
    """One way of answering; its scheduler keeps what it learns from prompt to prompt."""

    def __init__(self, pair: BenchPair, policy: str, *, chain_len: int) -> None:
        calibrator = pair.calibrator(chain_len=chain_len)
        fitting: Calibrator | None = calibrator
        if calibrator is not None and isinstance(pair.drafter, DSparkDrafter) and pair.drafter.tree_size:
            fitting = BlockCalibrator(calibrator, chain_len=chain_len)
        scheduler = make_scheduler(
            policy,
            block_size=pair.block_size,
            has_confidence=pair.has_confidence,
            cost_model=None if pair.curve is None else CostModel(pair.curve),
            calibrator=fitting,
        )
        self._engine = pair.engine(scheduler, max_batch_size=1)

    def answer(self, prompt_ids: tuple[int, ...], *, max_tokens: int) -> Answer:
        """Answer one prompt to its end, or to `max_tokens`."""
        tokens: list[int] = []
        ended: list[str] = []

        def emit(output: RequestOutput) -> None:
            tokens.extend(output.token_ids)
            if output.finish_reason is not None:
                ended.append(output.finish_reason)

        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self._engine.add(Request(prompt_ids=prompt_ids, params=params, emit=emit))
        while not tokens and not ended:
            self._engine.step()
        before = self._engine.stats().num_steps
        started = time.perf_counter()
        while not ended:
            self._engine.step()
        return Answer(tuple(tokens), time.perf_counter() - started, self._engine.stats().num_steps - before)


def run(args: argparse.Namespace) -> int:
    """Answer every prompt in every way; a table on standard output, JSON beside it.

    Raises:
        DSparkError: a pair that cannot be loaded, or an answer that speculation changed.
    """
    pair = load_pair(
        args.target, args.drafter, threads=args.threads, max_batch_size=1, tell=say, dtype=args.dtype
    )
    if not isinstance(pair.drafter, DSparkDrafter):
        raise ConfigError(f"--drafter: got {pair.drafter_name}, wanted is a trained DSpark drafter")
    looking = replace(pair, drafter=LookupDrafter(pair.drafter))
    chain_len = pair.block_size
    contenders = {
        PLAIN: Contender(pair, "none", chain_len=chain_len),
        "drafter": Contender(pair, "auto", chain_len=chain_len),
        "with look-up": Contender(looking, "auto", chain_len=chain_len),
    }
    if args.draft_tree:
        trees = DSparkDrafter(pair.drafter.executor, pair.drafter.draft_to_target)
        trees.use_trees(args.draft_tree)
        contenders["trees"] = Contender(replace(pair, drafter=trees), "auto", chain_len=chain_len)
    prompts = read_prompts([args.prompts])
    prompts = [p for place in range(len(prompts)) for p in _nth_of_each(prompts, place)][: args.limit]
    sums: dict[str, dict[str, Sum]] = {}
    line = ProgressLine()
    for number, prompt in enumerate(prompts):
        line.show(number / len(prompts), f"{prompt.source}, {number + 1} of {len(prompts)}", force=True)
        ids = tuple(pair.tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}]))
        names = list(contenders)
        turn = number % len(names)
        answers = {
            name: contenders[name].answer(ids, max_tokens=args.max_tokens)
            for name in names[turn:] + names[:turn]
        }
        check_answers(prompt.text, answers)
        for source in (prompt.source, "all"):
            _count(sums.setdefault(source, {name: Sum() for name in names}), answers)
    line.close()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(_report(args, pair, sums), indent=1) + "\n", encoding="utf-8")
    print(table({**{source: row for source, row in sums.items() if source != "all"}, "all": sums["all"]}))
    return 0


def _nth_of_each(prompts: Sequence[Prompt], place: int) -> list[Prompt]:
    """Return the prompt at `place` of each source, so that a limit takes as many of each."""
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.source, []).append(prompt)
    return [kind[place] for kind in kinds.values() if place < len(kind)]


def check_answers(prompt: str, answers: dict[str, Answer]) -> None:
    """Raise DSparkError when an answer differs from the plain one."""
    for name, answer in answers.items():
        if answer.tokens != answers[PLAIN].tokens:
            raise DSparkError(f"{name} changed the answer to {prompt!r}")


def _count(sums: dict[str, Sum], answers: dict[str, Answer]) -> None:
    plain = answers[PLAIN]
    if len(plain.tokens) < 2:
        return
    for name, answer in answers.items():
        total = sums[name]
        total.seconds += answer.seconds
        total.tokens += len(answer.tokens) - 1
        total.steps += answer.steps
        total.ratios.append(plain.seconds / answer.seconds)


def _report(args: argparse.Namespace, pair: BenchPair, sums: dict[str, dict[str, Sum]]) -> dict[str, object]:
    return {
        "target": args.target,
        "drafter": pair.drafter_name,
        "executor": pair.target.name,
        "dtype": pair.target.dtype,
        "max_tokens": args.max_tokens,
        "sources": {
            source: {
                name: {
                    "tokens_per_second": total.rate,
                    "over_plain": row[PLAIN].seconds / total.seconds,
                    "accepted_len": total.accepted_len,
                    "tokens": total.tokens,
                    "worst": min(total.ratios),
                    "best": max(total.ratios),
                }
                for name, total in row.items()
            }
            for source, row in sums.items()
        },
    }


def table(sums: dict[str, dict[str, Sum]]) -> str:
    """Return a row for each source: tokens/s, how many times plain decoding (worst and best prompt), what is wanted."""
    lines = [
        f"{'source':8}{'answer tokens':>14}{'plain':>9}{'drafter':>10}{'times plain':>22}{'accepted':>10}"
        f"{'with look-up':>14}{'times plain':>13}  wanted of the drafter"
    ]
    for source, row in sums.items():
        plain, drafter, looking, *trees = row.values()
        ratio = plain.seconds / drafter.seconds
        spread = f"{ratio:.2f} ({min(drafter.ratios):.2f} to {max(drafter.ratios):.2f})"
        wanted = WANTED.get(source)
        holds = "" if wanted is None else f"{wanted} {'holds' if ratio >= wanted else 'MISSED'}"
        lines.append(
            f"{source:8}{plain.tokens:14d}{plain.rate:9.1f}{drafter.rate:10.1f}{spread:>22}{drafter.accepted_len:10.2f}"
            f"{looking.rate:14.1f}{plain.seconds / looking.seconds:13.2f}  {holds}".rstrip()
        )
        lines += [
            f"{'':8}{'trees':>33}{of.rate:10.1f}{plain.seconds / of.seconds:12.2f}{of.accepted_len:12.2f}"
            for of in trees
        ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dspark_build.bench_sources", description=__doc__)
    parser.add_argument("--target", default="models/SmolLM2-135M-Instruct.Q4_1.gguf", help="%(default)s")
    parser.add_argument(
        "--drafter", default="auto", help="folder, or auto: the trained one in model_repository"
    )
    parser.add_argument(
        "--prompts", type=Path, default=Path("clients/prompts/eval.jsonl"), help="%(default)s"
    )
    parser.add_argument("--limit", type=int, help="only so many prompts, the sources in turn")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="of the target's weights (%(default)s)")
    parser.add_argument("--draft-tree", type=int, default=0, metavar="N", help="also trees of up to N drafts")
    parser.add_argument("--threads", type=int, default=0, help="0 = one per core")
    parser.add_argument("--out", type=Path, default=Path("out/bench_sources.json"))
    args = parser.parse_args(argv)
    try:
        return run(args)
    except DSparkError as error:
        print(f"bench-drafter: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
