// moe_experts(x, gate_up, down, index, weight, ...) = the sum over a token's choices of weight * expert(x), with
//     expert(x) = down @ ((up + up_offset) * f(gate)),  gate and up = gate_up @ x
//
// Letters: T tokens, K choices, E experts, H hidden, I inner.
// x: (T, H), index: (T, K) int64 or int32, weight: (T, K) in x's dtype or fp32. gate_up: (E, 2 I, H) and down:
// (E, H, I), or (E, H, 2 I) and (E, I, H) if transposed. Biases: (E, 2 I) and (E, H). Gate and up are the halves of 2 I, or
// alternate if interleaved. f: silu with sigmoid(alpha * gate), gelu or gelu_tanh. limit: gate is at most limit, and up
// is clamped to [-limit, limit]. weight_before: expert(weight * x) instead of weight * expert(x).
// An index outside of [0, E) contributes nothing: with expert parallelism that expert is elsewhere.
//
// moe_experts_sorted takes rows that are sorted by expert, and their numbers; rows beyond those are 0.
//
// Products round to x's dtype; the sum over choices is fp32 and rounded once. Forward saves x, the first product (pre)
// and the routing data. Backward recomputes the activation and writes the gradient of pre over it, because nothing
// else can see it.

#include "ops/moe/moe_experts.h"

#include <torch/library.h>

#include "core/autograd.h"
#include "core/memory.h"
#include "core/registration.h"

