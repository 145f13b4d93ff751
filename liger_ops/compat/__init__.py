"""A door for code that was written for `liger_kernel`: after `install()`, its public names are served by liger_ops.

    import liger_ops.compat
    liger_ops.compat.install()
    from liger_kernel.transformers import AutoLigerKernelForCausalLM

Trainer's `use_liger_kernel=True` comes in by the same door. What liger_ops does not have raises an ImportError that
names it. A liger_kernel that is installed is not pushed aside unless `install(replace=True)` says so.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from .._version import __version__

__all__ = ["install", "installed", "uninstall"]

PACKAGE = "liger_kernel"
# The release whose public names are answered to: what asks for a version wants to know of those.
ANSWERS_TO = "0.8.5"


def contents(name: str) -> Mapping[str, Any] | None:
    """The names of one module of the package, or None if there is no such module."""
    from . import modules

    return modules.contents(name.removeprefix(PACKAGE).removeprefix("."))


def missing(module: str) -> Callable[[str], Any]:
    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = contents(module) or {}
        if name in found:
            return found[name]
        if contents(f"{module}.{name}") is not None:
            return importlib.import_module(f"{module}.{name}")
        raise ImportError(f"liger_ops.compat: {module}.{name} has no counterpart in liger_ops", name=module)

    return __getattr__


class Distribution(importlib.metadata.Distribution):
    """What importlib.metadata says of the package."""

    def read_text(self, filename: str) -> str | None:
        fields = (
            "Metadata-Version: 2.1",
            "Name: liger-kernel",
            f"Version: {ANSWERS_TO}",
            f"Summary: liger_ops {__version__}",
        )
        return "\n".join(fields) + "\n" if filename in ("METADATA", "PKG-INFO") else None

    def locate_file(self, path: Any) -> Any:
        return path


class Door(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the modules of the package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != PACKAGE or contents(name) is None:
            return None
        return importlib.util.spec_from_loader(name, self, origin=__file__, is_package=True)

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        name = getattr(context, "name", None)
        return [Distribution()] if name and name.replace("-", "_").lower() == PACKAGE else []

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        found = contents(module.__name__)
        module.__file__ = __file__
        module.__doc__ = f"{module.__name__}, served by liger_ops"
        module.__all__ = [name for name in found if not name.startswith("__")]
        module.__getattr__ = missing(module.__name__)
        if module.__name__ == PACKAGE:
            module.__version__ = ANSWERS_TO


_door = Door()
_pushed_aside: dict[str, ModuleType] = {}


def installed() -> bool:
    return _door in sys.meta_path


def imported() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == PACKAGE]


def install(replace: bool = False) -> None:
    """Serves `import liger_kernel` from liger_ops in this process."""
    if installed():
        return
    real = importlib.util.find_spec(PACKAGE)
    if real is not None and not replace:
        raise ImportError(
            f"liger_ops.compat: {PACKAGE} is installed ({real.origin}); uninstall it, or push it aside in this process "
            "with liger_ops.compat.install(replace=True)"
        )
    _pushed_aside.update({name: sys.modules.pop(name) for name in imported()})
    sys.meta_path.insert(0, _door)
    forget_availability()


def uninstall() -> None:
    """Ends what `install` began, for imports and for models made from now on."""
    if not installed():
        return
    from .patching import forget

    forget()
    sys.meta_path.remove(_door)
    for name in imported():
        del sys.modules[name]
    sys.modules.update(_pushed_aside)
    _pushed_aside.clear()
    forget_availability()


def forget_availability() -> None:
    """transformers remembers whether it found the package."""
    importlib.invalidate_caches()
    utils = sys.modules.get("transformers.utils.import_utils")
    clear = getattr(getattr(utils, "is_liger_kernel_available", None), "cache_clear", None)
    if clear is not None:
        clear()
