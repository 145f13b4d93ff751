"""The package as a repository of Hugging Face's library `kernels`, written by `make hub`.

A repository has one folder for each torch minor and backend, and `kernels` imports the one that fits. Ours is a copy of
this package, with its library and packs, whose operators have a namespace of their own: the copy shares a process with
an installed liger_ops and with other versions of the repository.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

NAME = "liger-ops"
# Of the repository: raised by a change that breaks its users.
VERSION = 1
# The library needs no CUDA, only torch's CUDA build: it serves every CUDA of a major version from this minor on.
BACKENDS = {"cpu": "cpu", "cu126": "cuda", "cu130": "cuda"}
# What imports the package by its name, builds it, or serves other packages.
LEFT_OUT = ("__main__.py", "aot/build.py", "aot/hub.py", "compat/", "demo.py", "doctor/", "integrations/")
# Registers our experts with transformers, which the installed package does too.
EMPTIED = Path("transformers/__init__.py")

CARD = """---
library_name: kernels
license: apache-2.0
---
# liger-ops

Fused kernels for LLM training: layers for transformers in `layers`, operators in `functional`.
"""


def sources(package: Path) -> Iterator[Path]:
    """The Python files of a copy, relative to the package."""
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        if not inside.as_posix().startswith(LEFT_OUT):
            yield inside


def namespace(package: Path, csrc: Path) -> str:
    """The operators' namespace, another one for every change of the sources."""
    digest = hashlib.sha256()
    for path in (*(package / inside for inside in sources(package)), *sorted(csrc.rglob("*.*"))):
        digest.update(path.read_bytes())
    return f"liger_ops_{digest.hexdigest()[:12]}"


def renamed(text: str, operators: str) -> str:
    """A source file with another namespace for the operators."""
    return re.sub(r'(?<=torch\.ops\.)liger\b|\bliger(?=::)|(?<=")liger(?=")', operators, text)


def variant(minor: str, backend: str) -> str:
    return f"torch{minor.replace('.', '')}-{backend}-x86_64-linux"


def metadata(operators: str, backend: str) -> str:
    # `kernels` imports the folder under the name `id`.
    facts = {
        "name": NAME,
        "id": f"_{operators}_{BACKENDS[backend]}",
        "version": VERSION,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": BACKENDS[backend]},
    }
    return json.dumps(facts, indent=2) + "\n"


def write(
    repository: Path,
    package: Path,
    built: Path,
    minors: Iterable[str],
    operators: str,
    backends: Iterable[str] = tuple(BACKENDS),
) -> None:
    """package: the sources. built: a folder with the lib and packs of a build whose namespace is `operators`."""
    shutil.rmtree(repository, ignore_errors=True)
    repository.mkdir(parents=True)
    (repository / "README.md").write_text(CARD)
    shutil.copy(package.parent / "LICENSE", repository)
    for minor in minors:
        for backend in backends:
            folder = repository / "build" / variant(minor, backend)
            for inside in sources(package):
                copy = folder / inside
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text("" if inside == EMPTIED else renamed((package / inside).read_text(), operators))
            with (folder / "__init__.py").open("a") as init:
                init.write("\nfrom .transformers import layers\n")
            (folder / "metadata.json").write_text(metadata(operators, backend))
            (folder / "lib").mkdir()
            for library in (f"lib{operators}_runtime.so", f"libliger_ops_torch{minor}.so"):
                shutil.copy(built / "lib" / library, folder / "lib")
            if backend != "cpu" and (built / "packs").exists():
                shutil.copytree(built / "packs", folder / "packs")
