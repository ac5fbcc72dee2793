// Hopwell, the C++ interface (C++20).
//
//     hopwell::Tensor q(q_data, {s_q, h_q, 576}), ...;
//     hopwell::sparse_mla_forward({.q = q, .kv = kv, .indices = indices, .sm_scale = scale, .out = out, .lse = lse}, stream);
//
// The argument structs, with the meaning, shape and dtype of every field, are in <hopwell/operators.hpp>, which the build
// generates from src/ops/<operator>/declaration.py. Each operator has
//
//   operator(args, stream)           checks all arguments, picks a backend and enqueues; throws hopwell::Error, after bad
//                                    arguments with the outputs untouched
//   operator_workspace_bytes(args)   bytes of scratch that the chosen backend wants in `workspace`; 0 on the CPU
//   explain(args)                    one line a backend: `sm90: chosen`, `sm100: no such device`, `cpu: slower than sm90`
//
// All of them may be called from any thread at the same time, and on the CPU in forked processes. Results do not depend
// on the number of threads.
#ifndef HOPWELL_HOPWELL_HPP_
#define HOPWELL_HOPWELL_HPP_

#include <hopwell/hopwell.h>
#include <hopwell/error.hpp>
#include <hopwell/library.hpp>
#include <hopwell/operators.hpp>
#include <hopwell/tensor.hpp>

#endif  // HOPWELL_HOPWELL_HPP_
