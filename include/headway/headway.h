// Headway: exact multi-head attention. This header brings in the whole public API.
#pragma once

#include "headway/analysis.h"
#include "headway/attention.h"
#include "headway/cxx20.h"
#include "headway/dtype.h"
#include "headway/error.h"
#include "headway/io.h"
#include "headway/layer.h"
#include "headway/linear.h"
#include "headway/optimizer.h"
#include "headway/plan.h"
#include "headway/printable.h"
#include "headway/tensor.h"
#include "headway/threads.h"
#include "headway/trace.h"
#include "headway/version.h"
#include "headway/view.h"
