#pragma once

// How the losses of a linear head divide a call's tokens and classes, so that the logits of a part exist at a time.

#include <algorithm>
#include <optional>

#include "core/aten.h"

namespace liger::ops::linear {

constexpr int64_t kMiB = 1 << 20;

struct Plan {
  int64_t chunk = 1, chunks = 0;  // chunk: tokens per chunk
  int64_t buffers = 1;  // of logits; with two, a chunk's collective runs during another chunk's GEMMs
  int64_t row = 0;  // row stride of logits in elements: whole cache lines, for fast GEMMs
  int64_t part = 0;  // tokens of a chunk whose logits exist at a time; 0: all
  int64_t classes = 0;  // per GEMM; 0: all
  int64_t bytes = 0;  // of everything that is freed when the call returns
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

// Each chunk of tokens adds to d weight in its dtype, which rounds it. r: the error of one rounding to 16 bits. If
// tokens are independent, n chunks make an error of r sqrt((n + 1) / 2), beside r for the 16-bit gradients of logits;
// eager code makes r for each. If partial sums grow evenly, n chunks make r sqrt((n + 1) (2 n + 1) / (6 n)), and eager
// code r. Up to this number, neither is more than 1.5 times eager's error.
constexpr int64_t kMostRoundings = 5;

/// All tokens and some classes at a time: a GEMM then has a class's whole gradient. Tokens are divided only if the sums
/// of d input over classes do not fit.
/// per_logit: bytes for each token and class. sums: bytes for each token.
inline Plan divide_classes(
    const char* op, int64_t tokens, int64_t classes, double per_logit, int64_t sums, int64_t budget) {
  // Fewer classes make the sums over classes slow: each GEMM reads and writes them.
  constexpr int64_t kFewClasses = 4096, kTile = 256, kRows = 64;
  Plan plan;
  const int64_t least = sums + int64_t(per_logit * double(std::min<int64_t>(classes, kRows))) + 16;
  LIGER_CHECK(
      budget >= least || tokens == 0, op, "memory_budget", c10::str("be at least ", least, " bytes for one token"),
      budget);
  plan.classes = std::max<int64_t>(1, classes);
  if (tokens == 0 || classes == 0) {
    plan.chunk = std::max<int64_t>(1, tokens), plan.chunks = tokens > 0, plan.bytes = 0;
    return plan;
  }
  auto fitting = [&](int64_t columns) {
    return int64_t(double(budget - sums) / (double(sums) + per_logit * double(std::min(classes, columns))));
  };
  int64_t most = fitting(kFewClasses);
  if (sums > 0) most = std::min(most, budget * 2 / 5 / sums);
  // As many divisions as d weight may be rounded, if at least a tile of classes fits.
  const int64_t even = (tokens + kMostRoundings - 1) / kMostRoundings;
  most = std::max(most, std::min((even + kRows - 1) / kRows * kRows, fitting(kTile)));
  most = std::clamp<int64_t>(most, 1, tokens);
  if (most > kRows && most < tokens) most = most / kRows * kRows;
  plan.chunks = (tokens + most - 1) / most;
  plan.chunk = (tokens + plan.chunks - 1) / plan.chunks;
  if (plan.chunks > 1 && most > kRows) plan.chunk = std::min(most, (plan.chunk + kRows - 1) / kRows * kRows);
  plan.chunks = (tokens + plan.chunk - 1) / plan.chunk;
  int64_t fit = std::max<int64_t>(1, int64_t(double(budget / plan.chunk - sums) / per_logit));
  if (fit < classes) {
    if (fit > kTile) fit = fit / kTile * kTile;
    const int64_t blocks = (classes + fit - 1) / fit, each = (classes + blocks - 1) / blocks;
    plan.classes = std::min(fit, fit > kTile ? (each + kTile - 1) / kTile * kTile : each);
  }
  plan.bytes = plan.chunk * (sums + int64_t(double(plan.classes) * per_logit));
  return plan;
}

}  // namespace liger::ops::linear
