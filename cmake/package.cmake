# The files that find_package(hopwell) and pkg-config read. A component is an export file in the same folder.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(HOPWELL_PACKAGE_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/hopwell)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/hopwell-config.cmake.in hopwell-config.cmake
  INSTALL_DESTINATION ${HOPWELL_PACKAGE_DESTINATION})
write_basic_package_version_file(hopwell-config-version.cmake VERSION ${PROJECT_VERSION} COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/hopwell-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/hopwell-config-version.cmake
  DESTINATION ${HOPWELL_PACKAGE_DESTINATION})
# Paths are relative to the file's folder, because an installation may be moved.
file(RELATIVE_PATH HOPWELL_PKGCONFIG_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${CMAKE_CURRENT_LIST_DIR}/hopwell.pc.in hopwell.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/hopwell.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
