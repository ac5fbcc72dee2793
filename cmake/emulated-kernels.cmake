# Compiles kernel files so that they run on the emulator. Hopwell uses this file, and installs it for other projects.

# Options for the translation units with kernels (.cu files compiled as C++). The compiler reports every ordinary memory access
# to the hooks in emu/hooks.cpp, and debug information gives findings their line numbers. The sanitizer's runtime is not linked.
# clang must not merge accesses to neighbouring elements. -O2 makes kernels no faster, because most of their time is spent in
# the hooks, and compiles half as long again.
set(HOPWELL_KERNEL_OPTIONS -fsanitize=thread -g1 -O1 -Wno-psabi)
if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
  list(APPEND HOPWELL_KERNEL_OPTIONS -fno-vectorize -fno-slp-vectorize)
endif()
set(HOPWELL_KERNEL_DEBUG_OPTIONS ${HOPWELL_KERNEL_OPTIONS} -g3 -O0 CACHE INTERNAL "")  # gdb shows a kernel's local variables
if(CMAKE_BUILD_TYPE STREQUAL Debug)
  set(HOPWELL_KERNEL_OPTIONS ${HOPWELL_KERNEL_DEBUG_OPTIONS})
endif()
set(HOPWELL_KERNEL_OPTIONS ${HOPWELL_KERNEL_OPTIONS} CACHE INTERNAL "")

# hopwell_emulated_kernels(<target> [DEBUG] <file>...): adds kernel files (.cu compiled as C++) to a target, for the emulator.
# DEBUG compiles them for gdb, whatever the build type is: without optimisation, with all local variables.
# Each file is compiled through a one-line wrapper file, so that another target can compile the same .cu file as CUDA.
# HOPWELL_TARGET is the namespace of its definitions: emu_sm90 here, sm90 for the GPU. So one library can hold both.
# It comes from the folder's name if that is an architecture's (sm90/name.cu), else from the file's name (sm90.cu).
function(hopwell_emulated_kernels target)
  if(NOT TARGET ${target})
    message(FATAL_ERROR "hopwell_emulated_kernels: the first argument must be a target; got '${target}'")
  endif()
  cmake_parse_arguments(PARSE_ARGV 1 arg "DEBUG" "" "")
  set(options ${HOPWELL_KERNEL_OPTIONS})
  if(arg_DEBUG)
    set(options ${HOPWELL_KERNEL_DEBUG_OPTIONS})
  endif()
  set(sources "")
  foreach(file IN LISTS arg_UNPARSED_ARGUMENTS)
    get_filename_component(path ${file} ABSOLUTE)
    if(NOT EXISTS ${path})
      message(FATAL_ERROR "hopwell_emulated_kernels: no kernel file ${path}")
    endif()
    string(MD5 key ${path})
    get_filename_component(name ${file} NAME_WE)
    if(path MATCHES "/(sm[0-9]+)/[^/]*$")
      set(name ${CMAKE_MATCH_1})
    endif()
    set(wrapper ${CMAKE_CURRENT_BINARY_DIR}/${target}_${name}_${key}.cpp)
    file(CONFIGURE OUTPUT ${wrapper} CONTENT "#include \"${path}\"\n")
    set_source_files_properties(${wrapper} PROPERTIES COMPILE_DEFINITIONS HOPWELL_TARGET=emu_${name})
    list(APPEND sources ${wrapper})
  endforeach()
  add_library(${target}_kernels OBJECT ${sources})
  target_link_libraries(${target}_kernels PRIVATE hopwell::emulator)
  target_include_directories(${target}_kernels PRIVATE $<TARGET_PROPERTY:${target},INCLUDE_DIRECTORIES>)
  target_compile_options(${target}_kernels PRIVATE ${options})
  target_link_libraries(${target} PRIVATE ${target}_kernels hopwell::emulator)
endfunction()
