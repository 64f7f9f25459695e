"""The bodies of `DSparkVerify` and `DSparkSchedule` are the plain operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from dspark_plugins.reference.sampling import draw, truncated_weights
from dspark_plugins.reference.schedule import schedule
from dspark_plugins.reference.verify import verify

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from dspark_build.export_schedule import schedule_function
from dspark_build.export_verify import verify_function, verify_inputs
from support.onnx_models import operation, run_operation

CHAINS = [[-1], [-1, 0, 1, 2], [-1, 0], [], [-1, 0, 1], [-1, 0, 1, 2, 3]]
TREES = [[-1, 0, 0, 0], [-1, 0, 0, 1, 1, 2, 3], [-1], [], [-1, 0, 0, 1, 2, 2, 5, 0, 7], [-1, 0, 1, 1]]
MAX_DEPTH = 4


def _arguments(trees: Sequence[Sequence[int]], vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    """Return the inputs of every form; about half of the drafts are what the target itself would say."""
    rng = np.random.default_rng(seed)
    n, rows = len(trees), sum(map(len, trees))
    feeds = {
        "logits": rng.normal(size=(rows + 2, vocab_size)).astype(np.float32) * 2,
        "query_start": np.cumsum([0, *map(len, trees)]).astype(np.int32),
        "parents": np.array([p for tree in trees for p in tree] + [0, 0], np.int32),
        "positions": rng.integers(1, 90, n).astype(np.int32),
        "seeds": rng.integers(-(2**63), 2**63 - 1, n),
        "temperature": rng.choice([0.0, 0.5, 1.0, 1.6], n).astype(np.float32),
        "top_k": rng.choice([0, 0, 5], n).astype(np.int32),
        "top_p": rng.choice([1.0, 0.9], n).astype(np.float32),
        "min_p": rng.choice([0.0, 0.02], n).astype(np.float32),
        "coupled": rng.integers(0, 2, n).astype(np.int32),
    }
    # A reduced vocabulary: most tokens have an entry.
    kept = np.flatnonzero(rng.random(vocab_size) < 0.8) if vocab_size > 1 else np.arange(1)
    inverse = np.full(vocab_size, -1, np.int32)
    inverse[kept] = np.arange(len(kept))
    feeds["target_to_draft"] = inverse
    tokens = np.full(rows + 2, 2**30, np.int32)
    probs = np.zeros((rows, max(len(kept), 1)), np.float32)
    for i, tree in enumerate(trees):
        start = feeds["query_start"][i]
        for row, parent in enumerate(tree):
            above = int(start + max(parent, 0))
            weights = np.exp(feeds["logits"][above][kept].astype(np.float64)) * rng.uniform(0.3, 1, len(kept))
            probs[start + row] = weights / weights.sum()
            tokens[start + row] = rng.choice(kept, p=weights / weights.sum())
            if row and rng.random() < 0.5:
                tokens[start + row] = _own_choice(feeds, i, above, _depth(tree, row) - 1)
    feeds["tokens"] = tokens
    feeds["draft_probs"] = probs
    feeds["prob_rows"] = np.where(np.arange(rows + 2) % 4 == 3, -1, np.arange(rows + 2)).astype(np.int32)
    return feeds


def _depth(tree: Sequence[int], row: int) -> int:
    return 0 if row == 0 else 1 + _depth(tree, tree[row])


def _own_choice(feeds: dict[str, np.ndarray], i: int, row: int, depth: int) -> int:
    """Return what the target draws with the tokens' own noise."""
    params = [torch.from_numpy(feeds[name][i : i + 1]) for name in ("temperature", "top_k", "top_p", "min_p")]
    log_weights, _ = truncated_weights(torch.from_numpy(feeds["logits"][row : row + 1]), *params)
    return int(
        draw(
            log_weights,
            torch.arange(log_weights.shape[1]),
            seed=torch.from_numpy(feeds["seeds"][i : i + 1]),
            position=torch.from_numpy(feeds["positions"][i : i + 1]).long() + depth,
            coupled=torch.ones(1, dtype=torch.bool),
            purpose=3,
        )
    )


