// Divergences on CPU. The formulas are those of liger_ops/kernels/losses/divergence.py.

#include <limits>
#include <numeric>

#include "core/rows/elements.h"
#include "ops/losses/divergence.h"
#include "core/cpu/softmax.h"
#include "core/values.h"

namespace liger::ops::divergence {
namespace {

template <class C>
C at_least(C x, C least) {
  return x < least ? least : x;
}

template <class C>
struct Terms {
  C of_target, of_input;
};

template <class C>
Terms<C> mixture(C x, C t, C beta) {
  constexpr C kNoProbability = kinds::NO_PROBABILITY;
  x = at_least(x, kNoProbability);
  t = at_least(t, kNoProbability);
  const bool target_leads = t >= x;
  const C top = target_leads ? t : x, log_ratio = -std::fabs(x - t), share = target_leads ? beta : 1 - beta;
  const C of_low = (1 - share) * vector_exp(log_ratio), log_m = vector_log(share + of_low),
          probability = vector_exp(top);
  const C high = -probability * share * log_m, low = probability * of_low * (log_ratio - log_m);
  return {target_leads ? high : low, target_leads ? low : high};
}

template <int32_t kKind, class C>
C loss_of(C x, C t, C parameter) {
  if constexpr (kKind == kinds::PROBS) {
    return t * ((t == 0 ? C(0) : vector_log(at_least(t, parameter))) - x);
  } else if constexpr (kKind == kinds::LOG_PROBS) {
    return vector_exp(t) * (t - x);
  } else if constexpr (kKind == kinds::FORWARD) {
    const C p = vector_exp(t);
    return p == 0 ? C(0) : p * (t - x);
  } else if constexpr (kKind == kinds::REVERSE) {
    const C q = vector_exp(x);
    return q == 0 ? C(0) : q * (x - t);
  } else if constexpr (kKind == kinds::MIXTURE) {
    const auto terms = mixture(x, t, parameter);
    return terms.of_target + terms.of_input;
  } else {
    return C(0.5) * std::fabs(x - t);
  }
}

template <int32_t kKind, class C>
C slope_of(C x, C t, C parameter) {
  if constexpr (kKind == kinds::PROBS) {
    return -t;
  } else if constexpr (kKind == kinds::LOG_PROBS || kKind == kinds::FORWARD) {
    return -vector_exp(t);
  } else if constexpr (kKind == kinds::REVERSE) {
    const C q = vector_exp(x);
    return q == 0 ? C(0) : q * (x - t) + q;
  } else if constexpr (kKind == kinds::MIXTURE) {
    return mixture(x, t, parameter).of_input;
  } else {
    return x > t ? C(0.5) : x < t ? C(-0.5) : C(0);
  }
}

/// Calls f(std::integral_constant<kind>).
template <class F>
auto with_kind(int32_t kind, const F& f) {
  switch (kind) {
    case kinds::PROBS: return f(std::integral_constant<int32_t, kinds::PROBS>());
    case kinds::LOG_PROBS: return f(std::integral_constant<int32_t, kinds::LOG_PROBS>());
    case kinds::FORWARD: return f(std::integral_constant<int32_t, kinds::FORWARD>());
    case kinds::REVERSE: return f(std::integral_constant<int32_t, kinds::REVERSE>());
    case kinds::MIXTURE: return f(std::integral_constant<int32_t, kinds::MIXTURE>());
    default: return f(std::integral_constant<int32_t, kinds::TOTAL>());
  }
}

/// The sum of the losses. Writes each to `out` if that is not null.
template <class C>
double forward_span(int32_t kind, C* out, Input<C> x, Input<C> t, int64_t n, C parameter) {
  C stages[3][kStage];
  double sum = 0;
  for (int64_t first = 0; first < n; first += kStage) {
    const int64_t count = std::min(kStage, n - first);
    const C *u = widen_all(x + first, stages[0], count), *v = widen_all(t + first, stages[1], count);
    C* losses = out ? out + first : stages[2];
    sum += with_kind(kind, [=](auto k) {
      C part = 0;
#pragma omp simd reduction(+ : part)
      for (int64_t i = 0; i < count; ++i) {
        losses[i] = loss_of<decltype(k)::value>(u[i], v[i], parameter);
        part += losses[i];
      }
      return part;
    });
  }
  return sum;
}

/// dx may be t. grad: one number per element, or null; then `scale` stands for all of them.
template <class C>
void backward_span(int32_t kind, Output<C> dx, const C* grad, C scale, Input<C> x, Input<C> t, int64_t n, C parameter) {
  C stages[3][kStage];
  for (int64_t first = 0; first < n; first += kStage) {
    const int64_t count = std::min(kStage, n - first);
    const C *u = widen_all(x + first, stages[0], count), *v = widen_all(t + first, stages[1], count);
    const C* g = grad ? grad + first : nullptr;
    C* out = core::target(dx + first, stages[2]);
    with_kind(kind, [=](auto k) {
      if (g) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = slope_of<decltype(k)::value>(u[i], v[i], parameter) * g[i];
      } else {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = slope_of<decltype(k)::value>(u[i], v[i], parameter) * scale;
      }
    });
    narrow_all(dx + first, out, count);
  }
}

/// Whether rows count.
struct Counts {
  const int64_t *labels, ignore_index;

