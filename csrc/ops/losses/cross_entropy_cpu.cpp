// Cross entropy of rows on CPU.

#include <cstring>
#include <numeric>

#include "ops/losses/cross_entropy.h"
#include "core/cpu/softmax.h"
#include "core/values.h"

namespace liger::ops::cross_entropy {

namespace {

template <class C>
struct Capped {
  C value, slope;
};

inline Capped<float> softcapped(float x, float cap) {
  const float z = x / cap, size = std::fabs(z), q = z * z;
  // tanh(z) = z + z * bend, interpolated in z^2 at the Chebyshev nodes of |z| <= 0.6: within 1.1e-8.
  float bend = -0.0062691197f;
  bend = bend * q + 0.021110959f;
  bend = bend * q - 0.053873949f;
  bend = bend * q + 0.13332915f;
  bend = (bend * q - 0.33333330f) * q;
  const float near = z + z * bend;
  // tanh(|z|) = 1 - 2 u
  const float e = vector_exp(-2 * size), u = e / (1 + e), far = cap - 2 * cap * u;
  const bool small = size < 0.6f;
  return {small ? x + x * bend : z < 0 ? -far : far, small ? 1 - near * near : 4 * u * (1 - u)};
}

inline Capped<double> softcapped(double x, double cap) { return {cap * std::tanh(x / cap), softcap_slope(x, cap)}; }

template <class C>
C capped(C x, std::optional<C> cap) {
  return cap ? softcapped(x, *cap).value : x;
}

/// The sum of f(x_i, i) over n columns. Every lane makes few additions, so that a large term does not cost the small
/// ones their digits.
template <class C, class F>
C sum_in_lanes(Input<C> x, int64_t first, int64_t n, const F& f) {
  constexpr int64_t kLanes = 64, kBlock = 64 * kLanes;
  static_assert(kStage % kLanes == 0);
  double sum = 0;
  for (int64_t block = 0; block < n; block += kBlock) {
    C lanes[kLanes] = {};
    double wide[kLanes];
    const int64_t start = first + block;
    for_pieces(x + start, std::min(kBlock, n - block), [&](int64_t piece, int64_t count, const C* v) {
      const int64_t column = start + piece;
      int64_t i = 0;
      for (; i + kLanes <= count; i += kLanes) {
#pragma omp simd
        for (int64_t k = 0; k < kLanes; ++k) lanes[k] += f(v[i + k], column + i + k);
      }
#pragma omp simd
      for (int64_t k = 0; k < count - i; ++k) lanes[k] += f(v[i + k], column + i + k);
    });
#pragma omp simd
    for (int64_t k = 0; k < kLanes; ++k) wide[k] = lanes[k];
    for (int64_t width = kLanes / 2; width > 0; width /= 2) {
#pragma omp simd
      for (int64_t k = 0; k < width; ++k) wide[k] += wide[k + width];
    }
    sum += wide[0];
  }
  return C(sum);
}

/// out may be x, and has its dtype: pieces of other rows may be longer than the stage.
template <class C>
void write_gradient(
    Output<C> out, Input<C> x, const C* weight, int64_t n, C top, C slope, C smooth_grad, std::optional<C> cap) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(out.storage == x.storage);
  C stage[kStage];
  for_pieces(x, n, [=, &stage](int64_t first, int64_t count, const C* v) {
    const C* weights = weight ? weight + first : nullptr;
    C* to = target(out + first, stage);
    if (cap) {
      const C limit = *cap;
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        const auto u = softcapped(v[i], limit);
        const C w = weights ? weights[i] : C(1);
        to[i] = (vector_exp(u.value - top) * slope - smooth_grad * w) * u.slope;
      }
    } else if (weights) {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) to[i] = vector_exp(v[i] - top) * slope - smooth_grad * weights[i];
    } else {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) to[i] = vector_exp(v[i] - top) * slope - smooth_grad;
    }
    narrow_all(out + first, to, count);
  });
}

template <class C>
struct CpuRows {
  const Shard& shard;
  const Options& options;
  const RowsOut& out;
  Input<C> logits;
  const int64_t* target;
  int64_t rows;
  const C* weight;  // of all classes
  C weight_sum;
  int64_t n = shard.n, first = shard.first, classes = shard.classes;
  std::optional<C> cap = options.softcap;
  C* stats = reinterpret_cast<C*>(out.stats);

