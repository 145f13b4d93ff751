#pragma once

// Base class of the backward nodes: saved tensors, the error for double backward, buffer reuse and compiled autograd.
// Also what autograd implementations need: handles to operators, and the bits of `wanted`.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <array>

#include "core/aten.h"
#include "core/namespace.h"
#include "core/rows/rows.h"

namespace liger::core {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// Typed handle to one of our operators. Keep it in a function-local static: the lookup by name takes microseconds.
template <class Function>
auto find_op(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(qualified(name).c_str(), "").typed<Function>();
}

// torch holds nodes by std::shared_ptr before 2.13 and by c10::intrusive_ptr since then.
using NodePointer = decltype(torch::autograd::Edge::function);

template <class T, class... A>
auto make_node(A&&... arguments) {
  if constexpr (std::is_same_v<NodePointer, std::shared_ptr<torch::autograd::Node>>) {
    // Argument-dependent lookup finds deleteNode in old releases. New releases do not have it.
    return std::shared_ptr<T>(new T(std::forward<A>(arguments)...), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>(std::forward<A>(arguments)...);
  }
}

/// Bit i of a private operator's argument `wanted` asks for the i-th gradient. An int that follows the tensors, because
/// DTensor's cache of sharding decisions ignores arguments up to the first int.
constexpr bool wants(int64_t wanted, int gradient) { return wanted >> gradient & 1; }

/// Of booleans, one for each gradient.
template <class... Bool>
constexpr int64_t wanted_bits(Bool... gradients) {
  int64_t out = 0, bit = 1;
  ((out |= gradients ? bit : 0, bit <<= 1), ...);
  return out;
}

inline bool has_forward_gradient(const std::optional<at::Tensor>& t) { return torch::autograd::isFwGradDefined(t); }
inline bool has_forward_gradient(const at::Tensor& t) { return torch::autograd::isFwGradDefined(t); }
inline bool has_forward_gradient(const at::TensorList& list) {
  return std::any_of(list.begin(), list.end(), [](const at::Tensor& t) { return has_forward_gradient(t); });
}

inline bool has_forward_gradient(const c10::List<std::optional<at::Tensor>>& list) {
  return std::any_of(
      list.begin(), list.end(), [](const std::optional<at::Tensor>& t) { return has_forward_gradient(t); });
}

/// Forward-mode differentiation is not implemented. Without this check it would silently return zeros.
template <class... Tensors>
void check_no_forward_ad(const char* op, const Tensors&... tensors) {
  TORCH_CHECK(
      !(has_forward_gradient(tensors) || ...), op,
      ": forward-mode automatic differentiation is not supported; use reverse mode (backward)");
}

/// True if `t` is an ordinary strided tensor: no tracing, no wrapper, no active dispatch mode.
inline bool is_plain(const at::Tensor& t) {
  constexpr c10::DispatchKeySet watchers =
      kWrappers | c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  return t.layout() == at::kStrided && (t.is_cpu() || t.is_cuda()) && !t.key_set().has_any(watchers) &&
      !c10::impl::dispatch_mode_enabled() && !t.is_inference() &&
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) &&
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::VmapMode);
}

/// True if nothing else can see `t`'s memory, so that overwriting it is safe. This requires one reference to the tensor
/// besides its own Python object, one reference to that object, one reference to the storage, and a tensor that covers
/// the storage. torch must also own the storage: one that it borrows from NumPy, DLPack, a file or another process is
/// not resizable.
/// These are facts about torch's internals; tests/ops/test_reuse.py checks them.
inline bool is_sole_owner(const at::Tensor& t) {
  if (!t.defined() || !is_plain(t) || t.is_view() || !t.is_non_overlapping_and_dense()) return false;
  auto* slot = t.unsafeGetTensorImpl()->pyobj_slot();
  bool has_object = slot->load_pyobj() != nullptr;
  if (has_object && !slot->has_unique_reference()) return false;
  // The Python object, if there is one, holds a second reference.
  return t.use_count() == (has_object ? 2 : 1) && t.storage().use_count() == 1 && t.storage().resizable();
}

