# find_package(liger_ops) defines the target liger_ops::liger_ops. Programs that link it can use torch.ops.liger.*.
# The package has one operator library per torch minor version, and find_package(Torch) decides which one is used.
# -Dliger_ops_LIBRARY=PATH selects a library that `python -m liger_ops build` made.

include(CMakeFindDependencyMacro)
find_dependency(Torch)

get_filename_component(liger_ops_ROOT_DIR "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" liger_ops_TORCH "${Torch_VERSION}")
if(NOT liger_ops_LIBRARY)
  set(liger_ops_LIBRARY "${liger_ops_ROOT_DIR}/lib/libliger_ops_torch${liger_ops_TORCH}.so")
endif()

if(NOT EXISTS "${liger_ops_LIBRARY}")
  file(GLOB liger_ops_PRESENT RELATIVE "${liger_ops_ROOT_DIR}/lib" "${liger_ops_ROOT_DIR}/lib/libliger_ops_torch*.so")
  string(REPLACE ";" ", " liger_ops_PRESENT "${liger_ops_PRESENT}")
  set(liger_ops_FOUND FALSE)
  set(liger_ops_NOT_FOUND_MESSAGE
      "liger_ops: no operator library fits torch ${Torch_VERSION}; ${liger_ops_ROOT_DIR}/lib has: ${liger_ops_PRESENT}")
  return()
endif()

if(NOT TARGET liger_ops::liger_ops)
  add_library(liger_ops::liger_ops SHARED IMPORTED)
  set_target_properties(
    liger_ops::liger_ops
    PROPERTIES IMPORTED_LOCATION "${liger_ops_LIBRARY}"
               IMPORTED_LINK_DEPENDENT_LIBRARIES "${liger_ops_ROOT_DIR}/lib/libliger_runtime.so"
               INTERFACE_INCLUDE_DIRECTORIES "${liger_ops_ROOT_DIR}/include"
               INTERFACE_LINK_LIBRARIES "${TORCH_LIBRARIES}"
               # A program that uses the operators only through a saved model names no symbol of the library. The linker
               # would then drop it.
               INTERFACE_LINK_OPTIONS "LINKER:--no-as-needed")
  # Before 2.14, torch's target does not export the C++ standard that its headers need.
  get_target_property(liger_ops_STANDARD torch CXX_STANDARD)
  if(liger_ops_STANDARD)
    set_target_properties(
      liger_ops::liger_ops PROPERTIES INTERFACE_COMPILE_FEATURES "cxx_std_${liger_ops_STANDARD}")
  endif()
endif()
