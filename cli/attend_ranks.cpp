// headway attend as one rank of an MPI job: each rank reads its rows of the .npy files and writes its rows of the
// results.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <iostream>
#include <mutex>
#include <thread>

#include "arguments.h"
#include "attend.h"
#include "headway/mpi.h"
#include "headway/printable.h"
#include "interrupt.h"
#include "text.h"

namespace headway::cli {
namespace {

namespace fs = std::filesystem;
using distributed::Rows;
using distributed::Shard;
using distributed::Sharding;

// Ends this process, and with it the job, when a call of MPI has waited too long for other ranks: such calls have no
// time limit of their own.
class TimeLimit {
 public:
  TimeLimit(const char* call, std::chrono::milliseconds limit)
      : waiter_([this, call, limit] {
          std::unique_lock lock(mutex_);
          if (!returned_.wait_for(lock, limit, [this] { return has_returned_; })) {
            std::cerr << text("headway attend: ", call, " has not returned for ",
                              static_cast<double>(limit.count()) / 1000, " s: another rank has ended or is stopped")
                      << std::endl;
            ::_exit(static_cast<int>(ExitCode::failure));
          }
        }) {}
  ~TimeLimit() {
    {
      const std::lock_guard lock(mutex_);
      has_returned_ = true;
    }
    returned_.notify_one();
    waiter_.join();
  }
  TimeLimit(const TimeLimit&) = delete;
  TimeLimit& operator=(const TimeLimit&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable returned_;
  bool has_returned_ = false;
  std::thread waiter_;  // the last member: it uses the others
};

// Between MPI_Init and MPI_Finalize. Ranks agree on what goes wrong, so that they all leave this scope in the same way;
// a rank that alone fails ends the job.
class MpiJob {
 public:
  explicit MpiJob(std::chrono::milliseconds timeout) : timeout_(timeout) {
    const TimeLimit limit("MPI_Init", timeout_);
    MPI_Init(nullptr, nullptr);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  }
  ~MpiJob() {
    const TimeLimit limit("MPI_Finalize", timeout_);
    MPI_Finalize();
  }
  MpiJob(const MpiJob&) = delete;
  MpiJob& operator=(const MpiJob&) = delete;

 private:
  std::chrono::milliseconds timeout_;
};

// The work of a phase on every rank: the first rank's error becomes the error of all.
class Phases {
 public:
  explicit Phases(distributed::Transport& transport) : transport_(transport) {}

  template <class Work>
  void run(const Work& work) {
    std::string error;
    try {
      work();
    } catch (const UsageError& found) {
      error = text("u", found.what());
    } catch (const InvalidArgument& found) {
      error = text("u", without_operation(found.what()));
    } catch (const TypeMismatch& found) {
      error = text("u", without_operation(found.what()));
    } catch (const Error& found) {
      error = text("f", without_operation(found.what()));
    } catch (const std::exception& found) {
      error = text("f", found.what());
    }
    const std::vector<std::string> errors = transport_.all_gather(error);
    for (const std::string& first : errors) {
      if (!first.empty() && first[0] == 'u') {
        throw UsageError(first.substr(1));
      }
      if (!first.empty()) {
        throw Failure(first.substr(1));
      }
    }
  }

 private:
  distributed::Transport& transport_;
};

fs::path npy_path(const std::string& name) {
  const std::optional<TensorName> parsed = parse_tensor_name(name);
  if (!parsed || parsed->format != Format::npy) {
    throw UsageError(text("on several ranks expected .npy files, which each rank reads by its rows, found ", name));
  }
  return parsed->path;
}

// An error text about a temporary file, with the name that the file was to get.
std::string with_name(const std::string& error, const fs::path& temporary, const std::string& name) {
  std::string text(without_operation(error));
  const std::size_t at = text.find(temporary.native());
  return at == std::string::npos ? text : text.replace(at, temporary.native().size(), name);
}

Tensor read_rows(const fs::path& path, int axis, const Shard& shard) {
  Dims sizes = npy_shape(path).sizes;
  sizes[axis] = count(shard);
  Tensor result = Tensor::uninitialized(sizes, npy_shape(path).dtype);
  std::int64_t at = 0;
  for (const Rows& rows : shard) {
    const Tensor part = load_npy_slice(path, axis, rows.begin, rows.end);
    copy(part, result.view().slice(axis, at, at + rows.count()));
    at += rows.count();
  }
  return result;
}

class RankOfAttend {
 public:
  RankOfAttend(const AttentionCallArguments& arguments, const OutputFiles& outputs, distributed::Transport& transport)
      : arguments_(arguments), outputs_(outputs), transport_(transport), phases_(transport) {}
  RankOfAttend(const RankOfAttend&) = delete;
  RankOfAttend& operator=(const RankOfAttend&) = delete;
  ~RankOfAttend() {
    std::error_code ignored;
    for (const fs::path& file : temporary_) {
      fs::remove(file, ignored);
    }
  }

