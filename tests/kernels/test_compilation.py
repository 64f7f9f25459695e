"""Ahead-of-time compilation: no form spills, every form fits its chip, and a folder is always whole.

The forms here are those with the most registers or shared memory of each kernel in every type, on the chips with the
least of both; `dspark-build kernels` holds all of them to the same.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from dspark.errors import CheckpointError, ConfigError, EngineError
from dspark_build import kernels
from dspark_build.cli import main
from dspark_plugins.kernels import plans
from dspark_plugins.kernels.chips import CHIPS
from dspark_plugins.kernels.plans import Variant
from dspark_plugins.kernels.sets import HEADS, SHAPES, variants_for

SMS = [80, 86]  # the most spills, and the least shared memory and registers of a chip
# Heads that need every register: chip on which they spilled, head, weights, draft vocabulary, rank.
TIGHT = (
    (80, "rnn", "fp32", 151936, 256),
    (90, "vanilla", "bf16", 151936, 256),
    (100, "gated", "fp32", 151936, 256),
    (120, "gated", "bf16", 151936, 256),
    (120, "rnn", "bf16", 8192, 128),
)
REDUCED = 32768  # tokens; smaller vocabularies are reduced ones here
SMALL = ("merge_splits_kernel", "write_rows_kernel")


def heaviest(name: str) -> list[Variant]:
    """The wider tiles of every mask without and with pieces, both walks, and all that has one form."""
    forms = variants_for(SHAPES[name], dtype="bf16")
    attention = [v for v in forms if v.kernel == "attention_kernel" and v.constants["BLOCK_M"] in (32, 64)]
    widest = {(v.constants["MASK"], v.constants["SPLIT"], v.constants["BLOCK_M"]): v for v in attention}
    others = {
        (v.kernel, v.constants.get("TREE")): v
        for v in forms
        if v.kernel not in ("attention_kernel", "block_sample_kernel")
    }
    return [*widest.values(), *others.values()]


def in_type(name: str, dtype: str) -> list[Variant]:
    """The widest tiles of whole contexts, of chains and of blocks, in another type."""
    forms = [v for v in variants_for(SHAPES[name], dtype=dtype) if v.kernel == "attention_kernel"]
    whole = [v for v in forms if not v.constants["SPLIT"]]
    widest = {v.constants["MASK"]: v for v in sorted(whole, key=lambda v: int(v.constants["BLOCK_M"]))}
    return [widest[plans.CHAIN], widest[plans.FULL]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kernels")
    qwen = {v.key: v for name in ("Qwen3-4B", "Qwen3-8B", "Llama-3.1-8B") for v in heaviest(name)}
    smol = [v for v in heaviest("SmolLM2-135M") if v.kernel in ("attention_kernel", *SMALL)]
    others = [v for dtype in ("fp16", "fp32") for v in in_type("Qwen3-8B", dtype)]
    others += in_type("SmolLM2-135M", "fp32")
    kernels.build_kernels([*qwen.values(), *smol, *others], SMS, out, num_jobs=2)
    return out


def test_no_form_spills_and_every_form_fits(folder: Path) -> None:
    entries = kernels.load_kernel_manifest(folder)
    assert len(entries) >= 50
    for entry in entries:
        chip = CHIPS[entry.sm]
        assert entry.spill_bytes == entry.stack_bytes == 0, entry.key
        assert entry.shared_bytes <= chip.shared_per_program, entry.key
        assert entry.programs_per_sm >= 1, entry.key
        assert (folder / entry.file).read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize(("sm", "head", "dtype", "vocab_size", "rank"), TIGHT)
def test_no_head_spills(sm: int, head: str, dtype: str, vocab_size: int, rank: int, tmp_path: Path) -> None:
    reduced = vocab_size < REDUCED
    form = plans.block_sample(
        vocab_size=vocab_size, rank=rank, head=HEADS[head], confidence=2, mapped=reduced, previous=reduced,
        dtype="fp32", weight_dtype=dtype, cooperative=True,
    )  # fmt: skip
    (entry,) = kernels.build_kernels([form], [sm], tmp_path, num_jobs=1)
    assert (entry.spill_bytes, entry.stack_bytes) == (0, 0)


def test_unchanged_inputs_are_nothing_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    kernels.build_kernels(forms_of(folder), SMS, folder, num_jobs=1)
    assert "nothing to do" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


def forms_of(folder: Path) -> list[Variant]:
    types = ("bf16", "fp16", "fp32")
    known = {
        v.key: v for shape in SHAPES.values() for dtype in types for v in variants_for(shape, dtype=dtype)
    }
    return [known[entry.key] for entry in kernels.load_kernel_manifest(folder) if entry.sm == SMS[0]]


def test_a_damaged_file_is_made_anew_and_others_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forms = [v for v in variants_for(SHAPES["SmolLM2-135M"], dtype="bf16") if v.kernel in SMALL]
    first = kernels.build_kernels(forms, [86, 90], tmp_path, num_jobs=1)
    (tmp_path / first[0].file).write_bytes(b"half")
    capsys.readouterr()
    assert kernels.build_kernels(forms, [86, 90], tmp_path, num_jobs=1) == first
    assert "1 of 4 kernels to compile" in capsys.readouterr().err
    # What is asked for no more goes, and nothing half-written is left.
    rest = kernels.build_kernels(forms, [90], tmp_path, num_jobs=1)
    assert {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.*")} == {
        "manifest.json",
        *(e.file for e in rest),
    }


def test_the_manifest_tells_how_to_launch(folder: Path) -> None:
    entry = next(e for e in kernels.load_kernel_manifest(folder) if e.kernel == "walk_kernel")
    assert entry.arguments[0] == ["logits", "*fp32"] and entry.arguments[-1] == ["max_depth", "i32"]
    assert entry.symbol == "walk_kernel" and entry.num_threads == 256 and not entry.cooperative


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"format_version": 99, "kernels": []}))
    with pytest.raises(CheckpointError, match="99"):
        kernels.load_kernel_manifest(tmp_path)
    with pytest.raises(CheckpointError, match="dspark-build kernels"):
        kernels.load_kernel_manifest(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--sm", "75"),
        ("--sm", "86,blackwell"),
        ("--models", "GPT-9"),
        ("--precision", "fp8"),
        ("--heads", "big"),
        ("--sm", ""),
        ("--models", " , "),
        ("--heads", ""),
    ],
)
def test_what_is_unknown_is_refused_by_name(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--sm": "86", "--out": str(tmp_path / "out"), option: value}
    assert main(["kernels", *(word for pair in given.items() for word in pair)]) == 2
    told = capsys.readouterr().err
    assert option in told and value.split(",")[-1] in told and "known are" in told
    assert not (tmp_path / "out").exists()


def test_tables_need_a_page_with_marks(tmp_path: Path) -> None:
    from dspark_build.kernel_report import BEGIN, END, write_tables

    page = tmp_path / "page.md"
    page.write_text("no marks")
    with pytest.raises(ConfigError, match="tables"):
        write_tables(page, [], [])
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_tables(page, [], [SHAPES["Qwen3-4B"]])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text and "H100" in text


def test_a_form_that_cannot_be_compiled_is_named(tmp_path: Path) -> None:
    form = next(
        v for v in variants_for(SHAPES["SmolLM2-135M"], dtype="bf16") if v.kernel == "write_rows_kernel"
    )
    huge = dataclasses.replace(form, constants={**form.constants, "BLOCK_ROWS": 1 << 20})
    with pytest.raises(EngineError, match="write_rows_kernel,.*: cannot be compiled for sm 86: "):
        kernels.build_kernels([huge], [86], tmp_path / "out", num_jobs=1)
    assert not list(tmp_path.rglob("*.*"))


def test_a_kernel_that_does_not_fit_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tight = dataclasses.replace(CHIPS[86], shared_per_program=1)
    monkeypatch.setitem(CHIPS, 86, tight)
    form: Any = next(
        v for v in variants_for(SHAPES["SmolLM2-135M"], dtype="bf16") if v.kernel == "schedule_kernel"
    )
    with pytest.raises(kernels.CapacityError, match="shared memory"):
        kernels.build_kernels([form], [86], tmp_path / "out", num_jobs=1)
    assert not list(tmp_path.rglob("*.*"))
