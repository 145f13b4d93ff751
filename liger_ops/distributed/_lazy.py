"""Runs a function once a module has been imported, without importing it: DTensor takes half a second to load."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class _Loader(importlib.abc.Loader):
    def __init__(self, wrapped: importlib.abc.Loader, then: Callable[[], None]) -> None:
        self.wrapped, self.then = wrapped, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.wrapped.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader, which serves its source and resources.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.wrapped
        self.wrapped.exec_module(module)
        self.then()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.then)
        return spec


def when_imported(name: str, then: Callable[[], None]) -> None:
    if name in sys.modules:
        importlib.import_module(name)  # waits if another thread is importing it
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))
