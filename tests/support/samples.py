"""The exact law of a short sampled answer, and whether an engine's answers follow it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from dspark.engine.engine import Engine
from dspark.executors.interface import StepBatch, TargetExecutor

from support.chi_square import assert_distributed_as
from support.engines import answers, make_request

__all__ = ["assert_samples_follow_the_target"]

_PROMPT, _TEMPERATURE, _TOP_K, _LENGTH = [9, 4, 9, 4, 9, 4, 9, 4, 9], 1.3, 4, 3


def assert_samples_follow_the_target(engine: Engine, *, num_samples: int = 600) -> None:
    """Fail unless answers of three tokens, the last two of them drafted, are as likely as the target makes them.

    Arguments:
        engine: its target and caches are used for the law first.
    """
    law = _law(engine.target, _PROMPT, _LENGTH)
    requests = [
        make_request(_PROMPT, seed=seed, temperature=_TEMPERATURE, top_k=_TOP_K, max_tokens=_LENGTH)
        for seed in range(num_samples)
    ]
    counts = Counter(tuple(answer) for answer in answers(engine, requests))
    assert set(counts) <= set(law), "an answer that the target cannot give"
    assert_distributed_as([counts[key] for key in law], list(law.values()))


def _law(target: TargetExecutor, text: Sequence[int], length: int) -> dict[tuple[int, ...], float]:
    """Return the probability of every continuation of `length` tokens."""
    if not length:
        return {(): 1.0}
    tokens, probs = _next(target, text)
    return {
        (token, *rest): prob * of_rest
        for token, prob in zip(tokens, probs, strict=True)
        for rest, of_rest in _law(target, [*text, token], length - 1).items()
    }


def _next(target: TargetExecutor, text: Sequence[int]) -> tuple[list[int], npt.NDArray[np.float64]]:
    """Return the likeliest tokens and their probabilities."""
    rows = np.arange(len(text), dtype=np.int32)
    output = target.forward(
        StepBatch(
            tokens=np.array(text, np.int32),
            positions=rows,
            query_start=np.array([0, len(text)], np.int32),
            context_len=np.zeros(1, np.int32),
            page_table=np.arange(len(text), dtype=np.int32)[None],
            slots=rows,
            logit_rows=rows[-1:],
        )
    )
    logits = output.logits[0].astype(np.float64) / _TEMPERATURE
    tokens = np.argsort(-logits)[:_TOP_K]
    probs = np.exp(logits[tokens] - logits.max())
    return tokens.tolist(), probs / probs.sum()
