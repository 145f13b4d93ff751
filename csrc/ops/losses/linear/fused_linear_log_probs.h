#pragma once

// The loops of fused_linear_log_probs, on CPU and CUDA. Logits exist for one chunk at a time, in fp32 (fp64 for fp64):
// reinforcement learning compares results with those of other programs, and the gradient of a token that is nearly
// certain is the small difference of 1 and its probability. Gradients of logits have the dtype of input.
//
// M tokens, H hidden, V classes, K ids per token.
//
// Forward takes T tokens and all classes at a time. If only input requires a gradient and is not split along a
// sequence, the rows of log_probs overwrite a chunk of logits with its gradient for an upstream gradient of 1, and a
// second GEMM multiplies it by weight.
//
// Backward computes the logits again. For the gradients of the head it takes all tokens and some classes at a time, see
// divide_classes(). That of input is summed over the classes in fp32.

#include "core/aten.h"
#include "ops/losses/linear/loop.h"
#include "ops/losses/linear/statistics.h"
#include "ops/losses/log_probs.h"
#include "runtime/status.h"

namespace liger::ops::fused_linear_log_probs {

using namespace core;
using namespace linear;

using at::Tensor;
using core::ClassSizes;
using core::Shard;
using core::Vocabulary;
using log_probs::Columns;
using log_probs::ResultGradients;
using log_probs::Results;

/// sequence_dim: the dimension along which input is split over the ranks of the group.
struct Settings {
  double logits_scale;
  log_probs::Options o;
  bool entropy, entropy_grad, mean_logits, log_sum_sq_probs, is_top1, log_sum_exp;
  std::optional<int64_t> memory_budget;
  Vocabulary vocabulary;
  std::optional<int64_t> sequence_dim;

  /// True if the gradient of a frozen head's input that forward computes is without its ids: backward adds them, where
  /// the upstream gradients are not one factor for the whole row.
  bool ids_apart(int64_t ids) const { return ids != 1 || log_sum_exp; }
};

/// A call's checked arguments. op: its name in messages. Tensors that are not given are undefined.
struct Call : Settings {
  const char* op;
  Tensor input, weight, target, bias, low_rank_input, low_rank_weight;

  HeadTensors trained() const { return {input, weight, bias, low_rank_input, low_rank_weight}; }

  /// True if statistics.h computes the logits.
  bool by_gemm() const {
    const bool adds = bias.defined() || (low_rank_input.defined() && low_rank_input.size(-1) > 0);
    return Statistics::applies(input, weight, !adds && !o.softcap && logits_scale > 0, vocabulary.is_split());
  }
};

/// Results that are not asked for are empty. of_*: the gradients of input for an upstream gradient of 1, without
/// ids_apart().
struct Forward {
  log_probs::Results rows;
  Tensor log_sum_exp, of_log_probs, of_entropy;

  auto tie() {
    return std::tie(
        rows.log_probs, rows.entropy, rows.mean_logits, rows.log_sum_sq_probs, rows.is_top1, log_sum_exp, rows.stats,
        rows.chosen, of_log_probs, of_entropy);
  }
};

/// The parts of log_probs that differ between devices.
struct Device {
  log_probs::ForwardOn* forward;
  log_probs::BackwardOn* backward;
};

/// Several ids per token make a dimension of their own.
inline bool has_several_ids(const Tensor& input, const Tensor& target) { return target.dim() == input.dim(); }

// More tokens per GEMM than without gradients: the output of the second GEMM has few columns.
constexpr int64_t kForward = 320 * kMiB, kForwardWithGradients = 640 * kMiB;
constexpr int64_t kLeastBackward = 320 * kMiB, kMostBackward = 1280 * kMiB;

/// Numbers of tokens, H and K of a call.
struct Sizes {
  int64_t tokens, hidden, ids;

