"""The operations by the names of their nodes."""

from __future__ import annotations

from dspark_plugins.tensorrt.attention import BlockAttention, PagedAttention
from dspark_plugins.tensorrt.block_sample import BlockSample
from dspark_plugins.tensorrt.operation import Operation
from dspark_plugins.tensorrt.schedule import Schedule
from dspark_plugins.tensorrt.verify import Verify

__all__ = ["OPERATIONS"]

OPERATIONS: dict[str, type[Operation]] = {
    operation.name: operation for operation in (PagedAttention, BlockAttention, BlockSample, Verify, Schedule)
}