  Counts(const Tensor& t, const Options& o) : labels(const_data_or_null<int64_t>(t)), ignore_index(o.ignore_index) {}
  bool operator()(int64_t row) const { return !labels || labels[row] != ignore_index; }
};

// With labels, rows are walked one by one.
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

}  // namespace

void Cpu::forward(
    const char* op, Tensor input, Tensor target, const Tensor& given_labels, const Options& o, Results& out) {
  runtime::count_cpu_call();
  const Tensor labels = class_indices(given_labels), like = input;
  Tensor loss = out.loss;
  double total = 0;
  if (like.numel() > 0) {
    // Losses that are not stored have the input's place in the walk.
    Tensor& to = o.reduced() ? input : loss;
    const auto rows = walk<3>(op, {&to, &input, &target}, labels, kNever);
    const Counts counts(labels, o);
    std::vector<double> sums(rows.rows * spans_of(rows));
    dispatch_compute(like.scalar_type(), [&](auto c) {
      using C = decltype(c);
      const auto x = core::input<C>(input), t = core::input<C>(target);
      C* losses = o.reduced() ? nullptr : loss.data_ptr<C>();
      parallel_spans(rows, [&](int64_t row, int64_t first, int64_t n) {
        auto at = [&](size_t tensor) { return rows.offset(tensor, row) + first; };
        C* stored = losses ? losses + at(0) : nullptr;
        if (counts(row)) {
          sums[row * spans_of(rows) + first / kSpan] =
              vectorized<C>([&] { return forward_span(o.kind, stored, x + at(1), t + at(2), n, C(o.parameter)); });
        } else if (stored) {
          std::fill_n(stored, n, C(0));
        }
      });
    });
    total = std::accumulate(sums.begin(), sums.end(), 0.0);
  }
  if (!o.reduced()) {
    if (!loss.is_same(out.loss)) out.loss.copy_(loss);
    return;
  }
  double divisor = double(o.divisor(like, labels.defined()));
  if (o.divides() && labels.defined()) {
    const int64_t* label = labels.const_data_ptr<int64_t>();
    divisor *= double(labels.numel() - std::count(label, label + labels.numel(), o.ignore_index));
  }
  // Without any row, 0 / 0 is NaN, as in PyTorch.
  auto write = [&](auto zero) {
    using C = decltype(zero);
    *out.loss.data_ptr<C>() = o.divide ? C(total) / C(divisor) : C(total);
    if (out.divisor.defined()) *out.divisor.data_ptr<C>() = C(divisor);
  };
  dispatch_compute(out.loss.scalar_type(), write);
}

void Cpu::backward(
    const char* op, Tensor& dinput, const Tensor& grad, const Tensor& divisor, Tensor input, Tensor target,
    const Tensor& given_labels, const Options& o) {
  runtime::count_cpu_call();
  const Upstream upstream(op, grad, o.sizes_of(target), "target", target);
  if (target.numel() == 0) return;
  const Tensor labels = class_indices(given_labels);
  // Not read if the gradient does not depend on it.
  if (!input.defined()) input = target;
  Tensor out = dinput, g = upstream.values;
  // A single gradient has the target's place in the walk.
  const auto rows = walk<4>(op, {&out, &input, &target, upstream.is_one() ? &target : &g}, labels, kNever);
  const Counts counts(labels, o);
  dispatch_compute(target.scalar_type(), [&](auto c) {
    using C = decltype(c);
    const auto dx = output<C>(out);
    const auto x = core::input<C>(input), t = core::input<C>(target);
    const C* grads = upstream.is_one() ? nullptr : g.const_data_ptr<C>();
    const C by = divisor.defined() ? *divisor.const_data_ptr<C>() : C(1);
    const C scale = upstream.is_one() ? *upstream.values.const_data_ptr<C>() / by : C(1);
    parallel_spans(rows, [&](int64_t row, int64_t first, int64_t n) {
      auto at = [&](size_t tensor) { return rows.offset(tensor, row) + first; };
      if (!counts(row)) return write_zeros(dx + at(0), n);
      const C* g = grads ? grads + at(3) : nullptr;
      vectorized<C>([&] { backward_span(o.kind, dx + at(0), g, scale, x + at(1), t + at(2), n, C(o.parameter)); });
    });
  });
  if (!out.is_same(dinput)) dinput.copy_(out);
}

}  // namespace liger::ops::divergence
