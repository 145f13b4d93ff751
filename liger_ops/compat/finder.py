"""Finds and loads the modules of `liger_kernel` that liger_ops serves."""

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
from .names import PACKAGE, SERVED_VERSION


def module_members(name: str) -> Mapping[str, Any] | None:
    """The members of a module of the package by name, or None if there is no such module."""
    from . import modules

    return modules.module_members(name.removeprefix(PACKAGE).removeprefix("."))


def module_getattr(module: str) -> Callable[[str], Any]:
    """The module's `__getattr__`."""

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = module_members(module) or {}
        if name in found:
            return found[name]
        if module_members(f"{module}.{name}") is not None:
            return importlib.import_module(f"{module}.{name}")
        from .missing import no_counterpart

        raise AttributeError(no_counterpart(f"{module}.{name}"), name=name, obj=sys.modules.get(module))

    return __getattr__


def module_dir(module: str) -> Callable[[], list[str]]:
    """The module's `__dir__`: its names and its modules."""

    def __dir__() -> list[str]:
        from .modules import submodules

        own = [name for name in vars(sys.modules[module]) if name.startswith("__")]
        return sorted({*own, *(module_members(module) or ()), *submodules(module.partition(".")[2])})

    return __dir__


class Distribution(importlib.metadata.Distribution):
    """The package as importlib.metadata sees it."""

    def read_text(self, filename: str) -> str | None:
        fields = (
            "Metadata-Version: 2.1",
            "Name: liger-kernel",
            f"Version: {SERVED_VERSION}",
            f"Summary: liger_ops {__version__}",
        )
        return "\n".join(fields) + "\n" if filename in ("METADATA", "PKG-INFO") else None

    def locate_file(self, path: Any) -> Any:
        return path


def is_from_import() -> bool:
    """Whether the finder that calls this is asked for a name of `from module import name`."""
    frame = sys._getframe(2)
    while "importlib" in frame.f_code.co_filename:
        if frame.f_code.co_name == "_handle_fromlist":
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


class LigerKernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the modules of the package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != PACKAGE:
            return None
        if module_members(name) is None:
            from .missing import no_counterpart

            # `from module import name` looks for a module of that name last. It would hide an error that names this module.
            missed = name.rpartition(".")[0] if is_from_import() else name
            raise ModuleNotFoundError(no_counterpart(name), name=missed)
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
            __all__=[n for n in module_members(name) or () if not n.startswith("__")],
            __getattr__=module_getattr(name),
            __dir__=module_dir(name),
        )
        if name == PACKAGE:
            vars(module)["__version__"] = SERVED_VERSION


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
            f"liger_ops.compat: {PACKAGE} is installed ({real.origin}); uninstall it, or replace it in this process "
            "with liger_ops.compat.install(replace=True)"
        )
    _shadowed.update({name: sys.modules.pop(name) for name in imported()})
    sys.meta_path.insert(0, _finder)
    clear_availability_cache()


def uninstall() -> None:
    """Undoes `install` for later imports and for models constructed from now on."""
    if not installed():
        return
    from .patching import stop_patching

    stop_patching()
    sys.meta_path.remove(_finder)
    for name in imported():
        del sys.modules[name]
    sys.modules.update(_shadowed)
    _shadowed.clear()
    clear_availability_cache()


def clear_availability_cache() -> None:
    """Clears the cached result of transformers, which remembers whether it found the package."""
    importlib.invalidate_caches()
    utils = sys.modules.get("transformers.utils.import_utils")
    clear = getattr(getattr(utils, "is_liger_kernel_available", None), "cache_clear", None)
    if clear is not None:
        clear()
