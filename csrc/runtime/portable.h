#pragma once

// Lets libraries built on a new Linux load on an old one (glibc 2.28, libstdc++ of GCC 8). Included before every
// source. If a newer library has a new version of a function, these lines select the old version, which is still there.
// portable.cpp defines functions that have no old version. liger_ops/aot/manylinux.py checks the result.

#include <features.h>

#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver dladdr, dladdr@GLIBC_2.2.5");
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
__asm__(".symver pow, pow@GLIBC_2.2.5");
// std::condition_variable::wait
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
#endif
