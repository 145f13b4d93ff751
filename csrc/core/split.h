#pragma once

// Classes that are split over the ranks of a process group, in order. A rank holds the classes from `first` on.

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "core/aten.h"
#include "core/group.h"

namespace liger::core {

using ClassSizes = at::OptionalIntArrayRef;

/// The caller's request. group: empty, and classes: 0, if the classes are not split. sizes: classes of each rank;
/// empty: as torch.chunk splits them.
struct Vocabulary {
  std::string group;
  int64_t classes = 0;
  std::vector<int64_t> sizes;

  bool is_split() const { return !group.empty(); }
};

inline Vocabulary parse_vocabulary(const char* op, c10::string_view group, int64_t classes, ClassSizes sizes) {
  if (group.empty() && classes == 0) {
    LIGER_CHECK(!sizes, op, "class_sizes", "be None without a group", *sizes);
    return {};
  }
  LIGER_CHECK(!group.empty(), op, "group", "be the name of a process group", "''");
  LIGER_CHECK(classes > 0, op, "classes", "be positive", classes);
  Vocabulary v{std::string(group), classes, {}};
  if (!sizes) return v;
  v.sizes = sizes->vec();
  const bool counts = std::all_of(v.sizes.begin(), v.sizes.end(), [](int64_t size) { return size >= 0; });
  LIGER_CHECK(
      counts && std::accumulate(v.sizes.begin(), v.sizes.end(), int64_t(0)) == classes, op, "class_sizes",
      c10::str("be the classes of each rank, ", classes, " in all"), *sizes);
  return v;
}

/// This rank's part. Without a group: all classes.
struct Shard {
  int64_t first = 0, n = 0, classes = 0, largest = 0;  // largest: n of the rank that has the most classes
  std::vector<int64_t> firsts;  // of all ranks, and the end
  std::shared_ptr<const Group> group;

  explicit Shard(int64_t all_classes) : n(all_classes), classes(all_classes), largest(all_classes) {}

  /// found: the number of classes that this rank's tensor has. `what` names it in messages.
  Shard(const char* op, const Vocabulary& v, int64_t found, const char* what) : Shard(found) {
    if (!v.is_split()) return;
    group = std::make_shared<Group>(op, v.group);
    classes = v.classes;
    const int64_t ranks = group->size(), each = (classes + ranks - 1) / ranks;
    LIGER_CHECK(
        v.sizes.empty() || int64_t(v.sizes.size()) == ranks, op, "class_sizes",
        c10::str("have one number for each of the ", ranks, " ranks of the group"), v.sizes.size(), " numbers");
    firsts.push_back(0);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t end = v.sizes.empty() ? std::min((rank + 1) * each, classes) : firsts.back() + v.sizes[rank];
      largest = std::max(rank ? largest : 0, end - firsts.back());
      firsts.push_back(end);
    }
    first = firsts[group->rank()];
    n = firsts[group->rank() + 1] - first;
    LIGER_CHECK(
        found == n, op, what, c10::str("have ", n, " classes, those of rank ", group->rank(), " of ", ranks), found);
  }

  bool is_split() const { return group != nullptr; }
  int64_t ranks() const { return group ? group->size() : 1; }
};

}  // namespace liger::core
