// Divergences on CUDA. Launches the kernels of liger_ops/kernels/losses/divergence.py.

#include "core/cuda/launch.h"
#include "ops/losses/divergence.h"

namespace liger::ops::divergence {
namespace {

int32_t words_of(const Tensor& labels) { return !labels.defined() ? 0 : labels.scalar_type() == at::kLong ? 2 : 1; }

Tensor contiguous(const Tensor& labels) { return labels.defined() ? labels.contiguous() : labels; }

/// Sets the arguments that both kernels of rows take. like: a tensor of the rows' shape.
template <class Args, size_t N>
void pass(Args& args, const Rows<N>& rows, const Tensor& like, const Tensor& labels, const Options& o) {
  rows.pass(args);
  // The kernel for one row takes its length as `total`; n must be a multiple of 8 for aligned tensors.
  if (rows.rows == 1) args.n = 0;
  args.total = rows.n;
  args.labels = address(labels);
  args.all_rows = labels.defined() ? int32_t(labels.numel()) : 0;
  args.columns = labels.defined() ? int32_t(like.size(-1)) : 0;
  args.label_words = words_of(labels);
  args.ignore_index = o.ignore_index;
  args.kind = o.kind;
  args.parameter = float(o.parameter);
}

template <class Config, size_t N>
uint32_t programs_of(const Config& config, const Rows<N>& rows) {
  return programs_for(rows.rows, config.BLOCK_M) * programs_for(rows.n, config.BLOCK_N * config.BLOCKS);
}

}  // namespace

void Cuda::forward(
    const char* op, Tensor input, Tensor target, const Tensor& given_labels, const Options& o, Results& out) {
  using K = kernels::divergence_fwd;
  using Sum = kernels::divergence_sum;
  c10::DeviceGuard guard(input.device());
  const Tensor like = input, labels = contiguous(given_labels);
  // Of each element, or of each program.
  Tensor loss = o.reduced() ? Tensor() : out.loss;
  if (like.numel() > 0) {
    // Losses that are not stored have the input's place in the walk.
    const auto rows = walk<3>(op, {o.reduced() ? &input : &loss, &input, &target}, labels, kinds::MOST_TILE);
    const auto& [to, x, t] = rows.strides;
    K::Args args{
        .loss = address(loss),
        .input = address(input),
        .target = address(target),
        .loss_strides = o.reduced() ? RowStrides() : to,
        .input_strides = x,
        .target_strides = t};
    pass(args, rows, like, labels, o);
    const auto point = runtime::point_of<K>(K::dtype(dtype_of(like)), o.reduced() ? 0 : 1);
    const auto choice = choose<K>(rows.n, args, point, rows.rows);
    const uint32_t programs = programs_of(choice.config, rows);
    if (o.reduced()) loss = at::empty({programs}, like.options().dtype(at::kFloat));
    args.loss = address(loss);
    launch(op, like.device(), choice, {programs}, args);
  }
  if (!o.reduced()) {
    if (!loss.is_same(out.loss)) out.loss.copy_(loss);
    return;
  }
  const bool labelled = o.divides() && labels.defined();
  const Sum::Args args{
      .loss = address(out.loss),
      .divisor = address(out.divisor),
      .partial = address(loss),
      .labels = address(labels),
      .programs = loss.defined() ? int32_t(loss.numel()) : 0,
      .rows = labelled ? int32_t(labels.numel()) : 0,
      .fixed = o.divisor(like, labelled),
      .label_words = words_of(labels),
      .ignore_index = o.ignore_index,
      .flags = (o.divides() ? kinds::SAVES_DIVISOR : 0) | (o.divides() && o.divide ? kinds::DIVIDES : 0)};
  const auto choice = choose<Sum>(1, args, runtime::point_of<Sum>(labelled), std::max(args.programs, args.rows));
  launch(op, like.device(), choice, {1}, args);
}

void Cuda::backward(
    const char* op, Tensor& dinput, const Tensor& grad, const Tensor& divisor, Tensor input, Tensor target,
    const Tensor& given_labels, const Options& o) {
  using K = kernels::divergence_bwd;
  c10::DeviceGuard guard(target.device());
  const Upstream upstream(op, grad, o.sizes_of(target), "target", target);
  if (target.numel() == 0) return;
  const Tensor like = target, labels = contiguous(given_labels);
  // Not read if the gradient does not depend on it.
  if (!input.defined()) input = target;
  Tensor out = dinput, g = upstream.values;
  // A single gradient has the target's place in the walk.
  const bool single = upstream.is_one();
  const auto rows = walk<4>(op, {&out, &input, &target, single ? &target : &g}, labels, kinds::MOST_TILE);
  const auto& [to, x, t, from] = rows.strides;
  K::Args args{
      .dinput = address(out),
      .grad = single ? nullptr : address(g),
      .divisor = address(divisor),
      .input = address(input),
      .target = address(target),
      .dinput_strides = to,
      .grad_strides = single ? RowStrides() : from,
      .input_strides = x,
      .target_strides = t,
      .has_divisor = divisor.defined()};
  pass(args, rows, like, labels, o);
  const auto point = runtime::point_of<K>(K::dtype(dtype_of(like)), single ? 0 : 1);
  const auto choice = choose<K>(rows.n, args, point, rows.rows);
  // Set after the choice, because a single gradient may lie anywhere.
  args.grad = address(g);
  launch(op, like.device(), choice, {programs_of(choice.config, rows)}, args);
  if (!out.is_same(dinput)) dinput.copy_(out);
}

}  // namespace liger::ops::divergence
