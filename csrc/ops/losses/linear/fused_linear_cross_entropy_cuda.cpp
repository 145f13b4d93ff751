// fused_linear_cross_entropy on CUDA. Launches the kernels of liger_ops/kernels/losses.

#include "kernels/fused_linear_cross_entropy.h"
#include "ops/losses/linear/fused_linear_cross_entropy_loop.h"

namespace liger::ops::fused_linear_cross_entropy {
namespace {

// Up to this many tokens, comparing all pairs is expected to be faster than a sort.
constexpr int64_t kMaxCompared = 16384;

struct CudaRows {
  CudaCall call;
  Options o;

  CudaRows(const char* op, Shard part, const Tensor& target, const Tensor& ce_weight, const Options& options)
      : call(op, std::move(part), target, ce_weight, options), o(options) {}

  const Tensor& target_rows() const { return call.target; }
  void count(const Tensor& totals) const {
    Results out;
    out.totals = totals;
    sum_rows_cuda(call, o, {}, out);
  }
  void forward(const Tensor& logits, int64_t first, const RowsOut& out) const {
    forward_rows_cuda(call, o, logits, first, out);
  }
  void combine(
      const Facts& facts, const Tensor& gathered, int64_t first, const RowsOut& out, char* log_prob,
      char* entropy) const {
    combine_rows_cuda(call, o, facts, gathered, first, out, log_prob, entropy);
  }
  void backward(
      Tensor& logits, int64_t first, const char* stats, const Tensor& totals, const Upstream& upstream) const {
    // This kernel always reads incoming gradients, so pass a single 1 with stride 0.
    Upstream one = upstream;
    if (!one.values.defined()) {
      one.values = at::ones({}, call.target.options().dtype(at::kFloat));
      one.stride = 0;
    }
    backward_rows_cuda(call, o, logits, logits, first, stats, totals, one);
  }
  void forward_backward(
      Tensor& logits, int64_t first, const RowsOut& out, const Tensor& totals, const Upstream& upstream) const {
    forward_backward_rows_cuda(call, o, logits, first, out, totals, upstream);
  }
  void describe(const Tensor& logits, int64_t first, const char* stats, char* log_prob, char* entropy) const {
    describe_rows_cuda(call, o, logits, first, stats, log_prob, entropy);
  }
  void sum(const RowBuffers& rows, const Results& out, const Tensor& totals) const {
    sum_rows_cuda(call, o, rows.out, out, totals);
  }

  void take_targets(Tensor& dlogits, int64_t first, Tensor& target_grads) const {
    using K = kernels::fused_linear_cross_entropy_take_targets;
    const K::Args args{
        .dlogits = address(dlogits),
        .target = call.target_at(first),
        .taken = target_grads.const_data_ptr<float>() + first,
        .rows = int32_t(dlogits.size(0)),
        .n = int32_t(call.n),
        .stride = dlogits.stride(0),
        .target_words = call.target_words,
        .ignore_index = o.ignore_index,
        .first_class = int32_t(call.shard.first)};
    const auto choice = choose<K>(call.n, args, runtime::point_of<K>(K::dtype(dtype_of(dlogits))));
    launch(call.op, call.device, choice, {programs_for(args.rows, choice.config.BLOCK)}, args);
  }
  std::tuple<Tensor, Tensor> order_targets() const {
    using K = kernels::fused_linear_cross_entropy_order_targets;
    const int64_t rows = call.target.numel();
    if (rows > kMaxCompared) return sort_targets(call.target, call.shard, o);
    auto numbers = call.target.options().dtype(at::kInt);
    Tensor classes = at::empty({rows}, numbers), order = at::empty({rows}, numbers);
    const K::Args args{
        .target = address(call.target),
        .classes = address(classes),
        .order = address(order),
        .rows = int32_t(rows),
        .n = int32_t(call.n),
        .ignore_index = o.ignore_index,
        .first_class = int32_t(call.shard.first)};
    const auto choice = choose<K>(call.n, args, runtime::point_of<K>(call.target_words - 1));
    launch(call.op, call.device, choice, {programs_for(rows, choice.config.BLOCK)}, args);
    return {classes, order};
  }
  void add_targets(Tensor& dweight, const Tensor& x, const Tensor& target_grads, double scale) const {
    using K = kernels::fused_linear_cross_entropy_add_targets;
    auto [classes, order] = order_targets();
    const int64_t rows = call.target.numel(), columns = dweight.size(1);
    const K::Args args{
        .dweight = address(dweight),
        .x = address(x),
        .taken = address(target_grads),
        .classes = address(classes),
        .order = address(order),
        .rows = int32_t(rows),
        .columns = int32_t(columns),
        .dweight_row = dweight.stride(0),
        .dweight_column = dweight.stride(1),
        .x_row = x.stride(0),
        .scale = float(scale)};
    const auto choice = choose<K>(columns, args, runtime::point_of<K>(K::dtype(dtype_of(dweight))));
    launch(call.op, call.device, choice, {programs_for(columns, choice.config.BLOCK_N) * uint32_t(rows)}, args);
  }
};

}  // namespace

Forward Cuda::forward(const Call& call, const Tensor& totals, Wanted wanted) {
  return fused_linear_cross_entropy::forward<CudaRows>(call, totals, wanted);
}

Gradients Cuda::backward(
    const Call& call, const Tensor& grad, const Tensor& stats, const Tensor& totals, Wanted wanted) {
  return fused_linear_cross_entropy::backward<CudaRows>(call, grad, stats, totals, wanted);
}

}  // namespace liger::ops::fused_linear_cross_entropy
