// Every public header comes here first: an older language level ends with one error, not with one for each line.
#pragma once

#if __cplusplus < 202002L
#error "Headway needs C++20: compile with -std=c++20"
#include "headway/ends_here"  // there is no such file, and a missing file is what ends a compilation at once
#endif
