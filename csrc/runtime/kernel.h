#pragma once

// The host's view of a kernel: its name, its variants, and the functions loaded on each device.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "runtime/device.h"
#include "runtime/export.h"

namespace liger::runtime {

enum class DType : int { F32, F16, BF16, Other };

/// Where a loaded kernel's binary came from, in the order in which the loader tries them.
enum class Source : int { Pack, Cache, Hook, Ptx };
constexpr int kSources = 4;

/// Maximum number of arguments of a kernel that has KernelSpec::places.
constexpr size_t kMostPlaced = 16;

struct KernelSpec {
  const char* name;
  const char* symbol;
  uint64_t hash;
  uint32_t variants;
  uint32_t args_bytes;
  const char* const* variant_names;  // null for a number without a variant
  // Operators that launch it, up to a null. A name also covers longer ones such as <name>_packed.
  const char* const* operators;
  // Offsets of the arguments in their struct, if the driver must copy each argument separately. Null: pass the struct
  // as it is.
  const uint32_t* places;
  uint32_t arguments;
  // Supported compute capabilities, up to a 0; null: all. On other devices, operators work without this kernel.
  const int* archs;

  bool supports(int capability) const {
    const int* at = archs;
    while (at && *at && *at != capability) ++at;
    return !at || *at;
  }

  bool has_variant(uint32_t variant) const { return variant < variants && variant_names[variant]; }

  /// Length of the name above that matches an operator; 0 if the operator does not launch this kernel.
  size_t match_operator(const std::string& name) const;
};

struct Grid {
  uint32_t x = 1, y = 1, z = 1;
};

struct Function {
  void* handle;
  unsigned threads;
  unsigned shared;
  Source source;
};

/// A config that a developer tool tries instead of one of the kernel's table, and the kernel compiled for it.
struct Trial {
  std::string config;  // bytes of the kernel's Config
  uint32_t instead_of;  // index of a config in the table
  std::vector<const Function*> functions;  // by point, null where it was not compiled
};
/// Callbacks of a developer tool around each launch.
struct Watch {
  std::function<void()> before, after;
};
/// The variant number of a trial at the first point. Others follow.
constexpr uint32_t kTrialVariant = 1u << 31;
constexpr bool is_trial(uint32_t variant) { return variant >= kTrialVariant; }

class LIGER_RUNTIME_API Kernel {
 public:
  /// Registers the kernel for the life of the process.
  explicit Kernel(const KernelSpec& spec);

  const KernelSpec& spec() const { return spec_; }
  /// The variant's name in messages.
  std::string name_of(uint32_t variant) const;

  /// Wait-free; null if this variant has not been loaded on this device.
  const Function* loaded(int device, uint32_t variant) const noexcept {
    const auto* table = tables_[device].load(std::memory_order_acquire);
    return table ? table[variant].load(std::memory_order_acquire) : nullptr;
  }
  /// Publishes a function, which must live as long as the process.
  void publish(int device, uint32_t variant, const Function* function);

  /// Null unless a developer tool has set one.
  const Trial* trial() const noexcept { return trial_.load(std::memory_order_acquire); }
  /// Null ends the trial. Trials and watches must live as long as the process.
  void set_trial(const Trial* trial) noexcept { trial_.store(trial, std::memory_order_release); }

  const Watch* watch() const noexcept { return watch_.load(std::memory_order_acquire); }
  void set_watch(const Watch* watch) noexcept { watch_.store(watch, std::memory_order_release); }

  void count(Source source, uint32_t variant) noexcept {
    counts_[int(source)].fetch_add(1, std::memory_order_relaxed);
    last_.store(variant, std::memory_order_relaxed);
  }
  /// The variant launched last.
  uint32_t last_variant() const noexcept { return last_.load(std::memory_order_relaxed); }
  uint64_t launches(Source source) const noexcept { return counts_[int(source)].load(std::memory_order_relaxed); }
  void reset_counts() noexcept;

  static const std::vector<Kernel*>& all();
  static Kernel* find(const std::string& name);

