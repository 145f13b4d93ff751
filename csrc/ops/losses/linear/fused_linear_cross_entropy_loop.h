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

#include "ops/losses/linear/exponentials.h"
#include "ops/losses/linear/fused_linear_cross_entropy.h"
#include "ops/losses/linear/loop.h"

namespace liger::ops::fused_linear_cross_entropy {

inline Division divide(const Call& call, Wanted wanted) {
  const auto dtype = call.input.scalar_type();
  Shard shard(call.op, call.o.vocabulary, call.weight.size(0), "weight");
  const bool is_split = shard.is_split();
  return {
      call.op,
      call.input,
      call.target.sizes(),
      std::move(shard),
      call.sequence_dim,
      call.input.options().dtype(compute_type(call.input)),
      [&](int64_t tokens, int64_t classes) {
        return make_plan(call.op, tokens, classes, dtype, wanted, call.memory_budget, is_split);
      }};
}

/// What the chunks of a call share.
template <class Rows>
struct LinearCrossEntropy {
  const Division division;
  Rows rows;
  Head head;
  Tensor target_grads;  // of true logits, (M,)

  LinearCrossEntropy(const Call& call, Wanted wanted, const Gradients& gradients)
      : division(divide(call, wanted)),
        rows(call.op, division.shard, division.order.arrange(call.target), call.ce_weight, call.o),
        head(division, call.trained(), call.logits_scale, 3) {
    head.differentiate(gradients);
    const auto& [dinput, dweight, dbias, of_t, of_b] = gradients;
    if ((dweight.defined() || dinput.defined()) &&
        takes_targets(head.x().scalar_type(), division.plan.chunks, wanted, division.shard.is_split())) {
      target_grads = at::empty({division.tokens}, division.numbers);
    }
  }

  Tensor buffer() const { return at::empty({division.rows_from(0), division.plan.row}, head.x().options()); }

  /// The part of the buffer for the logits of the tokens from `first` on.
  Tensor rows_of(const Tensor& buffer, int64_t first) const {
    return logits_in(buffer, division.rows_from(first), division.shard.n, head.bias.defined());
  }

  Tensor logits(const Tensor& buffer, int64_t first) const {
    const Tensor out = rows_of(buffer, first);
    head.logits(out, first, 0);
    return out;
  }

  /// Adds a chunk's gradients. Overwrites dlogits.
  void add(Tensor& dlogits, int64_t first) {
    head.add(dlogits, first, 0, [&] {
      if (target_grads.defined()) rows.take_targets(dlogits, first, target_grads);
    });
  }

