// relu_squared(x) = relu(x)^2, the activation of Primer's and Nemotron's MLPs
//
// x: (...) with at least one dimension, of any strides. The result has x's dtype; arithmetic is fp32 with one rounding.
// Only x is saved. Backward overwrites the incoming gradient if nothing else can see it.

#include "core/elements.h"
#include "core/operator.h"
#include "kernels/relu_squared.h"

namespace liger::ops::relu_squared {
namespace {

using at::Tensor;

constexpr const char* kOp = "relu_squared";
constexpr const char* kBackward = "relu_squared backward";

// ---- CPU

struct Cpu {
  static void forward(Tensor y, Tensor x) {
    runtime::count_cpu_call();
    core::map_elements(kOp, [](auto v) { return v <= 0 ? decltype(v)(0) : v * v; }, y, x);
  }

  /// dx may be dy.
  static void backward(Tensor dx, Tensor dy, Tensor x) {
    runtime::count_cpu_call();
    core::map_elements(kBackward, [](auto d, auto v) { return v <= 0 ? decltype(v)(0) : 2 * v * d; }, dx, dy, x);
  }
};

// ---- CUDA

struct Cuda {
  template <class K, size_t N>
  static void start(const char* op, const Tensor& x, bool aligned, const core::Rows<N>& walk, typename K::Args args) {
    const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x)));
    const auto& config = runtime::first_fit<K>(walk.n, aligned && walk.aligned_strides(), point, walk.rows);
    args.rows = int32_t(walk.rows);
    args.n = walk.n;
    args.inner_rows = walk.kernel_inner_rows();
    core::launch<K>(op, x.device(), runtime::variant_index<K>(config, point), core::tile_grid(config, walk), args);
  }

  static void forward(Tensor y, Tensor x) {
    c10::DeviceGuard guard(x.device());
    if (x.numel() == 0) return;
    auto walk = core::walk_elements<2>(kOp, {&y, &x});
    const auto& [to, from] = walk.strides;
    kernels::relu_squared_fwd::Args args{core::address(y), core::address(x), 0,          0,         0,
                                         to.outer,         to.inner,         from.outer, from.inner};
    start<kernels::relu_squared_fwd>(kOp, x, core::aligned16(core::address(y), core::address(x)), walk, args);
  }

  static void backward(Tensor dx, Tensor dy, Tensor x) {
    c10::DeviceGuard guard(x.device());
    if (x.numel() == 0) return;
    auto walk = core::walk_elements<3>(kBackward, {&dx, &dy, &x});
    const auto& [to, grad, from] = walk.strides;
    kernels::relu_squared_bwd::Args args{
        core::address(dx), core::address(dy), core::address(x), 0,          0,          0,
        to.outer,          to.inner,          grad.outer,       grad.inner, from.outer, from.inner};
    const bool aligned = core::aligned16(core::address(dx), core::address(dy), core::address(x));
    start<kernels::relu_squared_bwd>(kBackward, x, aligned, walk, args);
  }
};

struct Meta {
  static void forward(const Tensor&, const Tensor&) {}
  static void backward(const Tensor&, const Tensor&, const Tensor&) {}
};

// No autocast: like torch's own activations, it computes in the dtype of its input.
struct ReluSquared : core::Operator<ReluSquared, Tensor(const Tensor&)> {
  static constexpr const char* kOp = relu_squared::kOp;
  static constexpr const char* kSchema = schemas::relu_squared;
  using Edges = core::Positions<0>;
  using Saves = core::Saves<core::Argument<0>>;
  using Cpu = relu_squared::Cpu;
  using Cuda = relu_squared::Cuda;
  using Meta = relu_squared::Meta;

  template <class Device>
  static Tensor run(bool, const Tensor& x) {
    core::check_activation(kOp, "x", x);
    Tensor y = core::empty_rows_like(x);
    Device::forward(y, x);
    return y;
  }

  template <class Device>
  static Tensor bwd(const Tensor& dy, const Tensor& x) {
    core::check_same(kBackward, "dy", dy, "x", x);
    Tensor dx = core::empty_rows_like(x);
    Device::backward(dx, dy, x);
    return dx;
  }

  // Overwrites dy with the gradient.
  template <class Device>
  static void bwd_(Tensor& dy, const Tensor& x) {
    core::check_same(kBackward, "dy", dy, "x", x);
    Device::backward(dy, dy, x);
  }

  static void define_backward(torch::Library& m) {
    core::define_backward(m, "_relu_squared_bwd", "Tensor(a!) dy, Tensor x", "Tensor", "()");
  }

  template <class Device>
  static void implement_backward(torch::Library& m) {
    core::implement<bwd<Device>>(m, "_relu_squared_bwd");
    core::implement<bwd_<Device>>(m, "_relu_squared_bwd_");
  }

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return {Tensor()};
    Tensor x = node.take(0);
    if (node.may_overwrite(dy, x)) {
      static const auto op = core::find_op<decltype(bwd_<Meta>)>("_relu_squared_bwd_");
      op.call(dy, x);
      return {dy};
    }
    static const auto op = core::find_op<decltype(bwd<Meta>)>("_relu_squared_bwd");
    return {op.call(dy, x)};
  }
};

}  // namespace

LIGER_OPERATOR(ReluSquared)

}  // namespace liger::ops::relu_squared
