# The CUDA backends. A kernel file, or its folder, is named after the architecture that it is compiled for. sm_90a code runs on that chip only,
# sm_100f code on B200, GB200 and B300 (compute capability 10.x). An older compiler has only sm_100a, which does not run on B300.
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(CMAKE_CUDA_STANDARD 20)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.25.2 does not know that nvcc has this option since 12.0
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(HOPWELL_ARCHITECTURE_sm80 "80;90-real")  # 80: also PTX for later chips. Hopper machines may lack a PTX compiler
if(HOPWELL_EVERY_GPU)  # 8.6 and 8.9 run the code of 8.0; 10.3 runs the code of 10.0
  set(HOPWELL_ARCHITECTURE_sm80 "80;90-real;100-real;120-real")
endif()
set(HOPWELL_ARCHITECTURE_sm90 90a)
set(HOPWELL_ARCHITECTURE_sm100 100f)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.9)
  set(HOPWELL_ARCHITECTURE_sm100 100a)
endif()
foreach(backend sm80 sm90 sm100)
  set(kernels ${HOPWELL_KERNELS})
  list(FILTER kernels INCLUDE REGEX "/${backend}(/[^/]*)?[.]cu$")
  if(NOT kernels)
    continue()
  endif()
  add_library(hopwell_${backend} OBJECT ${kernels})
  set_target_properties(hopwell_${backend} PROPERTIES
    CUDA_ARCHITECTURES "${HOPWELL_ARCHITECTURE_${backend}}" CUDA_VISIBILITY_PRESET hidden)
  target_include_directories(hopwell_${backend} PRIVATE include src)
  target_compile_definitions(hopwell_${backend} PRIVATE HOPWELL_TARGET=${backend})
  target_compile_options(hopwell_${backend} PRIVATE --expt-relaxed-constexpr)
  # A kernel that spills or has a stack frame is an error. With HOPWELL_EVERY_GPU sm80.cu is exempt, because the compiler needs a
  # few more registers for later GPUs.
  if(NOT (HOPWELL_EVERY_GPU AND backend STREQUAL sm80))
    target_compile_options(hopwell_${backend} PRIVATE -Xptxas=--warn-on-spills,--warn-on-local-memory-usage,-Werror)
  endif()
  target_link_libraries(hopwell_${backend} PRIVATE dlpack::dlpack)
  target_sources(hopwell PRIVATE $<TARGET_OBJECTS:hopwell_${backend}>)
endforeach()
set_source_files_properties(src/runtime/device.cpp PROPERTIES COMPILE_DEFINITIONS HOPWELL_CUDA_MAJOR=${CUDAToolkit_VERSION_MAJOR})
set_target_properties(hopwell PROPERTIES CUDA_ARCHITECTURES OFF)  # the library itself has no device code
target_link_libraries(hopwell PRIVATE CUDA::cudart_static)  # static, so that the library loads on a machine without a driver
