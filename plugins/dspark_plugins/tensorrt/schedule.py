"""`DSparkSchedule` for TensorRT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dspark_plugins.kernels import plans
from dspark_plugins.kernels.plans import Variant
from dspark_plugins.tensorrt.operation import Buffer, Fill, Launch, Operation, Port, Shape

__all__ = ["Schedule"]


class Schedule(Operation):
    """Verify lengths and the rows of the ragged pass."""

    name = "DSparkSchedule"
    attributes = ()
    inputs = (
        Port("confidence", "fp32"),
        Port("num_drafts", "i32"),
        Port("budgets", "i32"),
        Port("step", "i32"),
        Port("seconds", "fp32"),
    )
    outputs = (
        Port("verify_len", "i32"),
        Port("query_start", "i32"),
        Port("row_source", "i32"),
        Port("new_budgets", "i32"),
    )

    def output_shapes(self, inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
        num_sequences, block_size = inputs[0]
        return [[num_sequences], [num_sequences + 1], [num_sequences * (block_size + 1)], [2]]

    def variants(self, shapes: Sequence[Shape], dtypes: Sequence[str]) -> list[Variant]:  # noqa: ARG002
        return [plans.schedule()]

    def scratch(self, shapes: Sequence[Shape]) -> tuple[int, ...]:
        num_sequences, block_size = shapes[0]
        return (num_sequences * block_size * 4,) * 3

    def launches(
        self,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        scratch: Sequence[int],
        num_multiprocessors: int,  # noqa: ARG002
    ) -> Iterator[Launch | Fill]:
        num_sequences, block_size = inputs[0].shape
        survival, ordered, rank_of = scratch
        yield Launch.of(
            plans.schedule(),
            (1,),
            **{port.name: buffer.address for port, buffer in zip(self.inputs, inputs, strict=True)},
            **{port.name: buffer.address for port, buffer in zip(self.outputs, outputs, strict=True)},
            survival=survival,
            ordered=ordered,
            rank_of=rank_of,
            num_sequences=num_sequences,
            block_size=block_size,
        )
