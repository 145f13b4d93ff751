// kl_div(input, target, ...): torch.nn.functional.kl_div, with labels that exclude rows.

#include "ops/losses/divergence.h"

namespace liger::ops::divergence {
namespace {

// No autocast: under autocast, PyTorch computes this loss in float32. This op does that for rows of any dtype, without
// a copy.
struct KlDiv {
  static constexpr const char *kOp = "kl_div", *kBackward = "kl_div backward", *kSchema = schemas::kl_div;
  static constexpr bool kSavesInput = false;

  static Options parse(int64_t ignore_index, c10::string_view reduction, bool log_target, double eps) {
    check_eps(kOp, eps);
    const int32_t kind = log_target ? kinds::LOG_PROBS : kinds::PROBS;
    return {kind, parse_reduction(kOp, reduction, true), ignore_index, eps, /*batch_is_first_dimension=*/true};
  }
};

using KlDivOp = Divergence<KlDiv, int64_t, c10::string_view, bool, double>;

}  // namespace

LIGER_OPERATOR(KlDivOp)

}  // namespace liger::ops::divergence
