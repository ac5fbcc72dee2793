# What the library builds with. `make setup` installs all of it; on Debian the packages are those of packages.txt.
find_package(Threads REQUIRED)
find_package(dlpack REQUIRED)

# Highway: its headers only. Debian has its library as a shared one, which every user would need; the two functions that the headers
# call are in src/tile/cpu/targets.cpp.
find_path(HOPWELL_HWY_INCLUDE hwy/highway.h REQUIRED)
add_library(hwy INTERFACE)
target_include_directories(hwy SYSTEM INTERFACE ${HOPWELL_HWY_INCLUDE})
