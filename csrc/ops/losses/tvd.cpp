// tvd(input, target, ...): the total variation distance of probabilities, half the sum of their absolute differences.

#include "ops/losses/divergence.h"

namespace liger::ops::divergence {
namespace {

// No autocast, as in kl_div.
struct Tvd {
  static constexpr const char *kOp = "tvd", *kBackward = "tvd backward", *kSchema = schemas::tvd;
  static constexpr bool kSavesInput = true;

  static Options parse(int64_t ignore_index, c10::string_view reduction) {
    return {kinds::TOTAL, parse_reduction(kOp, reduction, true), ignore_index};
  }
};

using TvdOp = Divergence<Tvd, int64_t, c10::string_view>;

}  // namespace

LIGER_OPERATOR(TvdOp)

}  // namespace liger::ops::divergence
