#pragma once

// The loop over chunks of tokens of fused_linear_cross_entropy, on CPU and CUDA.
//
// M tokens, H hidden, V classes. A chunk of T tokens takes three GEMMs (logits, d input, d weight). Between them, the
// rows of cross_entropy overwrite the buffer of T x V logits with its gradient. The logits-free path skips these rows,
// see exponentials.h. A low-rank addend of the logits (gemm/adapters/low_rank.h) is written before the first GEMM adds
// to it.
//
// If the classes are split over ranks, a rank computes facts about its logits of a chunk, and needs those of all ranks
// before the gradients. d input is a sum over ranks: it is reduced while d weight's GEMM runs. With two buffers of
// logits, the next chunk's logits are computed before this chunk's gradients, so that no GEMM waits for facts.
// If input is split along the sequence, it is gathered chunk by chunk, and d input is scattered.
//
// Small chunks make GEMMs slow, and each chunk reads and writes d weight once. Large chunks take more memory.

#include "gemm/multiply.h"
#include "ops/losses/exponentials.h"
#include "ops/losses/fused_linear_cross_entropy.h"

namespace liger::ops::fused_linear_cross_entropy {

/// One call's state while it loops over the chunks.
template <class Rows>
struct Pass {
  const Shard shard;
  Plan plan;
  TokenOrder order;
  Rows rows;
  Tokens tokens;
  const Tensor bias;
  Tensor weight;
  gemm::LowRank low_rank;
  const double logits_scale;
  const bool sustained;
  Gradients into;
  double head_scale = 1;  // scale of d weight, d bias and d low_rank_weight
  InputGradient dinput;
  Tensor bias_sum, target_grads;

  Pass(const Call& call, Wanted wanted, const Gradients& gradients)
      : shard(call.op, call.o.vocabulary, call.weight.size(0), "weight"),
        plan(make_plan(
            call.op, call.target.numel(), shard.largest, call.input.scalar_type(), wanted, call.memory_budget,
            shard.is_split())),
        order(order_of(call.op, call.input, call.target.sizes(), call.target.numel(), shard, call.sequence_dim, plan)),
        rows(call.op, shard, order.arrange(call.target), call.ce_weight, call.o),
        tokens(call.input, call.target.numel(), order),
        bias(call.bias),
        weight(call.weight),
        low_rank(call.op, call.low_rank_input, call.low_rank_weight, tokens.x),
        logits_scale(call.logits_scale),
        sustained(
            gemm::is_sustained(3.0 * double(call.target.numel()) * double(tokens.x.size(1)) * double(weight.size(0)))),
        into(gradients) {
    const Tensor& x = tokens.x;
    auto floats = x.options().dtype(compute_type(x));
    if (into.input.defined()) dinput.all = into.input.view({tokens.local.size(0), x.size(1)});
    if (into.bias.defined()) bias_sum = at::zeros({weight.size(0)}, floats);
    low_rank.compute_gradients(into.low_rank_input, into.low_rank_weight);
    if (into.weight.defined() && plan.chunks == 0) into.weight.zero_();
    if ((into.weight.defined() || into.input.defined()) &&
        takes_targets(x.scalar_type(), plan.chunks, wanted, shard.is_split())) {
      target_grads = at::empty({x.size(0)}, floats);
    }
  }

  /// Gives input and weight the layout that the kernel of the exponentials takes.
  void align() {
    if (!Exponentials::fits(x())) tokens.x = x().clone(at::MemoryFormat::Contiguous);
    if (weight.size(0) > 0 && !Exponentials::fits(weight)) weight = weight.clone(at::MemoryFormat::Contiguous);
  }

  const Tensor& x() const { return tokens.x; }
  int64_t rows_from(int64_t first) const { return std::min(plan.chunk, x().size(0) - first); }
  core::Pending fetch(int64_t first) const { return tokens.fetch(first, plan.chunk, order, shard); }

