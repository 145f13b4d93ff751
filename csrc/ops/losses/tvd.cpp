// tvd(input, target, ...): the total variation distance of probabilities, half the sum of their absolute differences.

#include "ops/losses/divergence.h"

namespace liger::ops::divergence {
namespace {

struct Tvd {
  static constexpr const char *kOp = "tvd", *kBackward = "tvd backward";
  static constexpr const char* kForward = "_tvd_fwd";
  static constexpr const char *kGradient = "_tvd_bwd", *kOverwriting = "_tvd_bwd_";
  static constexpr bool kSavesInput = true;

  static Options parse(int64_t ignore_index, c10::string_view reduction) {
    return {kinds::TOTAL, parse_reduction(kOp, reduction), ignore_index};
  }
};

using TvdOp = Divergence<Tvd, int64_t, c10::string_view>;

}  // namespace

// No autocast, as in kl_div.
LIGER_LIBRARY_FRAGMENT(m) { TvdOp::define(m, "int ignore_index=-100, str reduction=\"batchmean\""); }

LIGER_LIBRARY_IMPL(CPU, m) { TvdOp::implement<Cpu>(m); }
LIGER_LIBRARY_IMPL(CUDA, m) { TvdOp::implement<Cuda>(m); }
LIGER_LIBRARY_IMPL(Meta, m) { TvdOp::implement<Meta>(m); }
LIGER_LIBRARY_IMPL(Autograd, m) { m.impl(Tvd::kOp, TvdOp::autograd); }

}  // namespace liger::ops::divergence
