#pragma once

// What losses of a linear head share: the split of a call's tokens into chunks, their order, and the memory of a chunk's
// logits.

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "core/rows.h"
#include "ops/losses/vocabulary.h"

namespace liger::ops {

struct Plan {
  int64_t chunk = 1, chunks = 0;  // chunk: tokens per chunk
  int64_t buffers = 1;  // of logits; with two, a chunk's collective runs during another chunk's GEMMs
  int64_t row;  // row stride of logits in elements: whole cache lines, for fast GEMMs
  int64_t bytes;  // of everything that is freed when the call returns
};

/// Row stride of the logits of `classes`.
inline int64_t logits_stride(int64_t classes, at::ScalarType dtype) {
  const int64_t line = 128 / int64_t(c10::elementSize(dtype));
  return (classes + line - 1) / line * line;
}

/// Sets chunk and chunks. per_row: bytes for each token of a chunk, per_token: for each token of the call. usual: the
/// budget if the caller gives none. Returns the budget.
inline int64_t divide_tokens(
    Plan& plan, const char* op, int64_t tokens, int64_t per_row, int64_t per_token, int64_t usual,
    std::optional<int64_t> memory_budget) {
  constexpr int64_t kTile = 256;
  usual += tokens * per_token;
  const int64_t budget = memory_budget.value_or(std::max(usual, per_row * kTile / 2 + tokens * per_token));
  const int64_t least = tokens * per_token + per_row;
  LIGER_CHECK(
      budget >= least || tokens == 0, op, "memory_budget",
      c10::str("be at least ", least, " bytes for the logits of one of ", tokens, " tokens"), budget);
  int64_t most = std::min<int64_t>((budget - tokens * per_token) / per_row, 8192);
  // cuBLAS splits GEMMs of this size into pairs of tiles, 256 tokens, so other chunk sizes are slower.
  const int64_t tile = most < 2 * kTile ? kTile / 4 : kTile;
  if (most > tile) most = most / tile * tile;
  if (tokens == 0) return budget;
  plan.chunks = (tokens + most - 1) / most;
  // Chunks have one size, because a small remainder would be slow.
  plan.chunk = (tokens + plan.chunks - 1) / plan.chunks;
  if (plan.chunks > 1) plan.chunk = std::min(most, (plan.chunk + tile - 1) / tile * tile);
  plan.chunks = (tokens + plan.chunk - 1) / plan.chunk;
  return budget;
}

/// Tokens as rows of unit stride, which GEMMs and our kernels require.
inline at::Tensor as_rows(const at::Tensor& input) {
  at::Tensor x = core::as_matrix(input);
  return x.stride(1) == 1 || x.size(1) == 1 ? x : x.contiguous();
}

/// The part of a buffer for the logits of `rows` tokens and `classes`.
inline at::Tensor logits_in(const at::Tensor& buffer, int64_t rows, int64_t classes, bool has_bias) {
  // On CPU, rows must have no gaps: on CPUs with AMX, oneDNN's GEMM (torch 2.13) reads the uninitialised gaps.
  // On CUDA with a bias, rows have no gaps if classes are a multiple of 8. With gaps, ATen would add the bias after
  // rounding.
  const bool dense = buffer.is_cpu() || (has_bias && classes % 8 == 0);
  if (dense) return buffer.flatten().narrow(0, 0, rows * classes).view({rows, classes});
  return buffer.narrow(0, 0, rows).narrow(1, 0, classes);
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

/// Of a call with `tokens` in all. Fits the plan's chunks to whole numbers of tokens of every rank.
inline TokenOrder order_of(
    const char* op, const at::Tensor& input, const at::Tensor& target, int64_t tokens,
    const cross_entropy::Shard& shard, std::optional<int64_t> sequence_dim, Plan& plan) {
  if (!sequence_dim || !shard.is_split()) return {};
  TokenOrder order{shard.ranks(), at::maybe_wrap_dim(*sequence_dim, input.dim()), tokens / shard.ranks(), 0};
  const int64_t have = input.size(order.dim), all = target.size(order.dim);
  LIGER_CHECK(
      have * order.ranks == all, op, "input",
      c10::str("have ", all, " / ", order.ranks, " positions along sequence_dim, the same on every rank"), have);
  order.step = std::max<int64_t>(1, plan.chunk / order.ranks);
  plan.chunk = order.step * order.ranks;
  plan.chunks = order.tokens ? (order.tokens + order.step - 1) / order.step : 0;
  return order;
}

}  // namespace liger::ops