  C weight_of(int64_t y) const { return weight ? weight[y] : C(1); }
  const C* local_weight() const { return weight ? weight + first : nullptr; }

  /// predicted: -1 if the row is ignored or metrics were not requested.
  void store(int64_t row, C loss, C z_loss, int64_t predicted) const {
    auto to = [&](char* at, C value) {
      if (at) reinterpret_cast<C*>(at)[row] = value;
    };
    to(out.loss, options.reduced() ? loss : loss + z_loss);
    to(out.z_loss, z_loss);
    to(out.accuracy, predicted >= 0 && predicted == target[row]);
    if (out.predicted) out.predicted[row] = predicted;
  }
  void store_stats(int64_t row, C top, C total, C others) const {
    if (!stats) return;
    stats[row] = top;
    stats[rows + row] = total;
    stats[2 * rows + row] = others / total;
  }
};

/// A row's columns around the true class. If another rank has that class: all columns before, none after.
struct Around {
  bool here;
  int64_t y, before, after;

  template <class C>
  Around(const CpuRows<C>& a, int64_t row)
      : here(a.target[row] >= a.first && a.target[row] < a.first + a.n),
        y(a.target[row] - a.first),
        before(here ? y : a.n),
        after(here ? a.n - y - 1 : 0) {}
};

/// Of no columns, `lowest` remains.
template <class C>
C largest_other(Input<C> x, const Around& c) {
  return vectorized<C>([&] {
    C out = std::numeric_limits<C>::lowest();
    auto compare = [&](int64_t, int64_t count, const C* v) { out = largest(v, count, out); };
    for_pieces(x, c.before, compare);
    for_pieces(x + c.before + 1, c.after, compare);
    return out;
  });
}

/// Of f(x_i, i).
template <class C, class F>
C sum_others(Input<C> x, const Around& c, const F& f) {
  auto sum = [&](int64_t first, int64_t n) { return vectorized<C>([&] { return sum_in_lanes(x, first, n, f); }); };
  return sum(0, c.before) + sum(c.before + 1, c.after);
}

template <class C>
C sum_exp_others(Input<C> x, const Around& c, C top, std::optional<C> cap) {
  if (!cap) return sum_others(x, c, [=](C v, int64_t) { return vector_exp(v - top); });
  return sum_others(x, c, [=, limit = *cap](C v, int64_t) { return vector_exp(softcapped(v, limit).value - top); });
}

template <class C>
C sum_away_others(const CpuRows<C>& a, Input<C> x, const Around& c, C reference) {
  auto sum = [&](auto value) {
    auto away = [=](C v, int64_t) { return value(v) - reference; };
    if (!a.weight) return sum_others(x, c, away);
    return sum_others(x, c, [=, w = a.local_weight()](C v, int64_t i) { return w[i] * away(v, i); });
  };
  return a.cap ? sum([limit = *a.cap](C v) { return softcapped(v, limit).value; }) : sum([](C v) { return v; });
}

template <class C>
int64_t first_largest(Input<C> x, int64_t n, C value) {
  C stage[kStage];
  for (int64_t first = 0; first < n; first += kStage) {
    const int64_t count = std::min(kStage, n - first);
    const C* v = widen_all(x + first, stage, count);
    const int64_t best = std::find_if(v, v + count, [&](C number) { return number >= value; }) - v;
    if (best < count) return first + best;
  }
  return 0;
}

/// The facts of a row of one rank's columns.
template <class C>
void local_row(const CpuRows<C>& a, Input<C> x, int64_t row) {
  constexpr C kMinusInf = -std::numeric_limits<C>::infinity();
  if (a.target[row] == a.options.ignore_index) return;
  const Around c(a, row);
  const C raw = largest_other(x, c), given = c.here ? first_number(x + c.y) : kMinusInf;
  const C own = c.here ? capped(given, a.cap) : kMinusInf;
  const C peak = capped(raw, a.cap), top = own > peak ? own : peak;
  const C others = sum_exp_others(x, c, top, a.cap);
  const Facts& facts = *a.out.facts;
  C* to = reinterpret_cast<C*>(facts.at(0)) + row;
  to[0] = top;
  to[a.rows] = others;
  to[2 * a.rows] = own;
  to += 3 * a.rows;
  if (facts.smoothing) {
    *to = sum_away_others(a, x, c, top) + (c.here ? a.weight_of(a.target[row]) * (own - top) : C(0));
    to += a.rows;
  }
  if (facts.metrics) {
    const C highest = given > raw ? given : raw;
    to[0] = highest;
    // As bits, because a float does not hold every class.
    const auto predicted = int32_t(a.first + first_largest(x, a.n, highest));
    std::memcpy(to + a.rows, &predicted, sizeof(predicted));
  }
  a.store_stats(row, top, others + std::exp(own - top), others);
}

