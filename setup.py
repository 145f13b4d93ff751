"""Builds the operator library and the kernel packs through CMake, against the torch that is installed.

    pip install --no-build-isolation .          (LIGER_OPS_ARCHS=80,90 limits the GPU architectures)
"""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info

ROOT = Path(__file__).parent.resolve()


def require(name: str, sentence: str):
    if importlib.util.find_spec(name) is None:
        raise SystemExit(f"liger-ops: {sentence}")
    return __import__(name)


def require_torch():
    return require(
        "torch", "building needs the torch you will run with: install it first, then `pip install --no-build-isolation .`"
    )


class Metadata(dist_info):
    """pip asks for this first. Without torch it stops here, before pip downloads one that nothing was built against."""

    def run(self) -> None:
        require_torch()
        super().run()


class CMakeBuild(build_ext):
    """One CMake build in build/<python>-torch<version>; libraries and packs land inside the package."""

    def run(self) -> None:
        torch = require_torch()
        triton = require("triton", "building needs Triton to compile the kernels: `pip install triton==3.6.0` first")
        minor = ".".join(torch.__version__.split(".")[:2])
        build = ROOT / "build" / f"{sys.implementation.cache_tag}-torch{minor}-triton{triton.__version__}"
        package = ROOT if self.inplace else Path(self.build_lib).resolve()
        arguments = {
            "LIGER_PYTHON": sys.executable,
            "Python_EXECUTABLE": sys.executable,
            "LIGER_TORCH_DIR": Path(torch.__file__).parent,
            "LIGER_TORCH_TAG": minor,
            "LIGER_CXX11_ABI": int(torch._C._GLIBCXX_USE_CXX11_ABI),
            "LIGER_ARCHS": os.environ.get("LIGER_OPS_ARCHS", "80,90,100,120"),
            "LIGER_OUTPUT": package / "liger_ops",
        }
        if importlib.util.find_spec("pybind11"):
            import pybind11

            arguments["LIGER_PYBIND11_DIR"] = pybind11.get_cmake_dir()
            suffix = sysconfig.get_config_var("EXT_SUFFIX")
            arguments["PYTHON_MODULE_EXTENSION"] = suffix
        # Tools that pip installed beside this interpreter come before the system's.
        env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
        try:
            subprocess.run([*configure, *(f"-D{k}={v}" for k, v in arguments.items())], check=True, env=env)
            subprocess.run(["cmake", "--build", str(build)], check=True, env=env)
        except FileNotFoundError:
            raise SystemExit("liger-ops: building needs CMake and ninja: `pip install cmake ninja` first") from None

    def get_outputs(self) -> list:
        return []


setup(
    ext_modules=[Extension("liger_ops._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "dist_info": Metadata},
)
