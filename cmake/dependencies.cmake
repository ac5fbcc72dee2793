# What the library builds with. `make setup` installs all of it; on Debian the packages are those of packages.txt.
find_package(Threads REQUIRED)
find_package(dlpack REQUIRED)

# OpenBLAS in its OpenMP build, statically and private to the library. The one without threads may not be called by several
# threads at a time, and the other one starts threads when it is loaded. OpenMP is here for it alone (src/tile/cpu/gemm.cpp).
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_library(HOPWELL_OPENBLAS NAMES libopenblas.a openblas PATH_SUFFIXES openblas-openmp REQUIRED)
find_path(HOPWELL_OPENBLAS_INCLUDE cblas.h PATH_SUFFIXES x86_64-linux-gnu/openblas-openmp aarch64-linux-gnu/openblas-openmp openblas
  REQUIRED)
add_library(hopwell_blas INTERFACE)
target_link_libraries(hopwell_blas INTERFACE ${HOPWELL_OPENBLAS} OpenMP::OpenMP_CXX)
target_include_directories(hopwell_blas SYSTEM INTERFACE ${HOPWELL_OPENBLAS_INCLUDE})

# Highway: its headers only. Debian has its library as a shared one, which every user would need; the two functions that the headers
# call are in src/tile/cpu/targets.cpp.
find_path(HOPWELL_HWY_INCLUDE hwy/highway.h REQUIRED)
add_library(hwy INTERFACE)
target_include_directories(hwy SYSTEM INTERFACE ${HOPWELL_HWY_INCLUDE})