// The true class is added to the sums last, so that 1 - p_y and small losses keep all their digits.
template <class C>
void forward_row(const CpuRows<C>& a, Input<C> x, int64_t row) {
  const int64_t y = a.target[row];
  const auto& o = a.options;
  if (y == o.ignore_index) return a.store(row, 0, 0, -1);
  const Around around(a, row);
  const C raw = largest_other(x, around), given = first_number(x + y);
  const C own = capped(given, a.cap), peak = capped(raw, a.cap), top = own > peak ? own : peak;
  const C others = sum_exp_others(x, around, top, a.cap);
  const C total = std::exp(own - top) + others;
  const C nll = top - own + (own >= peak ? std::log1p(others) : std::log(total));
  const C lse = top + std::log(total), z_loss = C(o.lse_square_scale) * lse * lse;
  C loss = a.weight_of(y) * nll;
  if (o.label_smoothing > 0) {
    // Sum distances from x_y rather than from 0, so that a common offset of the logits costs no digits.
    const bool own_is_minus_inf = own == -std::numeric_limits<C>::infinity();
    const C reference = own_is_minus_inf ? C(0) : own, level = own_is_minus_inf ? lse : nll;
    C away = sum_away_others(a, x, around, reference);
    if (own_is_minus_inf) away += a.weight_of(y) * own;
    loss = (1 - C(o.label_smoothing)) * loss + C(o.label_smoothing) / a.n * (level * a.weight_sum - away);
  }
  a.store(row, loss, z_loss, a.out.predicted ? first_largest(x, a.n, given > raw ? given : raw) : -1);
  a.store_stats(row, top, total, others);
}

/// Losses, metrics and statistics of a row from the facts of all ranks.
template <class C>
void combine_row(
    const CpuRows<C>& a, const Facts& facts, const C* gathered, const std::vector<C>& rank_weights, int64_t row,
    C* log_prob, C* entropy) {
  const Shard& shard = a.shard;
  const Options& o = a.options;
  const int64_t y = a.target[row], ranks = shard.ranks();
  auto fact = [&](int64_t rank, int64_t which) { return gathered[(rank * facts.count() + which) * a.rows + row]; };
  C top = std::numeric_limits<C>::lowest(), own = -std::numeric_limits<C>::infinity(), others = 0;
  C loss = 0, z_loss = 0, nll = 0, row_entropy = 0, total = 1;
  int64_t predicted = -1;
  if (y != o.ignore_index) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      top = std::max(top, fact(rank, 0));
      if (y >= shard.firsts[rank] && y < shard.firsts[rank + 1]) own = fact(rank, 2);
    }
    for (int64_t rank = 0; rank < ranks; ++rank) others += fact(rank, 1) * std::exp(fact(rank, 0) - top);
    total = std::exp(own - top) + others;
    nll = top - own + (own == top ? std::log1p(others) : std::log(total));
    const C lse = top + std::log(total);
    z_loss = C(o.lse_square_scale) * lse * lse;
    loss = a.weight_of(y) * nll;
    if (facts.smoothing) {
      C smooth = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const C w = rank_weights[rank];
        smooth += (w == 0 ? C(0) : w * (top - fact(rank, 0) + std::log(total))) - fact(rank, 3);
      }
      loss = (1 - C(o.label_smoothing)) * loss + C(o.label_smoothing) / shard.classes * smooth;
    }
    if (facts.metrics) {
      C highest = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const C value = fact(rank, 3 + facts.smoothing);
        if (rank > 0 && !(value > highest)) continue;
        highest = value;
        const C bits = fact(rank, 4 + facts.smoothing);
        int32_t here;
        std::memcpy(&here, &bits, sizeof(here));
        predicted = here;
      }
    }
    for (int64_t rank = 0; facts.entropy && rank < ranks; ++rank) {
      const C sum_here = fact(rank, 1) + std::exp(fact(rank, 2) - fact(rank, 0));
      const C p = sum_here * std::exp(fact(rank, 0) - top) / total;
      if (p != 0) row_entropy += p * (fact(rank, facts.count() - 1) - std::log(p));
    }
  }
  a.store(row, loss, z_loss, predicted);
  a.store_stats(row, top, total, others);
  if (log_prob) log_prob[row] = -nll;
  if (entropy) entropy[row] = row_entropy;
}

