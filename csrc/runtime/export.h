#pragma once

#define LIGER_RUNTIME_API __attribute__((visibility("default")))