  Sizes(const Tensor& input, const Tensor& target)
      : tokens(c10::multiply_integers(target.sizes().slice(0, input.dim() - 1))),
        hidden(input.size(-1)),
        ids(has_several_ids(input, target) ? target.size(-1) : 1) {}
};

/// What all loops of a call share.
struct LinearLogProbs {
  const Device& device;
  const Settings& s;
  const Sizes sizes;
  const Division division;
  const Tensor index;  // (M, K)
  Head head;
  const bool by_gemm;  // logits are those of statistics.h

  /// plan_of(tokens, the most classes of any rank).
  template <class F>
  LinearLogProbs(const Device& on, const Call& call, const F& plan_of)
      : device(on),
        s(call),
        sizes(call.input, call.target),
        division(
            call.op, call.input, call.target.sizes().slice(0, call.input.dim() - 1),
            Shard(call.op, call.vocabulary, call.weight.size(0), "weight"), s.sequence_dim,
            call.input.options().dtype(compute_type(call.input)), plan_of),
        index(division.arranged(call.target, sizes.ids).contiguous()),
        head(division, call.trained(), call.logits_scale, 2),
        by_gemm(call.by_gemm()) {
    if (by_gemm) Statistics::align(head);
  }

  const Shard& shard() const { return division.shard; }

  at::ScalarType own() const { return head.x().scalar_type(); }
  at::ScalarType of_logits() const { return by_gemm ? own() : compute_type(head.x()); }

  Tensor buffer(int64_t classes, at::ScalarType dtype) const {
    return at::empty({division.rows_from(0), logits_stride(classes, dtype)}, head.x().options().dtype(dtype));
  }
  /// Of buffer(). Undefined if that is.
  Tensor part(const Tensor& of, int64_t rows, int64_t classes) const {
    return of.defined() ? logits_in(of, rows, classes, head.bias.defined()) : Tensor();
  }
  Columns columns(int64_t first_class) const { return {shard().first + first_class, shard().classes, "target"}; }

  /// Writes the gradients of logits of classes from first_class on to `into`, which may be the logits. shares: what
  /// Statistics::multiply() returned with them.
  void differentiate(
      Tensor into, const Tensor& logits, const Tensor& shares, int64_t first, int64_t first_class,
      const ResultGradients& upstream, const Tensor& stats, const Tensor& chosen) const {
    if (logits.size(1) == 0) return;
    auto of_rows = [&](const Tensor& t) { return t.narrow(0, first, logits.size(0)); };
    const Tensor ids = of_rows(index), of = of_rows(stats), picked = of_rows(chosen);
    const Columns which = columns(first_class);
    if (by_gemm) {
      Statistics::differentiate(division.op, into, upstream, logits, shares, ids, of, picked, s.o, which);
    } else {
      device.backward(division.op, into, upstream, logits, ids, of, picked, s.o, which);
    }
  }
};

/// Bytes per logit. by_gemm: see statistics.h.
struct LogitBytes {
  int64_t logit, gradient;  // gradient: of one that is not where the logit was

