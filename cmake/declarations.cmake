# The files that follow from the operators' declarations: headers, entry points, the Python binding, the list of operators. A changed
# declaration configures again, and a generated file that does not change keeps its time.
find_package(Python3 3.9 REQUIRED COMPONENTS Interpreter)
get_filename_component(HOPWELL_ROOT ${CMAKE_CURRENT_LIST_DIR} DIRECTORY)
set(HOPWELL_GENERATED ${CMAKE_CURRENT_BINARY_DIR}/generated)
set(HOPWELL_INCLUDES ${HOPWELL_ROOT}/include ${HOPWELL_GENERATED}/include)
file(GLOB HOPWELL_DECLARATIONS CONFIGURE_DEPENDS ${HOPWELL_ROOT}/src/ops/*/declaration.py ${HOPWELL_ROOT}/scripts/declare/*.py)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${HOPWELL_DECLARATIONS})
# The names of these files say which operators the Python packages have.
file(GLOB HOPWELL_PYTHON_OPERATORS CONFIGURE_DEPENDS ${HOPWELL_ROOT}/python/hopwell/reference/*.py ${HOPWELL_ROOT}/python/hopwell/torch/ops/*.py)
execute_process(COMMAND ${Python3_EXECUTABLE} -B ${HOPWELL_ROOT}/scripts/declare --write ${HOPWELL_GENERATED}
  COMMAND_ERROR_IS_FATAL ANY)