/// grad, grad_z: the incoming gradients of this row's loss and z-loss. In a mean they have different divisors.
template <class C>
void backward_row(const CpuRows<C>& a, Output<C> out, Input<C> x, int64_t row, C grad, C grad_z) {
  const int64_t y = a.target[row], n = a.n;
  const Around around(a, row);
  const auto& o = a.options;
  if (y == o.ignore_index) return write_zeros(out, n);
  const C top = a.stats[row], total = a.stats[a.rows + row], miss = a.stats[2 * a.rows + row];
  // d loss / d x_k = p_k * (nll_grad + lse_grad) - smooth_grad * w_k, and for the true class
  //                  p_y * lse_grad - (1 - p_y) * nll_grad - smooth_grad * w_y
  const C smoothing = C(o.label_smoothing), nll_grad = grad * a.weight_of(y) * (1 - smoothing);
  const C smooth_grad = grad * smoothing / a.classes;
  const C z_slope = grad_z * 2 * C(o.lse_square_scale) * (top + std::log(total));
  const C lse_grad = smoothing > 0 ? z_slope + grad * smoothing * (a.weight_sum / a.classes) : z_slope;
  C at_y = 0;
  if (around.here) {
    const C own = first_number(x + around.y);
    at_y = std::exp(capped(own, a.cap) - top) / total * lse_grad - miss * nll_grad - smooth_grad * a.weight_of(y);
    if (a.cap) at_y *= softcapped(own, *a.cap).slope;
  }
  const C p_slope = (nll_grad + lse_grad) / total;
  vectorized<C>([&] { write_gradient(out, x, a.local_weight(), n, top, p_slope, smooth_grad, a.cap); });
  if (around.here) store_all(out + around.y, &at_y, 1);
}

}  // namespace

/// Calls f(rows).
template <class F>
void with_cpu_rows(
    const char* op, const Shard& shard, const Tensor& logits, const Tensor& target_in, const Tensor& weight_in,
    const Options& o, const RowsOut& out, const F& f) {
  Tensor target = class_indices(target_in);
  Tensor weight = weight_in.defined() ? weight_in.to(compute_type(logits)).contiguous() : weight_in;
  const int64_t* y = target.const_data_ptr<int64_t>();
  check_classes(op, y, target.numel(), shard.classes, o);
  dispatch_compute(logits.scalar_type(), [&](auto c) {
    using C = decltype(c);
    const C sum = weight.defined() ? weight.sum().item<C>() : C(shard.classes);
    f(CpuRows<C>{shard, o, out, input<C>(logits), y, target.numel(), const_data_or_null<C>(weight), sum});
  });
}

void forward_rows_cpu(
    const char* op, const Shard& shard, Tensor logits, const Tensor& target, const Tensor& weight, const Options& o,
    const RowsOut& out) {
  const auto walk = rows_in_order<1>(op, "logits", {&logits});
  with_cpu_rows(op, shard, logits, target, weight, o, out, [&](const auto& a) {
    parallel_rows(a.rows, a.n, [&](int64_t row) {
      const auto x = a.logits + walk.offset(0, row);
      out.facts ? local_row(a, x, row) : forward_row(a, x, row);
    });
  });
}

void combine_rows_cpu(
    const Shard& shard, const Facts& facts, const Tensor& gathered, const Tensor& target, const Tensor& weight_in,
    const Options& o, const RowsOut& out, char* log_prob, char* entropy) {
  Tensor weight = weight_in.defined() ? weight_in.to(gathered.scalar_type()).contiguous() : weight_in;
  with_cpu_rows("cross_entropy", shard, gathered, target, weight, o, out, [&]<class C>(const CpuRows<C>& a) {
    std::vector<C> rank_weights;
    for (int64_t rank = 0; facts.smoothing && rank < shard.ranks(); ++rank) {
      const int64_t from = shard.firsts[rank], count = shard.firsts[rank + 1] - from;
      rank_weights.push_back(weight.defined() ? weight.narrow(0, from, count).sum().template item<C>() : C(count));
    }
    for (int64_t row = 0; row < a.rows; ++row) {
      combine_row(
          a, facts, gathered.const_data_ptr<C>(), rank_weights, row, reinterpret_cast<C*>(log_prob),
          reinterpret_cast<C*>(entropy));
    }
  });
}

