#!/usr/bin/env bash
# Checks this project on a machine with an NVIDIA GPU: kernels, plugins' launches, the torch executor, a small engine.
#   tests/gpu/run.sh [--json FILE] [--minutes N] [--only SECTION,...]
# Every section has a process and a time of its own; one that hangs is ended, and the summary says so.
# Exit status: 0 all right, 1 something is wrong or nothing was looked at, 2 bad options, 77 no GPU here. Needs CUDA, torch and triton.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$(dirname "$here")")
python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  [ -x "$root/.venv/bin/python" ] && python="$root/.venv/bin/python"
fi
unset TRITON_INTERPRET # the interpreter would take the place of the GPU
export PYTHONPATH="$root/tests:$root/build:$root/plugins:$root/python_backend${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m gpu.check "$@"
