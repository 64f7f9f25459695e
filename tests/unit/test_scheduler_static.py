"""Policies that need no cost curve."""

from __future__ import annotations

import numpy as np
import pytest
from dspark.errors import ConfigError
from dspark.scheduling.scheduler import Scheduler, make_scheduler


def verify(
    scheduler: Scheduler, num_drafts: list[int], confidence: list[list[float]] | None = None
) -> list[int]:
    logits = None
    if confidence is not None:
        c = np.asarray(confidence)
        with np.errstate(divide="ignore"):
            logits = (np.log(c) - np.log1p(-c)).astype(np.float32)
    n = len(num_drafts)
    return scheduler.verify_len(
        sequence_ids=np.arange(n),
        confidence_logits=logits,
        num_drafts=np.array(num_drafts, np.int32),
        sampled=np.zeros(n, bool),
        altered=np.zeros(n, bool),
        prefill_tokens=0,
    ).tolist()


def test_none_neither_drafts_nor_verifies() -> None:
    scheduler = make_scheduler("none", block_size=5, has_confidence=True)
    caps = np.array([5, 2], np.int32)
    assert scheduler.draft_len(sequence_ids=np.arange(2), caps=caps, prefill_tokens=0).tolist() == [0, 0]
    assert verify(scheduler, [5, 2]) == [0, 0]


def test_fixed_verifies_the_smaller_of_k_and_what_was_drafted() -> None:
    scheduler = make_scheduler("fixed:3", block_size=5, has_confidence=True)
    assert verify(scheduler, [5, 2, 0]) == [3, 2, 0]
    caps = np.array([5, 2, 0], np.int32)
    assert scheduler.draft_len(sequence_ids=np.arange(3), caps=caps, prefill_tokens=9).tolist() == [3, 2, 0]


def test_threshold_keeps_the_leading_run_of_confident_drafts() -> None:
    scheduler = make_scheduler("threshold:0.5", block_size=4, has_confidence=True)
    confidence = [[0.9, 0.6, 0.4, 0.9], [0.4, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9]]
    assert verify(scheduler, [4, 4, 2], confidence) == [2, 0, 2]


def test_threshold_without_confidence_keeps_every_draft() -> None:
    scheduler = make_scheduler("threshold:0.9", block_size=4, has_confidence=False)
    assert verify(scheduler, [4, 1, 0]) == [4, 1, 0]


def test_threshold_ends_the_run_at_a_confidence_that_is_not_a_number() -> None:
    scheduler = make_scheduler("threshold:0", block_size=3, has_confidence=True)
    assert verify(scheduler, [3], [[0.9, np.nan, 0.9]]) == [1]


def test_threshold_takes_a_whole_block_that_was_looked_up() -> None:
    scheduler = make_scheduler("threshold:0.9", block_size=3, has_confidence=True)
    assert verify(scheduler, [2, 3], [[np.nan] * 3, [0.1] * 3]) == [2, 0]


@pytest.mark.parametrize(
    "text", ["", "fast", "fixed", "fixed:", "fixed:-1", "fixed:1.5", "threshold", "threshold:1.1",
             "threshold:-0.1", "threshold:nan", "threshold:x", "none:1", "prefix:2", "FIXED:2"]
)  # fmt: skip
def test_an_unusable_policy_is_refused_by_name_and_value(text: str) -> None:
    with pytest.raises(ConfigError, match="policy: got .*allowed is") as error:
        make_scheduler(text, block_size=5, has_confidence=True)
    assert repr(text) in str(error.value)
