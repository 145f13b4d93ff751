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

using core::value_or_undefined;

struct Meta {
  static Tensor forward(const Call& call, const Tensor&, Saved* saved) {
    if (saved) *saved = {empty_pre(call), empty_t(call)};
    return at::empty_symint(call.x.sym_sizes(), call.x.options());
  }
  static Gradients backward(
      const Call& call, const Tensor&, const Tensor&, const Saved&, const Tensor&, const Wanted& wants) {
    return new_gradients(call, wants, false);
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

// ---- Forward

using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;

/// (out, pre, routing, t); pre and t only if they are saved. index and weight: as in Call.
template <class Device>
Results run_experts(
    const char* op, bool save, const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& index,
    const OptionalTensor& weight, const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
    c10::string_view activation, bool interleaved, bool transposed, std::optional<double> limit, double alpha,
    double up_offset, bool weight_before, const OptionalTensor& gate_up_a, const OptionalTensor& gate_up_b,
    const OptionalTensor& down_a, const OptionalTensor& down_b, double gate_up_scale, double down_scale) {
  const Call call{
      op,
      x,
      gate_up,
      down,
      index,
      value_or_undefined(weight),
      value_or_undefined(gate_up_bias),
      value_or_undefined(down_bias),
      {value_or_undefined(gate_up_a), value_or_undefined(gate_up_b)},
      {value_or_undefined(down_a), value_or_undefined(down_b)},
      {activation, interleaved, transposed, limit, alpha, up_offset, weight_before, gate_up_scale, down_scale}};
  check(call);
  if constexpr (!std::is_same_v<Device, Meta>) {
    if (call.is_sorted()) core::check_counts(op, "tokens_per_expert", index, x.size(0));
  }
  Saved saved;
  const Tensor routing = at::empty_symint({Routing::size(call)}, x.options().dtype(at::kInt));
  Tensor out = Device::forward(call, routing, save ? &saved : nullptr);
  return {out, saved.pre, routing, saved.t};
}

// ---- Backward

using AllGradients = decltype(Gradients().all());

Wanted wanted_of(int64_t bits) {
  auto wants = [&](int gradient) { return core::wants(bits, gradient); };
  return {wants(0), wants(1), wants(2), wants(3), wants(4), wants(5), wants(6), wants(7), wants(8), wants(9)};
}

/// The gradients of both operators. Without index and weight, rows are sorted already. A `pre` that is not const is
/// overwritten, and must be contiguous.
template <class Pre>
struct Backward : core::Private<
                      Backward<Pre>,
                      AllGradients(
                          const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                          const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                          const OptionalTensor&, const OptionalTensor&, Pre, const Tensor&, const Tensor&, int64_t,
                          c10::string_view, bool, bool, std::optional<double>, double, double, bool, double, double)> {
  static constexpr bool kOverwrites = std::is_same_v<Pre, Tensor&>;
  static constexpr const char* kName = kOverwrites ? "_moe_experts_bwd_" : "_moe_experts_bwd";
  static constexpr const char* kArguments =
      "dout, x, gate_up, down, index, weight, down_bias, gate_up_a, gate_up_b, down_a, down_b, pre, routing, t, wanted"
      ", activation, interleaved, transposed, limit, alpha, up_offset, weight_before, gate_up_scale, down_scale";

  template <class Device, class... O>
  static AllGradients run(
      const Tensor& dout, const Tensor& x, const Tensor& gate_up, const Tensor& down, const OptionalTensor& index,
      const OptionalTensor& weight, const OptionalTensor& down_bias, const OptionalTensor& gate_up_a,
      const OptionalTensor& gate_up_b, const OptionalTensor& down_a, const OptionalTensor& down_b, Pre pre,
      const Tensor& routing, const Tensor& t, int64_t wanted, O... options) {
    LIGER_CHECK(!kOverwrites || pre.is_contiguous(), kBackward, "pre", "be contiguous", pre.sym_strides());
    const Call call{
        kBackward,
        x,
        gate_up,
        down,
        value_or_undefined(index),
        value_or_undefined(weight),
        {},
        value_or_undefined(down_bias),
        {value_or_undefined(gate_up_a), value_or_undefined(gate_up_b)},
        {value_or_undefined(down_a), value_or_undefined(down_b)},
        {options...}};
    check(call);
    core::check_same(kBackward, "dout", dout, "x", x);
    check_like_x(kBackward, "pre", pre, x);
    check_shape(kBackward, "pre", pre, "[pairs, 2 inner]", {pairs_of(call), gate_up_columns(call)});
    check_shape(kBackward, "t", t, "[pairs, rank]", {pairs_of(call), call.gate_up_adapters.rank()});
    check_shape(kBackward, "routing", routing, "of the routing data", {Routing::size(call)});
    const Saved saved{pre.contiguous(), t.contiguous()};
    const Tensor dpre = kOverwrites ? pre : gradient_like(saved.pre);
    return Device::backward(call, dout, routing.contiguous(), saved, dpre, wanted_of(wanted)).all();
  }
};

// ---- The operators

/// What both have in common. kRouted: with index and weight, whose gradient alone reads down_bias.
template <class Op, class Type, bool kRouted>
struct ExpertsOperator : core::Operator<Op, Type> {
  using Forward = Results;
  using Cpu = moe_experts::Cpu;
  using Cuda = moe_experts::Cuda;
  using Meta = moe_experts::Meta;

  template <class AnyNode>
  static core::variable_list backward(AnyNode& node, core::variable_list&& grads) {
    const Tensor dout = std::move(grads[0]);
    if (!dout.defined()) return core::variable_list(Op::Edges::size());
    size_t next = 0;
    auto take = [&] { return node.take(next++); };
    auto take_optional = [&](bool is_saved = true) {
      const Tensor t = is_saved ? take() : Tensor();
      return t.defined() ? OptionalTensor(t) : std::nullopt;
    };
    const Tensor x = take(), gate_up = take(), down = take();
    const OptionalTensor index = take_optional(kRouted), weight = take_optional(kRouted),
                         down_bias = take_optional(kRouted), gate_up_a = take_optional(), gate_up_b = take_optional(),
                         down_a = take_optional(), down_b = take_optional();
    Tensor pre = take();
    const Tensor routing = take(), t = take();
    int64_t wanted = node.wanted();
    // The fourth gradient is that of the weights.
    if constexpr (!kRouted) wanted = (wanted & 7) | (wanted >> 3 << 4);
    auto call = [&](const auto&... options) {
      auto with = [&](auto& scratch) {
        return Backward<decltype(scratch)>::call(
            dout, x, gate_up, down, index, weight, down_bias, gate_up_a, gate_up_b, down_a, down_b, scratch, routing, t,
            wanted, options...);
      };
      return pre.is_contiguous() && node.may_overwrite(pre, pre) ? with(pre) : with(std::as_const(pre));
    };
    auto listed = [](const auto&... each) { return core::variable_list{each...}; };
    if constexpr (kRouted) {
      return std::apply(listed, std::apply(call, node.options));
    } else {
      const auto& [activation, interleaved, transposed, limit, alpha, up_offset, gate_up_scale, down_scale] =
          node.options;
      auto found = std::apply(
          listed, call(activation, interleaved, transposed, limit, alpha, up_offset, false, gate_up_scale, down_scale));
      found.erase(found.begin() + 3);
      return found;
    }
  }
};

struct MoeExperts : ExpertsOperator<
                        MoeExperts,
                        Tensor(
                            const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                            const OptionalTensor&, const OptionalTensor&, c10::string_view, bool, bool,
                            std::optional<double>, double, double, bool, const OptionalTensor&, const OptionalTensor&,
                            const OptionalTensor&, const OptionalTensor&, double, double),
                        true> {
  static constexpr const char* kOp = moe_experts::kOp;
  static constexpr const char* kSchema = schemas::moe_experts;
  using Edges = core::Positions<0, 1, 2, 4, 5, 6, 14, 15, 16, 17>;
  // x, gate_up, down, index, weight, down_bias, adapters, pre, routing, t
  using Saves = core::Saves<
      core::Argument<0>, core::Argument<1>, core::Argument<2>, core::Argument<3>, core::Argument<4>, core::Argument<6>,
      core::Argument<14>, core::Argument<15>, core::Argument<16>, core::Argument<17>, core::Result<1>, core::Result<2>,
      core::Result<3>>;
  using Privates = core::Privates<Backward<const Tensor&>, Backward<Tensor&>>;

  template <class Device, class... A>
  static Results run(bool save, const A&... a) {
    return run_experts<Device>(kOp, save, a...);
  }

  // As a linear layer. The routing weights stay as they are, unless they are wider than fp32.
  struct Autocast : core::AutocastLinear<0, 1, 2, 5, 6, 14, 15, 16, 17> {
    template <class Arguments>
    static void cast(c10::DeviceType device, Arguments& arguments) {
      AutocastLinear::cast(device, arguments);
      Tensor& weight = std::get<4>(arguments);
      if (weight.scalar_type() != std::get<0>(arguments).scalar_type()) weight = weight.to(at::kFloat);
    }
  };
};

/// Without weight_before, because there are no weights.
struct MoeExpertsSorted
    : ExpertsOperator<
          MoeExpertsSorted,
          Tensor(
              const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
              c10::string_view, bool, bool, std::optional<double>, double, double, const OptionalTensor&,
              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, double, double),
          false> {
  static constexpr const char* kOp = kSortedOp;
  static constexpr const char* kSchema = schemas::moe_experts_sorted;
  using Edges = core::Positions<0, 1, 2, 4, 5, 12, 13, 14, 15>;
  // x, gate_up, down, adapters, pre, routing, t
  using Saves = core::Saves<
      core::Argument<0>, core::Argument<1>, core::Argument<2>, core::Argument<12>, core::Argument<13>,
      core::Argument<14>, core::Argument<15>, core::Result<1>, core::Result<2>, core::Result<3>>;
  using Autocast = core::AutocastLinear<0, 1, 2, 4, 5, 12, 13, 14, 15>;

  template <class Device, class... A>
  static Results run(
      bool save, const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& tokens_per_expert,
      const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias, c10::string_view activation,
      bool interleaved, bool transposed, std::optional<double> limit, double alpha, double up_offset,
      const A&... adapters_and_scales) {
    return run_experts<Device>(
        kOp, save, x, gate_up, down, tokens_per_expert, std::nullopt, gate_up_bias, down_bias, activation, interleaved,
        transposed, limit, alpha, up_offset, false, adapters_and_scales...);
  }
};

}  // namespace

LIGER_OPERATOR(MoeExperts)
LIGER_OPERATOR(MoeExpertsSorted)

}  // namespace liger::ops::moe_experts