  LogitBytes(at::ScalarType dtype, bool by_gemm) {
    const int64_t own = c10::elementSize(dtype);
    logit = !by_gemm && at::isReducedFloatingType(dtype) ? 4 : own;
    gradient = logit > own ? own : 0;
  }
};

// ---- Forward

/// per_row: bytes for each token of a chunk. usual: the budget if the caller gives none.
inline Plan plan_tokens(
    const char* op, int64_t tokens, int64_t per_row, int64_t usual, std::optional<int64_t> memory_budget) {
  Plan plan;
  divide_tokens(plan, op, tokens, per_row + 16, 0, usual, memory_budget);
  plan.bytes = std::min(plan.chunk, tokens) * (per_row + 16);
  return plan;
}

/// gradients: of a frozen head's input, for none of the results, log_probs, or the entropy too.
inline Plan forward_plan(
    const char* op, int64_t tokens, int64_t classes, at::ScalarType dtype, int64_t gradients, bool by_gemm,
    std::optional<int64_t> memory_budget) {
  const LogitBytes bytes(dtype, by_gemm);
  const int64_t row = logits_stride(classes, at::kHalf);
  int64_t per_row = by_gemm ? Statistics::bytes(classes) : 0;
  if (gradients > 0 || !by_gemm) per_row += bytes.logit * row;
  // Those of the entropy need the logits again.
  if (gradients > 0) per_row += (gradients > 1 ? int64_t(c10::elementSize(dtype)) : bytes.gradient) * row;
  return plan_tokens(op, tokens, per_row, gradients ? gradients * kForwardWithGradients : kForward, memory_budget);
}

inline Plan backward_plan(
    const char* op, int64_t tokens, int64_t hidden, int64_t classes, at::ScalarType dtype, bool by_gemm,
    WantedGradients wanted, std::optional<int64_t> memory_budget) {
  const LogitBytes bytes(dtype, by_gemm);
  const int64_t each = bytes.logit + bytes.gradient;
  if (!wanted.head()) {
    const int64_t per_row = each * logits_stride(classes, at::kHalf) + (by_gemm ? Statistics::bytes(classes) : 0);
    return plan_tokens(op, tokens, per_row, kForwardWithGradients, memory_budget);
  }
  const int64_t sums = wanted.input && at::isReducedFloatingType(dtype) ? 4 * hidden : 0;
  const int64_t usual = std::min(kMostBackward, std::max(kLeastBackward, tokens * sums * 5 / 2));
  const double per_logit = double(each) + (by_gemm ? Statistics::bytes_per_logit() : 0);
  return divide_classes(op, tokens, classes, per_logit, sums, memory_budget.value_or(usual));
}

/// What a rank tells the others about its logits: (T, facts), one row per token. The first three are the stats. Of a
/// rank without classes, the neutral elements.
inline Tensor facts_of(const Results& local, const Settings& s, bool has_classes) {
  std::vector<Tensor> parts{local.stats, local.chosen};
  if (!has_classes) {
    local.stats.zero_(), local.chosen.zero_();
    local.stats.select(1, 0).fill_(std::numeric_limits<float>::lowest());
  }
  auto add = [&](bool wanted, const Tensor& t, double neutral) {
    if (!wanted) return;
    if (!has_classes) t.fill_(neutral);
    parts.push_back(t.to(local.stats.scalar_type()).view({local.stats.size(0), -1}));
  };
  add(s.mean_logits, local.mean_logits, 0);
  add(s.log_sum_sq_probs, local.log_sum_sq_probs, -std::numeric_limits<double>::infinity());
  add(s.is_top1, local.is_top1, 0);
  return at::cat(parts, 1);
}

/// Combines the facts of all ranks (R, T, facts) into `out`. index: (T, K).
inline void combine_facts(const Tensor& all, const Tensor& index, const Shard& shard, const Settings& s, Results& out) {
  const log_probs::Options& o = s.o;
  const int64_t ids = index.size(1);
  const double inverse = 1 / o.temperature;
  const Tensor ignored = index == o.ignore_index, skipped = ignored.all(1);
  const Tensor peaks = all.select(2, 0), peak = peaks.amax(0);
  // exp of this is 0; the limit avoids 0 * -inf.
  const Tensor shift = ((peaks - peak) * inverse).clamp_min(-1000);
  const Tensor totals = all.select(2, 1) * shift.exp(), total = totals.sum(0);
  const Tensor mean = (totals * (all.select(2, 2) + shift)).sum(0) / total, log_total = total.log();
  // Only the rank that has an id sends its logit.
  const Tensor chosen = all.narrow(2, 3, ids).sum(0);
  const Tensor v = o.softcap ? *o.softcap * at::tanh(chosen / *o.softcap) : chosen;
  auto each = [](const Tensor& t) { return t.unsqueeze(1); };
  out.log_probs.copy_((((v - each(peak)) * inverse) - each(log_total)).masked_fill(ignored, 0));
  if (out.entropy.defined()) out.entropy.copy_((log_total - mean).masked_fill(skipped, 0));
  if (out.stats.defined()) {
    out.stats.copy_(at::stack({peak, total, mean}, 1).masked_fill(each(skipped), 0));
    out.chosen.copy_(chosen);
  }
  int64_t at = 3 + ids;
  if (s.mean_logits) {
    Tensor sum = at::zeros_like(peak);
    for (int64_t rank = 0; rank < shard.ranks(); ++rank) {
      const int64_t classes = shard.firsts[rank + 1] - shard.firsts[rank];
      if (classes > 0) sum.add_(all[rank].select(1, at), double(classes) / double(shard.classes));
    }
    out.mean_logits.copy_(sum);
    ++at;
  }
  if (s.log_sum_sq_probs) {
    const Tensor local = all.select(2, at) + 2 * (all.select(2, 1).log() + shift);
    out.log_sum_sq_probs.copy_((local.logsumexp(0) - 2 * log_total).masked_fill(skipped, 0));
    ++at;
  }
  if (s.is_top1) {
    // Of equal logits the first wins, which the first of these ranks has.
    const Tensor first = (peaks == peak).to(at::kInt).argmax(0, true).unsqueeze(2).expand({1, peak.size(0), ids});
    out.is_top1.copy_(all.narrow(2, at, ids).gather(0, first).squeeze(0) != 0);
  }
}

struct Chunk {
  int64_t first;
  core::Pending tokens, gathered;
  Tensor logits, shares;  // shares: with logits of statistics.h
};

struct ForwardLoss : LinearLogProbs {
  using LinearLogProbs::LinearLogProbs;

