#pragma once

// The head of a linear loss: logits of some tokens and classes, and the gradients that follow from those of logits.

#include <array>

#include "core/aten.h"
#include "core/rows/rows.h"
#include "gemm/adapters/low_rank.h"
#include "gemm/multiply.h"
#include "ops/losses/linear/gradients.h"
#include "ops/losses/linear/tokens.h"

namespace liger::ops::linear {

/// The part of a buffer for the logits of `rows` tokens and `classes`.
inline at::Tensor logits_in(const at::Tensor& buffer, int64_t rows, int64_t classes, bool has_bias) {
  // On a CPU, rows must have no gaps: on CPUs with AMX, oneDNN's GEMM (torch 2.13) reads the uninitialised gaps.
  // On CUDA with a bias, rows have no gaps if classes are a multiple of 8. With gaps, ATen would add the bias after
  // rounding.
  const bool dense = !core::runs_kernels(buffer) || (has_bias && classes % 8 == 0);
  if (dense) return buffer.flatten().narrow(0, 0, rows * classes).view({rows, classes});
  return buffer.narrow(0, 0, rows).narrow(1, 0, classes);
}

/// A call's tokens and classes, and how they are divided.
struct Division {
  const char* op;  // its name in messages
  core::Shard shard;
  int64_t tokens;
  Plan plan;
  TokenOrder order;
  at::TensorOptions numbers;  // of statistics and sums

  /// positions: the dimensions of the tokens of all ranks. plan_of(tokens, the most classes of any rank).
  template <class F>
  Division(
      const char* name, const at::Tensor& input, at::IntArrayRef positions, core::Shard part,
      std::optional<int64_t> sequence_dim, const at::TensorOptions& of_numbers, const F& plan_of)
      : op(name),
        shard(std::move(part)),
        tokens(c10::multiply_integers(positions)),
        plan(plan_of(tokens, shard.largest)),
        order(order_of(op, input, positions, tokens, shard, sequence_dim, plan)),
        numbers(of_numbers) {}

  int64_t rows_from(int64_t first) const { return std::min(plan.chunk, tokens - first); }

  /// `each` numbers per token, from the caller's order: (M, each).
  at::Tensor arranged(const at::Tensor& t, int64_t each) const {
    const bool ordered = order.is_split() && t.numel() > 0;
    return (ordered ? order.arrange(t, each) : t).reshape({tokens, each});
  }
  /// One number per token: (M,), contiguous. Undefined if t is.
  at::Tensor arranged(const at::Tensor& t) const { return t.defined() ? order.arrange(t).contiguous() : t; }
};

/// The gradient of an input, chunk by chunk. Over split classes it is a sum over ranks, which runs while the caller
/// goes on.
struct InputGradient {
  at::Tensor all;  // (tokens of this rank, H); undefined: not wanted
  core::Pending reducing;

  bool defined() const { return all.defined(); }

  /// Memory for the gradient of `count` tokens from `first` on. It is complete after reduce() and wait().
  at::Tensor of_chunk(int64_t first, int64_t count, const TokenOrder& order) const {
    return order.is_split() ? at::empty({count, all.size(1)}, all.options()) : all.narrow(0, first, count);
  }

  /// Starts the sum over ranks of what of_chunk() returned.
  void reduce(const at::Tensor& dx, int64_t first, const TokenOrder& order, const core::Shard& shard) {
    if (!shard.is_split()) return;
    reducing.wait();
    if (!order.is_split()) {
      reducing = shard.group->all_reduce(dx);
    } else {
      const int64_t count = dx.size(0) / order.ranks;
      reducing = shard.group->reduce_scatter(all.narrow(0, first / order.ranks, count), dx);
    }
  }

