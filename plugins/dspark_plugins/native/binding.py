"""The C interface through ctypes: handles with owners, arrays as pointers.

The executors validate their batches first; nothing is checked twice here. Where native code has no memory for
something, any call raises NativeError with what and how much; what was there before may be used on. Calls release the
interpreter's lock; a pool is used by one thread at a time, which its own lock sees to.
"""

from __future__ import annotations

import ctypes as ct
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = [
    "DTYPES",
    "ISAS",
    "Arena",
    "DecoderShape",
    "Matrix",
    "NativeDecoder",
    "NativeError",
    "NativeHead",
    "Pool",
    "isa",
    "native_available",
    "native_unavailable_reason",
    "to_bfloat16",
]

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
RowKind = Literal["plain", "gate", "up"]
MatrixRole = Literal["qkv", "output", "gate_up", "down"]
NormRole = Literal["input", "post", "q", "k", "final"]

DTYPES = {"float32": 0, "bfloat16": 1, "int8": 2}
_ROW_KINDS = {"plain": 0, "gate": 1, "up": 2}
_MATRIX_ROLES = {"qkv": 0, "output": 1, "gate_up": 2, "down": 3}
_NORM_ROLES = {"input": 0, "post": 1, "q": 2, "k": 3, "final": 4}
CHAIN, MASK, BLOCK = 0, 1, 2  # what a row sees of its own sequence's rows
ISAS = ("avx512", "avxvnni", "avx2", "portable")


class NativeError(Exception):
    """Native code cannot run, or there is no memory for what it was asked."""


class _DecoderConfig(ct.Structure):
    _fields_ = (
        *((name, ct.c_int32) for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads")),
        *((name, ct.c_int32) for name in ("num_kv_heads", "head_dim", "dtype", "cache_dtype")),
        ("rms_norm_eps", ct.c_float),
        ("windows", ct.c_void_p),
        ("isa", ct.c_char_p),
    )


class Pass(ct.Structure):
    """One call of a decoder; the fields are DSparkPass's of dspark_native.h, arrays as addresses."""

    _fields_ = (
        *(
            (name, ct.c_int32)
            for name in ("num_rows", "num_sequences", "max_pages", "page_size", "mask_words")
        ),
        *(
            (name, ct.c_int32)
            for name in ("visibility", "num_logit_rows", "num_taps", "logits_width", "reserved")
        ),
        *(
            (name, ct.c_void_p)
            for name in ("tokens", "positions", "query_start", "context_len", "page_table")
        ),
        *((name, ct.c_void_p) for name in ("slots", "ancestors", "logit_rows", "taps", "cos", "sin")),
        *((name, ct.c_void_p) for name in ("features", "hidden", "logits", "argmax", "finite")),
    )


class _HeadConfig(ct.Structure):
    _fields_ = (
        *(
            (name, ct.c_int32)
            for name in ("hidden_size", "rank", "kind", "draft_vocab_size", "w1_is_bfloat16")
        ),
        ("confidence_sees_previous", ct.c_int32),
        ("confidence_bias", ct.c_float),
        ("reserved", ct.c_int32),
        *(
            (name, ct.c_void_p)
            for name in (
                "w1",
                "mix_bias",
                "confidence",
                "greedy_confidence",
                "previous_to_row",
                "draft_to_target",
            )
        ),
        *((name, ct.c_void_p) for name in ("w2", "mix")),
        ("isa", ct.c_char_p),
    )


class TreeCall(ct.Structure):
    """One call of `NativeHead.tree`; the fields are DSparkTreeCall's of dspark_tree.h, arrays as addresses."""

    _fields_ = (
        *(
            (name, ct.c_int32)
            for name in ("num_sequences", "steps", "width", "branch", "max_nodes", "reserved")
        ),
        *((name, ct.c_void_p) for name in ("anchors", "hidden", "logits", "tokens", "parents", "depths")),
        *((name, ct.c_void_p) for name in ("ranks", "log_q", "rating", "num_nodes")),
    )


class _Status(ct.c_int32):
    """0, or -1 when there was no memory."""


_handle, _i32, _i64, _ptr, _text = ct.c_void_p, ct.c_int32, ct.c_int64, ct.c_void_p, ct.c_char_p
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dspark_last_error": (_text, ()),
    "dspark_isa": (_text, (_text,)),
    "dspark_pool_create": (_handle, (_i32, _i32)),
    "dspark_pool_destroy": (None, (_handle,)),
    "dspark_pool_threads": (_i32, (_handle,)),
    "dspark_arena_create": (_handle, ()),
    "dspark_arena_destroy": (None, (_handle,)),
    "dspark_arena_bytes": (_i64, (_handle,)),
    "dspark_matrix_create": (_handle, (_handle, _i32, _i32, _i32)),
    "dspark_matrix_pack": (_Status, (_handle, _handle, _ptr, _i32, _i32, _i32)),
    "dspark_matrix_rows": (_Status, (_handle, _handle, _ptr, _i32, _ptr)),
    "dspark_matrix_bytes": (_i64, (_handle,)),
    "dspark_matrix_apply": (_Status, (_handle, _handle, _text, _ptr, _i32, _ptr)),
    "dspark_decoder_create": (_handle, (ct.POINTER(_DecoderConfig), _handle)),
    "dspark_decoder_destroy": (None, (_handle,)),
    "dspark_decoder_set_matrix": (None, (_handle, _i32, _i32, _handle)),
    "dspark_decoder_set_norm": (_Status, (_handle, _i32, _i32, _ptr, _i32)),
    "dspark_decoder_set_ends": (None, (_handle, _handle, _handle)),
    "dspark_decoder_allocate_cache": (_Status, (_handle, _i64)),
    "dspark_decoder_touch_cache": (_Status, (_handle,)),
    "dspark_decoder_move_cache": (None, (_handle, _i32, _ptr, _ptr)),
    "dspark_decoder_forward": (_Status, (_handle, ct.POINTER(Pass))),
    "dspark_decoder_append": (_Status, (_handle, _handle, _ptr, _ptr, _i32, _ptr, _ptr, _ptr, _ptr)),
    "dspark_head_create": (_handle, (ct.POINTER(_HeadConfig), _handle)),
    "dspark_head_destroy": (None, (_handle,)),
    "dspark_head_greedy": (_Status, (_handle, _i32, _i32, _ptr, _ptr, _ptr, _ptr, _ptr, _ptr)),
    "dspark_head_sample": (_Status, (_handle, _i32, _i32, *((_ptr,) * 10))),
    "dspark_head_step": (_Status, (_handle, _i32, _ptr, _ptr, _ptr, _ptr)),
    "dspark_head_confidence": (_Status, (_handle, _i32, _ptr, _ptr, _ptr)),
    "dspark_tree_create": (_handle, (ct.POINTER(_HeadConfig), _handle)),
    "dspark_tree_destroy": (None, (_handle,)),
    "dspark_tree_build": (_Status, (_handle, ct.POINTER(TreeCall))),
    "dspark_arena_read_seconds": (_Status, (_handle, _handle, _text, _i32, _ptr)),
    "dspark_read_seconds": (ct.c_double, (_handle, _text, _i64)),
}

