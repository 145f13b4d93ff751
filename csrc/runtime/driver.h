#pragma once

// The CUDA driver API, loaded by dlopen. So the build needs no CUDA toolkit, and the library loads without a GPU.

#include <cstddef>
#include <cstdint>
#include <string>

namespace liger::runtime {

using CuResult = int;
constexpr CuResult kCuSuccess = 0;
constexpr CuResult kCuInvalidContext = 201;
constexpr int kCuAttributeMultiprocessors = 16;
constexpr int kCuAttributeMajor = 75;
constexpr int kCuAttributeMinor = 76;
constexpr int kCuCaptureModeRelaxed = 2;
constexpr int kCuFunctionDynamicShared = 8;
constexpr unsigned kCuDefaultShared = 47 << 10;  // dynamic shared memory that needs no opt-in anywhere
// Keys of cuLaunchKernel's `extra` list, which pass the arguments as one packed buffer.
inline void* const kCuLaunchBuffer = reinterpret_cast<void*>(1);
inline void* const kCuLaunchBufferSize = reinterpret_cast<void*>(2);

struct Driver {
  CuResult (*cuInit)(unsigned);
  CuResult (*cuDeviceGet)(int*, int);
  CuResult (*cuDeviceGetCount)(int*);
  CuResult (*cuDeviceGetName)(char*, int, int);
  CuResult (*cuDeviceGetAttribute)(int*, int, int);
  CuResult (*cuDevicePrimaryCtxRetain)(void**, int);
  CuResult (*cuCtxPushCurrent)(void*);
  CuResult (*cuCtxPopCurrent)(void**);
  CuResult (*cuCtxSetCurrent)(void*);
  CuResult (*cuCtxGetCurrent)(void**);
  CuResult (*cuModuleLoadData)(void**, const void*);
  CuResult (*cuModuleUnload)(void*);
  CuResult (*cuModuleGetFunction)(void**, void*, const char*);
  CuResult (*cuFuncSetAttribute)(void*, int, int);
  CuResult (*cuThreadExchangeStreamCaptureMode)(int*);
  CuResult (*cuLaunchKernel)(
      void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  /// Null before CUDA 12.
  CuResult (*cuTensorMapEncodeTiled)(
      void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int, int, int,
      int);
  CuResult (*cuMemGetInfo)(size_t*, size_t*);
  CuResult (*cuGetErrorName)(CuResult, const char**);
  CuResult (*cuGetErrorString)(CuResult, const char**);

  /// Loads and initialises the driver at the first call. Null if there is no usable driver; `reason` says why.
  static const Driver* get(std::string* reason = nullptr);

  /// "<call> returned <the driver's name and text of the error>". Adds a hint if an earlier operation caused the error.
  /// blocking: the call waits for the device, so it may have caused the error itself.
  std::string failure(const char* call, CuResult result, bool blocking = false) const;
};

/// True if the driver could not use this binary, so that another one may work. All other errors come from the device,
/// its context or the process, and every binary would meet them.
bool refuses_binary(CuResult result);

/// True if the device failed while it ran a kernel. Every later call of the process then returns this error.
bool is_sticky(CuResult result);

/// Puts the thread in relaxed capture mode, and back at the end: only that mode allows loading during CUDA graph
/// capture.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) : driver_(driver) {
    relaxed_ = driver_.cuThreadExchangeStreamCaptureMode(&mode_) == kCuSuccess;
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  ~RelaxedCapture() {
    if (relaxed_) driver_.cuThreadExchangeStreamCaptureMode(&mode_);
  }

 private:
  const Driver& driver_;
  int mode_ = kCuCaptureModeRelaxed;
  bool relaxed_;
};

}  // namespace liger::runtime
