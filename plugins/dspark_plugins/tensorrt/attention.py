"""`DSparkPagedAttention` and `DSparkBlockAttention` for TensorRT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from dspark_plugins.kernels import plans
from dspark_plugins.kernels.plans import Variant
from dspark_plugins.tensorrt.operation import Buffer, Fill, Launch, Operation, Port, Shape

__all__ = ["BlockAttention", "PagedAttention"]

_MASKS = (plans.CHAIN, plans.TREE)
_ROWS = (
    Port("q", "key"),
    Port("k", "key"),
    Port("v", "act"),
    Port("kv_cache", "act"),
    Port("cos", "fp32"),
    Port("sin", "fp32"),
)


class _Attention(Operation):
    attributes = ("page_size", "scale", "window")
    aliases: ClassVar = {1: 3}  # kv_cache_out is kv_cache
    outputs = (Port("attended", "act"), Port("kv_cache_out", "act"))

    def output_shapes(self, inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
        return [list(inputs[0]), list(inputs[3])]

    def check_heads(self, q: Shape, k: Shape, cache: Shape) -> None:
        """Raise ValueError unless heads of queries, keys and cache belong together."""
        heads, kv_heads, dim = q[-2], k[-2], q[-1]
        self.check(min(heads, kv_heads, dim) > 0, f"heads and head size must be fixed, got q {q} and k {k}")
        self.check(heads % kv_heads == 0, f"{kv_heads} key heads must divide {heads} query heads")
        self.check(
            dim == k[-1] and dim % 2 == 0, f"head sizes must be one even number, got {dim} and {k[-1]}"
        )
        wanted = (2, kv_heads, dim)
        self.check(cache[1:] == wanted, f"kv_cache must be [slots, 2, {kv_heads}, {dim}], got {cache}")

    def pieces(self, table: Shape, num_rows: int) -> int:
        """Return into how many pieces contexts are cut in a pass of `num_rows` rows."""
        num_sequences, max_pages = table
        max_context = max_pages * self.number("page_size")
        return plans.num_splits(num_rows=num_rows, num_sequences=num_sequences, max_context=max_context)

    def partials(self, pieces: int, rows: int, q: Shape) -> tuple[int, ...]:
        """Return the bytes of the pieces' sums and of their maxima and weights."""
        pairs = pieces * rows * q[-2] * 4 if pieces > 1 else 0
        return pairs * q[-1], pairs * 2

    def form(self, q: Shape, k: Shape, dtypes: Sequence[str], **rest: Any) -> Variant:
        """Return the form of the attention kernel for such rows."""
        return plans.attention(
            num_heads=q[-2],
            num_kv_heads=k[-2],
            head_dim=q[-1],
            dtype=dtypes[2],
            input_dtype=dtypes[0],
            rope=True,
            window=self.number("window") > 0,
            **rest,
        )

    def merge(self, q: Shape, dtypes: Sequence[str]) -> Variant:
        return plans.merge_splits(num_heads=q[-2], head_dim=q[-1], dtype=dtypes[2])

    def attend(
        self,
        variant: Variant,
        pieces: int,
        *,
        q: Buffer,
        k: Buffer,
        cache: Buffer,
        table: Buffer,
        out: Buffer,
        scratch: Sequence[int],
        num_rows: int,
        ancestor_words: int = 0,
        **addresses: int,
    ) -> Iterator[Launch]:
        """Yield the attention's launch and, with pieces, the one that joins them."""
        (heads, dim), kv_heads = q.shape[-2:], k.shape[-2]
        num_sequences, max_pages = table.shape
        acc, ml = scratch if pieces > 1 else (out.address, out.address)
        yield Launch.of(
            variant,
            plans.attention_grid(variant, num_rows=num_rows, num_sequences=num_sequences, num_pieces=pieces),
            q=q.address,
            k=k.address,
            kv_cache=cache.address,
            page_table=table.address,
            out=out.address,
            partial_acc=acc,
            partial_ml=ml,
            num_sequences=num_sequences,
            num_rows_total=num_rows,
            max_pages=max_pages,
            q_stride=heads * dim,
            k_stride=kv_heads * dim,
            v_stride=kv_heads * dim,
            ancestor_words=ancestor_words,
            page_size=self.number("page_size"),
            scale=float(self.values["scale"]),
            window=self.number("window"),
            split_len=plans.SPLIT_LEN,
            **addresses,
        )
        if pieces > 1:
            yield Launch.of(
                self.merge(q.shape, ("", "", out.dtype)),
                (num_rows * heads,),
                partial_acc=acc,
                partial_ml=ml,
                out=out.address,
                num_rows_total=num_rows,
                num_splits=pieces,
            )


