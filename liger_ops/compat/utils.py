"""`liger_kernel.utils` and `env_report`: available devices, backends and packages."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

PEFT_AVAILABLE = importlib.util.find_spec("peft") is not None

# The package's names of GPU families, by compute capability for NVIDIA and by target for AMD.
NVIDIA = {
    **dict.fromkeys([(7, 0), (7, 5)], "volta_turing"), **dict.fromkeys([(8, 0), (8, 6), (8, 9)], "ampere_ada"),
    (9, 0): "hopper", (10, 0): "blackwell", (10, 3): "blackwell_ultra", (12, 0): "blackwell_consumer",
}  # fmt: skip
AMD = {
    "gfx908": "cdna", "gfx90a": "cdna2", **dict.fromkeys(["gfx940", "gfx941", "gfx942"], "cdna3"),
    **dict.fromkeys(["gfx1100", "gfx1101", "gfx1102"], "rdna3"),
}  # fmt: skip
# Substrings of device names, in lower case: family.
XPU = {"max": "pvc", "pvc": "pvc", "ponte": "pvc", "arc": "arc", "battlemage": "arc", "alchemist": "arc"}
NPU = {"910": "ascend910", "310": "ascend310"}


def is_peft_available() -> bool:
    return PEFT_AVAILABLE


def is_npu_available() -> bool:
    npu = getattr(torch, "npu", None)
    return npu is not None and npu.is_available()


def infer_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if is_npu_available():
        return "npu"
    return "xpu" if torch.xpu.is_available() else "cpu"


def infer_comm_backend() -> str:
    """The backend to pass to torch.distributed.init_process_group."""
    distributed = torch.distributed
    for name, available in (
        ("nccl", distributed.is_nccl_available),
        ("hccl", is_npu_available),
        ("xccl", distributed.is_xccl_available),
        ("mpi", distributed.is_mpi_available),
        ("gloo", distributed.is_gloo_available),
    ):
        if available():
            return name
    raise RuntimeError("liger_kernel.utils.infer_comm_backend: torch has no distributed backend")


@functools.cache
def infer_device_arch(device_id: int = 0) -> str:
    """The family of the GPU, or its architecture or device type if the family is unknown."""
    device = infer_device()
    try:
        if device == "cuda" and torch.version.hip is None:
            capability = torch.cuda.get_device_capability(device_id)
            return NVIDIA.get(capability, "sm_{}{}".format(*capability))
        if device == "cuda":
            target = getattr(torch.cuda.get_device_properties(device_id), "gcnArchName", "").split(":")[0]
            return AMD.get(target, target or device)
        if device in ("xpu", "npu"):
            name = getattr(torch, device).get_device_properties(device_id).name.lower()
            return next((family for part, family in {"xpu": XPU, "npu": NPU}[device].items() if part in name), device)
    except Exception:  # the driver may fail
        pass
    return device


def get_total_gpu_memory() -> int:
    """The memory of the first device in GiB, rounded down."""
    device = infer_device()
    if device == "cpu":
        raise RuntimeError("liger_kernel.utils.get_total_gpu_memory: there is no GPU")
    return getattr(torch, device).get_device_properties(0).total_memory // 2**30


def transformers_version_dispatch(
    required_version: str,
    before_fn: Callable[..., Any],
    after_fn: Callable[..., Any],
    before_args: tuple = (),
    after_args: tuple = (),
    before_kwargs: dict[str, Any] | None = None,
    after_kwargs: dict[str, Any] | None = None,
) -> Any:
    """The result of before_fn if transformers is older than the version, else of after_fn."""
    import transformers
    from packaging.version import parse

    if parse(transformers.__version__) < parse(required_version):
        return before_fn(*before_args, **(before_kwargs or {}))
    return after_fn(*after_args, **(after_kwargs or {}))


def print_env_report() -> None:
    """Prints the versions of the system, Python and the libraries that matter."""
    import platform

    from .._version import __version__

    print(f"Operating System: {platform.platform()}")
    print(f"Python version: {platform.python_version()}")
    print(f"liger_ops version: {__version__}")
    print(f"PyTorch version: {torch.__version__}")
    for name, version, device in (
        ("CUDA", torch.version.cuda, torch.cuda), ("HIP(ROCm)", torch.version.hip, torch.cuda),
        ("XPU", torch.version.xpu, torch.xpu),
    ):  # fmt: skip
        print(f"{name} version: {version if version and device.is_available() else 'Not available'}")
    for name in ("triton", "transformers"):
        try:
            print(f"{name.capitalize()} version: {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{name.capitalize()}: Not installed")
