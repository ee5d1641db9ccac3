// The score matrix, and the weights that a forward pass was asked for.
#pragma once

#include <optional>

#include "core/problem.h"
#include "engines/cuda/arguments.h"
#include "engines/cuda/kernel_choice.h"
#include "engines/cuda/kernels/analysis_kernels.h"
#include "engines/cuda/kernels/mean_weights_kernels.h"

namespace headway::cuda {

// Reasons go to `passed`, unless null.
Launch choose_scores(const Problem& problem, PassedKernels* passed = nullptr);

// The kernels that walk over scores without storing them.
Launch choose_analysis(const Problem& problem, const AnalysisArguments& arguments);
// One for simple tiles alone, where a call has some and tensor cores take it; choose_analysis then walks over the
// others.
std::optional<Launch> choose_simple_analysis(const Problem& problem, const AnalysisArguments& arguments);
Launch choose_mean_weights(const Problem& problem, MeanWeightsArguments& arguments);

void describe_scores(const Problem& problem, const Launch& launch, Plan& plan);
void scores(const ScoresProblem& problem, const Launch& launch);

// For arguments whose lengths are in place already.
void queue_scores(const Problem& problem, const Arguments& arguments, const TensorView& matrix, headway::Stage stage);

}  // namespace headway::cuda
