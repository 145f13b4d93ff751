"""Builds the operator library and the kernel packs through CMake, for the installed torch.

pip install --no-build-isolation .          kernels for the GPUs of this machine (LIGER_OPS_ARCHS=all: for all GPUs)
pip install --no-build-isolation -e .       the same, inside the checkout
make wheel                                  one wheel for every torch minor in liger_ops/aot/torch_release.py
make wheel MACHINE=aarch64                  the same for another machine in liger_ops/aot/machines.py
make hub                                    a repository for Hugging Face's library `kernels`
"""

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import setuptools

ROOT = Path(__file__).parent.resolve()


def least(package: str) -> str:
    """The oldest version that pyproject.toml allows."""
    return re.findall(rf'"{package}>=([\d.]+)', (ROOT / "pyproject.toml").read_text())[0]


def require_version(package: str, version: str) -> None:
    """pip checks it only with build isolation."""
    found, wanted = (tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (version, least(package)))
    if found < wanted:
        wanted = least(package)
        rule = f"building needs {package} {wanted} or newer (got {version})"
        raise SystemExit(f'liger-ops: {rule}: `pip install "{package}>={wanted}"` first')


require_version("setuptools", setuptools.__version__)

from setuptools import Extension, setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402
from setuptools.command.dist_info import dist_info  # noqa: E402


def require(name: str, sentence: str):
    if importlib.util.find_spec(name) is None:
        raise SystemExit(f"liger-ops: {sentence}")
    module = importlib.import_module(name)
    require_version(name, module.__version__)
    return module


class Tools(NamedTuple):
    torch: ModuleType
    triton: ModuleType
    compiler: list[str]
    path: str


@functools.cache
def tools() -> Tools:
    """What a build needs. Every command asks for it before it copies or compiles anything."""
    torch = require(
        "torch",
        "building needs the torch you will run with: install it first, then `pip install --no-build-isolation .`",
    )
    wanted = f"triton>={least('triton')}"
    triton = require("triton", f'building needs Triton to compile the kernels: `pip install "{wanted}"` first')
    flags, target = build_module("flags"), machine()
    default = target.compiler if target else "g++"
    compiler = flags.compiler(default)
    if compiler is None:
        raise SystemExit(f"liger-ops: building needs a C++ compiler: {default}, or the one named in CXX")
    if target and not target.native and (got := flags.compiles_for(compiler)) != target.name:
        raise SystemExit(f"liger-ops: {compiler[0]}, which CXX names, must compile for {target.name} (got {got})")
    # Prefers programs that pip installed next to this interpreter.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    # CMake knows ninja under these names.
    for program, names in {"CMake": ("cmake",), "ninja": ("ninja", "ninja-build", "samu")}.items():
        if not any(shutil.which(name, path=path) for name in names):
            raise SystemExit(f"liger-ops: building needs {program}: `pip install {names[0]}` first")
    return Tools(torch, triton, compiler, path)