  void finish() {
    if (target_grads.defined() && head.into.weight.defined())
      rows.add_targets(head.into.weight, head.x(), target_grads, head.scale * head.head_scale);
    head.finish();
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

/// One chunk between its steps.
struct Chunk {
  int64_t first;
  core::Pending tokens, gathered;
  Tensor logits;
  Facts facts;
  Exponentials::Chunk exponentials;
};

/// The chunks of a forward call.
template <class Rows>
struct ForwardLoss {
  LinearCrossEntropy<Rows>& state;
  const RowsOut& out;
  const Exponentials* exponentials;
  const Tensor &totals, &token_weight;
  const Forward& results;
  const Options& o;
  const Wanted wanted;
  const bool now;  // compute gradients
  std::vector<Tensor> buffers;

  bool is_split() const { return state.division.shard.is_split(); }
  const core::Group& group() const { return *state.division.shard.group; }
  Tensor stats(int64_t rows) const { return at::empty({3, rows}, state.division.numbers); }

  static char* at(const Tensor& t, int64_t first = 0) {
    return t.defined() ? static_cast<char*>(t.mutable_data_ptr()) + first * int64_t(t.element_size()) : nullptr;
  }

  Chunk fetch(int64_t first) const {
    return {first, state.head.fetch(first), {}, {}, Facts(o, wanted.metrics, wanted.log_probs), {}};
  }

  void prepare(Chunk& c) const {
    c.tokens.wait();
    // Exponentials are relative to the true logits, which other ranks may have.
    if (exponentials && is_split()) {
      start_exponentials(c);
      c.gathered = group().all_gather(c.exponentials.base());
    }
  }

  void start_exponentials(Chunk& c) const {
    c.exponentials = exponentials->chunk(state.division.rows_from(c.first));
    c.exponentials.first = c.first;
    exponentials->start(c.exponentials);
  }

  /// Logits or exponentials, and the facts about them.
  void open(Chunk& c, int64_t i) const {
    const Tensor& buffer = buffers[i % buffers.size()];
    if (!exponentials) {
      c.logits = state.logits(buffer, c.first);
      if (is_split()) open_split(c);
      return;
    }
    c.logits = state.rows_of(buffer, c.first);
    if (!is_split()) return start_exponentials(c);
    Tensor base = c.exponentials.base();
    at::amax_out(base, c.gathered.wait(), 0);
    exponentials->multiply(c.exponentials, c.logits, {});
    c.gathered = group().all_gather(exponentials->add_sums(c.exponentials));
  }

  void open_split(Chunk& c) const {
    const int64_t rows = c.logits.size(0);
    c.facts.allocate(rows, state.division.numbers);
    if (c.logits.size(1) == 0) {
      c.facts.fill_empty();
    } else {
      RowsOut local;
      local.facts = &c.facts;
      const Tensor statistics = c.facts.entropy ? stats(rows) : Tensor();
      local.stats = at(statistics);
      state.rows.forward(c.logits, c.first, local);
      if (c.facts.entropy) {
        state.rows.describe(c.logits, c.first, local.stats, nullptr, c.facts.at(c.facts.count() - 1));
      }
    }
    c.gathered = group().all_gather(c.facts.values);
  }

  /// Losses and gradients.
  void close(Chunk& c) const {
    const int64_t rows = c.logits.size(0);
    RowsOut part = out.from(c.first, results.rows.loss.element_size());
    const Tensor weights = token_weight.defined() ? token_weight.narrow(0, c.first, rows) : Tensor();
    if (exponentials) return add_exponentials(c, part, weights);
    const Upstream upstream(weights);
    char *log_prob = at(results.log_probs, c.first), *entropy = at(results.entropy, c.first);
    if (!is_split() && now && !log_prob) {
      state.rows.forward_backward(c.logits, c.first, part, totals, upstream);
    } else {
      Tensor own;
      const Tensor& kept = results.rows.stats;
      if (kept.defined() || (is_split() ? now : log_prob != nullptr)) own = stats(rows);
      part.stats = at(own);
      if (is_split()) {
        state.rows.combine(c.facts, c.gathered.wait(), c.first, part, log_prob, entropy);
      } else {
        state.rows.forward(c.logits, c.first, part);
        if (log_prob) state.rows.describe(c.logits, c.first, part.stats, log_prob, entropy);
      }
      if (kept.defined()) kept.narrow(1, c.first, rows).copy_(own);
      if (now && c.logits.size(1) > 0) state.rows.backward(c.logits, c.first, part.stats, totals, upstream);
    }
    if (now) state.add(c.logits, c.first);
  }

  /// The same on the logits-free path.
  void add_exponentials(Chunk& c, const RowsOut& part, const Tensor& grad) const {
    Head& head = state.head;
    const Exponentials::Chunk& at_rows = c.exponentials;
    const Tensor& dweight = head.into.weight;
    const bool has_input = head.dinput.defined();
    Tensor dx, weighed;
    if (has_input) dx = head.of_chunk(c.first, c.logits.size(0));
    // On one rank, d input doubles as scratch space: first for the sums, then for the weighed tokens.
    if (!is_split()) {
      weighed = dx;
      exponentials->multiply(at_rows, c.logits, weighed);
    } else if (dweight.defined()) {
      weighed = at::empty({at_rows.rows, head.x().size(1)}, head.x().options());
    }
    const Tensor gathered = is_split() ? c.gathered.wait() : Tensor();
    exponentials->weigh(
        at_rows, c.logits, weighed, gathered, part, totals, grad, state.target_grads, dweight.defined());
    auto add_weight = [&] {
      if (!dweight.defined()) return;
      gemm::multiply(dweight, c.logits.t(), weighed, c.first > 0, head.scale * head.head_scale, head.sustained);
    };
    if (!is_split()) add_weight();
    if (has_input) {
      gemm::multiply(dx, c.logits, head.weight, 0, head.scale, head.sustained);
      exponentials->rescale(at_rows, dx, state.target_grads);
      head.reduce(dx, c.first);
    }
    // It hides the sum over ranks.
    if (is_split()) add_weight();
  }
};

/// The logits-free path of a call, if it takes that.
template <class Rows>
std::optional<Exponentials> exponentials_of(
    const Call& call, LinearCrossEntropy<Rows>& state, const Wanted& wanted, bool now) {
  Head& head = state.head;
  const Division& division = state.division;
  if (!allows_logits_free_path(call, wanted) || division.tokens == 0 ||
      !Exponentials::applies(head.x(), division.shard.largest, division.rows_from(0))) {
    return {};
  }
  // Without gradients, the plan's memory includes the sums.
  const bool has_room = !call.memory_budget || !now || Exponentials::sums_fit(head.x(), head.weight);
  // All ranks must decide alike, whatever the layouts of their weights.
  const bool fits = has_room && Exponentials::fits(head.x()) && Exponentials::fits(head.weight);
  if (!call.is_split() && !fits) return {};
  if (!Exponentials::fits(head.x())) head.tokens.x = head.x().clone(at::MemoryFormat::Contiguous);
  if (head.weight.size(0) > 0 && !Exponentials::fits(head.weight)) {
    head.weight = head.weight.clone(at::MemoryFormat::Contiguous);
  }
  return std::optional<Exponentials>(
      std::in_place, call.op, head.x(), head.weight, state.rows.target_rows(), call.ce_weight, division.shard, call.o,
      call.logits_scale, now);
}

template <class Rows>
Forward forward(const Call& call, const Tensor& divisors, Wanted wanted) {
  c10::DeviceGuard guard(call.input.device());
  const Options& o = call.o;
  Forward out = empty_forward(call, wanted);
  LinearCrossEntropy<Rows> state(call, wanted, out.gradients);
  const Division& division = state.division;
  Tensor token_weight = rows_of_token_weight(call, division.order);
  const int64_t tokens = division.tokens;
  const bool now = wanted.any() && o.reduced();
  RowBuffers rows(out.rows, tokens, o, {wanted.metrics, false});
  Tensor totals = out.rows.totals;
  if (o.mean() && (now || totals.defined())) {
    if (!totals.defined()) totals = at::empty({2}, out.rows.loss.options());
    divisors.defined() ? void(totals.copy_(divisors)) : state.rows.count(totals);
  }
  const Tensor counted = totals.defined() ? totals : divisors;
  if (out.deferred_scale.defined()) {
    const Tensor inverse = o.mean() ? inverse_or_zero(totals.select(0, 0)) : Tensor();
    state.head.head_scale = defer_scale(out.deferred_scale, tokens, inverse);
    // Both totals are now relative to the first, which is 1.
    if (o.mean()) totals = totals * inverse;
  }
  const auto exponentials = exponentials_of(call, state, wanted, now);
  ForwardLoss<Rows> loss{state, rows.out, exponentials ? &*exponentials : nullptr, totals, token_weight, out, o, wanted,
                         now,   {}};
  for (int64_t i = 0; i < division.plan.buffers && tokens > 0; ++i) loss.buffers.push_back(state.buffer());
  run_chunks(division, loss, loss.buffers.size() > 1);
  if (now) state.finish();
  if (token_weight.defined()) {
    if (rows.scratch.defined()) {
      rows.scratch.narrow(0, 0, rows.out.z_loss ? 2 : 1).mul_(token_weight);
    } else {
      Tensor each = token_weight.view_as(out.rows.loss);
      out.rows.loss.mul_(each);
      if (out.rows.z_loss.defined()) out.rows.z_loss.mul_(each);
    }
  }
  if (o.reduced()) state.rows.sum(rows, out.rows, counted);
  if (division.order.is_split()) {
    auto restore = [&](Tensor& t) {
      if (t.defined() && t.numel() == tokens && t.dim() > 0)
        t = division.order.restore(t.view(-1), call.target.sizes());
    };
    for (Tensor* t : {&out.rows.loss, &out.rows.z_loss, &out.rows.accuracy}) {
      if (!o.reduced()) restore(*t);
    }
    for (Tensor* t : {&out.rows.predicted, &out.log_probs, &out.entropy}) restore(*t);
    for (int64_t i = 0; out.rows.stats.defined() && i < 3; ++i) {
      Tensor each = out.rows.stats.select(0, i);
      each.copy_(division.order.restore(each, call.target.sizes()).view(-1));
    }
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
  LinearCrossEntropy<Rows> state(call, wanted, out);
  const Division& division = state.division;
  Tensor incoming = division.order.arrange(grad).to(compute_type(call.input)).contiguous();
  Tensor token_weight = rows_of_token_weight(call, division.order);
  if (token_weight.defined()) incoming = incoming * token_weight;
  // Backward may want fewer gradients, and so have other chunks.
  auto of_rows = [&](int64_t i) { return division.order.arrange(stats.select(0, i).view(sizes)); };
  const Tensor all = division.order.is_split() ? at::stack({of_rows(0), of_rows(1), of_rows(2)}) : stats;
  Tensor buffer = state.buffer();
  run_blocks(division, {&state.head}, [&](int64_t first, int64_t count, int64_t, int64_t classes) {
    Tensor logits = state.logits(buffer, first);
    const Tensor own = all.narrow(1, first, count).contiguous();
    const auto* at = static_cast<const char*>(own.const_data_ptr());
    if (classes > 0) state.rows.backward(logits, first, at, totals, Upstream(incoming.narrow(0, first, count)));
    state.add(logits, first);
  });
  state.finish();
  return out;
}

}  // namespace liger::ops::fused_linear_cross_entropy
