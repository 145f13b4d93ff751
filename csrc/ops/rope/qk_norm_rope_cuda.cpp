// qk_norm_rope on CUDA. Launches the kernels of liger_ops/kernels/rope/qk_norm_rope.py.

#include "core/column_sum.h"
#include "core/cuda.h"
#include "kernels/qk_norm_rope.h"
#include "ops/rope/qk_norm_rope.h"

namespace liger::ops::qk_norm_rope {

namespace flags = kernels::constants::qk_norm_rope;

namespace {

using rope::HeadStrides;

at::ScalarType weight_dtype(const Forward& call) {
  return (call.q_weight.defined() ? call.q_weight : call.k_weight.defined() ? call.k_weight : call.q).scalar_type();
}

// Weights wider than q and k have kernels for fp32 angles only.
rope::Angles angles_of(const Forward& call) {
  rope::Angles angles = call.angles;
  if (weight_dtype(call) == at::kFloat && angles.cos.scalar_type() != at::kFloat) {
    angles.cos = angles.cos.to(at::kFloat);
    angles.sin = angles.sin.to(at::kFloat);
  }
  return angles;
}

int32_t flags_of(const Forward& call) {
  return (call.q_weight.defined() ? flags::HAS_Q_WEIGHT : 0) | (call.k_weight.defined() ? flags::HAS_K_WEIGHT : 0) |
      (call.round_first ? flags::ROUND_FIRST : 0);
}

void check_sizes(const char* op, const Forward& call) {
  LIGER_CHECK(
      call.head_size() <= flags::MAX_WIDTH, op, "q", c10::str("have heads of at most ", flags::MAX_WIDTH, " columns"),
      call.head_size());
  const int64_t rows = call.tokens() * (call.q.size(1) + call.k.size(1));
  LIGER_CHECK(rows <= std::numeric_limits<int32_t>::max(), op, "q", "have fewer than 2^31 heads and positions", rows);
}

// The columns that are not rotated form pairs at this distance.
int64_t rest_of(const Forward& call) { return (call.head_size() - 2 * call.angles.half + 1) / 2; }

template <class K>
runtime::Point point_of(const Forward& call, const rope::Angles& angles) {
  return runtime::point_of<K>(
      K::dtype(core::dtype_of(call.q), core::dtype_of(weight_dtype(call)), core::dtype_of(angles.cos)),
      call.interleaved);
}

bool aligned(const Forward& call, const rope::Angles& angles) {
  return ((call.head_size() | rest_of(call)) & 7) == 0 && angles.aligned() && HeadStrides(call.q).aligned() &&
      HeadStrides(call.k).aligned() &&
      core::aligned16(
             core::address(call.q), core::address(call.k), core::address(call.q_weight), core::address(call.k_weight),
             core::address(angles.cos), core::address(angles.sin));
}

}  // namespace

void Cuda::forward(const Forward& call) {
  using K = kernels::qk_norm_rope_fwd;
  c10::DeviceGuard guard(call.q.device());
  if (call.empty()) return;
  check_sizes(kOp, call);
  const rope::Angles angles = angles_of(call);
  const HeadStrides q(call.q), k(call.k), out_q(call.out_q), out_k(call.out_k);
  const int64_t rest = rest_of(call), q_heads = call.q.size(1), k_heads = call.k.size(1);
  const bool fits = aligned(call, angles) && out_q.aligned() && out_k.aligned() &&
      core::aligned16(core::address(call.out_q), core::address(call.out_k));
  const auto point = point_of<K>(call, angles);
  const auto& config = runtime::first_fit<K>(2 * (angles.half + rest), fits, point);
  constexpr int kResident = 32;  // programs that a multiprocessor runs at a time
  const int64_t tokens = call.tokens(), blocks = (q_heads + k_heads + config.HEADS - 1) / config.HEADS;
  const int64_t programs = core::persistent_programs(call.q.device(), tokens * blocks, kResident);
  const int64_t splits = std::min(blocks, (programs + tokens - 1) / tokens);
  K::Args args{
      core::address(call.out_q),
      core::address(call.out_k),
      core::address(call.q),
      core::address(call.k),
      core::address(call.q_weight),
      core::address(call.k_weight),
      core::address(angles.cos),
      core::address(angles.sin),
      int32_t(call.positions()),
      int32_t(q_heads),
      int32_t(k_heads),
      int32_t(angles.half),
      int32_t(rest),
      int32_t(call.head_size()),
      int32_t(angles.section_1),
      int32_t(angles.section_2),
      int32_t(splits),
      out_q.batch,
      out_q.head,
      out_q.position,
      out_k.batch,
      out_k.head,
      out_k.position,
      q.batch,
      q.head,
      q.position,
      k.batch,
      k.head,
      k.position,
      angles.batch,
      angles.position,
      angles.section,
      float(call.eps),
      float(call.offset),
      flags_of(call)};
  core::launch<K>(kOp, call.q.device(), runtime::variant_index<K>(config, point), {uint32_t(tokens * splits)}, args);
}

WeightGradients Cuda::backward(Backward call) {
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
  const rope::Angles angles = angles_of(call);
  const HeadStrides q(call.q), k(call.k), grad_q(call.grad_q), grad_k(call.grad_k);
  const HeadStrides dq(call.out_q), dk(call.out_k);
  const int64_t rest = rest_of(call), q_heads = call.q.size(1), k_heads = call.k.size(1), width = call.head_size();
  const bool fits = aligned(call, angles) && grad_q.aligned() && grad_k.aligned() && dq.aligned() && dk.aligned() &&
      core::aligned16(core::address(call.grad_q), core::address(call.grad_k), core::address(call.out_q),
                      core::address(call.out_k));
  const auto point = point_of<K>(call, angles);
  const auto& config = runtime::first_fit<K>(2 * (angles.half + rest), fits, point);
  const int64_t blocks = (call.tokens() * std::max(q_heads, k_heads) + config.HEADS - 1) / config.HEADS;
  const int64_t programs = core::persistent_programs(call.q.device(), blocks, config.programs_per_sm);
  Tensor partial = sums_q || sums_k ? at::empty({2, programs, width}, call.q.options().dtype(at::kFloat)) : Tensor();
  K::Args args{
      core::address(call.out_q),
      core::address(call.out_k),
      core::address(partial),
      core::address(call.grad_q),
      core::address(call.grad_k),
      core::address(call.q),
      core::address(call.k),
      core::address(call.q_weight),
      core::address(call.k_weight),
      core::address(angles.cos),
      core::address(angles.sin),
      int32_t(call.tokens()),
      int32_t(call.positions()),
      int32_t(q_heads),
      int32_t(k_heads),
      int32_t(angles.half),
      int32_t(rest),
      int32_t(width),
      int32_t(angles.section_1),
      int32_t(angles.section_2),
      dq.batch,
      dq.head,
      dq.position,
      dk.batch,
      dk.head,
      dk.position,
      grad_q.batch,
      grad_q.head,
      grad_q.position,
      grad_k.batch,
      grad_k.head,
      grad_k.position,
      q.batch,
      q.head,
      q.position,
      k.batch,
      k.head,
      k.position,
      angles.batch,
      angles.position,
      angles.section,
      float(call.eps),
      float(call.offset),
      flags_of(call) | (sums_q || sums_k ? flags::NEEDS_WEIGHTS : 0)};
  core::launch<K>(kBackward, call.q.device(), runtime::variant_index<K>(config, point), {uint32_t(programs)}, args);
  if (sums_q && sums_k) {
    core::column_sum(kBackward, partial, dq_weight, dk_weight);
  } else if (sums_q || sums_k) {
    core::column_sum(kBackward, partial.narrow(0, sums_q ? 0 : 1, 1), sums_q ? dq_weight : dk_weight);
  }
  return {dq_weight, dk_weight};
}

}  // namespace liger::ops::qk_norm_rope
