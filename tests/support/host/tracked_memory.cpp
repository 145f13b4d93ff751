// An allocator of CPU tensors that remembers its memory, so that an address can be checked.

#include <c10/core/CPUAllocator.h>

#include <map>
#include <mutex>

namespace {

std::mutex mutex;
std::map<uintptr_t, std::pair<size_t, c10::DataPtr>> held;  // by first address: bytes

void forget(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  held.erase(uintptr_t(address));
}

struct Tracked final : c10::Allocator {
  c10::Allocator& wrapped = *c10::GetDefaultCPUAllocator();

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr memory = wrapped.allocate(bytes);
    void* const address = memory.get();
    if (!address) return memory;
    std::lock_guard<std::mutex> lock(mutex);
    held.try_emplace(uintptr_t(address), bytes, std::move(memory));
    return {address, address, &forget, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &forget; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

extern "C" {

void track_memory() { c10::SetCPUAllocator(new Tracked, /*priority=*/255); }

/// The bytes of the memory that holds this address, and where it begins; 0 if it is unknown.
size_t memory_of(uintptr_t address, uintptr_t* first) {
  std::lock_guard<std::mutex> lock(mutex);
  auto after = held.upper_bound(address);
  if (after == held.begin()) return 0;
  const auto& [at, memory] = *--after;
  *first = at;
  return address - at <= memory.first ? memory.first : 0;
}
}
