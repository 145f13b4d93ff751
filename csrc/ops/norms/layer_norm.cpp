// layer_norm(x, weight, bias, eps) = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias
//
// x: (..., n) of any strides; weight, bias: (n,) in x's dtype or fp32, both optional. The result has x's dtype.
// Statistics are fp32.

#include "ops/norms/layer_norm.h"

#include "core/operator.h"

namespace liger::ops::layer_norm {

namespace {

struct Meta {
  static void forward(const auto&...) {}
  static Gradients backward(
      const Tensor& dx, const Tensor&, const Tensor& x, const OptionalTensor&, const Tensor&, bool needs_dweight,
      bool needs_dbias, at::ScalarType parameters) {
    return {dx, empty_parameter(x, parameters, needs_dweight), empty_parameter(x, parameters, needs_dbias)};
  }
};

void check(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  core::check_rows(kOp, "x", x);
  if (weight && weight->defined()) core::check_column_parameter(kOp, "weight", *weight, x);
  if (bias && bias->defined()) core::check_column_parameter(kOp, "bias", *bias, x);
  if (weight && bias && weight->defined() && bias->defined()) {
    LIGER_CHECK(
        weight->scalar_type() == bias->scalar_type(), kOp, "bias",
        c10::str("have the dtype of weight, ", weight->scalar_type()), bias->scalar_type());
  }
  core::check_eps(kOp, eps);
}

struct Backward
    : core::Private<
          Backward,
          Gradients(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, int64_t, at::ScalarType),
          core::Overwrites<0>> {
  static constexpr const char* kName = "_layer_norm_bwd";
  static constexpr const char* kArguments = "dy, x, weight, statistics, wanted, parameters";

  template <class Device>
  static Gradients run(
      const Into& into, const Tensor& dy, const Tensor& x, const OptionalTensor& weight, const Tensor& statistics,
      int64_t wanted, at::ScalarType parameters) {
    core::check_same("layer_norm backward", "dy", dy, "x", x);
    const Tensor dx = core::result_rows(into[0], core::wants(wanted, 0), x);
    return Device::backward(dx, dy, x, weight, statistics, core::wants(wanted, 1), core::wants(wanted, 2), parameters);
  }
};

struct LayerNorm
    : core::Operator<LayerNorm, Tensor(const Tensor&, const OptionalTensor&, const OptionalTensor&, double)> {
  static constexpr const char* kOp = layer_norm::kOp;
  static constexpr const char* kSchema = schemas::layer_norm;
  using Edges = core::Positions<0, 1, 2>;
  using Forward = std::tuple<Tensor, Tensor>;  // y, statistics
  using Privates = core::Privates<Backward>;
  using Cpu = layer_norm::Cpu;
  using Cuda = layer_norm::Cuda;
  using Meta = layer_norm::Meta;

  template <class Device>
  static Forward run(bool save, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
    check(x, weight, bias, eps);
    Tensor y = core::empty_rows_like(x);
    Tensor statistics = save ? core::empty_per_row(y, core::compute_type(x), 2) : Tensor();
    Device::forward(y, statistics, x, weight, bias, eps);
    return {y, statistics};
  }

  // PyTorch's policy for norms on CUDA: float32 in and out.
  struct Autocast {
    static constexpr bool kCpu = false, kCuda = true;

    template <class Arguments>
    static void cast(c10::DeviceType, Arguments& arguments) {
      auto& [x, weight, bias, eps] = arguments;
      x = core::autocast_float(x), weight = core::autocast_float(weight), bias = core::autocast_float(bias);
    }
  };

  struct Node : core::BackwardNode<Node, 3> {  // x, weight, statistics
    at::ScalarType parameters;

    auto state() { return std::tie(parameters); }
    std::string name() const override { return kOp; }

    void record(const Forward& out, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double) {
      parameters = parameter_type(x, core::value_or_undefined(weight), core::value_or_undefined(bias));
      save(x, weight, std::get<1>(out));
      connect(std::get<0>(out));
    }

    core::variable_list backward(core::variable_list&& grads) override {
      Tensor dy = std::move(grads[0]);
      if (!dy.defined()) return {Tensor(), Tensor(), Tensor()};
      Tensor x = take(0), weight = take(1), statistics = take(2);
      const bool overwrites = needs(0) && may_overwrite(dy, x);
      auto [dx, dweight, dbias] = Backward::call(overwrites, dy, x, weight, statistics, wanted(), parameters);
      return {dx, dweight, dbias};
    }
  };
};

}  // namespace

LIGER_OPERATOR(LayerNorm)

}  // namespace liger::ops::layer_norm