  Results out;  // in the order of this call: (M,), (M, K), (M, 3)
  Tensor of_log_probs, of_entropy;  // (M, H)
  Tensor logits, dlogits;  // memory of a chunk. dlogits: if gradients may not overwrite the logits

  /// Of the tokens from first on.
  Results at_tokens(int64_t first) const {
    const int64_t rows = division.rows_from(first);
    auto part = [&](const Tensor& t) { return t.defined() ? t.narrow(0, first, rows) : Tensor(); };
    return {part(out.log_probs),   part(out.entropy),          part(out.stats),  part(out.chosen),
            part(out.mean_logits), part(out.log_sum_sq_probs), part(out.is_top1)};
  }

  Chunk fetch(int64_t first) const { return {first, head.fetch(first), {}, {}, {}}; }
  void prepare(Chunk& c) const { c.tokens.wait(); }

  void open(Chunk& c, int64_t) const {
    const int64_t rows = division.rows_from(c.first), classes = shard().n;
    const Tensor ids = index.narrow(0, c.first, rows);
    c.logits = part(logits, rows, classes);
    if (!by_gemm && classes > 0) head.logits(c.logits, c.first, 0);
    auto describe = [&](Results& results) {
      if (by_gemm) {
        c.shares = Statistics::compute(division.op, head, c.first, ids, s.o, columns(0), c.logits, results);
      } else {
        device.forward(division.op, c.logits, ids, s.o, results, columns(0));
      }
    };
    if (!shard().is_split()) {
      Results results = at_tokens(c.first);
      return describe(results);
    }
    const auto numbers = division.numbers;
    Results local;
    local.log_probs = at::empty(ids.sizes(), numbers);
    local.stats = at::empty({rows, 3}, numbers);
    local.chosen = at::empty(ids.sizes(), numbers);
    if (s.mean_logits) local.mean_logits = at::empty({rows}, numbers);
    if (s.log_sum_sq_probs) local.log_sum_sq_probs = at::empty({rows}, numbers);
    if (s.is_top1) local.is_top1 = at::empty(ids.sizes(), numbers.dtype(at::kBool));
    if (classes > 0) describe(local);
    c.gathered = shard().group->all_gather(facts_of(local, s, classes > 0));
  }

