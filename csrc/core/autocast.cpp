// In a source of its own, because torch's header of autocast declares all of torch.

#include "core/autocast.h"

#include <ATen/autocast_mode.h>

namespace liger::core {
namespace {

constexpr bool in_list_of_float(std::string_view op) {
#define LIGER_OP_NAME(name, ...) " " #name " "
  constexpr std::string_view names = AT_FORALL_FP32(LIGER_OP_NAME);
#undef LIGER_OP_NAME
  for (size_t at = names.find(op); at != names.npos; at = names.find(op, at + 1)) {
    if (names[at - 1] == ' ' && names[at + op.size()] == ' ') return true;
  }
  return false;
}

}  // namespace

at::Tensor autocast_to(at::ScalarType dtype, const at::Tensor& t, c10::DeviceType device) {
  return at::autocast::cached_cast(dtype, t, device);
}

at::Tensor autocast_to_lower(const at::Tensor& t, c10::DeviceType device) {
  return autocast_to(at::autocast::get_autocast_dtype(device), t, device);
}

c10::DispatchKey autocast_key(c10::DeviceType device) {
  return at::autocast::get_autocast_dispatch_key_from_device_type(device);
}

bool autocasts_rms_norm_to_float() {
  constexpr bool in_list = in_list_of_float("rms_norm");
  return in_list;
}

}  // namespace liger::core
