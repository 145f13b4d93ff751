"""examples/cpp, built with find_package(liger_ops), trains scripted and traced models without Python."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

import liger_ops
from liger_ops import functional
from liger_ops.aot import declarations
from liger_ops.doctor.installation import operators
from tests.support.checks import served_by
from tests.support.host.cpp_example import configure_cpp, cpp_program, example, libraries_of, run

PACKAGE = Path(liger_ops.__file__).parent


def test_no_python_in_the_process():
    libraries = libraries_of(cpp_program("train"))
    assert Path(liger_ops._loaded.library).name.removesuffix(".so") in libraries
    assert not [name for name in libraries if "python" in name], libraries


def python_losses(model, tokens, target) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0), []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(tokens, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training(tmp_path, device):
    """Scripted and traced models in C++ have the same losses as in Python."""
    torch.manual_seed(0)
    models = example()
    module = models.WithLoss(models.TinyLlama()).to(device)
    torch.manual_seed(0)
    text = torch.randint(128, (4, 33)).to(device)
    tokens, target = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    torch.jit.script(module).save(str(tmp_path / "scripted.pt"))
    torch.jit.trace(module, (tokens, target)).save(str(tmp_path / "traced.pt"))
    expected = python_losses(module, tokens, target)
    for name in ("scripted", "traced"):
        *steps, status = run(cpp_program("train"), tmp_path / f"{name}.pt", device).splitlines()
        losses = [float(line.split()[-1]) for line in steps]
        # Losses are printed with six digits, and the C++ optimizer rounds in another order.
        assert losses == pytest.approx(expected, abs=1e-5) and losses == sorted(losses, reverse=True)
        status = json.loads(status)
        launches = sum(sum(k["launches"]) for k in status["kernels"].values())
        assert (launches > 0, status["cpu_calls"] > 0) == (
            (False, True) if served_by(device) == "cpu" else (True, False)
        )


def test_a_missing_file_is_named(tmp_path):
    done = subprocess.run([cpp_program("train"), tmp_path / "none.pt"], capture_output=True, text=True)
    assert done.returncode == 1 and "none.pt" in done.stderr


# ---- The CMake package.

PROJECT = """
cmake_minimum_required(VERSION 3.18)
project(user LANGUAGES CXX)
{before}
find_package(liger_ops {version} REQUIRED)
message(STATUS "library ${{liger_ops_LIBRARY}} version ${{liger_ops_VERSION}}")
"""


def find(folder: Path, version: str = "", before: str = "") -> str:
    (folder / "CMakeLists.txt").write_text(PROJECT.format(version=version, before=before))
    done = configure_cpp(folder, folder / f"build{len(list(folder.iterdir()))}")
    return " ".join((done.stdout + done.stderr).split())


def test_find_package_chooses_by_torch_and_version(tmp_path):
    found = f"library {liger_ops._loaded.library} version {liger_ops.__version__}"
    assert found in find(tmp_path) and found in find(tmp_path, liger_ops.__version__)
    assert "liger_ops" in find(tmp_path, "99.0") and found not in find(tmp_path, "99.0")


def test_find_package_uses_a_library_given_by_path(tmp_path):
    built_here = tmp_path / "libliger_ops_torch-0123456789ab.so"
    built_here.symlink_to(liger_ops._loaded.library)
    assert f"library {built_here} version" in find(tmp_path, before=f'set(liger_ops_LIBRARY "{built_here}")')


def test_find_package_lists_the_libraries_if_none_fits_torch(tmp_path):
    config = Path(liger_ops.__file__).parent / "share/cmake/liger_ops/liger_opsConfig.cmake"
    root = tmp_path / "package"
    (root / "share/cmake/liger_ops").mkdir(parents=True)
    text = config.read_text().replace("find_dependency(Torch)", "set(Torch_VERSION 1.0.0)")
    (root / "share/cmake/liger_ops/liger_opsConfig.cmake").write_text(text)
    (root / "lib").symlink_to(Path(liger_ops.__file__).parent / "lib")
    output = find(tmp_path, before=f'set(liger_ops_DIR "{root}/share/cmake/liger_ops")')
    present = ", ".join(sorted(path.name for path in liger_ops._loaded.library.parent.glob("libliger_ops_torch*.so")))
    assert f"no operator library fits torch 1.0.0; {root}/lib has: {present}" in output


# ---- The header.


def test_the_header_matches_the_declarations():
    assert (PACKAGE / declarations.HEADER).read_text() == declarations.header()
    declared = " ".join(declarations.cpp_function(functional.rms_norm).split())
    assert (
        "inline at::Tensor rms_norm( const at::Tensor& x, const std::optional<at::Tensor>& weight = std::nullopt, "
        'double eps = 1e-06, double offset = 0.0, std::string_view casting_mode = "llama") {'
    ) in declared
    assert "cross_entropy_( at::Tensor& logits," in " ".join(declarations.header().split())


TYPED = """
cmake_minimum_required(VERSION 3.18)
project(typed LANGUAGES CXX)
find_package(Torch REQUIRED)
find_package(liger_ops REQUIRED)
add_executable(typed typed.cpp)
target_link_libraries(typed PRIVATE liger_ops::liger_ops ${TORCH_LIBRARIES})
"""


@pytest.mark.thorough
def test_the_header_types_match_the_registered_operators(tmp_path):
    """The dispatcher throws if a C++ signature differs from the registered one."""
    calls = "\n".join(f'  liger::detail::find<decltype(liger::{op})>("liger::{op}");' for op in operators())
    (tmp_path / "typed.cpp").write_text(f"#include <liger_ops.h>\nint main() {{\n{calls}\n}}\n")
    (tmp_path / "CMakeLists.txt").write_text(TYPED)
    done = configure_cpp(tmp_path, tmp_path / "build")
    assert done.returncode == 0, done.stdout + done.stderr
    run("cmake", "--build", tmp_path / "build")
    run(tmp_path / "build" / "typed")
