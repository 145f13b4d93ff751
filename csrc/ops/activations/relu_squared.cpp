// relu_squared(x) = relu(x)^2, the activation of Primer's and Nemotron's MLPs
//
// x: (...) with at least one dimension, of any strides. The result has x's dtype; arithmetic is fp32 with one rounding.
// Only x is saved. Backward overwrites the incoming gradient if nothing else can see it.

#include "core/rows/elements.h"
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
  static void forward(Tensor y, Tensor x) {
    using K = kernels::relu_squared_fwd;
    c10::DeviceGuard guard(x.device());
    if (x.numel() == 0) return;
    const auto walk = core::walk_elements<2>(kOp, {&y, &x});
    const auto& strides = walk.strides;
    K::Args args{.y = core::address(y), .x = core::address(x), .y_strides = strides[0], .x_strides = strides[1]};
    core::launch_tiles<K>(kOp, x.device(), walk, args, runtime::point_of<K>(K::dtype(core::dtype_of(x))));
  }

  static void backward(Tensor dx, Tensor dy, Tensor x) {
    using K = kernels::relu_squared_bwd;
    c10::DeviceGuard guard(x.device());
    if (x.numel() == 0) return;
    const auto walk = core::walk_elements<3>(kBackward, {&dx, &dy, &x});
    K::Args args{
        .dx = core::address(dx),
        .dy = core::address(dy),
        .x = core::address(x),
        .dx_strides = walk.strides[0],
        .dy_strides = walk.strides[1],
        .x_strides = walk.strides[2]};
    core::launch_tiles<K>(kBackward, x.device(), walk, args, runtime::point_of<K>(K::dtype(core::dtype_of(x))));
  }
};

struct Meta {
  static void forward(const Tensor&, const Tensor&) {}
  static void backward(const Tensor&, const Tensor&, const Tensor&) {}
};

struct Backward : core::Private<Backward, Tensor(const Tensor&, const Tensor&), core::Overwrites<0>> {
  static constexpr const char* kName = "_relu_squared_bwd";
  static constexpr const char* kArguments = "dy, x";

  template <class Device>
  static Tensor run(const Into& into, const Tensor& dy, const Tensor& x) {
    core::check_same(kBackward, "dy", dy, "x", x);
    Tensor dx = core::result_rows(into[0], true, x);
    Device::backward(dx, dy, x);
    return dx;
  }
};

// No autocast: like torch's own activations, it computes in the dtype of its input.
struct ReluSquared : core::Operator<ReluSquared, Tensor(const Tensor&)> {
  static constexpr const char* kOp = relu_squared::kOp;
  static constexpr const char* kSchema = schemas::relu_squared;
  using Edges = core::Positions<0>;
  using Saves = core::Saves<core::Argument<0>>;
  using Privates = core::Privates<Backward>;
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

  static core::variable_list backward(Node& node, core::variable_list&& grads) {
    Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return {Tensor()};
    Tensor x = node.take(0);
    return {Backward::call(node.may_overwrite(dy, x), dy, x)};
  }
};

}  // namespace

LIGER_OPERATOR(ReluSquared)

}  // namespace liger::ops::relu_squared
