"""From arrays to a session's buffers and back: fills the host's side, pads, runs, copies what was asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.errors import EngineError
from dspark.executors.tensorrt_bindings import ITEM_BYTES, Binding, numpy_dtype, resolved_shape
from dspark.executors.tensorrt_buckets import EngineShapes, Sizes
from dspark.executors.tensorrt_buffers import BufferPlan
from dspark.executors.tensorrt_session import Call, KeepingSession, Session

__all__ = ["Runner"]

Array = npt.NDArray[Any]


class Runner:
    """Runs one engine.

    Arguments:
        session: what it runs on.
        bindings: its tensors.
        shapes: the largest call.
        more: largest sizes of dimensions that `shapes` does not have.
    """

    def __init__(
        self,
        session: Session,
        bindings: Sequence[Binding],
        shapes: EngineShapes,
        *,
        more: Mapping[str, int] | None = None,
    ) -> None:
        self.session = session
        self._largest = shapes.largest() | dict(more or {})
        self._bindings = tuple(binding for binding in bindings if binding.kind != "weight")
        self._plan: BufferPlan | None = None
        self._host = np.empty(0, np.uint8)
        self._num_slots = 0
        self._last: Call | None = None

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of one cache page over all layers."""
        sizes = self._largest | {"S": page_size}
        caches = [b for b in self._bindings if b.kind == "cache"]
        return sum(math.prod(resolved_shape(b, sizes)) * ITEM_BYTES[b.dtype] for b in caches)

    def allocate(self, *, num_slots: int, buckets: Iterable[Sizes], outputs: Sequence[Sequence[str]]) -> None:
        """Allocate every buffer once and prepare the calls that are known beforehand.

        Arguments:
            num_slots: S, cache rows.
            buckets: sizes of the calls to prepare, without S.
            outputs: what such calls are read for.

        Raises:
            CapacityError: there is not that much memory.
        """
        assert self._plan is None, "buffers are allocated once"
        self._num_slots = num_slots
        plan = BufferPlan.of(self._bindings, self._largest | {"S": num_slots})
        self._host, self._plan = self.session.allocate(plan), plan
        self.prepare(buckets, outputs)

    def prepare(self, buckets: Iterable[Sizes], outputs: Sequence[Sequence[str]]) -> None:
        """Prepare more calls; arguments and errors as `allocate`."""
        for sizes in buckets:
            self._idle(sizes)
            for names in outputs:
                self.session.prepare(self._call(sizes, tuple(names)))

    def run(
        self,
        feeds: Mapping[str, Array],
        sizes: Sizes,
        outputs: Mapping[str, int],
        *,
        padding: Mapping[str, float],
    ) -> dict[str, Array]:
        """Run one call and return outputs as arrays of their own, whatever runs later.

        Arguments:
            feeds: real entries of every input, in front of each axis.
            sizes: of the call, without S; at least as large as the feeds.
            outputs: those that are wanted, and how many entries of the first axis are real.
            padding: what the entries behind the real ones hold, by input; 0 where none is named.

        Raises:
            EngineError: an input that has no room in the call.
        """
        call = self._filled(feeds, sizes, tuple(outputs), padding)
        self.session.run(call)
        self._last = call
        return self.outputs(outputs)

    def launch(
        self,
        feeds: Mapping[str, Array],
        sizes: Sizes,
        outputs: Sequence[str],
        *,
        padding: Mapping[str, float],
    ) -> None:
        """Start what `run` does; arguments and errors are its own. `wait` comes before `outputs` and the next call."""
        call = self._filled(feeds, sizes, tuple(outputs), padding)
        self.session.launch(call)
        self._last = call

    def wait(self) -> float:
        """Wait for what was started; return the seconds that it took on the device.

        Raises:
            EngineError: the device refuses.
        """
        assert self._last is not None
        return self.session.wait(self._last)

    def outputs(self, counts: Mapping[str, int]) -> dict[str, Array]:
        """Return outputs that the last call brought back, the first entries of each, as arrays of their own."""
        assert self._last is not None
        shapes = dict(self._last.shapes)
        return {
            binding.name: self._view(binding, shapes[binding.name])[: counts[binding.name]].copy()
            for binding in self._bindings
            if binding.name in counts
        }

    def _filled(
        self,
        feeds: Mapping[str, Array],
        sizes: Sizes,
        outputs: tuple[str, ...],
        padding: Mapping[str, float],
    ) -> Call:
        """Return a call whose inputs are on the host's side."""
        call = self._call(sizes, outputs)
        for binding, view in self._inputs(call):
            given = feeds[binding.name]
            if any(side > room for side, room in zip(given.shape, view.shape, strict=True)):
                raise EngineError(f"{binding.name}: got {list(given.shape)}, room is for {list(view.shape)}")
            if given.shape != view.shape:
                view[...] = padding.get(binding.name, 0)
            view[tuple(slice(side) for side in given.shape)] = given
        return call

    @property
    def keeps(self) -> bool:
        """Whether it is one of a pair, so that `KEPT` stays on the device, to be asked for by `kept`."""
        return isinstance(self.session, KeepingSession) and self.session.keeps

    def kept(self, name: str, count: int) -> Array:
        """Return the first `count` entries of what the last call left on the device, as an array of its own.

        Raises:
            EngineError: the device refuses.
        """
        session, call = self.session, self._last
        assert isinstance(session, KeepingSession) and call is not None
        session.fetch(call, name)
        binding = next(binding for binding in self._bindings if binding.name == name)
        return self._view(binding, dict(call.shapes)[name])[:count].copy()

    def _idle(self, sizes: Sizes) -> None:
        """Fill the inputs of a call with padding alone, so that preparing it writes no cache row."""
        for binding, view in self._inputs(self._call(sizes, ())):
            view[...] = -1 if binding.name in ("page_table", "new_slots", "kinds") else 0

    def _call(self, sizes: Sizes, outputs: tuple[str, ...]) -> Call:
        whole = sizes | {"S": self._num_slots}
        shapes = tuple((binding.name, resolved_shape(binding, whole)) for binding in self._bindings)
        return Call(shapes, outputs)

    def _inputs(self, call: Call) -> Iterator[tuple[Binding, Array]]:
        for binding, (_, shape) in zip(self._bindings, call.shapes, strict=True):
            if binding.kind == "input":
                yield binding, self._view(binding, shape)

    def _view(self, binding: Binding, shape: tuple[int, ...]) -> Array:
        """Return the host's side of an input or output at a call's shape."""
        assert self._plan is not None, "allocate_cache comes before the first pass"
        dtype = numpy_dtype(binding)
        start = self._plan.buffers[binding.name].offset
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._host[start : start + num_bytes].view(dtype).reshape(shape)