 private:
  KernelSpec spec_;
  std::array<std::atomic<std::atomic<const Function*>*>, kMaxDevices> tables_{};
  std::array<std::atomic<uint64_t>, kSources> counts_{};
  std::atomic<uint32_t> last_{0};
  std::atomic<const Trial*> trial_{nullptr};
  std::atomic<const Watch*> watch_{nullptr};
};

/// Two levels of strides of a tensor's rows: of blocks of rows, and of rows in a block.
struct RowStrides {
  int64_t outer = 0, inner = 0;

  int64_t offset(int64_t row, int64_t inner_rows) const {
    int64_t block = row / inner_rows;
    return block * outer + (row - block * inner_rows) * inner;
  }
};

/// The number of rows if the caller does not state it: no config of the kernel depends on it.
constexpr int64_t kManyRows = std::numeric_limits<int64_t>::max();

/// A combination of choices on a kernel's axes. The last axis varies fastest.
struct Point {
  uint32_t index;
};

template <class K, class... Choices>
constexpr Point point_of(Choices... choices) {
  constexpr size_t kAxes = sizeof(K::axes) / sizeof(int);
  static_assert(sizeof...(Choices) == kAxes, "one choice per axis");
  const int chosen[] = {int(choices)...};
  uint32_t index = 0;
  for (size_t i = 0; i < kAxes; ++i) index = index * K::axes[i] + chosen[i];
  return {index};
}

/// The point among the facts of first_fit. A kernel without axes has one.
template <class K, class... More>
constexpr Point point_in(Point point, const More&...) {
  return point;
}
template <class K>
constexpr Point point_in() {
  constexpr bool single = [] {
    for (int size : K::axes) {
      if (size != 1) return false;
    }
    return true;
  }();
  static_assert(single, "the kernel has axes, so its calls have a point");
  return {0};
}

/// The first of the kernel's configs that admits rows of n elements. The last config of a table admits everything,
/// unless its operator makes only aligned calls. facts: the call's Point and its number of rows, both optional. A
/// config must not depend on a fact that the caller omits, because the chosen variant might not exist.
template <class K, class... Facts>
const typename K::Config& first_fit(int64_t n, bool aligned, Facts... facts) {
  constexpr auto any = [](auto depends) {
    for (const auto& c : K::configs) {
      if (depends(c)) return true;
    }
    return false;
  };
  constexpr size_t kFacts = sizeof...(Facts), kConfigs = sizeof(K::configs) / sizeof(K::configs[0]);
  // The last config admits every point.
  constexpr uint64_t kAll = K::configs[kConfigs - 1].points;
  static_assert(
      kFacts > 0 || !any([](const auto& c) { return c.points != kAll; }), "a config depends on the call's point");
  static_assert(
      kFacts > 1 || !any([](const auto& c) { return c.max_rows >= 0; }), "a config depends on the number of rows");
  auto fits = [](const auto& c, int64_t n, bool aligned, Point point = {0}, int64_t rows = kManyRows) {
    const bool within_limits = (c.max_n < 0 || n <= c.max_n) && (c.max_rows < 0 || rows <= c.max_rows);
    return within_limits && (c.points >> point.index & 1) && (aligned || !c.aligned);
  };
  size_t i = 0;
  while (i + 1 < kConfigs && !fits(K::configs[i], n, aligned, facts...)) ++i;
  if (const Trial* trial = K::kernel.trial(); trial && trial->instead_of == i) {
    return *reinterpret_cast<const typename K::Config*>(trial->config.data());
  }
  return K::configs[i];
}

template <class K>
uint32_t variant_index(const typename K::Config& config, Point point) {
  constexpr size_t kConfigs = sizeof(K::configs) / sizeof(K::configs[0]);
  // A config outside of the table belongs to a trial.
  const bool listed = uintptr_t(&config) - uintptr_t(&K::configs[0]) < sizeof(K::configs);
  return listed ? point.index * uint32_t(kConfigs) + uint32_t(&config - K::configs) : kTrialVariant + point.index;
}

}  // namespace liger::runtime
