"""What the command lines of the benchmarks share."""

import argparse


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more (got {number})")
    return number
