"""Steps that wait once: the device drafts, cuts, lays out and verifies as the host would have, with the same budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.drafters.lookup import LookupDrafter
from dspark.engine.admission import EngineLimits
from dspark.engine.engine import Engine
from dspark.executors.tensorrt_loading import engine_shapes
from dspark.executors.torch_cuda import pair_on
from dspark.models.loading import load_target
from support.engines import make_request, run
from support.steady_lagged import SteadyLagged, assert_equal_steps, bent_calibrator
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
        self.engine = Engine(target=target, drafter=used, scheduler=self.scheduler, limits=limits, rule=rule)
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


@pytest.mark.parametrize(
    ("home", "calibrated", "rule"),
    [("good", True, "auto"), ("good", False, "rejection"), ("reduced", True, "auto")],
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
    assert theirs.num_scheduled == 0 and mine.num_scheduled > drafted // 2 > 8
    cut = [step for step in steps if 0 < step.verify_len.sum() < step.num_drafts.sum()]
    assert cut, "drafts were cut"
    assert any(step.prefill_tokens for step in steps), "prompts were computed beside them"
    assert any((step.num_drafts == 0).any() and step.num_drafts.any() for step in steps)
    stats = mine.engine.stats()
    assert stats.num_drafter_faults == 0
    if home == "good":
        assert stats.num_accepted_tokens > 0
