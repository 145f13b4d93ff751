#pragma once

// Collectives over a process group that an operator gets by name. They run asynchronously: Pending::wait() makes the
// current stream wait (on CPU, the caller).

#include <string>
#include <utility>

#include "core/aten.h"

namespace liger::core {

/// A collective that may still run. Holds its tensors until then.
class Pending {
 public:
  // Of c10d::Work, whose header declares all of torch.
  using Work = c10::intrusive_ptr<c10::intrusive_ptr_target>;

  Pending() = default;
  Pending(at::Tensor result, at::Tensor source, Work work)
      : result_(std::move(result)), source_(std::move(source)), work_(std::move(work)) {}

  const at::Tensor& wait();

 private:
  at::Tensor result_, source_;
  Work work_;
};

class Group {
 public:
  Group(const char* op, const std::string& name);

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }

  /// (ranks, ...) from one contiguous tensor per rank.
  Pending all_gather(at::Tensor part) const;
  Pending all_gather(at::Tensor into, at::Tensor part) const;

  /// Overwrites t, which must be contiguous, with the sum over all ranks.
  Pending all_reduce(at::Tensor t) const;

  /// The sum over all ranks of this rank's slice of `parts` (ranks, ...).
  Pending reduce_scatter(at::Tensor into, at::Tensor parts) const;

 private:
  c10::intrusive_ptr<c10::intrusive_ptr_target> group_;  // a c10d::ProcessGroup
  int64_t rank_, size_;
};

}  // namespace liger::core
