// Log-probabilities on CUDA. Launches the kernels of liger_ops/kernels/losses/log_probs.py.

#include "core/cuda/launch.h"
#include "ops/losses/log_probs.h"
#include "core/rows/rows_in_order.h"

namespace liger::ops::log_probs {
namespace {

namespace flags = kernels::constants::log_probs;

/// Sets the arguments that kernels share.
template <class Args, size_t N>
void pass(
    Args& args, const Rows<N>& walk, const Tensor& logits, const Tensor& index, const Options& o,
    const Columns& columns) {
  pass_options(args, index, o, columns, columns.classes_of(logits));
  args.logits = address(logits);
  args.n = int32_t(walk.n);
  args.inner_rows = walk.kernel_inner_rows();
  args.count = int32_t(ids_per_row(logits, index));
  args.logits_strides = walk.strides.back();
}

}  // namespace

void forward_cuda(const char* op, Tensor logits, Tensor index, const Options& o, Results& out, const Columns& columns) {
  using K = kernels::log_probs_fwd;
  using Combine = kernels::log_probs_combine;
  c10::DeviceGuard guard(logits.device());
  const int64_t rows_wanted = c10::multiply_integers(logits.sizes().slice(0, logits.dim() - 1));
  if (rows_wanted == 0) return;
  if (logits.size(-1) == 0) {
    // Rows without logits: ignored ones are 0, as all others are.
    for (Tensor* t :
         {&out.log_probs, &out.entropy, &out.stats, &out.chosen, &out.mean_logits, &out.log_sum_sq_probs,
          &out.is_top1}) {
      if (t->defined()) t->zero_();
    }
    return;
  }
  index = index.contiguous();
  const auto walk = rows_in_order<1>(op, "logits", {&logits});
  const int form = (o.softcap ? 1 : 0) + (out.has_extras() ? 2 : 0);
  const auto dtype = dtype_of(logits);
  K::Args args{};
  pass(args, walk, logits, index, o, columns);
  pass_results(args, out);
  const auto choice = choose<K>(walk.n, args, runtime::point_of<K>(K::dtype(dtype), form));
  const auto& config = choice.config;
  // Rows are split if they are too few to fill the GPU. step: columns that a program reads at a time.
  const int64_t step = int64_t(config.LANES) * config.TILES * 16 / int64_t(logits.element_size());
  const int64_t end = columns_end(config, walk.n, flags::MOST_SKEW),
                processors = runtime::multiprocessors(logits.device().index());
  const int64_t wanted = std::min({4 * processors / walk.rows, end / step, int64_t(flags::MOST_PARTS)});
  const int64_t part = wanted < 2 ? 0 : ((end + wanted - 1) / wanted + step - 1) / step * step;
  const int64_t parts = part ? (end + part - 1) / part : 1;
  Tensor shares;
  if (part) shares = at::empty({walk.rows, parts, flags::SHARE}, logits.options().dtype(at::kFloat));
  args.shares = address(shares);
  args.part = int32_t(part);
  launch(op, logits.device(), choice, {uint32_t(walk.rows * parts)}, args);
  if (!part) return;
  Combine::Args all{.shares = address(shares), .parts = int32_t(parts)};
  pass(all, walk, logits, index, o, columns);
  pass_results(all, out);
  const auto point = runtime::point_of<Combine>(Combine::dtype(dtype), form);
  launch(op, logits.device(), choose<Combine>(walk.n, all, point), {uint32_t(walk.rows)}, all);
}

void backward_cuda(
    const char* op, Tensor& dlogits, const ResultGradients& upstream, Tensor logits, Tensor index, const Tensor& stats,
    const Tensor& chosen, const Options& o, const Columns& columns) {
  using K = kernels::log_probs_bwd;
  c10::DeviceGuard guard(logits.device());
  if (logits.numel() == 0) return;
  index = index.contiguous();
  Tensor out = dlogits;
  const auto walk = rows_in_order<2>(op, "logits", {&out, &logits});
  K::Args args{.dlogits = address(out), .dlogits_strides = walk.strides[0]};
  pass(args, walk, logits, index, o, columns);
  pass_gradients(args, upstream, stats, chosen);
  const int dtypes = K::dtype(dtype_of(out), dtype_of(logits));
  const auto choice = choose<K>(walk.n, args, runtime::point_of<K>(dtypes, o.softcap ? 1 : 0));
  const auto& config = choice.config;
  const uint32_t spans = programs_for(columns_end(config, walk.n, flags::MOST_SKEW), config.BLOCK_N * config.BLOCKS);
  launch(op, logits.device(), choice, {uint32_t(walk.rows) * spans}, args);
  if (!out.is_same(dlogits)) dlogits.copy_(out);
}

}  // namespace liger::ops::log_probs
