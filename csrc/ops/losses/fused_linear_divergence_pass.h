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
// are known before the gradients, which are computed from all tokens and some classes at a time (BlockPlan).
//
// If the classes are split over ranks, a rank scans its logits of a part, and needs the facts of all ranks for the
// values and gradients. The values, sums over classes, are added up over the ranks at the end, but for the mean that
// the gradient of a mixture needs at once. d input is reduced while d weight's GEMM runs.
//
// With vocab_map, the rows compare the student with q, the teacher's softmax over the mapped classes alone, whose share
// of the whole softmax is s: the divergence is s (KL(q || p_s) + log s), and its gradient s times that of KL(q || p_s).

#include <cmath>
#include <limits>
#include <utility>

#include "ops/losses/fused_linear_divergence_rows.h"
#include "ops/losses/linear_chunks.h"
#include "runtime/status.h"

namespace liger::ops::fused_linear_divergence {

using Wanted = WantedGradients;
using core::Shard;

/// The tensors of a call. Undefined ones were not given.
struct Arguments {
  Tensor s_input, s_weight, t_input, t_weight, s_bias, t_bias, mask, token_weight, vocab_map;
  Tensor s_low_rank_input, s_low_rank_weight, t_low_rank_input, t_low_rank_weight;

  at::ScalarType compute() const { return s_input.scalar_type() == at::kDouble ? at::kDouble : compute_type(t_input); }
  at::TensorOptions numbers() const { return s_input.options().dtype(compute()); }
  Gradients trained() const { return {s_input, s_weight, s_bias, s_low_rank_input, s_low_rank_weight}; }
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

/// chunk: tokens whose gradients exist at the same time. part: tokens whose logits do.
struct ChunkPlan : Plan {
  int64_t part = 1;
};

/// wanted: gradients that this call computes.
inline ChunkPlan plan_chunks(const Call& call, int64_t tokens, int64_t classes, Wanted wanted) {
  const auto& [op, a, o, positions] = call;
  // Statistics of a row and of its parts, results of a token.
  constexpr int64_t kPerRow = 400, kPerToken = 24;
  // Parts of less than kFullPart tokens make GEMMs slow, and are for the sake of d weight alone.
  constexpr int64_t kLargestPart = 2048, kFullPart = 512, kLeastPart = 256;
  const Bytes bytes(a, wanted.any());
  ChunkPlan plan;
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
    ChunkPlan other = plan;
    divide_tokens(other, op, tokens, per_chunk, kPerToken, rest, rest);
    if (other.chunks >= plan.chunks) continue;
    plan = other;
    plan.part = part;
  }
  return plan;
}

inline BlockPlan plan_blocks(const Call& call, int64_t tokens, int64_t classes, Wanted wanted) {
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

/// One model in a call: its tokens in the order of the call, and its head.
struct Model : Tokens {
  Tensor weight, bias;  // bias: in the compute type
  gemm::LowRank low_rank;
  Tensor map;  // the row of the head for each class; undefined: the rows in order

  Model(
      const Tensor& input, const Tensor& weight_in, const Tensor& bias_in, gemm::LowRank addend, int64_t tokens,
      const TokenOrder& order, at::ScalarType compute, const Tensor& map_in)
      : Tokens(input, tokens, order),
        weight(weight_in),
        bias(bias_in.defined() ? bias_in.to(compute).contiguous() : bias_in),
        low_rank(std::move(addend)),
        map(map_in) {}

  /// The part of the head for `count` classes from `c` on. t: weight, bias or the addend's b.
  Tensor of_classes(const Tensor& t, int64_t c, int64_t count) const {
    return map.defined() ? t.index_select(0, map.narrow(0, c, count)) : t.narrow(0, c, count);
  }

  /// Logits without bias and scale, of out.size(1) classes from `c` on, in out's dtype, which is at least that of x.
  void project(const Tensor& out, int64_t first, int64_t c, bool sustained) const {
    const int64_t count = out.size(1);
    const Tensor of_b = low_rank.defined() ? of_classes(low_rank.b(), c, count) : Tensor();
    project(out, first, of_classes(weight, c, count), of_b, sustained);
  }

  /// of_weight, of_b: the rows of the classes.
  void project(Tensor out, int64_t first, const Tensor& of_weight, const Tensor& of_b, bool sustained) const {
    const Tensor tokens = x.narrow(0, first, out.size(0));
    const auto wide = out.scalar_type();
    const bool adds = low_rank.defined();
    if (adds) low_rank.write(out, first, of_b, {}, 1);
    if (x.size(1) == 0) {
      if (!adds) out.zero_();
    } else if (x.scalar_type() == wide) {
      gemm::multiply(out, tokens, of_weight.t(), adds, 1, sustained);
    } else if (x.is_cuda() && adds) {
      at::addmm_out(out, out, tokens, of_weight.t(), wide);
    } else if (x.is_cuda()) {
      at::mm_out(out, tokens, of_weight.t(), wide);
    } else {
      const Tensor wide_tokens = tokens.to(wide);
      for_widened_parts(of_weight, wide, [&](int64_t from, int64_t count, const Tensor& w) {
        Tensor columns = out.narrow(1, from, count);
        gemm::multiply(columns, wide_tokens, w.t(), adds);
      });
    }
  }

  Tensor bias_of(int64_t c, int64_t count) const {
    if (!bias.defined()) return bias;
    const Tensor part = of_classes(bias, c, count);
    return uintptr_t(part.const_data_ptr()) % 16 == 0 ? part : part.clone();
  }
};

/// One call's state while it loops over tokens and classes. P: the plan.
template <class P>
struct Pass {
  const char* op;
  RowsOn* rows;
  const Arguments& a;
  const Options& o;
  const c10::DimVector positions;  // the dimensions of the tokens
  const int64_t tokens;
  const Shard shard;
  P plan;
  const TokenOrder order;
  Model student;
  const Model teacher;
  const bool sustained;
  const Tensor mask;
  Tensor grad;  // (M,)
  Tensor divergence, entropy, stats;  // (M,), (M,), (5, M)
  double head_scale = 1;  // scale of d weight and d bias
  Gradients into;
  InputGradient dinput;
  Tensor sum, dx, bias_sum;  // sum: d input over the classes, if wider than d input. dx: d input of a chunk

  template <class MakePlan>
  Pass(const Call& call, RowsOn* rows_on, const MakePlan& make_plan)
      : op(call.op),
        rows(rows_on),
        a(call.a),
        o(call.o),
        positions(call.positions()),
        tokens(c10::multiply_integers(positions)),
        shard(op, o.vocabulary, a.s_weight.size(0), "s_weight"),
        plan(make_plan(tokens, shard.largest)),
        order(order_of(op, a.s_input, positions, tokens, shard, o.sequence_dim, plan)),
        student(
            a.s_input, a.s_weight, a.s_bias, {op, a.s_low_rank_input, a.s_low_rank_weight, a.s_input}, tokens, order,
            a.compute(), Tensor()),
        teacher(
            a.t_input, a.t_weight, a.t_bias, {op, a.t_low_rank_input, a.t_low_rank_weight, a.t_input}, tokens, order,
            a.compute(), a.vocab_map),
        sustained(gemm::is_sustained(3.0 * double(tokens) * double(shard.n) * double(student.x.size(1)))),
        mask(arranged(a.mask)) {
    if (a.s_input.is_cpu()) runtime::count_cpu_call();
  }

  bool is_empty() const { return tokens == 0 || shard.classes == 0; }

  /// One number per token, in the order of this call.
  Tensor arranged(const Tensor& t) const { return t.defined() ? order.arrange(t).contiguous() : t; }

  /// `each` numbers per token, in the caller's order: (each, M). And the reverse.
  Tensor restored(const Tensor& t) const {
    if (!order.is_split()) return t;
    auto sizes = positions;
    sizes.push_back(t.size(0));
    return order.restore(t.t().contiguous(), sizes, t.size(0)).view({tokens, t.size(0)}).t().contiguous();
  }
  Tensor ordered(const Tensor& t) const {
    if (!order.is_split()) return t;
    auto sizes = positions;
    sizes.push_back(t.size(0));
    return order.arrange(t.t().reshape(sizes), t.size(0)).view({tokens, t.size(0)}).t().contiguous();
  }

  void compute_gradients(const Gradients& gradients, const Tensor& upstream) {
    into = gradients;
    grad = upstream.defined() ? arranged(upstream).to(a.compute()) : upstream;
    if (into.input.defined()) dinput.all = into.input.view({student.local.size(0), student.local.size(1)});
    if (into.bias.defined()) bias_sum = at::zeros({shard.n}, a.numbers());
    student.low_rank.compute_gradients(into.low_rank_input, into.low_rank_weight);
  }

  void zero_gradients() {
    for (Tensor* t : {&into.input, &into.weight, &into.bias, &into.low_rank_input, &into.low_rank_weight}) {
      if (t->defined()) t->zero_();
    }
  }

  /// Both models' tokens of the chunk from `first` on.
  std::pair<core::Pending, core::Pending> fetch(int64_t first) const {
    return {student.fetch(first, plan.chunk, order, shard), teacher.fetch(first, plan.chunk, order, shard)};
  }

  Tensor buffer(int64_t count, int64_t classes, at::ScalarType dtype) const {
    return at::empty({count, logits_stride(classes, at::kHalf)}, a.s_input.options().dtype(dtype));
  }

  Rows rows_at(Phase phase, int64_t first, int64_t count, int64_t c, int64_t classes) const {
    auto part = [&](const Tensor& t) { return t.defined() ? t.narrow(-1, first, count) : t; };
    Rows r{op, o, phase, {}, {}, student.bias_of(c, classes), teacher.bias_of(c, classes), part(mask), part(grad)};
    r.stats = part(stats), r.divergence = part(divergence), r.entropy = part(entropy);
    return r;
  }

  /// Adds a chunk's gradients, of some classes from `c` on. dlogits: (T, n).
  void add(const Tensor& dlogits, int64_t first, int64_t c) {
    const double scale = o.student.scale;
    const int64_t count = dlogits.size(0), classes = dlogits.size(1);
    if (dinput.defined()) {
      if (c == 0) dx = dinput.of_chunk(first, count, order);
      const Tensor total = sum.defined() ? sum.narrow(0, 0, count) : dx;
      multiply_by_weight(total, dlogits, student.weight.narrow(0, c, classes), c > 0, scale, sustained);
      if (c + classes == shard.n) {
        if (sum.defined()) dx.copy_(total);
        dinput.reduce(dx, first, order, shard);
      }
    }
    if (bias_sum.defined()) {
      bias_sum.narrow(0, c, classes).add_(dlogits.sum(0, false, bias_sum.scalar_type()), scale * head_scale);
    }
    student.low_rank.add_gradients(dlogits, first, c, scale, scale * head_scale);
    if (into.weight.defined() && classes > 0) {
      gemm::multiply(
          into.weight.narrow(0, c, classes), dlogits.t(), student.x.narrow(0, first, count), first > 0,
          scale * head_scale, sustained);
    }
  }

  void finish() {
    if (bias_sum.defined()) into.bias.copy_(bias_sum);
    finish_low_rank(student.low_rank, shard);
    dinput.wait();
  }
};

struct ChunkPass : Pass<ChunkPlan> {
  using Pass::Pass;

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
    if (!shard.is_split()) return rows(r);
    const bool has_classes = shard.n > 0, waits = r.dlogits.defined() && o.is_mixture();
    r.phase = Phase::Scan;
    if (has_classes) {
      rows(r);
    } else {
      r.facts = at::zeros({r.student.size(0), 1, int64_t(kinds::SHARES)}, a.numbers());
      for (int64_t peak : {0, 4}) r.facts.select(2, peak).fill_(std::numeric_limits<float>::lowest());
    }
    const Tensor mine = join_facts(r.facts, 1, o.temperature).contiguous();
    store_facts(join_facts(shard.group->all_gather(mine).wait(), 0, o.temperature), o.temperature, r);
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
    shard.group->all_reduce(r.stats.select(0, 4)).wait();
    r.phase = Phase::Write;
    r.dlogits = dlogits;
    if (has_classes) rows(r);
  }

  void run() {
    if (is_empty()) {
      for (Tensor* t : {&divergence, &entropy, &stats}) {
        if (t->defined()) t->zero_();
      }
      return zero_gradients();
    }
    const bool gradients = into.defined().any();
    const auto compute_dtype = a.compute(), dtype = student.x.scalar_type();
    const bool in_place = gradients && dtype == compute_dtype;
    const bool maps = a.vocab_map.defined();
    const int64_t t_classes = maps ? a.t_weight.size(0) : shard.n;
    Tensor dlogits, logits, mapped, t_logits = buffer(plan.part, t_classes, compute_dtype);
    if (maps) mapped = buffer(plan.part, shard.n, compute_dtype);
    if (gradients) dlogits = buffer(std::min(plan.chunk, tokens), shard.n, dtype);
    if (!in_place) logits = buffer(plan.part, shard.n, compute_dtype);
    auto next = fetch(0);
    for (int64_t first = 0; first < tokens; first += plan.chunk) {
      next.first.wait(), next.second.wait();
      next = fetch(first + plan.chunk);
      const int64_t count = std::min(plan.chunk, tokens - first);
      const Tensor chunk = gradients ? logits_in(dlogits, count, shard.n, false) : Tensor();
      for (int64_t at = 0; at < count; at += plan.part) {
        const int64_t part = std::min(plan.part, count - at);
        Rows r = rows_at(Phase::All, first + at, part, 0, shard.n);
        if (gradients) r.dlogits = chunk.narrow(0, at, part);
        r.student = in_place ? r.dlogits : logits_in(logits, part, shard.n, false);
        const Tensor all = logits_in(t_logits, part, t_classes, false);
        r.teacher = maps ? logits_in(mapped, part, shard.n, false) : all;
        student.project(r.student, first + at, 0, sustained);
        teacher.project(all, first + at, teacher.weight, teacher.low_rank.b(), sustained);
        maps ? compute_mapped(r, all) : compute(r);
      }
      if (gradients) add(chunk, first, 0);
    }
    finish();
    if (!shard.is_split()) return;
    // Of a mixture that wrote gradients, the mean is complete.
    const bool adds_mean = o.is_mixture() && !gradients;
    const Tensor sums = adds_mean ? at::stack({divergence, stats.select(0, 4)}) : divergence;
    shard.group->all_reduce(sums).wait();
    if (adds_mean) divergence.copy_(sums.select(0, 0)), stats.select(0, 4).copy_(sums.select(0, 1));
  }
};

struct BlockPass : Pass<BlockPlan> {
  using Pass::Pass;

