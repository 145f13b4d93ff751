#pragma once

// The CUDA driver API, reached by dlopen: nothing here needs a toolkit to build or a GPU to load.

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
constexpr unsigned kCuPlainShared = 48 << 10;  // what a launch may give a program that did not ask for more
// Keys of cuLaunchKernel's `extra` list: the arguments come as one packed buffer.
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

  /// Loaded and initialised at the first call; null where there is no usable driver (reason says why).
  static const Driver* get(std::string* reason = nullptr);

  /// "<call> returned <the driver's own name and text of the error>", and where the cause lies if not in this call.
  /// blocking: the call waits for the device, so that the error may be its own.
  std::string failure(const char* call, CuResult result, bool blocking = false) const;
};

/// Whether the driver could not use a binary, so that another one may serve. Any other error is one of the device, its
/// context or the process, and every binary would meet it.
bool refuses_binary(CuResult result);

/// Whether the device failed while it ran a kernel. From then on every call of the process returns this error.
bool is_sticky(CuResult result);

/// Loading inside a CUDA graph capture is legal only in relaxed mode; the thread's mode is put back afterwards.
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
