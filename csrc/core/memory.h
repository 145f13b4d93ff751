#pragma once

// Whether tensors have the memory that their sizes need. FSDP and others free the storage of parameters whose tensors
// keep their sizes, and reading such a tensor would crash.

#include <string>

#include "core/aten.h"
#include "core/checks.h"

namespace liger::core {
namespace detail {

/// Bytes from the start of the storage to the end of t's last element. t must have elements.
inline int64_t required_bytes(const at::Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  int64_t last = t.storage_offset();
  for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
  return (last + 1) * int64_t(t.dtype().itemsize());
}

}  // namespace detail

/// Raises the error for a tensor without has_memory().
C10_NOINLINE inline void refuse_memory(const std::string& op, const std::string& argument, const at::Tensor& t) {
  const auto& storage = t.unsafeGetTensorImpl()->unsafe_storage();
  const int64_t bytes = storage.data() ? int64_t(storage.nbytes()) : 0;
  const std::string why = bytes == 0 ? std::string("; FSDP or another owner freed it before this call")
                                     : c10::str(", ", detail::required_bytes(t), " are needed");
  const std::string rule = c10::str("have memory for its ", t.numel(), " elements");
  LIGER_CHECK(false, op, argument, rule, "a storage of ", bytes, " bytes", why);
}

/// True if t's storage holds all of its elements. Also true for tensors without memory of their own: wrappers, fake
/// tensors.
inline bool has_memory(const at::Tensor& t) {
  if (!t.defined() || !t.has_storage() || t.key_set().has_any(kWrappers) || t.is_meta()) return true;
  const auto* impl = t.unsafeGetTensorImpl();
  if (impl->has_symbolic_sizes_strides() || impl->numel() == 0) return true;
  const auto& storage = impl->unsafe_storage();
  return storage.data() && int64_t(storage.nbytes()) >= detail::required_bytes(t);
}

}  // namespace liger::core