  void run() {
    if (is_empty()) return zero_gradients();
    const auto compute_dtype = a.compute(), dtype = student.x.scalar_type();
    const int64_t most = std::min(plan.chunk, tokens), widest = std::min(plan.classes, shard.n);
    const bool in_place = dtype == compute_dtype;
    const Tensor t_logits = buffer(most, widest, compute_dtype), dlogits = buffer(most, widest, dtype);
    const Tensor logits = in_place ? dlogits : buffer(most, widest, compute_dtype);
    // One block needs no sums over classes.
    if (into.input.defined() && widest < shard.n && at::isReducedFloatingType(dtype)) {
      sum = at::empty({most, student.x.size(1)}, a.numbers());
    }
    auto next = fetch(0);
    for (int64_t first = 0; first < tokens; first += plan.chunk) {
      next.first.wait(), next.second.wait();
      next = fetch(first + plan.chunk);
      const int64_t count = std::min(plan.chunk, tokens - first);
      int64_t c = 0;
      do {
        const int64_t classes = std::min(plan.classes, shard.n - c);
        Rows r = rows_at(Phase::Write, first, count, c, classes);
        r.dlogits = logits_in(dlogits, count, classes, false);
        r.student = in_place ? r.dlogits : logits_in(logits, count, classes, false);
        r.teacher = logits_in(t_logits, count, classes, false);
        if (classes > 0) {
          student.project(r.student, first, c, sustained);
          teacher.project(r.teacher, first, c, sustained);
          rows(r);
        }
        add(r.dlogits, first, c);
        c += classes;
      } while (c < shard.n);
    }
    finish();
  }
};

/// The gradients of all tokens from the statistics of their rows. upstream: of each token, in the caller's order and
/// the compute type.
inline void compute_gradients(
    const Call& call, RowsOn* rows, const Tensor& upstream, const Tensor& stats, double head_scale,
    const Gradients& into) {
  BlockPass pass(
      call, rows, [&](int64_t tokens, int64_t classes) { return plan_blocks(call, tokens, classes, into.defined()); });
  const Tensor share = call.a.vocab_map.defined() ? stats.select(0, 4).view(call.positions()) : Tensor();
  pass.compute_gradients(into, !share.defined() ? upstream : upstream.defined() ? upstream * share : share);
  pass.stats = pass.ordered(stats);
  pass.head_scale = head_scale;
  pass.run();
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
  ChunkPass pass(call, rows, [&](int64_t tokens, int64_t classes) {
    ChunkPlan plan = plan_chunks(call, tokens, classes, wanted);
    // Raised here rather than in backward.
    if (out.stats.defined()) plan_blocks(call, tokens, classes, {true, true, true});
    in_blocks = wanted.weight && plan.chunks > kMostRoundings && at::isReducedFloatingType(a.s_input.scalar_type());
    return in_blocks ? plan_chunks(call, tokens, classes, {}) : plan;
  });
  const int64_t tokens = pass.tokens;
  const Tensor factor = factors_of(a);
  const Tensor total = !o.mean() ? Tensor()
      : given_total.defined()    ? given_total.to(a.compute())
                                 : total_of(a, factor, tokens);
  Tensor grad = factor;
  if (wanted.any() && (out.deferred_scale.defined() || o.mean())) {
    const Tensor inverse = o.mean() ? inverse_or_zero(total) : Tensor();
    if (out.deferred_scale.defined()) {
      pass.head_scale = defer_scale(out.deferred_scale, tokens, inverse);
    } else {
      grad = factor.defined() ? factor * inverse : inverse.expand(positions).contiguous();
    }
  }
  const bool ordered = pass.order.is_split();
  const bool own = o.reduced() || ordered;
  pass.divergence = own ? at::empty({tokens}, a.numbers()) : out.divergence.view({tokens});
  pass.entropy = ordered ? at::empty({tokens}, a.numbers()) : out.entropy.view({tokens});
  pass.stats = out.stats.defined() && !ordered                    ? out.stats
      : out.stats.defined() || in_blocks || pass.shard.is_split() ? at::empty({5, tokens}, a.numbers())
                                                                  : Tensor();
  if (wanted.any() && !in_blocks) pass.compute_gradients(into, grad);
  pass.run();
  const Tensor stats = pass.stats.defined() ? pass.restored(pass.stats) : Tensor();
  if (ordered && out.stats.defined()) out.stats.copy_(stats);
  if (in_blocks) compute_gradients(call, rows, grad, stats, pass.head_scale, into);
  if (factor.defined()) pass.divergence.mul_(pass.arranged(factor));
  if (ordered) out.entropy.copy_(pass.order.restore(pass.entropy, positions));
  if (o.reduced()) {
    at::sum_out(out.divergence, pass.divergence, at::OptionalIntArrayRef());
    if (o.mean()) out.divergence.div_(total);
  } else if (ordered) {
    out.divergence.copy_(pass.order.restore(pass.divergence, positions));
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
