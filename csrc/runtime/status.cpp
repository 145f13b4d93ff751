#include "runtime/status.h"

#include <algorithm>
#include <atomic>

#include "runtime/device.h"
#include "runtime/kernel.h"
#include "runtime/loader.h"
#include "runtime/pack.h"

namespace liger::runtime {
namespace {

std::atomic<uint64_t> cpu_count{0}, gemm_count{0};

}  // namespace

std::string status() {
  auto quoted = [](const std::string& text) {
    std::string out = "\"";
    for (char c : text) {
      if (c == '"' || c == '\\') out += '\\';
      out += c;
    }
    return out + "\"";
  };
  auto flag = [](bool value) { return value ? "true" : "false"; };
  std::string out = "{\"pack_directory\": " + quoted(pack_directory()) + ", \"jit_enabled\": " + flag(jit_enabled()) +
      ", \"jit_compiler\": " + flag(has_compile_hook()) + ", \"jit_cache\": " + quoted(jit_cache_directory()) +
      ", \"cpu_calls\": " + std::to_string(cpu_calls()) + ", \"gemms\": " + std::to_string(gemms()) +
      ", \"devices\": [";
  for (int i = 0, count = device_count(); i < count; ++i) {
    const Device& device = device_at(i);
    out += std::string(i ? ", " : "") + "{\"index\": " + std::to_string(i) +
        ", \"name\": " + quoted(device.error.empty() ? device.info.name : device.error) +
        ", \"capability\": " + std::to_string(device.info.capability) +
        ", \"multiprocessors\": " + std::to_string(device.info.multiprocessors) + ", \"paths\": {";
    const char* separator = "";
    for (const Kernel* kernel : Kernel::all()) {
      const std::string path = path_of(*kernel, device);
      const bool has_fallback = kernel->spec().archs;
      if (has_fallback && (path == "none" || !kernel->spec().supports(device.info.capability))) continue;
      out += separator + quoted(kernel->spec().name) + ": " + quoted(path);
      separator = ", ";
    }
    out += "}}";
  }
  out += "], \"packs\": [";
  const char* separator = "";
  for (const auto& pack : packs()) {
    out += separator + std::string("{\"file\": ") + quoted(pack->origin()) +
        ", \"kind\": " + quoted(pack->kind() == BinaryKind::Cubin ? "cubin" : "ptx") +
        ", \"arch\": " + std::to_string(pack->arch()) + ", \"kernels\": " + std::to_string(pack->size()) +
        ", \"bytes\": " + std::to_string(pack->bytes()) + "}";
    separator = ", ";
  }
  out += "], \"kernels\": {";
  separator = "";
  for (const Kernel* kernel : Kernel::all()) {
    const KernelSpec& spec = kernel->spec();
    const auto variants =
        std::count_if(spec.variant_names, spec.variant_names + spec.variants, [](const char* name) { return name; });
    out += separator + quoted(spec.name) + ": {\"variants\": " + std::to_string(variants) + ", \"launches\": [";
    for (int s = 0; s < kSources; ++s) out += (s ? ", " : "") + std::to_string(kernel->launches(Source(s)));
    out += "]}";
    separator = ", ";
  }
  return out + "}}";
}

void count_cpu_call() noexcept { cpu_count.fetch_add(1, std::memory_order_relaxed); }

uint64_t cpu_calls() noexcept { return cpu_count.load(std::memory_order_relaxed); }

void count_gemm() noexcept { gemm_count.fetch_add(1, std::memory_order_relaxed); }

uint64_t gemms() noexcept { return gemm_count.load(std::memory_order_relaxed); }

void reset_counts() noexcept {
  cpu_count.store(0, std::memory_order_relaxed);
  gemm_count.store(0, std::memory_order_relaxed);
  for (Kernel* kernel : Kernel::all()) kernel->reset_counts();
}

}  // namespace liger::runtime
