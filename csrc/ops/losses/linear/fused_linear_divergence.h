#pragma once

// The loops of fused_linear_divergence, on CPU and CUDA.
//
// M tokens, Hs and Ht hidden, V classes.
//
// Logits are fp32 (fp64 for fp64): rounded to 16 bits, the logits of close models would lose their difference. They
// exist for a part of a chunk of tokens at a time. From both models' logits, the rows compute the results and, in the
// student's dtype, the gradient of its logits. A whole chunk of these gradients then takes the GEMMs of d input and d
// weight.
//
// Each chunk rounds d weight. If there are more than kMostRoundings chunks, and in backward, the statistics of all rows
// are known before the gradients, which are computed from all tokens and some classes at a time
// (divide_classes).
//
// If the classes are split over ranks, a rank scans its logits of a part, and needs the facts of all ranks for the
// values and gradients. The values, sums over classes, are added up over the ranks at the end, but for the mean that
// the gradient of a mixture needs at once. d input is reduced while d weight's GEMM runs.
//
// With vocab_map, the rows compare the student with q, the teacher's softmax over the mapped classes alone, whose share
// of the whole softmax is s: the divergence is s (KL(q || p_s) + log s), and its gradient s times that of KL(q || p_s).

#include <cmath>
#include <limits>

#include "ops/losses/linear/fused_linear_divergence_rows.h"
#include "ops/losses/linear/loop.h"
#include "runtime/status.h"

namespace liger::ops::fused_linear_divergence {

using namespace linear;

using Wanted = WantedGradients;
using core::Shard;

/// The tensors of a call. Undefined ones were not given.
struct Arguments {
  Tensor s_input, s_weight, t_input, t_weight, s_bias, t_bias, mask, token_weight, vocab_map;
  Tensor s_low_rank_input, s_low_rank_weight, t_low_rank_input, t_low_rank_weight;

  at::ScalarType compute() const { return s_input.scalar_type() == at::kDouble ? at::kDouble : compute_type(t_input); }
  at::TensorOptions numbers() const { return s_input.options().dtype(compute()); }
  HeadTensors trained() const { return {s_input, s_weight, s_bias, s_low_rank_input, s_low_rank_weight}; }
  HeadTensors teacher() const { return {t_input, t_weight, t_bias, t_low_rank_input, t_low_rank_weight}; }
};

/// op: its name in messages. tokens: the dimensions of the tokens of all ranks.
struct Call {
  const char* op;
  Arguments a;
  Options o;
  c10::SymDimVector tokens;

  at::IntArrayRef positions() const { return C10_AS_INTARRAYREF_SLOW(tokens); }
};

/// stats: (5, M); with vocab_map, the last are the shares. deferred_scale: factors that backward applies, (of input's
/// gradient, of weight's and bias's); undefined: 1.
struct Results {
  Tensor divergence, entropy, stats, deferred_scale;
  Gradients gradients;

  auto tie() { return std::tuple_cat(std::tie(divergence, entropy), gradients.tie(), std::tie(stats, deferred_scale)); }
};

/// The dimensions of the tokens of all ranks.
inline c10::SymDimVector token_sizes(const char* op, const Tensor& s_input, const Options& o) {
  const auto tokens = s_input.sym_sizes().slice(0, s_input.dim() - 1);
  c10::SymDimVector out(tokens.begin(), tokens.end());
  if (o.sequence_dim && o.vocabulary.is_split()) {
    const int64_t ranks =
        o.vocabulary.sizes.empty() ? core::Group(op, o.vocabulary.group).size() : int64_t(o.vocabulary.sizes.size());
    out[*o.sequence_dim] = out[*o.sequence_dim] * ranks;
  }
  return out;
}

/// True if forward computes the gradients. Per token, the gradient of the input alone is linear in each token's
/// incoming gradient.
inline bool computes_now(const Options& o, Wanted wanted) { return wanted.any() && (o.reduced() || !wanted.head()); }

// ---- Plans

/// Default budgets. Calls that compute the logits again should take less.
constexpr int64_t kWithoutGradients = 320 * kMiB, kFrozenHead = 640 * kMiB, kReduced = 1280 * kMiB;

/// Bytes of one number of the logits' gradient, and of both models' logits. The student's logits become their gradient
/// where both have one dtype.
struct Bytes {
  int64_t gradient, logits;
  int64_t of_mapped = 0;  // of a row, with vocab_map: all logits of the teacher, and a copy of the mapped ones