class PagedAttention(_Attention):
    """One target layer over a ragged batch."""

    name = "DSparkPagedAttention"
    inputs = (
        *_ROWS,
        Port("page_table", "i32"),
        Port("query_start", "i32"),
        Port("context_len", "i32"),
        Port("slots", "i32"),
        Port("positions", "i32"),
        Port("ancestors", "i32"),
    )

    def variants(self, shapes: Sequence[Shape], dtypes: Sequence[str]) -> list[Variant]:
        q, k, words = shapes[0], shapes[1], shapes[11][1]
        self.check_heads(q, k, shapes[3])
        masks = _MASKS[:1] if words == 0 else _MASKS[1:] if words > 0 else _MASKS
        found = [
            self._chosen(q, k, dtypes, rows, mask, split)
            for mask in masks
            for rows in (*range(1, plans.SPLIT_ROWS + 1), *(plans.SPLIT_ROWS << n for n in range(1, 8)))
            for split in ((False, True) if rows <= plans.SPLIT_ROWS else (False,))
        ]
        return list({form.key: form for form in [*found, self.merge(q, dtypes)]}.values())

    def scratch(self, shapes: Sequence[Shape]) -> tuple[int, ...]:
        table = shapes[6]
        rows = min(shapes[0][0], plans.SPLIT_ROWS * table[0])  # longer passes are not cut
        return self.partials(self.pieces(table, 0), rows, shapes[0])

    def launches(
        self,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        scratch: Sequence[int],
        num_multiprocessors: int,  # noqa: ARG002
    ) -> Iterator[Launch | Fill]:
        q, k, v, cache, cos, sin, table, starts, context, slots, positions, ancestors = inputs
        num_rows, num_sequences = q.shape[0], table.shape[0]
        pieces = self.pieces(table.shape, num_rows)
        words = ancestors.shape[1]
        variant = self._chosen(
            q.shape,
            k.shape,
            [buffer.dtype for buffer in inputs],
            plans.cdiv(num_rows, max(num_sequences, 1)),
            plans.TREE if words else plans.CHAIN,
            pieces > 1,
        )
        out = outputs[0]
        yield from self.attend(
            variant,
            pieces,
            q=q,
            k=k,
            cache=cache,
            table=table,
            out=out,
            scratch=scratch,
            num_rows=num_rows,
            ancestor_words=words,
            v=v.address,
            cos=cos.address,
            sin=sin.address,
            query_start=starts.address,
            context_len=context.address,
            slots=slots.address,
            positions=positions.address,
            ancestors=ancestors.address if words else out.address,
        )

    def _chosen(
        self, q: Shape, k: Shape, dtypes: Sequence[str], rows: int, mask: int, split: bool
    ) -> Variant:
        return self.form(q, k, dtypes, rows=rows, fixed_rows=0, mask=mask, write=True, split=split)


class BlockAttention(_Attention):
    """One drafter layer: the new context rows, then every block."""

    name = "DSparkBlockAttention"
    inputs = (
        *_ROWS,
        Port("new_k", "key"),
        Port("new_v", "act"),
        Port("new_cos", "fp32"),
        Port("new_sin", "fp32"),
        Port("new_slots", "i32"),
        Port("page_table", "i32"),
        Port("context_len", "i32"),
        Port("anchor_positions", "i32"),
    )

    def variants(self, shapes: Sequence[Shape], dtypes: Sequence[str]) -> list[Variant]:
        q, k = shapes[0], shapes[1]
        self.check_heads(q, k, shapes[3])
        self.check(q[1] > 0, f"the block size must be fixed, got q {q}")
        forms = [self._chosen(q, k, dtypes, split) for split in (False, True)]
        return [*forms, self._write(k, dtypes), self.merge(q, dtypes)]

    def scratch(self, shapes: Sequence[Shape]) -> tuple[int, ...]:
        q = shapes[0]
        return self.partials(self.pieces(shapes[11], 0), q[0] * q[1], q)

    def launches(
        self,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        scratch: Sequence[int],
        num_multiprocessors: int,  # noqa: ARG002
    ) -> Iterator[Launch | Fill]:
        q, k, v, cache, cos, sin, new_k, new_v, new_cos, new_sin, new_slots, table, context, anchors = inputs
        dtypes = [buffer.dtype for buffer in inputs]
        num_sequences, block_size = q.shape[:2]
        kv_heads, dim = k.shape[2:]
        write = self._write(k.shape, dtypes)
        yield Launch.of(
            write,
            (plans.cdiv(new_slots.shape[0], int(write.constants["BLOCK_ROWS"])), kv_heads),
            k=new_k.address,
            v=new_v.address,
            kv_cache=cache.address,
            cos=new_cos.address,
            sin=new_sin.address,
            slots=new_slots.address,
            num_rows=new_slots.shape[0],
            k_stride=kv_heads * dim,
            v_stride=kv_heads * dim,
        )
        num_rows = num_sequences * block_size
        pieces = self.pieces(table.shape, num_rows)
        out = outputs[0]
        yield from self.attend(
            self._chosen(q.shape, k.shape, dtypes, pieces > 1),
            pieces,
            q=q,
            k=k,
            cache=cache,
            table=table,
            out=out,
            scratch=scratch,
            num_rows=num_rows,
            v=v.address,
            cos=cos.address,
            sin=sin.address,
            query_start=out.address,  # not read in this form, nor are the next two
            slots=out.address,
            ancestors=out.address,
            context_len=context.address,
            positions=anchors.address,
        )

    def _chosen(self, q: Shape, k: Shape, dtypes: Sequence[str], split: bool) -> Variant:
        block = q[1]
        return self.form(
            q, k, dtypes, rows=block, fixed_rows=block, mask=plans.FULL, write=False, split=split
        )

    def _write(self, k: Shape, dtypes: Sequence[str]) -> Variant:
        return plans.write_rows(
            num_kv_heads=k[-2], head_dim=k[-1], dtype=dtypes[2], input_dtype=dtypes[0], rope=True
        )
