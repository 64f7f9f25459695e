"""Trees where they were measured to pay, chains elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from dspark.scheduling.tree_choice import TreeChoice


def share_of_trees(choice: TreeChoice, num_sequences: int, *, trees_over_chains: float, steps: int) -> float:
    """Serve steps whose tokens vary by half; return how often trees were drafted in the second half."""
    rng = np.random.default_rng(0)
    chosen = []
    for _ in range(steps):
        trees = choice.next_is_tree(num_sequences)
        chosen.append(trees)
        num_tokens = num_sequences * int(rng.integers(1, 5))
        step_s = 0.010 * float(np.exp(0.1 * rng.normal())) / (trees_over_chains if trees else 1.0)
        choice.observe(num_sequences=num_sequences, trees=trees, num_tokens=num_tokens, step_s=step_s)
    return float(np.mean(chosen[steps // 2 :]))


def test_it_starts_with_what_was_measured_on_a_processor() -> None:
    choice = TreeChoice()
    assert choice.next_is_tree(1)
    assert not any(choice.next_is_tree(num) for num in (2, 4, 64))


@pytest.mark.parametrize("num_sequences", [1, 2, 16])
@pytest.mark.parametrize("trees_over_chains", [0.6, 1.6])
def test_what_gives_more_is_found_whatever_was_believed(num_sequences: int, trees_over_chains: float) -> None:
    share = share_of_trees(TreeChoice(), num_sequences, trees_over_chains=trees_over_chains, steps=20_000)
    assert share > 0.95 if trees_over_chains > 1.0 else share < 0.05


def test_what_is_behind_is_tried_rarely() -> None:
    share = share_of_trees(TreeChoice(), 8, trees_over_chains=0.9, steps=4000)
    assert 0.0 < share < 0.01


def test_sizes_do_not_learn_from_each_other() -> None:
    choice = TreeChoice()
    share_of_trees(choice, 16, trees_over_chains=1.6, steps=20_000)
    assert not choice.next_is_tree(2)


@pytest.mark.parametrize("step_s", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_make_no_sense_are_ignored(step_s: float) -> None:
    choice = TreeChoice()
    for trees in (False, True):
        choice.observe(num_sequences=1, trees=trees, num_tokens=1, step_s=step_s)
    assert choice.next_is_tree(1)
