// tvd(input, target, ...): the total variation distance of probabilities, half the sum of their absolute differences.

#include "ops/losses/divergence.h"

namespace liger::ops::divergence {
namespace {

struct Tvd {
  static constexpr const char *kOp = "tvd", *kBackward = "tvd backward";
  static constexpr const char *kPublic = "liger::tvd", *kForward = "liger::_tvd_fwd";
  static constexpr const char *kGradient = "liger::_tvd_bwd", *kOverwriting = "liger::_tvd_bwd_";
  static constexpr bool kSavesInput = true;

  static Options parse(int64_t ignore_index, c10::string_view reduction) {
    return {kinds::TOTAL, parse_reduction(kOp, reduction), ignore_index};
  }
};

using Op = Divergence<Tvd, int64_t, c10::string_view>;

}  // namespace

// No autocast, as in kl_div.
TORCH_LIBRARY_FRAGMENT(liger, m) { Op::define(m, "int ignore_index=-100, str reduction=\"batchmean\""); }

TORCH_LIBRARY_IMPL(liger, CPU, m) { Op::implement<Cpu>(m); }
TORCH_LIBRARY_IMPL(liger, CUDA, m) { Op::implement<Cuda>(m); }
TORCH_LIBRARY_IMPL(liger, Meta, m) { Op::implement<Meta>(m); }
TORCH_LIBRARY_IMPL(liger, Autograd, m) { m.impl(Tvd::kOp, Op::autograd); }

}  // namespace liger::ops::divergence
