// The examples of the C++ reference: each function example_NAME is the example of NAME on its header's page. The
// comment after a line that prints is what it prints, and a test compares the two.
#pragma once

#include <headway/headway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <map>
#include <string>
#include <vector>

// Those of one header, called in the order in which they stand in its file.
void analysis_examples();
void attention_examples();
void cache_examples();
void distributed_examples();
void dtype_examples();
void error_examples();
void io_examples();
void layer_examples();
void linear_examples();
void masks_examples();
void optimizer_examples();
void plan_examples();
void printable_examples();
void rope_examples();
void serving_examples();
void tensor_examples();
void threads_examples();
void trace_examples();
void view_examples();
