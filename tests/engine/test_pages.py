"""Laws of the page pool, found by a state machine that plays an engine with many sequences."""

from __future__ import annotations

from collections import Counter

import pytest
from dspark.engine.pages import PagePool
from dspark.errors import ConfigError
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

PAGE = 2


class Held:
    """A sequence of the model: its tokens, its pages, its chain."""

    def __init__(self, tokens: list[int], pages: list[int], node: int, registered: int) -> None:
        self.tokens, self.pages, self.node, self.registered = tokens, pages, node, registered


class PoolMachine(RuleBasedStateMachine):
    """Sequences come with prompts from few tokens, so that prefixes meet; `contents` plays the cache itself."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(num_pages=7, page_size=PAGE)
        self.live: list[Held] = []
        self.contents: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to the end of that page
        self.root = self.pool.root("target")

    @rule(target=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def arrive(self, tokens: list[int]) -> object:
        match = self.pool.match_prefix(tokens, root=self.root, max_pages=(len(tokens) - 1) // PAGE)
        for index, page in enumerate(match.pages):
            assert self.contents[page] == tuple(tokens[: (index + 1) * PAGE]), (
                "a reused page holds other tokens"
            )
        pages = self.pool.allocate(self.pool.pages_for(len(tokens)) - len(match.pages))
        if pages is None:
            self.pool.release(match.pages)
            return multiple()
        held = Held(list(tokens), [*match.pages, *pages], match.node, len(match.pages))
        for index in range(len(match.pages), len(held.pages)):
            self.contents[held.pages[index]] = tuple(tokens[: (index + 1) * PAGE])
        self.live.append(held)
        return held

    @rule(sequence=sequences)
    def register(self, sequence: Held) -> None:
        while (sequence.registered + 1) * PAGE <= len(sequence.tokens):
            start = sequence.registered * PAGE
            sequence.node = self.pool.register(
                sequence.pages[sequence.registered],
                parent=sequence.node,
                tokens=sequence.tokens[start : start + PAGE],
            )
            sequence.registered += 1

    @rule(sequence=consumes(sequences))
    def leave(self, sequence: Held) -> None:
        self.pool.release(sequence.pages)
        self.live.remove(sequence)

    @precondition(lambda self: not self.live)
    @rule()
    def everything_is_back(self) -> None:
        assert self.pool.num_available == self.pool.num_pages

    @invariant()
    def counts_agree(self) -> None:
        users = Counter(page for held in self.live for page in held.pages)
        assert self.pool.num_held == len(users)
        assert all(0 <= page < self.pool.num_pages for page in users)

    @invariant()
    def a_shared_page_was_shared_by_equal_prefixes(self) -> None:
        seen: dict[int, tuple[int, ...]] = {}
        for held in self.live:
            for index, page in enumerate(held.pages):
                prefix = tuple(held.tokens[: (index + 1) * PAGE])
                assert seen.setdefault(page, prefix) == prefix


TestPagePool = PoolMachine.TestCase
TestPagePool.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_all_or_nothing() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    assert pool.allocate(4) is None
    assert pool.num_available == 3
    assert len(set(pool.allocate(3) or [])) == 3


def test_the_end_of_a_chain_is_evicted_before_its_head() -> None:
    pool = PagePool(num_pages=3, page_size=1)
    root = pool.root("target")
    pages = pool.allocate(3)
    assert pages is not None
    node = root
    for page, token in zip(pages, (5, 6, 7), strict=True):
        node = pool.register(page, parent=node, tokens=[token])
    pool.release(pages)
    assert pool.allocate(1) == [pages[2]]
    assert pool.match_prefix([5, 6, 7], root=root, max_pages=3).pages == tuple(pages[:2])


def test_kinds_do_not_share_pages() -> None:
    pool = PagePool(num_pages=2, page_size=1)
    (page,) = pool.allocate(1) or []
    pool.register(page, parent=pool.root("drafter"), tokens=[5])
    assert pool.match_prefix([5], root=pool.root("target"), max_pages=1).pages == ()
    assert pool.match_prefix([5], root=pool.root("drafter"), max_pages=1).pages == (page,)


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0)])
def test_a_pool_of_nothing_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ConfigError, match="got 0"):
        PagePool(num_pages=num_pages, page_size=page_size)
