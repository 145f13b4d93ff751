"""Runs code that was written for `liger_kernel`: after `install()`, its public names are served by liger_ops.

    import liger_ops.compat
    liger_ops.compat.install()
    from liger_kernel.transformers import AutoLigerKernelForCausalLM

Trainer's `use_liger_kernel=True` then finds liger_ops too. What liger_ops does not have raises an ImportError that names
it. A liger_kernel that is installed is shadowed only by `install(replace=True)`.
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


def getattr_of(module: str) -> Callable[[str], Any]:
    """The module's `__getattr__`."""

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


class LigerKernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
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
        name = module.__name__
        vars(module).update(
            __file__=__file__,
            __doc__=f"{name}, served by liger_ops",
            __all__=[n for n in contents(name) or () if not n.startswith("__")],
            __getattr__=getattr_of(name),
        )
        if name == PACKAGE:
            vars(module)["__version__"] = ANSWERS_TO


_finder = LigerKernelFinder()
_shadowed: dict[str, ModuleType] = {}


def installed() -> bool:
    return _finder in sys.meta_path


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
    _shadowed.update({name: sys.modules.pop(name) for name in imported()})
    sys.meta_path.insert(0, _finder)
    forget_availability()


def uninstall() -> None:
    """Ends what `install` began, for imports and for models made from now on."""
    if not installed():
        return
    from .patching import forget

    forget()
    sys.meta_path.remove(_finder)
    for name in imported():
        del sys.modules[name]
    sys.modules.update(_shadowed)
    _shadowed.clear()
    forget_availability()


def forget_availability() -> None:
    """transformers remembers whether it found the package."""
    importlib.invalidate_caches()
    utils = sys.modules.get("transformers.utils.import_utils")
    clear = getattr(getattr(utils, "is_liger_kernel_available", None), "cache_clear", None)
    if clear is not None:
        clear()