std::array<double, 2> count_targets(const Tensor& target_in, const Tensor& weight_in, const Options& o) {
  Tensor target = class_indices(target_in);
  Tensor weight = weight_in.defined() ? weight_in.to(at::kDouble).contiguous() : weight_in;
  const int64_t* y = target.const_data_ptr<int64_t>();
  const double* w = weight.defined() ? weight.const_data_ptr<double>() : nullptr;
  std::array<double, 2> totals{};
  for (int64_t row = 0; row < target.numel(); ++row) {
    if (y[row] == o.ignore_index) continue;
    totals[0] += w ? w[y[row]] : 1;
    totals[1] += 1;
  }
  return totals;
}

void sum_rows_cpu(const RowBuffers& rows, const std::array<double, 2>& totals, const Options& o, const Results& out) {
  auto sum_into = [&](auto zero) {
    using C = decltype(zero);
    const int64_t count = rows.scratch.size(1);
    auto total = [&](int64_t which) {
      const C* at = rows.scratch.const_data_ptr<C>() + which * count;
      return std::accumulate(at, at + count, 0.0);
    };
    // Without any target this is 0 / 0 = NaN, as in PyTorch.
    const double by_weight = o.mean() ? totals[0] : 1, by_count = o.mean() ? totals[1] : 1;
    const double z_loss = rows.scratch.size(0) > 1 ? total(1) / by_count : 0;
    write_scalars(out.loss, {total(0) / by_weight + z_loss});
    write_scalars(out.totals, {totals[0], totals[1]});
    if (!out.accuracy.defined()) return;
    write_scalars(out.z_loss, {z_loss});
    write_scalars(out.accuracy, {total(2) / by_count});
  };
  dispatch_compute(out.loss.scalar_type(), sum_into);
}

void write_scalars(const Tensor& to, std::initializer_list<double> values) {
  if (!to.defined()) return;
  dispatch_compute(
      to.scalar_type(), [&](auto c) { std::copy(values.begin(), values.end(), to.data_ptr<decltype(c)>()); });
}

std::array<double, 2> known_or_counted(
    const Tensor& totals, const Tensor& target, const Tensor& weight, const Options& o) {
  if (!totals.defined()) return count_targets(target, weight, o);
  return {totals[0].item<double>(), totals[1].item<double>()};
}

void Cpu::totals(const Tensor& totals, const Tensor& target, const Tensor& weight, const Options& o, int64_t classes) {
  check_classes("cross_entropy", class_indices(target).const_data_ptr<int64_t>(), target.numel(), classes, o);
  auto [by_weight, by_count] = count_targets(target, weight, o);
  write_scalars(totals, {by_weight, by_count});
}

void Cpu::forward(
    const char* op, Tensor logits, const Tensor& target, const Tensor& weight, const Tensor& totals, const Options& o,
    const Results& out) {
  runtime::count_cpu_call();
  const Wanted wanted{out.predicted.defined()};
  RowBuffers rows(out, target.numel(), o, wanted);
  const Shard shard(op, o.vocabulary, logits.size(-1), "logits");
  if (shard.is_split() && target.numel() > 0) {
    Facts facts(o, wanted.metrics, false);
    facts.allocate(target.numel(), out.loss.options());
    const RowsOut local{.facts = &facts};
    shard.n > 0 ? forward_rows_cpu(op, shard, logits, target, weight, o, local) : facts.fill_empty();
    Tensor gathered = shard.group->all_gather(facts.values).wait();
    combine_rows_cpu(shard, facts, gathered, target, weight, o, rows.out, nullptr, nullptr);
  } else {
    forward_rows_cpu(op, shard, logits, target, weight, o, rows.out);
  }
  if (o.reduced()) sum_rows_cpu(rows, known_or_counted(totals, target, weight, o), o, out);
}

