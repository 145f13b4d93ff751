// moe_experts_cuda.cpp without a device: kernels are handed to a callback instead of being launched, and tensors are on
// the CPU. A made-up device decides which kernels are chosen.

#include <torch/library.h>

#include "core/cuda/launch.h"
#include "kernels/geglu.h"
#include "kernels/lora_products.h"
#include "kernels/moe_adapters.h"
#include "kernels/moe_rows.h"
#include "ops/moe/moe_experts.h"
#include "runtime/loader.h"

namespace liger::runtime {

DeviceInfo made_up{};

Loads loads_instead(Kernel&, uint32_t, int) { return Loads::Yes; }

}  // namespace liger::runtime

namespace liger::core {

// name, variant, programs, arguments -> whether it failed
using Run = int (*)(const char*, uint32_t, uint32_t, const void*);
Run run = nullptr;

template <class K>
void run_instead(
    const char* op, const at::Device&, const Choice<K>& choice, runtime::Grid grid, const typename K::Args& args) {
  TORCH_CHECK(run(K::kernel.spec().name, choice.variant, grid.x, &args) == 0, op, ": a kernel failed");
}

template <class K>
bool is_for_instead(const at::Device&) {
  return K::kernel.spec().supports(runtime::made_up.capability);
}

}  // namespace liger::core

#define launch run_instead
#define is_for is_for_instead
#define loads loads_instead
#include "ops/moe/moe_experts_cuda.cpp"
#undef launch
#undef is_for
#undef loads

namespace liger::ops::moe_experts {
namespace {

using Optionals = c10::List<std::optional<Tensor>>;

/// tensors: x, gate_up, down, index, weight, biases and adapters; then d out, if gradients are wanted. Returns the
/// result and the gradients, in the order of the bits of `wanted`.
std::vector<Tensor> experts(
    const Optionals& tensors, int64_t wanted, c10::string_view activation, bool interleaved, bool transposed,
    double limit, double alpha, double up_offset, bool weight_before, double gate_up_scale, double down_scale) {
  std::vector<Tensor> t;
  for (const std::optional<Tensor>& each : tensors) t.push_back(each.value_or(Tensor()));
  const Options options{activation, interleaved,   transposed,    limit,     alpha,
                        up_offset,  weight_before, gate_up_scale, down_scale};
  const Call call{kOp, t[0], t[1], t[2], t[3], t[4], t[5], t[6], {t[7], t[8]}, {t[9], t[10]}, options};
  const auto size = Routing::size(call).expect_int();
  const Tensor routing = at::empty({size}, call.x.options().dtype(at::kInt));
  Saved saved;
  std::vector<Tensor> found{Cuda::forward(call, routing, &saved)};
  auto wants = [&](int gradient) { return bool(wanted >> gradient & 1); };
  const Wanted each{wants(0), wants(1), wants(2), wants(3), wants(4), wants(5), wants(6), wants(7), wants(8), wants(9)};
  auto collect = [&](const auto&... gradients) { ((gradients.defined() ? found.push_back(gradients) : void()), ...); };
  std::apply(collect, Cuda::backward(call, t[11], routing, saved, saved.pre, each).all());
  return found;
}

TORCH_LIBRARY(experts_on_cpu, m) {
  m.def(
      "experts(Tensor?[] tensors, int wanted, str activation, bool interleaved, bool transposed, float limit, "
      "float alpha, float up_offset, bool weight_before, float gate_up_scale, float down_scale) -> Tensor[]",
      experts);
}

}  // namespace
}  // namespace liger::ops::moe_experts

extern "C" __attribute__((visibility("default"))) void run_kernels_by(liger::core::Run run, int capability) {
  liger::core::run = run;
  liger::runtime::made_up.capability = capability;
}
