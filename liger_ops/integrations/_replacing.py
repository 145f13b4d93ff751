"""Replaces names of an installed package by ours, in every module that holds them, and restores them."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any


class Report:
    """The outcome of a patch. `print(report)` shows it as a table."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.replaced: dict[str, str] = {}  # the name's path: the path of ours
        self.left: dict[str, str] = {}  # the name's path: why it was left alone

    def __str__(self) -> str:
        rows = [(name, f"now {ours}") for name, ours in self.replaced.items()]
        rows += [(name, f"left alone: {reason}") for name, reason in self.left.items()]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([f"liger_ops in {self.package}", *(f"{name:{width}}  {text}" for name, text in rows)])

    def __repr__(self) -> str:
        return f"<Report of {self.package}: {len(self.replaced)} replaced, {len(self.left)} left alone>"


class Replacements:
    """names: path of a name in `package`: ours. left: names that stay the package's, and why."""

    def __init__(self, package: str, names: Mapping[str, Any], left: Mapping[str, str]) -> None:
        self.package, self.names, self.left = package, names, left
        self.theirs: dict[str, Any] = {}

    def patch(self) -> Report:
        """Also replaces the names that other modules of the package imported."""
        version = importlib.metadata.version(self.package)
        report = Report(f"{self.package} {version}")
        present = {}
        for path in self.names:  # first all imports: a module imported later would take ours for the package's
            module, _, name = path.rpartition(".")
            try:
                present[path] = getattr(importlib.import_module(module), name)
            except ImportError as error:
                report.left[path] = f"its module cannot be imported ({error})"
            except AttributeError:
                report.left[path] = f"{self.package} {version} has no such name"
        for path, theirs in present.items():
            ours = self.names[path]
            self._replace(self.theirs.setdefault(path, theirs), ours)
            report.replaced |= {place: f"{ours.__module__}.{ours.__qualname__}" for place in self._places(ours)}
        report.left |= self.left
        return report

    def unpatch(self) -> None:
        """Undoes `patch`, also in modules that were imported since."""
        for path, theirs in self.theirs.items():
            self._replace(self.names[path], theirs)
        self.theirs.clear()

    def original(self, path: str) -> Any:
        """The package's own, patched or not."""
        module, _, name = path.rpartition(".")
        return self.theirs.get(path) or getattr(importlib.import_module(module), name)

    def _replace(self, old: Any, new: Any) -> None:
        for place in list(self._places(old)):
            module, _, name = place.rpartition(".")
            setattr(sys.modules[module], name, new)

    def _places(self, value: Any) -> Iterator[str]:
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == self.package and isinstance(module, ModuleType):
                yield from (f"{name}.{key}" for key, held in list(vars(module).items()) if held is value)
