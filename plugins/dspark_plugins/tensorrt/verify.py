"""`DSparkVerify` for TensorRT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dspark_plugins.kernels import plans
from dspark_plugins.kernels.plans import Variant
from dspark_plugins.tensorrt.operation import Buffer, Fill, Launch, Operation, Port, Shape

__all__ = ["Verify"]

_SAMPLING = (
    Port("positions", "i32"),
    Port("seeds", "i64"),
    Port("temperature", "fp32"),
    Port("top_k", "i32"),
    Port("top_p", "fp32"),
    Port("min_p", "fp32"),
    Port("coupled", "i32"),
)


class Verify(Operation):
    """Which drafts are accepted, and the token that the target adds."""

    name = "DSparkVerify"
    attributes = ("max_depth", "tree", "probs", "mapped")
    outputs = (Port("accepted", "i32"), Port("path", "i32"), Port("next_token", "i32"))

    def __init__(self, values: Mapping[str, int | float]) -> None:
        super().__init__(values)
        self.check(self.number("max_depth") > 0, f"max_depth must be at least 1, got {values['max_depth']}")
        optional = (
            ("parents", "i32", self.number("tree") > 0),
            ("draft_probs", "fp32", self.number("probs") > 0),
            ("prob_rows", "i32", self.number("probs") > 0),
            ("target_to_draft", "i32", self.number("mapped") > 0),
        )
        self.inputs = (
            Port("logits", "fp32"),
            Port("tokens", "i32"),
            Port("query_start", "i32"),
            *(Port(name, dtype) for name, dtype, there in optional if there),
            *_SAMPLING,
        )
        self._absent = tuple(name for name, _, there in optional if not there)
        self._at = {port.name: i for i, port in enumerate(self.inputs)}

    def output_shapes(self, inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
        (num_sequences,) = inputs[self._at["positions"]]
        return [[num_sequences], [num_sequences, self.number("max_depth")], [num_sequences]]

    def variants(self, shapes: Sequence[Shape], dtypes: Sequence[str]) -> list[Variant]:
        self.check(shapes[0][1] > 0, f"the vocabulary must be fixed, got logits {shapes[0]}")
        weights = [self._chain_weights(dtypes[0])] if self._weighs else []
        return [plans.row_limits(dtype=dtypes[0]), *weights, self._walk(dtypes[0])]

    def scratch(self, shapes: Sequence[Shape]) -> tuple[int, ...]:
        num_rows, vocab_size = shapes[0]
        (num_sequences,) = shapes[self._at["positions"]]
        return num_rows * 12, num_rows * 12, num_rows * 8, num_sequences * vocab_size * 4

    def launches(
        self,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        scratch: Sequence[int],
        num_multiprocessors: int,  # noqa: ARG002
    ) -> Iterator[Launch | Fill]:
        given = {port.name: buffer for port, buffer in zip(self.inputs, inputs, strict=True)}
        at = {name: buffer.address for name, buffer in given.items()}
        num_rows, vocab_size = given["logits"].shape
        (num_sequences,) = given["positions"].shape
        limits, bounds, weights, left = scratch
        yield Launch.of(
            plans.row_limits(dtype=given["logits"].dtype),
            (num_rows,),
            **{
                name: at[name] for name in ("logits", "query_start", "temperature", "top_k", "top_p", "min_p")
            },
            limits=limits,
            bounds=bounds,
            num_sequences=num_sequences,
            vocab_size=vocab_size,
            logits_stride=vocab_size,
        )
        draft_vocab_size = given["draft_probs"].shape[1] if "draft_probs" in given else vocab_size
        sizes = {
            "vocab_size": vocab_size,
            "draft_vocab_size": draft_vocab_size,
            "logits_stride": vocab_size,
            "max_depth": self.number("max_depth"),
        }
        if self._weighs:
            names = ("logits", "tokens", "query_start", "draft_probs", "prob_rows", "temperature", "coupled")
            yield Launch.of(
                self._chain_weights(given["logits"].dtype),
                (num_rows,),
                **{name: at[name] for name in names},
                target_to_draft=at.get("target_to_draft", left),
                limits=limits,
                bounds=bounds,
                weights=weights,
                num_sequences=num_sequences,
                **sizes,
            )
        read = {name: at[name] for name in at if name not in ("top_k", "top_p", "min_p")}
        yield Launch.of(
            self._walk(given["logits"].dtype),
            (num_sequences,),
            **read,
            **dict.fromkeys(self._absent, left),  # not read in this form
            **{port.name: buffer.address for port, buffer in zip(self.outputs, outputs, strict=True)},
            limits=limits,
            bounds=bounds,
            weights=weights,
            left_of_all=left,
            **sizes,
        )

    @property
    def _weighs(self) -> bool:
        """Whether chains have distributions, and so joint weights."""
        return self.number("probs") > 0 and not self.number("tree")

    def _chain_weights(self, dtype: str) -> Variant:
        return plans.chain_weights(dtype=dtype, mapped=self.number("mapped") > 0)

    def _walk(self, dtype: str) -> Variant:
        probs = self.number("probs") > 0
        return plans.walk(
            dtype=dtype,
            tree=self.number("tree") > 0,
            probs=probs,
            mapped=probs and self.number("mapped") > 0,
        )
