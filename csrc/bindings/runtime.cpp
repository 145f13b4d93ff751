// Python bindings of the runtime for tests and developer tools. Operators do not need this module.

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "gemm/plan.h"
#include "runtime/arch.h"
#include "runtime/device.h"
#include "runtime/interpreter.h"
#include "runtime/kernel.h"
#include "runtime/launch.h"
#include "runtime/loader.h"
#include "runtime/pack.h"
#include "runtime/status.h"

namespace py = pybind11;
using namespace liger::runtime;

namespace {

Kernel& kernel_named(const std::string& name) {
  Kernel* kernel = Kernel::find(name);
  if (!kernel) throw py::value_error("no kernel named " + name);
  return *kernel;
}

py::dict list_pack(const std::string& path) {
  std::string error;
  auto pack = Pack::open(path, error);
  if (!pack) throw py::value_error(error);
  py::dict out;
  out["kind"] = pack->kind() == BinaryKind::Cubin ? "cubin" : "ptx";
  out["arch"] = pack->arch();
  out["names"] = pack->names();
  return out;
}

py::object read_entry(const std::string& path, const std::string& kernel, uint32_t variant) {
  std::string error;
  auto pack = Pack::open(path, error);
  if (!pack) throw py::value_error(error);
  Binary binary;
  auto found = pack->find(kernel_named(kernel).spec().hash, variant, binary, error);
  if (found == Pack::Lookup::Damaged) throw py::value_error(error);
  if (found == Pack::Lookup::Absent) return py::none();
  return py::make_tuple(py::bytes(binary.code), binary.num_warps, binary.shared);
}

void launch_raw(
    const std::string& name, uint32_t variant, int device, std::tuple<uint32_t, uint32_t, uint32_t> grid,
    const py::bytes& args, uintptr_t stream) {
  Kernel& kernel = kernel_named(name);
  std::string packed = args;
  if (!kernel.spec().has_variant(variant) && !is_trial(variant)) throw py::value_error("no such variant of " + name);
  if (packed.size() != kernel.spec().args_bytes) {
    throw py::value_error(name + " takes " + std::to_string(kernel.spec().args_bytes) + " bytes of arguments");
  }
  std::string error;
  {
    py::gil_scoped_release unlocked;
    auto [x, y, z] = grid;
    error = launch(kernel, variant, device, reinterpret_cast<void*>(stream), {x, y, z}, packed.data());
  }
  if (!error.empty()) throw std::runtime_error(error);
}

// For tests with a stub of cuBLAS, which reads no memory. None without a plan, else whether the GEMM ran.
std::optional<bool> multiply_at_fake_addresses(
    bool bf16, bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, int device, int64_t alignment,
    double beta, bool sustained) {
  auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  auto plan = liger::gemm::plan(
      {bf16 ? DType::BF16 : DType::F16, transpose_a, transpose_b, m, n, k, transpose_a ? k : m, transpose_b ? n : k, m,
       alignment, sustained},
      device);
  if (!plan) return std::nullopt;
  std::string error;
  const bool ran = liger::gemm::run(*plan, at(5), 2.0, at(256), at(512), beta, at(768), at(1024), error);
  if (!error.empty()) throw std::runtime_error(error);
  return ran;
}

void try_config_of(
    const std::string& name, int device, const py::bytes& config, uint32_t configs,
    const std::vector<uint32_t>& variants, const py::bytes& pack) {
  std::string error = try_config(kernel_named(name), device, config, configs, variants, pack);
  if (!error.empty()) throw std::runtime_error(error);
}

// Calls before() and after() around each launch of the kernel, in the launching thread. None ends it.
void watch(const std::string& name, py::object before, py::object after) {
  if (before.is_none()) return kernel_named(name).set_watch(nullptr);
  // Never freed, like the compile hook below.
  auto call = [](py::object function) {
    return [kept = new py::object(std::move(function))] {
      py::gil_scoped_acquire locked;
      (*kept)();
    };
  };
  kernel_named(name).set_watch(new Watch{call(std::move(before)), call(std::move(after))});
}

py::dict launch_counts(const std::string& name) {
  const Kernel& kernel = kernel_named(name);
  py::dict out;
  const char* names[] = {"pack", "cache", "hook", "ptx"};
  for (int i = 0; i < kSources; ++i) out[names[i]] = kernel.launches(Source(i));
  return out;
}

// hook(kernel, variant, capability) -> bytes of a one-entry pack
void set_hook(py::object hook) {
  if (hook.is_none()) return set_compile_hook(nullptr);
  // Never freed: the last reference could be dropped without the GIL, or after the interpreter exits.
  auto* kept = new py::object(std::move(hook));
  set_compile_hook([kept](const KernelSpec& spec, uint32_t variant, int capability, std::string& error) -> std::string {
    py::gil_scoped_acquire locked;
    try {
      return py::bytes((*kept)(spec.name, variant, capability));
    } catch (const std::exception& e) {
      error = e.what();
      return {};
    }
  });
}

// run(kernel, variant, grid, address of the arguments) raises what went wrong.
void interpret(py::object run, int capability, int multiprocessors) {
  // Never freed, as above.
  auto* kept = new py::object(std::move(run));
  auto call = [kept](const Kernel& kernel, uint32_t variant, Grid grid, const void* arguments) -> std::string {
    py::gil_scoped_acquire locked;
    try {
      (*kept)(kernel.spec().name, variant, std::make_tuple(grid.x, grid.y, grid.z), uintptr_t(arguments));
    } catch (const std::exception& e) {
      return e.what();
    }
    return {};
  };
  set_interpreter(new Interpreter(call), {capability, multiprocessors, "Triton's interpreter"});
}

}  // namespace

