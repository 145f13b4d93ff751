#pragma once

// Collectives over a process group that an operator gets by name. They run asynchronously: Pending::wait() makes the
// current stream wait (on CPU, the caller).

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <string>
#include <utility>
#include <vector>

#include "core/checks.h"

namespace liger::core {
namespace detail {

// torch renamed these methods in 2.13.
template <class G>
auto gather(G& group, at::Tensor& into, at::Tensor& part, int) -> decltype(group.all_gather_single(into, part)) {
  return group.all_gather_single(into, part);
}
template <class G>
auto gather(G& group, at::Tensor& into, at::Tensor& part, long) {
  return group._allgather_base(into, part);
}
template <class G>
auto scatter(G& group, at::Tensor& into, at::Tensor& parts, int) -> decltype(group.reduce_scatter_single(into, parts)) {
  return group.reduce_scatter_single(into, parts);
}
template <class G>
auto scatter(G& group, at::Tensor& into, at::Tensor& parts, long) {
  return group._reduce_scatter_base(into, parts);
}

}  // namespace detail

/// A collective that may still run. Holds its tensors until then.
class Pending {
 public:
  Pending() = default;
  Pending(at::Tensor result, at::Tensor source, c10::intrusive_ptr<c10d::Work> work)
      : result_(std::move(result)), source_(std::move(source)), work_(std::move(work)) {}

  const at::Tensor& wait() {
    if (work_) work_->wait();
    work_.reset();
    source_.reset();
    return result_;
  }

 private:
  at::Tensor result_, source_;
  c10::intrusive_ptr<c10d::Work> work_;
};

class Group {
 public:
  Group(const char* op, const std::string& name) {
    try {
      group_ = c10d::resolve_process_group(name);
    } catch (const c10::Error&) {
      LIGER_CHECK(false, op, "group", "be the name of a process group", "'", name, "'");
    }
  }

  int64_t rank() const { return group_->getRank(); }
  int64_t size() const { return group_->getSize(); }

  /// (ranks, ...) from one contiguous tensor per rank.
  Pending all_gather(at::Tensor part) const {
    auto sizes = part.sizes().vec();
    sizes.insert(sizes.begin(), size());
    at::Tensor into = at::empty(sizes, part.options());
    return all_gather(std::move(into), std::move(part));
  }
  Pending all_gather(at::Tensor into, at::Tensor part) const {
    // Flat, because gloo takes no further dimension for the ranks.
    at::Tensor flat_into = into.view(-1), flat_part = part.view(-1);
    auto work = detail::gather(*group_, flat_into, flat_part, 0);
    return {std::move(into), std::move(part), std::move(work)};
  }

  /// Overwrites t, which must be contiguous, with the sum over all ranks.
  Pending all_reduce(at::Tensor t) const {
    std::vector<at::Tensor> tensors{t};
    auto work = group_->allreduce(tensors);
    return {std::move(t), at::Tensor(), std::move(work)};
  }

  /// The sum over all ranks of this rank's slice of `parts` (ranks, ...).
  Pending reduce_scatter(at::Tensor into, at::Tensor parts) const {
    at::Tensor flat_into = into.view(-1), flat_parts = parts.view(-1);
    auto work = detail::scatter(*group_, flat_into, flat_parts, 0);
    return {std::move(into), std::move(parts), std::move(work)};
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace liger::core
