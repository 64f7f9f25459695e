"""Verification of chains and trees: the kernel is the plain version, and the plain version keeps the target's law."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from dspark.sampling.gumbel import token_gumbel
from dspark_plugins import ops
from dspark_plugins.ops.launchers.verify import launch_verify
from dspark_plugins.reference.sampling import ACCEPT, REPLACE
from dspark_plugins.reference.verify import Drafted, Noise, Rows, Tree, walk_rejection
from torch import Tensor

TREES = [
    [-1],
    [-1, 0, 1, 2],
    [-1, 0, 0, 0],
    [-1, 0, 0, 1, 1, 2, 3],
    [],
    [-1, 0, 0, 1, 2, 2, 5, 0, 7],
]
MODES = {
    "greedy": {"temperature": 0.0},
    "rejection": {},
    "coupled": {"coupled": 1},
    "cold": {"temperature": 0.4},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "all, coupled": {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "coupled": 1},
}


def depth_of(tree: Sequence[int], row: int) -> int:
    return 0 if row == 0 else 1 + depth_of(tree, tree[row])


def arguments(
    trees: Sequence[Sequence[int]],
    vocab_size: int,
    mode: str | Sequence[str],
    *,
    chains: bool = False,
    reduced: bool = False,
    one_hot: bool = False,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Tensor | int | None]:
    """Return the op's arguments: drafts are drawn near the target, so that paths are long and short."""
    rng = np.random.default_rng(seed)
    num_rows, n = sum(map(len, trees)), len(trees)
    modes = [MODES[mode] if isinstance(mode, str) else MODES[mode[i % len(mode)]] for i in range(n)]
    logits = torch.from_numpy(rng.normal(size=(num_rows + padding, vocab_size)).astype(np.float32) * 1.5).to(
        dtype
    )
    logits[num_rows:] = float("nan")
    draft_ids = (
        np.sort(rng.choice(vocab_size, max(vocab_size * 2 // 3, 1), replace=False)) if reduced else None
    )
    entries = np.arange(vocab_size) if draft_ids is None else draft_ids
    tokens = np.full(num_rows + padding, 2**30, np.int32)
    probs = np.zeros((num_rows, len(entries)), np.float32)
    rows = np.full(num_rows + padding, -1, np.int32)
    starts = np.concatenate([[0], np.cumsum([len(tree) for tree in trees])]).astype(np.int32)
    for i, tree in enumerate(trees):
        start = starts[i]
        for row, parent in enumerate(tree):
            weights = np.exp(logits[start + max(parent, 0)].double().numpy()[entries]) * rng.uniform(
                0.3, 1, len(entries)
            )
            probs[start + row] = weights / weights.sum()
            at = int(rng.choice(len(entries), p=weights / weights.sum()))
            if modes[i].get("temperature") == 0.0 and rng.random() < 0.7:
                at = int(weights.argmax())
            if "coupled" in modes[i] and rng.random() < 0.7:
                noise = token_gumbel(entries, seed=i - 2, position=50 + i + depth_of(tree, row) - 1)
                at = int((np.log(weights) / modes[i].get("temperature", 1.0) + noise).argmax())
            tokens[start + row] = entries[at]
            rows[start + row] = -1 if row % 4 == 3 else start + row
    inverse = None
    if draft_ids is not None:
        inverse = torch.full((vocab_size,), -1, dtype=torch.int32)
        inverse[torch.from_numpy(draft_ids)] = torch.arange(len(draft_ids), dtype=torch.int32)
    parents = torch.tensor([parent for tree in trees for parent in tree] + [9] * padding, dtype=torch.int32)
    return [
        *(logits, torch.from_numpy(tokens), torch.from_numpy(starts), None if chains else parents),
        *(None if one_hot else torch.from_numpy(probs), None if one_hot else torch.from_numpy(rows), inverse),
        *(torch.arange(50, 50 + n, dtype=torch.int32), torch.arange(n) - 2),
        torch.tensor([m.get("temperature", 1.0) for m in modes]),
        torch.tensor([m.get("top_k", 0) for m in modes], dtype=torch.int32),
        torch.tensor([m.get("top_p", 1.0) for m in modes]),
        torch.tensor([m.get("min_p", 0.0) for m in modes]),
        torch.tensor([m.get("coupled", 0) for m in modes], dtype=torch.int32),
        4,
    ]


def check(given: list[Tensor | int | None]) -> tuple[Tensor, Tensor, Tensor]:
    out = launch_verify(*given)
    expected = ops.verify(*given)
    for mine, theirs in zip(out, expected, strict=True):
        assert torch.equal(mine, theirs)
    return out


@pytest.mark.parametrize("mode", MODES)
def test_trees_in_every_mode(mode: str) -> None:
    accepted, _, _ = check(arguments(TREES, 111, mode))
    assert accepted.max() > 0


CHAINS = [list(range(-1, n)) for n in (4, 0, 2, 3, 1, 6)]  # the last is longer than what is looked at


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_chains(mode: str) -> None:
    accepted, _, _ = check(arguments(CHAINS, 111, mode, chains=True))
    assert accepted.max() > 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", ["rejection", "cold", "all"])
def test_chains_are_verified_as_blocks(mode: str, seed: int) -> None:
    for vocab_size, reduced in ((7, False), (111, False), (999, True), (1030, False)):
        given = arguments([*CHAINS, []], vocab_size, mode, chains=True, reduced=reduced, padding=3, seed=seed)
        accepted, path, _ = check(given)
        for i, count in enumerate(accepted.tolist()):
            assert path[i].tolist() == [*range(1, count + 1), *[-1] * (4 - count)]
    check(arguments(CHAINS, 7, mode, chains=True, one_hot=True, seed=seed))


def test_a_chain_ends_in_front_of_a_row_that_is_not_finite() -> None:
    """And only who accepts all up to it has no next token."""
    ends = set()
    for seed in range(12):
        given = arguments([[*range(-1, 4)]] * 3, 20, "rejection", chains=True, seed=seed)
        assert isinstance(given[0], Tensor) and isinstance(given[1], Tensor)
        given[8] = torch.arange(3) + 5 * seed
        given[0][0, given[1][1]] -= 1.0
        given[0][2] = given[0][5] = float("nan")
        accepted, _, next_token = check(given)
        assert accepted[0] <= 2 and (int(next_token[0]) == -1) == (accepted[0] == 2)
        assert (accepted[1], next_token[1]) == (0, -1) and next_token[2] >= 0
        ends.add(int(accepted[0]))
    assert len(ends) > 1


def test_a_draft_that_the_target_forbids_ends_a_chain() -> None:
    given = arguments([[*range(-1, 4)]] * 4, 20, "rejection", chains=True)
    logits, tokens = given[0], given[1]
    assert isinstance(logits, Tensor) and isinstance(tokens, Tensor)
    for i in range(4):
        logits[5 * i + 1, tokens[5 * i + 2]] = float("-inf")
    assert check(given)[0].max() <= 1


@pytest.mark.parametrize("vocab_size", [1, 7, 999, 1024, 2500])
def test_any_vocabulary(vocab_size: int) -> None:
    check(arguments(TREES, vocab_size, list(MODES)))


@pytest.mark.parametrize("mode", ["rejection", "all"])
def test_reduced_draft_vocabularies(mode: str) -> None:
    check(arguments(TREES, 90, mode, reduced=True))


def test_looked_up_drafts() -> None:
    check(arguments(TREES, 7, "rejection", one_hot=True))


def test_half_precision_logits() -> None:
    check(arguments(TREES, 111, list(MODES), dtype=torch.float16))


def test_every_mode_in_one_batch_with_padding_behind_it() -> None:
    check(arguments([TREES[3]] * len(MODES), 111, list(MODES), padding=5))


def test_the_depth_that_is_asked_for_is_not_passed() -> None:
    given = arguments([list(range(-1, 9))] * 4, 3, "greedy", chains=True)
    given[-1] = 2
    accepted, path, _ = check(given)
    assert accepted.max() == 2 and path.shape == (4, 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_ends_its_own_sequence(bad: float) -> None:
    given = arguments([TREES[1]] * 3, 111, "greedy")
    logits, tokens = given[0], given[1]
    assert isinstance(logits, Tensor) and isinstance(tokens, Tensor)
    tokens[5] = logits[4].argmax()
    logits[5, 3] = bad
    accepted, _, next_token = check(given)
    assert accepted[1] == 1 and next_token[1] == -1
    assert (next_token[[0, 2]] >= 0).all()


def test_equal_logits_go_to_the_lowest_token() -> None:
    given = arguments([[-1]], 2050, "greedy")
    assert isinstance(given[0], Tensor)
    given[0].zero_()
    given[0][0, 1500:] = 1.0
    assert check(given)[2].tolist() == [1500]


def test_top_k_among_equals_keeps_the_lowest() -> None:
    given = arguments([[-1]] * 12, 60, "top_k", chains=True)
    assert isinstance(given[0], Tensor)
    given[0].zero_()
    assert set(check(given)[2].tolist()) <= {0, 1, 2, 3}


def test_no_sequences() -> None:
    accepted, path, next_token = check(arguments([], 7, "greedy"))
    assert accepted.shape == next_token.shape == (0,) and path.shape == (0, 4)


def test_the_same_bits_again() -> None:
    given = arguments(TREES, 111, list(MODES))
    for first, second in zip(launch_verify(*given), launch_verify(*given), strict=True):
        assert torch.equal(first, second)


def test_the_op_is_registered_as_it_behaves() -> None:
    given = tuple(arguments(TREES[:3], 7, "rejection"))
    torch.library.opcheck(
        torch.ops.dspark.verify.default, given, test_utils=("test_schema", "test_faketensor")
    )


# The law


class FixedNoise(Noise):
    """Uniform numbers that the test chooses."""

    def __init__(self, accept: Sequence[float], replace: float) -> None:
        super().__init__(torch.zeros(1, dtype=torch.int64), 0)
        self._accept, self._replace = accept, replace

    def uniform(self, depth: int, purpose: int, lane: int = 0) -> Tensor:
        assert depth == 0 and purpose in (ACCEPT, REPLACE)
        chosen = self._accept[lane] if purpose == ACCEPT else self._replace
        return torch.tensor([chosen], dtype=torch.float64)


GRID = (np.arange(1000) + 0.5) / 1000
NEVER = 1 - 1e-12


def committed(logits: Tensor, children: Sequence[int], probs: Tensor) -> np.ndarray:
    """Return the law of the first committed token of a tree of siblings, by going through every uniform number."""
    vocab_size = logits.shape[1]
    zero, one = torch.zeros(1), torch.ones(1)
    rows = Rows(logits.expand(1 + len(children), -1), one[0], zero[0].int(), one[0], zero[0])
    tree = Tree([0, *children], [-1, *[0] * len(children)])
    prob_rows = torch.tensor([-1, *range(len(children))])
    drafted = Drafted(probs, prob_rows, None, 0, tree.tokens, vocab_size)

    def walk(accept: Sequence[float], replace: float = 0.5) -> tuple[list[int], int]:
        return walk_rejection(tree, rows, drafted, FixedNoise(accept, replace), 1)

    law, alive = np.zeros(vocab_size), 1.0
    for lane, token in enumerate(children):
        before, behind = [NEVER] * lane, [NEVER] * (len(children) - lane - 1)

        def is_taken(
            u: float, before: list[float] = before, behind: list[float] = behind, lane: int = lane
        ) -> bool:
            return walk([*before, u, *behind])[0] == [lane + 1]

        low, high = 0, len(GRID)  # acceptance falls with u: find where it ends
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if is_taken(float(GRID[middle])) else (low, middle)
        law[token] += alive * low / len(GRID)
        alive *= 1 - low / len(GRID)
    if alive > 0:
        everyone = [NEVER] * len(children)
        for u in GRID[::5]:
            law[walk(everyone, float(u))[1]] += alive * 5 / len(GRID)
    return law


@pytest.mark.parametrize("seed", range(3))
def test_siblings_drawn_independently_keep_the_targets_law(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet([0.7] * 3), rng.dirichlet([0.7] * 3)
    logits = torch.from_numpy(np.log(p).astype(np.float32))[None]
    probs = torch.from_numpy(np.stack([q, q]).astype(np.float32))
    law = sum(q[x] * q[y] * committed(logits, [x, y], probs) for x, y in product(range(3), repeat=2))
    np.testing.assert_allclose(law, p, atol=6e-3)


def test_siblings_drawn_without_replacement_keep_the_targets_law() -> None:
    p, q = np.array([0.4, 0.1, 0.3, 0.2]), np.array([0.1, 0.6, 0.1, 0.2])
    logits = torch.from_numpy(np.log(p).astype(np.float32))[None]
    law = np.zeros(4)
    for x in range(4):
        rest = np.where(np.arange(4) == x, 0, q) / (1 - q[x])
        probs = torch.from_numpy(np.stack([q, rest]).astype(np.float32))
        for y in np.flatnonzero(rest):
            law += q[x] * rest[y] * committed(logits, [x, int(y)], probs)
    np.testing.assert_allclose(law, p, atol=6e-3)


def test_siblings_that_share_one_distribution_wrongly_would_be_noticed() -> None:
    """Drawn without replacement but verified as independent: the law must be off, or the tests above are blind."""
    p, q = np.array([0.4, 0.1, 0.3, 0.2]), np.array([0.1, 0.6, 0.1, 0.2])
    logits = torch.from_numpy(np.log(p).astype(np.float32))[None]
    probs = torch.from_numpy(np.stack([q, q]).astype(np.float32))
    law = np.zeros(4)
    for x in range(4):
        rest = np.where(np.arange(4) == x, 0, q) / (1 - q[x])
        for y in np.flatnonzero(rest):
            law += q[x] * rest[y] * committed(logits, [x, int(y)], probs)
    assert np.abs(law - p).max() > 1e-2