  Bytes(const Arguments& a, bool gradients) {
    const int64_t wide = c10::elementSize(a.compute());
    if (a.vocab_map.defined()) {
      of_mapped = (logits_stride(a.t_weight.size(0), at::kHalf) + logits_stride(a.s_weight.size(0), at::kHalf)) * wide;
    }
    gradient = gradients ? a.s_input.element_size() : 0;
    logits = (gradient == wide ? 1 : 2) * wide;
  }
  int64_t all() const { return gradient + logits; }
};

/// chunk: tokens whose gradients exist at the same time. part: tokens whose logits do. wanted: gradients that this call
/// computes.
inline Plan plan_chunks(const Call& call, int64_t tokens, int64_t classes, Wanted wanted) {
  const auto& [op, a, o, positions] = call;
  // Statistics of a row and of its parts, results of a token.
  constexpr int64_t kPerRow = 400, kPerToken = 24;
  // Parts of less than kFullPart tokens make GEMMs slow, and are for the sake of d weight alone.
  constexpr int64_t kLargestPart = 2048, kFullPart = 512, kLeastPart = 256;
  const Bytes bytes(a, wanted.any());
  Plan plan;
  plan.row = logits_stride(classes, at::kHalf);
  const int64_t per_part = plan.row * bytes.logits + bytes.of_mapped + kPerRow, per_chunk = plan.row * bytes.gradient;
  const int64_t usual = o.reduced() ? kReduced : wanted.any() ? kFrozenHead : kWithoutGradients;
  const int64_t budget = divide_tokens(plan, op, tokens, per_part + per_chunk, kPerToken, usual, o.memory_budget);
  plan.part = plan.chunk;
  if (!wanted.weight) return plan;
  for (int64_t part = kLargestPart; part >= kLeastPart && plan.chunks > 1; part /= 2) {
    const int64_t rest = budget - part * per_part;
    if (part < kFullPart && plan.chunks <= kMostRoundings) break;
    if (rest < tokens * kPerToken + part * per_chunk) continue;
    Plan other = plan;
    divide_tokens(other, op, tokens, per_chunk, kPerToken, rest, rest);
    if (other.chunks >= plan.chunks) continue;
    plan = other;
    plan.part = part;
  }
  return plan;
}

inline Plan plan_blocks(const Call& call, int64_t tokens, int64_t classes, Wanted wanted) {
  const auto& [op, a, o, positions] = call;
  const Bytes bytes(a, true);
  const bool sums = wanted.input && at::isReducedFloatingType(a.s_input.scalar_type());
  const int64_t per_token = sums ? a.s_input.size(-1) * int64_t(c10::elementSize(a.compute())) : 0;
  // Larger only where d weight would be rounded too often.
  constexpr int64_t kFewClasses = 256;
  const int64_t divided = (tokens + kMostRoundings - 1) / kMostRoundings;
  const int64_t least = std::min(kReduced, divided * (per_token + kFewClasses * bytes.all()));
  const int64_t usual = o.reduced() ? kReduced : std::max(kWithoutGradients, least);
  return divide_classes(op, tokens, classes, bytes.all(), per_token, o.memory_budget.value_or(usual));
}

// ---- Facts of ranks

/// Combines the facts of several parts of rows along dimension `dim`: of (rows, parts, SHARES), or (ranks, rows,
/// SHARES).
inline Tensor join_facts(const Tensor& facts, int64_t dim, double temperature) {
  if (facts.size(dim) == 1) return facts.select(dim, 0);
  auto of = [&](int64_t i) { return facts.select(2, i); };
  const Tensor s_top = of(0).amax(dim), t_top = of(4).amax(dim);
  // exp of -1000 is 0; the limit avoids 0 * -inf.
  auto away = [&](const Tensor& peaks, const Tensor& top) {
    return ((peaks - top.unsqueeze(dim)) / temperature).clamp_min(-1000);
  };
  const Tensor s_shift = away(of(0), s_top), s_scale = s_shift.exp();
  const Tensor s_totals = of(1) * s_scale, t_totals = of(5) * away(of(4), t_top).exp();
  // Differences of logits are relative to that of the peaks.
  const Tensor moved = (of(0) - of(4)) - (s_top - t_top).unsqueeze(dim);
  const Tensor pulls = of(3) * s_scale + (s_totals * moved).masked_fill(s_totals == 0, 0);
  return at::stack(
      {s_top, s_totals.sum(dim), (of(2) * s_scale + s_totals * s_shift).sum(dim), pulls.sum(dim), t_top,
       t_totals.sum(dim)},
      1);
}

/// Writes the statistics and the entropy.
inline void store_facts(const Tensor& facts, double temperature, Rows& r) {
  auto of = [&](int64_t i) { return facts.select(1, i); };
  auto counted = [&](const Tensor& t) { return r.mask.defined() ? t.masked_fill(r.mask.logical_not(), 0) : t; };
  r.entropy.copy_(counted(of(1).log() - of(2) / of(1)));
  // As rows compute it.
  const Tensor shift = of(0) - of(4), offset = shift + (of(1) / of(5)).log() * temperature;
  const Tensor mean = (of(3) / of(1) - (offset - shift)) / temperature;
  const Tensor numbers[] = {of(0), of(1), of(4), of(5), mean};
  for (int64_t i = 0; i < 5; ++i) r.stats.select(0, i).copy_(counted(numbers[i]));
}

// ---- The loops

/// What both loops of a call share.
struct LinearDivergence {
  RowsOn* rows;
  const Arguments& a;
  const Options& o;
  const c10::DimVector positions;  // the dimensions of the tokens
  const Division division;
  Head student, teacher;
  const Tensor mask;
  Tensor grad;  // (M,)
  Tensor divergence, entropy, stats;  // (M,), (M,), (5, M)

