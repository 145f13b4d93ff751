// Cross entropy of rows on CUDA. Launches the kernels of cross_entropy.py and cross_entropy_results.py in
// liger_ops/kernels/losses.

#include "ops/losses/cross_entropy.h"

namespace liger::ops::cross_entropy {

template <class Config>
runtime::Grid span_grid(const Config& config, int64_t rows, int64_t columns) {
  int64_t span = int64_t(config.BLOCK_N) * config.BLOCKS;
  return {uint32_t(rows * ((columns + span - 1) / span))};
}

void sum_rows_cuda(
    const CudaCall& call, const Options& o, const RowsOut& rows_of, const Results& out, const Tensor& divisors) {
  using K = kernels::cross_entropy_sum;
  const int64_t rows = call.target.numel();
  const auto point = runtime::point_of<K>(call.target_words - 1);
  auto config_for = [&](int64_t count) -> const K::Config& {
    return runtime::first_fit<K>(call.n, false, point, count);
  };
  const int64_t block = config_for(rows).BLOCK, blocks = (rows + block - 1) / block;
  // For a few blocks, one program takes less time than a second launch.
  const int64_t partial_sums = blocks <= 8 ? 1 : std::min<int64_t>(1024, blocks);
  auto floats = call.target.options().dtype(at::kFloat);
  Tensor partial = partial_sums > 1 ? at::empty({partial_sums, 5}, floats) : Tensor();
  const bool counts = !divisors.defined() && (o.mean() || out.totals.defined());
  int32_t flags = (call.flags & (flags::HAS_WEIGHT | flags::MEAN)) | (rows_of.z_loss ? flags::SAVE_Z_LOSS : 0) |
      (out.accuracy.defined() ? flags::SAVE_Z_LOSS | flags::SAVE_METRICS : 0) |
      (out.loss.defined() ? 0 : flags::COUNT_ONLY) |
      (!counts                    ? flags::HAS_TOTALS
           : out.totals.defined() ? flags::SAVE_TOTALS
                                  : 0);
  K::Args args{address(out.loss),     address(out.z_loss),
               address(out.accuracy), address(divisors.defined() ? divisors : out.totals),
               address(partial),      rows_of.loss,
               rows_of.z_loss,        rows_of.accuracy,
               address(call.target),  address(call.weight),
               int32_t(rows),         int32_t(call.shard.classes),
               o.ignore_index,        flags};
  auto launch_on = [&](int64_t rows_read, int64_t programs, int32_t more) {
    args.rows = int32_t(rows_read);
    args.flags = flags | more;
    auto variant = runtime::variant_index<K>(config_for(rows_read), point);
    launch<K>(call.op, call.device, variant, {uint32_t(programs)}, args);
  };
  if (partial_sums > 1) {
    launch_on(rows, partial_sums, flags::TO_PARTIAL);
    launch_on(partial_sums, 1, flags::FROM_PARTIAL);
  } else {
    launch_on(rows, 1, 0);
  }
}

/// Upper bound of the end of a row of n columns, whatever its skew.
template <class Config>
int64_t columns_end(const Config& config, int64_t n) {
  return n + (config.SKEWED ? flags::MOST_SKEW : 0);
}

void forward_rows_cuda(const CudaCall& call, const Options& o, Tensor logits, int64_t first, const RowsOut& out) {
  using K = kernels::cross_entropy_fwd;
  auto walk = walk_logical<1>(call.op, call.rows_of(logits), {&logits});
  bool aligned = walk.aligned_strides() && aligned16(address(logits), call.local_weight());
  // The config does not depend on whether rows are split.
  auto point_of = [&](int form) { return runtime::point_of<K>(K::dtype(dtype_of(logits)), form); };
  const auto& config = runtime::first_fit<K>(walk.n, aligned, point_of(call.extras ? 2 : 0));
  const auto& from = walk.strides[0];
  // Rows are split among programs if they are too few to fill the GPU. Calls with extras are not split, because no such
  // variants are compiled.
  // step: 16-bit logits that a program reads at a time. Below two steps, synchronising costs more than it saves.
  const int64_t step = int64_t(config.LANES) * config.TILES * 8, columns = columns_end(config, walk.n);
  const int64_t processors = call.extras ? 0 : runtime::multiprocessors(call.device.index());
  const int64_t wanted = std::min(
      {2 * processors / std::max<int64_t>(walk.rows, 1), columns / step, int64_t(flags::MOST_PARTS), processors});
  const int64_t part = wanted < 2 ? 0 : ((columns + wanted - 1) / wanted + step - 1) / step * step;
  const int64_t parts = part ? (columns + part - 1) / part : 1;
  Tensor partials, arrived;
  if (parts > 1) {
    partials = at::empty({walk.rows, parts, 4}, call.target.options().dtype(at::kFloat));
    arrived = at::zeros({1 + walk.rows}, call.target.options().dtype(at::kInt));
  }
  K::Args args{
      out.loss,
      out.z_loss,
      out.accuracy,
      out.predicted,
      out.stats,
      out.facts ? out.facts->at(0) : nullptr,
      address(logits),
      call.target_at(first),
      call.local_weight(),
      call.local_weight_sum(),
      address(partials),
      address(arrived),
      int32_t(walk.rows),
      int32_t(walk.n),
      int32_t(part),
      walk.kernel_inner_rows(),
      from.outer,
      from.inner,
      call.target_words,
      o.ignore_index,
      int32_t(call.shard.first),
      float(o.label_smoothing),
      float(o.lse_square_scale),
      float(o.softcap.value_or(1)),
      call.flags_for(out, o)};
  const auto point = point_of(call.extras ? 2 : parts > 1);
  launch<K>(call.op, call.device, runtime::variant_index<K>(config, point), {uint32_t(walk.rows * parts)}, args);
}

void backward_rows_cuda(
    const CudaCall& call, const Options& o, Tensor& dlogits, Tensor logits, int64_t first, const void* stats,
    const Tensor& totals, const Upstream& upstream) {
  using K = kernels::cross_entropy_bwd;
  Tensor out = dlogits;
  auto walk = walk_logical<2>(call.op, call.rows_of(logits), {&out, &logits});
  bool aligned = walk.aligned_strides() && aligned16(address(out), address(logits), call.local_weight());
  const auto& config = runtime::first_fit<K>(walk.n, aligned);
  const auto& [to, from] = walk.strides;
  K::Args args{
      address(out),
      address(logits),
      call.target_at(first),
      stats,
      address(upstream.values),
      address(totals),
      call.local_weight(),
      address(call.weight_sum),
      int32_t(walk.rows),
      int32_t(walk.n),
      walk.kernel_inner_rows(),
      to.outer,
      to.inner,
      from.outer,
      from.inner,
      call.target_words,
      upstream.stride,
      o.ignore_index,
      int32_t(call.shard.first),
      int32_t(call.shard.classes),
      float(o.label_smoothing),
      float(o.lse_square_scale),
      float(o.softcap.value_or(1)),
      call.flags};
  auto variant = runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(dtype_of(logits)), call.extras));
  launch<K>(call.op, call.device, variant, span_grid(config, walk.rows, columns_end(config, walk.n)), args);
  if (!out.is_same(dlogits)) dlogits.copy_(out);
}

