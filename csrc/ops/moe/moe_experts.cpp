// moe_experts(x, gate_up, down, index, weight, ...) = the sum over a token's choices of weight * expert(x), with
//     expert(x) = down @ ((up + up_offset) * f(gate)),  gate and up = gate_up @ x
//
// Letters: T tokens, K choices, E experts, H hidden, I inner.
// x: (T, H), index: (T, K) int64 or int32, weight: (T, K) in x's dtype or fp32. gate_up: (E, 2 I, H) and down:
// (E, H, I), or (E, H, 2 I) and (E, I, H) if transposed. Biases: (E, 2 I) and (E, H). Gate and up are the halves of 2
// I, or alternate if interleaved. f: silu with sigmoid(alpha * gate), gelu or gelu_tanh. limit: gate is at most limit,
// and up is clamped to [-limit, limit]. weight_before: expert(weight * x) instead of weight * expert(x).
// An index outside of [0, E) contributes nothing: with expert parallelism that expert is elsewhere.
//
// Adapters a (E, r, in) and b (E, out, r) of a weight add scale * b @ (a @ .) to its product.
//
// moe_experts_sorted takes rows that are sorted by expert, and their numbers; rows beyond those are 0.
//
// Products round to x's dtype; the sum over choices is fp32 and rounded once. Forward saves x, the first product (pre),
// the routing data, and t = scale * a @ x of the adapters of gate_up. Backward recomputes the activation and writes the
// gradient of pre over it, because nothing else can see it.

#include "ops/moe/moe_experts.h"

#include "core/operator.h"
#include "core/values.h"

