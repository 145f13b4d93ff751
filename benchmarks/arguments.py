"""Arguments that several command lines share."""

import argparse
import shlex
import sys
from pathlib import Path

# Ignored by git. Copy results to keep to benchmarks/results.
OUT = Path(__file__).parent / "out"


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="default: benchmarks/out")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more (got {number})")
    return number


def shape_of(text: str) -> tuple[int, ...]:
    parts = text.replace("×", "x").split("x")
    if not all(map(str.isdecimal, parts)):
        raise argparse.ArgumentTypeError(f"must be 1 or more sizes, as 16x1024 (got {text})")
    return tuple(map(positive, parts))


def command() -> str:
    """The command line of this process, without the folder of its results."""
    words = sys.orig_argv[1:]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return shlex.join(["python", *words])
