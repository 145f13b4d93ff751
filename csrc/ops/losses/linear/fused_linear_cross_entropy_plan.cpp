// How a call of fused_linear_cross_entropy splits its tokens into chunks, and the tensors that it allocates.

#include "ops/losses/linear/exponentials.h"
#include "ops/losses/linear/fused_linear_cross_entropy.h"

namespace liger::ops::fused_linear_cross_entropy {

bool takes_targets(at::ScalarType dtype, int64_t chunks, const Wanted& wanted, bool is_split) {
  if (!at::isReducedFloatingType(dtype)) return false;
  return is_split ? wanted.weight || wanted.input : wanted.weight && chunks > 1;
}

Plan make_plan(
    const char* op, int64_t tokens, int64_t classes, at::ScalarType dtype, const Wanted& wanted,
    std::optional<int64_t> memory_budget, bool is_split) {
  const int64_t element = c10::elementSize(dtype);
  Plan plan;
  plan.row = logits_stride(classes, dtype);
  // per_row: logits, statistics, and partial results that the programs of a row exchange. per_token: losses, and the
  // memory for sorting the targets. Without gradients there is no buffer that the sums of exponentials could share.
  const bool has_sums = dtype == at::kBFloat16 && !wanted.any();
  const int64_t sums = has_sums ? Exponentials::bytes_of_sums(classes) : 0;
  const int64_t per_row = plan.row * element + 16 + (classes + 1023) / 1024 + sums;
  auto per_token_in = [&](int64_t chunks) { return 16 + (takes_targets(dtype, chunks, wanted, is_split) ? 40 : 0); };
  // Enough for GEMMs at full speed. Calls without gradients need less.
  const int64_t usual = (wanted.any() ? 1280 : 320) * kMiB;
  const int64_t budget = divide_tokens(plan, op, tokens, per_row, per_token_in(2), usual, memory_budget);
  const int64_t of_chunk = std::min(plan.chunk, tokens) * per_row;
  const int64_t of_tokens = tokens * per_token_in(plan.chunks);
  // Smaller chunks for the sake of two buffers would cost more time than they hide.
  if (is_split && plan.chunks > 1 && 2 * of_chunk + of_tokens <= budget) plan.buffers = 2;
  plan.bytes = plan.buffers * of_chunk + of_tokens;
  return plan;
}

Forward empty_forward(const Call& call, Wanted wanted) {
  Forward out;
  const bool recomputes = wanted.any() && !call.o.reduced();
  out.rows = empty_results(call.input, call.target, call.o, {wanted.metrics, recomputes});
  auto numbers = out.rows.loss.options();
  if (wanted.log_probs) {
    out.log_probs = at::empty_symint(call.target.sym_sizes(), numbers);
    out.entropy = at::empty_symint(call.target.sym_sizes(), numbers);
  }
  if (call.o.reduced()) {
    out.gradients = empty_gradients(call.trained(), wanted);
    if (wanted.any() && call.input.scalar_type() == at::kHalf) out.deferred_scale = at::empty({2}, numbers);
  }
  return out;
}

namespace {

/// Targets as int32 columns of this rank; -1 for tokens without one.
Tensor columns_of(const Tensor& target, const Shard& shard, const Options& o) {
  Tensor y = target.to(at::kLong), column = y - shard.first;
  return column.masked_fill_((column < 0) | (column >= shard.n) | (y == o.ignore_index), -1).to(at::kInt);
}

}  // namespace

std::tuple<Tensor, Tensor> sort_targets(const Tensor& target, const Shard& shard, const Options& o) {
  // A separate statement frees its temporaries before the sort, which takes the most memory.
  Tensor unsorted = columns_of(target, shard, o);
  auto [classes, order] = unsorted.sort(/*stable=*/true, 0, false);
  return {classes, order.to(at::kInt)};
}

}  // namespace liger::ops::fused_linear_cross_entropy
