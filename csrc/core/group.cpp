#include "core/group.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <vector>

#include "core/checks.h"

namespace liger::core {
namespace {

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

c10d::ProcessGroup& collectives_of(const c10::intrusive_ptr<c10::intrusive_ptr_target>& group) {
  return static_cast<c10d::ProcessGroup&>(*group);
}

}  // namespace

const at::Tensor& Pending::wait() {
  if (work_) static_cast<c10d::Work&>(*work_).wait();
  work_.reset();
  source_.reset();
  return result_;
}

Group::Group(const char* op, const std::string& name) {
  try {
    auto found = c10d::resolve_process_group(name);
    rank_ = found->getRank();
    size_ = found->getSize();
    group_ = std::move(found);
  } catch (const c10::Error&) {
    LIGER_CHECK(false, op, "group", "be the name of a process group", "'", name, "'");
  }
}

Pending Group::all_gather(at::Tensor part) const {
  auto sizes = part.sizes().vec();
  sizes.insert(sizes.begin(), size());
  at::Tensor into = at::empty(sizes, part.options());
  return all_gather(std::move(into), std::move(part));
}

Pending Group::all_gather(at::Tensor into, at::Tensor part) const {
  // Flat, because gloo takes no further dimension for the ranks.
  at::Tensor flat_into = into.view(-1), flat_part = part.view(-1);
  auto work = gather(collectives_of(group_), flat_into, flat_part, 0);
  return {std::move(into), std::move(part), std::move(work)};
}

Pending Group::all_reduce(at::Tensor t) const {
  std::vector<at::Tensor> tensors{t};
  auto work = collectives_of(group_).allreduce(tensors);
  return {std::move(t), at::Tensor(), std::move(work)};
}

Pending Group::reduce_scatter(at::Tensor into, at::Tensor parts) const {
  at::Tensor flat_into = into.view(-1), flat_parts = parts.view(-1);
  auto work = scatter(collectives_of(group_), flat_into, flat_parts, 0);
  return {std::move(into), std::move(parts), std::move(work)};
}

}  // namespace liger::core