void forward_backward_rows_cuda(
    const CudaCall& call, const Options& o, Tensor& logits, int64_t first, const RowsOut& out, const Tensor& totals,
    const Upstream& upstream) {
  using K = kernels::cross_entropy_fwd_bwd;
  Tensor x = logits;
  auto walk = walk_logical<1>(call.op, call.rows_of(logits), {&x});
  // The config for any width does not split rows.
  constexpr int64_t kAnyWidth = std::numeric_limits<int64_t>::max();
  const bool aligned = walk.aligned_strides() && aligned16(address(x), address(call.weight));
  // Configs count in 16-bit logits.
  const int64_t counted = x.element_size() / 2;
  const auto point = runtime::point_of<K>(K::dtype(dtype_of(x)), call.extras);
  const auto* config = &runtime::first_fit<K>(walk.n * counted, aligned, point);
  int64_t part = config->SHARE / counted;
  int64_t parts = part ? (columns_end(*config, walk.n) + part - 1) / part : 1;
  if (parts > std::min<int64_t>(flags::MOST_PARTS, runtime::multiprocessors(call.device.index()))) {
    config = &runtime::first_fit<K>(kAnyWidth, false, point);
    part = 0;
    parts = 1;
  }
  Tensor partials, arrived;
  if (part) {
    partials = at::empty({walk.rows, parts, 4}, call.target.options().dtype(at::kFloat));
    arrived = at::zeros({1 + walk.rows}, call.target.options().dtype(at::kInt));
  }
  const auto& at = walk.strides[0];
  K::Args args{
      out.loss,
      out.z_loss,
      out.accuracy,
      out.predicted,
      address(x),
      address(x),
      call.target_at(first),
      address(upstream.values),
      address(totals),
      address(call.weight),
      address(call.weight_sum),
      address(partials),
      address(arrived),
      int32_t(walk.rows),
      int32_t(walk.n),
      walk.kernel_inner_rows(),
      at.outer,
      at.inner,
      at.outer,
      at.inner,
      call.target_words,
      upstream.stride,
      o.ignore_index,
      float(o.label_smoothing),
      float(o.lse_square_scale),
      float(o.softcap.value_or(1)),
      call.flags_for(out, o) | (upstream.values.defined() ? flags::HAS_GRAD : 0)};
  auto variant = runtime::variant_index<K>(*config, point);
  launch<K>(call.op, call.device, variant, {uint32_t(walk.rows * parts)}, args);
  if (!x.is_same(logits)) logits.copy_(x);
}