  Tensor buffer() const { return at::empty({rows_from(0), plan.row}, x().options()); }

  /// The part of the buffer for the logits of the tokens from `first` on.
  Tensor rows_of(const Tensor& buffer, int64_t first) const {
    return logits_in(buffer, rows_from(first), weight.size(0), bias.defined());
  }

  Tensor logits(const Tensor& buffer, int64_t first) const {
    Tensor out = rows_of(buffer, first), part = x().narrow(0, first, out.size(0));
    if (low_rank.defined()) {
      low_rank.write(out, first, low_rank.b(), bias, logits_scale);
      gemm::multiply(out, part, weight.t(), 1, logits_scale, sustained);
    } else if (bias.defined()) {
      at::addmm_out(out, bias, part, weight.t(), logits_scale, logits_scale);
    } else {
      gemm::multiply(out, part, weight.t(), 0, logits_scale, sustained);
    }
    return out;
  }

  /// Adds a chunk's gradients, computed from its d logits. Overwrites dlogits.
  void add(Tensor& dlogits, int64_t first) {
    const int64_t count = dlogits.size(0);
    if (dinput.defined()) {
      Tensor dx = dinput.of_chunk(first, count, order);
      gemm::multiply(dx, dlogits, weight, 0, logits_scale, sustained);
      dinput.reduce(dx, first, order, shard);
    }
    if (bias_sum.defined()) bias_sum.add_(dlogits.sum(0, false, bias_sum.scalar_type()), logits_scale * head_scale);
    if (low_rank.defined()) low_rank.add_gradients(dlogits, first, 0, logits_scale, logits_scale * head_scale);
    if (!into.weight.defined()) return;
    if (target_grads.defined()) rows.take_targets(dlogits, first, target_grads);
    gemm::multiply(
        into.weight, dlogits.t(), x().narrow(0, first, count), first > 0, logits_scale * head_scale, sustained);
  }

  /// The same on the logits-free path. d input doubles as scratch space: first for the sums, then for the weighed
  /// tokens.
  void add_exponentials(
      const Exponentials& by, Exponentials::Chunk& chunk, const Tensor& buffer, int64_t first, const RowsOut& out,
      const Tensor& totals, const Tensor& grad) {
    Tensor e = rows_of(buffer, first);
    if (!dinput.defined()) return by.compute(chunk, e, {}, first, out, {}, {}, {}, false);
    Tensor dx = dinput.of_chunk(first, e.size(0), order);
    by.compute(chunk, e, dx, first, out, totals, grad, target_grads, into.weight.defined());
    if (into.weight.defined()) gemm::multiply(into.weight, e.t(), dx, first > 0, logits_scale * head_scale, sustained);
    gemm::multiply(dx, e, weight, 0, logits_scale, sustained);
    by.rescale(chunk, dx, target_grads);
  }

  /// The last steps of the logits-free path if classes are split. d input comes before d weight, which hides its sum
  /// over ranks.
  void add_split_exponentials(
      const Exponentials& by, const Exponentials::Chunk& chunk, const Tensor& e, const Tensor& gathered,
      const RowsOut& out, const Tensor& totals, const Tensor& grad) {
    const int64_t first = chunk.first;
    Tensor weighed;
    if (into.weight.defined()) weighed = at::empty({chunk.rows, x().size(1)}, x().options());
    by.weigh(chunk, e, weighed, gathered, out, totals, grad, target_grads, weighed.defined());
    if (dinput.defined()) {
      Tensor dx = dinput.of_chunk(first, chunk.rows, order);
      gemm::multiply(dx, e, weight, 0, logits_scale, sustained);
      by.rescale(chunk, dx, target_grads);
      dinput.reduce(dx, first, order, shard);
    }
    if (weighed.defined()) {
      gemm::multiply(into.weight, e.t(), weighed, first > 0, logits_scale * head_scale, sustained);
    }
  }

