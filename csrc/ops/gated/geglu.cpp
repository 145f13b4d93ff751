// geglu(gate, up, approximate) = gelu(gate) * up
//
// gate, up: (..., n) of any strides, of one dtype, which the result has too. approximate: "tanh", or "none" for the
// exact normal distribution. geglu_packed takes gate and up as the halves of one tensor, (..., 2 n), and has one
// gradient. geglu_linear applies F.linear to the product without saving the product. Arithmetic is fp32 with one
// rounding.

#include "ops/gated/gated.h"
#include "kernels/geglu.h"

namespace liger::ops {
namespace {

struct ExactGelu : gated::PlainUp {
  template <class C>
  static C value(C x) {
    return x * core::vector_normal(x).cdf;
  }

  template <class C>
  static gated::ValueAndSlope<C> value_and_slope(C x) {
    const auto normal = core::vector_normal(x);
    return {x * normal.cdf, normal.cdf + x * normal.pdf};
  }
};

// 0.5 * (1 + tanh(z)) = sigmoid(2 z), with 2 z = k * (x + 0.044715 x^3).
struct TanhGelu : gated::PlainUp {
  static constexpr double kScale = 1.5957691216057308, kCubic = 0.044715;

  template <class C>
  static C value(C x) {
    return x * core::vector_sigmoid(C(kScale) * x * (1 + C(kCubic) * x * x));
  }

  template <class C>
  static gated::ValueAndSlope<C> value_and_slope(C x) {
    const auto s = core::vector_sigmoid_and_slope(C(kScale) * x * (1 + C(kCubic) * x * x));
    return {x * s.value, s.value + s.slope * C(kScale) * x * (1 + 3 * C(kCubic) * x * x)};
  }
};

struct Gelu {
  static constexpr const char* kOp = "geglu";
  static constexpr const char* kPackedOp = "geglu_packed";
  static constexpr const char* kLinearOp = "geglu_linear";
  static constexpr const char* kArguments = "dout, gate, up, approximate";
  static constexpr const char* kPackedArguments = "dout, gate_up, approximate";
  static constexpr const char* kSchema = schemas::geglu;
  static constexpr const char* kPackedSchema = schemas::geglu_packed;
  static constexpr const char* kLinearSchema = schemas::geglu_linear;
  using Forward = kernels::geglu_fwd;
  using Backward = kernels::geglu_bwd;

  Gelu(const char* op, c10::string_view approximate) : tanh(approximate == "tanh") {
    LIGER_CHECK(tanh || approximate == "none", op, "approximate", "be 'tanh' or 'none'", "'", approximate, "'");
  }

  bool tanh;

  template <class F>
  void with_math(const F& f) const {
    tanh ? f(TanhGelu{}) : f(ExactGelu{});
  }

  template <class Args>
  void set(Args& args) const {
    args.flags |= tanh ? kernels::constants::geglu::TANH : 0;
  }
};

using Geglu = gated::Gated<Gelu, c10::string_view>;

}  // namespace

LIGER_GATED(Geglu)

}  // namespace liger::ops