namespace liger::ops::moe_experts {
namespace {

using OptionalTensor = std::optional<Tensor>;
using core::value_or_undefined;

struct Meta {
  static Tensor forward(const Call& call, const Tensor&, Tensor* pre) {
    if (pre) *pre = empty_pre(call);
    return at::empty_symint(call.x.sym_sizes(), call.x.options());
  }
  static Gradients backward(
      const Call& call, const Tensor&, const Tensor&, const Tensor& pre, const Tensor&, int64_t wanted) {
    auto like = [&](int64_t bit, const Tensor& t) { return wanted & bit ? gradient_like(t) : Tensor(); };
    auto bias = [&](int64_t bit, const c10::SymInt& n) {
      return wanted & bit ? at::empty_symint({call.gate_up.sym_size(0), n}, call.x.options()) : Tensor();
    };
    return {like(kX, call.x),           like(kGateUp, call.gate_up),        like(kDown, call.down),
            like(kWeight, call.weight), bias(kGateUpBias, pre.sym_size(1)), bias(kDownBias, call.x.sym_size(1))};
  }
};

// ---- Checks

void check_shape(const char* op, const char* name, const Tensor& t, const char* letters, c10::SymIntArrayRef sizes) {
  core::check_dense(op, name, t);
  LIGER_CHECK(t.sym_sizes().equals(sizes), op, name, c10::str("have shape ", letters, ", ", sizes), t.sym_sizes());
}

void check_like_x(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  core::check_same_device(op, name, t, "x", x);
  LIGER_CHECK(
      t.scalar_type() == x.scalar_type(), op, name, c10::str("have the dtype of x, ", x.scalar_type()),
      t.scalar_type());
}

void check_integers(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  core::check_dense(op, name, t);
  LIGER_CHECK(
      t.scalar_type() == at::kLong || t.scalar_type() == at::kInt, op, name, "be int64 or int32", t.scalar_type());
  core::check_same_device(op, name, t, "x", x);
}

void check_options(const char* op, const Call& call) {
  const Options& o = call.options;
  LIGER_CHECK(
      o.is_silu() || o.activation == "gelu" || o.activation == "gelu_tanh", op, "activation",
      "be 'silu', 'gelu' or 'gelu_tanh'", "'", o.activation, "'");
  LIGER_CHECK(!o.limit || *o.limit > 0, op, "limit", "be positive", *o.limit);
  LIGER_CHECK(o.is_silu() || o.alpha == 1, op, "alpha", c10::str("be 1 with ", o.activation), o.alpha);
  LIGER_CHECK(
      !o.weight_before || !call.gate_up_bias.defined(), op, "gate_up_bias", "be absent with weight_before", "a tensor");
}

void check(const Call& call) {
  const char* op = call.op;
  const Tensor& x = call.x;
  core::check_activation(op, "x", x);
  LIGER_CHECK(x.dim() == 2, op, "x", "have two dimensions", x.sym_sizes());
  check_like_x(op, "gate_up", call.gate_up, x);
  check_like_x(op, "down", call.down, x);
  LIGER_CHECK(call.gate_up.dim() == 3, op, "gate_up", "have three dimensions", call.gate_up.sym_sizes());
  LIGER_CHECK(call.down.dim() == 3, op, "down", "have three dimensions", call.down.sym_sizes());
  const bool transposed = call.options.transposed;
  const auto experts = call.gate_up.sym_size(0), hidden = x.sym_size(1), inner = call.down.sym_size(transposed ? 1 : 2);
  if (transposed) {
    check_shape(op, "gate_up", call.gate_up, "[experts, hidden, 2 inner]", {experts, hidden, inner * 2});
    check_shape(op, "down", call.down, "[experts, inner, hidden]", {experts, inner, hidden});
  } else {
    check_shape(op, "gate_up", call.gate_up, "[experts, 2 inner, hidden]", {experts, inner * 2, hidden});
    check_shape(op, "down", call.down, "[experts, hidden, inner]", {experts, hidden, inner});
  }
  if (call.gate_up_bias.defined()) {
    check_like_x(op, "gate_up_bias", call.gate_up_bias, x);
    check_shape(op, "gate_up_bias", call.gate_up_bias, "[experts, 2 inner]", {experts, inner * 2});
  }
  if (call.down_bias.defined()) {
    check_like_x(op, "down_bias", call.down_bias, x);
    check_shape(op, "down_bias", call.down_bias, "[experts, hidden]", {experts, hidden});
  }
  if (call.is_sorted()) {
    if (call.index.defined()) {  // backward does not need it
      check_integers(op, "tokens_per_expert", call.index, x);
      check_shape(op, "tokens_per_expert", call.index, "[experts]", {experts});
    }
  } else {
    LIGER_CHECK(call.index.defined(), op, "index", "accompany weight", "None");
    check_integers(op, "index", call.index, x);
    LIGER_CHECK(call.index.dim() == 2, op, "index", "have two dimensions", call.index.sym_sizes());
    const auto choices = call.index.sym_size(1);
    check_shape(op, "index", call.index, "[tokens, choices]", {x.sym_size(0), choices});
    core::check_same_device(op, "weight", call.weight, "x", x);
    LIGER_CHECK(
        call.weight.scalar_type() == x.scalar_type() ||
            (call.weight.scalar_type() == at::kFloat && x.scalar_type() != at::kDouble),
        op, "weight", c10::str("be float32 or have the dtype of x, ", x.scalar_type()), call.weight.scalar_type());
    check_shape(op, "weight", call.weight, "[tokens, choices]", {x.sym_size(0), choices});
  }
  check_options(op, call);
}

Call make_call(
    const char* op, const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& index,
    const OptionalTensor& weight, const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
    const Options& options) {
  Call call{
      op,
      x,
      gate_up,
      down,
      index,
      value_or_undefined(weight),
      value_or_undefined(gate_up_bias),
      value_or_undefined(down_bias),
      options};
  check(call);
  return call;
}

Tensor empty_routing(const Call& call) {
  const auto size = Routing::size(pairs_of(call), call.gate_up.sym_size(0));
  return at::empty_symint({size}, call.x.options().dtype(at::kInt));
}

// ---- The dispatched operators

template <class Device>
Tensor apply(
    const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& index, const Tensor& weight,
    const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, c10::string_view activation, bool interleaved,
    bool transposed, std::optional<double> limit, double alpha, double up_offset, bool weight_before) {
  const Call call = make_call(
      kOp, x, gate_up, down, index, weight, gate_up_bias, down_bias,
      {activation, interleaved, transposed, limit, alpha, up_offset, weight_before});
  return Device::forward(call, empty_routing(call), nullptr);
}

template <class Device>
Tensor apply_sorted(
    const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& tokens_per_expert,
    const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, c10::string_view activation, bool interleaved,
    bool transposed, std::optional<double> limit, double alpha, double up_offset) {
  const Call call = make_call(
      kSortedOp, x, gate_up, down, tokens_per_expert, {}, gate_up_bias, down_bias,
      {activation, interleaved, transposed, limit, alpha, up_offset, false});
  return Device::forward(call, empty_routing(call), nullptr);
}

using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

/// (out, pre, routing)
template <class Device>
ThreeTensors run_and_save(const Call& call) {
  Tensor pre, routing = empty_routing(call);
  Tensor out = Device::forward(call, routing, &pre);
  return {out, pre, routing};
}

template <class Device>
ThreeTensors fwd(
    const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& index, const Tensor& weight,
    const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, c10::string_view activation, bool interleaved,
    bool transposed, std::optional<double> limit, double alpha, double up_offset, bool weight_before) {
  return run_and_save<Device>(make_call(
      kOp, x, gate_up, down, index, weight, gate_up_bias, down_bias,
      {activation, interleaved, transposed, limit, alpha, up_offset, weight_before}));
}

template <class Device>
ThreeTensors sorted_fwd(
    const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& tokens_per_expert,
    const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, c10::string_view activation, bool interleaved,
    bool transposed, std::optional<double> limit, double alpha, double up_offset) {
  return run_and_save<Device>(make_call(
      kSortedOp, x, gate_up, down, tokens_per_expert, {}, gate_up_bias, down_bias,
      {activation, interleaved, transposed, limit, alpha, up_offset, false}));
}

/// Without weight and index, rows are sorted already.
using SixTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class Device>
SixTensors differentiate(
    const Tensor& dout, const Tensor& x, const Tensor& gate_up, const Tensor& down, const OptionalTensor& index,
    const OptionalTensor& weight, const OptionalTensor& down_bias, const Tensor& pre, const Tensor& dpre,
    const Tensor& routing, int64_t wanted, const Options& options) {
  const Call call = make_call(kBackward, x, gate_up, down, value_or_undefined(index), weight, {}, down_bias, options);
  core::check_same(kBackward, "dout", dout, "x", x);
  check_like_x(kBackward, "pre", pre, x);
  check_shape(
      kBackward, "pre", pre, "[pairs, 2 inner]", {pairs_of(call), gate_up.sym_size(options.transposed ? 2 : 1)});
  check_shape(
      kBackward, "routing", routing, "of the routing data", {Routing::size(pairs_of(call), gate_up.sym_size(0))});
  const Gradients g = Device::backward(call, dout, routing, pre, dpre, wanted);
  return {g.x, g.gate_up, g.down, g.weight, g.gate_up_bias, g.down_bias};
}

template <class Device>
SixTensors bwd(
    const Tensor& dout, const Tensor& x, const Tensor& gate_up, const Tensor& down, const OptionalTensor& index,
    const OptionalTensor& weight, const OptionalTensor& down_bias, const Tensor& pre, const Tensor& routing,
    int64_t wanted, c10::string_view activation, bool interleaved, bool transposed, std::optional<double> limit,
    double alpha, double up_offset, bool weight_before) {
  return differentiate<Device>(
      dout, x, gate_up, down, index, weight, down_bias, pre, gradient_like(pre), routing, wanted,
      {activation, interleaved, transposed, limit, alpha, up_offset, weight_before});
}

// Overwrites pre, which must be contiguous.
template <class Device>
SixTensors bwd_(
    const Tensor& dout, const Tensor& x, const Tensor& gate_up, const Tensor& down, const OptionalTensor& index,
    const OptionalTensor& weight, const OptionalTensor& down_bias, Tensor& pre, const Tensor& routing, int64_t wanted,
    c10::string_view activation, bool interleaved, bool transposed, std::optional<double> limit, double alpha,
    double up_offset, bool weight_before) {
  LIGER_CHECK(pre.is_contiguous(), kBackward, "pre", "be contiguous", pre.sym_strides());
  return differentiate<Device>(
      dout, x, gate_up, down, index, weight, down_bias, pre, pre, routing, wanted,
      {activation, interleaved, transposed, limit, alpha, up_offset, weight_before});
}

// ---- Autograd

struct Node : core::BackwardNode<Node, 8> {  // x, gate_up, down, index, weight, down_bias, pre, routing
  std::string activation;
  bool interleaved, transposed, weight_before;
  std::optional<double> limit;
  double alpha, up_offset;

