// What `headway attend` computes, in one process or as one rank of several.
#pragma once

#include <chrono>
#include <functional>
#include <optional>

#include "attention_call.h"
#include "output_files.h"

namespace headway::cli {

// The memory of the results. With --heads out is (B,Sq,N*Dv) and attention writes into a view of it.
class AttendResults {
 public:
  AttendResults(const AttentionCall& call, const OutputFiles& wanted);

  using Compute = std::function<void(TensorView out, const AttentionOutputs& outputs)>;
  void compute(const Compute& attention);

  // With the axes that the user's arrays have.
  NamedViews views() const;

 private:
  const AttentionCall& call_;
  Tensor out_;
  std::optional<Tensor> weights_, lse_;
};

// Whether this process was started by mpirun or the like; and the command as one rank of several, each of which reads
// and writes its rows. A rank that does not answer for `timeout` ends the job.
bool started_on_ranks();
void attend_on_ranks(const AttentionCallArguments& arguments, const OutputFiles& outputs,
                     std::chrono::milliseconds timeout);

}  // namespace headway::cli
