#include "runtime/device.h"

#include <array>
#include <mutex>

#include "runtime/immortal.h"

namespace liger::runtime {
namespace {

// True once this thread is known to have a context, so that launches need not check. If that context is popped, a
// launch fails and checks again.
thread_local bool has_context = false;

Device& out_of_range() {
  static auto& device = immortal<Device>(-1);
  return device;
}

}  // namespace

Device::Device(int index) {
  if (index < 0 || index >= kMaxDevices) {
    error = "device index out of range (at most " + std::to_string(kMaxDevices) + " devices)";
    return;
  }
  const Driver* driver = Driver::get(&error);
  if (!driver) return;
  int major = 0, minor = 0;
  char name[256] = {};
  auto check = [&](const char* call, CuResult result) {
    if (result != kCuSuccess && error.empty()) error = driver->failure(call, result);
  };
  check("cuDeviceGet", driver->cuDeviceGet(&handle, index));
  if (!error.empty()) return;
  check("cuDeviceGetAttribute", driver->cuDeviceGetAttribute(&major, kCuAttributeMajor, handle));
  check("cuDeviceGetAttribute", driver->cuDeviceGetAttribute(&minor, kCuAttributeMinor, handle));
  int& multiprocessors = info.multiprocessors;
  check("cuDeviceGetAttribute", driver->cuDeviceGetAttribute(&multiprocessors, kCuAttributeMultiprocessors, handle));
  check("cuDeviceGetName", driver->cuDeviceGetName(name, sizeof name - 1, handle));
  info.capability = major * 10 + minor;
  info.name = name;
}

const Device& device_at(int index) {
  static std::array<std::atomic<const Device*>, kMaxDevices> devices{};
  static std::mutex mutex;
  if (index < 0 || index >= kMaxDevices) return out_of_range();
  if (const Device* device = devices[index].load(std::memory_order_acquire)) return *device;
  std::lock_guard<std::mutex> lock(mutex);
  if (!devices[index].load(std::memory_order_acquire))
    devices[index].store(new Device(index), std::memory_order_release);
  return *devices[index].load(std::memory_order_acquire);
}

void make_up_device(const DeviceInfo& info) {
  out_of_range().info = info;
  out_of_range().error.clear();
}

bool retain_context(const Driver& driver, const Device& device, std::string& error) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (device.context.load(std::memory_order_acquire)) return true;
  void* context = nullptr;
  CuResult result = driver.cuDevicePrimaryCtxRetain(&context, device.handle);
  if (result != kCuSuccess) {
    error = driver.failure("cuDevicePrimaryCtxRetain", result);
    return false;
  }
  device.context.store(context, std::memory_order_release);
  return true;
}

std::string ensure_context(int device) {
  if (has_context) return {};
  const Driver* driver = Driver::get();
  const Device& found = device_at(device);
  std::string error = found.error;
  void* current = nullptr;
  if (!error.empty() || !retain_context(*driver, found, error)) return error;
  CuResult result = driver->cuCtxGetCurrent(&current);
  if (result != kCuSuccess) return driver->failure("cuCtxGetCurrent", result);
  if (!current) result = driver->cuCtxSetCurrent(found.context.load(std::memory_order_acquire));
  if (result != kCuSuccess) return driver->failure("cuCtxSetCurrent", result);
  has_context = true;
  return {};
}

void forget_context() { has_context = false; }

std::string failed_on(int device, const std::string& what, const std::string& why) {
  const Device& found = device_at(device);
  auto text = [](auto number) { return std::to_string(number); };
  std::string facts = found.error.empty() ? " (" + found.info.name + ", sm_" + text(found.info.capability) + ")" : "";
  return what + " on device " + text(device) + facts + " failed: " + why;
}

int multiprocessors(int device) { return device_at(device).info.multiprocessors; }

int device_count() {
  int count = 0;
  const Driver* driver = Driver::get();
  return driver && driver->cuDeviceGetCount(&count) == kCuSuccess ? count : 0;
}

const DeviceInfo* device_info(int device, std::string& error) {
  const Device& found = device_at(device);
  error = found.error;
  return error.empty() ? &found.info : nullptr;
}

}  // namespace liger::runtime