  void run() {
    phases_.run([&] { read(); });
    AttendResults results(call_, outputs_);
    call_.options.progress = [](double) { return interrupted_by() == 0; };
    const auto start = std::chrono::steady_clock::now();
    results.compute([&](TensorView out, const AttentionOutputs& wanted) {
      const distributed::Options options{.attention = call_.options, .sharding = sharding_};
      distributed::attention(call_.query, call_.key, call_.value, out, transport_, options, wanted);
    });
    const auto elapsed = std::chrono::steady_clock::now() - start;
    write(results.views());
    if (is_first()) {
      summarize(duration_text(elapsed));
    }
  }

 private:
  bool is_first() const { return transport_.rank() == 0; }
  // The last axis but one of the user's arrays, with --heads too.
  static int row_axis(const Dims& sizes) { return sizes.size() - 2; }

  void read() {
    outputs_.check(arguments_.texts());
    const std::vector<std::string> files = arguments_.files();
    const Dims query = npy_shape(npy_path(files[0])).sizes, key = npy_shape(npy_path(files[1])).sizes;
    if (query.size() < 2 || key.size() < 2) {
      throw UsageError(text("expected arrays with 2 to 4 axes, found shapes ", query, " and ", key));
    }
    queries_ = query[row_axis(query)];
    const std::int64_t keys = key[row_axis(key)];
    // Rows in one piece, unless a causal mask would leave the first ranks idle.
    sharding_ = arguments_.attention().is_causal() ? distributed::zigzag(queries_, keys, transport_.ranks())
                                                   : distributed::contiguous(queries_, keys, transport_.ranks());
    for (const OutputFiles::Wanted& file : outputs_.wanted()) {
      npy_path(file.path);
    }
    const auto rank = static_cast<std::size_t>(transport_.rank());
    const auto reader = [&](const Shard& shard, std::int64_t length) {
      return [this, &shard, length](const std::string& name) -> ConstTensorView {
        const fs::path path = npy_path(name);
        const Dims sizes = npy_shape(path).sizes;
        const int axis = row_axis(sizes);
        if (axis < 0 || sizes[axis] != length) {
          throw UsageError(text(name, " has shape ", sizes, ", expected ", length, " rows in the last axis but one"));
        }
        return kept_.emplace_back(read_rows(path, axis, shard));
      };
    };
    const auto matrix = [&](const std::string& name) { return read_matrix(name, rank); };
    call_ = arguments_.load(inputs_,
                            {reader(sharding_.queries[rank], queries_), reader(sharding_.keys[rank], keys), matrix});
    outputs_.check_type(call_.query.dtype());
  }

  // This rank's rows of a mask or bias, and all of one that repeats over queries; spans are whole on every rank.
  ConstTensorView read_matrix(const std::string& name, std::size_t rank) {
    const fs::path path = npy_path(name);
    const NpyShape shape = npy_shape(path);
    const int axis = shape.sizes.size() - 2;
    const bool has_rows = axis >= 0 && shape.sizes[axis] == queries_ && queries_ > 1 && !is_integer(shape.dtype);
    return has_rows ? kept_.emplace_back(read_rows(path, axis, sharding_.queries[rank])).view() : inputs_.load(name);
  }

  void write(const NamedViews& views) {
    const std::vector<OutputFiles::Wanted> wanted = outputs_.wanted();
    const WriteOptions options{.overwrite = outputs_.replaces()};
    std::vector<NpyShape> shapes;
    for (const OutputFiles::Wanted& file : wanted) {
      const ConstTensorView view = views.at(file.name);
      shapes.push_back({view.dtype(), view.sizes()});
      shapes.back().sizes[result_axis(file.name, view)] = queries_;
      whole_.push_back(shapes.back());
    }
    finish_files_when_interrupted();
    std::string names;
    phases_.run([&] {
      throw_if_interrupted();
      for (std::size_t n = 0; is_first() && n < wanted.size(); ++n) {
        temporary_.push_back(begin_npy(wanted[n].path, shapes[n], options));
        names += text(temporary_.back().native(), "\n");
      }
    });
    share_names(names);
    phases_.run([&] {
      for (std::size_t n = 0; n < wanted.size(); ++n) {
        const ConstTensorView view = views.at(wanted[n].name);
        try {
          write_rows(temporary_[n], result_axis(wanted[n].name, view), view);
        } catch (const FileError& error) {
          throw Failure(with_name(error.what(), temporary_[n], wanted[n].path));
        }
      }
    });
    phases_.run([&] {
      for (std::size_t n = 0; is_first() && n < wanted.size(); ++n) {
        commit_npy(temporary_[n], wanted[n].path, options);
      }
    });
    temporary_.clear();
  }

