// moe_experts on CUDA. The kernels and what they compute: liger_ops/kernels/moe/{moe_experts,moe_rows,moe_adapters}.py.

#include "ops/moe/moe_experts_kernels.h"

namespace liger::ops::moe_experts {
namespace {

// ---- Products

/// act (pairs, I). saved: null, or receives the product (pairs, 2 I).
Tensor up_product(const Kernels& k, const Tensor& x, Tensor* saved, const Tensor& bias, const Step& step) {
  const Options& o = k.call.options;
  const Tensor w = with_rows(k.call.gate_up);
  const bool aligned = multiples_of_8(k.hidden, k.inner, x.stride(0), w.stride(0), w.stride(1)) &&
      core::aligned16(address(x), address(w));
  Tensor act, pre;
  if (k.can_group(aligned) && k.has_many_rows() && k.inner >= kWide) {
    pre = k.group(k.gather(x), columns_last(w, o.transposed));
    add_step(k, pre, step);
    act = at::empty({k.pairs, k.inner}, x.options());
    kernels::moe_experts_act::Args args{};
    args.act = address(act);
    args.pre = address(pre);
    args.bias = address(bias);
    args.weight = address(k.weight);
    args.offsets = address(k.routing.offsets);
    args.tiles = address(k.routing.tiles);
    args.order = address(k.routing.order);
    args.inner = k.inner;
    k.set_gate(args);
    args.flags = k.gate_flags() | (bias.defined() ? flags::HAS_BIAS : 0);
    k.start_act<kernels::moe_experts_act>(args);
    if (saved) *saved = pre;
    return act;
  }
  act = at::empty({k.pairs, k.inner}, x.options());
  if (saved) *saved = pre = at::empty({k.pairs, 2 * k.inner}, x.options());
  const int layout = !o.transposed ? flags::SUM_FIRST : o.interleaved ? flags::COLUMNS_FIRST : flags::HALVES_APART;
  auto run = [&](auto kernel, const auto& config, uint32_t variant) {
    using K = decltype(kernel);
    typename K::Args args{};
    args.act = address(act);
    args.pre = address(pre);
    args.x = address(x);
    args.gate_up = address(w);
    args.bias = address(bias);
    args.weight = address(k.weight);
    k.set_routing(args);
    args.tokens = address(k.routing.tokens);
    args.order = address(k.routing.order);
    args.hidden = k.hidden;
    args.inner = k.inner;
    args.x_row = x.stride(0);
    k.set_weights(args, w);
    k.set_gate(args);
    k.set_step(args, step);
    args.flags = k.gate_flags() | (bias.defined() ? flags::HAS_BIAS : 0) | (pre.defined() ? flags::SAVES_PRE : 0);
    k.start<K>(variant, k.tiles * ceil_div(k.inner, config.BLOCK_N / 2), args);
  };
  k.choose<kernels::moe_experts_up, kernels::moe_experts_up_hopper>(step.ranks(), aligned, run, layout, k.gate());
  return act;
}

/// (pairs, H) = a (pairs, depth) times each expert's matrix, of which a dimension is H and the other is summed. Sorted
/// rows beyond those of the experts are 0.
template <class Hopper>
Tensor rows_product(
    const Kernels& k, const Tensor& a, const Tensor& weights, bool sum_first, const Tensor& bias, const Step& step) {
  const Tensor w = with_rows(weights);
  const bool aligned =
      multiples_of_8(k.hidden, a.size(1), w.stride(0), w.stride(1)) && core::aligned16(address(a), address(w));
  if (k.can_group(aligned) && k.has_many_rows() && !bias.defined()) {
    Tensor out = k.group(a, columns_last(w, !sum_first));
    add_step(k, out, step);
    if (k.call.is_sorted()) {
      using K = kernels::moe_experts_clear_rest;
      const auto& config = runtime::first_fit<K>(k.hidden, true);
      k.start<K>(
          runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(core::dtype_of(out)))),
          ceil_div(k.pairs, config.BLOCK_M), {address(out), address(k.routing.offsets), k.experts, k.pairs, k.hidden});
    }
    return out;
  }
  const auto& options = k.call.x.options();
  Tensor out = k.call.is_sorted() ? at::zeros({k.pairs, k.hidden}, options) : at::empty({k.pairs, k.hidden}, options);
  auto run = [&](auto kernel, const auto& config, uint32_t variant) {
    using K = decltype(kernel);
    typename K::Args args{};
    args.out = address(out);
    args.a = address(a);
    args.w = address(w);
    args.bias = address(bias);
    k.set_routing(args);
    args.depth = int32_t(a.size(1));
    args.n = int32_t(out.size(1));
    k.set_weights(args, w);
    k.set_step(args, step);
    args.flags = bias.defined() ? flags::HAS_BIAS : 0;
    k.start<K>(variant, k.tiles * ceil_div(out.size(1), config.BLOCK_N), args);
  };
  const int layout = sum_first ? flags::SUM_FIRST : flags::COLUMNS_FIRST;
  k.choose<kernels::moe_experts_rows, Hopper>(step.ranks(), aligned, run, layout);
  return out;
}

