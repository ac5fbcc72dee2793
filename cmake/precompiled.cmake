# hopwell_precompile(<target> [<header>...]): compiles these headers and the standard library's once for a target, if
# HOPWELL_PRECOMPILED_HEADERS is on. Hopwell's own headers are not among them, so that a changed header compiles only what includes it.
function(hopwell_precompile target)
  if(HOPWELL_PRECOMPILED_HEADERS)
    target_precompile_headers(${target} PRIVATE ${ARGN} <algorithm> <array> <atomic> <bit> <cmath> <cstddef> <cstdint> <cstdio>
      <cstdlib> <cstring> <functional> <limits> <map> <memory> <numeric> <optional> <span> <stdexcept> <string> <string_view>
      <tuple> <type_traits> <utility> <variant> <vector>)
    # GCC 12 forgets that functions of a precompiled header are the system's, and wrongly warns of inlined ones. ccache needs -fpch-preprocess.
    set(options -fpch-preprocess)
    foreach(warning array-bounds dangling-pointer format-overflow format-truncation free-nonheap-object maybe-uninitialized nonnull
        restrict stringop-overflow stringop-overread stringop-truncation use-after-free)
      list(APPEND options -Wno-${warning})
    endforeach()
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:${options}>")
    if(HOPWELL_SANITIZE)  # gives more of them, so that no warning is an error; through a library, to come after -Werror
      if(NOT TARGET hopwell_no_error)
        add_library(hopwell_no_error INTERFACE)
        target_compile_options(hopwell_no_error INTERFACE -Wno-error)
      endif()
      target_link_libraries(${target} PRIVATE hopwell_no_error)
    endif()
  endif()
endfunction()
