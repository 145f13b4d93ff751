#include "runtime/launch.h"

#include <array>
#include <cstdlib>
#include <cstring>

#include "runtime/device.h"
#include "runtime/driver.h"
#include "runtime/interpreter.h"
#include "runtime/loader.h"

namespace liger::runtime {
namespace {

std::string failed_launch(const Kernel& kernel, uint32_t variant, int device, Grid grid, const std::string& why) {
  auto text = [](auto number) { return std::to_string(number); };
  std::string what = "launch of " + kernel.name_of(variant) + " with grid (" + text(grid.x) + ", " + text(grid.y) +
      ", " + text(grid.z) + ")";
  return failed_on(device, what, why);
}

// True if every launch waits for its kernel.
bool launches_block() {
  const char* value = std::getenv("CUDA_LAUNCH_BLOCKING");
  return value && *value && std::strcmp(value, "0") != 0;
}

}  // namespace

std::string launch(Kernel& kernel, uint32_t variant, int device, void* stream, Grid grid, const void* args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return {};
  const Function* function = nullptr;
  if (__builtin_expect(is_trial(variant), 0)) {
    const Trial* trial = kernel.trial();
    const uint32_t point = variant - kTrialVariant;
    if (trial && point < trial->functions.size()) function = trial->functions[point];
    if (!function)
      return failed_launch(kernel, variant, device, grid, "it was not compiled for this point of its axes");
  } else if (device >= 0 && device < kMaxDevices) {
    function = kernel.loaded(device, variant);
  }
  if (__builtin_expect(!function, 0)) {
    if (const Interpreter* run = interpreter()) {
      const std::string error = (*run)(kernel, variant, grid, args);
      if (!error.empty()) return failed_launch(kernel, variant, device, grid, error);
      kernel.count(Source::Hook, variant);
      return {};
    }
    Failure failure;
    function = load(kernel, variant, device, true, failure);
    if (!function) return failed_launch(kernel, variant, device, grid, failure.why);
  }
  if (const std::string error = ensure_context(device); __builtin_expect(!error.empty(), 0)) {
    return failed_launch(kernel, variant, device, grid, error);
  }
  size_t bytes = kernel.spec().args_bytes;
  void* packed[] = {kCuLaunchBuffer, const_cast<void*>(args), kCuLaunchBufferSize, &bytes, nullptr};
  std::array<void*, kMostPlaced> placed;
  const KernelSpec& spec = kernel.spec();
  for (uint32_t i = 0; i < spec.arguments; ++i) {
    placed[i] = static_cast<char*>(const_cast<void*>(args)) + spec.places[i];
  }
  static const Driver* const driver = Driver::get();
  auto attempt = [&] {
    return driver->cuLaunchKernel(
        function->handle, grid.x, grid.y, grid.z, function->threads, 1, 1, function->shared, stream,
        spec.places ? placed.data() : nullptr, spec.places ? nullptr : packed);
  };
  const Watch* watch = kernel.watch();
  if (__builtin_expect(watch != nullptr, 0)) watch->before();
  CuResult result = attempt();
  if (__builtin_expect(result == kCuInvalidContext, 0)) {
    forget_context();
    const std::string error = ensure_context(device);
    if (!error.empty()) return failed_launch(kernel, variant, device, grid, error);
    result = attempt();
  }
  if (__builtin_expect(result != kCuSuccess, 0)) {
    const std::string call = "cuLaunchKernel (" + std::to_string(function->threads) + " threads)";
    return failed_launch(kernel, variant, device, grid, driver->failure(call.c_str(), result, launches_block()));
  }
  kernel.count(function->source, variant);
  if (__builtin_expect(watch != nullptr, 0)) watch->after();
  return {};
}

}  // namespace liger::runtime