  /// plan_of(tokens, the most classes of any rank).
  template <class F>
  LinearDivergence(const Call& call, RowsOn* rows_on, const F& plan_of)
      : rows(rows_on),
        a(call.a),
        o(call.o),
        positions(call.positions()),
        division(
            call.op, a.s_input, positions, Shard(call.op, o.vocabulary, a.s_weight.size(0), "s_weight"), o.sequence_dim,
            a.numbers(), plan_of),
        student(division, a.trained(), o.student.scale, 3, /*bare=*/true),
        teacher(division, a.teacher(), o.teacher.scale, 3, /*bare=*/true),
        mask(division.arranged(a.mask)) {
    teacher.map = a.vocab_map;
    teacher.sustained = student.sustained;
    if (a.s_input.is_cpu()) runtime::count_cpu_call();
  }

  const Shard& shard() const { return division.shard; }
  const Plan& plan() const { return division.plan; }
  bool is_empty() const { return division.tokens == 0 || shard().classes == 0; }

  /// `each` numbers per token, in the caller's order: (each, M). And the reverse.
  Tensor restored(const Tensor& t) const {
    if (!division.order.is_split()) return t;
    auto sizes = positions;
    sizes.push_back(t.size(0));
    const Tensor out = division.order.restore(t.t().contiguous(), sizes, t.size(0));
    return out.view({division.tokens, t.size(0)}).t().contiguous();
  }
  Tensor ordered(const Tensor& t) const {
    if (!division.order.is_split()) return t;
    auto sizes = positions;
    sizes.push_back(t.size(0));
    return division.arranged(t.t().reshape(sizes), t.size(0)).t().contiguous();
  }

  void differentiate(const Gradients& gradients, const Tensor& upstream) {
    grad = upstream.defined() ? division.arranged(upstream).to(a.compute()) : upstream;
    student.differentiate(gradients);
  }

  Tensor buffer(int64_t count, int64_t classes, at::ScalarType dtype) const {
    return at::empty({count, logits_stride(classes, at::kHalf)}, a.s_input.options().dtype(dtype));
  }

