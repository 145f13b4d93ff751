// Linked into every shared library. The symbols are hidden, so only that library uses them.

#include <sys/stat.h>

#include <new>

#include "runtime/portable.h"

#define LIGER_PRIVATE __attribute__((visibility("hidden")))

#ifdef LIGER_OLDEST_GLIBC
// libstdc++ reads this to decide whether to count shared_ptr references without atomics. glibc before 2.32 does not
// define it. Zero is always safe: there may be other threads.
extern "C" {
LIGER_PRIVATE char __libc_single_threaded = 0;
}

#if __GLIBC_PREREQ(2, 33)
// glibc before 2.33 has no symbols for these functions. Its <sys/stat.h> implements them by the calls below.
extern "C" int __fxstat(int version, int file, struct stat* info);
extern "C" int __lxstat(int version, const char* path, struct stat* info);
extern "C" LIGER_PRIVATE int fstat(int file, struct stat* info) noexcept {
  return __fxstat(LIGER_STAT_VERSION, file, info);
}
extern "C" LIGER_PRIVATE int lstat(const char* path, struct stat* info) noexcept {
  return __lxstat(LIGER_STAT_VERSION, path, info);
}
#endif

// libstdc++ has this function since GCC 11.
namespace std {
[[noreturn]] LIGER_PRIVATE void __throw_bad_array_new_length() { throw std::bad_array_new_length(); }
}  // namespace std
#endif
