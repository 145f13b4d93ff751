// swiglu(gate, up, limit) = silu(min(gate, limit)) * clamp(up, -limit, limit), with silu(x) = x * sigmoid(x)
//
// gate, up: (..., n) of any strides, of one dtype, which the result has too. swiglu_packed takes gate and up as the
// halves of one tensor, (..., 2 n), and has one gradient. swiglu_linear applies F.linear to the product without saving
// the product. Without limit, nothing is clamped. Gradients pass at the limit. Arithmetic is fp32 with one rounding.

#include "ops/gated/gated.h"
#include <limits>

#include "kernels/swiglu.h"

namespace liger::ops {
namespace {

struct SiluMath : gated::PlainUp {
  template <class C>
  static C value(C x) {
    return x * core::vector_sigmoid(x);
  }

  template <class C>
  static gated::ValueAndSlope<C> value_and_slope(C x) {
    const auto s = core::vector_sigmoid_and_slope(x);
    return {x * s.value, s.value + x * s.slope};
  }
};

// Comparisons keep NaN, which is not beyond the limit.
struct LimitedSilu {
  double limit;

  template <class C>
  C value(C x) const {
    return SiluMath::value(most(x));
  }

  template <class C>
  gated::ValueAndSlope<C> value_and_slope(C x) const {
    const auto act = SiluMath::value_and_slope(most(x));
    return {act.value, x > C(limit) ? C(0) : act.slope};
  }

  template <class C>
  C up(C x) const {
    return x < -C(limit) ? -C(limit) : most(x);
  }

  template <class C>
  C up_gradient(C x, C gradient) const {
    return x > C(limit) || x < -C(limit) ? C(0) : gradient;
  }

 private:
  template <class C>
  C most(C x) const {
    return x > C(limit) ? C(limit) : x;
  }
};

struct Silu {
  static constexpr const char* kOp = "swiglu";
  static constexpr const char* kPackedOp = "swiglu_packed";
  static constexpr const char* kLinearOp = "swiglu_linear";
  static constexpr const char* kArguments = "dout, gate, up, limit";
  static constexpr const char* kPackedArguments = "dout, gate_up, limit";
  static constexpr const char* kSchema = schemas::swiglu;
  static constexpr const char* kPackedSchema = schemas::swiglu_packed;
  static constexpr const char* kLinearSchema = schemas::swiglu_linear;
  using Forward = kernels::swiglu_fwd;
  using Backward = kernels::swiglu_bwd;

  Silu(const char* op, std::optional<double> limit) : limit(limit) {
    LIGER_CHECK(!limit || *limit > 0, op, "limit", "be positive", *limit);
  }

  std::optional<double> limit;

  template <class F>
  void with_math(const F& f) const {
    limit ? f(LimitedSilu{*limit}) : f(SiluMath{});
  }

  template <class Args>
  void set(Args& args) const {
    args.limit = float(limit.value_or(std::numeric_limits<double>::infinity()));
  }
};

using Swiglu = gated::Gated<Silu, std::optional<double>>;

}  // namespace

LIGER_GATED(Swiglu)

}  // namespace liger::ops
