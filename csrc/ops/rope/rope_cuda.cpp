// rope on CUDA. Launches the kernel of liger_ops/kernels/rope/rope.py.

#include "core/cuda.h"
#include "kernels/rope.h"
#include "ops/rope/rope.h"

namespace liger::ops::rope {

namespace flags = kernels::constants::rope;

void rotate_cuda(const char* op, const Call& call) {
  using K = kernels::rope;
  c10::DeviceGuard guard(call.q.device());
  const int64_t rows = call.batch() * call.positions(), heads = call.q.size(1) + call.k.size(1);
  if (call.q.numel() + call.k.numel() == 0) return;
  LIGER_CHECK(rows <= std::numeric_limits<int32_t>::max(), op, "q", "have fewer than 2^31 positions", rows);
  const Angles& angles = call.angles;
  const HeadStrides q(call.q), k(call.k), out_q(call.out_q), out_k(call.out_k);
  const int64_t rotated = 2 * angles.half, first = call.first();
  // If the rotation is in place, the columns that are not rotated need no copy.
  const int64_t rest = call.in_place() ? 0 : call.head_size() - rotated;
  // The kernel counts columns from the first that is rotated.
  auto start = [&](const Tensor& t) {
    return static_cast<const char*>(core::address(t)) + first * int64_t(call.q.element_size());
  };
  const bool aligned = ((rest | first) & 7) == 0 && angles.aligned() && q.aligned() && k.aligned() && out_q.aligned() &&
      out_k.aligned() &&
      core::aligned16(core::address(call.out_q), core::address(call.out_k), core::address(call.q),
                      core::address(call.k), core::address(angles.cos), core::address(angles.sin));
  const int32_t pairs = call.columns.halves_out ? flags::MIXED
      : call.reads_pairs()                      ? flags::INTERLEAVED
                                                : flags::HALVES;
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(call.q), core::dtype_of(angles.cos)), pairs);
  const auto& config = runtime::first_fit<K>(rotated, aligned, point);
  const int32_t flags = (call.inverse ? flags::INVERSE : 0) | (angles.is_complex ? flags::COMPLEX : 0) |
      (call.reads_pairs() ? 0 : flags::READS_HALVES);
  K::Args args{
      start(call.out_q),
      start(call.out_k),
      start(call.q),
      start(call.k),
      core::address(angles.cos),
      core::address(angles.sin),
      int32_t(call.positions()),
      int32_t(call.q.size(1)),
      int32_t(call.k.size(1)),
      int32_t(angles.half),
      int32_t(angles.next == 1 ? angles.second : 0),
      int32_t(call.columns.trailing ? -first : rotated),
      int32_t(rest),
      int32_t(angles.section_1),
      int32_t(angles.section_2),
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
      flags};
  // With few positions (decoding, short prompts), heads are split among programs to fill the GPU.
  constexpr int64_t kProgramsPerMultiprocessor = 8;
  int64_t wanted = kProgramsPerMultiprocessor * std::max(runtime::multiprocessors(call.q.device().index()), 1);
  int64_t pieces = heads * (config.ALIGNED ? std::max(angles.half, rest) / config.PIECE : 1);
  int64_t blocks = std::max<int64_t>(1, (pieces + config.PIECES - 1) / config.PIECES);
  int64_t groups = std::clamp<int64_t>(wanted / rows, 1, blocks);
  core::launch<K>(
      op, call.q.device(), runtime::variant_index<K>(config, point), {uint32_t(rows), uint32_t(groups)}, args);
}

}  // namespace liger::ops::rope