_load_lock = threading.Lock()
_library: ct.CDLL | None = None
_reason: str | None = None


def _raise_failure(result: Any, _function: Any, _arguments: tuple[Any, ...]) -> Any:
    """Raise NativeError with what had no memory where a call gave -1 or a null handle."""
    if result is None or (isinstance(result, _Status) and result.value):
        text: bytes = _load().dspark_last_error()
        raise NativeError(text.decode())
    return result


def _load() -> ct.CDLL:
    """Return the library, built and opened on first use. Raises NativeError with the reason, remembered."""
    global _library, _reason
    from dspark_plugins.native.build import BuildError, build_library  # late: build.py is also a program

    with _load_lock:
        if _library is None and _reason is None:
            try:
                library = ct.CDLL(str(build_library()))
                for name, (result, arguments) in _SIGNATURES.items():
                    function = getattr(library, name)
                    function.restype, function.argtypes = result, arguments
                    if result in (_Status, _handle):
                        function.errcheck = _raise_failure
                _library = library
            except (BuildError, OSError, AttributeError) as error:
                _reason = str(error)
        if _library is None:
            raise NativeError(_reason)
        return _library


def native_unavailable_reason() -> str | None:
    """Return why native code cannot run here, None when it can. The first call may compile (seconds)."""
    try:
        _load()
    except NativeError as error:
        return str(error)
    return None


def native_available() -> bool:
    return native_unavailable_reason() is None


def _wanted_isa() -> bytes | None:
    wanted = os.environ.get("DSPARK_NATIVE_ISA")
    if wanted is None:
        return None
    if wanted not in ISAS:
        raise NativeError(f"DSPARK_NATIVE_ISA is {wanted!r}, allowed are {', '.join(ISAS)}")
    return wanted.encode()


