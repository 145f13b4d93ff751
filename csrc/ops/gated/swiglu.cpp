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
  static constexpr const char* kOptions = "";
  static constexpr const char* kSchema = schemas::swiglu;
  static constexpr const char* kPackedSchema = schemas::swiglu_packed;
  static constexpr const char* kLinearSchema = schemas::swiglu_linear;
  using Forward = kernels::swiglu_fwd;
  using Backward = kernels::swiglu_bwd;

  explicit Silu(const char*) {}

  template <class C>
  static C value(C x) {
    return x * core::vector_sigmoid(x);
  }

  template <class C>
  static gated::ValueAndSlope<C> value_and_slope(C x) {
    const auto s = core::vector_sigmoid_and_slope(x);
    return {x * s.value, s.value + x * s.slope};
  }

  template <class F>
  void with_math(const F& f) const {
    f(*this);
  }

  template <class Args>
  void set(Args&) const {}
};

using Swiglu = gated::Gated<Silu>;

}  // namespace

LIGER_GATED(Swiglu)

}  // namespace liger::ops
