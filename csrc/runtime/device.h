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

/// The result has `error` set if there is no such device or the driver cannot use it.
const Device& device_at(int index);

/// For an interpreter: what device_at() returns for indices out of range, like that of the CPU.
void make_up_device(const DeviceInfo& info);

/// Retains the primary context, which torch uses too. Called at the first load and not earlier: a process that only
/// lists devices must not create a context on each of them. False with `error` set if the driver refuses.
bool retain_context(const Driver& driver, const Device& device, std::string& error);

/// Makes the device's primary context current in a thread that has none. Autograd's threads have none before their
/// first CUDA call. A context that is already current stays, because the caller holds the device guard. Empty on
/// success.
std::string ensure_context(int device);
/// Makes the next ensure_context() of this thread check again.
void forget_context();

/// Makes a context current for its lifetime.
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

/// "<what> on device <index> (<name and architecture>) failed: <why>"
std::string failed_on(int device, const std::string& what, const std::string& why);

/// Number of multiprocessors; 0 if the device or the driver is unusable. launch() then reports the reason.
LIGER_RUNTIME_API int multiprocessors(int device);

LIGER_RUNTIME_API int device_count();
/// Null and `error` set if there is no such device.
LIGER_RUNTIME_API const DeviceInfo* device_info(int device, std::string& error);

}  // namespace liger::runtime
