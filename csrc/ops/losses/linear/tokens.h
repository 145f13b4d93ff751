#pragma once

// The tokens of a linear loss in the order in which a call takes them.

#include <ATen/WrapDimUtils.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "core/split.h"
#include "ops/losses/linear/plan.h"

namespace liger::ops::linear {

/// Tokens as rows of unit stride, which GEMMs and our kernels require.
inline at::Tensor as_rows(const at::Tensor& input) {
  at::Tensor x = core::as_matrix(input);
  return x.stride(1) == 1 || x.size(1) == 1 ? x : x.contiguous();
}

/// The order in which a call takes its tokens: the caller's, unless input is split along the sequence. Then a chunk has
/// the same number of tokens of every rank, rank by rank.
struct TokenOrder {
  int64_t ranks = 1, dim = 0, tokens = 0, step = 0;  // tokens: of one rank; step: of them in a chunk

  bool is_split() const { return ranks > 1; }

  /// `each` numbers per token, from the caller's order: (M,), or (M, each) if there are several.
  at::Tensor arrange(const at::Tensor& t, int64_t each = 1) const {
    if (!is_split() || tokens == 0) return each == 1 ? t.reshape(-1) : t.reshape({-1, each});
    at::Tensor by_rank = ranks_first(t).reshape({ranks, tokens, each});
    std::vector<at::Tensor> chunks;
    for (int64_t first = 0; first < tokens; first += step) {
      chunks.push_back(by_rank.narrow(1, first, std::min(step, tokens - first)).reshape({-1, each}));
    }
    at::Tensor out = chunks.size() == 1 ? chunks[0] : at::cat(chunks);
    return each == 1 ? out.view(-1) : out;
  }

  /// The reverse, into the caller's shape.
  at::Tensor restore(const at::Tensor& t, at::IntArrayRef shape, int64_t each = 1) const {
    if (!is_split() || tokens == 0) return t.view(shape);
    std::vector<at::Tensor> chunks;
    for (int64_t first = 0; first < tokens; first += step) {
      const int64_t count = std::min(step, tokens - first);
      chunks.push_back(t.narrow(0, ranks * first, ranks * count).view({ranks, count, each}));
    }
    at::Tensor out = at::empty(shape, t.options()), to = ranks_first(out);
    to.copy_((chunks.size() == 1 ? chunks[0] : at::cat(chunks, 1)).view(to.sizes()));
    return out;
  }

 private:
  at::Tensor ranks_first(const at::Tensor& t) const {
    return t.unflatten(dim, at::IntArrayRef({ranks, t.size(dim) / ranks})).movedim(dim, 0);
  }
};

/// Of a call with `tokens` in all. positions: of all ranks, in their dimensions. Fits the plan's chunks to whole
/// numbers of tokens of every rank.
inline TokenOrder order_of(
    const char* op, const at::Tensor& input, at::IntArrayRef positions, int64_t tokens, const core::Shard& shard,
    std::optional<int64_t> sequence_dim, Plan& plan) {
  if (!sequence_dim || !shard.is_split()) return {};
  TokenOrder order{shard.ranks(), at::maybe_wrap_dim(*sequence_dim, input.dim()), tokens / shard.ranks(), 0};
  const int64_t have = input.size(order.dim), all = positions[order.dim];
  LIGER_CHECK(
      have * order.ranks == all, op, "input",
      c10::str("have ", all, " / ", order.ranks, " positions along sequence_dim, the same on every rank"), have);
  order.step = std::max<int64_t>(1, plan.chunk / order.ranks);
  plan.chunk = order.step * order.ranks;
  plan.chunks = order.tokens ? (order.tokens + order.step - 1) / order.step : 0;
  return order;
}

/// The tokens of an input, in the order of the call.
struct Tokens {
  at::Tensor local, x;  // (tokens of this rank, H), (M, H)

  Tokens(const at::Tensor& input, int64_t tokens, const TokenOrder& order)
      : local(as_rows(input)), x(order.is_split() ? at::empty({tokens, local.size(1)}, local.options()) : local) {}

  /// Gathers the chunk of tokens from `first` on, if there is one and the input is split.
  core::Pending fetch(int64_t first, int64_t chunk, const TokenOrder& order, const core::Shard& shard) const {
    if (!order.is_split() || first >= x.size(0)) return {};
    const int64_t count = std::min(chunk, x.size(0) - first);
    const at::Tensor part = local.narrow(0, first / order.ranks, count / order.ranks).contiguous();
    return shard.group->all_gather(x.narrow(0, first, count), part);
  }
};

}  // namespace liger::ops::linear
