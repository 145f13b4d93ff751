#pragma once

// Shared by the files of rms_norm and by fused_add_rms_norm, which uses the same kernels with a residual, and the same
// backward.

#include "core/casting_mode.h"
#include "core/private.h"
#include "core/rows/rows.h"

namespace liger::ops::rms_norm {

using at::Tensor;

constexpr const char* kOp = "rms_norm";

struct Forward {
  Tensor y, s, rstd;  // s: undefined without a residual; rstd: undefined unless requested
};

/// Writes what is defined in `out`.
using ForwardOn = void(
    const char* op, Forward& out, Tensor x, Tensor residual, Tensor weight, double eps, double offset,
    std::string_view casting_mode);
/// Writes dx and returns (dx, dweight). dx may be dy; it is undefined if it is not needed. ds is undefined without a
/// residual, or if the sum receives no gradient.
using BackwardOn = std::tuple<Tensor, Tensor>(
    const Tensor& dx, Tensor dy, Tensor ds, Tensor x, Tensor weight, Tensor rstd, double offset,
    std::string_view casting_mode, bool needs_dweight);

struct Cpu {
  static ForwardOn forward;
  static BackwardOn backward;
};
struct Cuda {
  static ForwardOn forward;
  static BackwardOn backward;
};
struct Meta {
  static ForwardOn forward;
  static BackwardOn backward;
};

/// Checks the arguments and runs forward on a device.
Forward forward(
    ForwardOn* device, const char* op, bool save_rstd, const Tensor& x, const Tensor& residual,
    const OptionalTensor& weight, double eps, double offset, std::string_view casting_mode);

/// The gradients of s and weight. Without a residual, s is x.
struct Backward : core::Private<
                      Backward,
                      std::tuple<Tensor, Tensor>(
                          const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&, const Tensor&,
                          int64_t, double, c10::string_view),
                      core::Overwrites<0>> {
  static constexpr const char* kName = "_rms_norm_bwd";
  static constexpr const char* kArguments = "dy, ds, x, weight, rstd, wanted, offset, casting_mode";

  template <class Device>
  static std::tuple<Tensor, Tensor> run(
      const Into& into, const Tensor& dy, const OptionalTensor& ds, const Tensor& x, const OptionalTensor& weight,
      const Tensor& rstd, int64_t wanted, double offset, c10::string_view mode) {
    core::check_same("rms_norm backward", "dy", dy, "x", x);
    const Tensor dx = core::result_rows(into[0], core::wants(wanted, 0), x);
    return Device::backward(
        dx, dy, core::value_or_undefined(ds), x, core::value_or_undefined(weight), rstd, offset, mode,
        core::wants(wanted, 1));
  }
};

}  // namespace liger::ops::rms_norm
