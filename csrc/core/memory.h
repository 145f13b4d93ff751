#pragma once

// implement() registers operators with checks of all arguments that need no knowledge of the operator:
//
// Tensors must have memory. FSDP and others free the storage of parameters whose tensors keep their sizes, and reading
// such a tensor would crash.
// Numbers must be finite, unless they may be None: those are bounds, which may be infinite, and operators check them.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cmath>
#include <string>
#include <type_traits>
#include <utility>

#include "core/aten.h"
#include "core/checks.h"
#include "core/namespace.h"

namespace liger::core {
namespace detail {

/// Bytes from the start of the storage to the end of t's last element. t must have elements.
inline int64_t required_bytes(const at::Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  int64_t last = t.storage_offset();
  for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
  return (last + 1) * int64_t(t.dtype().itemsize());
}

C10_NOINLINE inline void refuse_memory(const std::string& op, const std::string& argument, const at::Tensor& t) {
  const auto& storage = t.unsafeGetTensorImpl()->unsafe_storage();
  const int64_t bytes = storage.data() ? int64_t(storage.nbytes()) : 0;
  const std::string why = bytes == 0 ? std::string("; FSDP or another owner freed it before this call")
                                     : c10::str(", ", required_bytes(t), " are needed");
  const std::string rule = c10::str("have memory for its ", t.numel(), " elements");
  LIGER_CHECK(false, op, argument, rule, "a storage of ", bytes, " bytes", why);
}

}  // namespace detail

/// True if t's storage holds all of its elements. Also true for tensors without memory of their own: wrappers, fake
/// tensors.
inline bool has_memory(const at::Tensor& t) {
  if (!t.defined() || !t.has_storage() || t.key_set().has_any(kWrappers) || t.is_meta()) return true;
  const auto* impl = t.unsafeGetTensorImpl();
  if (impl->has_symbolic_sizes_strides() || impl->numel() == 0) return true;
  const auto& storage = impl->unsafe_storage();
  return storage.data() && int64_t(storage.nbytes()) >= detail::required_bytes(t);
}

namespace detail {

/// The operator's name in messages, e.g. rms_norm for _rms_norm_fwd.
inline std::string public_name(std::string op) {
  const size_t end = op.find_last_not_of('_') + 1;
  if (op[0] != '_' || end < 5) return op;
  const std::string half = op.substr(end - 4, 4), of = op.substr(1, end - 5);
  return half == "_fwd" ? of : half == "_bwd" ? of + " backward" : op;
}

inline std::string name_of(const std::string& op, size_t argument, const std::string& index) {
  const auto schema = c10::Dispatcher::singleton().findSchemaOrThrow(qualified(op).c_str(), "").schema();
  return schema.arguments().at(argument).name() + index;
}

C10_NOINLINE inline void refuse_argument(
    const std::string& op, size_t argument, const std::string& index, const at::Tensor& t) {
  refuse_memory(public_name(op), name_of(op, argument, index), t);
}

C10_NOINLINE inline void refuse_argument(
    const std::string& op, size_t argument, const std::string& index, double number) {
  LIGER_CHECK(false, public_name(op), name_of(op, argument, index), "be finite", number);
}

template <class Op, class A>
void check_argument(const Op& op, size_t argument, const A& value) {
  if constexpr (std::is_same_v<A, at::Tensor>) {
    if (C10_UNLIKELY(!has_memory(value))) refuse_argument(op(), argument, "", value);
  } else if constexpr (std::is_same_v<A, std::optional<at::Tensor>>) {
    if (value && C10_UNLIKELY(!has_memory(*value))) refuse_argument(op(), argument, "", *value);
  } else if constexpr (std::is_same_v<A, at::TensorList>) {
    for (size_t i = 0; i < value.size(); ++i) {
      if (C10_UNLIKELY(!has_memory(value[i]))) refuse_argument(op(), argument, c10::str("[", i, "]"), value[i]);
    }
  } else if constexpr (std::is_same_v<A, c10::List<std::optional<at::Tensor>>>) {
    for (size_t i = 0; i < value.size(); ++i) {
      const std::optional<at::Tensor> t = value.get(i);
      if (t && C10_UNLIKELY(!has_memory(*t))) refuse_argument(op(), argument, c10::str("[", i, "]"), *t);
    }
  } else if constexpr (std::is_same_v<A, double>) {
    if (C10_UNLIKELY(!std::isfinite(value))) refuse_argument(op(), argument, "", value);
  } else if constexpr (std::is_same_v<A, at::ArrayRef<double>>) {
    for (size_t i = 0; i < value.size(); ++i) {
      if (C10_UNLIKELY(!std::isfinite(value[i]))) refuse_argument(op(), argument, c10::str("[", i, "]"), value[i]);
    }
  }
}

template <auto function, class F = decltype(function)>
struct Checked;

template <auto function, class R, class... A>
struct Checked<function, R (*)(A...)> {
  /// The operator's name. A function-local static, because registration may run before static members are initialised.
  static std::string& op() {
    static std::string name;
    return name;
  }

  static R run(A... arguments) {
    size_t i = 0;
    (check_argument(op, i++, arguments), ...);
    return function(std::forward<A>(arguments)...);
  }
};

}  // namespace detail

/// m.impl(op, function), with the checks above first. Each function implements one operator only.
template <auto function>
void implement(torch::Library& m, const std::string& op) {
  using Checked = detail::Checked<function>;
  std::string& name = Checked::op();
  TORCH_INTERNAL_ASSERT(name.empty() || name == op, op, " and ", name, " share a function");
  name = op;
  m.impl(op.c_str(), Checked::run);
}

}  // namespace liger::core
