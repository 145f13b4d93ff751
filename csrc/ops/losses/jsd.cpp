// jsd(input, target, ...): the Jensen-Shannon divergence of log-probabilities, generalised by the weight beta of the
// target in the mixture. beta 0 is KL(target || input), beta 1 is KL(input || target).

#include "ops/losses/divergence.h"

namespace liger::ops::divergence {
namespace {

// No autocast, as in kl_div.
struct Jsd {
  static constexpr const char *kOp = "jsd", *kBackward = "jsd backward", *kSchema = schemas::jsd;
  static constexpr bool kSavesInput = true;

  static Options parse(double beta, int64_t ignore_index, c10::string_view reduction) {
    LIGER_CHECK(beta >= 0 && beta <= 1, kOp, "beta", "be between 0 and 1", beta);
    const int32_t kind = beta == 0 ? kinds::FORWARD : beta == 1 ? kinds::REVERSE : kinds::MIXTURE;
    return {kind, parse_reduction(kOp, reduction, true), ignore_index, beta};
  }
};

using JsdOp = Divergence<Jsd, double, int64_t, c10::string_view>;

}  // namespace

LIGER_OPERATOR(JsdOp)

}  // namespace liger::ops::divergence
