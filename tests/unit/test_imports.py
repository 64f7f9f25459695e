"""The import arrows between the packages, read from the source, and what may not be imported at all."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "dspark": (ROOT / "python_backend/dspark", {"dspark", "dspark_plugins"}),
    "dspark_plugins": (ROOT / "plugins/dspark_plugins", {"dspark_plugins"}),
    "dspark_build": (ROOT / "build/dspark_build", {"dspark_build", "dspark", "dspark_plugins"}),
    "dspark_client": (ROOT / "clients/dspark_client", {"dspark_client"}),
}


def imported(path: Path) -> set[str]:
    """Return the first names of everything a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_packages_import_only_along_the_arrows(package: str) -> None:
    folder, allowed = PACKAGES[package]
    files = sorted(folder.rglob("*.py"))
    assert files
    for path in files:
        wrong = imported(path) & set(PACKAGES) - allowed
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_the_client_never_imports_torch() -> None:
    for path in sorted(PACKAGES["dspark_client"][0].rglob("*.py")):
        assert not imported(path) & {"torch", "triton", "tensorrt"}, path


def test_triton_backend_utils_are_imported_by_one_file() -> None:
    users = [
        path.name
        for path in sorted((ROOT / "python_backend").rglob("*.py"))
        if "triton_python_backend_utils" in imported(path)
    ]
    assert users == ["triton_model.py"]


def test_the_online_side_starts_without_torch() -> None:
    code = (
        "import sys, dspark.cli, dspark.runtime, dspark.engine.thread; "
        "dspark.cli.build_parser(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
