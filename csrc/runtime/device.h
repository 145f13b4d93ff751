#pragma once

// Devices and their contexts.

#include <atomic>
#include <string>

#include "runtime/driver.h"
#include "runtime/export.h"

namespace liger::runtime {

constexpr int kMaxDevices = 64;

struct DeviceInfo {
  int capability;  // major * 10 + minor
  int multiprocessors;
  std::string name;
};

/// A device, looked up once.
struct Device {
  explicit Device(int index);

  DeviceInfo info{};
  int handle = 0;
  std::string error;
  mutable std::atomic<void*> context{nullptr};
};

/// `error` is set in one that there is not, or that the driver cannot use.
const Device& device_at(int index);

/// The primary context, which torch uses too. Retained at the first load and not before: a process that only asks what
/// devices there are must not fill each of them with a context. False with `error` set if the driver refuses.
bool retain_context(const Driver& driver, const Device& device, std::string& error);

/// Makes the device's primary context current in a thread that has none, as autograd's threads have before their first
/// CUDA call. A context that is current stays: the device guard is the caller's. Empty on success.
std::string give_context(int device);
/// The next give_context() of this thread looks again.
void forget_context();

/// Makes a context current while it lives.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, void* context) : result(driver.cuCtxPushCurrent(context)), driver_(driver) {}
  ~CurrentContext() {
    void* popped = nullptr;
    if (result == kCuSuccess) driver_.cuCtxPopCurrent(&popped);
  }
  const CuResult result;

 private:
  const Driver& driver_;
};

/// "<what> on device <index> (<its name and architecture>) failed: <why>"
std::string failed_on(int device, const std::string& what, const std::string& why);

/// Number of multiprocessors; 0 if the device or the driver is unusable, which launch() will then explain.
LIGER_RUNTIME_API int multiprocessors(int device);

LIGER_RUNTIME_API int device_count();
/// Null and `error` set if there is no such device.
LIGER_RUNTIME_API const DeviceInfo* device_info(int device, std::string& error);

}  // namespace liger::runtime