  Rows rows_at(Phase phase, int64_t first, int64_t count, int64_t c, int64_t classes) const {
    auto part = [&](const Tensor& t) { return t.defined() ? t.narrow(-1, first, count) : t; };
    auto bias_of = [&](const Head& head) {
      const Tensor bias = head.of_classes(head.bias, c, classes);
      const bool is_aligned = !bias.defined() || uintptr_t(bias.const_data_ptr()) % 16 == 0;
      return is_aligned ? bias : bias.clone();
    };
    Rows r{division.op, o, phase, {}, {}, bias_of(student), bias_of(teacher), part(mask), part(grad)};
    r.stats = part(stats), r.divergence = part(divergence), r.entropy = part(entropy);
    return r;
  }
};

struct LossInChunks : LinearDivergence {
  using LinearDivergence::LinearDivergence;

  /// With vocab_map. all: the teacher's logits of all classes, which are overwritten. r.teacher: memory for the mapped
  /// ones.
  void compute_mapped(Rows& r, const Tensor& all) const {
    Tensor mapped = r.teacher;
    at::index_select_out(mapped, all, 1, teacher.map);
    // The logarithm of the sum of exponentials. Overwrites z.
    auto log_total = [&](Tensor z, const Tensor& bias) {
      if (bias.defined()) z.add_(bias);
      double factor = o.teacher.scale;
      if (o.teacher.softcap) {
        z.mul_(factor / *o.teacher.softcap).tanh_();
        factor = *o.teacher.softcap;
      }
      factor /= o.temperature;
      if (factor != 1) z.mul_(factor);
      const Tensor top = z.amax(1, true);
      return z.sub_(top).exp_().sum(1).log_().add_(top.select(1, 0));
    };
    const Tensor of_mapped = log_total(mapped.clone(), r.t_bias);
    const Tensor share = of_mapped.sub_(log_total(all, teacher.bias)).exp_();
    r.grad = r.grad.defined() ? r.grad * share : share;
    rows(r);
    r.divergence.mul_(share).add_(at::xlogy(share, share));
    if (r.mask.defined()) r.divergence.masked_fill_(r.mask.logical_not(), 0);
    if (r.stats.defined()) r.stats.select(0, 4).copy_(share);
  }

  /// The results of a part, and its gradient.
  void compute(Rows& r) const {
    if (!shard().is_split()) return rows(r);
    const bool has_classes = shard().n > 0, waits = r.dlogits.defined() && o.is_mixture();
    r.phase = Phase::Scan;
    if (has_classes) {
      rows(r);
    } else {
      r.facts = at::zeros({r.student.size(0), 1, int64_t(kinds::SHARES)}, a.numbers());
      for (int64_t peak : {0, 4}) r.facts.select(2, peak).fill_(std::numeric_limits<float>::lowest());
    }
    const Tensor mine = join_facts(r.facts, 1, o.temperature).contiguous();
    store_facts(join_facts(shard().group->all_gather(mine).wait(), 0, o.temperature), o.temperature, r);
    r.phase = Phase::Values;
    r.keeps = waits;
    const Tensor dlogits = r.dlogits;
    if (waits) r.dlogits = Tensor();
    if (has_classes) {
      rows(r);
    } else {
      r.divergence.zero_();
      if (o.is_mixture()) r.stats.select(0, 4).zero_();
    }
    if (!waits) return;
    shard().group->all_reduce(r.stats.select(0, 4)).wait();
    r.phase = Phase::Write;
    r.dlogits = dlogits;
    if (has_classes) rows(r);
  }

