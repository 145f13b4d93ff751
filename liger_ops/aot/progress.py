"""Progress display of a build."""

from __future__ import annotations

import sys
import time


class Progress:
    """One line on a terminal; one line per ten percent in a log."""

    def __init__(self, total: int, label: str) -> None:
        self.total, self.label, self.done, self.start = total, label, 0, time.monotonic()

    def advance(self) -> None:
        self.done += 1
        seconds = time.monotonic() - self.start
        line = f"{self.label} {self.done}/{self.total}  {seconds:.0f} s"
        if sys.stderr.isatty():
            filled = 30 * self.done // self.total
            print(
                f"\r[{'#' * filled}{'.' * (30 - filled)}] {line}",
                end="" if self.done < self.total else "\n",
                file=sys.stderr,
                flush=True,
            )
        elif self.done * 10 // self.total != (self.done - 1) * 10 // self.total:
            print(line, file=sys.stderr, flush=True)