/// Writes dpre. act: what the gradient of down multiplies d out with; shares: of d weight, (column tiles, pairs). Each
/// if wanted.
struct ActGradients {
  Tensor act, shares;
};

ActGradients act_backward(
    const Kernels& k, ByToken& douts, const Tensor& pre, const Tensor& dpre, bool wants_act, bool wants_weight,
    const Step& step) {
  const Tensor w = with_rows(k.call.down), &dout = douts.tokens;
  const bool aligned = multiples_of_8(k.hidden, k.inner, dout.stride(0), w.stride(0), w.stride(1)) &&
      core::aligned16(address(dout), address(w), address(pre), address(dpre));
  Tensor act, shares;
  auto empty_shares = [&](int64_t columns) {
    if (wants_weight) shares = at::empty({columns, k.pairs}, k.call.x.options().dtype(at::kFloat));
  };
  const int32_t all_flags = k.gate_flags() | (k.weight.defined() ? flags::HAS_WEIGHT : 0) |
      (wants_act ? flags::SAVES_ACT : 0) | (wants_weight ? flags::WANTS_WEIGHT : 0);
  if (k.can_group(aligned) && k.has_many_rows()) {
    act = k.group(douts.gathered(k), columns_last(w, !k.call.options.transposed));
    add_step(k, act, step);
    using K = kernels::moe_experts_act_rows_bwd;
    empty_shares(ceil_div(k.inner, runtime::first_fit<K>(k.inner, true).BLOCK_N));
    K::Args args{};
    args.dpre = address(dpre);
    args.act = args.dact = address(act);
    args.shares = address(shares);
    args.pre = address(pre);
    args.weight = address(k.weight);
    args.offsets = address(k.routing.offsets);
    args.tiles = address(k.routing.tiles);
    args.order = address(k.routing.order);
    args.pairs = k.pairs;
    args.inner = k.inner;
    k.set_gate(args);
    args.flags = all_flags;
    k.start_act<K>(args);
    return {act, shares};
  }
  if (wants_act) act = at::empty({k.pairs, k.inner}, k.call.x.options());
  auto run = [&](auto kernel, const auto& config, uint32_t variant) {
    using K = decltype(kernel);
    const int64_t columns = ceil_div(k.inner, config.BLOCK_N);
    empty_shares(columns);
    typename K::Args args{};
    args.dpre = address(dpre);
    args.act = address(act);
    args.shares = address(shares);
    args.pre = address(pre);
    args.dout = address(dout);
    args.down = address(w);
    args.weight = address(k.weight);
    k.set_routing(args);
    args.tokens = address(k.routing.tokens);
    args.order = address(k.routing.order);
    args.pairs = k.pairs;
    args.hidden = k.hidden;
    args.inner = k.inner;
    args.dout_row = dout.stride(0);
    k.set_weights(args, w);
    k.set_gate(args);
    k.set_step(args, step);
    args.flags = all_flags;
    k.start<K>(variant, k.tiles * columns, args);
  };
  const int layout = k.call.options.transposed ? flags::SUM_FIRST : flags::COLUMNS_FIRST;
  k.choose<kernels::moe_experts_act_bwd, kernels::moe_experts_act_bwd_hopper>(
      step.ranks(), aligned, run, layout, k.gate());
  return {act, shares};
}

/// (E, m, n): of every expert, the sum over its rows of left^T right. tokens (T, .): one of the two; by_row (pairs, .):
/// the other.
template <class Hopper>
Tensor weights_product(const Kernels& k, const Tensor& like, ByToken& tokens, const Tensor& by_row, bool token_left) {
  const Tensor &left = token_left ? tokens.tokens : by_row, &right = token_left ? by_row : tokens.tokens;
  const bool aligned = multiples_of_8(like.size(1), like.size(2), left.stride(0), right.stride(0)) &&
      core::aligned16(address(left), address(right));
  if (k.can_group(aligned)) {
    const Tensor& rows = tokens.gathered(k);
    return token_left ? k.group(rows.t(), by_row) : k.group(by_row.t(), rows);
  }
  Tensor out = gradient_like(like);
  auto run = [&](auto kernel, const auto& config, uint32_t variant) {
    using K = decltype(kernel);
    typename K::Args args{};
    args.out = address(out);
    args.left = address(left);
    args.right = address(right);
    args.offsets = address(k.routing.offsets);
    args.tokens = address(k.routing.tokens);
    args.m = int32_t(out.size(1));
    args.n = int32_t(out.size(2));
    args.left_row = left.stride(0);
    args.right_row = right.stride(0);
    k.start<K>(
        variant, k.experts * ceil_div(out.size(1), config.BLOCK_M) * ceil_div(out.size(2), config.BLOCK_N), args);
  };
  k.choose<kernels::moe_experts_weights, Hopper>(0, aligned, run, int(token_left));
  return out;
}

