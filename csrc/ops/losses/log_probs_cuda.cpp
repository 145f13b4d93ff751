// Log-probabilities on CUDA. Launches the kernels of liger_ops/kernels/losses/log_probs.py.

#include "core/cuda.h"
#include "ops/losses/log_probs.h"
#include "ops/losses/rows_in_order.h"

namespace liger::ops::log_probs {
namespace {

namespace flags = kernels::constants::log_probs;

/// Arguments that all launches of one call share.
template <class Args>
void set_common(
    Args& args, const Tensor& logits, const Tensor& index, const Options& o, const Columns& columns, int32_t flags) {
  args.logits = address(logits);
  args.index = address(index);
  args.n = int32_t(logits.size(-1));
  args.count = int32_t(ids_per_row(logits, index));
  args.first_class = int32_t(columns.first);
  args.classes = int32_t(columns.classes_of(logits));
  args.index_words = index.scalar_type() == at::kLong ? 2 : 1;
  args.ignore_index = o.ignore_index;
  args.factor = float(1.4426950408889634 / o.temperature);
  args.inverse = float(1 / o.temperature);
  args.softcap = float(o.softcap.value_or(1));
  args.flags = flags;
}

/// Upper bound of the end of a row of n columns, whatever its skew.
template <class Config>
int64_t columns_end(const Config& config, int64_t n) {
  return n + (config.SKEWED ? flags::MOST_SKEW : 0);
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
  auto walk = rows_in_order<1>(op, "logits", {&logits});
  auto flag = [](const Tensor& t, int32_t bit) { return t.defined() ? bit : 0; };
  const int32_t flags = flag(out.entropy, flags::WITH_ENTROPY) | flag(out.stats, flags::WITH_GRAPH) |
      flag(out.mean_logits, flags::WITH_MEAN_LOGITS) | flag(out.log_sum_sq_probs, flags::WITH_SQUARES) |
      flag(out.is_top1, flags::WITH_TOP1);
  const int form = (o.softcap ? 1 : 0) + (out.has_extras() ? 2 : 0);
  const bool aligned = walk.aligned_strides() && aligned16(address(logits));
  const auto dtype = dtype_of(logits);
  const auto point = runtime::point_of<K>(K::dtype(dtype), form);
  const auto& config = runtime::first_fit<K>(walk.n, aligned, point);
  // Rows are split if they are too few to fill the GPU. step: columns that a program reads at a time.
  const int64_t step = int64_t(config.LANES) * config.TILES * 16 / int64_t(logits.element_size());
  const int64_t end = columns_end(config, walk.n), processors = runtime::multiprocessors(logits.device().index());
  const int64_t wanted = std::min({4 * processors / walk.rows, end / step, int64_t(flags::MOST_PARTS)});
  const int64_t part = wanted < 2 ? 0 : ((end + wanted - 1) / wanted + step - 1) / step * step;
  const int64_t parts = part ? (end + part - 1) / part : 1;
  Tensor shares;
  if (part) shares = at::empty({walk.rows, parts, flags::SHARE}, logits.options().dtype(at::kFloat));
  auto launch_on = [&](auto kernel, uint32_t variant, int64_t programs, int64_t split) {
    using L = decltype(kernel);
    typename L::Args args{};
    set_common(args, logits, index, o, columns, flags);
    args.log_probs = address(out.log_probs);
    args.entropy = address(out.entropy);
    args.stats = address(out.stats);
    args.chosen = address(out.chosen);
    args.mean_logits = address(out.mean_logits);
    args.log_squares = address(out.log_sum_sq_probs);
    args.is_top1 = address(out.is_top1);
    args.shares = address(shares);
    args.inner_rows = walk.kernel_inner_rows();
    args.logits_outer = walk.strides[0].outer;
    args.logits_inner = walk.strides[0].inner;
    if constexpr (std::is_same_v<L, K>) {
      args.part = int32_t(split);
    } else {
      args.parts = int32_t(split);
    }
    launch<L>(op, logits.device(), variant, {uint32_t(programs)}, args);
  };
  launch_on(K(), runtime::variant_index<K>(config, point), walk.rows * parts, part);
  if (part) {
    const auto all = runtime::point_of<Combine>(Combine::dtype(dtype), form);
    const auto& whole = runtime::first_fit<Combine>(walk.n, false, all);
    launch_on(Combine(), runtime::variant_index<Combine>(whole, all), walk.rows, parts);
  }
}

void backward_cuda(
    const char* op, Tensor& dlogits, const Upstream& upstream, Tensor logits, Tensor index, const Tensor& stats,
    const Tensor& chosen, const Options& o, const Columns& columns) {
  using K = kernels::log_probs_bwd;
  c10::DeviceGuard guard(logits.device());
  if (logits.numel() == 0) return;
  index = index.contiguous();
  Tensor out = dlogits;
  auto walk = rows_in_order<2>(op, "logits", {&out, &logits});
  const bool aligned = walk.aligned_strides() && aligned16(address(out), address(logits));
  const auto point = runtime::point_of<K>(K::dtype(dtype_of(logits)), o.softcap ? 1 : 0);
  const auto& config = runtime::first_fit<K>(walk.n, aligned, point);
  const auto& [to, from] = walk.strides;
  const int32_t flags = (upstream.log_probs.defined() ? flags::OF_LOG_PROBS : 0) |
      (upstream.entropy.defined() ? flags::OF_ENTROPY : 0) | (upstream.of_others ? flags::OF_OTHERS : 0);
  K::Args args{};
  set_common(args, logits, index, o, columns, flags);
  args.dlogits = address(out);
  args.stats = address(stats);
  args.chosen = address(chosen);
  args.grad = address(upstream.log_probs);
  args.grad_entropy = address(upstream.entropy);
  args.inner_rows = walk.kernel_inner_rows();
  args.dlogits_outer = to.outer, args.dlogits_inner = to.inner;
  args.logits_outer = from.outer, args.logits_inner = from.inner;
  const int64_t span = int64_t(config.BLOCK_N) * config.BLOCKS;
  const int64_t programs = walk.rows * ((columns_end(config, walk.n) + span - 1) / span);
  launch<K>(op, logits.device(), runtime::variant_index<K>(config, point), {uint32_t(programs)}, args);
  if (!out.is_same(dlogits)) dlogits.copy_(out);
}

}  // namespace liger::ops::log_probs