  void wait() { reducing.wait(); }
};

/// Calls f(first class, number of classes, their rows of weight in `wide`), so that no wide copy of the weight exists.
template <class F>
void for_widened_parts(const at::Tensor& weight, at::ScalarType wide, const F& f) {
  constexpr int64_t kBytes = 32 << 20;
  const int64_t n = weight.size(0), row = weight.size(1) * int64_t(c10::elementSize(wide));
  const int64_t step = std::max<int64_t>(1, kBytes / std::max<int64_t>(1, row));
  for (int64_t first = 0; first < n; first += step) {
    const int64_t count = std::min(step, n - first);
    f(first, count, weight.narrow(0, first, count).to(wide));
  }
}

/// into = scale * dlogits @ weight, added to `into` if `add`. into: (T, H), of at least the dtype of dlogits (T, n).
inline void multiply_by_weight(
    at::Tensor into, const at::Tensor& dlogits, const at::Tensor& weight, bool add, double scale, bool sustained) {
  const at::ScalarType wide = into.scalar_type();
  const bool mixed = weight.scalar_type() != dlogits.scalar_type();
  if (dlogits.size(1) == 0) {
    if (!add) into.zero_();
  } else if (!mixed && wide == dlogits.scalar_type()) {
    gemm::multiply(into, dlogits, weight, add, scale, sustained);
  } else if (!mixed && into.is_cuda()) {
    at::addmm_out(into, into, dlogits, weight, wide, double(add), scale);
  } else {
    for_widened_parts(weight, wide, [&](int64_t first, int64_t count, const at::Tensor& w) {
      at::addmm_out(into, into, dlogits.narrow(1, first, count).to(wide), w, double(add || first > 0), scale);
    });
  }
}

/// logits = scale * (x w^T + t b^T + bias), and the gradients of x, w, bias, t and b. The logits may be in a wider
/// dtype than x, and w in a narrower one.
struct Head {
  const Division& division;
  Tokens tokens;
  at::Tensor weight, bias;
  gemm::LowRank low_rank;
  at::Tensor map;  // the rows of weight, bias and b for each class; undefined: in order
  const double scale;
  const bool is_bare;  // logits() leaves out bias and scale, which the loss's rows add in the dtype of statistics
  bool sustained;

  // Gradients
  Gradients into;
  double head_scale = 1;  // a factor of all but those of x and t
  InputGradient dinput;
  at::Tensor bias_sum;
  at::Tensor sum, dx;  // sum: dx over the classes, if wider. dx: of a chunk

  /// gemms: the number of products of this size in the call.
  Head(const Division& of, const HeadTensors& tensors, double logits_scale, double gemms, bool bare = false)
      : division(of),
        tokens(tensors.input, of.tokens, of.order),
        weight(tensors.weight),
        bias(tensors.bias),
        low_rank(of.op, tensors.low_rank_input, tensors.low_rank_weight, tokens.x),
        scale(logits_scale),
        is_bare(bare),
        sustained(gemm::is_sustained(gemms * double(of.tokens) * double(tokens.x.size(1)) * double(weight.size(0)))) {
    if (!bias.defined()) return;
    bias = is_bare ? bias.to(of.numbers.dtype().toScalarType()).contiguous() : bias.to(tokens.x.scalar_type());
  }

  const at::Tensor& x() const { return tokens.x; }
  bool is_mixed() const { return weight.scalar_type() != x().scalar_type(); }
  core::Pending fetch(int64_t first) const {
    return tokens.fetch(first, division.plan.chunk, division.order, division.shard);
  }

  /// The part of `t`, which has a row for each class, for `count` classes from `c` on.
  at::Tensor of_classes(const at::Tensor& t, int64_t c, int64_t count) const {
    if (!t.defined()) return t;
    return map.defined() ? t.index_select(0, map.narrow(0, c, count)) : t.narrow(0, c, count);
  }

  /// out: (T, n), the logits of the tokens from `row` and the classes from `c` on.
  void logits(const at::Tensor& out, int64_t row, int64_t c) const {
    const int64_t count = out.size(1);
    const at::Tensor b = low_rank.defined() ? of_classes(low_rank.b(), c, count) : at::Tensor();
    logits(out, row, of_classes(weight, c, count), b, is_bare ? at::Tensor() : of_classes(bias, c, count));
  }

  /// Of the classes that w, b and of_bias have rows for.
  void logits(
      const at::Tensor& out, int64_t row, const at::Tensor& w, const at::Tensor& b, const at::Tensor& of_bias) const {
    const at::Tensor left = x().narrow(0, row, out.size(0));
    const auto wide = out.scalar_type();
    const bool is_wider = wide != left.scalar_type(), adds = low_rank.defined();
    const double factor = is_bare ? 1 : scale;
    if (adds) low_rank.write(out, row, b, of_bias, factor);
    auto multiply = [&](at::Tensor into, const at::Tensor& l, const at::Tensor& r, const at::Tensor& bias_of) {
      if (!adds && bias_of.defined()) {
        at::addmm_out(into, bias_of, l, r.t(), factor, factor);
      } else {
        gemm::multiply(into, l, r.t(), adds, factor, sustained);
      }
    };
    if (!is_wider && !is_mixed()) return multiply(out, left, w, of_bias);
    if (left.size(1) == 0) {
      if (!adds) of_bias.defined() ? void(out.copy_(of_bias).mul_(factor)) : void(out.zero_());
    } else if (is_wider && !is_mixed() && out.is_cuda()) {
      if (!adds && of_bias.defined()) out.copy_(of_bias);
      const bool has_addend = adds || of_bias.defined();
      if (!has_addend && factor == 1) return void(at::mm_out(const_cast<at::Tensor&>(out), left, w.t(), wide));
      at::Tensor into = out;
      at::addmm_out(into, into, left, w.t(), wide, !has_addend ? 0 : adds ? 1 : factor, factor);
    } else {
      const at::Tensor wide_left = left.to(wide);
      for_widened_parts(w, wide, [&](int64_t from, int64_t count, const at::Tensor& part) {
        const at::Tensor bias_of = of_bias.defined() ? of_bias.narrow(0, from, count).to(wide) : of_bias;
        multiply(out.narrow(1, from, count), wide_left, part, bias_of);
      });
    }
  }

