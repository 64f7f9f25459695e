"""What `tests/gpu/run.sh` starts on a GPU gives the plain versions' answers, started under the interpreter here."""

from __future__ import annotations

import pytest
import torch
from dspark_plugins.tensorrt.module import INSTALL, tensorrt_name
from gpu.cases import Case, _block_sample, awkward_cases, moved
from gpu.sections import Node, _as_node, difference, outputs_of

if tensorrt_name() is None:
    pytest.skip(f"TensorRT is not installed: {INSTALL}", allow_module_level=True)

from support.plugin_launcher import InterpreterLauncher

QUICK = ("mixed, window 20", "tree, window 0", "contexts [0, 1, 16]", "trees, reduced", "1 sequences")
CASES = [
    *(case for case in awkward_cases(torch.float32) if case.name.endswith(QUICK)),
    _block_sample(2, 150, 24, 8, "gated", torch.float32, sampled=True, block=2, mapped=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_node_started_twice_gives_the_plain_answers(case: Case) -> None:
    launcher = InterpreterLauncher()
    node = Node(*_as_node(case, moved(case.arguments, "cpu")), launcher.compile, launcher)
    launcher.memory = [*node.inputs, *node.made, *node.scratch]
    expected = outputs_of(case, "cpu")
    for _ in range(2):
        node.clear()
        node.start(7)
        worst = max(difference(a, b) for a, b in zip(node.results(case), expected, strict=True))
        assert worst <= 1e-4