namespace liger::ops::moe_experts {
namespace {

using OptionalTensor = std::optional<Tensor>;
using core::value_or_undefined;

struct Meta {
  static Tensor forward(const Call& call, const Tensor&, Saved* saved) {
    if (saved) *saved = {empty_pre(call), empty_t(call)};
    return at::empty_symint(call.x.sym_sizes(), call.x.options());
  }
  static Gradients backward(
      const Call& call, const Tensor&, const Tensor&, const Saved& saved, const Tensor&, int64_t wanted) {
    auto like = [&](int64_t bit, const Tensor& t) {
      return !(wanted & bit) ? Tensor() : bit < kGateUpA ? gradient_like(t) : adapter_gradient(t);
    };
    auto bias = [&](int64_t bit, const c10::SymInt& n) {
      return wanted & bit ? at::empty_symint({call.gate_up.sym_size(0), n}, call.x.options()) : Tensor();
    };
    return gradients_like(call, like, bias(kGateUpBias, saved.pre.sym_size(1)), bias(kDownBias, call.x.sym_size(1)));
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

/// The adapters of one weight, whose product has `in` features and `out` results.
void check_adapters(
    const Call& call, const Adapters& adapters, const std::string& of, const c10::SymInt& in, const char* in_name,
    const c10::SymInt& out, const char* out_name) {
  const char* op = call.op;
  const std::string a = of + "_a", b = of + "_b";
  if (!adapters.a.defined() && !adapters.b.defined()) return;
  LIGER_CHECK(adapters.a.defined(), op, a, "accompany " + b, "None");
  LIGER_CHECK(adapters.b.defined(), op, b, "accompany " + a, "None");
  for (const auto& [name, t] : {std::pair(a, adapters.a), std::pair(b, adapters.b)}) {
    core::check_same_device(op, name.c_str(), t, "x", call.x);
    core::check_parameter_dtype(op, name.c_str(), t, "x", call.x);
    LIGER_CHECK(t.dim() == 3, op, name, "have three dimensions", t.sym_sizes());
  }
  LIGER_CHECK(
      adapters.a.scalar_type() == adapters.b.scalar_type(), op, b,
      c10::str("have the dtype of ", a, ", ", adapters.a.scalar_type()), adapters.b.scalar_type());
  const auto experts = call.gate_up.sym_size(0), rank = adapters.a.sym_size(1);
  const auto a_letters = c10::str("[experts, rank, ", in_name, "]"),
             b_letters = c10::str("[experts, ", out_name, ", rank]");
  check_shape(op, a.c_str(), adapters.a, a_letters.c_str(), {experts, rank, in});
  check_shape(op, b.c_str(), adapters.b, b_letters.c_str(), {experts, out, rank});
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
  check_adapters(call, call.gate_up_adapters, "gate_up", hidden, "hidden", inner * 2, "2 inner");
  check_adapters(call, call.down_adapters, "down", inner, "inner", hidden, "hidden");
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
    core::check_parameter_dtype(op, "weight", call.weight, "x", x);
    check_shape(op, "weight", call.weight, "[tokens, choices]", {x.sym_size(0), choices});
  }
  check_options(op, call);
}

/// gate_up_a, gate_up_b, down_a, down_b
using Four = std::array<OptionalTensor, 4>;

Call make_call(
    const char* op, const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& index,
    const OptionalTensor& weight, const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
    const Four& adapters, const Options& options) {
  Call call{
      op,
      x,
      gate_up,
      down,
      index,
      value_or_undefined(weight),
      value_or_undefined(gate_up_bias),
      value_or_undefined(down_bias),
      {value_or_undefined(adapters[0]), value_or_undefined(adapters[1])},
      {value_or_undefined(adapters[2]), value_or_undefined(adapters[3])},
      options};
  check(call);
  return call;
}

Tensor empty_routing(const Call& call) {
  const auto size = Routing::size(pairs_of(call), call.gate_up.sym_size(0));
  return at::empty_symint({size}, call.x.options().dtype(at::kInt));
}

// ---- Backward

using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Ten = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

/// (out, pre, routing, t); pre and t only if they are saved.
template <class Device>
Results run_experts(bool save, const Call& call) {
  if constexpr (!std::is_same_v<Device, Meta>) {
    if (call.is_sorted()) core::check_counts(call.op, "tokens_per_expert", call.index, call.x.size(0));
  }
  Saved saved;
  const Tensor routing = empty_routing(call);
  Tensor out = Device::forward(call, routing, save ? &saved : nullptr);
  return {out, saved.pre, routing, saved.t};
}

/// What backward needs, in the order of its schema. Without weight and index, rows are sorted already.
struct Inputs {
  const Tensor &dout, &x, &gate_up, &down;
  const OptionalTensor &index, &weight, &down_bias;
  Four adapters;
};

template <class Device>
Ten differentiate(
    const Inputs& in, const Saved& saved, const Tensor& dpre, const Tensor& routing, int64_t wanted,
    const Options& options) {
  const Call call = make_call(
      kBackward, in.x, in.gate_up, in.down, value_or_undefined(in.index), in.weight, {}, in.down_bias, in.adapters,
      options);
  core::check_same(kBackward, "dout", in.dout, "x", in.x);
  check_like_x(kBackward, "pre", saved.pre, in.x);
  check_shape(
      kBackward, "pre", saved.pre, "[pairs, 2 inner]",
      {pairs_of(call), in.gate_up.sym_size(options.transposed ? 2 : 1)});
  check_shape(kBackward, "t", saved.t, "[pairs, rank]", {pairs_of(call), call.gate_up_adapters.rank()});
  check_shape(
      kBackward, "routing", routing, "of the routing data", {Routing::size(pairs_of(call), in.gate_up.sym_size(0))});
  Gradients g = Device::backward(call, in.dout, routing, saved, dpre, wanted);
  return {g.x, g.gate_up, g.down, g.weight, g.gate_up_bias, g.down_bias, g.gate_up_a, g.gate_up_b, g.down_a, g.down_b};
}

/// O: the types of Options, in their order.
template <class... O>
struct Gradient {
  template <class Device>
  static Ten bwd(
      const Tensor& dout, const Tensor& x, const Tensor& gate_up, const Tensor& down, const OptionalTensor& index,
      const OptionalTensor& weight, const OptionalTensor& down_bias, const OptionalTensor& gate_up_a,
      const OptionalTensor& gate_up_b, const OptionalTensor& down_a, const OptionalTensor& down_b, const Tensor& pre,
      const Tensor& routing, const Tensor& t, int64_t wanted, O... options) {
    const Inputs in{dout, x, gate_up, down, index, weight, down_bias, {gate_up_a, gate_up_b, down_a, down_b}};
    return differentiate<Device>(in, {pre, t}, gradient_like(pre), routing, wanted, {options...});
  }

  // Overwrites pre, which must be contiguous.
  template <class Device>
  static Ten bwd_(
      const Tensor& dout, const Tensor& x, const Tensor& gate_up, const Tensor& down, const OptionalTensor& index,
      const OptionalTensor& weight, const OptionalTensor& down_bias, const OptionalTensor& gate_up_a,
      const OptionalTensor& gate_up_b, const OptionalTensor& down_a, const OptionalTensor& down_b, Tensor& pre,
      const Tensor& routing, const Tensor& t, int64_t wanted, O... options) {
    LIGER_CHECK(pre.is_contiguous(), kBackward, "pre", "be contiguous", pre.sym_strides());
    const Inputs in{dout, x, gate_up, down, index, weight, down_bias, {gate_up_a, gate_up_b, down_a, down_b}};
    return differentiate<Device>(in, {pre, t}, pre, routing, wanted, {options...});
  }

