"""The report of a patch: which modules it replaced and left alone, and why, as a table and as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class Row(NamedTuple):
    module: str  # path in the model
    type: str  # name of the class
    kind: str  # "layer", "norm", "mlp", "experts", "rope", "embedding" or "loss"
    replacement: str  # the operator that computes it now, or ""
    reason: str  # why it was left alone, or why no larger operator replaces it, or ""


class Report:
    """The rows of one model. `print(report)` groups them by class."""

    def __init__(self, model_type: str, rows: Iterable[Row]) -> None:
        self.model_type = model_type
        self.rows = list(rows)

    @property
    def replaced(self) -> list[Row]:
        return [row for row in self.rows if row.replacement]

    @property
    def left_alone(self) -> list[Row]:
        return [row for row in self.rows if not row.replacement]

    def as_dict(self) -> dict:
        return {"model_type": self.model_type, "rows": [row._asdict() for row in self.rows]}

    def __str__(self) -> str:
        groups = Counter((row.kind, row.type, row.replacement, row.reason) for row in self.rows)
        lines = [("kind", "class", "modules", "operator", "reason")]
        lines += [(kind, cls, str(n), op or "left alone", reason) for (kind, cls, op, reason), n in groups.items()]
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        return "\n".join([f"liger_ops on {self.model_type}", *table])

    def __repr__(self) -> str:
        return f"<Report of {self.model_type}: {len(self.replaced)} replaced, {len(self.left_alone)} left alone>"
