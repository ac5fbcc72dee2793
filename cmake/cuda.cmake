# The CUDA backends. A kernel file, or its folder, is named after the target that it is compiled for.
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(CMAKE_CUDA_STANDARD 20)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.25.2 does not know that nvcc has this option since 12.0
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
include(${CMAKE_CURRENT_LIST_DIR}/targets.cmake)

# hopwell_join(<variable> <name> <count>): replaces the files in the variable by files that include `count` of them each. nvcc takes
# 7 s of processor time for the headers of a file alone, more than for most files' kernels.
function(hopwell_join variable name count)
  set(joined "")
  list(LENGTH ${variable} length)
  math(EXPR last "${length} - 1")
  foreach(first RANGE 0 ${last} ${count})
    list(SUBLIST ${variable} ${first} ${count} files)
    list(TRANSFORM files PREPEND "#include \"")
    list(TRANSFORM files APPEND "\"")
    list(JOIN files "\n" text)
    set(file ${CMAKE_CURRENT_BINARY_DIR}/joined_${name}_${first}.cu)
    file(CONFIGURE OUTPUT ${file} CONTENT "${text}\n" @ONLY)
    list(APPEND joined ${file})
  endforeach()
  set(${variable} ${joined} PARENT_SCOPE)
endfunction()

foreach(backend IN LISTS HOPWELL_TARGETS)
  set(kernels ${HOPWELL_KERNELS})
  list(FILTER kernels INCLUDE REGEX "/${backend}(/[^/]*)?[.]cu$")
  if(NOT kernels)
    continue()
  endif()
  if(HOPWELL_COMPILE_ONLY)
    hopwell_join(kernels ${backend} 10)
  endif()
  add_library(hopwell_${backend} OBJECT ${kernels})
  set_target_properties(hopwell_${backend} PROPERTIES
    CUDA_ARCHITECTURES "${HOPWELL_ARCHITECTURE_${backend}}" CUDA_VISIBILITY_PRESET hidden)
  target_include_directories(hopwell_${backend} PRIVATE ${HOPWELL_INCLUDES} src)
  target_compile_definitions(hopwell_${backend} PRIVATE HOPWELL_TARGET=${backend})
  target_compile_options(hopwell_${backend} PRIVATE --expt-relaxed-constexpr)
  if(HOPWELL_COMPILE_ONLY AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
    # Nothing runs this machine code. Without optimisation a file takes a quarter of the time, and errors are found; spills are not.
    target_compile_options(hopwell_${backend} PRIVATE --Ofast-compile=max)
  elseif(NOT (HOPWELL_EVERY_GPU AND backend STREQUAL sm80))
    # A kernel that spills or has a stack frame is an error. With HOPWELL_EVERY_GPU sm80.cu is exempt, because the compiler needs a
    # few more registers for later GPUs.
    target_compile_options(hopwell_${backend} PRIVATE -Xptxas=--warn-on-spills,--warn-on-local-memory-usage,-Werror)
  endif()
  target_link_libraries(hopwell_${backend} PRIVATE dlpack::dlpack)
  target_sources(hopwell PRIVATE $<TARGET_OBJECTS:hopwell_${backend}>)
endforeach()
set_source_files_properties(src/runtime/device.cpp PROPERTIES COMPILE_DEFINITIONS HOPWELL_CUDA_MAJOR=${CUDAToolkit_VERSION_MAJOR})
set_target_properties(hopwell PROPERTIES CUDA_ARCHITECTURES OFF)  # the library itself has no device code
target_link_libraries(hopwell PRIVATE CUDA::cudart_static)  # static, so that the library loads on a machine without a driver