  void close(Chunk& c) const {
    const int64_t rows = division.rows_from(c.first);
    if (shard().is_split()) {
      Results results = at_tokens(c.first);
      combine_facts(c.gathered.wait(), index.narrow(0, c.first, rows), shard(), s, results);
    }
    if (!of_log_probs.defined()) return;
    const Tensor gradient = dlogits.defined() ? part(dlogits, rows, c.logits.size(1)) : c.logits;
    auto multiply = [&](const Tensor& into, const ResultGradients& upstream) {
      differentiate(gradient, c.logits, c.shares, c.first, 0, upstream, out.stats, out.chosen);
      multiply_by_weight(into.narrow(0, c.first, rows), gradient, head.weight, false, head.scale, head.sustained);
    };
    ResultGradients upstream, of_row;
    upstream.of_others = s.ids_apart(sizes.ids);
    if (!upstream.of_others) upstream.log_probs = at::ones({rows, 1}, division.numbers);
    multiply(of_log_probs, upstream);
    if (!of_entropy.defined()) return;
    of_row.entropy = at::ones({rows}, division.numbers);
    multiply(of_entropy, of_row);
  }

  void run() {
    if (division.plan.chunks == 0) {
      if (head.x().is_cpu()) runtime::count_cpu_call();
      return;
    }
    if (of_log_probs.defined() || !by_gemm) logits = buffer(shard().n, of_logits());
    if (of_entropy.defined() || (of_log_probs.defined() && own() != of_logits())) dlogits = buffer(shard().n, own());
    // The facts of other ranks arrive during the next chunk's GEMM, unless the logits are needed again.
    run_chunks(division, *this, shard().is_split() && !of_log_probs.defined());
  }
};

/// From the statistics of rows, so that no kernel stores it. 0 for rows whose ids are all ignored.
inline void write_log_sum_exp(Tensor out, const Tensor& stats, double temperature) {
  const Tensor total = stats.select(-1, 1);
  out.copy_((stats.select(-1, 0) / temperature + total.log()).masked_fill(total == 0, 0));
}

/// `into` has the memory for all results that are wanted.
inline void forward(const Device& device, const Call& call, WantedGradients wanted, Forward& into) {
  c10::DeviceGuard guard(call.input.device());
  const bool gradients = into.of_log_probs.defined();
  ForwardLoss loss(device, call, [&](int64_t tokens, int64_t classes) {
    const auto dtype = call.input.scalar_type();
    // A budget that is too small for backward is refused here.
    if (wanted.any() && !gradients) {
      const int64_t hidden = call.input.size(-1);
      backward_plan(call.op, tokens, hidden, classes, dtype, call.by_gemm(), {true, true, true}, call.memory_budget);
    }
    const int64_t products = gradients + into.of_entropy.defined();
    return forward_plan(call.op, tokens, classes, dtype, products, call.by_gemm(), call.memory_budget);
  });
  const Results& out = into.rows;
  const int64_t tokens = loss.division.tokens, ids = loss.sizes.ids;
  // Results in the order of this call, at their final place if that is the caller's order.
  auto flat = [&](const Tensor& t, bool wanted, at::IntArrayRef shape) {
    if (!wanted) return Tensor();
    return loss.division.order.is_split() ? at::empty(shape, t.options()) : t.view(shape);
  };
  const bool graph = out.stats.defined();
  loss.out = {
      flat(out.log_probs, true, {tokens, ids}),
      flat(out.entropy, call.entropy, {tokens}),
      flat(out.stats, graph, {tokens, 3}),
      flat(out.chosen, graph, {tokens, ids}),
      flat(out.mean_logits, call.mean_logits, {tokens}),
      flat(out.log_sum_sq_probs, call.log_sum_sq_probs, {tokens}),
      flat(out.is_top1, call.is_top1, {tokens, ids})};
  if (gradients) loss.of_log_probs = into.of_log_probs.view({tokens, loss.sizes.hidden});
  if (into.of_entropy.defined()) loss.of_entropy = into.of_entropy.view({tokens, loss.sizes.hidden});
  loss.run();
  auto restore = [&](const Tensor& to, const Tensor& from, int64_t each) {
    if (from.defined() && loss.division.order.is_split()) to.copy_(loss.division.order.restore(from, to.sizes(), each));
  };
  restore(out.log_probs, loss.out.log_probs, ids);
  restore(out.entropy, loss.out.entropy, 1);
  restore(out.stats, loss.out.stats, 3);
  restore(out.chosen, loss.out.chosen, ids);
  restore(out.mean_logits, loss.out.mean_logits, 1);
  restore(out.log_sum_sq_probs, loss.out.log_sum_sq_probs, 1);
  restore(out.is_top1, loss.out.is_top1, ids);
  if (call.log_sum_exp) write_log_sum_exp(into.log_sum_exp, out.stats, call.o.temperature);
}

// ---- Backward

/// Writes to `into` the gradients that it has memory for. given: like the results, some may be undefined.
inline void backward(
    const Device& device, const Call& call, const ResultGradients& given, const Tensor& stats_in,
    const Tensor& chosen_in, Gradients& into) {
  c10::DeviceGuard guard(call.input.device());
  LinearLogProbs loss(device, call, [&](int64_t tokens, int64_t classes) {
    return backward_plan(
        call.op, tokens, call.input.size(-1), classes, call.input.scalar_type(), call.by_gemm(), into.defined(),
        call.memory_budget);
  });
  const Division& division = loss.division;
  Head& head = loss.head;
  auto arranged = [&](const Tensor& t, int64_t each) {
    return t.defined() ? division.arranged(t, each).to(compute_type(call.input)).contiguous() : t;
  };
  const Tensor stats = arranged(stats_in, 3), chosen = arranged(chosen_in, loss.sizes.ids);
  const ResultGradients all{
      arranged(given.log_probs, loss.sizes.ids), arranged(given.entropy, 1), arranged(given.log_sum_exp, 1)};
  head.differentiate(into);
  Tensor memory, narrow;
  run_blocks(division, {&head}, [&](int64_t first, int64_t rows, int64_t c, int64_t classes) {
    if (!memory.defined()) memory = loss.buffer(classes, loss.of_logits());
    if (!narrow.defined() && loss.own() != loss.of_logits()) narrow = loss.buffer(classes, loss.own());
    auto part = [&](const Tensor& t) { return t.defined() ? t.narrow(0, first, rows) : t; };
    const ResultGradients upstream{part(all.log_probs), part(all.entropy), part(all.log_sum_exp)};
    const Tensor logits = loss.part(memory, rows, classes);
    const Tensor dlogits = narrow.defined() ? loss.part(narrow, rows, classes) : logits;
    Tensor shares;
    if (loss.by_gemm && classes > 0) {
      const Tensor w = head.of_classes(head.weight, c, classes);
      shares = Statistics::multiply(call.op, head, first, rows, w, call.o.temperature, logits);
    } else if (classes > 0) {
      head.logits(logits, first, c);
    }
    loss.differentiate(dlogits, logits, shares, first, c, upstream, stats, chosen);
    head.add(dlogits, first, c);
  });
  head.finish();
}

/// The gradient of input from what forward made of a frozen head, into `out`, which may be of_log_probs. stats, chosen
/// and weight are needed for ids_apart().
inline void scale_rows(
    const char* op, const ResultGradients& given, const Tensor& of_log_probs, const Tensor& of_entropy,
    const Tensor& target, const Tensor& weight, const Tensor& stats_in, const Tensor& chosen_in, const Settings& s,
    Tensor& out) {
  constexpr int64_t kChunkBytes = 64 * kMiB;
  c10::DeviceGuard guard(of_log_probs.device());
  const Sizes sizes(of_log_probs, target);
  const int64_t tokens = sizes.tokens, hidden = sizes.hidden, ids = sizes.ids;
  const log_probs::Options& o = s.o;
  const auto dtype = compute_type(of_log_probs);
  const Tensor index = target.reshape({tokens, ids}), ignored = index == o.ignore_index;
  Shard shard(weight.defined() ? weight.size(0) : 0);
  if (s.vocabulary.is_split() && weight.defined()) shard = Shard(op, s.vocabulary, weight.size(0), "weight");
  const bool apart = s.ids_apart(ids);
  Tensor g, factor;
  if (given.log_probs.defined()) {
    g = given.log_probs.to(dtype).reshape({tokens, ids}).masked_fill(ignored, 0);
    // An id out of range makes its row NaN. If ids are not apart, forward did that.
    if (apart) {
      const Tensor stray = ignored.logical_not() & ((index < 0) | (index >= shard.classes));
      g.masked_fill_(stray, std::numeric_limits<double>::quiet_NaN());
    }
    factor = g.sum(1, true);
  } else {
    factor = at::zeros({tokens, 1}, of_log_probs.options().dtype(dtype));
  }
  if (given.log_sum_exp.defined()) factor = factor - given.log_sum_exp.to(dtype).reshape({tokens, 1});
  const Tensor h = given.entropy.defined() ? given.entropy.to(dtype).reshape({tokens, 1}) : Tensor();
  const Tensor from = of_log_probs.view({tokens, hidden});
  Tensor to = out.view({tokens, hidden});
  const bool adds_ids = apart && (g.defined() || given.log_sum_exp.defined());
  Tensor of_ids, columns;
  if (adds_ids) {
    columns = index.to(at::kLong) - shard.first;
    const Tensor stats = stats_in.reshape({tokens, 3}), chosen = chosen_in.reshape({tokens, ids});
    const double inverse = 1 / o.temperature;
    Tensor v = chosen, slope;
    if (o.softcap) {
      const Tensor t = at::tanh(chosen / *o.softcap);
      v = *o.softcap * t;
      slope = 1 - t * t;
    }
    const Tensor p = ((v - stats.narrow(1, 0, 1)) * inverse).exp() / stats.narrow(1, 1, 1);
    // The probability of equal ids counts once.
    Tensor repeated = at::zeros_like(ignored);
    for (int64_t k = 1; k < ids; ++k) {
      const Tensor earlier = columns.narrow(1, 0, k) == columns.narrow(1, k, 1);
      repeated.select(1, k).copy_(earlier.any(1));
    }
    of_ids = (p * factor).masked_fill(repeated, 0).neg();
    if (g.defined()) of_ids.add_(g);
    of_ids.mul_(inverse * s.logits_scale);
    if (slope.defined()) of_ids.mul_(slope);
    const Tensor elsewhere = ignored | (columns < 0) | (columns >= shard.n);
    of_ids.masked_fill_(elsewhere, 0);
    columns = columns.masked_fill(elsewhere, 0);
  }
  if (!adds_ids && !h.defined()) {
    at::mul_out(to, from, factor);
  } else {
    const int64_t per_row = hidden * (12 + (adds_ids ? ids : 0) * int64_t(from.element_size())) + 1;
    const int64_t step = std::max<int64_t>(1, kChunkBytes / per_row);
    for (int64_t first = 0; first < tokens; first += step) {
      const int64_t rows = std::min(step, tokens - first);
      auto part = [&](const Tensor& t) { return t.narrow(0, first, rows); };
      Tensor sum = part(from).to(dtype) * part(factor);
      if (h.defined()) sum.addcmul_(part(of_entropy.view({tokens, hidden})).to(dtype), part(h));
      if (adds_ids && shard.n > 0) {
        Tensor chosen_rows = weight.index_select(0, part(columns).reshape(-1)).to(from.scalar_type());
        Tensor each = part(of_ids).to(from.scalar_type()).unsqueeze(1);
        sum.add_(at::bmm(each, chosen_rows.view({rows, ids, hidden})).squeeze(1));
      }
      part(to).copy_(sum);
    }
  }
  if (s.vocabulary.is_split()) core::Group(op, s.vocabulary.group).all_reduce(out).wait();
}

}  // namespace liger::ops::fused_linear_log_probs