def isa() -> str:
    """Return the instruction set in use, one of ISAS (DSPARK_NATIVE_ISA forces a lower one)."""
    name: bytes = _load().dspark_isa(_wanted_isa())
    return name.decode()


def _address(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data


class Pool:
    """Worker threads; the caller's own thread is one of `num_threads`."""

    def __init__(self, num_threads: int, *, pin: bool = False) -> None:
        self._library = _load()
        self.handle = self._library.dspark_pool_create(num_threads, int(pin))
        self.num_threads: int = self._library.dspark_pool_threads(self.handle)
        self.lock = threading.Lock()

    def read_bandwidth(self, num_bytes: int = 1 << 28) -> float:
        """Return bytes per second that all threads together read from memory, the best of three reads."""
        with self.lock:
            seconds = float(self._library.dspark_read_seconds(self.handle, _wanted_isa(), num_bytes))
        if not seconds:
            raise NativeError(f"no memory to read {num_bytes} bytes of")
        return num_bytes / seconds

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.dspark_pool_destroy(self.handle)
            self.handle = None


class Arena:
    """Memory of weight matrices, freed as a whole."""

    def __init__(self) -> None:
        self._library = _load()
        self.handle = self._library.dspark_arena_create()

    @property
    def num_bytes(self) -> int:
        return int(self._library.dspark_arena_bytes(self.handle))

    def read_seconds(self, pool: Pool, times: int) -> npt.NDArray[np.float64]:
        """Return the seconds [times] that all threads of the pool took to read all of it, again and again."""
        seconds = np.empty(times, np.float64)
        with pool.lock:
            self._library.dspark_arena_read_seconds(
                self.handle, pool.handle, _wanted_isa(), times, _address(seconds)
            )
        return seconds

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.dspark_arena_destroy(self.handle)
            self.handle = None


class Matrix:
    """A packed weight matrix [num_outputs, num_inputs] of one dtype."""

    def __init__(self, arena: Arena, pool: Pool, *, dtype: str, num_outputs: int, num_inputs: int) -> None:
        self._library, self._arena, self._pool = _load(), arena, pool
        self.dtype, self.num_outputs, self.num_inputs = dtype, num_outputs, num_inputs
        self.handle = self._library.dspark_matrix_create(arena.handle, DTYPES[dtype], num_outputs, num_inputs)

    @property
    def num_bytes(self) -> int:
        return int(self._library.dspark_matrix_bytes(self.handle))

    def pack(self, rows: Float32, *, first_row: int = 0, kind: RowKind = "plain") -> None:
        """Convert and store rows [n, num_inputs] as outputs first_row.. of their kind."""
        rows = np.ascontiguousarray(rows, np.float32)
        limit = self.num_outputs if kind == "plain" else self.num_outputs // 2
        if rows.ndim != 2 or rows.shape[1] != self.num_inputs or first_row + len(rows) > limit:
            raise NativeError(
                f"rows {list(rows.shape)} at {first_row} do not fit a matrix of {limit} x {self.num_inputs}"
            )
        with self._pool.lock:
            self._library.dspark_matrix_pack(
                self.handle, self._pool.handle, _address(rows), len(rows), first_row, _ROW_KINDS[kind]
            )

    def rows(self, ids: Int32) -> Float32:
        """Return rows [n, num_inputs], widened to float32."""
        ids = np.ascontiguousarray(ids, np.int32)
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.num_outputs):
            raise NativeError(f"row ids {ids.min()} to {ids.max()} are outside 0 to {self.num_outputs - 1}")
        out = np.empty((len(ids), self.num_inputs), np.float32)
        with self._pool.lock:
            self._library.dspark_matrix_rows(
                self.handle, self._pool.handle, _address(ids), len(ids), _address(out)
            )
        return out

    def apply(self, x: Float32) -> Float32:
        """Return x [n, num_inputs] times the transposed matrix: [n, num_outputs]."""
        x = np.ascontiguousarray(x, np.float32)
        if x.ndim != 2 or x.shape[1] != self.num_inputs:
            raise NativeError(f"input is {list(x.shape)}, allowed is [n, {self.num_inputs}]")
        out = np.empty((len(x), self.num_outputs), np.float32)
        if len(x):
            with self._pool.lock:
                self._library.dspark_matrix_apply(
                    self.handle, self._pool.handle, _wanted_isa(), _address(x), len(x), _address(out)
                )
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a stack of decoder layers. `windows` holds one sliding window per layer, 0 = all positions."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    windows: Sequence[int] = ()


