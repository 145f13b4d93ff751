// qk_norm_rope on CUDA. Launches the kernels of liger_ops/kernels/rope/qk_norm_rope.py.

#include "kernels/qk_norm_rope.h"
#include "core/cuda/column_sum.h"
#include "ops/rope/qk_norm_rope.h"

namespace liger::ops::qk_norm_rope {

namespace flags = kernels::constants::qk_norm_rope;

namespace {

using rope::HeadStrides;

at::ScalarType weight_dtype(const Forward& call) {
  return (call.q_weight.defined() ? call.q_weight : call.k_weight.defined() ? call.k_weight : call.q).scalar_type();
}

// Weights wider than q and k have kernels for fp32 angles only.
void widen_angles(Forward& call) {
  if (weight_dtype(call) != at::kFloat) return;
  call.angles.cos = call.angles.cos.to(at::kFloat);
  call.angles.sin = call.angles.sin.to(at::kFloat);
}

void check_sizes(const char* op, const Forward& call) {
  LIGER_CHECK(
      call.head_size() <= flags::MAX_WIDTH, op, "q", c10::str("have heads of at most ", flags::MAX_WIDTH, " columns"),
      call.head_size());
  const int64_t rows = call.tokens() * (call.q.size(1) + call.k.size(1));
  LIGER_CHECK(rows <= std::numeric_limits<int32_t>::max(), op, "q", "have fewer than 2^31 heads and positions", rows);
}

// The arguments that both kernels take.
template <class K>
typename K::Args arguments(const Forward& call) {
  typename K::Args out{
      .q = core::address(call.q),
      .k = core::address(call.k),
      .q_weight = core::address(call.q_weight),
      .k_weight = core::address(call.k_weight),
      // The columns that are not rotated form pairs at this distance.
      .rest = int32_t((call.head_size() - 2 * call.angles.half + 1) / 2),
      .width = int32_t(call.head_size()),
      .eps = float(call.eps),
      .offset = float(call.offset),
      .flags = (call.q_weight.defined() ? flags::HAS_Q_WEIGHT : 0) |
          (call.k_weight.defined() ? flags::HAS_K_WEIGHT : 0) | (call.round_first ? flags::ROUND_FIRST : 0)};
  call.pass(out);
  return out;
}

template <class K>
core::Choice<K> choose(const Forward& call, const typename K::Args& args) {
  const auto angles = core::dtype_of(call.angles.cos);
  const auto dtype = K::dtype(core::dtype_of(call.q), core::dtype_of(weight_dtype(call)), angles);
  return core::choose<K>(2 * (args.half + args.rest), args, runtime::point_of<K>(dtype, call.interleaved));
}

}  // namespace

void Cuda::forward(Forward& call) {
  using K = kernels::qk_norm_rope_fwd;
  c10::DeviceGuard guard(call.q.device());
  if (call.empty()) return;
  check_sizes(kOp, call);
  widen_angles(call);
  auto args = arguments<K>(call);
  args.out_q = core::address(call.out_q);
  args.out_k = core::address(call.out_k);
  HeadStrides(call.out_q).pass(args.out_q_batch, args.out_q_head, args.out_q_position);
  HeadStrides(call.out_k).pass(args.out_k_batch, args.out_k_head, args.out_k_position);
  const auto choice = choose<K>(call, args);
  constexpr int kResident = 32;  // programs that a multiprocessor runs at a time
  const int64_t tokens = call.tokens();
  const int64_t blocks = core::programs_for(args.q_heads + args.k_heads, choice.config.HEADS);
  const int64_t programs = core::persistent_programs(call.q.device(), tokens * blocks, kResident);
  const int64_t splits = std::min<int64_t>(blocks, core::programs_for(programs, tokens));
  args.splits = int32_t(splits);
  core::launch(kOp, call.q.device(), choice, {uint32_t(tokens * splits)}, args);
}

WeightGradients Cuda::backward(Backward& call) {
  using K = kernels::qk_norm_rope_bwd;
  c10::DeviceGuard guard(call.q.device());
  const bool sums_q = call.needs_weights && call.q_weight.defined();
  const bool sums_k = call.needs_weights && call.k_weight.defined();
  Tensor dq_weight = sums_q ? at::empty_like(call.q_weight) : Tensor();
  Tensor dk_weight = sums_k ? at::empty_like(call.k_weight) : Tensor();
  if (call.empty()) {
    if (sums_q) dq_weight.zero_();
    if (sums_k) dk_weight.zero_();
    return {dq_weight, dk_weight};
  }
  check_sizes(kBackward, call);
  // The kernel always writes gradients of q and k. If they are not needed (frozen projections), temporary buffers
  // receive them.
  if (!call.out_q.defined()) call.out_q = at::empty_like(call.q);
  if (!call.out_k.defined()) call.out_k = at::empty_like(call.k);
  widen_angles(call);
  auto args = arguments<K>(call);
  args.dq = core::address(call.out_q);
  args.dk = core::address(call.out_k);
  args.grad_q = core::address(call.grad_q);
  args.grad_k = core::address(call.grad_k);
  args.tokens = int32_t(call.tokens());
  HeadStrides(call.out_q).pass(args.dq_batch, args.dq_head, args.dq_position);
  HeadStrides(call.out_k).pass(args.dk_batch, args.dk_head, args.dk_position);
  HeadStrides(call.grad_q).pass(args.grad_q_batch, args.grad_q_head, args.grad_q_position);
  HeadStrides(call.grad_k).pass(args.grad_k_batch, args.grad_k_head, args.grad_k_position);
  if (sums_q || sums_k) args.flags |= flags::NEEDS_WEIGHTS;
  const auto choice = choose<K>(call, args);
  const int64_t blocks = core::programs_for(call.tokens() * std::max(args.q_heads, args.k_heads), choice.config.HEADS);
  core::launch_with_sums(kBackward, call.q.device(), choice, blocks, args, {dq_weight, dk_weight}, /*final_flag=*/0);
  return {dq_weight, dk_weight};
}

}  // namespace liger::ops::qk_norm_rope
