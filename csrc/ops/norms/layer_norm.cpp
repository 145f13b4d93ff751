// layer_norm(x, weight, bias, eps) = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias
//
// x: (..., n) of any strides; weight, bias: (n,) in x's dtype or fp32, both optional. The result has x's dtype.
// Statistics are fp32.

#include "ops/norms/layer_norm.h"

#include "core/operator.h"

namespace liger::ops::layer_norm {

Forward Meta::forward(const Tensor& x, const OptionalTensor&, const OptionalTensor&, double, bool save) {
  Forward out{core::empty_rows_like(x), {}};
  if (save) out.statistics = empty_statistics(out.y);
  return out;
}

Gradients Meta::backward(
    const Tensor&, const Tensor& x, const OptionalTensor&, const Tensor&, const Tensor& dx, bool needs_dweight,
    bool needs_dbias, at::ScalarType parameters) {
  auto parameter = [&](bool needed) {
    return needed ? at::empty_symint({x.sym_sizes().back()}, x.options().dtype(parameters)) : Tensor();
  };
  return {dx, parameter(needs_dweight), parameter(needs_dbias)};
}

namespace {

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

struct LayerNorm
    : core::Operator<LayerNorm, Tensor(const Tensor&, const OptionalTensor&, const OptionalTensor&, double)> {
  static constexpr const char* kOp = layer_norm::kOp;
  static constexpr const char* kSchema = schemas::layer_norm;
  using Edges = core::Positions<0, 1, 2>;
  using Forward = std::tuple<Tensor, Tensor>;  // y, statistics
  using Cpu = layer_norm::Cpu;
  using Cuda = layer_norm::Cuda;
  using Meta = layer_norm::Meta;

  template <class Device>
  static Forward run(bool save, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
    check(x, weight, bias, eps);
    auto out = Device::forward(x, weight, bias, eps, save);
    return {out.y, out.statistics};
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

  // ---- Backward

  template <class Device>
  static std::tuple<Tensor, Tensor, Tensor> bwd(
      const Tensor& dy, const Tensor& x, const OptionalTensor& weight, const Tensor& statistics, int64_t wanted,
      at::ScalarType parameters) {
    const Tensor dx = wanted & core::kWantInput ? core::empty_rows_like(x) : Tensor();
    auto out = Device::backward(
        dy, x, weight, statistics, dx, wanted & core::kWantWeight, wanted & core::kWantBias, parameters);
    return {out.dx, out.dweight, out.dbias};
  }

  // Overwrites dy with dx.
  template <class Device>
  static std::tuple<Tensor, Tensor> bwd_(
      Tensor& dy, const Tensor& x, const OptionalTensor& weight, const Tensor& statistics, int64_t wanted,
      at::ScalarType parameters) {
    auto out = Device::backward(
        dy, x, weight, statistics, dy, wanted & core::kWantWeight, wanted & core::kWantBias, parameters);
    return {out.dweight, out.dbias};
  }

  static void define_backward(torch::Library& m) {
    core::define_backward(
        m, "_layer_norm_bwd",
        "Tensor(a!) dy, Tensor x, Tensor? weight, Tensor statistics, int wanted, ScalarType parameters",
        "(Tensor, Tensor, Tensor)", "(Tensor, Tensor)");
  }

  template <class Device>
  static void implement_backward(torch::Library& m) {
    core::implement<bwd<Device>>(m, "_layer_norm_bwd");
    core::implement<bwd_<Device>>(m, "_layer_norm_bwd_");
  }

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
      const int64_t wanted = core::wanted_bits(needs(0), needs(1), needs(2));
      if (needs(0) && may_overwrite(dy, x)) {
        static const auto op = core::find_op<decltype(bwd_<Meta>)>("_layer_norm_bwd_");
        auto [dweight, dbias] = op.call(dy, x, weight, statistics, wanted, parameters);
        return {dy, dweight, dbias};
      }
      static const auto op = core::find_op<decltype(bwd<Meta>)>("_layer_norm_bwd");
      auto [dx, dweight, dbias] = op.call(dy, x, weight, statistics, wanted, parameters);
      return {dx, dweight, dbias};
    }
  };
};

}  // namespace

LIGER_OPERATOR(LayerNorm)

}  // namespace liger::ops::layer_norm
