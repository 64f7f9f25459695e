"""A drafter that fails costs its drafts and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dspark.errors import EngineError
from support.engines import answers, make_engine, make_request
from support.tiny_drafters import write_good_drafter
from support.tiny_models import write_tiny_target


@pytest.mark.parametrize("verb", ["propose", "observe"])
def test_answers_are_the_plain_ones_whichever_call_of_the_drafter_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    target = write_tiny_target(tmp_path / "target", num_layers=2)
    write_good_drafter(tmp_path / "drafter", target)
    requests = [make_request([i, i + 1, i + 2]) for i in range(3)]
    engine = make_engine(target, drafter=tmp_path / "drafter", policy="fixed:4")
    works, calls = getattr(engine.drafter, verb), 0

    def fails_now_and_then(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 2:
            raise EngineError("the drafter's device is gone")
        return works(*given, **named)

    monkeypatch.setattr(engine.drafter, verb, fails_now_and_then)
    assert answers(engine, requests) == answers(make_engine(target), requests)
    stats = engine.stats()
    assert stats.num_drafter_faults == (calls + 1) // 3 > 0
    assert stats.num_draft_tokens > 0
