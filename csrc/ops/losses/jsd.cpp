// jsd(input, target, ...): the Jensen-Shannon divergence of log-probabilities, generalised by the weight beta of the
// target in the mixture. beta 0 is KL(target || input), beta 1 is KL(input || target).

#include "ops/losses/divergence.h"

namespace liger::ops::divergence {
namespace {

struct Jsd {
  static constexpr const char *kOp = "jsd", *kBackward = "jsd backward";
  static constexpr const char *kPublic = "liger::jsd", *kForward = "liger::_jsd_fwd";
  static constexpr const char *kGradient = "liger::_jsd_bwd", *kOverwriting = "liger::_jsd_bwd_";
  static constexpr bool kSavesInput = true;

  static Options parse(double beta, int64_t ignore_index, c10::string_view reduction) {
    LIGER_CHECK(beta >= 0 && beta <= 1, kOp, "beta", "be between 0 and 1", beta);
    const int32_t kind = beta == 0 ? kinds::FORWARD : beta == 1 ? kinds::REVERSE : kinds::MIXTURE;
    return {kind, parse_reduction(kOp, reduction), ignore_index, beta};
  }
};

using Op = Divergence<Jsd, double, int64_t, c10::string_view>;

}  // namespace

// No autocast, as in kl_div.
TORCH_LIBRARY_FRAGMENT(liger, m) {
  Op::define(m, "float beta=0.5, int ignore_index=-100, str reduction=\"batchmean\"");
}

TORCH_LIBRARY_IMPL(liger, CPU, m) { Op::implement<Cpu>(m); }
TORCH_LIBRARY_IMPL(liger, CUDA, m) { Op::implement<Cuda>(m); }
TORCH_LIBRARY_IMPL(liger, Meta, m) { Op::implement<Meta>(m); }
TORCH_LIBRARY_IMPL(liger, Autograd, m) { m.impl(Jsd::kOp, Op::autograd); }

}  // namespace liger::ops::divergence
