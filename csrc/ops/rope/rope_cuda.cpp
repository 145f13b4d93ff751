// rope on CUDA. Launches the kernel of liger_ops/kernels/rope/rope.py.

#include "core/cuda/launch.h"
#include "kernels/rope.h"
#include "ops/rope/rope.h"

namespace liger::ops::rope {

namespace flags = kernels::constants::rope;

void rotate_cuda(const char* op, const Call& call) {
  using K = kernels::rope;
  c10::DeviceGuard guard(call.q.device());
  const int64_t rows = call.tokens(), heads = call.q.size(1) + call.k.size(1);
  if (call.empty()) return;
  LIGER_CHECK(rows <= std::numeric_limits<int32_t>::max(), op, "q", "have fewer than 2^31 positions", rows);
  const Angles& angles = call.angles;
  const int64_t rotated = 2 * angles.half, first = call.first();
  // If the rotation is in place, the columns that are not rotated need no copy.
  const int64_t rest = call.in_place() ? 0 : call.head_size() - rotated;
  // The kernel counts columns from the first that is rotated.
  auto start = [&](const Tensor& t) {
    return static_cast<const char*>(core::address(t)) + first * int64_t(call.q.element_size());
  };
  const int32_t pairs = call.columns.halves_out ? flags::MIXED
      : call.reads_pairs()                      ? flags::INTERLEAVED
                                                : flags::HALVES;
  K::Args args{
      .out_q = start(call.out_q),
      .out_k = start(call.out_k),
      .q = start(call.q),
      .k = start(call.k),
      .second = int32_t(angles.next == 1 ? angles.second : 0),
      .rest = int32_t(call.columns.trailing ? -first : rotated),
      .rest_width = int32_t(rest),
      .flags = (call.inverse ? flags::INVERSE : 0) | (angles.is_complex ? flags::COMPLEX : 0) |
          (call.reads_pairs() ? 0 : flags::READS_HALVES)};
  HeadStrides(call.out_q).pass(args.out_q_batch, args.out_q_head, args.out_q_position);
  HeadStrides(call.out_k).pass(args.out_k_batch, args.out_k_head, args.out_k_position);
  call.pass(args);
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(call.q), core::dtype_of(angles.cos)), pairs);
  const auto choice = core::choose<K>(rotated, args, point);
  // With few positions (decoding, short prompts), heads are split among programs to fill the GPU.
  constexpr int64_t kProgramsPerMultiprocessor = 8;
  int64_t wanted = kProgramsPerMultiprocessor * std::max(runtime::multiprocessors(call.q.device().index()), 1);
  int64_t pieces = heads * (choice.config.ALIGNED ? std::max(angles.half, rest) / choice.config.PIECE : 1);
  int64_t blocks = std::max<int64_t>(1, core::programs_for(pieces, choice.config.PIECES));
  int64_t groups = std::clamp<int64_t>(wanted / rows, 1, blocks);
  core::launch(op, call.q.device(), choice, {uint32_t(rows), uint32_t(groups)}, args);
}

}  // namespace liger::ops::rope
