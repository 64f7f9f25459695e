"""Laws of prompt look-up: what is proposed is the continuation of the longest suffix seen before."""

from __future__ import annotations

import numpy as np
import pytest
from dspark.drafters.interface import DraftInput
from dspark.drafters.ngram import NgramDrafter
from dspark.errors import ConfigError
from dspark.request import SamplingParams
from dspark.sampling.transforms import TokenSampler
from hypothesis import given, settings
from hypothesis import strategies as st

SAMPLER = TokenSampler(SamplingParams(temperature=0.0), seed=0, prompt_ids=(), vocab_size=100, eos_ids=())


def propose(
    drafter: NgramDrafter, tokens: list[int], *, sequence_id: int = 0, max_drafts: int = 99
) -> list[int]:
    item = DraftInput(
        sequence_id=sequence_id, token_ids=tokens, max_drafts=max_drafts, sampler=SAMPLER, pages=()
    )
    block = drafter.propose([item])
    assert block.distributions is None and block.confidence_logits is None
    return block.tokens[0, : block.num_tokens[0]].tolist()


def longest_match(tokens: list[int], shortest: int, longest: int) -> tuple[int, int]:
    """Return (place behind, length) of the longest, then most recent earlier occurrence of a suffix, by brute
    force."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for place in range(len(tokens) - 1, n - 1, -1):
            if tokens[place - n : place] == tokens[-n:]:
                return place, n
    return 0, 0


def expected(tokens: list[int], place: int, n: int, block_size: int) -> list[int]:
    text = list(tokens)
    for j in range(min(block_size, max(2 * (n - 1), 1))):
        text.append(text[place + j])
    return text[len(tokens) :]


TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=120)


@given(tokens=TEXTS, shortest=st.integers(1, 4), extra=st.integers(0, 5), block_size=st.integers(1, 9))
@settings(deadline=None, max_examples=200)
def test_fresh_proposal_continues_the_longest_then_most_recent_match(
    tokens: list[int], shortest: int, extra: int, block_size: int
) -> None:
    drafter = NgramDrafter(block_size=block_size, min_match=shortest, max_match=shortest + extra)
    place, n = longest_match(tokens, shortest, shortest + extra)
    assert propose(drafter, tokens) == (expected(tokens, place, n, block_size) if n else [])


@given(tokens=TEXTS, steps=st.lists(st.integers(1, 50), max_size=8), start=st.integers(1, 60))
@settings(deadline=None, max_examples=200)
def test_growing_text_proposes_what_a_fresh_look_up_would_or_holds_back(
    tokens: list[int], steps: list[int], start: int
) -> None:
    drafter = NgramDrafter(block_size=6, min_match=2, max_match=5)
    length = start
    for step in [*steps, 1]:
        text = tokens[:length]
        got = propose(drafter, text)
        place, n = longest_match(text, 2, 5)
        assert got in ([], expected(text, place, n, 6) if n else [])
        length += step


def test_many_new_tokens_are_indexed_like_few() -> None:
    rng = np.random.default_rng(3)
    text = rng.integers(0, 4, 400).tolist()
    bulk, single = NgramDrafter(), NgramDrafter()
    propose(bulk, text)
    for length in range(1, len(text) + 1):
        propose(single, text[:length])
    assert bulk._indexes[0].places == single._indexes[0].places
    assert bulk._indexes[0].tail == single._indexes[0].tail


def test_a_loop_is_continued_for_a_whole_block() -> None:
    assert propose(NgramDrafter(), [9, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2]) == [1, 2, 1, 2, 1, 2, 1, 2]


def test_most_recent_of_equal_matches_wins() -> None:
    assert propose(NgramDrafter(), [1, 2, 3, 10, 0, 1, 2, 3, 20, 0, 0, 1, 2, 3])[0] == 20


def test_longer_match_beats_more_recent() -> None:
    assert propose(NgramDrafter(), [7, 1, 2, 3, 10, 0, 1, 2, 3, 20, 7, 1, 2, 3])[0] == 10


def test_text_that_fools_the_look_up_is_left_alone_and_found_again() -> None:
    drafter = NgramDrafter()
    text = [1, 2, 3]
    proposals = []
    for token in range(10, 30):  # the same three tokens, each time followed by another one
        text = [*text, token, 1, 2, 3]
        proposals.append(len(propose(drafter, text)))
    assert proposals[0] > 0 and sum(proposals[-10:]) == 0
    for _ in range(12):
        text = [*text, 50, 51, 52, 53]
        last = propose(drafter, text)
    assert last == [50, 51, 52, 53, 50, 51, 52, 53]


def test_preempted_sequence_goes_on_where_it_was() -> None:
    drafter = NgramDrafter()
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    first = propose(drafter, text)
    assert propose(drafter, text) == first == [4, 5, 6, 1]
    assert propose(drafter, [*text, 4]) == [5, 6, 1, 2, 3, 4]


def test_reused_sequence_id_never_proposes_from_the_old_text() -> None:
    drafter = NgramDrafter()
    propose(drafter, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12] * 3)
    assert propose(drafter, [50, 51, 52, 53, 1, 2, 3]) == []
    assert propose(drafter, [60, 1, 2, 3, 61, 62, 1, 2, 3])[:2] == [61, 62]


def test_shorter_text_under_the_same_id_is_indexed_anew() -> None:
    drafter = NgramDrafter()
    text = [1, 2, 3, 4, 1, 2, 3]
    propose(drafter, [*text, 4, 1, 2, 3])
    assert propose(drafter, text) == [4, 1, 2, 3]


def test_release_drops_the_index() -> None:
    drafter = NgramDrafter()
    propose(drafter, [1, 2, 3, 1, 2, 3], sequence_id=5)
    drafter.release(5)
    drafter.release(5)
    assert drafter._indexes == {}


def test_sequences_do_not_mix() -> None:
    drafter = NgramDrafter()
    propose(drafter, [1, 2, 3, 4, 5], sequence_id=0)
    assert propose(drafter, [9, 1, 2, 3], sequence_id=1) == []


@pytest.mark.parametrize("max_drafts", [0, 1, 3])
def test_no_more_drafts_than_wanted(max_drafts: int) -> None:
    proposal = propose(NgramDrafter(), [1, 2, 3, 4, 5] * 4, max_drafts=max_drafts)
    assert proposal == [1, 2, 3, 4, 5][:max_drafts]


def test_a_step_indexes_only_the_new_tokens() -> None:
    class Counting(list[int]):
        looked_at = 0

        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            found = list.__getitem__(self, at)
            self.looked_at += len(found) if isinstance(at, slice) else 1
            return found

    drafter = NgramDrafter()
    text = np.random.default_rng(0).integers(0, 90, 5000).tolist()
    propose(drafter, text)
    longer = Counting([*text, 1, 2, 3])
    propose(drafter, longer)
    assert 0 < longer.looked_at < 200


@pytest.mark.parametrize(
    ("sizes", "name"),
    [({"block_size": 0}, "block_size"), ({"min_match": 0}, "min_match"), ({"min_match": 9}, "min_match")],
)
def test_sizes_out_of_order_are_refused(sizes: dict[str, int], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        NgramDrafter(**sizes)