void describe_rows_cuda(
    const CudaCall& call, const Options& o, const Tensor& logits, int64_t first, const void* stats,
    const void* log_prob, const void* entropy) {
  using K = kernels::cross_entropy_describe;
  const int64_t rows = logits.size(0), stride = logits.stride(0);
  bool aligned = ((stride | call.n) & 7) == 0 && aligned16(address(logits));
  const auto& config = runtime::first_fit<K>(call.n, aligned);
  K::Args args{
      log_prob,
      entropy,
      address(logits),
      call.target_at(first),
      stats,
      int32_t(rows),
      int32_t(call.n),
      stride,
      call.target_words,
      o.ignore_index,
      float(o.softcap.value_or(1)),
      call.flags | (log_prob ? 0 : flags::LOCAL)};
  auto variant = runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(dtype_of(logits))));
  launch<K>(call.op, call.device, variant, {uint32_t(rows)}, args);
}

void combine_rows_cuda(
    const CudaCall& call, const Options& o, const Facts& facts, const Tensor& gathered, int64_t first,
    const RowsOut& out, const void* log_prob, const void* entropy) {
  using K = kernels::cross_entropy_combine;
  const int64_t rows = gathered.size(2);
  const auto point = runtime::point_of<K>(call.target_words - 1);
  const auto& config = runtime::first_fit<K>(call.n, false, point);
  K::Args args{
      out.loss,
      out.z_loss,
      out.accuracy,
      out.predicted,
      out.stats,
      log_prob,
      entropy,
      address(gathered),
      call.target_at(first),
      address(call.weight),
      address(call.rank_weights),
      int32_t(rows),
      int32_t(gathered.size(0)),
      int32_t(call.shard.classes),
      o.ignore_index,
      float(o.label_smoothing),
      float(o.lse_square_scale),
      call.flags_for(out, o) | (facts.entropy ? flags::SAVE_ENTROPY : 0)};
  const auto blocks = uint32_t((rows + config.BLOCK - 1) / config.BLOCK);
  launch<K>(call.op, call.device, runtime::variant_index<K>(config, point), {blocks}, args);
}

