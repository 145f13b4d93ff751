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

#include "core/operator.h"

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
  core::check_integers(op, name, t);
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

// ---- Backward

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Six = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

/// (out, pre, routing); pre only if it is saved.
template <class Device>
Three run_experts(bool save, const Call& call) {
  Tensor pre, routing = empty_routing(call);
  Tensor out = Device::forward(call, routing, save ? &pre : nullptr);
  return {out, pre, routing};
}

/// Without weight and index, rows are sorted already.
template <class Device>
Six differentiate(
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

/// O: the types of Options, in their order.
template <class... O>
struct Gradient {
  template <class Device>
  static Six bwd(
      const Tensor& dout, const Tensor& x, const Tensor& gate_up, const Tensor& down, const OptionalTensor& index,
      const OptionalTensor& weight, const OptionalTensor& down_bias, const Tensor& pre, const Tensor& routing,
      int64_t wanted, O... options) {
    return differentiate<Device>(
        dout, x, gate_up, down, index, weight, down_bias, pre, gradient_like(pre), routing, wanted, {options...});
  }

  // Overwrites pre, which must be contiguous.
  template <class Device>
  static Six bwd_(
      const Tensor& dout, const Tensor& x, const Tensor& gate_up, const Tensor& down, const OptionalTensor& index,
      const OptionalTensor& weight, const OptionalTensor& down_bias, Tensor& pre, const Tensor& routing, int64_t wanted,
      O... options) {
    LIGER_CHECK(pre.is_contiguous(), kBackward, "pre", "be contiguous", pre.sym_strides());
    return differentiate<Device>(
        dout, x, gate_up, down, index, weight, down_bias, pre, pre, routing, wanted, {options...});
  }

  static void define(torch::Library& m) {
    core::define_backward(
        m, "_moe_experts_bwd",
        "Tensor dout, Tensor x, Tensor gate_up, Tensor down, Tensor? index, Tensor? weight, Tensor? down_bias, "
        "Tensor(a!) pre, Tensor routing, int wanted, str activation, bool interleaved, bool transposed, float? limit, "
        "float alpha, float up_offset, bool weight_before",
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  }

  template <class Device>
  static void implement(torch::Library& m) {
    core::implement<bwd<Device>>(m, "_moe_experts_bwd");
    core::implement<bwd_<Device>>(m, "_moe_experts_bwd_");
  }

  template <class AnyNode>
  static Six call(
      AnyNode& node, const Tensor& dout, const Tensor& x, const Tensor& gate_up, const Tensor& down,
      const Tensor& index, const Tensor& weight, const Tensor& down_bias, Tensor pre, const Tensor& routing,
      int64_t wanted, O... options) {
    if (pre.is_contiguous() && node.may_overwrite(pre, pre)) {
      static const auto in_place = core::find_op<decltype(bwd_<Meta>)>("_moe_experts_bwd_");
      return in_place.call(dout, x, gate_up, down, index, weight, down_bias, pre, routing, wanted, options...);
    }
    static const auto out_of_place = core::find_op<decltype(bwd<Meta>)>("_moe_experts_bwd");
    return out_of_place.call(dout, x, gate_up, down, index, weight, down_bias, pre, routing, wanted, options...);
  }
};

using AnyGradient = Gradient<c10::string_view, bool, bool, std::optional<double>, double, double, bool>;

// ---- The operators

/// What both have in common.
template <class Op, class Type>
struct ExpertsOperator : core::Operator<Op, Type> {
  using Forward = Three;
  using Cpu = moe_experts::Cpu;
  using Cuda = moe_experts::Cuda;
  using Meta = moe_experts::Meta;
};

template <class... O>
struct Experts : ExpertsOperator<
                     Experts<O...>,
                     Tensor(
                         const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                         const OptionalTensor&, const OptionalTensor&, O...)> {
  static constexpr const char* kOp = moe_experts::kOp;
  static constexpr const char* kSchema = schemas::moe_experts;
  using Edges = core::Positions<0, 1, 2, 4, 5, 6>;
  // x, gate_up, down, index, weight, down_bias, pre, routing
  using Saves = core::Saves<
      core::Argument<0>, core::Argument<1>, core::Argument<2>, core::Argument<3>, core::Argument<4>, core::Argument<6>,
      core::Result<1>, core::Result<2>>;

  template <class Device>
  static Three run(
      bool save, const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& index, const Tensor& weight,
      const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, O... options) {
    return run_experts<Device>(
        save, make_call(kOp, x, gate_up, down, index, weight, gate_up_bias, down_bias, {options...}));
  }

  // As a linear layer. The routing weights stay as they are, unless they are wider than fp32.
  struct Autocast : core::AutocastLinear<0, 1, 2, 5, 6> {
    template <class Arguments>
    static void cast(c10::DeviceType device, Arguments& arguments) {
      core::AutocastLinear<0, 1, 2, 5, 6>::cast(device, arguments);
      Tensor& weight = std::get<4>(arguments);
      if (weight.scalar_type() != std::get<0>(arguments).scalar_type()) weight = weight.to(at::kFloat);
    }
  };

  static void define_backward(torch::Library& m) { AnyGradient::define(m); }
  template <class Device>
  static void implement_backward(torch::Library& m) {
    AnyGradient::implement<Device>(m);
  }

  template <class AnyNode>
  static core::variable_list backward(AnyNode& node, core::variable_list&& grads) {
    Tensor dout = std::move(grads[0]);
    if (!dout.defined()) return core::variable_list(6);
    const Tensor x = node.take(0), gate_up = node.take(1), down = node.take(2), index = node.take(3),
                 weight = node.take(4), down_bias = node.take(5);
    Tensor pre = node.take(6);
    const Tensor routing = node.take(7);
    int64_t wanted = 0;
    for (size_t i = 0; i < 6; ++i) wanted |= node.needs(i) ? int64_t(1) << i : 0;
    auto [dx, dgate_up, ddown, dweight, dgate_up_bias, ddown_bias] =
        core::with_options(node.options, [&](const auto&... o) {
          return AnyGradient::call(
              node, dout, x, gate_up, down, index, weight, down_bias, std::move(pre), routing, wanted, o...);
        });
    return {dx, dgate_up, ddown, dweight, dgate_up_bias, ddown_bias};
  }
};

/// Without weight_before, because there are no weights.
template <class... O>
struct SortedExperts : ExpertsOperator<
                           SortedExperts<O...>,
                           Tensor(
                               const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                               const OptionalTensor&, O...)> {
  static constexpr const char* kOp = kSortedOp;
  static constexpr const char* kSchema = schemas::moe_experts_sorted;
  using Edges = core::Positions<0, 1, 2, 4, 5>;
  // x, gate_up, down, down_bias, pre, routing
  using Saves = core::Saves<
      core::Argument<0>, core::Argument<1>, core::Argument<2>, core::Argument<5>, core::Result<1>, core::Result<2>>;
  using Autocast = core::AutocastLinear<0, 1, 2, 4, 5>;

  template <class Device>
  static Three run(
      bool save, const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& tokens_per_expert,
      const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, O... options) {
    return run_experts<Device>(
        save, make_call(kOp, x, gate_up, down, tokens_per_expert, {}, gate_up_bias, down_bias, {options..., false}));
  }

  template <class AnyNode>
  static core::variable_list backward(AnyNode& node, core::variable_list&& grads) {
    Tensor dout = std::move(grads[0]);
    if (!dout.defined()) return core::variable_list(5);
    const Tensor x = node.take(0), gate_up = node.take(1), down = node.take(2), down_bias = node.take(3);
    Tensor pre = node.take(4);
    const Tensor routing = node.take(5);
    constexpr int64_t kOfEdge[] = {kX, kGateUp, kDown, kGateUpBias, kDownBias};
    int64_t wanted = 0;
    for (size_t i = 0; i < 5; ++i) wanted |= node.needs(i) ? kOfEdge[i] : 0;
    auto [dx, dgate_up, ddown, dweight, dgate_up_bias, ddown_bias] =
        core::with_options(node.options, [&](const auto&... o) {
          return AnyGradient::call(
              node, dout, x, gate_up, down, {}, {}, down_bias, std::move(pre), routing, wanted, o..., false);
        });
    return {dx, dgate_up, ddown, dgate_up_bias, ddown_bias};
  }
};

using MoeExperts = Experts<c10::string_view, bool, bool, std::optional<double>, double, double, bool>;
using MoeExpertsSorted = SortedExperts<c10::string_view, bool, bool, std::optional<double>, double, double>;

}  // namespace

LIGER_OPERATOR(MoeExperts)
LIGER_OPERATOR(MoeExpertsSorted)

}  // namespace liger::ops::moe_experts
