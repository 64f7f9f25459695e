"""The processes that compile kernels: none outlives its parent, one that dies is told."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from dspark.errors import CapacityError, ConfigError
from dspark_build.folder_lock import locked_folder
from dspark_build.kernels import build_kernels
from dspark_plugins.kernels import plans

psutil = pytest.importorskip("psutil", reason="psutil is not installed")
pytest.importorskip("triton", reason="the Triton language is not installed")

SCHEDULE = [plans.schedule()]
PROGRAM = """
import sys
from pathlib import Path
from dspark_build.kernels import build_kernels
from dspark_plugins.kernels import plans
if __name__ == "__main__":
    build_kernels([plans.schedule()], [80, 86, 89, 90], Path(sys.argv[1]), num_jobs=2)
"""


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):  # one that ends meanwhile
        return [child for child in process.children() if "spawn_main" in " ".join(child.cmdline())]
    return []


def test_no_compiling_process_outlives_a_parent_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    started = subprocess.Popen(
        [sys.executable, tmp_path / "program.py", tmp_path / "out"],
        stderr=subprocess.DEVNULL,
        env={"TRITON_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)},
    )
    found: list[psutil.Process] = []
    while not found and started.poll() is None:
        found = workers_of(psutil.Process(started.pid))
        time.sleep(0.01)
    started.kill()
    started.wait()
    assert found
    _, alive = psutil.wait_procs(found, timeout=60)
    assert not alive


def test_a_compiling_process_that_is_ended_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))

    def end(*_: object) -> None:
        for child in workers_of(psutil.Process()):
            child.kill()

    monkeypatch.setattr("dspark_build.kernels.as_completed", lambda waiting: (end(), *waiting)[1:])
    with pytest.raises(CapacityError, match="a compiling process was ended .*fewer --jobs"):
        build_kernels(SCHEDULE, [89], tmp_path / "out", num_jobs=1)


def test_kernels_are_not_built_twice_at_once_in_one_folder(tmp_path: Path) -> None:
    with locked_folder(tmp_path), pytest.raises(ConfigError, match="another build is at work in"):
        build_kernels(SCHEDULE, [89], tmp_path, num_jobs=1)
