#pragma once

#include "core/cuda/launch.h"
#include "kernels/column_sum.h"

namespace liger::core {

/// Sums fp32 partials over their rows into one or two vectors, in a fixed order.
/// partial: (outputs, rows, n); outs: (n,). Of two, one may be undefined, and its partials are not read.
inline void column_sum(const char* op, const at::Tensor& partial, const at::Tensor& out0, const at::Tensor& out1 = {}) {
  if (!out0.defined()) return column_sum(op, partial.slice(0, 1), out1);
  if (!out1.defined() && partial.size(0) > 1) return column_sum(op, partial.slice(0, 0, 1), out0);
  using K = kernels::column_sum;
  const int64_t n = partial.size(2);
  const K::Args args{
      .out0 = address(out0),
      .out1 = address(out1),
      .partial = address(partial),
      .rows = int32_t(partial.size(1)),
      .n = int32_t(n)};
  const auto choice = choose<K>(n, args, runtime::point_of<K>(K::dtype(dtype_of(out0))));
  launch(op, out0.device(), choice, {programs_for(n, choice.config.BLOCK_N), uint32_t(partial.size(0))}, args);
}

/// Launches programs for `blocks` blocks of rows in each of `groups` groups of columns, and adds up their partial sums
/// in `sums`, of which all may be undefined. Program p of P serves group p % groups: its blocks of rows p / groups and
/// every P / groups more. It stores partial[i, p / groups, columns of its group], of (sums, P / groups, n), where
/// n is the size of a sum. final_flag: the kernel's flag for a single block, which writes the gradients itself, or 0.
template <class K, size_t N>
void launch_with_sums(
    const char* op, const at::Device& device, const Choice<K>& choice, int64_t blocks, typename K::Args& args,
    const at::Tensor (&sums)[N], int32_t final_flag, int64_t groups = 1) {
  const int64_t resident = persistent_programs(device, blocks * groups, choice.config.programs_per_sm);
  const int64_t programs = std::max<int64_t>(1, std::min(blocks, resident / groups));  // of each group
  const at::Tensor &first = sums[0], &last = sums[N - 1], &any = first.defined() ? first : last;
  const bool adds_up = any.defined() && (blocks > 1 || !final_flag);
  at::Tensor partial;
  if (adds_up) partial = at::empty({int64_t(N), programs, any.numel()}, any.options().dtype(at::kFloat));
  args.partial = address(partial);
  if (blocks == 1) args.flags |= final_flag;
  launch(op, device, choice, {uint32_t(programs * groups)}, args);
  if (adds_up) column_sum(op, partial, first, N == 1 ? at::Tensor() : last);
}

}  // namespace liger::core
