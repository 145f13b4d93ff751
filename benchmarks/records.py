"""Records of a run: one JSON object per line, the machine first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
DIGITS = 12  # significant digits of a written number


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return {k: rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


def line(record: Record) -> str:
    return json.dumps(rounded(record), ensure_ascii=False, separators=(",", ":"))


def write(records: Sequence[Record], path: Path) -> None:
    path.write_text("".join(line(r) + "\n" for r in records))


def read(path: Path) -> list[Record]:
    try:
        records = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} must be a file of records ({error})") from None
    if not records or records[0].get("kind") != "machine":
        raise SystemExit(f"{path} must begin with the record of a machine")
    return records


def size(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def number(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"
