"""What the native executor's narrower types cost in quality: bfloat16 and int8 against float32 over the eval prompts.

    python -m dspark_build.bench_quality

Every row of every chat prompt is one next-token distribution. Told are how often the most likely token is the same,
and the mean and the 99th percentile of KL(float32 || other), in nats.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from dspark.errors import ConfigError, DSparkError
from dspark.executors.interface import StepBatch, TargetExecutor
from dspark.executors.native_target import NativeTarget
from dspark.models.loading import load_target
from dspark_plugins.native.threads import default_num_threads

from dspark_build.progress import ProgressLine
from dspark_build.prompt_files import read_prompts

__all__ = ["Quality", "compare", "kl_divergence", "main"]

_PAGE_SIZE = 16
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One type against float32."""

    dtype: str
    num_rows: int
    arg_max_agreement: float  # share of rows
    mean_kl: float  # nats
    p99_kl: float  # nats


def kl_divergence(reference: Float32, other: Float32) -> Float64:
    """Return KL(softmax(reference) || softmax(other)) [N] in nats, of logits [N, V]."""
    p, q = _log_softmax(reference), _log_softmax(other)
    return np.asarray((np.exp(p) * (p - q)).sum(axis=1))


def _log_softmax(logits: Float32) -> Float64:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def compare(dtype: str, pairs: Sequence[tuple[npt.NDArray[np.bool_], Float64]]) -> Quality:
    """Sum up prompts, each given as (arg-max agrees [N], KL [N])."""
    agrees = np.concatenate([pair[0] for pair in pairs])
    kl = np.concatenate([pair[1] for pair in pairs])
    return Quality(
        dtype=dtype,
        num_rows=len(kl),
        arg_max_agreement=float(agrees.mean()),
        mean_kl=float(kl.mean()),
        p99_kl=float(np.percentile(kl, 99)),
    )


def prompt_logits(target: TargetExecutor, tokens: Sequence[int]) -> Float32:
    """Return the logits of every row of a prompt [N, V]."""
    count = len(tokens)
    positions = np.arange(count, dtype=np.int32)
    batch = StepBatch(
        tokens=np.array(tokens, np.int32),
        positions=positions,
        query_start=np.array([0, count], np.int32),
        context_len=np.zeros(1, np.int32),
        page_table=np.arange(-(-count // _PAGE_SIZE), dtype=np.int32)[None],
        slots=positions.copy(),
        logit_rows=positions.copy(),
    )
    return target.forward(batch).logits.copy()


def measure(target_path: str, prompts: Path, *, max_tokens: int, threads: int) -> list[Quality]:
    """Return bfloat16 and int8 against float32; of each prompt the first `max_tokens` tokens.

    Raises:
        ConfigError, CheckpointError: what cannot be used.
    """
    checkpoint = load_target(target_path)
    if checkpoint.tokenizer is None:
        raise ConfigError(f"{target_path}: has no tokenizer, needed for prompts")
    template = checkpoint.tokenizer.apply_chat_template
    ids = [template([{"role": "user", "content": p.text}])[:max_tokens] for p in read_prompts([prompts])]
    targets = {}
    for dtype in ("float32", "bfloat16", "int8"):
        targets[dtype] = NativeTarget(checkpoint.config, checkpoint.weights, dtype=dtype, num_threads=threads)
        targets[dtype].allocate_cache(num_pages=-(-max_tokens // _PAGE_SIZE), page_size=_PAGE_SIZE)
    pairs: dict[str, list[tuple[npt.NDArray[np.bool_], Float64]]] = {"bfloat16": [], "int8": []}
    line = ProgressLine()
    for number, tokens in enumerate(ids):
        line.show(number / len(ids), "prompts")
        reference = prompt_logits(targets["float32"], tokens)
        for dtype, found in pairs.items():
            other = prompt_logits(targets[dtype], tokens)
            found.append((reference.argmax(1) == other.argmax(1), kl_divergence(reference, other)))
    line.close()
    return [compare(dtype, found) for dtype, found in pairs.items()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dspark_build.bench_quality", description=__doc__)
    parser.add_argument("--target", default="models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--prompts", type=Path, default=Path("clients/prompts/eval.jsonl"))
    parser.add_argument("--max-tokens", type=int, default=128, help="of a prompt (%(default)s)")
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--out", type=Path, default=Path("out/bench_quality.json"))
    args = parser.parse_args(argv)
    try:
        found = measure(args.target, args.prompts, max_tokens=args.max_tokens, threads=args.threads)
    except DSparkError as error:
        print(f"bench_quality: {error}", file=sys.stderr)
        return 1
    for one in found:
        print(
            f"{one.dtype:9} arg-max agreement {100 * one.arg_max_agreement:.2f} %, KL {one.mean_kl:.5f} nats"
            f" (99th percentile {one.p99_kl:.4f}), {one.num_rows} rows"
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