  void finish() {
    if (target_grads.defined() && into.weight.defined())
      rows.add_targets(into.weight, x(), target_grads, logits_scale * head_scale);
    if (bias_sum.defined()) into.bias.copy_(bias_sum);
    finish_low_rank(low_rank, shard);
    dinput.wait();
  }
};

inline Tensor rows_of_token_weight(const Call& call, const TokenOrder& order) {
  if (!call.token_weight.defined()) return Tensor();
  return order.arrange(call.token_weight).to(compute_type(call.input)).contiguous();
}

/// True if the call allows the logits-free path: it requests only the loss and gradients. If it requests any gradient,
/// it must request that of input, because d input doubles as scratch space.
inline bool allows_logits_free_path(const Call& call, const Wanted& wanted) {
  const bool extras = call.bias.defined() || call.low_rank_input.defined() || call.o.label_smoothing != 0 ||
      call.o.softcap || wanted.metrics || wanted.log_probs;
  const bool made_now = wanted.any() ? call.o.reduced() && wanted.input : true;
  return made_now && !extras && call.logits_scale > 0;
}

/// A call's loop over chunks. now: compute gradients.
template <class Rows>
void run_chunks(
    Pass<Rows>& pass, const RowsOut& out, const Exponentials* exponentials, const Tensor& totals,
    const Tensor& token_weight, const Forward& results, Wanted wanted, bool now) {
  const int64_t tokens = pass.x().size(0);
  const size_t element = results.rows.loss.element_size();
  Tensor buffer = pass.buffer(), scratch_stats;
  Exponentials::Chunk chunk;
  if (exponentials) chunk = exponentials->chunk(buffer.size(0));
  const bool describe = wanted.log_probs;
  if (describe && !out.stats) scratch_stats = at::empty({3, buffer.size(0)}, results.rows.loss.options());
  auto at_token = [&](const Tensor& t, int64_t first) {
    return static_cast<char*>(t.mutable_data_ptr()) + first * int64_t(element);
  };
  for (int64_t first = 0; first < tokens; first += pass.plan.chunk) {
    RowsOut part = out.from(first, element);
    Tensor weights;
    if (token_weight.defined()) weights = token_weight.narrow(0, first, std::min(pass.plan.chunk, tokens - first));
    if (exponentials) {
      pass.add_exponentials(*exponentials, chunk, buffer, first, part, totals, weights);
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
        pass.rows.describe(
            logits, first, part.stats, at_token(results.log_probs, first), at_token(results.entropy, first));
      }
      if (now) pass.rows.backward(logits, first, part.stats, totals, upstream);
    }
    if (now) pass.add(logits, first);
  }
}

/// One chunk of a call with split classes, between its steps.
struct SplitChunk {
  int64_t first;
  core::Pending tokens, gathered;
  Tensor logits;
  Facts facts;
  Exponentials::Chunk exponentials;
};

/// A call's loop over chunks whose classes are split.
template <class Rows>
struct SplitLoop {
  Pass<Rows>& pass;
  const RowsOut& out;
  const Exponentials* exponentials;
  const Tensor &totals, &token_weight;
  const Forward& results;
  const Options& o;
  const Wanted wanted;
  const bool now;  // compute gradients

  const core::Group& group() const { return *pass.shard.group; }

  SplitChunk fetch(int64_t first) const {
    return {first, pass.fetch(first), {}, {}, Facts(o, wanted.metrics, wanted.log_probs), {}};
  }

  /// Exponentials are relative to the true logits, which other ranks may have.
  void prepare(SplitChunk& c) const {
    c.tokens.wait();
    if (!exponentials) return;
    c.exponentials = exponentials->chunk(pass.rows_from(c.first));
    c.exponentials.first = c.first;
    exponentials->start(c.exponentials);
    c.gathered = group().all_gather(c.exponentials.base());
  }

