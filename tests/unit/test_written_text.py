"""What a drafter's cache holds, against a memory of every row's whole text, while pages change hands."""

from __future__ import annotations

import numpy as np
from dspark.drafters.written_text import WrittenText
from hypothesis import given, settings
from hypothesis import strategies as st

NUM_PAGES = 6


class Memory:
    """For every slot the text up to and with the token whose row was last written there; an empty one for none."""

    def __init__(self, page_size: int) -> None:
        self.size = page_size
        self.text: list[tuple[int, ...]] = [()] * (NUM_PAGES * page_size)

    def slots(self, pages: list[int], start: int, stop: int) -> list[int]:
        return [pages[i // self.size] * self.size + i % self.size for i in range(start, stop)]

    def held(self, tokens: list[int], pages: list[int]) -> int:
        room = min(len(tokens), len(pages) * self.size)
        for index, slot in enumerate(self.slots(pages, 0, room)):
            if self.text[slot] != tuple(tokens[: index + 1]):
                return index
        return room


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rows_count_for_a_text_exactly_when_they_are_of_it(data: st.DataObject) -> None:
    page_size = data.draw(st.integers(1, 3))
    written = WrittenText(num_pages=NUM_PAGES, page_size=page_size)
    memory = Memory(page_size)
    texts = data.draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=2, max_size=4))
    for _ in range(data.draw(st.integers(1, 12))):
        sequence_id = data.draw(st.integers(0, len(texts) - 1))
        tokens = texts[sequence_id]
        needed = -(-len(tokens) // page_size)
        pages = data.draw(st.permutations(range(NUM_PAGES)))[:needed] if needed <= NUM_PAGES else []
        if not pages:
            continue
        table = np.array(pages, np.int32)
        held = written.held(sequence_id, tokens, table)
        assert held == memory.held(tokens, pages)
        drafts = data.draw(st.lists(st.integers(0, 1), max_size=2))
        text = [*tokens, *drafts][: len(pages) * page_size]
        stop = data.draw(st.integers(held, len(text)))
        written.forget(np.array(memory.slots(pages, held, stop), np.int32))
        for at, slot in enumerate(memory.slots(pages, held, stop), start=held):
            memory.text[slot] = tuple(text[: at + 1])
        if stop > held:
            written.record(sequence_id, text[:stop], table, start=held)
            for slot in memory.slots(pages, stop, -(-stop // page_size) * page_size):
                memory.text[slot] = ()  # rows behind, in the same page, count no more
        if data.draw(st.booleans()):
            texts[sequence_id] = [*tokens, data.draw(st.integers(0, 1))]
        if data.draw(st.booleans()):
            written.release(sequence_id)


def test_rows_that_were_written_and_not_recorded_count_for_nobody() -> None:
    written = WrittenText(num_pages=2, page_size=4)
    pages = np.array([1, 0], np.int32)
    assert written.held(7, [5, 6, 7, 8, 9], pages) == 0
    written.record(7, [5, 6, 7, 8, 9], pages, start=0)
    assert written.held(7, [5, 6, 7, 8, 9], pages) == 5
    assert written.held(8, [5, 6, 7, 8], pages) == 4
    written.forget(np.array([5], np.int32))  # the second token's
    assert written.held(7, [5, 6, 7, 8, 9], pages) == 1
