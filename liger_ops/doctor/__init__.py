"""`python -m liger_ops doctor [MODEL]`: what is installed, whether every operator is right on this device, and what
apply_liger_kernel would do with a model. The exit status is 1 if something is wrong."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .._runtime import loader
from . import installation, model, operators

PACKAGES = ("triton", "transformers", "peft", "accelerate", "trl")
NVIDIA = Path("/proc/driver/nvidia/version")


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def nvidia_driver() -> str | None:
    try:
        found = re.search(r"\b(\d+\.\d+[.\d]*)\b", NVIDIA.read_text())
    except OSError:
        return None
    return found[1] if found else None


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {package: installed(package) for package in PACKAGES},
        "nvidia_driver": nvidia_driver(),
        "torch_cuda": torch.version.cuda,
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("LIGER_OPS_")},
    }


def problem(text: str, remedy: str) -> dict[str, str]:
    return {"problem": text.rstrip("."), "next_step": remedy.rstrip(".")}


def problems_of_installation(facts: dict[str, Any], environment: dict[str, Any]) -> list[dict[str, str]]:
    found = []
    if facts["library"] is None:
        reasons = "; ".join(f"{name}: {why}" for name, why in facts["libraries_not_used"].items())
        remedy = "unset LIGER_OPS_LIBRARY" if os.environ.get("LIGER_OPS_LIBRARY") == "0" else loader.remedy()
        text = "there is no operator library for this torch: plain formulas run, which are slower and need more memory"
        found.append(problem(f"{text} ({reasons or 'none was found'})", remedy))
    if environment["nvidia_driver"] and not environment["torch_cuda"]:
        found.append(
            problem(
                "this machine has an NVIDIA driver, but torch is built without CUDA", "install a CUDA build of torch"
            )
        )
    for device in facts["devices"]:
        name = f"cuda:{device['index']}"
        missing = [op for op, paths in facts["operators"].items() if paths.get(name) == "none"]
        if missing:
            text = f"{name} ({device['name']}, sm_{device['capability']}) has no kernels for {', '.join(missing)}"
            remedy = f"install Triton, or build again with LIGER_OPS_ARCHS={device['capability']}"
            found.append(problem(text, remedy))
    return found


def problems_of_operators(checked: Sequence[operators.Checked]) -> list[dict[str, str]]:
    remedy = (
        "until this is mended, LIGER_OPS_LIBRARY=0 in the environment makes the plain formulas run. Open an issue with "
        "the output of this command with --json"
    )
    return [
        problem(
            f"{each.operator} is wrong on {each.device}: {each.failures[0]}"
            + (f", and {len(each.failures) - 1} more" if len(each.failures) > 1 else ""),
            remedy,
        )
        for each in checked
        if not each.right
    ]


def examine(name: str | None, device: str | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """device: where operators are checked, which takes minutes. None: nowhere. A wrong `name` is said instead."""
    facts: dict[str, Any] = {"environment": environment(), **installation.report(), "checked": [], "model": None}
    found = problems_of_installation(facts, facts["environment"])
    if name is not None:
        progress(f"building {name} without its weights")
        try:
            report, said = model.examine(name)
            facts["model"] = {"name": name, "text": str(report), "warnings": said, **report.as_dict()}
        except model.CannotExamine as error:
            return facts | {"problems": [problem(*error.args), *found]}
    if device is not None:
        checked = operators.check_all(device, progress)
        found += problems_of_operators(checked)
        facts["checked"] = [each.as_dict() for each in checked]
    return facts | {"problems": found}


def verdict(checked: dict[str, Any]) -> str:
    return f"right, {checked['results']} results" if checked["right"] else "WRONG"


def lines(facts: dict[str, Any]) -> list[str]:
    surroundings, checked = facts["environment"], facts["checked"]
    packages = [f"{package} {found}" for package, found in surroundings["packages"].items() if found]
    cuda, driver = surroundings["torch_cuda"], surroundings["nvidia_driver"]
    drivers = [
        f"NVIDIA {driver}" if driver else "no NVIDIA driver",
        f"torch for CUDA {cuda}" if cuda else "torch for CPU",
    ]
    rows = [(each["operator"], each["path"], verdict(each)) for each in checked]
    text = [
        *installation.summary(facts),
        *installation.section("python", [f"{surroundings['python']} on {surroundings['system']}"]),
        *installation.section("packages", [", ".join(packages) or "none of those that liger-ops works with"]),
        *installation.section("driver", [", ".join(drivers)]),
        *installation.section("settings", [f"{name}={value}" for name, value in surroundings["variables"].items()]),
    ]
    if checked:
        seconds = sum(each["seconds"] for each in checked)
        title = f"Every operator against its formula in fp64, on {checked[0]['device']}, in {seconds:.0f} seconds:"
        text += ["", title, "", *installation.table([("operator", "path", "forward and backward"), *rows])]
    if facts["model"]:
        text += ["", f"apply_liger_kernel on {facts['model']['name']}:", "", *facts["model"]["text"].splitlines()]
        text += facts["model"]["warnings"]
    if not facts["problems"]:
        return [*text, "", "Everything is right."]
    for i, each in enumerate(facts["problems"], 1):
        text += ["", f"Problem {i}: {each['problem']}.", f"Next step: {each['next_step']}."]
    return text


def progress_line() -> Callable[[str], None]:
    """Shows one line that is overwritten, on a terminal alone."""
    if not sys.stderr.isatty():
        return lambda text: None

    def show(text: str) -> None:
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    return show


def wrong_device(name: str) -> str:
    """What --device must be; empty if it is."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        return f"cpu, cuda or cuda:N (got {name})"
    index, count = int(name.partition(":")[2] or 0), torch.cuda.device_count()
    if name == "cpu" or index < count:
        return ""
    built = "" if torch.version.cuda else ", and is built without CUDA"
    return f"a device of this machine (got {name}: torch finds {count} GPUs{built})"


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m liger_ops doctor", description=__doc__)
    parser.add_argument(
        "model", nargs="?", help="a folder with a config.json, such a file, or a name that transformers can read"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to check operators"
    )
    parser.add_argument("--model-only", action="store_true", help="do not check operators, which takes minutes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    if wrong := wrong_device(given.device):
        parser.error(f"--device must be {wrong}")
    if given.model_only and given.model is None:
        parser.error("--model-only needs a MODEL")
    show = progress_line()
    facts = examine(given.model, None if given.model_only else given.device, show)
    show("")
    print(json.dumps(facts, indent=2) if given.json else "\n".join(lines(facts)))
    return 1 if facts["problems"] else 0
