"""The page pool: which cache page belongs to whom, and which full pages can be used again.

Plain integers and dictionaries. It knows nothing of tensors: target and drafter caches use the same page ids, so a
page that is found again brings the target's K/V and the drafter's context together.

A full page is known by the chain of pages before it and its own tokens. Chains start at a *root*: sequences whose
drafter context is kept and sequences without one must not share pages, so each kind has a root of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from dspark.errors import ConfigError

__all__ = ["PagePool", "PrefixMatch"]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Pages found again for the head of a prompt; they are already held for the caller."""

    pages: tuple[int, ...]
    node: int  # chain position after the last of them; the root when none was found


@dataclass(frozen=True, slots=True)
class _Node:
    """A registered full page: `parent` is the chain position before it."""

    identity: int
    parent: int
    tokens: tuple[int, ...]


class PagePool:
    """Allocates, shares, and evicts pages.

    A page is *held* (reference count > 0), *kept* (count 0, but registered and still findable) or *free*. Kept pages
    are given up least recently used first when free ones run out.

    Raises:
        ConfigError: when there is no page at all, or pages of no tokens.
    """

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages: got {num_pages}, allowed is at least 1; give the cache more bytes")
        if page_size < 1:
            raise ConfigError(f"page_size: got {page_size}, allowed is at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free: list[int] = list(range(num_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._references: list[int] = [0] * num_pages
        self._node_of_page: dict[int, _Node] = {}
        self._page_of_key: dict[tuple[int, tuple[int, ...]], int] = {}
        self._next_identity = 0
        self._roots: dict[str, int] = {}

    # -- what is there --------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could give right now."""
        return len(self._free) + len(self._kept)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def root(self, kind: str) -> int:
        """Return the chain position before the first page of sequences of this kind."""
        if kind not in self._roots:
            self._roots[kind] = self._new_identity()
        return self._roots[kind]

    # -- allocate / release ---------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        """Hold `count` pages, or none at all and return None."""
        if count > self.num_available:
            return None
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give up one hold on each page. Registered pages stay findable until their room is needed."""
        # Last page first: the end of a chain is evicted before what it hangs on.
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} is released but not held"
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._node_of_page:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    # -- prefix reuse ---------------------------------------------------------------------------------------------

    def match_prefix(self, token_ids: Sequence[int], *, root: int, max_pages: int) -> PrefixMatch:
        """Hold and return the longest run of known full pages at the head of `token_ids`."""
        node, pages = root, []
        for index in range(max_pages):
            chunk = tuple(token_ids[index * self.page_size : (index + 1) * self.page_size])
            page = self._page_of_key.get((node, chunk))
            if page is None:
                break
            if self._references[page] == 0:
                del self._kept[page]
            self._references[page] += 1
            pages.append(page)
            node = self._node_of_page[page].identity
        return PrefixMatch(tuple(pages), node)

    def register(self, page: int, *, parent: int, tokens: Sequence[int]) -> int:
        """Make a full, held page findable behind `parent`; return the chain position after it.

        When another page with the same tokens is known already, that one stays the findable one.
        """
        key = (parent, tuple(tokens))
        assert len(key[1]) == self.page_size and self._references[page] > 0
        known = self._page_of_key.get(key)
        if known is not None:
            return self._node_of_page[known].identity
        node = _Node(self._new_identity(), *key)
        self._page_of_key[key] = page
        self._node_of_page[page] = node
        return node.identity

    # -- inside ---------------------------------------------------------------------------------------------------

    def _new_identity(self) -> int:
        self._next_identity += 1
        return self._next_identity

    def _evict(self) -> int:
        page, _ = self._kept.popitem(last=False)
        node = self._node_of_page.pop(page)
        del self._page_of_key[(node.parent, node.tokens)]
        return page
