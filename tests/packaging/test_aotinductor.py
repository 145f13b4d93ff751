"""A small Llama, compiled and packaged by AOTInductor, runs from Python and from a C++ program without Python."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch.export import Dim, export

from tests.support.checks import forked_output_of, served_by
from tests.support.host.cpp_example import cpp_program, example, libraries_of, run

SIZES = [(2, 6), (3, 17)]


def compiler(folder) -> str:
    """A C++ compiler that links libstdc++ dynamically. A static one would put a second C++ runtime into the process."""
    name = os.environ.get("CXX", "g++")
    found = subprocess.run([name, "-print-file-name=libstdc++.so"], capture_output=True, text=True, check=True).stdout
    if os.path.isabs(found.strip()):
        return name
    mapped = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    (folder / "libstdc++.so").symlink_to(next(path for path in mapped if "/libstdc++.so" in path))
    path = folder / "c++"
    path.write_text(f'#!/bin/sh\nexec {name} "$@" -L{folder}\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def packaged(request, tmp_path_factory):
    """The path of the package, the model and its device. Compiled once, because compilation is slow."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("aoti")
    device = request.param
    model = example().TinyLlama().to(device).requires_grad_(False)
    shapes = {"tokens": {0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=512)}}
    program = export(model, (torch.randint(128, (2, 8), device=device),), dynamic_shapes=shapes)
    path = folder / "model.pt2"
    # Precompiling headers for a single model takes longer than it saves.
    options = {"cpp.cxx": (None, compiler(folder)), "aot_inductor.precompile_headers": False}
    with torch._inductor.config.patch(options):
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return path, model, device


@pytest.mark.thorough
def test_from_python(packaged):
    path, model, device = packaged
    loaded = torch._inductor.aoti_load_package(str(path))
    for size in SIZES:
        tokens = torch.randint(128, size, device=device)
        torch.testing.assert_close(loaded(tokens), model(tokens))


LOAD = """
import torch, liger_ops
loaded = torch._inductor.aoti_load_package({path!r})
torch.save(loaded(torch.load({tokens!r}).to({device!r})).cpu(), {logits!r})
"""


@pytest.mark.thorough
def test_from_a_new_process(packaged, tmp_path):
    path, model, device = packaged
    tokens = torch.randint(128, SIZES[1])
    torch.save(tokens, tmp_path / "tokens.pt")
    files = {name: str(tmp_path / f"{name}.pt") for name in ("tokens", "logits")}
    forked_output_of(LOAD.format(path=str(path), device=device, **files))
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), model(tokens.to(device)).cpu())


@pytest.mark.thorough
def test_from_cpp(packaged, tmp_path):
    path, model, device = packaged
    libraries = libraries_of(cpp_program("serve"))
    assert not [name for name in libraries if "python" in name], libraries
    for size in SIZES:
        tokens = torch.randint(128, size)
        torch.save(tokens, tmp_path / "tokens.pt")
        command = [cpp_program("serve"), path, tmp_path / "tokens.pt", tmp_path / "logits.pt", device]
        output = run(*command)
        torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), model(tokens.to(device)).cpu())
        status = json.loads(output.splitlines()[-1])
        assert (status["cpu_calls"] > 0) == (served_by(device) == "cpu")