Tensor totals_cuda(
    const Tensor& target, const Tensor& weight, const Options& o, int64_t classes, at::ScalarType dtype) {
  c10::DeviceGuard guard(target.device());
  Results out;
  out.totals = at::empty({2}, target.options().dtype(dtype));
  sum_rows_cuda(CudaCall("cross_entropy", Shard(classes), target, weight, o), o, {}, out);
  return out.totals;
}

Results forward_cuda(
    const char* op, Tensor logits, const Tensor& target, const Tensor& weight, const Tensor& totals, const Options& o,
    Wanted wanted) {
  c10::DeviceGuard guard(logits.device());
  Results out = empty_results(logits, target, o, wanted);
  RowBuffers rows(out, target.numel(), o, wanted);
  CudaCall call(op, Shard(op, o.vocabulary, logits.size(-1), "logits"), target, weight, o);
  if (target.numel() > 0 && !call.shard.is_split()) forward_rows_cuda(call, o, logits, 0, rows.out);
  if (target.numel() > 0 && call.shard.is_split()) {
    Facts facts(o, wanted.metrics, false);
    facts.allocate(target.numel(), out.loss.options());
    RowsOut local;
    local.facts = &facts;
    call.n > 0 ? forward_rows_cuda(call, o, logits, 0, local) : facts.fill_empty();
    Tensor gathered = call.shard.group->all_gather(facts.values).wait();
    combine_rows_cuda(call, o, facts, gathered, 0, rows.out, nullptr, nullptr);
  }
  if (totals.defined() && out.totals.defined()) out.totals.copy_(totals);
  if (o.reduced()) sum_rows_cuda(call, o, rows.out, out, totals);
  return out;
}

void backward_cuda(
    const char* op, Tensor& dlogits, Tensor logits, const Tensor& target, const Tensor& weight, const Tensor& stats,
    const Tensor& totals, const Tensor& grad, const Options& o) {
  c10::DeviceGuard guard(logits.device());
  Upstream upstream(op, grad, logits, o.reduced());
  if (logits.numel() == 0) return;
  CudaCall call(op, Shard(op, o.vocabulary, logits.size(-1), "logits"), target, weight, o);
  backward_rows_cuda(call, o, dlogits, logits, 0, address(stats), totals, upstream);
}

Results forward_backward_cuda(
    const char* op, Tensor& logits, const Tensor& target, const Tensor& weight, const Options& o) {
  c10::DeviceGuard guard(logits.device());
  Results out = empty_results(logits, target, o, {});
  RowBuffers rows(out, target.numel(), o, {});
  CudaCall call(op, Shard(logits.size(-1)), target, weight, o);
  Results counted;
  if (target.numel() > 0) {
    if (o.mean()) {
      // The gradient needs the divisors before any row is read.
      counted.totals = at::empty({2}, out.loss.options());
      sum_rows_cuda(call, o, {}, counted);
    }
    forward_backward_rows_cuda(call, o, logits, 0, rows.out, counted.totals, Upstream(Tensor()));
  }
  if (o.reduced()) sum_rows_cuda(call, o, rows.out, out, counted.totals);
  return out;
}

void scale_cuda(const char* op, Tensor& dlogits, const Tensor& grad) {
  using K = kernels::cross_entropy_scale;
  c10::DeviceGuard guard(dlogits.device());
  Upstream upstream(op, grad, dlogits, grad.dim() == 0);
  if (dlogits.numel() == 0) return;
  Tensor x = dlogits;
  auto walk = walk_logical<1>(op, dlogits.numel() / dlogits.size(-1), {&x});
  bool aligned = walk.aligned_strides() && aligned16(address(x));
  const auto& config = runtime::first_fit<K>(walk.n, aligned);
  const auto& at = walk.strides[0];
  K::Args args{address(x), address(upstream.values), int32_t(walk.n), walk.kernel_inner_rows(), at.outer,
               at.inner,   upstream.stride};
  auto variant = runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(dtype_of(x))));
  launch<K>(op, dlogits.device(), variant, span_grid(config, walk.rows, walk.n), args);
  if (!x.is_same(dlogits)) dlogits.copy_(x);
}

}  // namespace liger::ops::cross_entropy
