#pragma once

// A kernel as the host knows it: a name, a number of variants, and where each was loaded on each device.

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

/// Where a loaded kernel's bytes came from, in the order in which sources are asked.
enum class Source : int { Pack, Cache, Hook, Ptx };
constexpr int kSources = 4;

/// Arguments that the driver puts in their places one by one, at most.
constexpr size_t kMostPlaced = 16;

struct KernelSpec {
  const char* name;
  const char* symbol;
  uint64_t hash;
  uint32_t variants;
  uint32_t args_bytes;
  const char* const* variant_names;  // null where the table has no variant
  const char* const* operators;  // that launch it, up to a null: these names, and longer ones such as <name>_packed
  // Where arguments lie in their struct, if the driver has to put each in its place; null: they go as they lie.
  const uint32_t* places;
  uint32_t arguments;
  // Compute capabilities that it is for, up to a 0; null: all. Where such a kernel is not, there is another way.
  const int* archs;

  bool is_for(int capability) const {
    const int* at = archs;
    while (at && *at && *at != capability) ++at;
    return !at || *at;
  }

  bool has_variant(uint32_t variant) const { return variant < variants && variant_names[variant]; }

  /// Length of the name above that stands for an operator; 0 if it does not launch this kernel.
  size_t serves(const std::string& op) const;
};

struct Function {
  void* handle;
  unsigned threads;
  unsigned shared;
  Source source;
};

/// A config that a developer's tool tries in place of a kernel's table, and the kernel compiled for it.
struct Trial {
  std::string config;  // bytes of the kernel's Config
  const Function* function;
};
/// What a developer's tool does around each launch.
struct Watch {
  std::function<void()> before, after;
};
/// Stands for a variant where a trial takes its place.
constexpr uint32_t kTrialVariant = std::numeric_limits<uint32_t>::max();

class LIGER_RUNTIME_API Kernel {
 public:
  /// Registers the kernel for the life of the process.
  explicit Kernel(const KernelSpec& spec);

  const KernelSpec& spec() const { return spec_; }
  /// What messages call a variant.
  std::string name_of(uint32_t variant) const;

  /// Wait-free; null if this variant has not been loaded on this device.
  const Function* loaded(int device, uint32_t variant) const noexcept {
    const auto* table = tables_[device].load(std::memory_order_acquire);
    return table ? table[variant].load(std::memory_order_acquire) : nullptr;
  }
  /// Publishes a function, which lives as long as the process.
  void publish(int device, uint32_t variant, const Function* function);

  /// Null but for a developer's tool.
  const Trial* trial() const noexcept { return trial_.load(std::memory_order_acquire); }
  /// Null ends it. Trials and watches live as long as the process.
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

/// Rows of a call, where no config of the kernel is for few of them.
constexpr int64_t kManyRows = std::numeric_limits<int64_t>::max();

/// A place on a kernel's axes, of which the last varies fastest.
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

/// First of the kernel's configs that admits rows of n elements; tables end with one that admits everything. Facts: the
/// call's Point, and how many rows it has. What a call leaves untold, no config of the kernel may ask about: it could choose
/// a variant that is not there.
template <class K, class... Facts>
const typename K::Config& first_fit(int64_t n, bool aligned, Facts... facts) {
  constexpr auto any = [](auto asks) {
    for (const auto& c : K::configs) {
      if (asks(c)) return true;
    }
    return false;
  };
  constexpr size_t kTold = sizeof...(Facts), kConfigs = sizeof(K::configs) / sizeof(K::configs[0]);
  // The last config serves every point.
  constexpr uint64_t kAll = K::configs[kConfigs - 1].points;
  static_assert(
      kTold > 0 || !any([](const auto& c) { return c.points != kAll; }), "this kernel asks for a call's point");
  static_assert(
      kTold > 1 || !any([](const auto& c) { return c.max_rows >= 0; }), "this kernel asks how many rows there are");
  auto fits = [](const auto& c, int64_t n, bool aligned, Point point = {0}, int64_t rows = kManyRows) {
    const bool large_enough = (c.max_n < 0 || n <= c.max_n) && (c.max_rows < 0 || rows <= c.max_rows);
    return large_enough && (c.points >> point.index & 1) && (aligned || !c.aligned);
  };
  if (const Trial* trial = K::kernel.trial()) {
    return *reinterpret_cast<const typename K::Config*>(trial->config.data());
  }
  for (size_t i = 0; i + 1 < kConfigs; ++i) {
    if (fits(K::configs[i], n, aligned, facts...)) return K::configs[i];
  }
  return K::configs[kConfigs - 1];
}

template <class K>
uint32_t variant_index(const typename K::Config& config, Point point) {
  constexpr size_t kConfigs = sizeof(K::configs) / sizeof(K::configs[0]);
  // What lies outside of the table is a trial's.
  const bool listed = uintptr_t(&config) - uintptr_t(&K::configs[0]) < sizeof(K::configs);
  return listed ? point.index * uint32_t(kConfigs) + uint32_t(&config - K::configs) : kTrialVariant;
}

}  // namespace liger::runtime
