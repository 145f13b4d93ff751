#pragma once

// What operators need of torch.autocast.

#include <optional>
#include <string_view>

#include "core/aten.h"

namespace liger::core {

/// t as autocast of this device casts an argument to `dtype`. Casts of parameters are cached.
at::Tensor autocast_to(at::ScalarType dtype, const at::Tensor& t, c10::DeviceType device);

/// The same in the dtype that the user chose.
at::Tensor autocast_to_lower(const at::Tensor& t, c10::DeviceType device);

/// The dispatch key of autocast on this device.
c10::DispatchKey autocast_key(c10::DeviceType device);

/// True if autocast of this torch version runs its own rms_norm in float32. torch added norms to that list release by
/// release; our norms do the same.
bool autocasts_rms_norm_to_float();

/// The cast that CUDA autocast applies to the arguments of float32 ops.
inline at::Tensor autocast_float(const at::Tensor& t) { return autocast_to(at::kFloat, t, c10::DeviceType::CUDA); }
inline std::optional<at::Tensor> autocast_float(const std::optional<at::Tensor>& t) {
  return t && t->defined() ? std::optional(autocast_float(*t)) : t;
}

}  // namespace liger::core
