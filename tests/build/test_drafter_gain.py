"""A gain counts where it is more than chance: prompts are drawn anew, each with its blocks of both drafters."""

from __future__ import annotations

import math

import numpy as np
from dspark_build.block_records import BlockRecords
from dspark_build.drafter_gain import gain_of


def records(accepted: dict[str, list[int]]) -> BlockRecords:
    """Return the accepted drafts of each prompt's blocks."""
    flat = [(source, count) for source, counts in accepted.items() for count in counts]
    return BlockRecords(
        accepted=np.array([count for _, count in flat], np.int64),
        verify_len=np.full(len(flat), 7),
        confidence_logits=None,
        source=np.array([source for source, _ in flat], np.str_),
        block_size=7,
    )


def drawn(rng: np.random.Generator, *, shift: float, prompts: int = 40) -> BlockRecords:
    """Return blocks of prompts that differ much from each other, all of them easier by `shift`."""
    level = np.random.default_rng(1).uniform(0.5, 5.0, prompts)
    return records({str(i): rng.poisson(level[i] + shift, 60).tolist() for i in range(prompts)})


def test_the_mean_is_the_ratio_of_accepted_lengths_over_all_blocks():
    gain = gain_of(records({"a": [1, 1], "b": [3]}), records({"a": [2, 2, 2], "b": [4]}))
    assert math.isclose(gain.mean, (14 / 4) / (8 / 3) - 1.0)
    assert gain.num_prompts == 2 and gain.low <= gain.mean <= gain.high
    assert not gain.is_sure  # two prompts agree too often


def test_equal_drafters_are_told_apart_seldom_and_a_gain_mostly():
    rng = np.random.default_rng(0)
    same = [gain_of(drawn(rng, shift=0.0), drawn(rng, shift=0.0)) for _ in range(60)]
    assert sum(gain.is_sure or gain.is_loss for gain in same) <= 15  # six are expected
    better = [gain_of(drawn(rng, shift=0.0), drawn(rng, shift=0.3)) for _ in range(20)]
    assert sum(gain.is_sure for gain in better) >= 18 and not any(gain.is_loss for gain in better)
    worse = [gain_of(drawn(rng, shift=0.3), drawn(rng, shift=0.0)) for _ in range(20)]
    assert sum(gain.is_loss for gain in worse) >= 18 and not any(gain.is_sure for gain in worse)


def test_one_prompt_that_gains_much_is_not_enough():
    before = {str(i): [1, 2, 1, 2] for i in range(10)}
    gain = gain_of(records(before), records(before | {"0": [7, 7, 7, 7]}))
    assert gain.mean > 0.1 and not gain.is_sure


def test_prompts_that_one_of_them_failed_on_are_not_compared():
    gain = gain_of(records({"a": [1], "c": [7]}), records({"a": [1], "b": [7]}))
    assert gain.mean == 0.0 and gain.num_prompts == 1


def test_nothing_to_compare_is_no_gain():
    gain = gain_of(records({}), records({"a": [3]}))
    assert math.isnan(gain.mean) and not gain.is_sure and not gain.is_loss and "no prompt" in str(gain)


def test_the_same_blocks_give_the_same_interval():
    rng = np.random.default_rng(5)
    pair = drawn(rng, shift=0.0), drawn(rng, shift=0.1)
    assert gain_of(*pair) == gain_of(*pair)
    assert str(gain_of(*pair)).count("%") == 4
