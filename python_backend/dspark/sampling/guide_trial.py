"""A try of a guide in a process of its own, which may be ended: `python -m dspark.sampling.guide_trial`.

Some guides take for ever to compile (twelve patterns that a text must all match take seconds, each further one twice as
long), and nothing can stop the library once it has begun. So a guide is first compiled where a limit of processor
time ends the process, over a vocabulary of bytes. Whether it is right is not asked: that is the compiler's to say.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

__all__ = ["GuideTrial"]

LIMIT_S: Final = 1.0  # of processor time, of one guide
_PATIENCE: Final = 20.0  # times the limit: wall time on a machine that is busy with other things
_MOST_MEMORY_BYTES: Final = 2 << 30


class GuideTrial:
    """The process, started with the first guide and again when it was ended. One thread may use it.

    Arguments:
        limit_s: seconds of processor time that a guide may take.
    """

    def __init__(self, *, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None

    def passes(self, kind: str, guide: str | None) -> bool | None:
        """Return whether a guide is compiled within the limit; None where the process was killed or did not get there.

        Arguments:
            kind: `json`, `json_schema` or `regex`.

        Raises:
            OSError: no process can be started.
        """
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([kind, guide]).encode() + b"\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], self.limit_s * _PATIENCE)
            if ready and process.stdout.readline() == b"done\n":
                return True
            if ready:
                process.wait()  # it has ended; how, says whether by this guide
        except BrokenPipeError:  # before it began
            ready = []
        self.close()
        return False if ready and process.returncode != -signal.SIGKILL else None

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [_python(), "-m", "dspark.sampling.guide_trial", str(self.limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )


def _python() -> str:
    """Return this environment's interpreter, which a model's process is not itself."""
    beside = Path(sys.prefix, "bin", "python3")
    return str(beside) if beside.is_file() else sys.executable


def main() -> None:
    """Compile every guide that comes on standard input, one JSON list a line; end when nobody asks any more."""
    import resource

    from dspark.sampling.grammar import try_guide

    parent = os.getppid()
    with contextlib.suppress(ImportError):  # its start is no guide's time
        import llguidance  # noqa: F401
    os.nice(19)  # whoever is being answered comes first
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    limit_s = float(sys.argv[1])
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # nobody handles its signal: it ends the process
        try_guide(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.buffer.write(b"done\n")
        sys.stdout.buffer.flush()


def _end_with(parent: int) -> None:
    """End amid a guide, too, when whoever asked has gone."""
    while os.getppid() == parent:
        threading.Event().wait(0.5)
    os._exit(1)


if __name__ == "__main__":
    main()
