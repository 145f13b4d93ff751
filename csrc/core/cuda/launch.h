#pragma once

// Launches kernels on tensors. Needs no CUDA header: the stream comes from torch's C shim, the device guard from c10.

#include <c10/core/DeviceGuard.h>

#include "core/aten.h"
#include "core/checks.h"
#include "runtime/device.h"
#include "runtime/interpreter.h"
#include "runtime/launch.h"

// Weak, because a torch built without CUDA does not define it.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace liger::core {

inline runtime::DType dtype_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return runtime::DType::F32;
    case at::kHalf: return runtime::DType::F16;
    case at::kBFloat16: return runtime::DType::BF16;
    default: return runtime::DType::Other;
  }
}
inline runtime::DType dtype_of(const at::Tensor& t) { return dtype_of(t.scalar_type()); }

inline const void* address(const at::Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }
inline const void* address(const std::optional<at::Tensor>& t) { return t ? address(*t) : nullptr; }

/// Passes a parameter in the dtype of the rows x, or else in fp32, to `load_parameter` of a kernel. An undefined one
/// leaves both null.
inline void pass_parameter(const void*& narrow, const void*& wide, const at::Tensor& t, const at::Tensor& x) {
  if (t.defined()) (t.scalar_type() == x.scalar_type() ? narrow : wide) = address(t);
}

/// Whether kernels of the CUDA code are for this tensor.
inline bool runs_kernels(const at::Tensor& t) { return t.is_cuda() || runtime::interprets(); }

/// Programs for `count` things, `size` in each.
inline uint32_t programs_for(int64_t count, int64_t size) { return uint32_t((count + size - 1) / size); }

/// Whether kernel K is for the device's architecture.
template <class K>
bool is_for(const at::Device& device) {
  std::string error;
  const auto* info = runtime::device_info(device.index(), error);
  return info && K::kernel.spec().supports(info->capability);
}

/// What kernel K's table chooses for a call.
template <class K>
struct Choice {
  const typename K::Config& config;
  uint32_t variant;
};

/// Chooses for rows of n elements. Whether they are aligned follows from the arguments. Set before what the table calls
/// aligned, except what is aligned anyway: fresh memory, and numbers that are multiples of 8. facts:
/// the call's Point and its number of rows, as in first_fit.
template <class K, class... Facts>
Choice<K> choose(int64_t n, const typename K::Args& args, const Facts&... facts) {
  const auto& config = runtime::first_fit<K>(n, K::is_aligned(args), facts...);
  return {config, runtime::variant_index<K>(config, runtime::point_in<K>(facts...))};
}

/// Launches the choice on the device's current stream. The caller holds the device guard.
template <class K>
void launch(
    const char* op, const at::Device& device, const Choice<K>& choice, runtime::Grid grid,
    const typename K::Args& args) {
  void* stream = nullptr;
  auto finds_stream = [&] {
    return aoti_torch_get_current_cuda_stream && aoti_torch_get_current_cuda_stream(device.index(), &stream) == 0;
  };
  TORCH_CHECK(
      !device.is_cuda() || finds_stream(), op, ": no current CUDA stream on ", device,
      "; this torch was built without CUDA");
  std::string error = runtime::launch(K::kernel, choice.variant, device.index(), stream, grid, &args);
  TORCH_CHECK(error.empty(), op, ": ", error);
}

/// Number of programs of a persistent kernel: enough to fill the GPU, at most one per block of work.
inline int64_t persistent_programs(const at::Device& device, int64_t blocks, int per_multiprocessor) {
  int64_t full = int64_t(std::max(runtime::multiprocessors(device.index()), 1)) * per_multiprocessor;
  return std::max<int64_t>(1, std::min(blocks, full));
}

}  // namespace liger::core