  void run() {
    const Gradients& into = student.into;
    if (is_empty()) {
      for (Tensor* t : {&divergence, &entropy, &stats}) {
        if (t->defined()) t->zero_();
      }
      return student.zero();
    }
    const bool gradients = into.defined().any();
    const auto compute_dtype = a.compute(), dtype = student.x().scalar_type();
    const bool in_place = gradients && dtype == compute_dtype;
    const bool maps = a.vocab_map.defined();
    const int64_t n = shard().n, t_classes = maps ? a.t_weight.size(0) : n, step = plan().part;
    Tensor dlogits, logits, mapped, t_logits = buffer(step, t_classes, compute_dtype);
    if (maps) mapped = buffer(step, n, compute_dtype);
    if (gradients) dlogits = buffer(division.rows_from(0), n, dtype);
    if (!in_place) logits = buffer(step, n, compute_dtype);
    run_blocks(division, {&student, &teacher}, [&](int64_t first, int64_t count, int64_t, int64_t) {
      const Tensor chunk = gradients ? logits_in(dlogits, count, n, false) : Tensor();
      for (int64_t at = 0; at < count; at += step) {
        const int64_t part = std::min(step, count - at);
        Rows r = rows_at(Phase::All, first + at, part, 0, n);
        if (gradients) r.dlogits = chunk.narrow(0, at, part);
        r.student = in_place ? r.dlogits : logits_in(logits, part, n, false);
        const Tensor all = logits_in(t_logits, part, t_classes, false);
        r.teacher = maps ? logits_in(mapped, part, n, false) : all;
        student.logits(r.student, first + at, 0);
        teacher.logits(all, first + at, teacher.weight, teacher.low_rank.b(), {});
        maps ? compute_mapped(r, all) : compute(r);
      }
      if (gradients) student.add(chunk, first);
    });
    student.finish();
    if (!shard().is_split()) return;
    // Of a mixture that wrote gradients, the mean is complete.
    const bool adds_mean = o.is_mixture() && !gradients;
    const Tensor sums = adds_mean ? at::stack({divergence, stats.select(0, 4)}) : divergence;
    shard().group->all_reduce(sums).wait();
    if (adds_mean) divergence.copy_(sums.select(0, 0)), stats.select(0, 4).copy_(sums.select(0, 1));
  }
};

struct LossInBlocks : LinearDivergence {
  using LinearDivergence::LinearDivergence;