class NativeDecoder:
    """A stack of decoder layers with its paged cache."""

    def __init__(self, shape: DecoderShape, pool: Pool, *, dtype: str, cache_dtype: str) -> None:
        self._library, self.pool, self.shape = _load(), pool, shape
        self._keep: list[Matrix] = []
        windows = np.array(shape.windows or [0] * shape.num_layers, np.int32)
        config = _DecoderConfig(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=DTYPES[dtype],
            cache_dtype=DTYPES[cache_dtype],
            rms_norm_eps=shape.rms_norm_eps,
            windows=_address(windows),
            isa=_wanted_isa(),
        )
        self.handle = self._library.dspark_decoder_create(ct.byref(config), pool.handle)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.dspark_decoder_destroy(self.handle)
            self.handle = None

    def set_matrix(self, layer: int, role: MatrixRole, matrix: Matrix) -> None:
        self._keep.append(matrix)
        self._library.dspark_decoder_set_matrix(self.handle, layer, _MATRIX_ROLES[role], matrix.handle)

    def set_norm(self, layer: int, role: NormRole, weight: Float32) -> None:
        weight = np.ascontiguousarray(weight, np.float32)
        self._library.dspark_decoder_set_norm(
            self.handle, layer, _NORM_ROLES[role], _address(weight), weight.size
        )

    def set_ends(self, embedding: Matrix, head: Matrix | None) -> None:
        self._keep += [embedding] if head is None else [embedding, head]
        self._library.dspark_decoder_set_ends(self.handle, embedding.handle, head.handle if head else None)

    def allocate_cache(self, num_slots: int) -> None:
        with self.pool.lock:
            self._library.dspark_decoder_allocate_cache(self.handle, num_slots)

    def touch_cache(self) -> None:
        """Have the system give the cache's memory now: in a virtual machine a first touch takes milliseconds."""
        with self.pool.lock:
            self._library.dspark_decoder_touch_cache(self.handle)

    def move_cache(self, from_slots: Int32, to_slots: Int32) -> None:
        """Copy keys and values of every layer from slot to slot [n], in order."""
        with self.pool.lock:
            self._library.dspark_decoder_move_cache(
                self.handle, len(from_slots), _address(from_slots), _address(to_slots)
            )

    def forward(self, call: Pass) -> None:
        with self.pool.lock:
            self._library.dspark_decoder_forward(self.handle, ct.byref(call))

    def append(
        self,
        fc: Matrix,
        norm: Float32,
        features: Float32,
        positions: Int32,
        slots: Int32,
        cos: Float32,
        sin: Float32,
    ) -> None:
        with self.pool.lock:
            self._library.dspark_decoder_append(
                self.handle,
                fc.handle,
                _address(norm),
                _address(features),
                len(features),
                _address(positions),
                _address(slots),
                _address(cos),
                _address(sin),
            )


