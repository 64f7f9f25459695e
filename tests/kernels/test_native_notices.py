"""What the start says about a dtype whose answers are not those of float32."""

from __future__ import annotations

from pathlib import Path

import pytest
from dspark.config import ServeConfig
from dspark.runtime import INT8_NOTICE, build_engine
from support.tiny_models import write_tiny_target

pytest.importorskip("dspark_plugins.native.binding")


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_int8_is_never_used_without_saying_what_it_costs(tmp_path: Path, dtype: str) -> None:
    said: list[str] = []
    config = ServeConfig(
        target=str(write_tiny_target(tmp_path)),
        drafter="none",
        executor="native",
        dtype=dtype,
        num_threads=1,
        cache_bytes=1 << 22,
    )
    build_engine(config, progress=said.append)
    assert (INT8_NOTICE in said) == (dtype == "int8")
