"""What the engine holds in memory and whether that grows, measured in a process that does nothing else.

    python -m dspark_build.bench_memory SETTINGS_JSON NUM_REQUESTS

prints one JSON line: resident bytes at the start and after the requests, and the bytes of weights and caches. With
`measure_memory` the parent asks for it.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import psutil
from dspark.config import load_serve_config
from dspark.engine.engine import Engine
from dspark.errors import EngineError
from dspark.generate import complete_all
from dspark.models.config import TargetConfig
from dspark.request import Request, SamplingParams
from dspark.runtime import build_engine

__all__ = ["MEMORY_ALLOWANCE_BYTES", "MemoryReport", "measure_memory", "num_weights", "short_prompts"]

MEMORY_ALLOWANCE_BYTES = 300 * 10**6  # beside weights and caches
_WARM_REQUESTS = 100
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Resident bytes of one process with one engine."""

    executor: str
    dtype: str
    weight_bytes: int  # every weight once
    cache_bytes: int
    warm_bytes: int  # after a hundred requests
    end_bytes: int  # after all of them
    num_requests: int  # between the two

    @property
    def beside_bytes(self) -> int:
        """What is held beside weights and caches."""
        return self.end_bytes - self.weight_bytes - self.cache_bytes

    @property
    def growth_bytes(self) -> int:
        return self.end_bytes - self.warm_bytes


def num_weights(config: TargetConfig) -> int:
    """Return how many numbers the matrices of a target hold, a tied table once."""
    decoder = config.decoder
    attention = 2 * (decoder.num_heads + decoder.num_kv_heads) * decoder.head_dim * decoder.hidden_size
    mlp = 3 * decoder.intermediate_size * decoder.hidden_size
    tables = 1 if config.tie_word_embeddings else 2
    return decoder.num_layers * (attention + mlp) + tables * config.vocab_size * decoder.hidden_size


def short_prompts(count: int, *, vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    """Return prompts of 4 to 12 random tokens, no two alike."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(vocab_size) for _ in range(draw.randint(4, 12))) for _ in range(count)]


def measure_memory(settings: Mapping[str, object], *, num_requests: int) -> MemoryReport:
    """Load an engine in a fresh process, run short requests, return what it held.

    Raises:
        EngineError: that process failed; its error is on standard error.
    """
    command = [
        sys.executable,
        "-m",
        "dspark_build.bench_memory",
        json.dumps(dict(settings)),
        str(num_requests),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise EngineError(f"the process that measures memory ended with status {done.returncode}")
    return MemoryReport(**json.loads(done.stdout))


def run_short(engine: Engine, count: int, seed: int) -> None:
    """Run `count` short requests, 16 at a time."""
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    prompts = short_prompts(count, vocab_size=engine.target.config.vocab_size, seed=seed)
    for start in range(0, count, 16):
        complete_all(
            engine,
            [
                Request(prompt_ids=prompt, params=params, emit=lambda _output: None)
                for prompt in prompts[start : start + 16]
            ],
        )


def main() -> int:
    settings, num_requests = json.loads(sys.argv[1]), int(sys.argv[2])
    engine = build_engine(load_serve_config(overrides=settings, environ={}))
    process = psutil.Process()
    run_short(engine, _WARM_REQUESTS, seed=1)
    warm = process.memory_info().rss
    run_short(engine, num_requests, seed=2)
    limits, target = engine.limits, engine.target
    report = MemoryReport(
        executor=target.name,
        dtype=target.dtype,
        weight_bytes=num_weights(target.config) * _ITEM_BYTES[target.dtype],
        cache_bytes=limits.num_pages
        * (target.cache_page_bytes(limits.page_size) + engine.drafter.cache_page_bytes(limits.page_size)),
        warm_bytes=warm,
        end_bytes=process.memory_info().rss,
        num_requests=num_requests,
    )
    print(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
