"""Tables that target and drafter share, taken out of the graphs: inputs of both engines, stored once beside them.

TensorRT has no constants common to two engines, but an input's memory is the caller's. A table that a product reads
becomes [d, V], since one of [V, d] would be transposed whole in every call; one that is only looked up stays [V, d].
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
from dspark.executors.tensorrt_bindings import TABLE_SUFFIX, Binding, numpy_dtype
from dspark.executors.tensorrt_manifest import ExportedFile
from onnx import helper

from dspark_build.files import write_atomically

__all__ = ["SharedTable", "load_graphs", "shared_tables_of", "with_table_inputs", "write_table"]

_ROWS = 64  # rows of a table that are written at a time


@dataclass(frozen=True, slots=True)
class SharedTable:
    """A table [V, d] of the target that the drafter reads too."""

    binding: Binding  # kind "weight", [V, d]
    transposed: bool  # stored and bound as [d, V]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the engines' input."""
        rows, width = (int(side) for side in self.binding.shape)
        return (width, rows) if self.transposed else (rows, width)


def load_graphs(folder: Path, names: Iterable[str]) -> dict[str, onnx.ModelProto]:
    """Return graphs by name, their weights left in their files."""
    return {name: onnx.load(str(folder / f"{name}.onnx"), load_external_data=False) for name in names}


def shared_tables_of(
    bindings: Iterable[Binding], models: Iterable[onnx.ModelProto]
) -> tuple[SharedTable, ...]:
    """Return the tables that a drafter takes from its target.

    Arguments:
        bindings: the drafter's.
        models: target and drafter, whose products decide the layout.
    """
    multiplied = {
        name for model in models for node in model.graph.node if node.op_type == "Gemm" for name in node.input
    }
    return tuple(SharedTable(b, b.name in multiplied) for b in bindings if b.kind == "weight")


def with_table_inputs(model: onnx.ModelProto, tables: Iterable[SharedTable]) -> onnx.ModelProto:
    """Return a copy of a graph in which shared tables are inputs."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph, wanted = changed.graph, {table.binding.name: table for table in tables}
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer if tensor.name in wanted}
    kept = [tensor for tensor in graph.initializer if tensor.name not in kinds]
    nodes = [one for node in graph.node for one in _rewritten(node, wanted)]
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(kept)
    graph.node.extend(nodes)
    graph.input.extend(
        helper.make_tensor_value_info(name, kind, wanted[name].shape) for name, kind in kinds.items()
    )
    return changed


def _rewritten(node: onnx.NodeProto, tables: Mapping[str, SharedTable]) -> Iterator[onnx.NodeProto]:
    """Yield what stands for a node where a table of its is [d, V]; any other node as it is."""
    if not any(name in tables and tables[name].transposed for name in node.input):
        yield node
    elif node.op_type == "Gemm":
        yield helper.make_node("Gemm", node.input, node.output, name=node.name)  # transB = 0
    else:
        assert node.op_type == "Gather", node.op_type
        columns = f"{node.output[0]}.columns"
        yield helper.make_node("Gather", node.input, [columns], name=columns, axis=1)
        yield helper.make_node("Transpose", [columns], node.output, name=node.name, perm=[1, 0])


def write_table(table: SharedTable, tensor: onnx.TensorProto, graphs: Path, out: Path) -> ExportedFile:
    """Write a table beside the plans.

    Arguments:
        tensor: the initializer of the target's graph.
        graphs: the folder of its weights.

    Raises:
        CapacityError: the disk is full.
    """
    told = {entry.key: entry.value for entry in tensor.external_data}
    array: npt.NDArray[Any] = np.memmap(
        graphs / told["location"],
        numpy_dtype(table.binding),
        "r",
        int(told["offset"]),
        tuple(tensor.dims),
    )
    digest, path = hashlib.sha256(), out / f"{table.binding.name}{TABLE_SUFFIX}"

    def write(stream: BinaryIO) -> None:
        for piece in _pieces(array.T if table.transposed else array):
            stream.write(piece)
            digest.update(piece)

    write_atomically(path, write)
    return ExportedFile(name=path.name, num_bytes=path.stat().st_size, sha256=digest.hexdigest())


def _pieces(array: npt.NDArray[Any]) -> Iterator[bytes]:
    for start in range(0, len(array), _ROWS):
        yield np.ascontiguousarray(array[start : start + _ROWS]).tobytes()
