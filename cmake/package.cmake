# What find_package(hopwell) reads: its components are the export files that lie beside it.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(HOPWELL_PACKAGE_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/hopwell)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/hopwell-config.cmake.in hopwell-config.cmake
  INSTALL_DESTINATION ${HOPWELL_PACKAGE_DESTINATION})
write_basic_package_version_file(hopwell-config-version.cmake VERSION ${PROJECT_VERSION} COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/hopwell-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/hopwell-config-version.cmake
  DESTINATION ${HOPWELL_PACKAGE_DESTINATION})
