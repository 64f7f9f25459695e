"""Steps that wait once, beside the same steps laid out by the host: equal answers, and seconds of either."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from dspark.engine.admission import EngineLimits
from dspark.engine.engine import Engine
from dspark.executors.tensorrt_loading import EnginePair
from support.engines import answers, make_request
from support.steady_lagged import SteadyLagged, assert_equal_steps, steady

from gpu.results import Check, Results, Timing

__all__ = ["compare_scheduled"]


def compare_scheduled(
    results: Results,
    section: str,
    pair: EnginePair,
    prompts: Sequence[Sequence[int]],
    *,
    what: str,
    limits: EngineLimits,
    num_tokens: int,
) -> None:
    """Serve the same requests twice under the lagged rule, laid out by the device and by the host.

    Arguments:
        pair: its caches are not allocated yet; it schedules.
        what: model and executor, for the summary.
        num_tokens: of each answer.
    """
    target, drafter = pair
    assert drafter is not None and target.schedules
    for part in (target, drafter):
        part.allocate_cache(num_pages=limits.num_pages, page_size=limits.page_size)
    params: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 5}]
    found, seen, laid_out = [], [], 0
    launch = target.launch_scheduled

    def counted(batch: Any) -> None:
        nonlocal laid_out
        laid_out += 1
        launch(batch)

    target.launch_scheduled = counted  # type: ignore[method-assign]
    for where in ("device", "host"):
        target.schedules = where == "device"
        scheduler = SteadyLagged(block_size=drafter.block_size, calibrator=None)
        engine = steady(Engine(target=target, drafter=drafter, scheduler=scheduler, limits=limits))
        requests = [
            make_request(prompt, max_tokens=num_tokens, **params[i % 2]) for i, prompt in enumerate(prompts)
        ]
        begin = time.perf_counter()
        found.append(answers(engine, requests))
        took_s = time.perf_counter() - begin
        seen.append(scheduler.seen)
        name = f"{what}, lagged, laid out by the {where}, {len(prompts)} requests, a step"
        results.timings.append(Timing(section, name, took_s / len(scheduler.seen)))
    results.checks.append(Check(section, f"{what}, the device laid out passes", laid_out > 0, "none"))
    results.checks.append(
        Check(
            section, f"{what}, answers are those of the host's passes", found[0] == found[1], "tokens differ"
        )
    )
    try:
        assert_equal_steps(*seen)
        told = ""
    except AssertionError as error:
        told = " ".join(str(error).split())[:200]
    results.checks.append(Check(section, f"{what}, what is learnt is equal", not told, told))