/// (T, H): the sum of each token's rows. Sorted rows are their tokens' already.
Tensor combine(const Kernels& k, const Tensor& rows, bool weighted) {
  if (k.call.is_sorted()) return rows;
  using K = kernels::moe_experts_combine;
  Tensor out = at::empty({k.call.tokens(), k.hidden}, rows.options());
  const bool aligned = multiples_of_8(k.hidden) && core::aligned16(address(out), address(rows));
  k.start_simple<K>(
      k.hidden, aligned, k.call.tokens(),
      {address(out), address(rows), address(k.routing.position), address(k.weight), k.choices, k.hidden,
       weighted ? flags::HAS_WEIGHT : 0},
      K::dtype(core::dtype_of(rows)));
  return out;
}

/// (E, n): sums over each expert's rows, or over the weighted rows of their tokens.
Tensor bias_gradient(const Kernels& k, const Tensor& rows, bool of_tokens, bool weighted) {
  using K = kernels::moe_experts_bias_bwd;
  const auto n = int32_t(rows.size(1));
  Tensor out = at::empty({k.experts, n}, rows.options().dtype(at::kFloat));
  k.start_simple<K>(
      n, false, k.experts,
      {address(out), address(rows), address(k.routing.offsets), address(k.routing.tokens), address(k.routing.order),
       address(k.weight), n, rows.stride(0), (of_tokens ? flags::GATHERS : 0) | (weighted ? flags::HAS_WEIGHT : 0)},
      K::dtype(core::dtype_of(rows)));
  return out.to(rows.scalar_type());
}

Tensor weight_gradient(const Kernels& k, const Tensor& shares, const Tensor& dout, const Tensor& index) {
  using K = kernels::moe_experts_route_bwd;
  const Tensor bias = k.call.options.weight_before ? Tensor() : fp32_or_undefined(k.call.down_bias);
  Tensor out = at::empty({k.call.tokens(), k.choices}, k.weight.options());
  const auto& config = runtime::first_fit<K>(1, false);
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(dout)));
  k.start<K>(
      runtime::variant_index<K>(config, point), ceil_div(k.pairs, config.BLOCK_P),
      {address(out), address(shares), address(k.routing.position), address(dout), address(bias), address(index),
       k.pairs, k.choices, k.hidden, dout.stride(0), int32_t(shares.size(0)), k.experts, words_of(index),
       bias.defined() ? flags::HAS_BIAS : 0});
  return out.to(k.call.weight.scalar_type());
}

void check_sizes(const Call& call) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  LIGER_CHECK(
      call.pairs() <= kMost && call.hidden() <= kMost && 2 * call.inner() <= kMost, call.op, "x",
      "have fewer than 2^31 rows of experts and columns", call.pairs(), " and ", call.hidden());
  LIGER_CHECK(
      call.experts() <= flags::MAX_EXPERTS, call.op, "gate_up",
      c10::str("have at most ", int(flags::MAX_EXPERTS), " experts on CUDA"), call.experts());
}

}  // namespace

Tensor Cuda::forward(const Call& call, const Tensor& routing, Saved* saved) {
  c10::DeviceGuard guard(call.x.device());
  if (saved) saved->t = empty_t(call);
  if (call.is_empty()) {
    if (saved) saved->pre = empty_pre(call);
    return at::zeros_like(call.x, at::MemoryFormat::Contiguous);
  }
  check_sizes(call);
  const Options& o = call.options;
  const Routing parts(routing, call.pairs(), call.experts());
  const Kernels k(call, parts);
  route(k, call.index.contiguous());
  const Tensor x = rows_of(call.x);
  Step step;
  if (const auto& adapters = call.gate_up_adapters; has_ranks(adapters)) {
    step.v = narrow(k, x, by_feature(adapters.a), o.gate_up_scale, true, saved ? saved->t : Tensor()).v;
    step.packed = pack(k, adapters.b, x.scalar_type());
  }
  Tensor act = up_product(k, x, saved ? &saved->pre : nullptr, fp32_or_undefined(call.gate_up_bias), step);
  step = Step();
  if (const auto& adapters = call.down_adapters; has_ranks(adapters)) {
    step.v = narrow(k, act, by_feature(adapters.a), o.down_scale, false).v;
    step.packed = pack(k, adapters.b, x.scalar_type());
  }
  const Tensor y = rows_product<kernels::moe_experts_rows_hopper>(
      k, act, call.down, !o.transposed, fp32_or_undefined(call.down_bias), step);
  act = Tensor();
  step = Step();
  return combine(k, y, !o.weight_before);
}

