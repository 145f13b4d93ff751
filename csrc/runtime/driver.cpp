#include "runtime/driver.h"

#include <dlfcn.h>

#include "runtime/immortal.h"

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
    resolve(driver.cuCtxGetCurrent, "cuCtxGetCurrent");
    resolve(driver.cuModuleLoadData, "cuModuleLoadData");
    resolve(driver.cuModuleUnload, "cuModuleUnload");
    resolve(driver.cuModuleGetFunction, "cuModuleGetFunction");
    resolve(driver.cuFuncSetAttribute, "cuFuncSetAttribute");
    resolve(driver.cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
    resolve(driver.cuLaunchKernel, "cuLaunchKernel");
    find(driver.cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled");
    resolve(driver.cuMemGetInfo, "cuMemGetInfo_v2");
    resolve(driver.cuGetErrorName, "cuGetErrorName");
    resolve(driver.cuGetErrorString, "cuGetErrorString");
    if (!complete) return;
    if (CuResult result = driver.cuInit(0); result != kCuSuccess) {
      reason = driver.failure("cuInit", result);
    }
  }
};

}  // namespace

const Driver* Driver::get(std::string* reason) {
  static const auto& loaded = immortal<Loaded>();
  if (loaded.reason.empty()) return &loaded.driver;
  if (reason) *reason = loaded.reason;
  return nullptr;
}

std::string Driver::failure(const char* call, CuResult result, bool blocking) const {
  const char* name = nullptr;
  const char* text = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &text);
  std::string out = std::string(call) + " returned " + (name ? name : "unknown CUDA error") + " (" +
      std::to_string(result) + "): " + (text ? text : "no text");
  if (is_sticky(result) && !blocking) {
    out +=
        "; an earlier operation in this process caused it (run with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer to "
        "find it)";
  }
  return out;
}

bool refuses_binary(CuResult result) {
  switch (result) {
    case 1:  // INVALID_VALUE: cuFuncSetAttribute asked for more shared memory than the device has
    case 200:  // INVALID_IMAGE
    case 209:  // NO_BINARY_FOR_GPU
    case 218:  // INVALID_PTX
    case 221:  // JIT_COMPILER_NOT_FOUND
    case 222:  // UNSUPPORTED_PTX_VERSION
    case 223:  // JIT_COMPILATION_DISABLED
    case 225:  // UNSUPPORTED_DEVSIDE_SYNC
    case 300:  // INVALID_SOURCE
    case 301:  // FILE_NOT_FOUND
    case 302:  // SHARED_OBJECT_SYMBOL_NOT_FOUND
    case 303:  // SHARED_OBJECT_INIT_FAILED
    case 500:  // NOT_FOUND
    case 801:  // NOT_SUPPORTED
      return true;
    default: return false;
  }
}

bool is_sticky(CuResult result) {
  switch (result) {
    case 700:  // ILLEGAL_ADDRESS
    case 702:  // LAUNCH_TIMEOUT
    case 710:  // ASSERT
    case 714:  // HARDWARE_STACK_ERROR
    case 715:  // ILLEGAL_INSTRUCTION
    case 716:  // MISALIGNED_ADDRESS
    case 717:  // INVALID_ADDRESS_SPACE
    case 718:  // INVALID_PC
    case 719:  // LAUNCH_FAILED
    case 721:  // TENSOR_MEMORY_LEAK
      return true;
    default: return false;
  }
}

}  // namespace liger::runtime
