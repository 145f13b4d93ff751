#pragma once

// Lets libraries built on a new Linux load on an old one (glibc 2.28, libstdc++ of GCC 8). Included before every
// source. If a newer library has a new version of a function, these lines select the old version, which is still there.
// portable.cpp defines functions that have no old version. liger_ops/aot/manylinux.py checks the result.

#include <features.h>

// Per machine: the oldest version of glibc's symbols, and the layout of `struct stat` that its __fxstat takes.
#ifdef __GLIBC__
#if defined(__x86_64__)
#define LIGER_OLDEST_GLIBC "GLIBC_2.2.5"
#define LIGER_STAT_VERSION 1
#elif defined(__aarch64__)
#define LIGER_OLDEST_GLIBC "GLIBC_2.17"
#define LIGER_STAT_VERSION 0
#endif
#endif

#ifdef LIGER_OLDEST_GLIBC
#define LIGER_OLDEST(function) __asm__(".symver " #function ", " #function "@" LIGER_OLDEST_GLIBC)
LIGER_OLDEST(dladdr);
LIGER_OLDEST(dlopen);
LIGER_OLDEST(dlsym);
LIGER_OLDEST(exp);
LIGER_OLDEST(log);
LIGER_OLDEST(pow);
// std::condition_variable::wait
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
#endif
