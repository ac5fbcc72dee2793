// Marks a function whose loops profit from wide vectors. One binary runs on any x86-64 and uses the widest vectors
// available.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HOPWELL_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2,fma", "default")))
#else
#define HOPWELL_VECTOR_CLONES
#endif
