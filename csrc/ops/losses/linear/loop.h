#pragma once

// The loops of linear losses over chunks of tokens, and over blocks of tokens and classes.

#include <initializer_list>
#include <optional>
#include <vector>

#include "ops/losses/linear/head.h"

namespace liger::ops::linear {

/// Takes chunk after chunk. A Loss has
///   fetch(first)    the chunk of tokens from `first` on, which other ranks may have
///   prepare(chunk)  what runs before the chunk's logits
///   open(chunk, i)  its logits, and the facts about them that other ranks need
///   close(chunk)    results and gradients
/// If `defers`, a chunk is closed after the next one's logits, so that no GEMM waits for facts.
template <class Loss>
void run_chunks(const Division& division, Loss& loss, bool defers) {
  const Plan& plan = division.plan;
  if (plan.chunks == 0) return;
  auto next = loss.fetch(0);
  loss.prepare(next);
  std::optional<decltype(next)> opened;
  for (int64_t i = 0; i < plan.chunks; ++i) {
    auto chunk = std::move(next);
    const bool is_last = i + 1 == plan.chunks;
    if (!is_last) next = loss.fetch((i + 1) * plan.chunk);
    loss.open(chunk, i);
    if (!is_last) loss.prepare(next);
    if (opened) loss.close(*opened);
    opened.reset();
    if (defers && !is_last) {
      opened = std::move(chunk);
    } else {
      loss.close(chunk);
    }
  }
}

/// Takes all tokens of a chunk and some classes at a time: f(first token, tokens, first class, classes). Without
/// classes, once for each chunk. heads: whose tokens it needs.
template <class F>
void run_blocks(const Division& division, std::initializer_list<const Head*> heads, const F& f) {
  const Plan& plan = division.plan;
  const int64_t classes = division.shard.n, step = plan.classes > 0 ? plan.classes : std::max<int64_t>(1, classes);
  std::vector<core::Pending> next;
  auto fetch = [&](int64_t first) {
    for (const Head* head : heads) next.push_back(head->fetch(first));
  };
  fetch(0);
  for (int64_t first = 0; first < division.tokens; first += plan.chunk) {
    for (core::Pending& each : next) each.wait();
    next.clear();
    fetch(first + plan.chunk);
    int64_t c = 0;
    do {
      f(first, division.rows_from(first), c, std::min(step, classes - c));
      c += step;
    } while (c < classes);
  }
}

}  // namespace liger::ops::linear
