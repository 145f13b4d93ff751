"""Pages of results: tables, and text that a person has written below what is generated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

BY_HAND = "<!-- by hand from here on -->"


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = [header, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def write_above(path: Path, page: str) -> None:
    """Writes a page and keeps the text below its BY_HAND mark."""
    _, mark, text = path.read_text().partition(BY_HAND) if path.exists() else ("", "", "")
    path.write_text(page + (f"\n{mark}{text}" if mark else ""))