void backward_rows_cpu(
    const char* op, const Shard& shard, Tensor& dlogits, Tensor logits, const Tensor& target, const Tensor& weight,
    const char* stats, const Tensor& totals, const Upstream& upstream, const Options& o) {
  Tensor out = dlogits;
  const auto walk = rows_in_order<2>(op, "logits", {&out, &logits});
  // backward_row() only reads stats. The field is not const because forward_row() writes it.
  const RowsOut given{.stats = const_cast<char*>(stats)};
  with_cpu_rows(op, shard, logits, target, weight, o, given, [&]<class C>(const CpuRows<C>& a) {
    const auto to = output<C>(out);
    const C* grads = const_data_or_null<C>(upstream.values);
    const C* divisors = o.mean() ? totals.const_data_ptr<C>() : nullptr;
    parallel_rows(a.rows, a.n, [&](int64_t row) {
      const C g = grads ? grads[row * upstream.stride] : C(1);
      const C by_weight = divisors ? divisors[0] : C(1), by_count = divisors ? divisors[1] : C(1);
      backward_row<C>(a, to + walk.offset(0, row), a.logits + walk.offset(1, row), row, g / by_weight, g / by_count);
    });
  });
  if (!out.is_same(dlogits)) dlogits.copy_(out);
}

void Cpu::backward(
    const char* op, Tensor& dlogits, Tensor logits, const Tensor& target, const Tensor& weight, const Tensor& stats,
    const Tensor& totals, const Tensor& grad, const Options& o) {
  runtime::count_cpu_call();
  const Upstream upstream = upstream_of(op, grad, logits, o.reduced());
  if (logits.numel() == 0) return;
  const Shard shard(op, o.vocabulary, logits.size(-1), "logits");
  const auto* at = static_cast<const char*>(stats.const_data_ptr());
  backward_rows_cpu(op, shard, dlogits, logits, target, weight, at, totals, upstream, o);
}

void Cpu::forward_backward(
    const char* op, Tensor& logits, const Tensor& target, const Tensor& weight, const Options& o, const Results& out) {
  Results all = empty_results(logits, target, o, {false, true});
  all.loss = out.loss;
  forward(op, logits, target, weight, {}, o, all);
  if (logits.numel() == 0) return;
  const auto* stats = static_cast<const char*>(all.stats.const_data_ptr());
  const Shard shard(logits.size(-1));
  backward_rows_cpu(op, shard, logits, logits, target, weight, stats, all.totals, Upstream(Tensor()), o);
}

void describe_rows_cpu(
    const char* op, const Shard& shard, Tensor logits, const Tensor& target, const char* stats, const Options& o,
    char* log_prob, char* entropy) {
  const auto walk = rows_in_order<1>(op, "logits", {&logits});
  with_cpu_rows(op, shard, logits, target, Tensor(), o, {}, [&]<class C>(const CpuRows<C>& a) {
    const C* of = reinterpret_cast<const C*>(stats);
    C *p = reinterpret_cast<C*>(log_prob), *h = reinterpret_cast<C*>(entropy);
    parallel_rows(a.rows, a.n, [&](int64_t row) {
      const int64_t y = a.target[row];
      if (p) p[row] = 0;
      h[row] = 0;
      if (y == o.ignore_index) return;
      const auto x = a.logits + walk.offset(0, row);
      const C top = of[row], total = of[a.rows + row], miss = of[2 * a.rows + row];
      const C exponents = sum_in_lanes(x, 0, a.n, [&](C v, int64_t) {
        const C exponent = capped(v, a.cap) - top, e = std::exp(exponent);
        return e == 0 ? C(0) : e * exponent;
      });
      if (p) p[row] = miss < C(0.5) ? std::log1p(-miss) : capped(first_number(x + y), a.cap) - top - std::log(total);
      h[row] = std::log(total) - exponents / total;
    });
  });
}

void Cpu::scale(const char* op, Tensor& dlogits, const Tensor& grad) {
  runtime::count_cpu_call();
  const Upstream upstream = upstream_of(op, grad, dlogits, grad.dim() == 0);
  if (grad.dim() == 0) {
    if (grad.item<double>() != 1) dlogits.mul_(grad);
  } else {
    dlogits.copy_(dlogits.to(grad.scalar_type()).mul_(grad.unsqueeze(-1)));
  }
}

}  // namespace liger::ops::cross_entropy
