"""`dspark-client demo`: two answers, each with and without speculation, in one small table."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dspark_client.connection import Answer, Connection, Message
from dspark_client.terminal import remark, show_stream, summary, table

__all__ = ["demo"]

_TEXT: Final = (
    "The lighthouse stands on a rock in the sea. Every evening the keeper climbs the stairs and lights the lamp. "
    "The ships see the lamp from far away and keep away from the rock. In the morning the keeper puts out the "
    "lamp and goes to sleep. He has lived on the rock for thirty years and has never wanted to live anywere else."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One prompt and what is to be expected of it."""

    name: str
    title: str
    messages: tuple[Message, ...]


_CASES: Final = (
    Case(
        name="edit",
        title="an answer that repeats much of its prompt (look-up helps most)",
        messages=(
            {
                "role": "user",
                "content": f"Correct the spelling of this text and change nothing else:\n\n{_TEXT}",
            },
        ),
    ),
    Case(
        name="story",
        title="an answer that is all new (only a trained drafter can help)",
        messages=(
            {"role": "user", "content": "Tell a short story about a lighthouse keeper who finds a letter."},
        ),
    ),
)


def demo(connection: Connection, *, out: Path, rounds: int, max_tokens: int) -> int:
    """Run the demo, print its table, write its figures to `out`; return 0, or 1 where two answers differ.

    Every case is run plainly and speculatively in turn, greedy, `rounds` times; medians are shown. Raises as
    a generation does.
    """
    results = [_run_case(connection, case, rounds=rounds, max_tokens=max_tokens) for case in _CASES]
    print(
        "\n"
        + table(
            (
                "answer",
                "plain tokens/s",
                "speculative tokens/s",
                "ratio",
                "accepted length",
                "first token",
                "identical",
            ),
            [
                (
                    result["name"],
                    f"{result['plain']['tokens_per_second']:.1f}",
                    f"{result['speculative']['tokens_per_second']:.1f}",
                    f"{result['ratio']:.2f}x",
                    f"{result['speculative']['accepted_len']:.2f}",
                    f"{result['cold_first_token_s'] * 1e3:.0f} ms",
                    "yes" if result["identical"] else "NO",
                )
                for result in results
            ],
        )
    )
    identical = all(result["identical"] for result in results)
    if identical:
        print("\nWith and without speculation the answers are the same, token for token.")
    else:
        print("\nThe answers differ: speculation must not change them. Please report this.")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps({"rounds": rounds, "max_tokens": max_tokens, "cases": results}, indent=2) + "\n"
    )
    print(f"Figures: {out}\n")
    print("Next: `make serve` starts a server that stays; then, in another terminal,")
    print("  .venv/bin/dspark-client chat")
    print('  .venv/bin/dspark-client generate "The capital of France is" --max-tokens 32 --temperature 0')
    return 0 if identical else 1


def _run_case(connection: Connection, case: Case, *, rounds: int, max_tokens: int) -> dict[str, Any]:
    print(f"\n=== {case.title}\n>>> {_shortened(case.messages[-1]['content'])}\n")
    options: dict[str, dict[str, object]] = {
        "plain": {"temperature": 0.0, "max_tokens": max_tokens, "num_draft_tokens": 0},
        "speculative": {"temperature": 0.0, "max_tokens": max_tokens},
    }
    shown = show_stream(connection.generate(case.messages, options=options["speculative"]))
    remark(summary(shown))
    remark(f"measuring: {rounds} more times with and without speculation, in turn")
    # The answer above warmed the speculative way; the same for the plain one.
    answers: dict[str, list[Answer]] = {
        "plain": [connection.generate(case.messages, options=options["plain"]).run()],
        "speculative": [shown],
    }
    for _round in range(rounds):
        for mode in options:
            answers[mode].append(connection.generate(case.messages, options=options[mode]).run())
    figures = {mode: _figures(runs[1:]) for mode, runs in answers.items()}
    return {
        "name": case.name,
        "title": case.title,
        "text": shown.text,
        "num_input_tokens": shown.num_input_tokens,
        "num_output_tokens": len(shown.output_ids),
        "cold_first_token_s": shown.first_token_s,
        "plain": figures["plain"],
        "speculative": figures["speculative"],
        "ratio": figures["speculative"]["tokens_per_second"]
        / max(figures["plain"]["tokens_per_second"], 1e-9),
        "identical": all(run.output_ids == shown.output_ids for runs in answers.values() for run in runs),
    }


def _figures(runs: list[Answer]) -> dict[str, Any]:
    return {
        "tokens_per_second": statistics.median(run.tokens_per_second for run in runs),
        "first_token_s": statistics.median(run.first_token_s for run in runs),
        "accepted_len": statistics.median(run.accepted_len for run in runs),
        "spec_decode_metrics": runs[-1].metrics,
    }


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else line[:97] + "..."
