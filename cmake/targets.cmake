# The GPU targets, from the oldest to the newest. Each names a backend, its kernel files src/ops/*/<target>.cu, its instructions in
# src/arch/<target> and its emulated backend emu:<target>. known_backends() in src/runtime/backend.cpp has the same names.
set(HOPWELL_TARGETS sm80 sm90 sm100)

# What nvcc compiles each target for. sm_90a code runs on that chip only, sm_100f code on B200, GB200 and B300 (compute capability
# 10.x). An older compiler has only sm_100a, which does not run on B300.
# 8.6 and 8.9 run the code of 8.0. Later chips than Hopper compile the PTX of 9.0, not of 8.0, because the host launches kernels with a
# programmatic dependency there, and only code for 9.0 waits for the kernel before. Hopper machines may lack a PTX compiler.
set(HOPWELL_ARCHITECTURE_sm80 "80-real;90")
if(HOPWELL_EVERY_GPU)  # 10.3 runs the code of 10.0
  set(HOPWELL_ARCHITECTURE_sm80 "80-real;90;100-real;120-real")
elseif(HOPWELL_COMPILE_ONLY)  # on a machine without a GPU: every kernel is compiled, but once
  set(HOPWELL_ARCHITECTURE_sm80 80)
endif()
set(HOPWELL_ARCHITECTURE_sm90 90a)
set(HOPWELL_ARCHITECTURE_sm100 100f)
if(CMAKE_CUDA_COMPILER AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.9)
  set(HOPWELL_ARCHITECTURE_sm100 100a)
endif()
