"""What a patch replaced, what it left alone, and why: a table, and the same as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class Row(NamedTuple):
    module: str  # its path in the model
    type: str  # the name of its class
    kind: str  # "layer", "norm", "mlp", "experts", "rope", "embedding" or "loss"
    replacement: str  # the operator that serves it now, or nothing
    reason: str  # why it was left alone


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
        lines = [("kind", "class", "modules", "now", "why not")]
        lines += [(kind, cls, str(n), now or "as it was", why) for (kind, cls, now, why), n in groups.items()]
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        return "\n".join([f"liger_ops on {self.model_type}", *table])

    def __repr__(self) -> str:
        return f"<Report of {self.model_type}: {len(self.replaced)} replaced, {len(self.left_alone)} left alone>"
