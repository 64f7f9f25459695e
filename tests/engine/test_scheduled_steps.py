"""Steps that wait once: the device drafts, cuts, lays out and verifies as the host would have, with the same budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dspark.calibration.online import OnlineCalibrator
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.drafters.lookup import LookupDrafter
from dspark.engine.admission import EngineLimits
from dspark.engine.engine import Engine
from dspark.engine.verifying import needs_host
from dspark.executors.scheduled import served_policy
from dspark.executors.tensorrt_loading import engine_shapes
from dspark.executors.torch_cuda import pair_on
from dspark.models.loading import load_target
from support.engines import make_request, run
from support.steady_lagged import SteadyLagged, assert_equal_steps, bent_calibrator, steady
from support.tiny_drafters import write_good_drafter, write_tiny_drafter
from support.tiny_models import write_tiny_target

PAGE, BLOCK = 4, 4
LIMITS = EngineLimits(max_batch_size=6, max_context_len=64, max_step_tokens=12, num_pages=96, page_size=PAGE)
SHAPES = replace(
    engine_shapes(max_sequences=6, max_step_tokens=12, max_context_len=64, page_size=PAGE, block_size=BLOCK),
    graph_tokens=0,
)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [6], [7, 7, 1], [2, 8]] * 2
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.0, "top_p": 0.9, "max_tokens": 17, "seed": 6},
    {"temperature": 0.7, "top_k": 5, "num_draft_tokens": 2, "seed": 7},
    {"temperature": 0.0, "max_tokens": 9},
    {"temperature": 0.8, "num_draft_tokens": 0, "max_tokens": 12, "seed": 8},
] * 2


class Home:
    """A target and a drafter."""

    def __init__(self, folder: Path, **drafter: Any) -> None:
        write_tiny_target(folder / "target", max_context_len=64)
        if drafter.pop("random", False):
            write_tiny_drafter(folder / "drafter", folder / "target", block_size=BLOCK, **drafter)
        else:
            write_good_drafter(folder / "drafter", folder / "target", noise=0.1, **drafter)
        self.target = load_target(folder / "target")
        self.drafter = load_drafter_checkpoint(folder / "drafter", target=self.target.config)


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Home]:
    return {
        "good": Home(tmp_path_factory.mktemp("good")),
        "reduced": Home(tmp_path_factory.mktemp("reduced"), random=True, draft_vocab=20),
    }


class Served:
    """An engine on the CPU whose steps are counted by where they were laid out."""

    def __init__(
        self,
        home: Home,
        *,
        on_device: bool = True,
        calibrated: bool = True,
        lookup: bool = False,
        policy: str = "lagged",
        limits: EngineLimits = LIMITS,
        rule: Any = "auto",
    ) -> None:
        device = torch.device("cpu")
        target, drafter = pair_on(
            device, home.target, home.drafter, dtype="float32", shapes=SHAPES, page_size=PAGE
        )
        assert drafter is not None and target.schedules and drafter.executor.launches  # type: ignore[attr-defined]
        self.target, self.num_waits = target, 0
        target.schedules = on_device
        used: Any = LookupDrafter(drafter) if lookup else drafter
        for part in (target, used):
            part.allocate_cache(num_pages=limits.num_pages, page_size=PAGE)
        calibrator = bent_calibrator(BLOCK) if calibrated else None
        self.scheduler = SteadyLagged(block_size=BLOCK, calibrator=calibrator, policy=policy)
        self.engine = steady(
            Engine(target=target, drafter=used, scheduler=self.scheduler, limits=limits, rule=rule)
        )
        self.drafter = drafter
        self.num_scheduled = 0
        launch = target.launch_scheduled

        def counted(batch: Any) -> None:
            self.num_scheduled += 1
            launch(batch)

        target.launch_scheduled = counted  # type: ignore[method-assign]

    def answers(self, prompts: Any = PROMPTS, params: Any = PARAMS) -> list[list[int]]:
        requests = [make_request(p, **more) for p, more in zip(prompts, params, strict=True)]
        return [completion.token_ids for completion in run(self.engine, requests)]


def judged_on_device(rule: str) -> bool:
    """Return whether drawn drafts under a rule are judged where the logits are."""
    params = SimpleNamespace(wants_log_probs=False)
    sampler = SimpleNamespace(rule=rule, alters=lambda _: False)
    sequence: Any = SimpleNamespace(sampler=sampler, request=SimpleNamespace(params=params))
    return not needs_host(sequence)


def test_drawn_drafts_are_judged_on_the_device_under_one_rule_at_least() -> None:
    assert judged_on_device("block") or judged_on_device("rejection")


@pytest.mark.parametrize(
    ("home", "calibrated", "rule"),
    [
        ("good", True, "auto"),
        ("good", False, "block"),
        ("good", False, "rejection"),
        ("reduced", True, "auto"),
    ],
)
def test_steps_are_those_of_the_host(homes: dict[str, Home], home: str, calibrated: bool, rule: str) -> None:
    mine, theirs = (
        Served(homes[home], on_device=on_device, calibrated=calibrated, rule=rule)
        for on_device in (True, False)
    )
    assert mine.answers() == theirs.answers()
    assert_equal_steps(mine.scheduler.seen, theirs.scheduler.seen)
    steps = mine.scheduler.seen
    drafted = sum(step.num_drafts.any() for step in steps)
    assert theirs.num_scheduled == 0 and drafted > 16
    assert mine.num_scheduled > drafted // 2 if judged_on_device(rule) else mine.num_scheduled < drafted // 2
    cut = [step for step in steps if 0 < step.verify_len.sum() < step.num_drafts.sum()]
    assert cut, "drafts were cut"
    assert any(step.prefill_tokens for step in steps), "prompts were computed beside them"
    assert any((step.num_drafts == 0).any() and step.num_drafts.any() for step in steps)
    stats = mine.engine.stats()
    assert stats.num_drafter_faults == 0
    if home == "good":
        assert stats.num_accepted_tokens > 0


def test_steps_stay_those_of_the_host_while_the_calibrator_learns(homes: dict[str, Home]) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 49, rng.integers(1, 14)).tolist() for _ in range(24)]
    params = [
        {"temperature": rng.choice([0.0, 0.8]), "seed": i, "max_tokens": int(rng.integers(10, 45))}
        for i in range(24)
    ]
    many = replace(LIMITS, num_pages=300)
    mine, theirs = (Served(homes["good"], on_device=on_device, limits=many) for on_device in (True, False))
    calibrator = mine.scheduler.calibrator
    assert isinstance(calibrator, OnlineCalibrator)
    before = calibrator.maps()
    assert mine.answers(prompts, params) == theirs.answers(prompts, params)
    assert_equal_steps(mine.scheduler.seen, theirs.scheduler.seen)
    assert mine.num_scheduled > 10 and np.abs(calibrator.maps() - before).max() > 0.1


# Steps that are the host's


@pytest.mark.parametrize(
    ("policy", "params"),
    [
        ("prefix", {}),  # knows no budget before the drafts
        ("auto", {}),
        ("lagged", {"repetition_penalty": 1.3}),
        ("lagged", {"logprobs": 2}),
        ("lagged", {"min_tokens": 20, "stop_token_ids": (49,)}),
    ],
)
def test_a_step_that_needs_the_host_is_laid_out_there(
    homes: dict[str, Home], policy: str, params: dict[str, Any]
) -> None:
    served = Served(homes["good"], policy=policy)
    served.answers([[7, 8, 9, 10], [5, 6]], [{"max_tokens": 20} | params] * 2)
    assert sum(bool(step.num_drafts.any()) for step in served.scheduler.seen) > 5
    assert served.num_scheduled == 0 and served.engine.stats().num_drafter_faults == 0


def test_a_step_in_which_something_is_looked_up_is_laid_out_by_the_host(homes: dict[str, Home]) -> None:
    served, plain = (Served(homes["good"], lookup=True, on_device=on_device) for on_device in (True, False))
    laid_out: list[int] = []
    launch = served.target.launch_scheduled

    def counted(batch: Any) -> None:
        laid_out.append(len(served.scheduler.seen))
        launch(batch)

    served.target.launch_scheduled = counted  # type: ignore[method-assign]
    prompts = [[7, 8, 9, 10] * 4, [5, 6, 30, 31], [3, 44]]
    params = [{"max_tokens": 40}, {"max_tokens": 40, "temperature": 0.8, "seed": 1}, {"max_tokens": 30}]
    assert served.answers(prompts, params) == plain.answers(prompts, params)
    assert_equal_steps(served.scheduler.seen, plain.scheduler.seen)
    looked_up = [
        step.confidence_logits is not None and bool(np.isnan(step.confidence_logits).any())
        for step in served.scheduler.seen
    ]
    assert any(looked_up) and laid_out and not any(looked_up[at] for at in laid_out)


def test_nothing_is_laid_out_before_two_steps_have_drafted_and_when_a_block_is_looked_at_as_a_whole(
    homes: dict[str, Home],
) -> None:
    served = Served(homes["good"])
    budget = served.scheduler.budget
    known: list[int | None] = []

    def kept(num_drafts: np.ndarray) -> int | None:
        known.append(budget(num_drafts))
        return known[-1]

    served.scheduler.budget = kept  # type: ignore[method-assign]
    calibrator = served.scheduler.calibrator
    assert calibrator is not None
    calibrator.deepest_starved = lambda: 3  # type: ignore[method-assign]
    served.answers([[3, 1, 4]] * 2, [{"max_tokens": 56}, {"max_tokens": 56, "temperature": 1.0, "seed": 1}])
    assert known[:2] == [None, None] and known[2] is not None
    assert len(known) > 30 and known[2:].count(None) == (len(known) >= 64)


def test_budgets_are_what_the_host_keeps(homes: dict[str, Home]) -> None:
    served = Served(homes["good"], on_device=False)
    verify_len, told = served.scheduler.verify_len, 0

    def checked(**given: Any) -> Any:
        nonlocal told
        budget = served.scheduler.budget(given["num_drafts"])
        found = verify_len(**given)
        if budget is not None and given["num_drafts"].any():
            told += 1
            assert found.sum() == budget
        return found

    served.scheduler.verify_len = checked  # type: ignore[method-assign]
    served.answers()
    assert told > 8


def test_without_pages_for_all_drafts_the_host_cuts_them(homes: dict[str, Home]) -> None:
    few = replace(LIMITS, num_pages=14)
    served, plain = (Served(homes["good"], limits=few, on_device=on_device) for on_device in (True, False))
    assert served.answers(PROMPTS[:6], PARAMS[:6]) == plain.answers(PROMPTS[:6], PARAMS[:6])
    assert served.engine.stats().num_preemptions > 0


def test_a_drafter_that_cannot_be_started_costs_its_drafts_alone(homes: dict[str, Home]) -> None:
    served, plain = (Served(homes["good"], on_device=on_device) for on_device in (True, False))
    executor: Any = served.drafter.executor

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    executor.launch = fail
    prompts, params = PROMPTS[:3], PARAMS[:3]
    assert served.answers(prompts, params) == plain.answers(prompts, params)
    assert served.engine.stats().num_drafter_faults > 0


def test_a_look_up_that_fails_costs_its_drafts_alone(homes: dict[str, Home]) -> None:
    served, plain = (
        Served(homes["good"], lookup=on_device, on_device=on_device) for on_device in (True, False)
    )

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    served.engine.drafter._lookup.propose = fail  # type: ignore[attr-defined]
    prompts, params = PROMPTS[:3], PARAMS[:3]
    assert served.answers(prompts, params) == plain.answers(prompts, params)
    assert served.engine.stats().num_drafter_faults > 0


@pytest.mark.parametrize("call", ["launch", "append"])
def test_a_call_that_fails_once_loses_no_context(homes: dict[str, Home], call: str) -> None:
    served, whole = (Served(homes["good"]) for _ in range(2))
    executor: Any = served.drafter.executor
    name = "launch" if call == "launch" else "append_context"
    original, num_calls = getattr(executor, name), 0

    def once(*given: Any, **more: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise RuntimeError("once")
        return original(*given, **more)

    setattr(executor, name, once)
    prompts, params = [PROMPTS[2]], [{"max_tokens": 40}]
    assert served.answers(prompts, params) == whole.answers(prompts, params)
    assert served.engine.stats().num_drafter_faults == 1
    # A second answer to the same prompt drafts over the pages of the first: as well as if nothing had failed.
    for each in (served, whole):
        each.scheduler.seen.clear()
        each.answers(prompts, params)
    accepted = [sum(int(step.accepted.sum()) for step in each.scheduler.seen) for each in (served, whole)]
    assert accepted[0] == accepted[1]


def test_auto_is_lagged_where_a_gpu_lays_out_its_passes(homes: dict[str, Home]) -> None:
    home = homes["good"]

    def target() -> Any:
        device = torch.device("cpu")
        return pair_on(
            device, home.target, home.drafter, dtype="float32", shapes=SHAPES, page_size=PAGE
        ).target

    for policy, on_gpu, served, schedules in (
        ("auto", True, "lagged", True),
        ("lagged", False, "lagged", True),
        ("auto", False, "auto", False),
        ("prefix", True, "prefix", False),
    ):
        one = target()
        assert (served_policy(one, policy, on_gpu=on_gpu), one.schedules) == (served, schedules)
    assert served_policy(object(), "auto", on_gpu=True) == "auto"
