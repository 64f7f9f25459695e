"""Rows that the target's graph lays out: those of the plain operation, and an engine's steps those of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dspark.engine.engine import Engine
from dspark_plugins.ops.scheduled_rows import scheduled_rows as plain_rows
from support.engines import make_request, run
from support.steady_lagged import SteadyLagged, assert_equal_steps, bent_calibrator, steady

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from dspark_build.export_graph import DOMAIN, ELEMENT_TYPES, IR_VERSION, OPSET, Graph  # noqa: E402
from dspark_build.export_rows import scheduled_rows  # noqa: E402
from dspark_build.export_schedule import schedule_function  # noqa: E402
from support.exported_pairs import LIMITS, PAGE, Home  # noqa: E402
from support.onnx_models import cpu_session  # noqa: E402

BLOCK = 4
ROWS = ("tokens", "positions", "slots", "query_start", "logit_rows", "prob_rows", "verify_start")
KINDS = {np.dtype(np.float32): "fp32", np.dtype(np.int32): "i32"}


def arguments(seed: int, *, num_drafted: int, num_prompts: int, padding: int = 1) -> dict[str, np.ndarray]:
    """Return the tensors of a pass with prompts behind drafted sequences, and room for more of both."""
    rng = np.random.default_rng(seed)
    drafted, sequences = num_drafted + padding, num_drafted + num_prompts + padding
    counts = rng.integers(1, 4, num_prompts)
    num_rows = num_drafted * (1 + BLOCK) + int(counts.sum()) + padding

    def ints(low: int, high: int, *shape: int) -> np.ndarray:
        return rng.integers(low, high, shape).astype(np.int32)

    def starts(of_prompts: np.ndarray) -> np.ndarray:
        whole = np.zeros(sequences + 1, np.int32)
        whole[num_drafted + 1 : num_drafted + 1 + num_prompts] = np.cumsum(of_prompts)
        whole[num_drafted + 1 + num_prompts :] = of_prompts.sum()
        return whole

    kinds = ints(0, 3, drafted)
    kinds[num_drafted:] = -1
    confidence = rng.normal(size=(drafted, BLOCK)).astype(np.float32) * 3
    confidence[0, -1] = rng.choice([np.nan, np.inf, 50.0])
    return {
        "tokens": ints(0, 50, num_rows),
        "positions": ints(0, 20, num_rows),
        "slots": ints(0, 99, num_rows),
        "query_start": starts(counts),
        "verify_start": starts(np.ones_like(counts)),
        "logit_rows": np.concatenate([np.cumsum(counts) - 1, np.zeros(num_drafted * 5)]).astype(np.int32),
        "prob_rows": np.full(num_prompts + num_drafted * 5, -1, np.int32),
        "context_len": ints(1, 20, sequences),
        "temperature": rng.choice([0.0, 0.7], sequences).astype(np.float32),
        "page_table": ints(0, 40, sequences, 7),
        "anchors": ints(0, 50, drafted),
        "kinds": kinds,
        "calibration": rng.uniform(0.3, 1.5, (3, BLOCK, 5)).astype(np.float32),
        "budget": ints(0, max(num_drafted * 3, 1), 1),
        "draft_tokens": ints(0, 50, drafted, BLOCK),
        "num_tokens": np.append(ints(0, BLOCK + 1, num_drafted), ints(0, 3, padding)).astype(np.int32),
        "confidence_logits": confidence,
    }


def graph_of(feeds: dict[str, np.ndarray]) -> Any:
    g = Graph()
    found = scheduled_rows(g, page_size=PAGE, block_size=BLOCK)
    for name in ROWS:
        g.op("Identity", getattr(found, name), name=f"{name}.out")
    info = onnx.helper.make_tensor_value_info
    inputs = [
        info(name, ELEMENT_TYPES[KINDS[value.dtype]], [f"{name}{axis}" for axis in range(value.ndim)])  # type: ignore[index]
        for name, value in feeds.items()
    ]
    outputs = [info(f"{name}.out", onnx.TensorProto.INT32, [None]) for name in ROWS]
    graph = onnx.helper.make_graph(
        g.nodes, "rows", inputs, [*outputs, info("verify_len", onnx.TensorProto.INT32, [None])]
    )
    opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, 1)]
    model = onnx.helper.make_model(
        graph, opset_imports=opsets, functions=[schedule_function()], ir_version=IR_VERSION
    )
    return cpu_session(model.SerializeToString())


@pytest.mark.parametrize(("num_drafted", "num_prompts"), [(1, 0), (3, 2), (7, 1), (5, 3)])
def test_rows_are_those_of_the_plain_operation(num_drafted: int, num_prompts: int) -> None:
    session = graph_of(arguments(0, num_drafted=num_drafted, num_prompts=num_prompts))
    for seed in range(8):
        feeds = arguments(seed, num_drafted=num_drafted, num_prompts=num_prompts)
        got = dict(zip([*ROWS, "verify_len"], session.run(None, feeds), strict=True))
        wanted = plain_rows({name: torch.from_numpy(x) for name, x in feeds.items()}, page_size=PAGE)
        assert set(got) == set(wanted)
        for name, rows in wanted.items():
            np.testing.assert_array_equal(got[name], rows.numpy(), err_msg=name)
        check_rows(feeds, got)


def check_rows(feeds: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> None:
    """Check the rows one by one, as the host would write them down."""
    lengths = got["verify_len"].tolist()
    assert sum(lengths) <= feeds["budget"][0] and all(
        np.array(lengths) <= feeds["num_tokens"] * (feeds["kinds"] >= 0)
    )
    tokens: list[int] = []
    at = 0
    for i, length in enumerate(lengths):
        if feeds["kinds"][i] < 0:
            continue
        assert got["query_start"][i] == at
        wanted = [int(feeds["anchors"][i]), *feeds["draft_tokens"][i, :length].tolist()]
        for k in range(1 + length):
            position = feeds["context_len"][i] + k
            page = feeds["page_table"][i, position // PAGE]
            assert got["positions"][at + k] == position
            assert got["slots"][at + k] == page * PAGE + position % PAGE
            drawn = k > 0 and feeds["temperature"][i] > 0
            assert got["prob_rows"][at + k] == (i * BLOCK + k - 1 if drawn else -1)
            assert got["logit_rows"][at + k] == at + k
        tokens += wanted
        at += 1 + length
    num_prompt_rows = int(feeds["query_start"][-1])
    tokens += feeds["tokens"][:num_prompt_rows].tolist()
    assert got["tokens"][: len(tokens)].tolist() == tokens
    assert got["query_start"][-1] == len(tokens)
    first = int(np.argmax(feeds["kinds"] < 0))
    ends = got["logit_rows"][at : at + int(feeds["verify_start"][-1])]
    num_prompts = len(ends)
    np.testing.assert_array_equal(ends + 1, got["query_start"][first + 1 : first + 1 + num_prompts])
    np.testing.assert_array_equal(
        got["verify_start"][first : first + num_prompts + 1], at + np.arange(num_prompts + 1)
    )


def test_without_drafted_sequences_rows_stay_where_they_are() -> None:
    feeds = arguments(0, num_drafted=3, num_prompts=2, padding=0)
    for name in ("anchors", "kinds", "draft_tokens", "num_tokens", "confidence_logits"):
        feeds[name] = feeds[name][:0]
    got = dict(zip([*ROWS, "verify_len"], graph_of(feeds).run(None, feeds), strict=True))
    for name in ROWS:
        np.testing.assert_array_equal(got[name], feeds[name], err_msg=name)
    assert not len(got["verify_len"])


# The runtime on ONNX Runtime

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [6], [7, 7, 1]]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.0, "max_tokens": 14},
    {"temperature": 1.0, "top_p": 0.9, "seed": 6},
    {"temperature": 0.7, "top_k": 5, "seed": 7, "max_tokens": 12},
    {"temperature": 0.0, "num_draft_tokens": 2},
]


def served(
    home: Home, *, on_device: bool, rule: Any, num_requests: int
) -> tuple[list[list[int]], SteadyLagged, int]:
    """Return answers, what the policy saw, and how many passes were laid out by the graph."""
    target, drafter = home.pair()
    assert drafter is not None and target.schedules
    target.schedules = on_device
    for part in (target, drafter):
        part.allocate_cache(num_pages=LIMITS.num_pages, page_size=PAGE)
    scheduler = SteadyLagged(block_size=BLOCK, calibrator=bent_calibrator(BLOCK))
    engine = steady(Engine(target=target, drafter=drafter, scheduler=scheduler, limits=LIMITS, rule=rule))
    passes, launch = [], target.launch_scheduled

    def counted(batch: Any) -> None:
        passes.append(batch)
        launch(batch)

    target.launch_scheduled = counted  # type: ignore[method-assign]
    requests = [make_request(p, **more) for p, more in zip(PROMPTS[:num_requests], PARAMS, strict=False)]
    answers = [completion.token_ids for completion in run(engine, requests)]
    assert engine.stats().num_drafter_faults == 0
    return answers, scheduler, len(passes)


def test_steps_are_those_of_the_host(tmp_path: Path) -> None:
    home, laid_out = Home(tmp_path), {}
    for rule, num_requests in (("auto", 5), ("block", 2), ("rejection", 2)):
        (mine, seen, laid_out[rule]), (theirs, expected, none) = (
            served(home, on_device=on_device, rule=rule, num_requests=num_requests)
            for on_device in (True, False)
        )
        assert mine == theirs
        assert_equal_steps(seen.seen, expected.seen)
        assert none == 0 and sum(bool(step.num_drafts.any()) for step in seen.seen) > 6
        assert any(0 < step.verify_len.sum() < step.num_drafts.sum() for step in seen.seen)
    # Of the two rules for drawn drafts one at least is judged in the graph.
    assert laid_out["auto"] > 6 and max(laid_out["block"], laid_out["rejection"]) > 3