PYBIND11_MODULE(_runtime, m) {
  m.doc() = "The torch-free runtime: packs, architecture rules, loading and launching.";
  m.def("list_pack", list_pack, py::arg("path"));
  m.def("read_entry", read_entry, py::arg("path"), py::arg("kernel"), py::arg("variant"));
  m.def("cubin_runs_on", [](int target, int device) { return cubin_runs_on(target, device); });
  m.def("ptx_runs_on", [](int target, int device) { return ptx_runs_on(target, device); });
  m.def("kernels", [] {
    py::dict out;
    for (const Kernel* kernel : Kernel::all()) {
      const auto& spec = kernel->spec();
      std::vector<std::string> names;
      for (uint32_t i = 0; i < spec.variants; ++i) {
        if (spec.has_variant(i)) names.push_back(spec.variant_names[i]);
      }
      out[spec.name] = names;
    }
    return out;
  });
  m.def("hash", [](const std::string& name) { return kernel_named(name).spec().hash; });
  m.def("args_bytes", [](const std::string& name) { return kernel_named(name).spec().args_bytes; });
  m.def(
      "launch", launch_raw, py::arg("kernel"), py::arg("variant"), py::arg("device"), py::arg("grid"), py::arg("args"),
      py::arg("stream") = 0);
  m.def(
      "loads",
      [](const std::string& kernel, int device) {
        const char* names[] = {"yes", "no", "not now"};
        return names[int(loads(kernel_named(kernel), 0, device))];
      },
      py::arg("kernel"), py::arg("device") = 0);
  m.def("launch_counts", launch_counts, py::arg("kernel"));
  m.def("last_variant", [](const std::string& name) { return kernel_named(name).last_variant(); });
  m.def(
      "try_config", try_config_of, py::arg("kernel"), py::arg("device"), py::arg("config"), py::arg("configs"),
      py::arg("variants"), py::arg("pack"));
  m.def("end_trial", [](const std::string& name) { kernel_named(name).set_trial(nullptr); });
  m.def("watch", watch, py::arg("kernel"), py::arg("before"), py::arg("after") = py::none());
  m.attr("TRIAL") = kTrialVariant;
  m.def("reset_counts", reset_counts);
  m.def(
      "preload",
      [](int device, const std::vector<std::string>& ops) {
        Preloaded done;
        {
          py::gil_scoped_release unlocked;
          done = preload(device, ops);
        }
        if (!done.error.empty()) throw std::runtime_error(done.error);
        return std::make_tuple(done.loaded, done.missing);
      },
      py::arg("device"), py::arg("ops") = std::vector<std::string>());
  m.def("kernels_of", [](const std::vector<std::string>& ops) {
    std::string error;
    std::vector<std::string> names;
    for (const Kernel* kernel : kernels_of(ops, error)) names.push_back(kernel->spec().name);
    if (!error.empty()) throw std::runtime_error(error);
    return names;
  });
  m.def(
      "multiply", multiply_at_fake_addresses, py::arg("bf16"), py::arg("transpose_a"), py::arg("transpose_b"),
      py::arg("m"), py::arg("n"), py::arg("k"), py::arg("device") = 0, py::arg("alignment") = 256,
      py::arg("beta") = 0.0, py::arg("sustained") = false);
  m.def("gemms", gemms);
  m.def("status", status);
  m.def("set_hook", set_hook);
  m.def("interpret", interpret, py::arg("run"), py::arg("capability"), py::arg("multiprocessors") = 2);
  m.def("set_compiler", set_compiler);
  m.def("device_count", device_count);
  m.def("device", [](int index) {
    std::string error;
    const DeviceInfo* info = device_info(index, error);
    if (!info) throw std::runtime_error(error);
    return std::make_tuple(info->name, info->capability, info->multiprocessors);
  });
}
