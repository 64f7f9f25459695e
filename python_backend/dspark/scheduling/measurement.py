"""Measuring the cost curve of a loaded pair: which passes, how often, and what is made of the times.

The clock is an argument, so the rules can be tested without one. Every size is measured in turn, round
after round, so that a slow spell of the machine touches all of them alike; the median of the rounds counts.
Then the places where the curve jumps are halved until both sides of each jump are measured sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from dspark.drafters.interface import Drafter, DraftInput
from dspark.errors import ConfigError
from dspark.executors.interface import StepBatch, TargetExecutor, TargetOutput
from dspark.request import SamplingParams
from dspark.sampling.transforms import TokenSampler
from dspark.scheduling.cost_model import CostCurve
from dspark.scheduling.interface import Float64

__all__ = ["Bench", "measure_curve", "pages_needed", "rising", "rows_of_a_sequence", "sizes_to_measure"]

Clock = Callable[[], float]
Progress = Callable[[float, str], None]

_ROWS_PER_SEQUENCE = 4  # of a verification pass, more where so many sequences may not be in one
_CONTEXT = 64  # cached tokens of every sequence
_LONG = 1024  # cached tokens of the passes that tell what context costs
_LONG_ROWS = 8
_CLIFF = 0.08  # relative jump between neighbouring sizes, beyond what their mean slope explains
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 40
_QUICK_ROUNDS = 3


def sizes_to_measure(most: int) -> list[int]:
    """Return the sizes of the first round: all small ones, then both sides of every usual bucket or tile."""
    sizes = set(range(1, 11)) | {12, 14, 20, 24, 28, 40, 48, 56, 80, 96, 112, 160, 192, 384, 768}
    for edge in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
        sizes |= {edge, edge + 1}
    return sorted({size for size in sizes if size <= most} | {most})


def _doubling(most: int) -> list[int]:
    """Return 1, 2, 4, ... and the largest, then what lies half way between them."""
    doubled = [size for size in (1 << shift for shift in range(14)) if size < most] + [most]
    return doubled + [low + low // 2 for low, high in pairwise(doubled) if low < low + low // 2 < high]


def pages_needed(
    *, max_target_tokens: int, page_size: int, long_context: int = _LONG, max_sequences: int = 0
) -> int:
    """Return the pages of the cache that measuring writes to.

    Arguments:
        max_sequences: of a pass; 0 = any number.
    """
    num_sequences = -(-max_target_tokens // _ROWS_PER_SEQUENCE)
    if max_sequences:
        num_sequences = min(num_sequences, max_sequences)
    own = _pages_of_rows(page_size, rows_of_a_sequence(max_target_tokens, max_sequences))
    return _shared_pages(page_size, long_context) + num_sequences * own


def rows_of_a_sequence(num_rows: int, max_sequences: int) -> int:
    """Return how many rows of a pass over `num_rows` a sequence has; `max_sequences` 0 = any number of them."""
    return max(_ROWS_PER_SEQUENCE, -(-num_rows // max_sequences) if max_sequences else 0)


def _shared_pages(page_size: int, long_context: int) -> int:
    return -(-max(long_context, _CONTEXT) // page_size)


def _pages_of_rows(page_size: int, most_rows: int) -> int:
    return -(-max(most_rows, _LONG_ROWS) // page_size) + 1  # the context may end inside a page


@dataclass(slots=True)
class Bench:
    """Makes passes over an allocated cache. All sequences share the pages of one context; their rows do not.

    max_sequences: of a pass; 0 = any number. Passes with more rows than that at four each give them more.
    most_rows: of a sequence, for the largest pass.
    """

    target: TargetExecutor
    drafter: Drafter
    page_size: int
    long_context: int = _LONG  # cached tokens of the passes that tell what context costs
    max_sequences: int = 0
    most_rows: int = _ROWS_PER_SEQUENCE
    context_len: int = 0

    def fill(self, context_len: int) -> None:
        """Compute the shared context in whole pages, features for the drafter included."""
        context_len = max(context_len // self.page_size, 1) * self.page_size
        self.context_len = 0
        for start in range(0, context_len, 128):
            count = min(128, context_len - start)
            self.context_len = start
            batch = self._batch([count], logits=False)
            output = self.target.forward(batch)
            if output.features is not None and self.drafter.block_size:
                self.drafter.observe(features=output.features, positions=batch.positions, slots=batch.slots)
        self.context_len = context_len

    def verify(self, num_rows: int, *, rows_per_sequence: int = 0) -> TargetOutput:
        """Run a pass over `num_rows` decoding rows, all of whose logits are needed; 0 of a sequence = as usual."""
        each = rows_per_sequence or rows_of_a_sequence(num_rows, self.max_sequences)
        full, rest = divmod(num_rows, each)
        return self.target.forward(self._batch([each] * full + [rest] * (rest > 0)))

    def draft(self, num_blocks: int) -> None:
        """Draft one greedy block for each of `num_blocks` sequences."""
        tokens = self._tokens(self.context_len + 1)
        vocab_size = self.target.config.vocab_size
        pages = list(range(self.context_len // self.page_size))
        inputs = []
        for sequence in range(num_blocks):
            sampler = TokenSampler(
                SamplingParams(temperature=0.0),
                seed=sequence,
                prompt_ids=tokens,
                vocab_size=vocab_size,
                eos_ids=(),
            )
            own = self._own_pages(sequence, 1)
            inputs.append(
                DraftInput(
                    sequence_id=-1 - sequence,
                    token_ids=tokens,
                    max_drafts=self.drafter.block_size,
                    sampler=sampler,
                    pages=np.array([*pages, *own], np.int32),
                )
            )
        self.drafter.propose(inputs)

    def release(self, num_blocks: int) -> None:
        """Let the drafter forget the sequences of `draft`."""
        for sequence in range(num_blocks):
            self.drafter.release(-1 - sequence)

    def _tokens(self, count: int) -> list[int]:
        return [(7919 * i + 11) % self.target.config.vocab_size for i in range(count)]

    def _own_pages(self, sequence: int, num_rows: int) -> list[int]:
        own = _pages_of_rows(self.page_size, self.most_rows)
        first = _shared_pages(self.page_size, self.long_context) + sequence * own
        last = (self.context_len % self.page_size + num_rows - 1) // self.page_size
        return list(range(first, first + last + 1))

    def _batch(self, rows: list[int], *, logits: bool = True) -> StepBatch:
        """Return a pass with so many rows of each sequence, behind the context computed so far."""
        context, page_size = self.context_len, self.page_size
        shared = list(range(context // page_size))
        num_rows = sum(rows)
        query_start = np.zeros(len(rows) + 1, np.int32)
        query_start[1:] = np.cumsum(rows)
        offsets = np.concatenate([np.arange(n) for n in rows]).astype(np.int32)
        positions = (context + offsets).astype(np.int32)
        filling = not logits
        tables = []
        for sequence, count in enumerate(rows):
            if filling:
                tables.append(list(range(-(-(context + count) // page_size))))
            else:
                tables.append(shared + self._own_pages(sequence, count))
        page_table = np.full((len(rows), max(map(len, tables))), -1, np.int32)
        for sequence, table in enumerate(tables):
            page_table[sequence, : len(table)] = table
        owner = np.repeat(np.arange(len(rows)), rows)
        slots = page_table[owner, positions // page_size] * page_size + positions % page_size
        picked = np.arange(num_rows) if logits else np.array([num_rows - 1])
        return StepBatch(
            tokens=np.array(self._tokens(num_rows), np.int32),
            positions=positions,
            query_start=query_start,
            context_len=np.full(len(rows), context, np.int32),
            page_table=page_table,
            slots=slots.astype(np.int32),
            logit_rows=picked.astype(np.int32),
        )


def measure_curve(
    bench: Bench,
    *,
    max_target_tokens: int,
    max_blocks: int,
    budget_s: float,
    clock: Clock,
    progress: Progress,
    max_context_len: int,
    quick: bool = False,
) -> CostCurve:
    """Measure the curve of a bench whose caches are allocated.

    Arguments:
        max_target_tokens: rows of the largest pass.
        max_blocks: most sequences that are drafted together.
        budget_s: seconds to spend; three rounds are made whatever it says.
        clock: monotonic seconds.
        progress: called with the share done (0 to 1) and what is being measured.
        max_context_len: of the model; long passes stay below it.
        quick: keep to the budget: few sizes, no search for cliffs, and large sizes are left out where they take
            too long (the curve goes on with its mean slope, and serving corrects it).

    Raises:
        ConfigError: the measured curve is not one (see `CostCurve.check_measured`).
    """
    if max_target_tokens < 2:
        raise ConfigError(f"max_target_tokens: got {max_target_tokens}, allowed is at least 2")
    started = clock()
    bench.fill(min(_CONTEXT, max_context_len // 2))
    sizes = sizes_to_measure(max_target_tokens)
    if quick:
        limit_s = 0.55 * budget_s / (_QUICK_ROUNDS + 1)
        sizes = _affordable(_doubling(max_target_tokens), bench.verify, clock=clock, limit_s=limit_s)
    seconds = _rounds(
        sizes,
        bench.verify,
        clock=clock,
        until=started + 0.55 * budget_s,
        progress=lambda share, size: progress(0.55 * share, f"target pass over {size} rows"),
        quick=quick,
    )
    curve = dict(zip(sizes, seconds.tolist(), strict=True))
    for level in range(0 if quick else 5):
        jumps = _jumps(curve)
        if not jumps:
            break
        again = sorted({size for jump in jumps for size in jump})
        more = _rounds(
            again,
            bench.verify,
            clock=clock,
            until=clock() + 0.03 * budget_s,
            progress=partial(_refining, progress, level),
        )
        now = dict(zip(again, more.tolist(), strict=True))
        for low, middle, high in jumps:
            # Against its neighbours, measured again beside it: the machine may be in another mood than before.
            curve[middle] = now[middle] * ((curve[low] / now[low]) * (curve[high] / now[high])) ** 0.5
    sizes = sorted(curve)
    verify_s = rising(np.array([curve[size] for size in sizes]))

    blocks: list[int] = []
    draft_s = np.zeros(0)
    if bench.drafter.block_size:
        blocks = sorted({b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256) if b < max_blocks} | {max_blocks})
        if quick:
            blocks = _affordable(
                _doubling(max_blocks), bench.draft, clock=clock, limit_s=0.25 * budget_s / (_QUICK_ROUNDS + 1)
            )
        draft_s = rising(
            _rounds(
                blocks,
                bench.draft,
                clock=clock,
                until=clock() + 0.15 * budget_s,
                progress=lambda share, size: progress(0.7 + 0.2 * share, f"drafting {size} blocks"),
                quick=quick,
            )
        )
        bench.release(max_blocks)
    progress(0.9, "long context")
    row_context_s, context_s = _context_cost(
        bench, clock=clock, budget_s=0.1 * budget_s, limit=max_context_len
    )
    progress(1.0, "done")
    result = CostCurve(
        target_tokens=tuple(sizes),
        verify_s=tuple(verify_s.tolist()),
        num_blocks=tuple(blocks),
        draft_s=tuple(draft_s.tolist()),
        row_context_s=row_context_s,
        context_s=context_s,
    )
    result.check_measured()
    return result


def _refining(progress: Progress, level: int, share: float, size: int) -> None:
    progress(0.55 + 0.03 * (level + share), f"cliffs up to {size} rows")


def rising(seconds: Float64) -> Float64:
    """Return the non-falling curve nearest to `seconds` (least squares on the logarithm).

    More rows never cost less; where they seemed to, that was noise, and a scheduler would chase it.
    """
    values: list[list[float]] = []  # [mean of the logarithm, number of points]
    for value in np.log(seconds):
        values.append([float(value), 1.0])
        while len(values) > 1 and values[-2][0] > values[-1][0]:
            last, count = values.pop()
            before, number = values[-1]
            values[-1] = [(before * number + last * count) / (number + count), number + count]
    return np.asarray(np.exp(np.repeat([v for v, _ in values], [int(n) for _, n in values])))


def _rounds(
    sizes: list[int],
    run: Callable[[int], object],
    *,
    clock: Clock,
    until: float,
    progress: Callable[[float, int], None],
    quick: bool = False,
) -> Float64:
    """Return the median seconds of each size [n]; one unmeasured round first, unless `_affordable` was that."""
    if not quick:
        for size in sizes:
            run(size)
    least = _QUICK_ROUNDS if quick else _LEAST_ROUNDS
    started = clock()
    rounds: list[list[float]] = []
    while len(rounds) < least or (clock() < until and len(rounds) < _MOST_ROUNDS):
        times = []
        for size in sizes:
            before = clock()
            run(size)
            times.append(clock() - before)
        rounds.append(times)
        share = max((clock() - started) / max(until - started, 1e-9), len(rounds) / _MOST_ROUNDS)
        progress(min(share, 1.0), sizes[-1])
    return np.asarray(np.maximum(np.median(np.array(rounds), axis=0), 1e-9))


def _affordable(sizes: list[int], run: Callable[[int], object], *, clock: Clock, limit_s: float) -> list[int]:
    """Run sizes once each, in this order; return, ascending, those that fit into the limit, three at least.

    What a size would take is foreseen from the largest so far, in proportion.
    """
    run(sizes[0])  # the very first pass sets things up
    started = clock()
    kept: dict[int, float] = {}
    for size in sizes:
        if len(kept) >= 3:
            largest = max(kept)
            expected_s = kept[largest] * max(size / largest, 1.0)
            if clock() - started + expected_s > limit_s:
                continue
        before = clock()
        run(size)
        kept[size] = clock() - before
    return sorted(kept)


def _jumps(curve: dict[int, float]) -> list[tuple[int, int, int]]:
    """Return neighbours that are farther apart in time than their slope explains, and the size between them."""
    sizes = sorted(curve)
    overall = (curve[sizes[-1]] - curve[sizes[0]]) / (sizes[-1] - sizes[0])
    return [
        (low, (low + high) // 2, high)
        for low, high in pairwise(sizes)
        if high - low > 1
        and curve[high] - curve[low] - max(overall, 0.0) * (high - low) > _CLIFF * curve[low]
    ]


def _context_cost(bench: Bench, *, clock: Clock, budget_s: float, limit: int) -> tuple[float, float]:
    """Return the seconds per row and cached token, and per cached token, from passes of 1 and 8 rows."""
    long = min(bench.long_context, limit - _LONG_ROWS - 1)
    short = bench.context_len
    if long < 4 * short:
        return 0.0, 0.0

    bench.fill(long)
    lengths = (short, bench.context_len)
    cases = [(length, num_rows) for length in lengths for num_rows in (1, _LONG_ROWS)]

    def one_sequence(case: int) -> TargetOutput:
        bench.context_len, num_rows = cases[case]  # the front of a long context is a short one
        return bench.verify(num_rows, rows_per_sequence=_LONG_ROWS)

    def ignore(_share: float, _size: int) -> None:
        return None

    # Short and long in turn: what tells them apart is less than what a machine's mood does.
    times = _rounds(
        list(range(len(cases))), one_sequence, clock=clock, until=clock() + budget_s / 2, progress=ignore
    )
    extra = (times[2:] - times[:2]) / (
        lengths[1] - lengths[0]
    )  # seconds per cached token with 1 and with 8 rows
    per_row = max(float(extra[1] - extra[0]) / (_LONG_ROWS - 1), 0.0)
    return per_row, max(float(extra[0]) - per_row, 0.0)
