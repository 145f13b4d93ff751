// embedding(input, weight, padding_idx=None) = F.embedding: the rows of weight with the indices in input
//
// input: int64 or int32 of any shape, weight: (classes, n). The row of padding_idx has no gradient.
//
// Forward calls ATen. So does the gradient of few indices, because ATen then adds up rows without sorting. For more
// indices, our kernel sorts once and writes every row once, while ATen keeps partial sums.

#include "core/cuda/launch.h"
#include "core/operator.h"
#include "core/values.h"
#include "runtime/status.h"
#include "kernels/embedding.h"

namespace liger::ops::embedding {
namespace {

using at::Tensor;

constexpr const char* kOp = "embedding";
constexpr int64_t kNoPadding = -1;
// ATen does not sort this many indices or fewer.
constexpr int64_t kMaxUnsorted = 3072;

void check(const Tensor& input, const Tensor& weight) {
  core::check_integers(kOp, "input", input);
  core::check_activation(kOp, "weight", weight);
  LIGER_CHECK(weight.dim() == 2, kOp, "weight", "have two dimensions", weight.sym_sizes());
  core::check_same_device(kOp, "weight", weight, "input", input);
}

/// padding_idx as a class. A negative padding_idx counts from the end, as in F.embedding.
int64_t padding_of(const Tensor& weight, std::optional<int64_t> padding_idx) {
  if (!padding_idx) return kNoPadding;
  const auto classes = weight.sym_size(0);
  LIGER_CHECK(
      *padding_idx < classes && *padding_idx >= -classes, kOp, "padding_idx",
      c10::str("lie in [-", classes, ", ", classes, ")"), *padding_idx);
  return *padding_idx < 0 ? (classes + *padding_idx).guard_int(__FILE__, __LINE__) : *padding_idx;
}

Tensor look_up(const Tensor& input, const Tensor& weight, std::optional<int64_t> padding_idx) {
  check(input, weight);
  padding_of(weight, padding_idx);
  if (!weight.is_cpu()) return at::embedding_symint(weight, input);
  runtime::count_cpu_call();
  try {
    return at::embedding(weight, input);
  } catch (const c10::Error&) {
    // ATen's message has neither the index nor the limit.
    core::check_range(kOp, "input", input, 0, weight.size(0));
    throw;
  }
}

// ---- The gradient

Tensor bwd_aten(const Tensor& dout, const Tensor& input, c10::SymInt classes, int64_t padding_idx) {
  if (dout.is_cpu()) runtime::count_cpu_call();
  return at::embedding_dense_backward_symint(dout, input, std::move(classes), padding_idx, false);
}

Tensor bwd_cuda(const Tensor& dout_in, const Tensor& input, c10::SymInt classes, int64_t padding_idx) {
  using K = kernels::embedding_bwd;
  const int64_t rows = input.numel(), columns = dout_in.size(-1);
  // Neither our kernel nor ATen's accepts empty tensors.
  if (dout_in.numel() == 0) return at::zeros_symint({std::move(classes), columns}, dout_in.options());
  if (rows <= kMaxUnsorted) return bwd_aten(dout_in, input, std::move(classes), padding_idx);
  LIGER_CHECK(
      rows <= std::numeric_limits<int32_t>::max() && columns <= std::numeric_limits<int32_t>::max(), kOp, "input",
      "have fewer than 2^31 indices, and weight fewer than 2^31 columns", rows, " and ", columns);
  c10::DeviceGuard guard(dout_in.device());
  Tensor dout = dout_in.reshape({rows, columns});
  if (dout.stride(1) != 1) dout = dout.contiguous();
  Tensor dweight = at::zeros({classes.guard_int(__FILE__, __LINE__), columns}, dout.options());
  // int32 halves the passes of the radix sort. It is enough, because no weight has 2^31 rows.
  auto [indices, order] = input.reshape(-1).to(at::kInt).sort(/*stable=*/true, 0, false);
  const K::Args args{
      .dweight = core::address(dweight),
      .dout = core::address(dout),
      .indices = core::address(indices),
      .order = core::address(order),
      .rows = int32_t(rows),
      .columns = int32_t(columns),
      .dout_row = dout.stride(0),
      .padding_idx = int32_t(padding_idx)};
  const auto choice = core::choose<K>(columns, args, runtime::point_of<K>(K::dtype(core::dtype_of(dout))));
  const int64_t programs = rows * core::programs_for(columns, choice.config.BLOCK_N);
  LIGER_CHECK(
      programs <= std::numeric_limits<int32_t>::max(), kOp, "input",
      c10::str("have fewer indices for a weight of ", columns, " columns"), rows);
  core::launch(kOp, dout.device(), choice, {uint32_t(programs)}, args);
  return dweight;
}

Tensor bwd_meta(const Tensor& dout, const Tensor&, c10::SymInt classes, int64_t) {
  return dout.new_empty_symint({std::move(classes), dout.sym_size(-1)});
}

struct Backward : core::Private<Backward, Tensor(const Tensor&, const Tensor&, c10::SymInt, int64_t)> {
  static constexpr const char* kName = "_embedding_bwd";
  static constexpr const char* kArguments = "dout, input, classes, padding_idx";

  template <class Device>
  static constexpr auto run = Device::backward;
};

// ---- The operator

struct Embedding : core::Operator<Embedding, Tensor(const Tensor&, const Tensor&, std::optional<int64_t>)> {
  static constexpr const char* kOp = embedding::kOp;
  static constexpr const char* kSchema = schemas::embedding;
  using Edges = core::Positions<1>;
  using Privates = core::Privates<Backward>;

  struct Cpu {
    static constexpr auto backward = bwd_aten;
  };
  struct Cuda {
    static constexpr auto backward = bwd_cuda;
  };
  struct Meta {
    static constexpr auto backward = bwd_meta;
  };

  template <class Device>
  static Tensor run(bool, const Tensor& input, const Tensor& weight, std::optional<int64_t> padding_idx) {
    return look_up(input, weight, padding_idx);
  }

  struct Node : core::BackwardNode<Node, 1> {  // input
    c10::SymInt classes;
    int64_t padding_idx = kNoPadding;

    auto state() { return std::tie(classes, padding_idx); }
    std::string name() const override { return kOp; }

    void record(const Tensor& out, const Tensor& input, const Tensor& weight, std::optional<int64_t> padding) {
      classes = weight.sym_size(0);
      padding_idx = padding_of(weight, padding);
      save(input);
      connect(out);
    }

    core::variable_list backward(core::variable_list&& grads) override {
      if (!grads[0].defined()) return {Tensor()};
      return {Backward::call(grads[0], take(0), classes, padding_idx)};
    }
  };
};

}  // namespace

LIGER_OPERATOR(Embedding)

}  // namespace liger::ops::embedding
