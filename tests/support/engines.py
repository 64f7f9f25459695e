"""Engines over tiny random models, and one call that runs requests to their end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dspark.config import ServeConfig
from dspark.engine.engine import Engine
from dspark.generate import Completion, complete_all
from dspark.request import Request, SamplingParams
from dspark.runtime import build_engine


def make_engine(
    target: Path, *, drafter: str | Path = "none", policy: str = "none", **settings: object
) -> Engine:
    """Build an engine as the command line would; fp32 and torch unless told otherwise."""
    values: dict[str, object] = {
        "dtype": "float32",
        "executor": "torch",
        "num_threads": 1,
        "cache_bytes": 1 << 22,
        "capacity": "none",
    }
    return build_engine(
        ServeConfig(target=str(target), drafter=str(drafter), policy=policy, **{**values, **settings})  # type: ignore[arg-type]
    )


def make_request(prompt_ids: Sequence[int], **params: object) -> Request:
    defaults: dict[str, object] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    return Request(
        prompt_ids=tuple(prompt_ids),
        params=SamplingParams(**{**defaults, **params}),  # type: ignore[arg-type]
        emit=lambda _output: None,
        record_steps=True,
    )


def run(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Run all requests together; raise the first error of any of them."""
    completions = complete_all(engine, requests)
    for completion in completions:
        if completion.error is not None:
            raise completion.error
    assert engine.stats().pages_held == 0, "pages leaked"
    return completions


def answers(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    return [completion.token_ids for completion in run(engine, requests)]
