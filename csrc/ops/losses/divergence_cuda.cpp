// Divergences on CUDA. Launches the kernels of liger_ops/kernels/losses/divergence.py.

#include "core/cuda.h"
#include "ops/losses/divergence.h"

namespace liger::ops::divergence {
namespace {

/// What all launches on one set of tensors share: how labels count, and the launch itself.
template <class K, size_t N>
struct Call {
  const char* op;
  const Tensor& like;
  Tensor labels;
  Rows<N> rows;
  uint32_t variant = 0;
  runtime::Grid grid;

  Call(
      const char* name, const Tensor& t, const Tensor& given_labels, const std::array<Tensor*, N>& tensors,
      bool reduced)
      : op(name), like(t), labels(given_labels) {
    if (labels.defined()) labels = labels.contiguous();
    rows = walk<N>(op, tensors, labels, kinds::MOST_TILE);
    bool aligned = rows.rows == 1 || rows.aligned_strides();
    for (Tensor* each : tensors) aligned = aligned && aligned16(address(*each));
    const auto point = runtime::point_of<K>(K::dtype(dtype_of(like)), reduced ? 0 : 1);
    const auto& config = runtime::first_fit<K>(rows.n, aligned, point, rows.rows);
    const int64_t span = int64_t(config.BLOCK_N) * config.BLOCKS;
    const int64_t blocks = (rows.rows + config.BLOCK_M - 1) / config.BLOCK_M;
    grid = {uint32_t(blocks * ((rows.n + span - 1) / span))};
    variant = runtime::variant_index<K>(config, point);
  }

  int32_t label_words() const { return !labels.defined() ? 0 : labels.scalar_type() == at::kLong ? 2 : 1; }

  void start(typename K::Args args, const Options& o) {
    args.labels = address(labels);
    args.rows = int32_t(rows.rows);
    // The kernel for one row takes its length as `total`; n must be a multiple of 8 for aligned tensors.
    args.n = rows.rows == 1 ? 0 : rows.n;
    args.total = rows.n;
    args.inner_rows = rows.kernel_inner_rows();
    args.all_rows = labels.defined() ? int32_t(labels.numel()) : 0;
    args.columns = labels.defined() ? int32_t(like.size(-1)) : 0;
    args.label_words = label_words();
    args.ignore_index = o.ignore_index;
    args.kind = o.kind;
    args.parameter = float(o.parameter);
    launch<K>(op, like.device(), variant, grid, args);
  }
};

}  // namespace

void forward_cuda(const char* op, Tensor input, Tensor target, const Tensor& labels, const Options& o, Results& out) {
  using K = kernels::divergence_fwd;
  using Sum = kernels::divergence_sum;
  c10::DeviceGuard guard(input.device());
  const Tensor like = input;
  typename K::Args args{};
  if (!o.reduced()) {
    if (like.numel() == 0) return;
    Tensor loss = out.loss;
    Call<K, 3> call(op, like, labels, {&loss, &input, &target}, false);
    const auto& [to, x, t] = call.rows.strides;
    args.loss = address(loss);
    args.input = address(input);
    args.target = address(target);
    args.loss_outer = to.outer, args.loss_inner = to.inner;
    args.input_outer = x.outer, args.input_inner = x.inner;
    args.target_outer = t.outer, args.target_inner = t.inner;
    call.start(args, o);
    if (!loss.is_same(out.loss)) out.loss.copy_(loss);
    return;
  }
  Tensor partial;
  Tensor counted = labels.defined() ? labels.contiguous() : labels;
  if (like.numel() > 0) {
    Call<K, 2> call(op, like, counted, {&input, &target}, true);
    const auto& [x, t] = call.rows.strides;
    partial = at::empty({int64_t(call.grid.x)}, like.options().dtype(at::kFloat));
    args.loss = address(partial);
    args.input = address(input);
    args.target = address(target);
    args.input_outer = x.outer, args.input_inner = x.inner;
    args.target_outer = t.outer, args.target_inner = t.inner;
    call.start(args, o);
  }
  const bool labelled = o.divides() && counted.defined();
  const int64_t programs = partial.defined() ? partial.numel() : 0;
  Sum::Args sum{
      address(out.loss),
      address(out.divisor),
      address(partial),
      address(counted),
      int32_t(programs),
      labelled ? int32_t(counted.numel()) : 0,
      o.divisor(like, labelled),
      labelled && counted.scalar_type() == at::kLong ? 2 : 1,
      o.ignore_index,
      (o.divides() ? kinds::SAVES_DIVISOR : 0) | (o.divides() && o.divide ? kinds::DIVIDES : 0)};
  const auto point = runtime::point_of<Sum>(labelled);
  const auto& config = runtime::first_fit<Sum>(1, false, point, std::max<int64_t>(programs, sum.rows));
  launch<Sum>(op, like.device(), runtime::variant_index<Sum>(config, point), {1}, sum);
}

void backward_cuda(
    const char* op, Tensor& dinput, const Tensor& grad, const Tensor& divisor, Tensor input, Tensor target,
    const Tensor& labels, const Options& o) {
  using K = kernels::divergence_bwd;
  c10::DeviceGuard guard(target.device());
  Upstream upstream(op, grad, target, o);
  if (target.numel() == 0) return;
  const Tensor like = target;
  // Not read if the gradient does not depend on it.
  if (!input.defined()) input = target;
  Tensor out = dinput, g = upstream.values;
  typename K::Args args{};
  auto start = [&](auto& call, const RowStrides& from) {
    const auto& strides = call.rows.strides;
    args.dinput = address(out);
    args.grad = address(g);
    args.divisor = address(divisor);
    args.input = address(input);
    args.target = address(target);
    args.dinput_outer = strides[0].outer, args.dinput_inner = strides[0].inner;
    args.grad_outer = from.outer, args.grad_inner = from.inner;
    args.input_outer = strides[1].outer, args.input_inner = strides[1].inner;
    args.target_outer = strides[2].outer, args.target_inner = strides[2].inner;
    args.has_divisor = divisor.defined();
    call.start(args, o);
  };
  if (upstream.single) {
    Call<K, 3> call(op, like, labels, {&out, &input, &target}, true);
    start(call, {});
  } else {
    Call<K, 4> call(op, like, labels, {&out, &input, &target, &g}, false);
    start(call, call.rows.strides[3]);
  }
  if (!out.is_same(dinput)) dinput.copy_(out);
}

}  // namespace liger::ops::divergence