def to_bfloat16(array: Float32) -> npt.NDArray[np.uint16]:
    """Return the bits of bfloat16, rounded to nearest even; finite input only."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16)


class NativeHead:
    """The sequential head and the confidence head of a block drafter.

    Arguments:
        w1: [rows, r] float32, or the bits of bfloat16; None at rank 0, and so are w2 and mix.
        w2: [Vd, r].
        mix: gate [r, d + r] or recurrent [3 r, 2 r + d] projection with its bias, by `kind`.
        confidence: [d] or [d + r] float32 and its bias.
        greedy_confidence: [G, 3] float32, weights of the confidence logit, of logit q and of 1 for arg-max drafts.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        kind: Literal["none", "vanilla", "gated", "rnn"],
        hidden_size: int,
        draft_vocab_size: int,
        w1: npt.NDArray[Any] | None,
        w2: Matrix | None,
        mix: Matrix | None,
        mix_bias: Float32 | None,
        confidence: Float32 | None,
        confidence_bias: float,
        previous_to_row: Int32 | None,
        draft_to_target: Int32 | None,
        greedy_confidence: Float32 | None = None,
    ) -> None:
        self._library, self._pool = _load(), pool
        arrays = (w1, mix_bias, confidence, greedy_confidence, previous_to_row, draft_to_target)
        self._keep = (*arrays, w2, mix)
        at = [None if array is None else _address(array) for array in arrays]
        self.rank = 0 if w1 is None else w1.shape[1]
        self.draft_vocab_size = draft_vocab_size
        config = _HeadConfig(
            hidden_size=hidden_size,
            rank=self.rank,
            kind=("none", "vanilla", "gated", "rnn").index(kind),
            draft_vocab_size=draft_vocab_size,
            w1_is_bfloat16=int(w1 is not None and w1.dtype == np.uint16),
            confidence_sees_previous=int(confidence is not None and confidence.size > hidden_size),
            confidence_bias=confidence_bias,
            w1=at[0],
            mix_bias=at[1],
            confidence=at[2],
            greedy_confidence=at[3],
            previous_to_row=at[4],
            draft_to_target=at[5],
            w2=w2.handle if w2 else None,
            mix=mix.handle if mix else None,
            isa=_wanted_isa(),
        )
        self.handle = self._library.dspark_head_create(ct.byref(config), pool.handle)
        self.makes_trees = kind in (
            "none",
            "vanilla",
        )  # the others carry more than the last token along a path
        self._tree = (
            self._library.dspark_tree_create(ct.byref(config), pool.handle) if self.makes_trees else None
        )

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.dspark_head_destroy(self.handle)
            self.handle = None
        if getattr(self, "_tree", None):
            self._library.dspark_tree_destroy(self._tree)
            self._tree = None

    def tree(self, call: TreeCall) -> None:
        """Grow the trees of a call whose arrays the caller made."""
        with self._pool.lock:
            self._library.dspark_tree_build(self._tree, ct.byref(call))

    def greedy(
        self, anchors: Int32, hidden: Float32, logits: Float32, *, with_confidence: bool
    ) -> tuple[Int32, npt.NDArray[np.bool_], Float32 | None]:
        """Return tokens, finite flags, confidence logits [n, steps]; `logits` [n, steps, Vd] is changed."""
        num, steps = logits.shape[:2]
        tokens, finite = np.empty((num, steps), np.int32), np.empty((num, steps), np.bool_)
        confidence = np.empty((num, steps), np.float32) if with_confidence else None
        with self._pool.lock:
            self._library.dspark_head_greedy(
                self.handle,
                num,
                steps,
                _address(anchors),
                _address(hidden),
                _address(logits),
                _address(tokens),
                _address(finite),
                None if confidence is None else _address(confidence),
            )
        return tokens, finite, confidence

    def sample(
        self,
        anchors: Int32,
        hidden: Float32,
        logits: Float32,
        samplings: npt.NDArray[np.void],
        probs: npt.NDArray[np.float64],
        entries: Int32,
        *,
        with_confidence: bool,
    ) -> tuple[Int32, npt.NDArray[np.bool_], Float32 | None, Int32]:
        """Draw as `samplings` [n] (DSparkSampling) say; fill q: probs and entries [n, steps, Vd].

        Returns:
            tokens, finite flags, confidence logits, and how many entries q keeps (0 = arg-max, Vd = all and
            entries not written), each [n, steps].
        """
        num, steps = logits.shape[:2]
        tokens, finite = np.empty((num, steps), np.int32), np.empty((num, steps), np.bool_)
        count = np.empty((num, steps), np.int32)
        confidence = np.empty((num, steps), np.float32) if with_confidence else None
        with self._pool.lock:
            self._library.dspark_head_sample(
                self.handle,
                num,
                steps,
                _address(anchors),
                _address(hidden),
                _address(logits),
                _address(samplings),
                _address(tokens),
                _address(finite),
                None if confidence is None else _address(confidence),
                _address(probs),
                _address(entries),
                _address(count),
            )
        return tokens, finite, confidence, count

    def step(self, previous: Int32, hidden: Float32, state: Float32 | None) -> Float32:
        """Return B_k [n, Vd]; `state` [n, r] is replaced in place."""
        bias = np.empty((len(previous), self.draft_vocab_size), np.float32)
        with self._pool.lock:
            self._library.dspark_head_step(
                self.handle,
                len(previous),
                _address(previous),
                _address(hidden),
                None if state is None else _address(state),
                _address(bias),
            )
        return bias

    def confidence(self, previous: Int32, hidden: Float32) -> Float32:
        """Return confidence logits [n]."""
        out = np.empty(len(previous), np.float32)
        with self._pool.lock:
            self._library.dspark_head_confidence(
                self.handle, len(previous), _address(previous), _address(hidden), _address(out)
            )
        return out
