// Cross entropy of rows on CUDA. Launches the kernels of cross_entropy.py and cross_entropy_results.py in
// liger_ops/kernels/losses.

#include "ops/losses/cross_entropy.h"

namespace liger::ops::cross_entropy {

void sum_rows_cuda(
    const CudaCall& call, const Options& o, const RowsOut& rows_of, const Results& out, const Tensor& divisors) {
  using K = kernels::cross_entropy_sum;
  const int64_t rows = call.target.numel();
  const auto point = runtime::point_of<K>(call.target_words - 1);
  const int64_t blocks = programs_for(rows, choose<K>(call.n, {}, point, rows).config.BLOCK);
  // For a few blocks, one program takes less time than a second launch.
  const int64_t partial_sums = blocks <= 8 ? 1 : std::min<int64_t>(1024, blocks);
  auto floats = call.target.options().dtype(at::kFloat);
  Tensor partial = partial_sums > 1 ? at::empty({partial_sums, 5}, floats) : Tensor();
  const bool counts = !divisors.defined() && (o.mean() || out.totals.defined());
  int32_t flags = (call.flags & (flags::HAS_WEIGHT | flags::MEAN)) | (rows_of.z_loss ? flags::SAVE_Z_LOSS : 0) |
      (out.accuracy.defined() ? flags::SAVE_Z_LOSS | flags::SAVE_METRICS : 0) |
      (out.loss.defined() ? 0 : flags::COUNT_ONLY) | (counts ? 0 : flags::HAS_TOTALS) |
      (counts && out.totals.defined() ? flags::SAVE_TOTALS : 0);
  K::Args args{
      .loss_out = address(out.loss),
      .z_loss_out = address(out.z_loss),
      .accuracy_out = address(out.accuracy),
      .totals = address(divisors.defined() ? divisors : out.totals),
      .partial = address(partial),
      .loss = rows_of.loss,
      .z_loss = rows_of.z_loss,
      .accuracy = rows_of.accuracy,
      .target = address(call.target),
      .weight = address(call.weight),
      .n = int32_t(call.shard.classes),
      .ignore_index = o.ignore_index};
  auto launch_on = [&](int64_t rows_read, int64_t programs, int32_t more) {
    args.rows = int32_t(rows_read);
    args.flags = flags | more;
    launch(call.op, call.device, choose<K>(call.n, args, point, rows_read), {uint32_t(programs)}, args);
  };
  launch_on(rows, partial_sums, partial_sums > 1 ? flags::TO_PARTIAL : 0);
  if (partial_sums > 1) launch_on(partial_sums, 1, flags::FROM_PARTIAL);
}

template <class Config>
runtime::Grid grid_of(const Config& config, int64_t rows, int64_t columns) {
  return {uint32_t(rows) * programs_for(columns, config.BLOCK_N * config.BLOCKS)};
}

/// Launches a kernel whose rows are split into parts, which exchange sums in memory if they `meet`.
template <class K>
void launch_parts(
    const CudaCall& call, const Choice<K>& choice, typename K::Args& args, int64_t rows, int64_t parts, bool meet) {
  Tensor partials, arrived;
  if (meet) {
    partials = at::empty({rows, parts, 4}, call.target.options().dtype(at::kFloat));
    arrived = at::zeros({1 + rows}, call.target.options().dtype(at::kInt));
  }
  args.shares = address(partials);
  args.arrived = address(arrived);
  launch(call.op, call.device, choice, {uint32_t(rows * parts)}, args);
}

void forward_rows_cuda(const CudaCall& call, const Options& o, Tensor logits, int64_t first, const RowsOut& out) {
  using K = kernels::cross_entropy_fwd;
  const auto walk = rows_in_order<1>(call.op, "logits", {&logits});
  K::Args args{
      .facts = out.facts ? out.facts->at(0) : nullptr,
      .logits = address(logits),
      .weight = call.local_weight(),
      .weight_sum = call.local_weight_sum(),
      .logits_strides = walk.strides[0]};
  walk.pass(args);
  call.pass(args, o, first, out);
  auto choose_for = [&](int form) {
    return choose<K>(walk.n, args, runtime::point_of<K>(K::dtype(dtype_of(logits)), form));
  };
  // The config does not depend on whether rows are split.
  const auto& config = choose_for(call.extras ? 2 : 0).config;
  // Rows are split among programs if they are too few to fill the GPU. Calls with extras are not split, because no such
  // variants are compiled.
  // step: 16-bit logits that a program reads at a time. Below two steps, synchronising costs more than it saves.
  const int64_t step = int64_t(config.LANES) * config.TILES * 8;
  const int64_t columns = columns_end(config, walk.n, flags::MOST_SKEW);
  const int64_t processors = call.extras ? 0 : runtime::multiprocessors(call.device.index());
  const int64_t wanted = std::min(
      {2 * processors / std::max<int64_t>(walk.rows, 1), columns / step, int64_t(flags::MOST_PARTS), processors});
  const int64_t part = wanted < 2 ? 0 : ((columns + wanted - 1) / wanted + step - 1) / step * step;
  const int64_t parts = part ? (columns + part - 1) / part : 1;
  args.part = int32_t(part);
  launch_parts(call, choose_for(call.extras ? 2 : parts > 1), args, walk.rows, parts, parts > 1);
}

void backward_rows_cuda(
    const CudaCall& call, const Options& o, Tensor& dlogits, Tensor logits, int64_t first, const void* stats,
    const Tensor& totals, const Upstream& upstream) {
  using K = kernels::cross_entropy_bwd;
  Tensor out = dlogits;
  const auto walk = rows_in_order<2>(call.op, "logits", {&out, &logits});
  const auto& [to, from] = walk.strides;
  K::Args args{
      .dlogits = address(out),
      .logits = address(logits),
      .stats = stats,
      .grad = address(upstream.values),
      .totals = address(totals),
      .weight = call.local_weight(),
      .weight_sum = address(call.weight_sum),
      .dlogits_strides = to,
      .logits_strides = from,
      .grad_stride = upstream.stride};
  walk.pass(args);
  call.pass(args, o, first);
  const auto choice = choose<K>(walk.n, args, runtime::point_of<K>(K::dtype(dtype_of(logits)), call.extras));
  const int64_t columns = columns_end(choice.config, walk.n, flags::MOST_SKEW);
  launch(call.op, call.device, choice, grid_of(choice.config, walk.rows, columns), args);
  if (!out.is_same(dlogits)) dlogits.copy_(out);
}

void forward_backward_rows_cuda(
    const CudaCall& call, const Options& o, Tensor& logits, int64_t first, const RowsOut& out, const Tensor& totals,
    const Upstream& upstream) {
  using K = kernels::cross_entropy_fwd_bwd;
  Tensor x = logits;
  const auto walk = rows_in_order<1>(call.op, "logits", {&x});
  K::Args args{
      .dlogits = address(x),
      .logits = address(x),
      .grad = address(upstream.values),
      .totals = address(totals),
      .weight = address(call.weight),
      .weight_sum = address(call.weight_sum),
      .dlogits_strides = walk.strides[0],
      .logits_strides = walk.strides[0],
      .grad_stride = upstream.stride};
  walk.pass(args);
  call.pass(args, o, first, out);
  if (upstream.values.defined()) args.flags |= flags::HAS_GRAD;
  // Configs count in 16-bit logits.
  const int64_t counted = x.element_size() / 2;
  auto parts_of = [&](const K::Config& config) -> int64_t {
    return config.SHARE ? programs_for(columns_end(config, walk.n, flags::MOST_SKEW), config.SHARE / counted) : 1;
  };
  const auto point = runtime::point_of<K>(K::dtype(dtype_of(x)), call.extras);
  const auto fitting = choose<K>(walk.n * counted, args, point);
  const int64_t most = std::min<int64_t>(flags::MOST_PARTS, runtime::multiprocessors(call.device.index()));
  // The config for rows of any width that are not aligned, as those of one column, does not split them.
  constexpr int64_t kAnyWidth = std::numeric_limits<int64_t>::max();
  const auto choice = parts_of(fitting.config) <= most ? fitting : choose<K>(kAnyWidth, {.n = 1}, point);
  launch_parts(call, choice, args, walk.rows, parts_of(choice.config), choice.config.SHARE > 0);
  if (!x.is_same(logits)) logits.copy_(x);
}

void describe_rows_cuda(
    const CudaCall& call, const Options& o, const Tensor& logits, int64_t first, const void* stats,
    const void* log_prob, const void* entropy) {
  using K = kernels::cross_entropy_describe;
  const int64_t rows = logits.size(0);
  K::Args args{
      .log_prob = log_prob,
      .entropy = entropy,
      .logits = address(logits),
      .stats = stats,
      .rows = int32_t(rows),
      .n = int32_t(call.n),
      .stride = logits.stride(0)};
  call.pass(args, o, first);
  if (!log_prob) args.flags |= flags::LOCAL;
  const auto choice = choose<K>(call.n, args, runtime::point_of<K>(K::dtype(dtype_of(logits))));
  launch(call.op, call.device, choice, {uint32_t(rows)}, args);
}

void combine_rows_cuda(
    const CudaCall& call, const Options& o, const Facts& facts, const Tensor& gathered, int64_t first,
    const RowsOut& out, const void* log_prob, const void* entropy) {
  using K = kernels::cross_entropy_combine;
  const int64_t rows = gathered.size(2);
  K::Args args{
      .log_prob = log_prob,
      .entropy = entropy,
      .gathered = address(gathered),
      .weight = address(call.weight),
      .rank_weights = address(call.rank_weights),
      .rows = int32_t(rows),
      .ranks = int32_t(gathered.size(0))};
  call.pass(args, o, first, out);
  if (facts.entropy) args.flags |= flags::SAVE_ENTROPY;
  const auto choice = choose<K>(call.n, args, runtime::point_of<K>(call.target_words - 1));
  launch(call.op, call.device, choice, {programs_for(rows, choice.config.BLOCK)}, args);
}

void Cuda::totals(const Tensor& totals, const Tensor& target, const Tensor& weight, const Options& o, int64_t classes) {
  c10::DeviceGuard guard(target.device());
  sum_rows_cuda(CudaCall("cross_entropy", Shard(classes), target, weight, o), o, {}, {.totals = totals});
}

void Cuda::forward(
    const char* op, Tensor logits, const Tensor& target, const Tensor& weight, const Tensor& totals, const Options& o,
    const Results& out) {
  c10::DeviceGuard guard(logits.device());
  const Wanted wanted{out.predicted.defined()};
  RowBuffers rows(out, target.numel(), o, wanted);
  CudaCall call(op, Shard(op, o.vocabulary, logits.size(-1), "logits"), target, weight, o);
  if (target.numel() > 0 && !call.shard.is_split()) forward_rows_cuda(call, o, logits, 0, rows.out);
  if (target.numel() > 0 && call.shard.is_split()) {
    Facts facts(o, wanted.metrics, false);
    facts.allocate(target.numel(), out.loss.options());
    const RowsOut local{.facts = &facts};
    call.n > 0 ? forward_rows_cuda(call, o, logits, 0, local) : facts.fill_empty();
    Tensor gathered = call.shard.group->all_gather(facts.values).wait();
    combine_rows_cuda(call, o, facts, gathered, 0, rows.out, nullptr, nullptr);
  }
  if (totals.defined() && out.totals.defined()) out.totals.copy_(totals);
  if (o.reduced()) sum_rows_cuda(call, o, rows.out, out, totals);
}

void Cuda::backward(
    const char* op, Tensor& dlogits, Tensor logits, const Tensor& target, const Tensor& weight, const Tensor& stats,
    const Tensor& totals, const Tensor& grad, const Options& o) {
  c10::DeviceGuard guard(logits.device());
  const Upstream upstream = upstream_of(op, grad, logits, o.reduced());
  if (logits.numel() == 0) return;
  CudaCall call(op, Shard(op, o.vocabulary, logits.size(-1), "logits"), target, weight, o);
  backward_rows_cuda(call, o, dlogits, logits, 0, address(stats), totals, upstream);
}

void Cuda::forward_backward(
    const char* op, Tensor& logits, const Tensor& target, const Tensor& weight, const Options& o, const Results& out) {
  c10::DeviceGuard guard(logits.device());
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
}

void Cuda::scale(const char* op, Tensor& dlogits, const Tensor& grad) {
  using K = kernels::cross_entropy_scale;
  c10::DeviceGuard guard(dlogits.device());
  const Upstream upstream = upstream_of(op, grad, dlogits, grad.dim() == 0);
  if (dlogits.numel() == 0) return;
  Tensor x = dlogits;
  const auto walk = rows_in_order<1>(op, "logits", {&x});
  const K::Args args{
      .dlogits = address(x),
      .grad = address(upstream.values),
      .n = int32_t(walk.n),
      .inner_rows = walk.kernel_inner_rows(),
      .dlogits_strides = walk.strides[0],
      .grad_stride = upstream.stride};
  const auto choice = choose<K>(walk.n, args, runtime::point_of<K>(K::dtype(dtype_of(x))));
  launch(op, dlogits.device(), choice, grid_of(choice.config, walk.rows, walk.n), args);
  if (!x.is_same(dlogits)) dlogits.copy_(x);
}

}  // namespace liger::ops::cross_entropy
