# How to compile a kernel file so that it runs on the emulator: used here, and installed for everyone else.

# Options for the translation units that contain kernels (.cu files taken as C++): the compiler announces every ordinary
# memory access to the hooks in emu/hooks.cpp, and debug information gives findings their lines. The sanitizer's own
# runtime is not linked. clang must not merge accesses of neighbouring elements. With -O2 kernels run as long, most of it in the
# hooks, and compile half as long again.
set(HOPWELL_KERNEL_OPTIONS -fsanitize=thread -g1 -O1 -Wno-psabi)
if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
  list(APPEND HOPWELL_KERNEL_OPTIONS -fno-vectorize -fno-slp-vectorize)
endif()
set(HOPWELL_KERNEL_OPTIONS ${HOPWELL_KERNEL_OPTIONS} CACHE INTERNAL "")

# hopwell_emulated_kernels(<target> <file>...): adds kernel files (.cu taken as C++) to a target, to be run by the emulator.
# Each is compiled through a one-line file of its own, so that the same .cu can also be a CUDA source of another target. HOPWELL_TARGET,
# here emu_sm90 and there sm90, names the namespace of what it defines: one library holds both.
function(hopwell_emulated_kernels target)
  if(NOT TARGET ${target})
    message(FATAL_ERROR "hopwell_emulated_kernels: the first argument must be a target; got '${target}'")
  endif()
  set(sources "")
  foreach(file IN LISTS ARGN)
    get_filename_component(path ${file} ABSOLUTE)
    if(NOT EXISTS ${path})
      message(FATAL_ERROR "hopwell_emulated_kernels: no kernel file ${path}")
    endif()
    string(MD5 key ${path})
    get_filename_component(name ${file} NAME_WE)
    set(wrapper ${CMAKE_CURRENT_BINARY_DIR}/${target}_${name}_${key}.cpp)
    file(CONFIGURE OUTPUT ${wrapper} CONTENT "#include \"${path}\"\n")
    set_source_files_properties(${wrapper} PROPERTIES COMPILE_DEFINITIONS HOPWELL_TARGET=emu_${name})
    list(APPEND sources ${wrapper})
  endforeach()
  add_library(${target}_kernels OBJECT ${sources})
  target_link_libraries(${target}_kernels PRIVATE hopwell::emulator)
  target_include_directories(${target}_kernels PRIVATE $<TARGET_PROPERTY:${target},INCLUDE_DIRECTORIES>)
  target_compile_options(${target}_kernels PRIVATE ${HOPWELL_KERNEL_OPTIONS})
  target_link_libraries(${target} PRIVATE ${target}_kernels hopwell::emulator)
endfunction()
