// Rows of fused_linear_divergence on CUDA. Launches the kernel of liger_ops/kernels/losses/fused_linear_divergence.py.

#include <algorithm>

#include "core/cuda/launch.h"
#include "ops/losses/linear/fused_linear_divergence_rows.h"

namespace liger::ops::fused_linear_divergence {
namespace {

constexpr double kLog2E = 1.4426950408889634;

int32_t flags_of(const Rows& r, bool waits) {
  const bool writes = r.dlogits.defined();
  int32_t flags = (r.mask.defined() ? kinds::HAS_MASK : 0) | (r.grad.defined() ? kinds::HAS_UPSTREAM : 0) |
      (r.s_bias.defined() ? kinds::S_BIAS : 0) | (r.t_bias.defined() ? kinds::T_BIAS : 0) |
      (r.o.student.softcap ? kinds::S_CAP : 0) | (r.o.teacher.softcap ? kinds::T_CAP : 0);
  switch (r.phase) {
    case Phase::All:
      flags |= kinds::SCANS | kinds::VALUES | (writes ? kinds::WRITES : 0) | (r.stats.defined() ? kinds::SAVES : 0);
      flags |= (writes && r.o.is_mixture() ? kinds::KEEPS : 0) | (waits ? kinds::WAITS : 0);
      return flags;
    case Phase::Scan: return flags | kinds::SCANS;
    case Phase::Values: flags |= kinds::VALUES | (writes ? kinds::WRITES : 0); break;
    case Phase::Write: flags |= kinds::WRITES; break;
  }
  return flags | kinds::KNOWN | (r.keeps ? kinds::KEEPS : 0);
}

}  // namespace

void rows_cuda(Rows& r) {
  using K = kernels::fused_linear_divergence_rows;
  const int64_t rows = r.student.size(0), n = r.student.size(1);
  const auto device = r.student.device();
  // Parts of a row wait for each other, so all of them must run at the same time.
  const int64_t most = std::min<int64_t>(kinds::MOST_PARTS, runtime::multiprocessors(device.index()));
  const int64_t least = (n + most - 1) / most, step = kinds::LEAST_PART;
  const int64_t part = std::max<int64_t>(step, (least + 7) / 8 * 8), parts = (n + part - 1) / part;
  const bool scans = r.phase == Phase::All || r.phase == Phase::Scan;
  const bool adds = r.phase == Phase::All || r.phase == Phase::Values, writes = r.dlogits.defined();
  const bool waits = r.phase == Phase::All && parts > 1;
  auto numbers = r.student.options();
  Tensor shares, values, arrived;
  if (scans) shares = at::empty({rows, parts, int64_t(kinds::SHARES)}, numbers);
  if (adds) values = at::empty({rows, parts, 2}, numbers);
  if (waits) arrived = at::zeros({1 + rows}, numbers.dtype(at::kInt));
  const bool capped = r.o.student.softcap || r.o.teacher.softcap;
  const auto dtype = dtype_of(writes ? r.dlogits : r.student);
  const auto point = runtime::point_of<K>(K::dtype(dtype), r.o.kind(), capped ? 1 : 0);
  const K::Args args{
      .dlogits = address(r.dlogits),
      .s = address(r.student),
      .t = address(r.teacher),
      .s_bias = address(r.s_bias),
      .t_bias = address(r.t_bias),
      .mask = address(r.mask),
      .grad = address(r.grad),
      .entropy = address(r.entropy),
      .stats = address(r.stats),
      .values = address(values),
      .shares = address(shares),
      .arrived = address(arrived),
      .n = int32_t(n),
      .part = int32_t(part),
      .s_stride = r.student.stride(0),
      .t_stride = r.teacher.stride(0),
      .d_stride = writes ? r.dlogits.stride(0) : 0,
      .stats_stride = r.stats.defined() ? r.stats.stride(0) : 0,
      .factor = float(kLog2E / r.o.temperature),
      .inverse = float(1 / r.o.temperature),
      .beta = float(r.o.beta),
      .s_scale = float(r.o.student.scale),
      .t_scale = float(r.o.teacher.scale),
      .s_softcap = float(r.o.student.softcap.value_or(1)),
      .t_softcap = float(r.o.teacher.softcap.value_or(1)),
      .flags = flags_of(r, waits)};
  launch(r.op, device, choose<K>(n, args, point), {uint32_t(rows * parts)}, args);
  if (r.phase == Phase::Scan) {
    shares.select(2, 2).mul_(1 / kLog2E);
    r.facts = shares;
  }
  if (!adds) return;
  at::sum_out(r.divergence, values.select(2, 0), 1);
  if (r.stats.defined() && r.o.is_mixture()) {
    Tensor mean = r.stats.select(0, 4);
    at::sum_out(mean, values.select(2, 1), 1);
  }
}

}  // namespace liger::ops::fused_linear_divergence
