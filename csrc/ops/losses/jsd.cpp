// jsd(input, target, ...): the Jensen-Shannon divergence of log-probabilities, generalised by the weight beta of the
// target in the mixture. beta 0 is KL(target || input), beta 1 is KL(input || target).

#include "ops/losses/divergence.h"

namespace liger::ops::divergence {
namespace {

struct Jsd {
  static constexpr const char *kOp = "jsd", *kBackward = "jsd backward";
  static constexpr const char* kForward = "_jsd_fwd";
  static constexpr const char *kGradient = "_jsd_bwd", *kOverwriting = "_jsd_bwd_";
  static constexpr bool kSavesInput = true;

  static Options parse(double beta, int64_t ignore_index, c10::string_view reduction) {
    LIGER_CHECK(beta >= 0 && beta <= 1, kOp, "beta", "be between 0 and 1", beta);
    const int32_t kind = beta == 0 ? kinds::FORWARD : beta == 1 ? kinds::REVERSE : kinds::MIXTURE;
    return {kind, parse_reduction(kOp, reduction), ignore_index, beta};
  }
};

using JsdOp = Divergence<Jsd, double, int64_t, c10::string_view>;

}  // namespace

// No autocast, as in kl_div.
LIGER_LIBRARY_FRAGMENT(m) { JsdOp::define(m, "float beta=0.5, int ignore_index=-100, str reduction=\"batchmean\""); }

LIGER_LIBRARY_IMPL(CPU, m) { JsdOp::implement<Cpu>(m); }
LIGER_LIBRARY_IMPL(CUDA, m) { JsdOp::implement<Cuda>(m); }
LIGER_LIBRARY_IMPL(Meta, m) { JsdOp::implement<Meta>(m); }
LIGER_LIBRARY_IMPL(Autograd, m) { m.impl(Jsd::kOp, JsdOp::autograd); }

}  // namespace liger::ops::divergence
