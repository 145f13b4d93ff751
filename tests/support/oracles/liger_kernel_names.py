"""The public names of a release of liger_kernel, read from the source in its wheel; nothing of it is imported.

python -m tests.support.oracles.liger_kernel_names liger_kernel-0.8.5-py3-none-any.whl writes
tests/compat/liger_kernel_names.txt
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

LIST = Path(__file__).parents[2] / "compat/liger_kernel_names.txt"
HEADER = """\
# The public functions and classes of liger_kernel 0.8.5: with their parameters where liger_ops.compat serves them,
# without where it refuses them. Not listed: backends for one kind of hardware, helpers whose name begins with _.
"""
HARDWARE = ("ops.backends", "ops.cute", "ops.cutedsl", "ops.cutile", "ops._nvidia_shared", "testing")
# Names that begin with _, but that other code imports.
PRIVATE = ("_apply_liger_kernel", "_apply_liger_kernel_to_instance")
Definition = ast.FunctionDef | ast.ClassDef


class Module:
    """What a module defines, imports from the package, and assigns."""

    def __init__(self, source: str) -> None:
        self.defined: dict[str, Definition] = {}
        self.imported: dict[str, tuple[str, str]] = {}  # name: module and name there
        self.assigned: dict[str, ast.expr] = {}
        self.read(ast.parse(source).body)

    def read(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, Definition):
                self.defined[node.name] = node
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "liger_kernel":
                path = (node.module or "").partition(".")[2]
                self.imported.update({a.asname or a.name: (path, a.name) for a in node.names})
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.assigned[node.targets[0].id] = node.value
            elif isinstance(node, (ast.If, ast.Try)):
                self.read(node.body)


def modules_of(wheel: Path) -> dict[str, Module]:
    """By the path below the package."""
    with zipfile.ZipFile(wheel) as archive:
        files = [n for n in archive.namelist() if n.startswith("liger_kernel/") and n.endswith(".py")]
        found = {n.removesuffix(".py").removesuffix("/__init__"): archive.read(n).decode() for n in files}
    return {path.replace("/", ".").partition(".")[2]: Module(source) for path, source in found.items()}


class Names:
    def __init__(self, modules: dict[str, Module]) -> None:
        self.modules = modules

    def definition(self, module: str, name: str) -> tuple[str, Definition] | None:
        """The module and the definition of a name that a module has."""
        found = self.modules.get(module)
        if found is None:
            return None
        if name in found.defined:
            return module, found.defined[name]
        alias = found.assigned.get(name)
        if isinstance(alias, ast.Name) and alias.id != name:
            return self.definition(module, alias.id)
        source = found.imported.get(name)
        # `from liger_kernel import functional` imports a module.
        return None if source is None or source == (module, name) else self.definition(*source)

    def method(self, module: str, cls: ast.ClassDef, name: str) -> tuple[str, ast.FunctionDef] | None:
        """The method, of the class or of its first base in the package that has it."""
        for node in cls.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return module, node
        for base in cls.bases:
            found = self.definition(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                inherited = self.method(found[0], found[1], name)
                if inherited is not None:
                    return inherited
        return None

    def default(self, module: str, node: ast.expr) -> str:
        if isinstance(node, ast.Name) and node.id in self.modules[module].assigned:
            return self.default(module, self.modules[module].assigned[node.id])
        try:
            return repr(ast.literal_eval(node))
        except ValueError:
            return ast.unparse(node)

    def parameters(self, module: str, function: ast.FunctionDef, skipped: int) -> str:
        """As inspect.signature prints them, without annotations and the first ones."""
        a = function.args
        missing: list[ast.expr | None] = [None] * (len(a.args) - len(a.defaults))
        pairs = [(p.arg, d) for p, d in zip(a.args, missing + a.defaults)][skipped:]
        written = [name if d is None else f"{name}={self.default(module, d)}" for name, d in pairs]
        if a.vararg is not None:
            written.append(f"*{a.vararg.arg}")
        elif a.kwonlyargs:
            written.append("*")
        for p, d in zip(a.kwonlyargs, a.kw_defaults):
            written.append(p.arg if d is None else f"{p.arg}={self.default(module, d)}")
        if a.kwarg is not None:
            written.append(f"**{a.kwarg.arg}")
        return f"({', '.join(written)})"

    def of_class(self, path: str, module: str, cls: ast.ClassDef) -> Iterator[str]:
        if cls.name.endswith("Base"):
            methods, first = [("forward", ".forward")], 0
        elif cls.name.endswith("Function"):
            own = self.method(module, cls, "apply") is not None
            methods, first = [("apply" if own else "forward", ".apply")], 0 if own else 1
        else:
            methods, first = [("__init__", ""), ("forward", ".forward"), ("from_config", ".from_config"),
                              ("from_pretrained", ".from_pretrained")], 1  # fmt: skip
        fields = [node for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
        if fields and any("dataclass" in ast.unparse(d) for d in cls.decorator_list):
            pairs = [(f.target.id, f.value) for f in fields if isinstance(f.target, ast.Name)]
            written = [n if v is None else f"{n}={self.default(module, v)}" for n, v in pairs]
            yield f"{path}({', '.join(written)})"
        for name, suffix in methods:
            found = self.method(module, cls, name)
            if found is not None:
                static = any(ast.unparse(d) == "classmethod" for d in found[1].decorator_list)
                more = 1 if suffix == ".apply" and static else 0
                yield f"{path}{suffix}{self.parameters(*found, first + more)}"

    def of(self, module: str, name: str) -> list[str]:
        """The lines for a name, with parameters."""
        path = f"{module}.{name}".removeprefix(".")
        found = self.modules[module].assigned.get(name)
        if found is not None:  # name = Class.apply
            cls = ast.unparse(found).removesuffix(".apply")
            return [line.replace(f"{module}.{cls}.apply", path) for line in self.of(module, cls)]
        defined = self.definition(module, name)
        if defined is None:
            return []
        if isinstance(defined[1], ast.FunctionDef):
            return [f"{path}{self.parameters(defined[0], defined[1], 0)}"]
        return list(self.of_class(path, defined[0], defined[1])) or [path]

    def public(self, module: str) -> list[str]:
        found = self.modules[module]
        names = [n for n, d in found.defined.items() if n[0] != "_" or n in PRIVATE]
        names += [n for n, v in found.assigned.items() if ast.unparse(v).endswith(".apply")]
        if any(path.startswith(f"{module}.") for path in self.modules if module) or module == "":  # it has modules
            names += [n for n in found.imported if n[0] != "_" or n in PRIVATE]
        elif module == "transformers.trainer_integration":
            names += found.imported
        return [n for n in names if self.definition(module, n) or n in found.assigned]

    def lines(self) -> dict[str, list[str]]:
        """Path: lines with parameters."""
        chosen = [m for m in self.modules if not any(m == h or m.startswith(f"{h}.") for h in HARDWARE)]
        return {f"{m}.{n}".removeprefix("."): self.of(m, n) for m in chosen for n in self.public(m)}


def main(wheel: str) -> None:
    import liger_ops.compat

    liger_ops.compat.install(replace=True)
    from liger_ops.compat.modules import served

    found = Names(modules_of(Path(wheel))).lines()
    written = {line for path, lines in found.items() for line in (lines if served(path) else [path])}
    LIST.write_text(HEADER + "\n".join(sorted(written)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
