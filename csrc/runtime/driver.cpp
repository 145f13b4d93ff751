#include "runtime/driver.h"

#include <dlfcn.h>

namespace liger::runtime {
namespace {

struct Loaded {
  Driver driver{};
  std::string reason;

  Loaded() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
      reason = "the CUDA driver library libcuda.so.1 could not be loaded";
      return;
    }
    bool complete = true;
    auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    };
    auto resolve = [&](auto& function, const char* name) {
      find(function, name);
      if (!function && complete) {
        complete = false;
        reason = std::string("the CUDA driver lacks ") + name;
      }
    };
    resolve(driver.cuInit, "cuInit");
    resolve(driver.cuDeviceGet, "cuDeviceGet");
    resolve(driver.cuDeviceGetCount, "cuDeviceGetCount");
    resolve(driver.cuDeviceGetName, "cuDeviceGetName");
    resolve(driver.cuDeviceGetAttribute, "cuDeviceGetAttribute");
    resolve(driver.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    resolve(driver.cuCtxPushCurrent, "cuCtxPushCurrent_v2");
    resolve(driver.cuCtxPopCurrent, "cuCtxPopCurrent_v2");
    resolve(driver.cuCtxSetCurrent, "cuCtxSetCurrent");
    resolve(driver.cuModuleLoadData, "cuModuleLoadData");
    resolve(driver.cuModuleUnload, "cuModuleUnload");
    resolve(driver.cuModuleGetFunction, "cuModuleGetFunction");
    resolve(driver.cuFuncSetAttribute, "cuFuncSetAttribute");
    resolve(driver.cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
    resolve(driver.cuLaunchKernel, "cuLaunchKernel");
    find(driver.cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled");
    resolve(driver.cuGetErrorName, "cuGetErrorName");
    resolve(driver.cuGetErrorString, "cuGetErrorString");
    if (!complete) return;
    if (CuResult result = driver.cuInit(0); result != kCuSuccess) {
      reason = "cuInit failed: " + driver.describe(result);
    }
  }
};

}  // namespace

const Driver* Driver::get(std::string* reason) {
  static const Loaded loaded;
  if (loaded.reason.empty()) return &loaded.driver;
  if (reason) *reason = loaded.reason;
  return nullptr;
}

std::string Driver::describe(CuResult result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &text);
  return std::string(name ? name : "unknown CUDA error") + " (" + std::to_string(result) + "): " + (text ? text : "no text");
}

}  // namespace liger::runtime
