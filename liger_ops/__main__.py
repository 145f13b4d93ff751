"""`python -m liger_ops` shows the installation and the path that each operator takes on each device.
`python -m liger_ops doctor` also checks the operators, and shows what would be done with a model.
`python -m liger_ops build` builds the operator library for the installed torch.
`python -m liger_ops run SCRIPT` runs a script that uses liger_kernel, such as Trainer's --use_liger_kernel."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import liger_ops

from . import doctor
from ._runtime import loader
from .aot import operators as operator_library
from .compat import run as script
from .doctor import installation

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "build": operator_library.main,
    "doctor": doctor.main,
    "run": script.main,
}


def main() -> None:
    try:
        status = run()
        sys.stdout.flush()
    except BrokenPipeError:  # of `| head`
        # Python flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


def run() -> int:
    """Returns the exit status."""
    if command := COMMANDS.get("".join(sys.argv[1:2])):
        return command(sys.argv[2:])
    parser = argparse.ArgumentParser(
        prog="python -m liger_ops", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "command", nargs="?", metavar="COMMAND", help=f"{', '.join(COMMANDS)}; -h after it lists its options"
    )
    versions = f"liger-ops {liger_ops.__version__}, torch {torch.__version__}"
    parser.add_argument(
        "--version", action="version", version=versions, help="print the versions of liger-ops and torch"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--cmake-prefix", action="store_true", help="print only the folder for CMAKE_PREFIX_PATH")
    arguments = parser.parse_args()
    if arguments.command:
        parser.error(f"COMMAND must be one of {', '.join(COMMANDS)}, and come first (got {arguments.command})")
    if arguments.cmake_prefix:
        print(loader.shadowed() or Path(liger_ops.__file__).parent)
        return 0
    facts = installation.report()
    print(json.dumps(facts, indent=2) if arguments.json else "\n".join(installation.lines(facts)))
    return 0


if __name__ == "__main__":
    main()
