#pragma once

// Backward kernels whose persistent programs each keep a partial sum of the parameters' gradients.

#include "core/cuda/column_sum.h"
#include "core/cuda/launch.h"

namespace liger::ops {

/// Launches programs for `blocks` blocks of rows in each of `groups` groups of columns, and adds up their partial sums
/// in `sums`, of which all may be undefined. final_flag: the kernel's flag for a single block, which writes the
/// gradients itself, or 0.
template <class K, size_t N>
void launch_with_sums(
    const char* op, const at::Device& device, const core::Choice<K>& choice, int64_t blocks, typename K::Args& args,
    const at::Tensor (&sums)[N], int32_t final_flag, int64_t groups = 1) {
  const int64_t resident = core::persistent_programs(device, blocks * groups, choice.config.programs_per_sm);
  const int64_t programs = std::max<int64_t>(1, std::min(blocks, resident / groups));  // of each group
  const at::Tensor &first = sums[0], &last = sums[N - 1], &any = first.defined() ? first : last;
  const bool adds_up = any.defined() && (blocks > 1 || !final_flag);
  at::Tensor partial;
  if (adds_up) partial = at::empty({int64_t(N), programs, any.numel()}, any.options().dtype(at::kFloat));
  args.partial = core::address(partial);
  if (blocks == 1) args.flags |= final_flag;
  core::launch(op, device, choice, {uint32_t(programs * groups)}, args);
  if (adds_up) core::column_sum(op, partial, first, N == 1 ? at::Tensor() : last);
}

}  // namespace liger::ops