  static int result_axis(const std::string& name, const ConstTensorView& view) {
    return name == "lse" ? view.rank() - 1 : view.rank() - 2;
  }

  // The first rank's names, on every rank.
  void share_names(const std::string& names) {
    const std::string first = transport_.all_gather(names).front();
    temporary_.clear();
    for (std::size_t at = 0; at < first.size();) {
      const std::size_t end = first.find('\n', at);
      temporary_.emplace_back(first.substr(at, end - at));
      at = end + 1;
    }
  }

  void write_rows(const fs::path& file, int axis, ConstTensorView view) const {
    std::int64_t at = 0;
    for (const Rows& rows : sharding_.queries[static_cast<std::size_t>(transport_.rank())]) {
      write_npy_slice(file, axis, rows.begin, view.slice(axis, at, at + rows.count()));
      at += rows.count();
    }
  }

  void summarize(const std::string& elapsed) const {
    const std::vector<OutputFiles::Wanted> wanted = outputs_.wanted();
    for (std::size_t n = 0; n < wanted.size(); ++n) {
      std::cout << text(printable(wanted[n].path), "  ", whole_[n].sizes, " ", whole_[n].dtype,
                        n == 0 ? text("  ", transport_.ranks(), " ranks  ", elapsed) : "", "\n");
    }
  }

  const AttentionCallArguments& arguments_;
  const OutputFiles& outputs_;
  distributed::Transport& transport_;
  Phases phases_;
  TensorInputs inputs_;
  std::deque<Tensor> kept_;
  AttentionCall call_;
  Sharding sharding_;
  std::int64_t queries_ = 0;
  std::vector<NpyShape> whole_;      // of the results
  std::vector<fs::path> temporary_;  // files that are not committed yet
};

}  // namespace

bool started_on_ranks() { return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr || std::getenv("PMI_SIZE") != nullptr; }

void attend_on_ranks(const AttentionCallArguments& arguments, const OutputFiles& outputs,
                     std::chrono::milliseconds timeout) {
  const MpiJob job(timeout);
  distributed::MpiTransport transport(MPI_COMM_WORLD, timeout);
  // Of all ranks alike: the first one says it, before any of them leaves the job. mpirun ends the ranks that still run
  // as soon as one exits with an error.
  const auto fail = [&](std::string_view error, ExitCode code) {
    if (transport.rank() == 0) {
      std::cerr << printable(text("headway attend: ", error)) << std::endl;
    }
    throw AlreadyReported(code);
  };
  try {
    RankOfAttend(arguments, outputs, transport).run();
  } catch (const UsageError& error) {
    fail(error.what(), ExitCode::usage);
  } catch (const Failure& error) {
    fail(error.what(), ExitCode::failure);
  } catch (const InvalidArgument& error) {
    fail(without_operation(error.what()), ExitCode::usage);
  } catch (const TypeMismatch& error) {
    fail(without_operation(error.what()), ExitCode::usage);
  } catch (const Unsupported& error) {
    fail(without_operation(error.what()), ExitCode::failure);
  } catch (const Cancelled&) {
    // A signal mostly comes to all ranks: mpirun ends the others, within a second or two, while they are still silent.
    std::this_thread::sleep_for(std::chrono::seconds(3) * std::min(transport.rank(), 3));
    std::cerr << "headway attend: interrupted" << std::endl;
    MPI_Abort(MPI_COMM_WORLD, static_cast<int>(ExitCode::failure));
  } catch (const std::exception& error) {  // of this rank alone, while others wait for it
    std::cerr << printable(text("headway attend: rank ", transport.rank(), ": ", without_operation(error.what())))
              << std::endl;
    MPI_Abort(MPI_COMM_WORLD, static_cast<int>(ExitCode::failure));
  }
}

}  // namespace headway::cli