  auto state() { return std::tie(activation, interleaved, transposed, weight_before, limit, alpha, up_offset); }
  std::string name() const override { return kOp; }

  core::variable_list backward(core::variable_list&& grads) override {
    Tensor dout = std::move(grads[0]);
    if (!dout.defined()) return core::variable_list(6);
    const Tensor x = take(0), gate_up = take(1), down = take(2), index = take(3), weight = take(4), down_bias = take(5);
    Tensor pre = take(6);
    const Tensor routing = take(7);
    int64_t wanted = 0;
    for (size_t i = 0; i < 6; ++i) wanted |= needs(i) ? int64_t(1) << i : 0;
    auto call = [&](const auto& op) {
      auto [dx, dgate_up, ddown, dweight, dgate_up_bias, ddown_bias] = op.call(
          dout, x, gate_up, down, index, weight, down_bias, pre, routing, wanted, activation, interleaved, transposed,
          limit, alpha, up_offset, weight_before);
      return core::variable_list{dx, dgate_up, ddown, dweight, dgate_up_bias, ddown_bias};
    };
    if (pre.is_contiguous() && may_overwrite(pre, pre)) {
      static const auto in_place = core::find_op<decltype(bwd_<Meta>)>("liger::_moe_experts_bwd_");
      return call(in_place);
    }
    static const auto out_of_place = core::find_op<decltype(bwd<Meta>)>("liger::_moe_experts_bwd");
    return call(out_of_place);
  }
};

/// Connects the result of a forward. Sorted rows have neither weight nor index.
Tensor record(
    const ThreeTensors& results, const Tensor& x, const Tensor& gate_up, const Tensor& down,
    const OptionalTensor& index, const OptionalTensor& weight, const OptionalTensor& gate_up_bias,
    const OptionalTensor& down_bias, const Options& o) {
  const auto& [out, pre, routing] = results;
  auto node = core::make_node<Node>();
  node->set_next_edges(
      torch::autograd::collect_next_edges(
          x, gate_up, down, value_or_undefined(weight), value_or_undefined(gate_up_bias),
          value_or_undefined(down_bias)));
  node->activation = o.activation;
  node->interleaved = o.interleaved;
  node->transposed = o.transposed;
  node->weight_before = o.weight_before;
  node->limit = o.limit;
  node->alpha = o.alpha;
  node->up_offset = o.up_offset;
  node->saved = {core::SavedVariable(x, false),      core::SavedVariable(gate_up, false),
                 core::SavedVariable(down, false),   core::SavedVariable(index, false),
                 core::SavedVariable(weight, false), core::SavedVariable(down_bias, false),
                 core::SavedVariable(pre, false),    core::SavedVariable(routing, false)};
  torch::autograd::set_history(out, node);
  return out;
}

template <class... Tensors>
bool needs_gradient(const char* op, const Tensor& x, const Tensors&... others) {
  core::check_dense(op, "x", x);
  core::check_no_forward_ad(op, x, value_or_undefined(others)...);
  return torch::autograd::compute_requires_grad(x, value_or_undefined(others)...);
}

Tensor autograd(
    const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& index, const Tensor& weight,
    const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, c10::string_view activation, bool interleaved,
    bool transposed, std::optional<double> limit, double alpha, double up_offset, bool weight_before) {
  const bool needed = needs_gradient(
      kOp, x, OptionalTensor(gate_up), OptionalTensor(down), OptionalTensor(weight), gate_up_bias, down_bias);
  auto call = [&](const auto& op) {
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(
        x, gate_up, down, index, weight, gate_up_bias, down_bias, activation, interleaved, transposed, limit, alpha,
        up_offset, weight_before);
  };
  if (!needed) {
    static const auto op = core::find_op<decltype(apply<Meta>)>("liger::moe_experts");
    return call(op);
  }
  static const auto op = core::find_op<decltype(fwd<Meta>)>("liger::_moe_experts_fwd");
  return record(
      call(op), x, gate_up, down, index, weight, gate_up_bias, down_bias,
      {activation, interleaved, transposed, limit, alpha, up_offset, weight_before});
}

Tensor autograd_sorted(
    const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& tokens_per_expert,
    const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, c10::string_view activation, bool interleaved,
    bool transposed, std::optional<double> limit, double alpha, double up_offset) {
  const bool needed =
      needs_gradient(kSortedOp, x, OptionalTensor(gate_up), OptionalTensor(down), gate_up_bias, down_bias);
  auto call = [&](const auto& op) {
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(
        x, gate_up, down, tokens_per_expert, gate_up_bias, down_bias, activation, interleaved, transposed, limit, alpha,
        up_offset);
  };
  if (!needed) {
    static const auto op = core::find_op<decltype(apply_sorted<Meta>)>("liger::moe_experts_sorted");
    return call(op);
  }
  static const auto op = core::find_op<decltype(sorted_fwd<Meta>)>("liger::_moe_experts_sorted_fwd");
  return record(
      call(op), x, gate_up, down, {}, {}, gate_up_bias, down_bias,
      {activation, interleaved, transposed, limit, alpha, up_offset, false});
}

// ---- Autocast: as a linear layer. The routing weights stay as they are, unless they are wider than fp32.

template <c10::DeviceType kDevice>
struct Autocast {
  static Tensor cast(const Tensor& t) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), t, kDevice);
  }
  static OptionalTensor cast(const OptionalTensor& t) { return t && t->defined() ? OptionalTensor(cast(*t)) : t; }

  static Tensor apply(
      const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& index, const Tensor& weight,
      const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, c10::string_view activation,
      bool interleaved, bool transposed, std::optional<double> limit, double alpha, double up_offset,
      bool weight_before) {
    static const auto op = core::find_op<decltype(moe_experts::apply<Meta>)>("liger::moe_experts");
    c10::impl::ExcludeDispatchKeyGuard below(at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
    const Tensor narrow = cast(x);
    const bool fits = weight.scalar_type() == narrow.scalar_type();
    return op.call(
        narrow, cast(gate_up), cast(down), index, fits ? weight : weight.to(at::kFloat), cast(gate_up_bias),
        cast(down_bias), activation, interleaved, transposed, limit, alpha, up_offset, weight_before);
  }

  static Tensor apply_sorted(
      const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& tokens_per_expert,
      const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, c10::string_view activation,
      bool interleaved, bool transposed, std::optional<double> limit, double alpha, double up_offset) {
    static const auto op = core::find_op<decltype(moe_experts::apply_sorted<Meta>)>("liger::moe_experts_sorted");
    c10::impl::ExcludeDispatchKeyGuard below(at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
    return op.call(
        cast(x), cast(gate_up), cast(down), tokens_per_expert, cast(gate_up_bias), cast(down_bias), activation,
        interleaved, transposed, limit, alpha, up_offset);
  }

  static void implement(torch::Library& m) {
    core::implement<apply>(m, "moe_experts");
    core::implement<apply_sorted>(m, "moe_experts_sorted");
  }
};

template <class Device>
void implement(torch::Library& m) {
  core::implement<apply<Device>>(m, "moe_experts");
  core::implement<apply_sorted<Device>>(m, "moe_experts_sorted");
  core::implement<fwd<Device>>(m, "_moe_experts_fwd");
  core::implement<sorted_fwd<Device>>(m, "_moe_experts_sorted_fwd");
  core::implement<bwd<Device>>(m, "_moe_experts_bwd");
  core::implement<bwd_<Device>>(m, "_moe_experts_bwd_");
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(liger, m) {
  const std::string weights = "Tensor x, Tensor gate_up, Tensor down, ";
  const std::string routes = weights + "Tensor index, Tensor weight, ", counts = weights + "Tensor tokens_per_expert, ";
  const std::string public_options =
      "Tensor? gate_up_bias=None, Tensor? down_bias=None, str activation=\"silu\", *, bool interleaved=False, "
      "bool transposed=False, float? limit=None, float alpha=1.0, float up_offset=0.0";
  core::define(m, "moe_experts(" + routes + public_options + ", bool weight_before=False) -> Tensor");
  core::define(m, "moe_experts_sorted(" + counts + public_options + ") -> Tensor");
  const std::string biases = "Tensor? gate_up_bias, Tensor? down_bias, ";
  const std::string options =
      "str activation, bool interleaved, bool transposed, float? limit, float alpha, float up_offset";
  const std::string three = ") -> (Tensor, Tensor, Tensor)";
  core::define(m, "_moe_experts_fwd(" + routes + biases + options + ", bool weight_before" + three);
  core::define(m, "_moe_experts_sorted_fwd(" + counts + biases + options + three);
  const std::string saved = "(Tensor dout, " + weights + "Tensor? index, Tensor? weight, Tensor? down_bias, ";
  const std::string rest = " pre, Tensor routing, int wanted, " + options +
      ", bool weight_before) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)";
  core::define(m, "_moe_experts_bwd" + saved + "Tensor" + rest);
  core::define(m, "_moe_experts_bwd_" + saved + "Tensor(a!)" + rest);
}

TORCH_LIBRARY_IMPL(liger, CPU, m) { implement<Cpu>(m); }
TORCH_LIBRARY_IMPL(liger, CUDA, m) { implement<Cuda>(m); }
TORCH_LIBRARY_IMPL(liger, Meta, m) { implement<Meta>(m); }
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  m.impl("moe_experts", autograd);
  m.impl("moe_experts_sorted", autograd_sorted);
}
TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) { Autocast<c10::DeviceType::CUDA>::implement(m); }
TORCH_LIBRARY_IMPL(liger, AutocastCPU, m) { Autocast<c10::DeviceType::CPU>::implement(m); }

}  // namespace liger::ops::moe_experts
