// Threads launch every kernel, some for the first time, while main returns and destructors run.

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "runtime/kernel.h"
#include "runtime/launch.h"

using namespace liger::runtime;

int main() {
  static std::atomic<int> launched{0};
  for (int i = 0; i < 8; ++i) {
    std::thread([] {
      for (;;) {
        for (Kernel* kernel : Kernel::all()) {
          std::vector<char> args(kernel->spec().args_bytes);
          const std::string error = launch(*kernel, 0, 0, nullptr, {1, 1, 1}, args.data());
          launched += error.empty();
        }
      }
    }).detach();
  }
  while (launched < 4) std::this_thread::yield();
  return 0;
}
