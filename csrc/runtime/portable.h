#pragma once

// Keeps what is built on a new Linux loadable on an old one (glibc 2.28, libstdc++ of GCC 8). Included ahead of every
// source: where a newer library has a new version of a function, the old one, which is still there, is asked for.
// What never had an old version is defined in portable.cpp. liger_ops/aot/manylinux.py checks the result.

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