def _forms(feeds: dict[str, np.ndarray], **form: bool) -> tuple[Any, Any]:
    """Return body and plain operation, from feeds to accepted, path and next token."""
    names = verify_inputs(**form)
    outputs: dict[str, Any] = {
        "accepted": ("i32", ("R",)),
        "path": ("i32", ("R", MAX_DEPTH)),
        "next_token": ("i32", ("R",)),
    }
    body = operation(
        verify_function(**form),
        {name: feeds[name] for name in names},
        outputs,
        max_depth=MAX_DEPTH,
        **{name: int(value) for name, value in form.items()},
    )
    order = ("logits", "tokens", "query_start", "parents", "draft_probs", "prob_rows", "target_to_draft")
    rest = ("positions", "seeds", "temperature", "top_k", "top_p", "min_p", "coupled")

    def plain(given: dict[str, np.ndarray]) -> list[np.ndarray]:
        values = [torch.from_numpy(given[name]) if name in names else None for name in (*order, *rest)]
        return [one.numpy() for one in verify(*values, MAX_DEPTH)]  # type: ignore[arg-type]

    return body, plain


@pytest.mark.parametrize(
    ("tree", "probs", "mapped"),
    [
        (False, False, False),
        (False, True, True),
        (True, False, False),
        (True, True, True),
    ],
)
@pytest.mark.parametrize("vocab_size", [7, 111])
def test_verification_is_that_of_the_plain_operation(
    tree: bool, probs: bool, mapped: bool, vocab_size: int
) -> None:
    accepted: list[int] = []
    body, plain = _forms(_arguments(TREES, vocab_size, 0), tree=tree, probs=probs, mapped=mapped)
    for seed in range(6):
        feeds = _arguments(TREES if tree else CHAINS, vocab_size, seed)
        if seed == 5:
            feeds["logits"][2, 1] = np.nan
        got = body(feeds)
        for mine, theirs in zip(got, plain(feeds), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        accepted += got[0].tolist()
    assert max(accepted) >= 2 and 0 in accepted


@pytest.mark.parametrize("tree", [False, True])
def test_drafts_over_the_whole_vocabulary_keep_their_probabilities(tree: bool) -> None:
    feeds = _arguments(TREES if tree else CHAINS, 33, 1)
    rng = np.random.default_rng(0)
    shares = rng.exponential(size=(len(feeds["draft_probs"]), 33)).astype(np.float32)
    feeds["draft_probs"] = shares / shares.sum(1, keepdims=True)
    feeds["temperature"][:] = 1
    feeds["coupled"][:] = 0
    body, plain = _forms(feeds, tree=tree, probs=True, mapped=False)
    seen = set()
    for seed in range(12):
        feeds["seeds"][:] = np.arange(len(feeds["seeds"])) + 100 * seed
        if seed == 8:
            feeds["logits"][3, 1] = np.nan
        found = body(feeds)
        for mine, theirs in zip(found, plain(feeds), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        seen |= set(found[0].tolist())
    assert len(seen) > 2


@pytest.mark.parametrize(("num_sequences", "block_size"), [(0, 3), (1, 1), (1, 7), (7, 5), (111, 3)])
@pytest.mark.parametrize("budget", [-1, 0, 3, 1000])
def test_the_schedule_is_that_of_the_plain_operation(
    num_sequences: int, block_size: int, budget: int
) -> None:
    rng = np.random.default_rng(budget + 2)
    for step in (4, 7):
        budgets = np.array([2, 2], np.int32)
        budgets[step % 2] = budget
        confidence = (0.5 ** rng.integers(0, 3, (num_sequences, block_size))).astype(np.float32)
        confidence[-1:, -1] = np.nan
        feeds = {
            "confidence": confidence,
            "num_drafts": rng.integers(-1, block_size + 1, num_sequences).astype(np.int32),
            "budgets": budgets,
            "step": np.array([step], np.int32),
            "seconds": (1 + rng.random(num_sequences * block_size + 1).cumsum() * 0.02).astype(np.float32),
        }
        outputs: dict[str, Any] = {
            "verify_len": ("i32", ("R",)),
            "query_start": ("i32", ("R1",)),
            "row_source": ("i32", ("T",)),
            "new_budgets": ("i32", (2,)),
        }
        got = run_operation(schedule_function(), feeds, outputs)
        given = [torch.from_numpy(value) for value in feeds.values()]
        wanted = schedule(given[0], given[1], given[2], step, given[4])
        for mine, plain in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(mine, plain.numpy())