  // ---- Gradients

  /// Prepares those that `gradients` has memory for.
  void differentiate(const Gradients& gradients) {
    into = gradients;
    const Plan& plan = division.plan;
    const int64_t classes = weight.size(0), columns = x().size(1);
    if (into.input.defined()) dinput.all = into.input.view({tokens.local.size(0), columns});
    if (into.bias.defined()) bias_sum = at::zeros({classes}, division.numbers);
    low_rank.compute_gradients(into.low_rank_input, into.low_rank_weight);
    if (into.weight.defined() && plan.chunks == 0) into.weight.zero_();
    // One block needs no sums over classes.
    if (dinput.defined() && plan.classes > 0 && plan.classes < classes &&
        at::isReducedFloatingType(x().scalar_type())) {
      sum = at::empty({std::min(plan.chunk, division.tokens), columns}, division.numbers);
    }
  }

  void zero() {
    std::apply([](auto&... t) { ((t.defined() ? void(t.zero_()) : void()), ...); }, into.tie());
  }

  /// Memory for d x of a chunk, which is complete after reduce(). add() does both.
  at::Tensor of_chunk(int64_t row, int64_t count) const { return dinput.of_chunk(row, count, division.order); }
  void reduce(const at::Tensor& of_x, int64_t row) { dinput.reduce(of_x, row, division.order, division.shard); }

  /// dlogits: (T, n), of the tokens from `row` and the classes from `c` on. before_weight(): called before the
  /// weight's.
  template <class F>
  void add(const at::Tensor& dlogits, int64_t row, int64_t c, const F& before_weight) {
    const int64_t count = dlogits.size(0), classes = dlogits.size(1);
    if (dinput.defined()) {
      if (c == 0) dx = of_chunk(row, count);
      const at::Tensor total = sum.defined() ? sum.narrow(0, 0, count) : dx;
      multiply_by_weight(total, dlogits, weight.narrow(0, c, classes), c > 0, scale, sustained);
      // The reduction runs during the last GEMM.
      if (c + classes == weight.size(0)) {
        if (sum.defined()) dx.copy_(total);
        reduce(dx, row);
      }
    }
    if (bias_sum.defined()) {
      bias_sum.narrow(0, c, classes).add_(dlogits.sum(0, false, bias_sum.scalar_type()), scale * head_scale);
    }
    if (low_rank.defined()) low_rank.add_gradients(dlogits, row, c, scale, scale * head_scale);
    if (!into.weight.defined() || classes == 0) return;
    before_weight();
    const at::Tensor left = x().narrow(0, row, count), of_weight = into.weight.narrow(0, c, classes);
    if (!is_mixed()) return gemm::multiply(of_weight, dlogits.t(), left, row > 0, scale * head_scale, sustained);
    for_widened_parts(of_weight, left.scalar_type(), [&](int64_t from, int64_t some, at::Tensor part) {
      at::addmm_out(part, part, dlogits.narrow(1, from, some).t(), left, double(row > 0), scale * head_scale);
      of_weight.narrow(0, from, some).copy_(part);
    });
  }
  void add(const at::Tensor& dlogits, int64_t row, int64_t c = 0) {
    add(dlogits, row, c, [] {});
  }

  void finish() {
    if (bias_sum.defined()) into.bias.copy_(bias_sum);
    if (low_rank.defined()) {
      // That of t is a sum over the ranks that have the classes.
      const at::Tensor& of_t = low_rank.gradient_of_t();
      if (division.shard.is_split() && of_t.defined()) division.shard.group->all_reduce(of_t).wait();
      low_rank.finish();
    }
    dinput.wait();
  }
};

}  // namespace liger::ops::linear
