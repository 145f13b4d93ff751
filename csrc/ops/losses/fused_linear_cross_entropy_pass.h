#pragma once

// The loop over chunks of tokens of fused_linear_cross_entropy, on CPU and CUDA.
//
// M tokens, H hidden, V classes. A chunk of T tokens takes three GEMMs (logits, d input, d weight). Between them, the
// rows of cross_entropy overwrite the buffer of T x V logits with its gradient. The logits-free path skips these rows,
// see exponentials.h.
// Small chunks make GEMMs slow, and each chunk reads and writes d weight once. Large chunks take more memory.

#include "gemm/multiply.h"
#include "ops/losses/exponentials.h"
#include "ops/losses/fused_linear_cross_entropy.h"

namespace liger::ops::fused_linear_cross_entropy {

/// One call's state while it loops over the chunks.
template <class Rows>
struct Pass {
  // Multiplications of a call that keeps an H200 busy for some 13 ms.
  static constexpr double kSustainedMultiplications = double(int64_t(1) << 42);

  Rows rows;
  const Tensor x, weight, bias;  // x: (M, H)
  const double logits_scale;
  Plan plan;
  const bool sustained;
  Gradients into;
  double shrink = 1;  // scale of d weight and d bias
  Tensor bias_sum, taken;

  Pass(
      const char* op, const Tensor& x_in, const Tensor& weight_in, const Tensor& target, const Tensor& bias_in,
      const Tensor& ce_weight, const Settings& s, Wanted wanted, const Gradients& gradients)
      : rows(op, weight_in.size(0), target.reshape(-1), ce_weight, s.o),
        x(x_in),
        weight(weight_in),
        bias(bias_in),
        logits_scale(s.logits_scale),
        plan(make_plan(op, x_in.size(0), weight_in.size(0), x_in.scalar_type(), wanted, s.memory_budget)),
        sustained(3.0 * double(x_in.numel()) * double(weight_in.size(0)) >= kSustainedMultiplications),
        into(gradients) {
    auto floats = x.options().dtype(compute_type(x));
    if (into.input.defined()) into.input = into.input.view({x.size(0), x.size(1)});
    if (into.bias.defined()) bias_sum = at::zeros({weight.size(0)}, floats);
    if (into.weight.defined() && plan.chunks == 0) into.weight.zero_();
    if (into.weight.defined() && takes_targets(x.scalar_type(), plan.chunks, wanted)) {
      taken = at::empty({x.size(0)}, floats);
    }
  }

  Tensor buffer() const { return at::empty({std::min(plan.chunk, x.size(0)), plan.row}, x.options()); }

  /// The part of the buffer for the logits of the tokens from `first` on.
  Tensor rows_of(const Tensor& buffer, int64_t first) const {
    const int64_t rows = std::min(plan.chunk, x.size(0) - first), classes = weight.size(0);
    // On CPU, rows must have no gaps: on CPUs with AMX, oneDNN's GEMM (torch 2.13) reads the uninitialised gaps.
    // On CUDA with a bias, rows have no gaps if classes are a multiple of 8. With gaps, ATen would add the bias after
    // rounding.
    const bool dense = x.is_cpu() || (bias.defined() && classes % 8 == 0);
    if (dense) return buffer.flatten().narrow(0, 0, rows * classes).view({rows, classes});
    return buffer.narrow(0, 0, rows).narrow(1, 0, classes);
  }

  Tensor logits(const Tensor& buffer, int64_t first) const {
    Tensor out = rows_of(buffer, first), part = x.narrow(0, first, out.size(0));
    if (bias.defined()) {
      at::addmm_out(out, bias, part, weight.t(), logits_scale, logits_scale);
    } else {
      gemm::multiply(out, part, weight.t(), 0, logits_scale, sustained);
    }
    return out;
  }

  /// Adds a chunk's gradients, computed from its d logits. Overwrites dlogits.
  void add(Tensor& dlogits, int64_t first) {
    const int64_t count = dlogits.size(0);
    if (into.input.defined()) {
      gemm::multiply(into.input.narrow(0, first, count), dlogits, weight, 0, logits_scale, sustained);
    }
    if (bias_sum.defined()) bias_sum.add_(dlogits.sum(0, false, bias_sum.scalar_type()), logits_scale * shrink);
    if (!into.weight.defined()) return;
    if (taken.defined()) rows.take_targets(dlogits, first, taken);
    gemm::multiply(into.weight, dlogits.t(), x.narrow(0, first, count), first > 0, logits_scale * shrink, sustained);
  }

