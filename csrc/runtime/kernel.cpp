#include "runtime/kernel.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string_view>

#include "runtime/immortal.h"

namespace liger::runtime {
namespace {

std::vector<Kernel*>& registry() {
  static auto& kernels = immortal<std::vector<Kernel*>>();
  return kernels;
}

}  // namespace

size_t KernelSpec::match_operator(const std::string& name) const {
  // An alias of the operator without it.
  static constexpr std::string_view kSplit = "vocab_parallel_";
  const std::string op = name.compare(0, kSplit.size(), kSplit) == 0 ? name.substr(kSplit.size()) : name;
  size_t longest = 0;
  for (auto stem = operators; *stem; ++stem) {
    const size_t size = std::strlen(*stem);
    if (op.compare(0, size, *stem) == 0 && (op.size() == size || op[size] == '_')) longest = std::max(longest, size);
  }
  return longest;
}

Kernel::Kernel(const KernelSpec& spec) : spec_(spec) { registry().push_back(this); }

std::string Kernel::name_of(uint32_t variant) const {
  return is_trial(variant) ? std::string(spec_.name) + "[trial]" : spec_.variant_names[variant];
}

void Kernel::publish(int device, uint32_t variant, const Function* function) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  auto* table = tables_[device].load(std::memory_order_acquire);
  if (!table) {
    table = new std::atomic<const Function*>[spec_.variants]();
    tables_[device].store(table, std::memory_order_release);
  }
  table[variant].store(function, std::memory_order_release);
}

void Kernel::reset_counts() noexcept {
  for (auto& count : counts_) count.store(0, std::memory_order_relaxed);
}

const std::vector<Kernel*>& Kernel::all() { return registry(); }

Kernel* Kernel::find(const std::string& name) {
  for (Kernel* kernel : registry()) {
    if (name == kernel->spec().name) return kernel;
  }
  return nullptr;
}

}  // namespace liger::runtime
