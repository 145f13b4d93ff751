// fused_linear_cross_entropy on CUDA. Launches the kernels of liger_ops/kernels/losses.

#include "kernels/fused_linear_cross_entropy.h"
#include "ops/losses/fused_linear_cross_entropy_pass.h"

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

  void take_targets(Tensor& dlogits, int64_t first, Tensor& taken) const {
    using K = kernels::fused_linear_cross_entropy_take_targets;
    const auto& config = runtime::first_fit<K>(call.n, false);
    const int64_t rows = dlogits.size(0);
    K::Args args{address(dlogits),  call.target_at(first), taken.const_data_ptr<float>() + first,
                 int32_t(rows),     int32_t(call.n),       dlogits.stride(0),
                 call.target_words, o.ignore_index,        int32_t(call.shard.first)};
    auto variant = runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(dtype_of(dlogits))));
    launch<K>(call.op, call.device, variant, {uint32_t((rows + config.BLOCK - 1) / config.BLOCK)}, args);
  }
  std::tuple<Tensor, Tensor> order_targets() const {
    using K = kernels::fused_linear_cross_entropy_order_targets;
    const int64_t rows = call.target.numel();
    if (rows > kMaxCompared) return sort_targets(call.target, call.shard, o);
    const auto& config = runtime::first_fit<K>(call.n, false);
    auto numbers = call.target.options().dtype(at::kInt);
    Tensor classes = at::empty({rows}, numbers), order = at::empty({rows}, numbers);
    K::Args args{address(call.target), address(classes), address(order),           int32_t(rows),
                 int32_t(call.n),      o.ignore_index,   int32_t(call.shard.first)};
    auto variant = runtime::variant_index<K>(config, runtime::point_of<K>(call.target_words - 1));
    launch<K>(call.op, call.device, variant, {uint32_t((rows + config.BLOCK - 1) / config.BLOCK)}, args);
    return {classes, order};
  }
  void add_targets(Tensor& dweight, const Tensor& x, const Tensor& taken, double scale) const {
    using K = kernels::fused_linear_cross_entropy_add_targets;
    auto [classes, order] = order_targets();
    const int64_t rows = call.target.numel(), columns = dweight.size(1);
    bool aligned = dweight.stride(1) == 1 && ((columns | dweight.stride(0) | x.stride(0)) & 7) == 0 &&
        aligned16(address(dweight), address(x));
    const auto& config = runtime::first_fit<K>(columns, aligned);
    K::Args args{address(dweight),  address(x),    address(taken),   address(classes),
                 address(order),    int32_t(rows), int32_t(columns), dweight.stride(0),
                 dweight.stride(1), x.stride(0),   float(scale)};
    auto variant = runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(dtype_of(dweight))));
    const int64_t blocks = (columns + config.BLOCK_N - 1) / config.BLOCK_N;
    launch<K>(call.op, call.device, variant, {uint32_t(rows * blocks)}, args);
  }
};

}  // namespace

Forward Cuda::forward(
    const char* op, const Tensor& input, const Tensor& weight, const Tensor& target, const Tensor& bias,
    const Tensor& ce_weight, const Tensor& totals, const Settings& s, Wanted wanted) {
  return fused_linear_cross_entropy::forward<CudaRows>(op, input, weight, target, bias, ce_weight, totals, s, wanted);
}

Gradients Cuda::backward(
    const char* op, const Tensor& grad, const Tensor& input, const Tensor& weight, const Tensor& target,
    const Tensor& bias, const Tensor& ce_weight, const Tensor& stats, const Tensor& totals, const Settings& s,
    Wanted wanted) {
  return fused_linear_cross_entropy::backward<CudaRows>(
      op, grad, input, weight, target, bias, ce_weight, stats, totals, s, wanted);
}

}  // namespace liger::ops::fused_linear_cross_entropy
