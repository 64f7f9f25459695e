"""Context rows that wait for the next block: all of them are written, in time, and the newest of a slot."""

from __future__ import annotations

import numpy as np
from dspark.drafters.waiting_rows import WaitingRows


def rows(waiting: WaitingRows, slots: list[int], value: float) -> None:
    at = np.array(slots, np.int32)
    waiting.add(np.full((len(slots), 3), value, np.float32), at + 100, at)


def test_rows_come_back_together_and_once() -> None:
    waiting = WaitingRows()
    assert waiting.take() is None
    rows(waiting, [5, 2], 1.0)
    rows(waiting, [9], 2.0)
    taken = waiting.take()
    assert taken is not None
    features, positions, slots = taken
    assert slots.tolist() == [5, 2, 9] and positions.tolist() == [105, 102, 109]
    assert features[:, 0].tolist() == [1.0, 1.0, 2.0]
    assert waiting.take() is None and not waiting.full


def test_of_rows_for_one_slot_the_last_is_written() -> None:
    waiting = WaitingRows()
    for value, slots in ((1.0, [3, 4]), (2.0, [4, 7]), (3.0, [3])):
        rows(waiting, slots, value)
    taken = waiting.take()
    assert taken is not None
    features, positions, slots = taken
    assert dict(zip(slots.tolist(), features[:, 0].tolist(), strict=True)) == {3: 3.0, 4: 2.0, 7: 2.0}
    assert (positions == slots + 100).all()


def test_many_rows_do_not_wait() -> None:
    waiting = WaitingRows()
    for step in range(16):
        assert not waiting.full
        rows(waiting, list(range(16 * step, 16 * step + 16)), 0.0)
    assert waiting.full
