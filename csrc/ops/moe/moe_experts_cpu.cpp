// moe_experts on CPU: one GEMM per expert and product.

#include "core/cpu/loops.h"
#include "ops/moe/moe_experts.h"

namespace liger::ops::moe_experts {
namespace {

void route(const Call& call, const Routing& r) {
  const int64_t pairs = call.pairs(), experts = call.experts(), choices = call.choices();
  int32_t *offsets = r.offsets.data_ptr<int32_t>(), *tokens = r.tokens.data_ptr<int32_t>();
  int32_t *order = r.order.data_ptr<int32_t>(), *position = r.position.data_ptr<int32_t>();
  const Tensor index = call.index.to(at::kLong).contiguous();
  const int64_t* ids = index.const_data_ptr<int64_t>();
  std::vector<int64_t> next(experts + 1);
  if (call.is_sorted()) {
    for (int64_t e = 0; e < experts; ++e) next[e + 1] = next[e] + ids[e];
  } else {
    for (int64_t i = 0; i < pairs; ++i) {
      if (ids[i] >= 0 && ids[i] < experts) ++next[ids[i] + 1];
    }
    for (int64_t e = 0; e < experts; ++e) next[e + 1] += next[e];
  }
  for (int64_t e = 0; e <= experts; ++e) offsets[e] = int32_t(next[e]);
  // For CUDA: routing data does not depend on the device.
  int32_t *tiles = r.tiles.data_ptr<int32_t>(), *tile = tiles + 1;
  for (int64_t e = 0; e < experts; ++e) {
    for (int64_t row = next[e]; row < next[e + 1]; row += kernels::constants::moe_experts::TILE_ROWS) {
      *tile++ = int32_t(e);
      *tile++ = int32_t(row);
    }
  }
  *tiles = int32_t((tile - tiles) / 2);
  for (int64_t i = 0; i < pairs; ++i) {
    const bool has_expert = call.is_sorted() ? i < offsets[experts] : ids[i] >= 0 && ids[i] < experts;
    const int64_t row = !has_expert ? -1 : call.is_sorted() ? i : next[ids[i]]++;
    position[i] = int32_t(row);
    if (has_expert) {
      order[row] = int32_t(i);
      tokens[row] = int32_t(i / choices);
    }
  }
}

/// The rows of one expert, with its tensors.
struct Expert {
  int64_t index, first, count;
  Tensor tokens, order;
};

template <class F>
void for_each_expert(const Call& call, const Routing& r, const F& f) {
  const int32_t* offsets = r.offsets.const_data_ptr<int32_t>();
  for (int64_t e = 0; e < call.experts(); ++e) {
    const int64_t first = offsets[e], count = offsets[e + 1] - first;
    if (count > 0) f(Expert{e, first, count, r.tokens.narrow(0, first, count), r.order.narrow(0, first, count)});
  }
}

/// (columns, depth) of an expert, as F.linear takes it.
Tensor linear_weight(const Tensor& weights, int64_t expert, bool transposed) {
  Tensor w = weights.select(0, expert);
  return transposed ? w.t() : w;
}

Tensor linear_bias(const Tensor& biases, int64_t expert) {
  return biases.defined() ? biases.select(0, expert) : Tensor();
}

/// (., r) = scale x A^T, in the compute type.
Tensor narrow(const Tensor& x, const Adapters& adapters, int64_t expert, double scale) {
  return at::mm(x, adapters.a.select(0, expert).t().to(x.scalar_type())).mul_(scale);
}

/// The matrix of an adapter, in the dtype of x.
Tensor matrix(const Tensor& adapter, int64_t expert, const Tensor& x) {
  return adapter.select(0, expert).to(x.scalar_type());
}

/// product + t B^T, rounded to the dtype of the product.
Tensor widened(const Tensor& product, const Tensor& t, const Adapters& adapters, int64_t expert) {
  return at::addmm(product.to(t.scalar_type()), t, matrix(adapters.b, expert, t).t()).to(product.scalar_type());
}

struct Halves {
  Tensor gate, up;
};

Halves halves(const Tensor& pre, bool interleaved) {
  const int64_t inner = pre.size(1) / 2;
  if (interleaved) return {pre.slice(1, 0, std::nullopt, 2), pre.slice(1, 1, std::nullopt, 2)};
  return {pre.narrow(1, 0, inner), pre.narrow(1, inner, inner)};
}

struct Activated {
  Tensor value, by_gate, by_up;
};

/// act and, if wanted, its derivatives. gate, up: in the compute type.
Activated activate(const Options& o, const Tensor& gate, const Tensor& up, bool derivatives) {
  const bool clamps = o.limit.has_value();
  const Tensor g = clamps ? gate.clamp_max(*o.limit) : gate;
  const Tensor u = (clamps ? up.clamp(-*o.limit, *o.limit) : up) + o.up_offset;
  const Tensor one = at::ones({}, g.options());
  Tensor f, slope;
  if (o.is_silu()) {
    const Tensor s = at::sigmoid(g * o.alpha);
    f = g * s;
    if (derivatives) slope = s + f * o.alpha * at::sigmoid(g * -o.alpha);
  } else {
    const char* approximate = o.activation == "gelu_tanh" ? "tanh" : "none";
    f = at::gelu(g, approximate);
    if (derivatives) slope = at::gelu_backward(one.expand_as(g), g, approximate);
  }
  Activated out{u * f, {}, {}};
  if (derivatives) {
    out.by_gate = u * slope;
    out.by_up = f;
    if (clamps) {
      out.by_gate = out.by_gate.masked_fill(gate > *o.limit, 0);
      out.by_up = out.by_up.masked_fill(up.abs() > *o.limit, 0);
    }
  }
  return out;
}

/// (T, n): the sum of each token's rows, weighted if the call says so.
Tensor combine(const Call& call, const Routing& r, const Tensor& rows, bool weighted) {
  const auto compute = core::compute_type(rows);
  const Tensor position = r.position.view({call.tokens(), call.choices()});
  Tensor total = at::zeros({call.tokens(), rows.size(1)}, rows.options().dtype(compute));
  for (int64_t k = 0; k < call.choices(); ++k) {
    const Tensor at = position.select(1, k), dropped = at.lt(0).unsqueeze(1);
    Tensor part = rows.index_select(0, at.clamp_min(0)).to(compute);
    if (weighted) part = part * call.weight.select(1, k).to(compute).unsqueeze(1);
    total += part.masked_fill(dropped, 0);
  }
  return total.to(rows.scalar_type());
}

/// (rows, 1): the routing weight of every row, in the compute type. Undefined without weights.
Tensor weights_of(const Call& call, const Expert& expert) {
  if (call.is_sorted()) return {};
  return call.weight.reshape(-1).index_select(0, expert.order).to(core::compute_type(call.x)).unsqueeze(1);
}

Tensor scaled(const Tensor& t, const Tensor& factor) { return factor.defined() ? t * factor : t; }

}  // namespace

Tensor Cpu::forward(const Call& call, const Tensor& routing, Saved* saved) {
  runtime::count_cpu_call();
  const Options& o = call.options;
  const auto &first_adapters = call.gate_up_adapters, &second_adapters = call.down_adapters;
  if (saved) *saved = {empty_pre(call), empty_t(call)};
  if (call.is_empty()) return at::zeros_like(call.x, at::MemoryFormat::Contiguous);
  const Routing r(routing, call.pairs(), call.experts());
  route(call, r);
  Tensor y = at::zeros({call.pairs(), call.hidden()}, call.x.options());
  const auto compute = core::compute_type(call.x);
  for_each_expert(call, r, [&](const Expert& expert) {
    const Tensor rows = call.x.index_select(0, expert.tokens);
    Tensor product = at::linear(
        rows, linear_weight(call.gate_up, expert.index, o.transposed), linear_bias(call.gate_up_bias, expert.index));
    if (first_adapters.present()) {
      const Tensor t = narrow(rows.to(compute), first_adapters, expert.index, o.gate_up_scale);
      product = widened(product, t, first_adapters, expert.index);
      if (saved) saved->t.narrow(0, expert.first, expert.count).copy_(t);
    }
    if (saved) saved->pre.narrow(0, expert.first, expert.count).copy_(product);
    const Tensor first = o.weight_before ? weights_of(call, expert) : Tensor();
    const auto [gate, up] = halves(product, o.interleaved);
    const Tensor act = activate(o, scaled(gate.to(compute), first), scaled(up.to(compute), first), false)
                           .value.to(call.x.scalar_type());
    Tensor out = at::linear(
        act, linear_weight(call.down, expert.index, o.transposed), linear_bias(call.down_bias, expert.index));
    if (second_adapters.present()) {
      const Tensor t = narrow(act.to(compute), second_adapters, expert.index, o.down_scale);
      out = widened(out, t, second_adapters, expert.index);
    }
    y.narrow(0, expert.first, expert.count).copy_(out);
  });
  return combine(call, r, y, !call.is_sorted() && !o.weight_before);
}

Gradients Cpu::backward(
    const Call& call, const Tensor& dout, const Tensor& routing, const Saved& saved, const Tensor& dpre,
    const Wanted& wants) {
  runtime::count_cpu_call();
  const Options& o = call.options;
  const Routing r(routing, call.pairs(), call.experts());
  const auto compute = core::compute_type(call.x), dtype = call.x.scalar_type();
  // Experts without rows keep zeros.
  Gradients out = new_gradients(call, wants, true);
  if (call.is_empty()) return out;
  Tensor dx = wants.x ? at::zeros({call.pairs(), call.hidden()}, call.x.options()) : Tensor();
  const auto &first_adapters = call.gate_up_adapters, &second_adapters = call.down_adapters;
  for_each_expert(call, r, [&](const Expert& expert) {
    const Tensor d = dout.index_select(0, expert.tokens), scale = weights_of(call, expert);
    const Tensor first = o.weight_before ? scale : Tensor(), last = o.weight_before ? Tensor() : scale;
    const Tensor down = linear_weight(call.down, expert.index, o.transposed), wide_d = d.to(compute);
    Tensor dact = at::mm(d, down).to(compute), u;
    if (second_adapters.present()) {
      u = at::mm(wide_d, matrix(second_adapters.b, expert.index, wide_d)).mul_(o.down_scale);
      dact = at::addmm(dact, u, matrix(second_adapters.a, expert.index, u));
    }
    const Tensor pre_rows = saved.pre.narrow(0, expert.first, expert.count).to(compute);
    const auto [gate, up] = halves(pre_rows, o.interleaved);
    const Activated act = activate(o, scaled(gate, first), scaled(up, first), true);
    const Tensor dgate = scaled(dact, last) * act.by_gate, dup = scaled(dact, last) * act.by_up;
    if (out.weight.defined()) {
      Tensor share = (o.weight_before ? dgate * gate + dup * up : dact * act.value).sum(1);
      if (call.down_bias.defined() && !o.weight_before) {
        share += at::mv(wide_d, call.down_bias.select(0, expert.index).to(compute));
      }
      out.weight.view(-1).index_copy_(0, expert.order.to(at::kLong), share.to(out.weight.scalar_type()));
    }
    const Tensor rows = dpre.narrow(0, expert.first, expert.count);
    const auto [to_gate, to_up] = halves(rows, o.interleaved);
    to_gate.copy_(scaled(dgate, first));
    to_up.copy_(scaled(dup, first));
    const Tensor weighted = scaled(act.value, last).to(dtype);
    if (out.down.defined()) {
      Tensor to = linear_weight(out.down, expert.index, o.transposed);
      to.copy_(at::mm(d.t(), weighted));
    }
    if (out.down_a.defined()) out.down_a.select(0, expert.index).copy_(at::mm(u.t(), weighted.to(compute)));
    if (out.down_b.defined()) {
      const Tensor t = narrow(weighted.to(compute), second_adapters, expert.index, o.down_scale);
      out.down_b.select(0, expert.index).copy_(at::mm(wide_d.t(), t));
    }
    if (out.down_bias.defined()) out.down_bias.select(0, expert.index).copy_(scaled(wide_d, last).sum(0));
    const Tensor wide_rows = rows.to(compute);
    if (out.gate_up_bias.defined()) out.gate_up_bias.select(0, expert.index).copy_(wide_rows.sum(0));
    if (out.gate_up.defined()) {
      Tensor to = linear_weight(out.gate_up, expert.index, o.transposed);
      to.copy_(at::mm(rows.t(), call.x.index_select(0, expert.tokens)));
    }
    if (out.gate_up_b.defined()) {
      const Tensor t = saved.t.narrow(0, expert.first, expert.count);
      out.gate_up_b.select(0, expert.index).copy_(at::mm(wide_rows.t(), t));
    }
    if (first_adapters.present() && (dx.defined() || out.gate_up_a.defined())) {
      u = at::mm(wide_rows, matrix(first_adapters.b, expert.index, wide_rows)).mul_(o.gate_up_scale);
    }
    if (out.gate_up_a.defined()) {
      const Tensor x = call.x.index_select(0, expert.tokens).to(compute);
      out.gate_up_a.select(0, expert.index).copy_(at::mm(u.t(), x));
    }
    if (dx.defined()) {
      Tensor product = at::mm(rows, linear_weight(call.gate_up, expert.index, o.transposed));
      if (first_adapters.present()) {
        product = at::addmm(product.to(compute), u, matrix(first_adapters.a, expert.index, u)).to(dtype);
      }
      dx.narrow(0, expert.first, expert.count).copy_(product);
    }
  });
  if (dx.defined()) out.x = combine(call, r, dx, false);
  return out;
}

}  // namespace liger::ops::moe_experts
