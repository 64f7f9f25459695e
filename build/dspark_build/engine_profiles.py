"""Which sizes an engine takes: one optimisation profile for decoding and verifying, one for prompts.

Pure numbers; the letters are those of `dspark.executors.tensorrt_bindings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.errors import ConfigError
from dspark.executors.tensorrt_bindings import Binding

__all__ = ["EngineLimits", "Profile", "profile_shapes", "profiles_of"]

Range = tuple[int, int, int]  # least, usual, most
_MOST_ELEMENTS = 2**31 - 1  # of a tensor
_OPTIONS = {  # what a dimension's largest size comes from
    **dict.fromkeys(("R", "R+1", "M", "Q", "D"), ("--max-batch",)),
    **dict.fromkeys(("T", "N"), ("--max-batch", "--max-tokens")),
    "P": ("--max-pages",),
    "S": ("--max-batch", "--max-pages"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The largest calls."""

    max_batch: int  # sequences
    max_tokens: int  # prompt rows of a step; a row and a block for every sequence come on top
    max_pages: int  # of a sequence
    page_size: int
    block_size: int  # drafts of a sequence and step

    @property
    def step_rows(self) -> int:
        """Rows of a pass in which every sequence verifies a whole block."""
        return self.max_batch * (1 + self.block_size)


@dataclass(frozen=True, slots=True)
class Profile:
    """Sizes of every dimension that has a name."""

    name: str
    sizes: dict[str, Range]


def profiles_of(limits: EngineLimits) -> tuple[Profile, Profile]:
    """Return the profile of decoding and verifying, tuned for whole batches, and the one that takes any call."""
    sequences, every = limits.max_batch, limits.max_tokens + limits.step_rows
    step = min(1 << (limits.step_rows - 1).bit_length(), every)  # the runtime rounds rows up to powers of two
    logit_rows = limits.step_rows + sequences
    slots = (sequences * limits.max_pages + 1) * limits.page_size  # one page takes what is padding
    common: dict[str, Range] = {
        "R": (1, sequences, sequences),
        "R+1": (2, sequences + 1, sequences + 1),
        "P": (1, max(limits.max_pages // 2, 1), limits.max_pages),
        "W": (0, 0, -(-(1 + limits.block_size) // 32)),
        "S": (limits.page_size, slots, slots),
        "D": (0, sequences, sequences),
        "Q": (limits.block_size, sequences * limits.block_size, sequences * limits.block_size),
    }
    decode = {
        **common,
        "T": (1, limits.step_rows, step),
        "M": (1, limits.step_rows, max(step, logit_rows)),
        "N": (1, limits.step_rows, step),
    }
    prompt = {
        **common,
        "T": (1, every, every),
        "M": (1, sequences, max(step, logit_rows)),
        "N": (1, every, every),
    }
    return Profile("decode and verify", decode), Profile("prompts", prompt)


def profile_shapes(
    bindings: Sequence[Binding], profile: Profile
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Return least, usual and largest shape of every input and cache.

    Raises:
        ConfigError: a tensor, outputs included, would be larger than TensorRT takes.
    """
    shapes = {}
    for binding in bindings:
        if binding.kind == "weight":
            continue
        sides = [profile.sizes[side] if isinstance(side, str) else (side,) * 3 for side in binding.shape]
        least, usual, most = (tuple(side[i] for side in sides) for i in range(3))
        elements = 1
        for side in most:
            elements *= side
        if elements > _MOST_ELEMENTS:
            options = dict.fromkeys(word for side in binding.shape for word in _OPTIONS.get(str(side), ()))
            raise ConfigError(
                f"{', '.join(options)}: {binding.name} would have {elements} elements {list(most)}, "
                f"allowed are {_MOST_ELEMENTS}"
            )
        if binding.kind != "output":
            shapes[binding.name] = (least, usual, most)
    return shapes