  /// This rank's logits or exponentials, and the facts about them.
  void open(SplitChunk& c, const Tensor& buffer) const {
    if (exponentials) {
      Tensor base = c.exponentials.base();
      at::amax_out(base, c.gathered.wait(), 0);
      c.logits = pass.rows_of(buffer, c.first);
      exponentials->multiply(c.exponentials, c.logits, {});
      c.gathered = group().all_gather(exponentials->add_sums(c.exponentials));
      return;
    }
    c.logits = pass.logits(buffer, c.first);
    const int64_t rows = c.logits.size(0);
    auto numbers = results.rows.loss.options();
    c.facts.allocate(rows, numbers);
    if (c.logits.size(1) == 0) {
      c.facts.fill_empty();
    } else {
      RowsOut local;
      local.facts = &c.facts;
      Tensor stats;
      if (c.facts.entropy) {
        stats = at::empty({3, rows}, numbers);
        local.stats = static_cast<char*>(stats.mutable_data_ptr());
      }
      pass.rows.forward(c.logits, c.first, local);
      if (c.facts.entropy) {
        pass.rows.describe(c.logits, c.first, local.stats, nullptr, c.facts.at(c.facts.count() - 1));
      }
    }
    c.gathered = group().all_gather(c.facts.values);
  }

  /// Losses and gradients, from the facts of all ranks.
  void close(SplitChunk& c) const {
    const Tensor gathered = c.gathered.wait();
    const int64_t rows = c.logits.size(0);
    const size_t element = results.rows.loss.element_size();
    RowsOut part = out.from(c.first, element);
    Tensor weights = token_weight.defined() ? token_weight.narrow(0, c.first, rows) : Tensor();
    if (exponentials) {
      return pass.add_split_exponentials(*exponentials, c.exponentials, c.logits, gathered, part, totals, weights);
    }
    Tensor stats;
    if (now) {
      stats = at::empty({3, rows}, results.rows.loss.options());
      part.stats = static_cast<char*>(stats.mutable_data_ptr());
    }
    auto at_token = [&](const Tensor& t) {
      return t.defined() ? static_cast<char*>(t.mutable_data_ptr()) + c.first * int64_t(element) : nullptr;
    };
    pass.rows.combine(c.facts, gathered, c.first, part, at_token(results.log_probs), at_token(results.entropy));
    if (!now) return;
    if (c.logits.size(1) > 0) pass.rows.backward(c.logits, c.first, part.stats, totals, Upstream(weights));
    pass.add(c.logits, c.first);
  }

  void run() const {
    const int64_t chunks = pass.plan.chunks, size = pass.plan.chunk;
    if (chunks == 0) return;
    std::vector<Tensor> buffers;
    for (int64_t i = 0; i < pass.plan.buffers; ++i) buffers.push_back(pass.buffer());
    SplitChunk next = fetch(0);
    prepare(next);
    std::optional<SplitChunk> opened;
    for (int64_t i = 0; i < chunks; ++i) {
      SplitChunk c = std::move(next);
      const bool is_last = i + 1 == chunks;
      if (!is_last) next = fetch((i + 1) * size);
      open(c, buffers[i % buffers.size()]);
      if (!is_last) prepare(next);
      if (opened) close(*opened);
      opened.reset();
      if (buffers.size() > 1 && !is_last) {
        opened = std::move(c);
      } else {
        close(c);
      }
    }
  }
};