Gradients Cuda::backward(
    const Call& call, const Tensor& dout_given, const Tensor& routing, const Saved& saved, const Tensor& dpre,
    int64_t wanted) {
  c10::DeviceGuard guard(call.x.device());
  const Options& o = call.options;
  const auto &first = call.gate_up_adapters, &second = call.down_adapters;
  auto wants = [&](int64_t bits) { return (wanted & bits) != 0; };
  auto zeros = [&](int64_t bit, const Tensor& like) {
    return !wants(bit) ? Tensor() : bit < kGateUpA ? gradient_like(like, true) : adapter_gradient(like, true);
  };
  if (call.is_empty()) {
    auto bias = [&](int64_t bit, int64_t n) {
      return wants(bit) ? at::zeros({call.experts(), n}, call.x.options()) : Tensor();
    };
    return gradients_like(call, zeros, bias(kGateUpBias, 2 * call.inner()), bias(kDownBias, call.hidden()));
  }
  const Routing parts(routing.contiguous(), call.pairs(), call.experts());
  const Kernels k(call, parts);
  const Tensor pre = saved.pre.contiguous();
  const bool weighted = !call.is_sorted() && !o.weight_before;
  Gradients out;
  // Large buffers live as briefly as possible: the rows of d out, of act and of d x are gone before d gate_up exists.
  if (wants(~kDownBias)) {
    ByToken dout{rows_of(dout_given)};
    Narrow u;
    Step step;
    if (has_ranks(second)) {
      u = narrow(k, dout.tokens, second.b, o.down_scale, true);
      step = {u.v, pack(k, by_feature(second.a), dout.tokens.scalar_type())};
    }
    const auto [act, shares] = act_backward(k, dout, pre, dpre, wants(kDown | kDownA | kDownB), wants(kWeight), step);
    step = Step();
    if (wants(kWeight)) out.weight = weight_gradient(k, shares, dout.tokens, call.index.contiguous());
    if (wants(kDown)) {
      out.down = weights_product<kernels::moe_experts_weights_down_hopper>(k, call.down, dout, act, !o.transposed);
    }
    if (wants(kDownA)) {
      out.down_a = adapter_gradient(second.a);
      sum_products(k, by_feature(out.down_a), act, u.t, false);
    }
    if (wants(kDownB)) {
      out.down_b = adapter_gradient(second.b);
      const Narrow t = has_ranks(second) ? narrow(k, act, by_feature(second.a), o.down_scale, false) : Narrow();
      sum_products(k, out.down_b, dout.tokens, t.t, true);
    }
  }
  if (wants(kDownBias)) out.down_bias = bias_gradient(k, rows_of(dout_given), true, weighted);
  if (wants(kGateUpBias)) out.gate_up_bias = bias_gradient(k, dpre, false, false);
  Narrow u;
  if (has_ranks(first) && wants(kX | kGateUpA)) u = narrow(k, dpre, first.b, o.gate_up_scale, false);
  if (wants(kGateUpB)) {
    out.gate_up_b = adapter_gradient(first.b);
    sum_products(k, out.gate_up_b, dpre, saved.t.contiguous(), false);
  }
  if (wants(kGateUpA)) {
    out.gate_up_a = adapter_gradient(first.a);
    sum_products(k, by_feature(out.gate_up_a), rows_of(call.x), u.t, true);
  }
  if (wants(kX)) {
    Step step;
    if (has_ranks(first)) step = {u.v, pack(k, by_feature(first.a), call.x.scalar_type())};
    const Tensor rows =
        rows_product<kernels::moe_experts_rows_bwd_hopper>(k, dpre, call.gate_up, o.transposed, {}, step);
    out.x = combine(k, rows, false);
  }
  if (wants(kGateUp)) {
    ByToken x{rows_of(call.x)};
    out.gate_up = weights_product<kernels::moe_experts_weights_gate_up_hopper>(k, call.gate_up, x, dpre, o.transposed);
  }
  return out;
}

}  // namespace liger::ops::moe_experts