// State that enters compiled autograd's cache key.

using torch::dynamo::autograd::CompiledNodeArgs;

inline void add_to_cache_key(CompiledNodeArgs& args, std::string_view value) { args.collect(std::string(value)); }
inline void add_to_cache_key(CompiledNodeArgs& args, const char* value) {
  add_to_cache_key(args, std::string_view(value));
}
inline void add_to_cache_key(CompiledNodeArgs& args, const std::string& value) { args.collect(value); }
inline void add_to_cache_key(CompiledNodeArgs& args, const c10::SymInt& value) {
  args.collect(value.guard_int(__FILE__, __LINE__));
}
template <class... T>
void add_to_cache_key(CompiledNodeArgs& args, const std::tuple<T...>& values);
template <class T>
auto add_to_cache_key(CompiledNodeArgs& args, const T& value) -> decltype(args.collect(value)) {
  args.collect(value);
}
template <class T>
auto add_to_cache_key(CompiledNodeArgs& args, const T& value) -> decltype(add_to_cache_key(args, value.options())) {
  add_to_cache_key(args, value.options());
}
template <class T, class = std::enable_if_t<std::is_enum_v<T> && !std::is_same_v<T, at::ScalarType>>>
void add_to_cache_key(CompiledNodeArgs& args, T value) {
  args.collect(static_cast<int64_t>(value));
}
template <class T>
void add_to_cache_key(CompiledNodeArgs& args, const std::vector<T>& values) {
  args.collect_size(values.size());
  for (const auto& value : values) add_to_cache_key(args, value);
}
template <class... T>
void add_to_cache_key(CompiledNodeArgs& args, const std::tuple<T...>& values) {
  std::apply([&](const auto&... each) { (add_to_cache_key(args, each), ...); }, values);
}

/// The number of saved tensors of a node that depends on the call.
constexpr size_t kAnyNumber = SIZE_MAX;

/// Base class of all backward nodes: N saved tensors, and a `backward` that runs below autograd.
///
/// Self::state() returns a std::tie of the other members that `backward` reads. Compiled autograd copies them into a
/// new node, which runs `backward`.
template <class Self, size_t N>
class BackwardNode : public torch::autograd::Node {
  template <class T>
  using Saved = std::conditional_t<N == kAnyNumber, std::vector<T>, std::array<T, N == kAnyNumber ? 0 : N>>;

 public:
  Saved<SavedVariable> saved;

