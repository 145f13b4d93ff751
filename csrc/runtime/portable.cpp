// Linked into every shared library, and seen by none but that one.

#include <sys/stat.h>

#include <new>

#define LIGER_PRIVATE __attribute__((visibility("hidden")))

#if defined(__x86_64__) && defined(__GLIBC__)
// libstdc++ asks this before it counts a shared_ptr without atomics. Zero, which glibc before 2.32 cannot deny:
// there may be other threads.
extern "C" {
LIGER_PRIVATE char __libc_single_threaded = 0;
}

#if __GLIBC_PREREQ(2, 33)
// Before 2.33, <sys/stat.h> made these calls of them.
extern "C" int __fxstat(int version, int file, struct stat* info);
extern "C" int __lxstat(int version, const char* path, struct stat* info);
extern "C" LIGER_PRIVATE int fstat(int file, struct stat* info) noexcept { return __fxstat(1, file, info); }
extern "C" LIGER_PRIVATE int lstat(const char* path, struct stat* info) noexcept { return __lxstat(1, path, info); }
#endif

// Since GCC 11.
namespace std {
[[noreturn]] LIGER_PRIVATE void __throw_bad_array_new_length() { throw std::bad_array_new_length(); }
}  // namespace std
#endif
