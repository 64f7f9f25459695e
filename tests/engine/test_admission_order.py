"""Who is served first: priorities, ageing, and long prompts that do not hold up running answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from dspark.engine.batching import AGEING_S
from dspark.engine.engine import Engine
from dspark.engine.step_report import StepReport
from dspark.request import Request, RequestOutput
from support.engines import make_engine, make_request
from support.tiny_models import write_tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), num_layers=2, max_context_len=2048)


def order_of_ends(engine: Engine, requests: list[Request]) -> list[int]:
    """Run the requests to their end; return their places in the order in which they ended."""
    ended: list[int] = []

    def emit(index: int) -> object:
        def take(output: RequestOutput) -> None:
            if output.final:
                ended.append(index)

        return take

    for index, request in enumerate(requests):
        engine.add(replace(request, emit=emit(index)))  # type: ignore[arg-type]
    while engine.step():
        pass
    return ended


def waiting(*, priority: int = 0, arrived_s: float = 0.0) -> Request:
    request = make_request([1, 2, 3], max_tokens=3)
    return replace(request, priority=priority, arrival_time_ns=int(1e18 + arrived_s * 1e9))


def test_equal_priorities_are_served_in_the_order_of_arrival(target: Path) -> None:
    requests = [waiting(arrived_s=index) for index in range(5)]
    assert order_of_ends(make_engine(target, max_batch_size=1), requests) == [0, 1, 2, 3, 4]


def test_higher_priorities_are_served_first(target: Path) -> None:
    requests = [waiting(priority=p) for p in (0, 2, 1, 2, -1)]
    assert order_of_ends(make_engine(target, max_batch_size=1), requests) == [1, 3, 2, 0, 4]


def test_a_request_that_waited_long_enough_overtakes_a_higher_priority(target: Path) -> None:
    old = waiting(priority=0, arrived_s=0.0)
    soon = waiting(priority=1, arrived_s=AGEING_S * 0.9)
    late = waiting(priority=1, arrived_s=AGEING_S * 1.1)
    assert order_of_ends(make_engine(target, max_batch_size=1), [old, soon, late]) == [1, 0, 2]


def test_a_long_prompt_comes_in_pieces_beside_running_answers_and_at_once_without(target: Path) -> None:
    engine = make_engine(target, max_step_tokens=512)
    chunks: list[tuple[bool, int]] = []

    def watch(report: StepReport) -> None:
        step = report.observation
        chunks.append((step is not None, 0 if step is None else step.prefill_tokens))

    engine.watcher = watch
    engine.add(make_request([5] * 1500, max_tokens=2))
    while engine.step():
        pass
    assert len(chunks) < 10, "nothing else runs: as fast as it goes"

    chunks.clear()
    engine.add(make_request([1, 2], max_tokens=400))
    for _ in range(20):
        engine.step()
    engine.add(make_request([7] * 1500, max_tokens=2))
    while engine.step():
        pass
    beside = [tokens for decoding, tokens in chunks if decoding and tokens]
    assert sum(beside) > 1000 and max(beside) < 512


def test_a_pool_without_room_for_two_never_deadlocks(target: Path) -> None:
    engine = make_engine(target, page_size=4)
    page_bytes = engine.target.cache_page_bytes(4)
    engine = make_engine(target, page_size=4, cache_bytes=30 * page_bytes, max_batch_size=8)
    requests = [make_request([index] * 20, max_tokens=60) for index in range(12)]
    ended = order_of_ends(engine, requests)
    assert sorted(ended) == list(range(12))
    assert engine.stats().pages_held == 0 and engine.stats().num_preemptions > 0
