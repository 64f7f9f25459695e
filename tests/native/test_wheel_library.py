"""A wheel's library is taken where it is of these sources, and no compiler is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from dspark_plugins.native import build


def copy_of_sources(folder: Path, *, change: str = "") -> Path:
    for path in (*build.SOURCES.glob("*.cpp"), *build.SOURCES.glob("*.hpp"), *build.SOURCES.glob("*.h")):
        (folder / path.name).write_text(path.read_text() + change)
    return folder


def test_the_shipped_library_needs_no_compiler_and_another_sources_one_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "SOURCES", copy_of_sources(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.build_library()
    shipped = build.wheel_library_path()
    shipped.parent.mkdir()
    shipped.write_bytes(b"compiled elsewhere")
    assert build.build_library() == shipped
    copy_of_sources(tmp_path, change="\n// changed\n")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.build_library()


def test_a_wheel_that_cannot_compile_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.build_wheel_library(tmp_path / "wheel")
