// swiglu(gate, up) = silu(gate) * up, with silu(x) = x * sigmoid(x)
//
// gate, up: (..., n) of any strides, of one dtype, which the result has too. swiglu_packed takes gate and up as the
// halves of one tensor, (..., 2 n), and has one gradient. swiglu_linear applies F.linear to the product without saving
// the product. Arithmetic is fp32 with one rounding.

#include "ops/gated/gated.h"
#include "kernels/swiglu.h"

namespace liger::ops {
namespace {

struct Silu {
  static constexpr const char* kOp = "swiglu";
  static constexpr const char* kPackedOp = "swiglu_packed";
  static constexpr const char* kLinearOp = "swiglu_linear";
  using Forward = kernels::swiglu_fwd;
  using Backward = kernels::swiglu_bwd;

  explicit Silu(const char* = kOp) {}

  template <class C>
  static C value(C x) {
    return x * core::vector_sigmoid(x);
  }

  template <class C>
  static gated::ValueAndSlope<C> value_and_slope(C x) {
    const auto s = core::vector_sigmoid_and_slope(x);
    return {x * s.value, s.value + x * s.slope};
  }

  std::tuple<> options() const { return {}; }

  template <class F>
  void with_math(const F& f) const {
    f(*this);
  }

  template <class Args>
  void set(Args&) const {}
};

using Swiglu = gated::Gated<Silu>;

}  // namespace

TORCH_LIBRARY_FRAGMENT(liger, m) {
  core::define(m, "swiglu(Tensor gate, Tensor up) -> Tensor");
  core::define(m, "swiglu_packed(Tensor gate_up) -> Tensor");
  core::define(m, "swiglu_linear(Tensor gate, Tensor up, Tensor weight, Tensor? bias=None) -> Tensor");
  core::define(m, "_swiglu_bwd(Tensor dout, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  core::define(m, "_swiglu_bwd_(Tensor dout, Tensor(a!) gate, Tensor(b!) up) -> ()");
  core::define(m, "_swiglu_product_bwd(Tensor dout, Tensor gate, Tensor up) -> (Tensor, Tensor, Tensor)");
  core::define(m, "_swiglu_product_bwd_(Tensor(a!) dout, Tensor(b!) gate, Tensor(c!) up) -> ()");
  core::define(m, "_swiglu_packed_bwd(Tensor dout, Tensor gate_up) -> Tensor");
  core::define(m, "_swiglu_packed_bwd_(Tensor dout, Tensor(a!) gate_up) -> ()");
}

TORCH_LIBRARY_IMPL(liger, CPU, m) { Swiglu::implement<Swiglu::Cpu>(m); }
TORCH_LIBRARY_IMPL(liger, CUDA, m) { Swiglu::implement<Swiglu::Cuda>(m); }
TORCH_LIBRARY_IMPL(liger, Meta, m) { Swiglu::implement<Swiglu::Meta>(m); }
TORCH_LIBRARY_IMPL(liger, Autograd, m) { Swiglu::implement_autograd(m); }
TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) { Swiglu::implement_autocast<c10::DeviceType::CUDA>(m); }
TORCH_LIBRARY_IMPL(liger, AutocastCPU, m) { Swiglu::implement_autocast<c10::DeviceType::CPU>(m); }

}  // namespace liger::ops
