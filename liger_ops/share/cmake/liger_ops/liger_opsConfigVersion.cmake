file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../../../_version.py" PACKAGE_VERSION REGEX "__version__")
string(REGEX REPLACE ".*\"(.*)\".*" "\\1" PACKAGE_VERSION "${PACKAGE_VERSION}")

# Minor versions may break compatibility before 1.0, and only major versions afterwards.
set(PACKAGE_VERSION_COMPATIBLE FALSE)
if(NOT PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION)
  string(REGEX MATCH "^(0\\.[0-9]+|[1-9][0-9]*)" liger_ops_series "${PACKAGE_VERSION}")
  if("${PACKAGE_FIND_VERSION}." MATCHES "^${liger_ops_series}\\.")
    set(PACKAGE_VERSION_COMPATIBLE TRUE)
  endif()
endif()
if(PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