template <class Rows>
Forward forward(const Call& call, const Tensor& divisors, Wanted wanted) {
  c10::DeviceGuard guard(call.input.device());
  const Options& o = call.o;
  Forward out = empty_forward(call, wanted);
  Pass<Rows> pass(call, wanted, out.gradients);
  Tensor token_weight = rows_of_token_weight(call, pass.order);
  const int64_t tokens = pass.x().size(0);
  const bool now = wanted.any() && o.reduced();
  RowBuffers rows(out.rows, tokens, o, {wanted.metrics, false});
  Tensor totals = out.rows.totals;
  if (o.mean() && (now || totals.defined())) {
    if (!totals.defined()) totals = at::empty({2}, out.rows.loss.options());
    divisors.defined() ? void(totals.copy_(divisors)) : pass.rows.count(totals);
  }
  const Tensor counted = totals.defined() ? totals : divisors;
  if (out.deferred_scale.defined()) {
    const Tensor inverse = o.mean() ? inverse_or_zero(totals.select(0, 0)) : Tensor();
    pass.head_scale = defer_scale(out.deferred_scale, tokens, inverse);
    // Both totals are now relative to the first, which is 1.
    if (o.mean()) totals = totals * inverse;
  }
  std::optional<Exponentials> exponentials;
  const int64_t largest_chunk = std::min(pass.plan.chunk, tokens);
  if (allows_logits_free_path(call, wanted) && Exponentials::applies(pass.x(), pass.shard.largest, largest_chunk)) {
    // Without gradients, the plan's memory includes the sums.
    const bool has_room = !call.memory_budget || !now || Exponentials::sums_fit(pass.x(), call.weight);
    // All ranks must decide alike, whatever the layouts of their weights.
    if (call.is_split() || (has_room && Exponentials::fits(pass.x()) && Exponentials::fits(call.weight))) {
      pass.align();
      exponentials.emplace(
          call.op, pass.x(), pass.weight, pass.rows.target_rows(), call.ce_weight, pass.shard, o, call.logits_scale,
          now);
    }
  }
  if (call.is_split()) {
    SplitLoop<Rows>{pass, rows.out, exponentials ? &*exponentials : nullptr, totals, token_weight, out, o, wanted, now}
        .run();
  } else {
    run_chunks(pass, rows.out, exponentials ? &*exponentials : nullptr, totals, token_weight, out, wanted, now);
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
  if (pass.order.is_split()) {
    auto restore = [&](Tensor& t) {
      if (t.defined() && t.numel() == tokens && t.dim() > 0) t = pass.order.restore(t.view(-1), call.target.sizes());
    };
    for (Tensor* t : {&out.rows.loss, &out.rows.z_loss, &out.rows.accuracy}) {
      if (!o.reduced()) restore(*t);
    }
    for (Tensor* t : {&out.rows.predicted, &out.log_probs, &out.entropy}) restore(*t);
  }
  return out;
}

/// For reduction="none": computes the logits of each chunk again and applies the incoming gradient of each row.
template <class Rows>
Gradients backward(const Call& call, const Tensor& grad, const Tensor& stats, const Tensor& totals, Wanted wanted) {
  c10::DeviceGuard guard(call.input.device());
  const at::IntArrayRef sizes = call.target.sizes();
  LIGER_CHECK(grad.sizes().equals(sizes), call.op, "the gradient", c10::str("have shape ", sizes), grad.sizes());
  Gradients out = empty_gradients(call.trained(), wanted);
  Pass<Rows> pass(call, wanted, out);
  Tensor incoming = pass.order.arrange(grad).to(compute_type(call.input)).contiguous();
  Tensor token_weight = rows_of_token_weight(call, pass.order);
  if (token_weight.defined()) incoming = incoming * token_weight;
  const auto* at = static_cast<const char*>(stats.const_data_ptr());
  Tensor buffer = pass.buffer();
  core::Pending next = pass.fetch(0);
  for (int64_t first = 0; first < pass.x().size(0); first += pass.plan.chunk) {
    next.wait();
    next = pass.fetch(first + pass.plan.chunk);
    Tensor logits = pass.logits(buffer, first);
    const char* stats_of = at + 3 * first * int64_t(stats.element_size());
    if (logits.size(1) > 0)
      pass.rows.backward(logits, first, stats_of, totals, Upstream(incoming.narrow(0, first, logits.size(0))));
    pass.add(logits, first);
  }
  pass.finish();
  return out;
}

}  // namespace liger::ops::fused_linear_cross_entropy
