// fused_linear_cross_entropy on CPU.

#include "core/cpu/softmax.h"
#include "core/values.h"
#include "ops/losses/linear/fused_linear_cross_entropy_loop.h"

namespace liger::ops::fused_linear_cross_entropy {
namespace {

struct CpuRows {
  const char* op;
  Shard shard;
  Tensor target, weight;
  Options o;

  CpuRows(const char* name, Shard part, const Tensor& targets, const Tensor& ce_weight, const Options& options)
      : op(name), shard(std::move(part)), target(class_indices(targets)), weight(ce_weight), o(options) {
    runtime::count_cpu_call();
    check_classes(op, target.const_data_ptr<int64_t>(), target.numel(), shard.classes, o);
  }
  Tensor part(int64_t first, const Tensor& logits) const { return target.narrow(0, first, logits.size(0)); }

  const Tensor& target_rows() const { return target; }
  void count(const Tensor& totals) const {
    auto [by_weight, by_count] = count_targets(target, weight, o);
    write_scalars(totals, {by_weight, by_count});
  }
  void forward(const Tensor& logits, int64_t first, const RowsOut& out) const {
    forward_rows_cpu(op, shard, logits, part(first, logits), weight, o, out);
  }
  void combine(
      const Facts& facts, const Tensor& gathered, int64_t first, const RowsOut& out, char* log_prob,
      char* entropy) const {
    Tensor y = target.narrow(0, first, gathered.size(2));
    combine_rows_cpu(shard, facts, gathered, y, weight, o, out, log_prob, entropy);
  }
  void backward(
      Tensor& logits, int64_t first, const char* stats, const Tensor& totals, const Upstream& upstream) const {
    backward_rows_cpu(op, shard, logits, logits, part(first, logits), weight, stats, totals, upstream, o);
  }
  void forward_backward(
      Tensor& logits, int64_t first, RowsOut out, const Tensor& totals, const Upstream& upstream) const {
    Tensor stats = at::empty({3, logits.size(0)}, logits.options().dtype(compute_type(logits)));
    out.stats = static_cast<char*>(stats.mutable_data_ptr());
    forward(logits, first, out);
    backward(logits, first, out.stats, totals, upstream);
  }
  void describe(const Tensor& logits, int64_t first, const char* stats, char* log_prob, char* entropy) const {
    describe_rows_cpu(op, shard, logits, part(first, logits), stats, o, log_prob, entropy);
  }
  void sum(const RowBuffers& rows, const Results& out, const Tensor& totals) const {
    sum_rows_cpu(rows, known_or_counted(totals, target, weight, o), o, out);
  }

  /// Moves the gradients of true logits from dlogits to `target_grads`.
  void take_targets(Tensor& dlogits, int64_t first, Tensor& target_grads) const {
    const int64_t* y = target.const_data_ptr<int64_t>() + first;
    float* to = target_grads.data_ptr<float>() + first;
    const auto rows = output<float>(dlogits);
    for (int64_t row = 0; row < dlogits.size(0); ++row) {
      to[row] = 0;
      const int64_t column = y[row] - shard.first;
      if (y[row] == o.ignore_index || column < 0 || column >= shard.n) continue;
      const auto at = rows + (row * dlogits.stride(0) + column);
      to[row] = first_number<float>(at);
      write_zeros(at, 1);
    }
  }
  /// Adds the contribution of the gradients in `target_grads` to d weight.
  void add_targets(Tensor& dweight, const Tensor& x_in, const Tensor& target_grads, double scale) const {
    auto [classes, order] = sort_targets(target, shard, o);
    const int32_t *y = classes.template const_data_ptr<int32_t>(), *row_of = order.template const_data_ptr<int32_t>();
    const float* factor = target_grads.const_data_ptr<float>();
    const int64_t rows = target.numel(), columns = dweight.size(1);
    Tensor x = x_in.contiguous();
    const auto from = input<float>(x);
    const auto to = output<float>(dweight);
    const int64_t step = dweight.stride(1) == 1 ? columns : 1;
    at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> sum(columns), stage(columns);
      for (int64_t start = begin; start < end; ++start) {
        // The first row of a class adds all of its rows.
        if (y[start] < 0 || (start > 0 && y[start - 1] == y[start])) continue;
        std::fill(sum.begin(), sum.end(), 0.f);
        for (int64_t i = start; i < rows && y[i] == y[start]; ++i) {
          const float* row = widen_all(from + row_of[i] * columns, stage.data(), columns);
          const float f = factor[row_of[i]];
          for (int64_t c = 0; c < columns; ++c) sum[c] += f * row[c];
        }
        for (int64_t first = 0; first < columns; first += step) {
          const auto out = to + (y[start] * dweight.stride(0) + first * dweight.stride(1));
          const float* old = widen_all<float>(out, stage.data(), step);
          for (int64_t c = 0; c < step; ++c) stage[c] = old[c] + float(scale) * sum[first + c];
          store_all(out, stage.data(), step);
        }
      }
    });
  }
};

}  // namespace

Forward Cpu::forward(const Call& call, const Tensor& totals, Wanted wanted) {
  return fused_linear_cross_entropy::forward<CpuRows>(call, totals, wanted);
}

Gradients Cpu::backward(
    const Call& call, const Tensor& grad, const Tensor& stats, const Tensor& totals, Wanted wanted) {
  return fused_linear_cross_entropy::backward<CpuRows>(call, grad, stats, totals, wanted);
}

}  // namespace liger::ops::fused_linear_cross_entropy