  std::tuple<> state() { return {}; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved) variable.reset_data();
  }

  variable_list apply(variable_list&& grads) final {
    std::lock_guard<std::mutex> lock(mutex_);
    bool create_graph = at::GradMode::is_enabled();
    torch::autograd::edge_list edges;
    if (create_graph) {
      edges = next_edges();
      for (const auto& grad : grads) {
        if (grad.defined()) edges.push_back(torch::autograd::impl::gradient_edge(grad));
      }
    }
    // Saved tensors may be freed, and gradients overwritten, only if the graph is not used again.
    keep_ = create_graph || torch::autograd::get_current_graph_task_keep_graph();
    // Unpack before `run` disables autograd: a hook may run forward code, as checkpointing does.
    if constexpr (N == kAnyNumber) unpacked_.resize(saved.size());
    for (size_t i = 0; i < saved.size(); ++i) unpacked_[i] = saved[i].unpack(getptr());
    const variable_list given = create_graph ? grads : variable_list();
    variable_list out = run(std::move(grads));
    unpacked_ = {};
    if (create_graph) {
      auto error = make_node<torch::autograd::Error>(
          name() + ": double backward is not supported", torch::autograd::edge_list(edges));
      for (auto& grad : out) {
        // A gradient that `backward` returned unchanged keeps the caller's history.
        const bool is_given = std::any_of(given.begin(), given.end(), [&](const auto& g) { return g.is_same(grad); });
        if (grad.defined() && !is_given) torch::autograd::set_history(grad, error);
      }
    }
    return out;
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(c10::ArrayRef<SavedVariable>(saved), true);
    add_to_cache_key(args, const_cast<BackwardNode*>(this)->self().state());
    for (size_t i = 0; i < next_edges().size(); ++i) args.collect(needs(i));
  }

  variable_list apply_with_saved(
      const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& swap) override {
    namespace compiled = torch::dynamo::autograd;
    std::vector<at::IValue> tensors;
    for (auto& variable : saved) {
      swap.before(variable);
      tensors.emplace_back(variable.unpack(getptr()));
    }
    std::vector<bool> needs_input(next_edges().size());
    for (size_t i = 0; i < needs_input.size(); ++i) needs_input[i] = needs(i);
    auto copied = [](const auto&... values) { return std::make_tuple(values...); };
    auto replay = [state = std::apply(copied, self().state()), needs_input](
                      const variable_list& grads, const std::vector<at::IValue>& tensors) {
      auto node = make_node<Self>();
      node->state() = state;
      if constexpr (N == kAnyNumber) node->unpacked_.resize(tensors.size());
      for (size_t i = 0; i < tensors.size(); ++i) node->unpacked_[i] = tensors[i].toTensor();
      node->needs_ = &needs_input;
      return node->run(variable_list(grads));
    };
    const auto& python = compiled::getPyCompilerInterface();
    const std::string bound = python->bind_function(
        swap.get_py_compiler(), name(), std::move(replay),
        std::vector<at::TypePtr>(saved.size(), at::TensorType::get()),
        /*is_custom_function=*/true, /*is_traceable=*/true);
    using Outputs = compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>;
    auto out = python->call_function(
        swap.get_py_compiler(), "apply_functional", bound, grads, tensors,
        Outputs::pack(compiled::get_input_metadata(next_edges())));
    for (auto& variable : saved) swap.after(variable);
    return out;
  }

  /// True if the result, with the layout of empty_rows_like(x), may overwrite this gradient's buffer.
  bool may_overwrite(const at::Tensor& grad, const at::Tensor& x) const {
    return !keep_ && is_sole_owner(grad) && grad.scalar_type() == x.scalar_type() && has_strides_of_rows_like(grad, x);
  }

  bool needs(size_t output) const { return needs_ ? (*needs_)[output] : task_should_compute_output(output); }
  /// The argument `wanted` of a private operator whose gradients are those of this node.
  int64_t wanted() const {
    int64_t out = 0;
    for (size_t i = 0; i < (needs_ ? needs_->size() : num_outputs()); ++i) out |= int64_t(needs(i)) << i;
    return out;
  }
  bool keeps_graph() const { return keep_; }

  template <class... Tensors>
  void save(const Tensors&... tensors) {
    static_assert(sizeof...(tensors) == N);
    saved = {SavedVariable(tensors, false)...};
  }
  void save_all(at::TensorList tensors) {
    for (const auto& t : tensors) saved.emplace_back(t, false);
  }

  /// Makes these results of forward differentiable by this node.
  template <class... Tensors>
  void connect(const Tensors&... results) {
    (torch::autograd::set_history(results, getptr()), ...);
  }

  /// The saved tensor. If the graph is not used again, the node drops its own reference.
  at::Tensor take(size_t i) {
    if (!keep_) saved[i].reset_data();
    return std::move(unpacked_[i]);
  }

 protected:
  virtual variable_list backward(variable_list&& grads) = 0;

 private:
  Self& self() { return static_cast<Self&>(*this); }

  variable_list run(variable_list&& grads) {
    at::AutoDispatchBelowADInplaceOrView below;
    // Backward may run inside autocast although forward ran outside. Autocast must not change its dtypes.
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return backward(std::move(grads));
  }

  bool keep_ = true;
  const std::vector<bool>* needs_ = nullptr;  // set by compiled autograd, which has no graph task
  Saved<at::Tensor> unpacked_;
};

}  // namespace liger::core
