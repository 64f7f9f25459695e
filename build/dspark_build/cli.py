"""`dspark-build`: everything that is done before serving. One table of commands; each is imported when it
is run.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dspark.errors import DSparkError

__all__ = ["main"]


@dataclass(frozen=True, slots=True)
class _Command:
    """A command and where it lives: `module` has `add_<word>_arguments` and `run_<word>`."""

    name: str
    module: str
    summary: str
    example: str

    def load(self) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
        module = importlib.import_module(self.module)
        word = self.name.replace("-", "_")
        return getattr(module, f"add_{word}_arguments"), getattr(module, f"run_{word}")


COMMANDS = (
    _Command(
        "data",
        "dspark_build.data",
        "let the target answer prompts and cache its features",
        "dspark-build data --target model.gguf --prompts prompts.jsonl --out out/data",
    ),
    _Command(
        "train",
        "dspark_build.train",
        "train a drafter on such data",
        "dspark-build train --target model.gguf --data out/data --out out/run --max-minutes 60",
    ),
    _Command(
        "calibrate",
        "dspark_build.calibrate",
        "fit confidence temperatures on held-out prompts",
        "dspark-build calibrate --target model.gguf --drafter out/run/drafter --prompts held_out.jsonl",
    ),
    _Command(
        "eval",
        "dspark_build.eval",
        "measure accepted length and calibration by real decoding",
        "dspark-build eval --target model.gguf --drafter out/run/drafter "
        "--prompts clients/prompts/eval.jsonl",
    ),
    _Command(
        "retrain",
        "dspark_build.retrain",
        "go on training a drafter with what was served",
        "dspark-build retrain --target model.gguf --drafter out/run/drafter --traffic out/traffic --out out/retrained",
    ),
    _Command(
        "profile",
        "dspark_build.profile",
        "measure what a step costs on this machine",
        "dspark-build profile --target model.gguf --drafter out/run/drafter --out capacity.json",
    ),
    _Command(
        "kernels",
        "dspark_build.kernels",
        "compile the GPU kernels ahead of time, no GPU needed",
        "dspark-build kernels --sm 80,86,89,90,100,120 --out out/kernels",
    ),
    _Command(
        "export",
        "dspark_build.export",
        "write target and drafter as ONNX files for TensorRT and ONNX Runtime",
        "dspark-build export --target model.gguf --drafter out/run/drafter --out out/onnx --precision bf16",
    ),
    _Command(
        "engine",
        "dspark_build.engine",
        "build TensorRT engines of target and drafter, no GPU needed",
        "dspark-build engine --target model.gguf --drafter out/run/drafter --sm 89 --out out/engine",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors of ours are one line on standard error and exit status 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((command for command in COMMANDS if arguments and command.name == arguments[0]), None)
    if chosen is None:
        return _overview(arguments)
    parser = argparse.ArgumentParser(
        prog=f"dspark-build {chosen.name}",
        description=chosen.summary[0].upper() + chosen.summary[1:] + ".",
        epilog=f"example: {chosen.example}",
    )
    try:
        add_arguments, run = chosen.load()
        add_arguments(parser)
        return run(parser.parse_args(arguments[1:]))
    except DSparkError as error:
        print(f"dspark-build {chosen.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"dspark-build {chosen.name}: interrupted", file=sys.stderr)
        return 130


def _overview(arguments: Sequence[str]) -> int:
    wanted_help = not arguments or arguments[0] in ("-h", "--help", "help")
    out = sys.stdout if wanted_help else sys.stderr
    if not wanted_help:
        print(f"dspark-build: unknown command {arguments[0]!r}", file=out)
    print("usage: dspark-build COMMAND [options]     (dspark-build COMMAND --help tells more)\n", file=out)
    for command in COMMANDS:
        print(f"  {command.name:<10} {command.summary}\n  {'':<10}   {command.example}", file=out)
    return 0 if wanted_help else 2


if __name__ == "__main__":
    raise SystemExit(main())