  static void define(torch::Library& m) {
    constexpr const char* kResults = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)";
    core::define_backward(
        m, "_moe_experts_bwd",
        "Tensor dout, Tensor x, Tensor gate_up, Tensor down, Tensor? index, Tensor? weight, Tensor? down_bias, "
        "Tensor? gate_up_a, Tensor? gate_up_b, Tensor? down_a, Tensor? down_b, Tensor(a!) pre, Tensor routing, Tensor "
        "t, "
        "int wanted, str activation, bool interleaved, bool transposed, float? limit, float alpha, float up_offset, "
        "bool weight_before, float gate_up_scale, float down_scale",
        kResults, kResults);
  }

  template <class Device>
  static void implement(torch::Library& m) {
    core::implement<bwd<Device>>(m, "_moe_experts_bwd");
    core::implement<bwd_<Device>>(m, "_moe_experts_bwd_");
  }

  template <class AnyNode>
  static core::variable_list call(
      AnyNode& node, const Inputs& in, Tensor pre, const Tensor& routing, const Tensor& t, int64_t wanted,
      O... options) {
    const auto& [gate_up_a, gate_up_b, down_a, down_b] = in.adapters;
    auto with = [&](const auto& op) {
      auto [x, gate_up, down, weight, gate_up_bias, down_bias, dgate_up_a, dgate_up_b, ddown_a, ddown_b] = op.call(
          in.dout, in.x, in.gate_up, in.down, in.index, in.weight, in.down_bias, gate_up_a, gate_up_b, down_a, down_b,
          pre, routing, t, wanted, options...);
      return core::variable_list{x,         gate_up,    down,       weight,  gate_up_bias,
                                 down_bias, dgate_up_a, dgate_up_b, ddown_a, ddown_b};
    };
    if (pre.is_contiguous() && node.may_overwrite(pre, pre)) {
      static const auto in_place = core::find_op<decltype(bwd_<Meta>)>("_moe_experts_bwd_");
      return with(in_place);
    }
    static const auto out_of_place = core::find_op<decltype(bwd<Meta>)>("_moe_experts_bwd");
    return with(out_of_place);
  }
};

using AnyGradient = Gradient<c10::string_view, bool, bool, std::optional<double>, double, double, bool, double, double>;

using AllOptions =
    std::tuple<c10::string_view, bool, bool, std::optional<double>, double, double, bool, double, double>;

template <class... O>
AllOptions with_weight_before(
    c10::string_view activation, bool interleaved, bool transposed, std::optional<double> limit, double alpha,
    double up_offset, O... rest) {
  const auto start = std::make_tuple(activation, interleaved, transposed, limit, alpha, up_offset);
  if constexpr (sizeof...(O) == 3)
    return std::tuple_cat(start, std::make_tuple(rest...));
  else
    return std::tuple_cat(start, std::make_tuple(false, rest...));
}

/// The backward of both operators. first: position of the adapters among the node's tensors, which pre, routing and t
/// follow. bit: of the gradient of an edge. A node of compiled autograd does not know the number of its edges.
template <class Edges, class AnyNode, class Bit>
core::variable_list differentiate_experts(AnyNode& node, Inputs in, size_t first, const Bit& bit) {
  for (size_t i = 0; i < 4; ++i) {
    const Tensor adapter = node.take(first + i);
    if (adapter.defined()) in.adapters[i] = adapter;
  }
  Tensor pre = node.take(first + 4);
  const Tensor routing = node.take(first + 5), t = node.take(first + 6);
  int64_t wanted = 0;
  for (size_t i = 0; i < Edges::size(); ++i) wanted |= node.needs(i) ? bit(i) : 0;
  return core::with_options(node.options, [&](const auto&... o) {
    return std::apply(
        [&](const auto&... all) { return AnyGradient::call(node, in, std::move(pre), routing, t, wanted, all...); },
        with_weight_before(o...));
  });
}

// ---- The operators

/// What both have in common.
template <class Op, class Type>
struct ExpertsOperator : core::Operator<Op, Type> {
  using Forward = Results;
  using Cpu = moe_experts::Cpu;
  using Cuda = moe_experts::Cuda;
  using Meta = moe_experts::Meta;
};

template <class... O>
struct Experts : ExpertsOperator<
                     Experts<O...>,
                     Tensor(
                         const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                         const OptionalTensor&, const OptionalTensor&, O..., const OptionalTensor&,
                         const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, double, double)> {
  static constexpr const char* kOp = moe_experts::kOp;
  static constexpr const char* kSchema = schemas::moe_experts;
  static constexpr size_t kFirst = 7 + sizeof...(O);  // of the adapters
  using Edges = core::Positions<0, 1, 2, 4, 5, 6, kFirst, kFirst + 1, kFirst + 2, kFirst + 3>;
  // x, gate_up, down, index, weight, down_bias, adapters, pre, routing, t
  using Saves = core::Saves<
      core::Argument<0>, core::Argument<1>, core::Argument<2>, core::Argument<3>, core::Argument<4>, core::Argument<6>,
      core::Argument<kFirst>, core::Argument<kFirst + 1>, core::Argument<kFirst + 2>, core::Argument<kFirst + 3>,
      core::Result<1>, core::Result<2>, core::Result<3>>;

  template <class Device>
  static Results run(
      bool save, const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& index, const Tensor& weight,
      const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, O... options,
      const OptionalTensor& gate_up_a, const OptionalTensor& gate_up_b, const OptionalTensor& down_a,
      const OptionalTensor& down_b, double gate_up_scale, double down_scale) {
    const Four adapters{gate_up_a, gate_up_b, down_a, down_b};
    return run_experts<Device>(
        save,
        make_call(
            kOp, x, gate_up, down, index, weight, gate_up_bias, down_bias, adapters,
            {options..., gate_up_scale, down_scale}));
  }

  // As a linear layer. The routing weights stay as they are, unless they are wider than fp32.
  struct Autocast : core::AutocastLinear<0, 1, 2, 5, 6, kFirst, kFirst + 1, kFirst + 2, kFirst + 3> {
    template <class Arguments>
    static void cast(c10::DeviceType device, Arguments& arguments) {
      core::AutocastLinear<0, 1, 2, 5, 6, kFirst, kFirst + 1, kFirst + 2, kFirst + 3>::cast(device, arguments);
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
    if (!dout.defined()) return core::variable_list(10);
    const Tensor x = node.take(0), gate_up = node.take(1), down = node.take(2);
    const OptionalTensor index = node.take(3), weight = node.take(4), down_bias = node.take(5);
    const Inputs in{dout, x, gate_up, down, index, weight, down_bias, {}};
    return differentiate_experts<Edges>(node, in, 6, [](int64_t edge) { return int64_t(1) << edge; });
  }
};

/// Without weight_before, because there are no weights.
template <class... O>
struct SortedExperts : ExpertsOperator<
                           SortedExperts<O...>,
                           Tensor(
                               const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                               const OptionalTensor&, O..., const OptionalTensor&, const OptionalTensor&,
                               const OptionalTensor&, const OptionalTensor&, double, double)> {
  static constexpr const char* kOp = kSortedOp;
  static constexpr const char* kSchema = schemas::moe_experts_sorted;
  static constexpr size_t kFirst = 6 + sizeof...(O);  // of the adapters
  using Edges = core::Positions<0, 1, 2, 4, 5, kFirst, kFirst + 1, kFirst + 2, kFirst + 3>;
  // x, gate_up, down, down_bias, adapters, pre, routing, t
  using Saves = core::Saves<
      core::Argument<0>, core::Argument<1>, core::Argument<2>, core::Argument<5>, core::Argument<kFirst>,
      core::Argument<kFirst + 1>, core::Argument<kFirst + 2>, core::Argument<kFirst + 3>, core::Result<1>,
      core::Result<2>, core::Result<3>>;
  using Autocast = core::AutocastLinear<0, 1, 2, 4, 5, kFirst, kFirst + 1, kFirst + 2, kFirst + 3>;

  template <class Device>
  static Results run(
      bool save, const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& tokens_per_expert,
      const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, O... options,
      const OptionalTensor& gate_up_a, const OptionalTensor& gate_up_b, const OptionalTensor& down_a,
      const OptionalTensor& down_b, double gate_up_scale, double down_scale) {
    const Four adapters{gate_up_a, gate_up_b, down_a, down_b};
    return run_experts<Device>(
        save,
        make_call(
            kOp, x, gate_up, down, tokens_per_expert, {}, gate_up_bias, down_bias, adapters,
            {options..., false, gate_up_scale, down_scale}));
  }

  template <class AnyNode>
  static core::variable_list backward(AnyNode& node, core::variable_list&& grads) {
    Tensor dout = std::move(grads[0]);
    if (!dout.defined()) return core::variable_list(9);
    const Tensor x = node.take(0), gate_up = node.take(1), down = node.take(2);
    const OptionalTensor none, down_bias = node.take(3);
    const Inputs in{dout, x, gate_up, down, none, none, down_bias, {}};
    auto found = differentiate_experts<Edges>(
        node, in, 4, [](int64_t edge) { return int64_t(1) << (edge < 3 ? edge : edge + 1); });
    found.erase(found.begin() + 3);  // of the weights of routes
    return found;
  }
};

using MoeExperts = Experts<c10::string_view, bool, bool, std::optional<double>, double, double, bool>;
using MoeExpertsSorted = SortedExperts<c10::string_view, bool, bool, std::optional<double>, double, double>;

}  // namespace

LIGER_OPERATOR(MoeExperts)
LIGER_OPERATOR(MoeExpertsSorted)

}  // namespace liger::ops::moe_experts
