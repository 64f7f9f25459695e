"""`DSparkBlockSample` for TensorRT: one cooperative launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dspark_plugins.kernels import plans
from dspark_plugins.kernels.plans import Variant
from dspark_plugins.tensorrt.operation import Buffer, Fill, Launch, Operation, Port, Shape

__all__ = ["BlockSample"]

_ALWAYS = (
    Port("base_logits", "fp32"),
    Port("hidden", "act"),
    Port("anchors", "i32"),
    Port("num_drafts", "i32"),
    Port("positions", "i32"),
    Port("seeds", "i64"),
    Port("temperature", "fp32"),
    Port("top_k", "i32"),
    Port("top_p", "fp32"),
    Port("min_p", "fp32"),
    Port("coupled", "i32"),
)
_RNN = 3


class BlockSample(Operation):
    """The sequential head, sampling and confidence of whole blocks."""

    name = "DSparkBlockSample"
    attributes = ("head", "confidence", "mapped", "previous")
    outputs = (
        Port("tokens", "i32"),
        Port("num_tokens", "i32"),
        Port("draft_probs", "fp32"),
        Port("confidence_logits", "fp32"),
    )

    def __init__(self, values: Mapping[str, int | float]) -> None:
        super().__init__(values)
        head, confidence = self.number("head"), self.number("confidence")
        self.check(0 <= head <= _RNN, f"head must be 0 to {_RNN}, got {head}")
        self.check(0 <= confidence <= 2, f"confidence must be 0, 1 or 2, got {confidence}")
        self.check(head > 0 or confidence < 2, "confidence 2 reads W1, which head 0 does not have")
        optional = (
            ("markov_in", "act", head > 0),
            ("markov_out", "act", head > 0),
            ("mix_weight", "act", head > 1),
            ("mix_bias", "act", head > 1),
            ("confidence_weight", "act", confidence > 0),
            ("confidence_bias", "fp32", confidence > 0),
            ("greedy_confidence", "fp32", confidence > 0),
            ("draft_to_target", "i32", self.number("mapped") > 0),
            ("previous_rows", "i32", self.number("previous") > 0),
        )
        self.inputs = (*_ALWAYS, *(Port(name, dtype) for name, dtype, there in optional if there))
        self._absent = tuple(name for name, _, there in optional if not there)
        self._at = {port.name: i for i, port in enumerate(self.inputs)}

    def output_shapes(self, inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
        num_blocks, block_size, vocab_size = inputs[0]
        pair = [num_blocks, block_size]
        return [pair, [num_blocks], [*pair, vocab_size], list(pair)]

    def variants(self, shapes: Sequence[Shape], dtypes: Sequence[str]) -> list[Variant]:
        _, block_size, vocab_size = shapes[0]
        hidden_size = shapes[1][2]
        self.check(
            min(block_size, vocab_size, hidden_size) > 0,
            f"block, vocabulary and width must be fixed, got base_logits {shapes[0]} and hidden {shapes[1]}",
        )
        rank, head = self._rank(shapes), self.number("head")
        if head:
            self.check(rank > 0, f"the rank must be fixed, got markov_in {shapes[self._at['markov_in']]}")
            out = shapes[self._at["markov_out"]]
            self.check(out == (vocab_size, rank), f"markov_out must be [{vocab_size}, {rank}], got {out}")
        if head > 1:
            wanted = (rank, hidden_size + rank) if head < _RNN else (3 * rank, 2 * rank + hidden_size)
            given = shapes[self._at["mix_weight"]]
            self.check(given == wanted, f"mix_weight must be {list(wanted)}, got {given}")
        return [self._form(shapes, dtypes)]

    def scratch(self, shapes: Sequence[Shape]) -> tuple[int, ...]:
        num_blocks, block_size, vocab_size = shapes[0]
        rank = self._rank(shapes)
        pairs, tiles = num_blocks * block_size, plans.cdiv(vocab_size, plans.VOCABULARY_TILE)
        words = (
            pairs * rank * (_RNN if self.number("head") == _RNN else 1),  # projected
            num_blocks * rank,  # mixed
            num_blocks * rank,  # state
            num_blocks * tiles * 3,  # tile_values
            num_blocks * tiles * 2,  # tile_entries
            pairs * 3,  # limits
            pairs * 2,  # bounds
            1,  # barrier
        )
        return tuple(4 * n for n in words)

    def launches(
        self,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        scratch: Sequence[int],
        num_multiprocessors: int,
    ) -> Iterator[Launch | Fill]:
        shapes = [buffer.shape for buffer in inputs]
        num_blocks, block_size, vocab_size = shapes[0]
        if not num_blocks:
            return
        names = (
            "projected",
            "mixed",
            "state",
            "tile_values",
            "tile_entries",
            "limits",
            "bounds",
            "barrier",
        )
        memory = dict(zip(names, scratch, strict=True))
        given = {port.name: buffer.address for port, buffer in zip(self.inputs, inputs, strict=True)}
        made = {port.name: buffer.address for port, buffer in zip(self.outputs, outputs, strict=True)}
        yield Fill(memory["barrier"], 1)
        yield Launch.of(
            self._form(shapes, [buffer.dtype for buffer in inputs]),
            (num_multiprocessors,),  # each surely resident: one per multiprocessor
            **given,
            **dict.fromkeys(self._absent, given["hidden"]),  # not read in this form
            **made,
            **memory,
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=vocab_size,
            hidden_size=shapes[1][2],
            num_tiles=plans.cdiv(vocab_size, plans.VOCABULARY_TILE),
            first_phase=0,
            last_phase=plans.num_phases(block_size),
        )

    def _rank(self, shapes: Sequence[Shape]) -> int:
        return shapes[self._at["markov_in"]][1] if "markov_in" in self._at else 0

    def _form(self, shapes: Sequence[Shape], dtypes: Sequence[str]) -> Variant:
        return plans.block_sample(
            vocab_size=shapes[0][2],
            rank=self._rank(shapes),
            head=self.number("head"),
            confidence=self.number("confidence"),
            mapped=self.number("mapped") > 0,
            previous=self.number("previous") > 0,
            dtype=dtypes[0],
            weight_dtype=dtypes[1],
            cooperative=True,
        )