  void run() {
    if (is_empty()) return student.zero();
    const auto compute_dtype = a.compute(), dtype = student.x().scalar_type();
    const int64_t most = division.rows_from(0), widest = std::min(plan().classes, shard().n);
    const bool in_place = dtype == compute_dtype;
    const Tensor t_logits = buffer(most, widest, compute_dtype), dlogits = buffer(most, widest, dtype);
    const Tensor logits = in_place ? dlogits : buffer(most, widest, compute_dtype);
    run_blocks(division, {&student, &teacher}, [&](int64_t first, int64_t count, int64_t c, int64_t classes) {
      Rows r = rows_at(Phase::Write, first, count, c, classes);
      r.dlogits = logits_in(dlogits, count, classes, false);
      r.student = in_place ? r.dlogits : logits_in(logits, count, classes, false);
      r.teacher = logits_in(t_logits, count, classes, false);
      if (classes > 0) {
        student.logits(r.student, first, c);
        teacher.logits(r.teacher, first, c);
        rows(r);
      }
      student.add(r.dlogits, first, c);
    });
    student.finish();
  }
};

/// The gradients of all tokens from the statistics of their rows. upstream: of each token, in the caller's order and
/// the compute type.
inline void compute_gradients(
    const Call& call, RowsOn* rows, const Tensor& upstream, const Tensor& stats, double head_scale,
    const Gradients& into) {
  LossInBlocks loss(
      call, rows, [&](int64_t tokens, int64_t classes) { return plan_blocks(call, tokens, classes, into.defined()); });
  const Tensor share = call.a.vocab_map.defined() ? stats.select(0, 4).view(call.positions()) : Tensor();
  loss.differentiate(into, !share.defined() ? upstream : upstream.defined() ? upstream * share : share);
  loss.stats = loss.ordered(stats);
  loss.student.head_scale = head_scale;
  loss.run();
}

/// Token weights in the compute type, 0 where the mask is false; undefined if there are none.
inline Tensor factors_of(const Arguments& a) {
  if (!a.token_weight.defined()) return {};
  const Tensor factor = a.token_weight.to(a.compute());
  return a.mask.defined() ? factor.masked_fill(a.mask.logical_not(), 0) : factor;
}

/// What a mean divides by.
inline Tensor total_of(const Arguments& a, const Tensor& factor, int64_t tokens) {
  if (factor.defined()) return factor.sum();
  if (a.mask.defined()) return a.mask.sum(a.compute());
  return at::scalar_tensor(double(tokens), a.numbers());
}

/// `out` has the memory for all results that are wanted. given_total: what a mean divides by, if it is not the sum of
/// this call's weights.
inline void forward(const Call& call, RowsOn* rows, const Tensor& given_total, Results& out) {
  const Arguments& a = call.a;
  const Options& o = call.o;
  c10::DeviceGuard guard(a.s_input.device());
  const at::IntArrayRef positions = call.positions();
  const Gradients& into = out.gradients;
  const Wanted wanted = into.defined();
  bool in_blocks = false;
  LossInChunks loss(call, rows, [&](int64_t tokens, int64_t classes) {
    const Plan plan = plan_chunks(call, tokens, classes, wanted);
    // Raised here rather than in backward.
    if (out.stats.defined()) plan_blocks(call, tokens, classes, {true, true, true});
    in_blocks = wanted.weight && plan.chunks > kMostRoundings && at::isReducedFloatingType(a.s_input.scalar_type());
    return in_blocks ? plan_chunks(call, tokens, classes, {}) : plan;
  });
  const int64_t tokens = loss.division.tokens;
  const Tensor factor = factors_of(a);
  const Tensor total = !o.mean() ? Tensor()
      : given_total.defined()    ? given_total.to(a.compute())
                                 : total_of(a, factor, tokens);
  Tensor grad = factor;
  if (wanted.any() && (out.deferred_scale.defined() || o.mean())) {
    const Tensor inverse = o.mean() ? inverse_or_zero(total) : Tensor();
    if (out.deferred_scale.defined()) {
      loss.student.head_scale = defer_scale(out.deferred_scale, tokens, inverse);
    } else {
      grad = factor.defined() ? factor * inverse : inverse.expand(positions).contiguous();
    }
  }
  const bool ordered = loss.division.order.is_split();
  const bool own = o.reduced() || ordered;
  loss.divergence = own ? at::empty({tokens}, a.numbers()) : out.divergence.view({tokens});
  loss.entropy = ordered ? at::empty({tokens}, a.numbers()) : out.entropy.view({tokens});
  loss.stats = out.stats.defined() && !ordered                      ? out.stats
      : out.stats.defined() || in_blocks || loss.shard().is_split() ? at::empty({5, tokens}, a.numbers())
                                                                    : Tensor();
  if (wanted.any() && !in_blocks) loss.differentiate(into, grad);
  loss.run();
  const Tensor stats = loss.stats.defined() ? loss.restored(loss.stats) : Tensor();
  if (ordered && out.stats.defined()) out.stats.copy_(stats);
  if (in_blocks) compute_gradients(call, rows, grad, stats, loss.student.head_scale, into);
  if (factor.defined()) loss.divergence.mul_(loss.division.arranged(factor));
  if (ordered) out.entropy.copy_(loss.division.order.restore(loss.entropy, positions));
  if (o.reduced()) {
    at::sum_out(out.divergence, loss.divergence, at::OptionalIntArrayRef());
    if (o.mean()) out.divergence.div_(total);
  } else if (ordered) {
    out.divergence.copy_(loss.division.order.restore(loss.divergence, positions));
  }
}

/// For a trained head and reduction="none": computes the logits again.
inline void backward(const Call& call, RowsOn* rows, const Tensor& grad, const Tensor& stats, const Gradients& into) {
  c10::DeviceGuard guard(call.a.s_input.device());
  const at::IntArrayRef sizes = call.positions();
  LIGER_CHECK(grad.sizes().equals(sizes), call.op, "the gradient", c10::str("have shape ", sizes), grad.sizes());
  const Tensor factor = factors_of(call.a);
  Tensor upstream = grad.to(call.a.compute());
  if (factor.defined()) upstream = upstream * factor;
  compute_gradients(call, rows, upstream, stats, 1, into);
}

}  // namespace liger::ops::fused_linear_divergence
