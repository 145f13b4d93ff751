// kl_div(input, target, ...): torch.nn.functional.kl_div, with labels that exclude rows.

#include "ops/losses/divergence.h"

namespace liger::ops::divergence {
namespace {

struct KlDiv {
  static constexpr const char *kOp = "kl_div", *kBackward = "kl_div backward";
  static constexpr const char* kForward = "_kl_div_fwd";
  static constexpr const char *kGradient = "_kl_div_bwd", *kOverwriting = "_kl_div_bwd_";
  static constexpr bool kSavesInput = false;

  static Options parse(int64_t ignore_index, c10::string_view reduction, bool log_target, double eps) {
    check_eps(kOp, eps);
    const int32_t kind = log_target ? kinds::LOG_PROBS : kinds::PROBS;
    return {kind, parse_reduction(kOp, reduction), ignore_index, eps, /*batch_is_first_dimension=*/true};
  }
};

using KlDivOp = Divergence<KlDiv, int64_t, c10::string_view, bool, double>;

}  // namespace

// No autocast: under autocast, PyTorch computes this loss in float32. This op does that for rows of any dtype, without
// a copy.
LIGER_LIBRARY_FRAGMENT(m) {
  KlDivOp::define(m, "int ignore_index=-100, str reduction=\"mean\", bool log_target=False, float eps=1e-10");
}

LIGER_LIBRARY_IMPL(CPU, m) { KlDivOp::implement<Cpu>(m); }
LIGER_LIBRARY_IMPL(CUDA, m) { KlDivOp::implement<Cuda>(m); }
LIGER_LIBRARY_IMPL(Meta, m) { KlDivOp::implement<Meta>(m); }
LIGER_LIBRARY_IMPL(Autograd, m) { m.impl(KlDiv::kOp, KlDivOp::autograd); }

}  // namespace liger::ops::divergence