  /// The same on the logits-free path. d input doubles as scratch space: first for the sums, then for the weighed
  /// tokens.
  void add_exponentials(
      const Exponentials& by, const Tensor& buffer, int64_t first, const RowsOut& out, const Tensor& totals,
      const Tensor& grad) {
    Tensor e = rows_of(buffer, first);
    if (!into.input.defined()) return by.compute(e, {}, first, out, {}, {}, {}, false);
    Tensor dx = into.input.narrow(0, first, e.size(0));
    by.compute(e, dx, first, out, totals, grad, taken, into.weight.defined());
    if (into.weight.defined()) gemm::multiply(into.weight, e.t(), dx, first > 0, logits_scale * shrink, sustained);
    gemm::multiply(dx, e, weight, 0, logits_scale, sustained);
    by.rescale(dx, first, taken);
  }

  void finish() {
    if (taken.defined()) rows.add_targets(into.weight, x, taken, logits_scale * shrink);
    if (bias_sum.defined()) into.bias.copy_(bias_sum);
  }
};

/// Tokens as rows of unit stride, which GEMMs and our kernels require.
inline Tensor as_rows(const Tensor& input) {
  Tensor x = as_matrix(input);
  return x.stride(1) == 1 || x.size(1) == 1 ? x : x.contiguous();
}

inline Tensor rows_of_token_weight(const Settings& s, const Tensor& input) {
  if (!s.token_weight || !s.token_weight->defined()) return Tensor();
  return s.token_weight->reshape(-1).to(compute_type(input)).contiguous();
}

/// True if the call allows the logits-free path: it requests only the loss and gradients. If it requests any gradient,
/// it must request that of input, because d input doubles as scratch space.
inline bool allows_logits_free_path(const Settings& s, const Tensor& bias, const Wanted& wanted) {
  const bool extras = bias.defined() || s.o.label_smoothing != 0 || s.o.softcap || wanted.metrics || wanted.log_probs;
  const bool made_now = wanted.any_gradient() ? s.o.reduced() && wanted.input : true;
  return made_now && !extras && s.logits_scale > 0;
}

template <class Rows>
Forward forward(
    const char* op, const Tensor& input, const Tensor& weight, const Tensor& target, const Tensor& bias,
    const Tensor& ce_weight, const Settings& s, Wanted wanted) {
  c10::DeviceGuard guard(input.device());
  const Options& o = s.o;
  Forward out = empty_forward(input, weight, target, bias, s, wanted);
  Tensor token_weight = rows_of_token_weight(s, input);
  Pass<Rows> pass(op, as_rows(input), weight, target, bias, ce_weight, s, wanted, out.gradients);
  const int64_t tokens = pass.x.size(0);
  const bool now = wanted.any_gradient() && o.reduced();
  const size_t element = out.rows.loss.element_size();
  RowBuffers rows(out.rows, tokens, o, {wanted.metrics, false});
  Tensor totals = out.rows.totals;
  if (o.mean() && (now || totals.defined())) {
    if (!totals.defined()) totals = at::empty({2}, out.rows.loss.options());
    pass.rows.count(totals);
  }
  const Tensor counted = totals;
  if (out.deferred_scale.defined()) {
    int64_t halvings = 0;
    while ((int64_t(1) << (2 * halvings)) < tokens) ++halvings;
    pass.shrink = std::ldexp(1.0, -int(halvings));
    Tensor grow = at::empty_like(out.deferred_scale);
    grow.select(0, 0).fill_(1);
    grow.select(0, 1).fill_(std::ldexp(1.0, int(halvings)));
    if (o.mean()) {
      // Without any target, gradients are 0 and not 0 / 0.
      Tensor by = totals.select(0, 0), inverse = at::where(by == 0, at::zeros_like(by), by.reciprocal());
      out.deferred_scale.copy_(grow * inverse);
      // Both totals are now relative to the first, which is 1.
      totals = totals * inverse;
    } else {
      out.deferred_scale.copy_(grow);
    }
  }
  Tensor buffer = pass.buffer(), scratch_stats;
  std::optional<Exponentials> exponentials;
  // Without gradients, the plan's memory includes the sums.
  const bool has_room = !s.memory_budget || !now;
  if (allows_logits_free_path(s, bias, wanted) && Exponentials::applies(pass.x, weight, pass.plan.chunk, has_room)) {
    exponentials.emplace(op, pass.x, weight, target.reshape(-1), ce_weight, o, s.logits_scale, buffer.size(0), now);
  }
  const bool describe = wanted.log_probs;
  if (describe && !rows.out.stats) {
    scratch_stats = at::empty({3, buffer.size(0)}, out.rows.loss.options());
  }
  auto at_token = [&](const Tensor& t, int64_t first) {
    return static_cast<char*>(t.mutable_data_ptr()) + first * int64_t(element);
  };
  for (int64_t first = 0; first < tokens; first += pass.plan.chunk) {
    RowsOut part = rows.out.from(first, element);
    Tensor weights;
    if (token_weight.defined()) weights = token_weight.narrow(0, first, std::min(pass.plan.chunk, tokens - first));
    if (exponentials) {
      pass.add_exponentials(*exponentials, buffer, first, part, totals, weights);
      continue;
    }
    Tensor logits = pass.logits(buffer, first);
    if (scratch_stats.defined()) part.stats = static_cast<char*>(scratch_stats.mutable_data_ptr());
    Upstream upstream(weights);
    if (now && !describe) {
      pass.rows.forward_backward(logits, first, part, totals, upstream);
    } else {
      pass.rows.forward(logits, first, part);
      if (describe) {
        pass.rows.describe(logits, first, part.stats, at_token(out.log_probs, first), at_token(out.entropy, first));
      }
      if (now) pass.rows.backward(logits, first, part.stats, totals, upstream);
    }
    if (now) pass.add(logits, first);
  }
  if (now) pass.finish();
  if (token_weight.defined()) {
    if (rows.scratch.defined()) {
      rows.scratch.narrow(0, 0, rows.out.z_loss ? 2 : 1).mul_(token_weight);
    } else {
      Tensor each = token_weight.view_as(out.rows.loss);
      out.rows.loss.mul_(each);
      if (out.rows.z_loss.defined()) out.rows.z_loss.mul_(each);
    }
  }
  if (o.reduced()) pass.rows.sum(rows, out.rows, counted);
  return out;
}

/// For reduction="none": computes the logits of each chunk again and applies the incoming gradient of each row.
template <class Rows>
Gradients backward(
    const char* op, const Tensor& grad, const Tensor& input, const Tensor& weight, const Tensor& target,
    const Tensor& bias, const Tensor& ce_weight, const Tensor& stats, const Tensor& totals, const Settings& s,
    Wanted wanted) {
  c10::DeviceGuard guard(input.device());
  LIGER_CHECK(
      grad.sizes().equals(target.sizes()), op, "the gradient", c10::str("have shape ", target.sizes()), grad.sizes());
  Gradients out = empty_gradients(input, weight, bias, wanted);
  Pass<Rows> pass(op, as_rows(input), weight, target, bias, ce_weight, s, wanted, out);
  Tensor incoming = grad.reshape(-1).to(compute_type(input)).contiguous();
  Tensor token_weight = rows_of_token_weight(s, input);
  if (token_weight.defined()) incoming = incoming * token_weight;
  const auto* at = static_cast<const char*>(stats.const_data_ptr());
  Tensor buffer = pass.buffer();
  for (int64_t first = 0; first < pass.x.size(0); first += pass.plan.chunk) {
    Tensor logits = pass.logits(buffer, first);
    const char* stats_of = at + 3 * first * int64_t(stats.element_size());
    pass.rows.backward(logits, first, stats_of, totals, Upstream(incoming.narrow(0, first, logits.size(0))));
    pass.add(logits, first);
  }
  pass.finish();
  return out;
}

}  // namespace liger::ops::fused_linear_cross_entropy
