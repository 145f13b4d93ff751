// moe_experts on CUDA. The kernels and what they compute: liger_ops/kernels/moe/{moe_experts,moe_rows,moe_adapters}.py.

#include "ops/moe/moe_experts_kernels.h"

namespace liger::ops::moe_experts {
namespace {

// ---- Products

/// act (pairs, I). saved: null, or receives the product (pairs, 2 I).
Tensor up_product(const Kernels& k, const Tensor& x, Tensor* saved, const Tensor& bias, const Step& step) {
  const Options& o = k.call.options;
  const Tensor w = with_rows(k.call.gate_up);
  const int32_t common_flags = k.gate_flags() | (bias.defined() ? flags::HAS_BIAS : 0);
  using K = kernels::moe_experts_up;
  K::Args args{
      .x = address(x),
      .gate_up = address(w),
      .bias = address(bias),
      .x_row = x.stride(0),
      .w_expert = w.stride(0),
      .w_row = w.stride(1),
      .flags = common_flags | (saved ? flags::SAVES_PRE : 0),
      .v = address(step.v),
      .packed = address(step.packed),
      .padded = step.ranks()};
  k.complete(args);
  Tensor act, pre;
  if (k.can_group(K::is_aligned(args)) && k.has_many_rows() && k.inner >= kWide) {
    pre = k.group(k.gather(x), columns_last(w, o.transposed));
    add_step(k, pre, step);
    act = at::empty({k.pairs, k.inner}, x.options());
    k.start_act<kernels::moe_experts_act>(
        {.act = address(act), .pre = address(pre), .bias = address(bias), .flags = common_flags});
    if (saved) *saved = pre;
    return act;
  }
  act = at::empty({k.pairs, k.inner}, x.options());
  if (saved) *saved = pre = at::empty({k.pairs, 2 * k.inner}, x.options());
  args.act = address(act);
  args.pre = address(pre);
  const int layout = !o.transposed ? flags::SUM_FIRST : o.interleaved ? flags::COLUMNS_FIRST : flags::HALVES_APART;
  auto programs = [&](const auto& config) { return k.tiles * ceil_div(k.inner, config.BLOCK_N / 2); };
  k.start_product<K, kernels::moe_experts_up_hopper>(step.ranks(), args, programs, layout, k.gate());
  return act;
}

/// (pairs, H) = a (pairs, depth) times each expert's matrix, of which a dimension is H and the other is summed. Sorted
/// rows beyond those of the experts are 0.
template <class Hopper>
Tensor rows_product(
    const Kernels& k, const Tensor& a, const Tensor& weights, bool sum_first, const Tensor& bias, const Step& step) {
  const Tensor w = with_rows(weights);
  using K = kernels::moe_experts_rows;
  K::Args args{
      .a = address(a),
      .w = address(w),
      .bias = address(bias),
      .depth = int32_t(a.size(1)),
      .n = k.hidden,
      .w_expert = w.stride(0),
      .w_row = w.stride(1),
      .flags = bias.defined() ? flags::HAS_BIAS : 0,
      .v = address(step.v),
      .packed = address(step.packed),
      .padded = step.ranks()};
  k.complete(args);
  if (k.can_group(K::is_aligned(args)) && k.has_many_rows() && !bias.defined()) {
    Tensor out = k.group(a, columns_last(w, !sum_first));
    add_step(k, out, step);
    if (k.call.is_sorted()) {
      k.start<kernels::moe_experts_clear_rest>(
          k.hidden, {.rows = address(out), .n = k.hidden},
          [&](const auto& config) { return ceil_div(k.pairs, config.BLOCK_M); });
    }
    return out;
  }
  const auto& options = k.call.x.options();
  Tensor out = k.call.is_sorted() ? at::zeros({k.pairs, k.hidden}, options) : at::empty({k.pairs, k.hidden}, options);
  args.out = address(out);
  auto programs = [&](const auto& config) { return k.tiles * ceil_div(k.hidden, config.BLOCK_N); };
  const int layout = sum_first ? flags::SUM_FIRST : flags::COLUMNS_FIRST;
  k.start_product<K, Hopper>(step.ranks(), args, programs, layout);
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
  const int32_t all_flags = k.gate_flags() | (k.weight.defined() ? flags::HAS_WEIGHT : 0) |
      (wants_act ? flags::SAVES_ACT : 0) | (wants_weight ? flags::WANTS_WEIGHT : 0);
  using K = kernels::moe_experts_act_bwd;
  K::Args args{
      .dpre = address(dpre),
      .pre = address(pre),
      .dout = address(dout),
      .down = address(w),
      .dout_row = dout.stride(0),
      .w_expert = w.stride(0),
      .w_row = w.stride(1),
      .flags = all_flags,
      .v = address(step.v),
      .packed = address(step.packed),
      .padded = step.ranks()};
  k.complete(args);
  Tensor act, shares;
  auto empty_shares = [&](int64_t columns) {
    if (wants_weight) shares = at::empty({columns, k.pairs}, k.call.x.options().dtype(at::kFloat));
  };
  if (k.can_group(K::is_aligned(args)) && k.has_many_rows()) {
    act = k.group(douts.gathered(k), columns_last(w, !k.call.options.transposed));
    add_step(k, act, step);
    using Rows = kernels::moe_experts_act_rows_bwd;
    empty_shares(ceil_div(k.inner, core::choose<Rows>(k.inner, {}, k.act_point<Rows>()).config.BLOCK_N));
    k.start_act<Rows>(
        {.dpre = address(dpre),
         .act = address(act),
         .shares = address(shares),
         .pre = address(pre),
         .dact = address(act),
         .flags = all_flags});
    return {act, shares};
  }
  if (wants_act) act = at::empty({k.pairs, k.inner}, k.call.x.options());
  args.act = address(act);
  auto programs = [&](const auto& config) {
    const int64_t columns = ceil_div(k.inner, config.BLOCK_N);
    empty_shares(columns);
    args.shares = address(shares);
    return k.tiles * columns;
  };
  const int layout = k.call.options.transposed ? flags::SUM_FIRST : flags::COLUMNS_FIRST;
  k.start_product<K, kernels::moe_experts_act_bwd_hopper>(step.ranks(), args, programs, layout, k.gate());
  return {act, shares};
}

/// (E, m, n): of every expert, the sum over its rows of left^T right. tokens (T, .): one of the two; by_row (pairs, .):
/// the other.
template <class Hopper>
Tensor weights_product(const Kernels& k, const Tensor& like, ByToken& tokens, const Tensor& by_row, bool token_left) {
  const Tensor &left = token_left ? tokens.tokens : by_row, &right = token_left ? by_row : tokens.tokens;
  const int64_t m = like.size(1), n = like.size(2);
  using K = kernels::moe_experts_weights;
  K::Args args{
      .left = address(left),
      .right = address(right),
      .m = int32_t(m),
      .n = int32_t(n),
      .left_row = left.stride(0),
      .right_row = right.stride(0)};
  k.complete(args);
  if (k.can_group(K::is_aligned(args))) {
    const Tensor& rows = tokens.gathered(k);
    return token_left ? k.group(rows.t(), by_row) : k.group(by_row.t(), rows);
  }
  Tensor out = gradient_like(like);
  args.out = address(out);
  auto programs = [&](const auto& config) {
    return k.experts * ceil_div(m, config.BLOCK_M) * ceil_div(n, config.BLOCK_N);
  };
  k.start_product<K, Hopper>(0, args, programs, int(token_left));
  return out;
}

/// (T, H): the sum of each token's rows. Sorted rows are their tokens' already.
Tensor combine(const Kernels& k, const Tensor& rows, bool weighted) {
  if (k.call.is_sorted()) return rows;
  using K = kernels::moe_experts_combine;
  Tensor out = at::empty({k.call.tokens(), k.hidden}, rows.options());
  k.start<K>(
      k.hidden, {.out = address(out), .rows = address(rows), .n = k.hidden, .flags = weighted ? flags::HAS_WEIGHT : 0},
      [&](const auto& config) { return k.call.tokens() * ceil_div(k.hidden, config.BLOCK_N); },
      runtime::point_of<K>(K::dtype(core::dtype_of(rows))));
  return out;
}

/// (E, n): sums over each expert's rows, or over the weighted rows of their tokens.
Tensor bias_gradient(const Kernels& k, const Tensor& rows, bool of_tokens, bool weighted) {
  using K = kernels::moe_experts_bias_bwd;
  const auto n = int32_t(rows.size(1));
  Tensor out = at::empty({k.experts, n}, rows.options().dtype(at::kFloat));
  k.start<K>(
      n,
      {.dbias = address(out),
       .rows = address(rows),
       .n = n,
       .rows_row = rows.stride(0),
       .flags = (of_tokens ? flags::GATHERS : 0) | (weighted ? flags::HAS_WEIGHT : 0)},
      [&](const auto& config) { return k.experts * ceil_div(n, config.BLOCK_N); },
      runtime::point_of<K>(K::dtype(core::dtype_of(rows))));
  return out.to(rows.scalar_type());
}

Tensor weight_gradient(const Kernels& k, const Tensor& shares, const Tensor& dout, const Tensor& index) {
  using K = kernels::moe_experts_route_bwd;
  const Tensor bias = k.call.options.weight_before ? Tensor() : fp32_or_undefined(k.call.down_bias);
  Tensor out = at::empty({k.call.tokens(), k.choices}, k.weight.options());
  k.start<K>(
      1,
      {.dweight = address(out),
       .shares = address(shares),
       .dout = address(dout),
       .bias = address(bias),
       .index = address(index),
       .dout_row = dout.stride(0),
       .tiles = int32_t(shares.size(0)),
       .words = words_of(index),
       .flags = bias.defined() ? flags::HAS_BIAS : 0},
      [&](const auto& config) { return ceil_div(k.pairs, config.BLOCK_P); },
      runtime::point_of<K>(K::dtype(core::dtype_of(dout))));
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
    const Wanted& wants) {
  c10::DeviceGuard guard(call.x.device());
  if (call.is_empty()) return new_gradients(call, wants, true);
  const Options& o = call.options;
  const auto &first = call.gate_up_adapters, &second = call.down_adapters;
  const Routing parts(routing.contiguous(), call.pairs(), call.experts());
  const Kernels k(call, parts);
  const Tensor pre = saved.pre.contiguous();
  const bool weighted = !call.is_sorted() && !o.weight_before;
  Gradients out;
  // All gradients but that of down_bias need the gradient of act.
  Wanted others = wants;
  others.down_bias = false;
  // Large buffers live as briefly as possible: the rows of d out, of act and of d x are gone before d gate_up exists.
  if (std::apply([](auto... each) { return (each || ...); }, others.all())) {
    ByToken dout{rows_of(dout_given)};
    Narrow u;
    Step step;
    if (has_ranks(second)) {
      u = narrow(k, dout.tokens, second.b, o.down_scale, true);
      step = {u.v, pack(k, by_feature(second.a), dout.tokens.scalar_type())};
    }
    const auto [act, shares] =
        act_backward(k, dout, pre, dpre, wants.down || wants.down_a || wants.down_b, wants.weight, step);
    step = Step();
    if (wants.weight) out.weight = weight_gradient(k, shares, dout.tokens, call.index.contiguous());
    if (wants.down) {
      out.down = weights_product<kernels::moe_experts_weights_down_hopper>(k, call.down, dout, act, !o.transposed);
    }
    if (wants.down_a) {
      out.down_a = adapter_gradient(second.a);
      sum_products(k, by_feature(out.down_a), act, u.t, false);
    }
    if (wants.down_b) {
      out.down_b = adapter_gradient(second.b);
      const Narrow t = has_ranks(second) ? narrow(k, act, by_feature(second.a), o.down_scale, false) : Narrow();
      sum_products(k, out.down_b, dout.tokens, t.t, true);
    }
  }
  if (wants.down_bias) out.down_bias = bias_gradient(k, rows_of(dout_given), true, weighted);
  if (wants.gate_up_bias) out.gate_up_bias = bias_gradient(k, dpre, false, false);
  Narrow u;
  if (has_ranks(first) && (wants.x || wants.gate_up_a)) u = narrow(k, dpre, first.b, o.gate_up_scale, false);
  if (wants.gate_up_b) {
    out.gate_up_b = adapter_gradient(first.b);
    sum_products(k, out.gate_up_b, dpre, saved.t.contiguous(), false);
  }
  if (wants.gate_up_a) {
    out.gate_up_a = adapter_gradient(first.a);
    sum_products(k, by_feature(out.gate_up_a), rows_of(call.x), u.t, true);
  }
  if (wants.x) {
    Step step;
    if (has_ranks(first)) step = {u.v, pack(k, by_feature(first.a), call.x.scalar_type())};
    const Tensor rows =
        rows_product<kernels::moe_experts_rows_bwd_hopper>(k, dpre, call.gate_up, o.transposed, {}, step);
    out.x = combine(k, rows, false);
  }
  if (wants.gate_up) {
    ByToken x{rows_of(call.x)};
    out.gate_up = weights_product<kernels::moe_experts_weights_gate_up_hopper>(k, call.gate_up, x, dpre, o.transposed);
  }
  return out;
}

}  // namespace liger::ops::moe_experts
