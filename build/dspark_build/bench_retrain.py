"""What retraining from traffic gives: a shop's letters are answered and recorded, and the drafter learns from them.

    python -m dspark_build.bench_retrain --minutes 6

The letters are alike and the drafter has seen none; what is compared are prompts that it does not learn from. Then the
prompts of `clients/prompts/eval.jsonl` tell what it forgot elsewhere.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from dspark.config import load_serve_config
from dspark.errors import DSparkError
from dspark.generate import complete_all
from dspark.request import Request, SamplingParams
from dspark.runtime import build_engine
from dspark.serving.traffic import TrafficRecorder

from dspark_build.cli import main as dspark_build
from dspark_build.progress import say

__all__ = ["letters", "main"]

DEFAULT_TARGET = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_DRAFTER = Path("model_repository/dspark/1/drafter")
_THINGS = """toaster, kettle, desk lamp, winter coat, bicycle pump, coffee grinder, phone case, garden hose,
backpack, office chair, headphones, alarm clock, rice cooker, tent, yoga mat, printer"""
_FAULTS = """arrived broken, came two weeks late, is the wrong colour, makes a strange noise, stopped working after
three days, was delivered to a neighbour, has a part missing, smells of plastic, is smaller than in the picture,
was charged twice"""
_WISHES = "a refund, a replacement, a discount, an apology, the missing part, to send it back"


def letters(count: int, *, seed: int) -> list[str]:
    """Return what customers write to a shop: one form, 960 complaints, an order number each."""
    rng = random.Random(seed)
    things, faults, wishes = (" ".join(text.split()).split(", ") for text in (_THINGS, _FAULTS, _WISHES))
    return [
        f"You answer letters of customers of a mail-order shop. A customer writes: my {rng.choice(things)} (order "
        f"{rng.randrange(10000, 99999)}) {rng.choice(faults)}, I want {rng.choice(wishes)}. Write a short polite "
        "reply."
        for _ in range(count)
    ]


def record_answers(args: argparse.Namespace, folder: Path) -> None:
    """Answer the letters, two of three greedily, and keep the answers as a server does."""
    settings = {"target": args.target, "drafter": str(args.drafter), "num_threads": args.threads}
    engine = build_engine(load_serve_config(overrides=settings, environ={}))
    assert engine.tokenizer is not None
    folder.mkdir(parents=True, exist_ok=True)
    recorder = TrafficRecorder(folder, target_hash=engine.target.config.model_hash, most_bytes=1 << 30)
    requests = []
    for number, text in enumerate(letters(args.answers, seed=args.seed)):
        ids = tuple(engine.tokenizer.apply_chat_template([{"role": "user", "content": text}]))
        params = SamplingParams(max_tokens=256, temperature=(0.0, 0.0, 0.7)[number % 3], seed=number)
        emit = recorder.listen(lambda _output: None, prompt_ids=ids, params=params)
        requests.append(Request(prompt_ids=ids, params=params, emit=emit))
    say(f"answering {len(requests)} letters")
    complete_all(engine, requests)
    recorder.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Record, retrain, and measure what was forgotten; the status of `dspark-build retrain`."""
    parser = argparse.ArgumentParser(
        prog="python -m dspark_build.bench_retrain", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--target", default=DEFAULT_TARGET, help="default: %(default)s")
    parser.add_argument("--drafter", type=Path, default=DEFAULT_DRAFTER, help="default: %(default)s")
    parser.add_argument("--answers", type=int, default=700, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=6.0, help="of training; default: %(default)g")
    parser.add_argument("--threads", type=int, default=0, help="0 = one per core")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/bench_retrain"), help="default: %(default)s")
    args = parser.parse_args(argv)
    traffic, new = args.out / "traffic", args.out / "retrained"
    common = ["--target", args.target, "--threads", str(args.threads)]
    try:
        if not list(traffic.glob("*.jsonl")):
            record_answers(args, traffic)
    except DSparkError as error:
        print(f"bench_retrain: {error}", file=sys.stderr)
        return 1
    retrain = [*common, "--drafter", str(args.drafter), "--traffic", str(traffic), "--out", str(new)]
    status = dspark_build(["retrain", *retrain, "--minutes", str(args.minutes)])
    if status == 0:
        for drafter in (args.drafter, new / "drafter"):
            print(f"\n{drafter} on clients/prompts/eval.jsonl:", flush=True)
            dspark_build(
                ["eval", *common, "--drafter", str(drafter), "--prompts", "clients/prompts/eval.jsonl"]
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
