// Counts allocations and locks in the first launch and in later ones, by replacing malloc and pthread_mutex_lock.

#include <dlfcn.h>
#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "runtime/kernel.h"
#include "runtime/launch.h"

extern "C" void* __libc_malloc(size_t);
extern "C" void* __libc_calloc(size_t, size_t);
extern "C" void* __libc_realloc(void*, size_t);

namespace {
bool counting = false;
long allocations = 0, locks = 0;
}  // namespace

extern "C" void* malloc(size_t size) {
  allocations += counting;
  return __libc_malloc(size);
}
extern "C" void* calloc(size_t count, size_t size) {
  allocations += counting;
  return __libc_calloc(count, size);
}
extern "C" void* realloc(void* block, size_t size) {
  allocations += counting;
  return __libc_realloc(block, size);
}
extern "C" int pthread_mutex_lock(pthread_mutex_t* mutex) {
  static const auto real = reinterpret_cast<int (*)(pthread_mutex_t*)>(dlsym(RTLD_NEXT, "pthread_mutex_lock"));
  locks += counting;
  return real(mutex);
}

using namespace liger::runtime;

int main(int, char** argv) {
  Kernel* kernel = Kernel::find(argv[1]);
  if (!kernel) return 2;
  std::vector<char> args(kernel->spec().args_bytes);
  auto launch_once = [&] { return launch(*kernel, 0, 0, nullptr, {1, 1, 1}, args.data()); };

  counting = true;
  std::string error = launch_once();
  counting = false;
  std::printf("%ld %ld ", allocations, locks);
  if (!error.empty()) return std::puts(error.c_str()), 1;
  // The stub's record allocates memory.
  reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "stub_record_launches"))(0);

  allocations = locks = 0;
  counting = true;
  for (int i = 0; i < 10000; ++i) error += launch_once();
  counting = false;
  std::printf("%ld %ld\n", allocations, locks);
  return !error.empty();
}
