// The compiled code with the vectors of AVX-512, which are twice as wide. Not with Clang, whose build crashes: probably it takes
// vectors for aligned that begin in the middle of a tensor.

#if defined(__x86_64__) && !defined(__clang__)
#define FEDME_AVX512
#include "compiled.cpp"
#endif