def build_module(stem: str):
    """Loads a module of liger_ops/aot from its file: the package itself cannot be imported before it is built."""
    spec = importlib.util.spec_from_file_location(stem, ROOT / "liger_ops" / "aot" / f"{stem}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fresh(build: Path) -> list[str]:
    """CMake refuses the cache of a checkout that was moved or copied."""
    cache = build / "CMakeCache.txt"
    moved = cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text()
    return ["--fresh"] if moved else []


def releases() -> list:
    """The torch minors in LIGER_OPS_TORCH_VERSIONS; empty to build only for the installed torch."""
    return build_module("torch_release").asked_for(os.environ.get("LIGER_OPS_TORCH_VERSIONS", ""))


def machine():
    """The machine that a wheel for several torch releases is for; None to build only for the installed torch."""
    wanted = os.environ.get("LIGER_OPS_MACHINE", "")
    if releases():
        return build_module("machines").asked_for(wanted)
    if wanted:
        rule = "needs LIGER_OPS_TORCH_VERSIONS, as `make wheel` sets it: the installed torch is for this machine"
        raise SystemExit(f"liger-ops: LIGER_OPS_MACHINE {rule}")
    return None


def architectures() -> list[int]:
    """What to compile kernels for: by default the GPUs of this machine; a wheel for several torch releases has all."""
    archs, wanted = build_module("archs"), os.environ.get("LIGER_OPS_ARCHS", "")
    found = archs.asked_for(wanted) if wanted else archs.ALL if releases() else archs.present()
    if not found and not wanted:
        build_module("progress").say(
            "liger-ops: this machine has no GPU to compile kernels for. Triton, where it is installed, compiles them at "
            "first use; LIGER_OPS_ARCHS=all, or a list such as 80,90, compiles them now"
        )
    return [*found]


def presentation() -> dict:
    """What a package index shows. Its page has no files beside it: links lead into the repository, if its address is known."""
    text = (ROOT / "README.md").read_text()
    urls = {}
    if address := os.environ.get("LIGER_OPS_REPOSITORY", "").rstrip("/"):
        (version,) = re.findall(r'__version__ = "(.+)"', (ROOT / "liger_ops" / "_version.py").read_text())
        pages, files = (f"{address}/{kind}/v{version}" for kind in ("blob", "raw"))
        text = re.sub(r"(!\[[^]]*\]\()(?!https?://|#)", rf"\g<1>{files}/", text)
        text = re.sub(r"((?<!!)\[[^]]*\]\()(?!https?://|#)", rf"\g<1>{pages}/", text)
        urls = {
            "Source": address,
            "Issues": f"{address}/issues",
            "Documentation": f"{pages}/README.md#read-on",
            "Changelog": f"{pages}/CHANGELOG.md",
        }
    return {"long_description": text, "long_description_content_type": "text/markdown", "project_urls": urls}


class Metadata(dist_info):
    """pip runs this first: it fails before pip downloads a torch that nothing was built for, and before files are copied."""

    def run(self) -> None:
        tools()
        super().run()


class CMakeBuild(build_ext):
    """One CMake build in build/<python>-torch<version>; libraries and packs land inside the package."""

    # The folder that only an installed package needed, until it is a wheel.
    temporary: Path | None = None
    # Of the operators; None: that of the package.
    namespace: str | None = None

    def run(self) -> None:
        torch, triton, compiler, path = tools()
        minor = ".".join(torch.__version__.split(".")[:2])
        build = ROOT / "build" / f"{sys.implementation.cache_tag}-torch{minor}-triton{triton.__version__}"
        package = (ROOT if self.inplace else Path(self.build_lib).resolve()) / "liger_ops"
        torch_folders = [Path(torch.__file__).parent]
        torch_release, flags, progress = map(build_module, ("torch_release", "flags", "progress"))
        kernels_for = architectures()
        target = machine()
        native = not target or target.native
        if releases():
            build /= f"release-{target.name}"
            torch_folders = [torch_release.fetch(v, ROOT / "build" / "torch", target) for v in releases()]
        sources = flags.write_units(ROOT / "csrc", build / "units")
        arguments = {
            "LIGER_PYTHON": sys.executable,
            "Python_EXECUTABLE": sys.executable,
            "LIGER_TORCH_DIRS": ";".join(map(str, torch_folders)),
            "LIGER_TORCH_STANDARDS": ";".join(str(torch_release.cxx_standard(folder)) for folder in torch_folders),
            "LIGER_ARCHS": ",".join(map(str, kernels_for)),
            "LIGER_OUTPUT": package,
            "LIGER_CXX_RUNTIME": ";".join(flags.cxx_runtime(compiler, native)),
            "LIGER_SOURCES": ";".join(map(str, sources)),
            "LIGER_COMPILE": ";".join(flags.COMPILE),
            "LIGER_LINK": ";".join([*flags.LINK, *(flags.LINK_FOR_RELEASE if releases() else ())]),
            "LIGER_NAMESPACE": self.namespace or flags.NAMESPACE,
            "LIGER_PORTABLE": flags.PORTABLE,
            **(target.cmake if target else {}),
        }
        # The Python bindings are a development tool for one Python version.
        if not releases() and importlib.util.find_spec("pybind11"):
            import pybind11

            arguments["LIGER_PYBIND11_DIR"] = pybind11.get_cmake_dir()
            suffix = sysconfig.get_config_var("EXT_SUFFIX")
            arguments["PYTHON_MODULE_EXTENSION"] = suffix
        env = {**os.environ, "CXX": shlex.join(compiler), "PATH": path}
        configure = ["cmake", *fresh(build), "-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
        subprocess.run([*configure, *(f"-D{k}={v}" for k, v in arguments.items())], check=True, env=env)
        if self.inplace and not self.editable_mode:
            subprocess.run(["cmake", "--build", str(build)], check=True, env=env)
        else:
            capabilities = ", ".join(f"{arch / 10}" for arch in kernels_for) or "none"
            progress.say(f"liger-ops: building for torch {minor}; kernels for compute capability: {capabilities}")
            seconds = flags.seconds(ROOT / "csrc", sources) * len(torch_folders)
            kernels = build_module("archs").seconds(kernels_for)
            progress.run(["cmake", "--build", str(build)], env, seconds, kernels)
        if not self.inplace and not self.namespace:
            self.ship_sources(package / "share" / "src", build / "generated")
            # In a checkout that is built in place, it is the folder of that build.
            CMakeBuild.temporary = None if releases() or (ROOT / "liger_ops" / "lib").exists() else build
        if releases():
            self.check_release(package / "lib", torch_folders, target)

    def ship_sources(self, target: Path, generated: Path) -> None:
        """Adds the sources that `python -m liger_ops build` compiles."""
        csrc = ROOT / "csrc"
        for path in (*build_module("flags").sources(csrc), *csrc.rglob("*.h"), *generated.rglob("*.h")):
            root = generated if path.is_relative_to(generated) else csrc
            copy = target / root.name / path.relative_to(root)
            self.mkpath(str(copy.parent))
            self.copy_file(str(path), str(copy))

    def check_release(self, libraries: Path, torch_folders: list, target) -> None:
        manylinux, torch_release = build_module("manylinux"), build_module("torch_release")
        torch_release.require_libraries(releases(), os.listdir(libraries), libraries)
        (runtime,) = libraries.glob("lib*_runtime.so")
        found = []
        for library in sorted(libraries.iterdir()):
            found += manylinux.violations(library, target) + manylinux.build_paths(library, [ROOT, *torch_folders])
        for minor, folder in zip(releases(), torch_folders):
            library = libraries / torch_release.library_name(minor)
            found += manylinux.missing_symbols(library, [runtime, *(folder / "lib").glob("lib*.so")])
        if found:
            raise SystemExit("\n".join([f"liger-ops: not fit for {target.tag}:", *found]))

    def get_outputs(self) -> list:
        return []


class Hub(CMakeBuild):
    """Links the library under another namespace, and writes the package as a repository of the library `kernels`."""

    def initialize_options(self) -> None:
        super().initialize_options()
        # For libraries and packs. The repository is written beside it.
        self.build_lib = str(ROOT / "build" / "hub-files")

    def run(self) -> None:
        hub, torch = build_module("hub"), tools().torch
        self.namespace = hub.namespace(ROOT / "liger_ops", ROOT / "csrc")
        built = Path(self.build_lib).resolve() / "liger_ops"
        # Libraries of earlier sources have other names.
        shutil.rmtree(built / "lib", ignore_errors=True)
        super().run()
        minors = releases() or [".".join(torch.__version__.split(".")[:2])]
        hub.write(built.parents[1] / "hub", ROOT / "liger_ops", built, minors, self.namespace)


class Wheel(bdist_wheel):
    """A wheel for several torch releases uses no Python symbols, so it fits every Python."""

    def get_tag(self) -> tuple:
        return ("py3", "none", machine().tag) if machine() else super().get_tag()

    def run(self) -> None:
        tools()
        # For a reproducible wheel: no files of an earlier build, no file modes that depend on the user's umask.
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        os.umask(0o022)
        super().run()
        for folder in (self.get_finalized_command("build").build_lib, CMakeBuild.temporary):
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
        for _, _, path in self.distribution.dist_files:
            with zipfile.ZipFile(path) as archive:
                build_module("torch_release").require_libraries(releases(), archive.namelist(), path)
            size = Path(path).stat().st_size
            most = build_module("torch_release").MOST_BYTES
            if releases() and size > most:
                raise SystemExit(f"liger-ops: {path} must be at most {most} bytes (got {size})")
            if releases():
                build_module("progress").say(f"liger-ops: pip install {path}")


setup(
    **presentation(),
    ext_modules=[Extension("liger_ops._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "dist_info": Metadata, "bdist_wheel": Wheel, "hub": Hub},
)
