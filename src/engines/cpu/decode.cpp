// The CPU engine's decode pass. A unit is one chunk of keys of one kv head, or of some that are taken together; a task
// is some consecutive units, enough to pay off. When all are done, each kv head's chunks are merged in a fixed order.
#include "engines/cpu/decode.h"

#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "core/progress.h"
#include "engines/cpu/arguments.h"
#include "engines/cpu/kernels.h"
#include "engines/cpu/scratch.h"
#include "engines/cpu/tasks.h"
#include "headway/threads.h"

namespace headway::cpu {
namespace {

// From this number of keys on the decode kernel was measured to be faster than the panel kernel, by up to 5 times.
constexpr std::int64_t least_keys = 32;

// The chunks of a sequence's keys: for long sequences large enough to stream from memory, for shorter ones smaller, so
// that a single head still occupies several threads; never more than most_chunks, which bounds the partials.
constexpr std::int64_t usual_chunk = 2048;
constexpr std::int64_t least_chunk = 512;
constexpr std::int64_t wanted_chunks = 4;
constexpr std::int64_t most_chunks = 64;

constexpr double together_bytes = 65536;  // of 16 keys of the heads that are taken together
constexpr std::int64_t wanted_units = 4;  // for a thread, so that all end at about the same time

constexpr double flops_per_byte = 10;  // that a core does in the time that it takes to read a byte
constexpr double task_bytes = task_flops / flops_per_byte;

std::int64_t chunk_keys_of(std::int64_t keys) {
  const std::int64_t wanted = ceil_div(ceil_div(keys, wanted_chunks), least_chunk) * least_chunk;
  const std::int64_t needed = ceil_div(ceil_div(keys, most_chunks), usual_chunk) * usual_chunk;
  return std::max(std::min(wanted, usual_chunk), needed);
}

const DecodeKernel& decode_kernel_for(const Problem& problem) {
  const auto storage = static_cast<int>(storage_of(problem.dtype()));
  const Kernels& kernels = chosen_kernels();
  switch (scaled_as(problem.key_dtype())) {
    case ScaledAs::int8: return kernels.scaled_decode[0][storage];
    case ScaledAs::float8: return kernels.scaled_decode[1][storage];
    case ScaledAs::nothing: break;
  }
  return kernels.decode[storage];
}

// Whether a token's rows of the kv heads lie side by side, closer than the rows of two tokens, so that taking a few
// keys of each head in turn reads memory in order.
bool heads_are_inner(const Problem& problem, const ConstTensorView& rows) {
  const std::int64_t from_head = rows.stride(1), from_key = rows.stride(2);
  return rows.stride(3) == 1 && from_head > 0 && from_head * problem.kv_heads <= from_key;
}

// Kv heads and their chunks in a fixed numbering: sequence by sequence, chunk by chunk, set of heads by set of heads.
// Also what they need: partials, one kv head's after the other's, and scratch of a thread.
class Heads {
 public:
  Heads(const Problem& problem, const DecodeKernel& kernel) : problem_(problem) {
    std::int64_t chunks = 0;
    for (std::int64_t b = 0; b < problem.batch; ++b) {
      const Sequence current = sequence(problem, b);
      if (is_decoded(problem, current.query_count, current.key_count)) {
        chunks += ceil_div(current.key_count, chunk_keys_of(current.key_count));
      }
    }
    for (std::int64_t b = 0; b < problem.batch; ++b) {
      const Sequence current = sequence(problem, b);
      if (is_decoded(problem, current.query_count, current.key_count)) {
        add(b, current, chunks, kernel);
      }
    }
  }

  std::int64_t count() const { return static_cast<std::int64_t>(items_.size()) * problem_.kv_heads; }
  std::int64_t units() const { return units_; }
  std::int64_t partial_bytes() const { return partial_bytes_; }
  std::int64_t scratch_bytes() const { return argument_bytes() + kernel_scratch_; }
  const DecodeArgs& first() const { return items_.front().args; }

  struct Unit {
    std::int64_t head, chunk;  // the first head
    int heads;
  };
  Unit unit(std::int64_t index) const {
    const auto after = std::upper_bound(items_.begin(), items_.end(), index,
                                        [](std::int64_t unit, const Item& item) { return unit < item.first_unit; });
    const Item& item = *(after - 1);
    const std::int64_t inside = index - item.first_unit;
    const std::int64_t sets = ceil_div(problem_.kv_heads, item.together);
    const std::int64_t first = inside % sets * item.together;
    return {(after - 1 - items_.begin()) * problem_.kv_heads + first, inside / sets,
            static_cast<int>(std::min<std::int64_t>(item.together, problem_.kv_heads - first))};
  }

  // The n-th of a unit's kv heads with its query heads' arguments, which take the front of a thread's scratch.
  DecodeArgs arguments(const ForwardProblem& problem, std::int64_t index, char* partials, char* scratch,
                       std::int64_t n = 0) const {
    const Item& item = items_[static_cast<std::size_t>(index / problem_.kv_heads)];
    const std::int64_t g = index % problem_.kv_heads + n;
    auto* query_heads = reinterpret_cast<ForwardArgs*>(scratch) + n * item.args.group;
    const Sequence current = sequence(problem, item.b);
    const ForwardArgs shared = forward_args(problem, current, item.b);
    for (std::int64_t h = 0; h < item.args.group; ++h) {
      query_heads[h] = shared;
      set_head(problem, current, item.b, g * item.args.group + h, query_heads[h]);
    }
    DecodeArgs args = item.args;
    args.heads = query_heads;
    args.partials = partials + item.first_partial + g * item.partial_bytes;
    return args;
  }

  // Where a unit's keys begin; null if they lie in pages.
  const void* first_key(const Unit& unit) const {
    if (problem_.pages) {
      return nullptr;
    }
    const Item& item = items_[static_cast<std::size_t>(unit.head / problem_.kv_heads)];
    const std::int64_t first = sequence(problem_, item.b).key_begin + unit.chunk * item.args.chunk_keys;
    return row_address(problem_.key, static_cast<std::int64_t>(size_of(problem_.key_dtype())), item.b,
                       unit.head % problem_.kv_heads, first);
  }

  // Where the kernel's scratch begins: behind the arguments.
  std::int64_t argument_bytes() const {
    return ceil_div(most_together_ * group() * static_cast<std::int64_t>(sizeof(ForwardArgs)), 64) * 64;
  }

 private:
  struct Item {
    std::int64_t b, first_unit, first_partial, partial_bytes;
    int together;     // kv heads of a unit
    DecodeArgs args;  // without data
  };

  std::int64_t group() const { return problem_.heads / problem_.kv_heads; }

  // How many kv heads a unit takes together: enough to read memory in order, and no more, so that what was fetched is
  // still in the cache; fewer where that would leave threads without work. Wider rows than those of 8 bits did not gain
  // from it. No result depends on it.
  int together(std::int64_t queries, std::int64_t chunks, const DecodeKernel& kernel) const {
    if (kernel.run_in_turns == nullptr || problem_.spans || problem_.kv_heads < 2 ||
        !heads_are_inner(problem_, problem_.key) || !heads_are_inner(problem_, problem_.value)) {
      return 1;
    }
    const auto row_bytes =
        static_cast<double>(std::max<std::int64_t>(problem_.head_dim, 1) * size_of(problem_.key_dtype()));
    const auto in_cache = static_cast<std::int64_t>(together_bytes / (16 * row_bytes));
    const std::int64_t units = ceil_div(wanted_units * get_threads(), chunks);
    return static_cast<int>(std::clamp<std::int64_t>(
        std::min({in_cache, most_rows_in_turn / (group() * queries), ceil_div(problem_.kv_heads, units)}), 1,
        most_heads_in_turn));
  }

  void add(std::int64_t b, const Sequence& current, std::int64_t chunks, const DecodeKernel& kernel) {
    ForwardArgs dimensions;
    dimensions.head_dim = problem_.head_dim;
    dimensions.value_dim = problem_.value_dim;
    DecodeArgs args;
    args.heads = &dimensions;
    args.group = group();
    args.queries = current.query_count;
    args.query_storage = storage_of(problem_.dtype());
    args.chunk_keys = chunk_keys_of(current.key_count);
    args.chunks = ceil_div(current.key_count, args.chunk_keys);
    const int heads = together(current.query_count, chunks, kernel);
    most_together_ = std::max(most_together_, heads);
    kernel_scratch_ = std::max(kernel_scratch_, kernel.scratch_bytes(args));
    if (heads > 1) {
      kernel_scratch_ = std::max(kernel_scratch_, heads * kernel.turn_scratch_bytes(args));
    }
    const std::int64_t bytes = kernel.partial_bytes(args);
    args.heads = nullptr;
    items_.push_back({b, units_, partial_bytes_, bytes, heads, args});
    units_ += ceil_div(problem_.kv_heads, heads) * args.chunks;
    partial_bytes_ += problem_.kv_heads * bytes;
  }

  const Problem& problem_;
  std::vector<Item> items_;
  std::int64_t units_ = 0;
  std::int64_t partial_bytes_ = 0;
  std::int64_t kernel_scratch_ = 0;
  int most_together_ = 1;
};

// The work in bytes of keys and values, or the equivalent in time.
double work_of(const Problem& problem) {
  const double group = static_cast<double>(problem.heads) / static_cast<double>(problem.kv_heads);
  const double elements = static_cast<double>(problem.head_dim + problem.value_dim);
  double work = 0;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const Sequence current = sequence(problem, b);
    if (is_decoded(problem, current.query_count, current.key_count)) {
      const double flops = 2 * group * static_cast<double>(current.query_count);
      work += static_cast<double>(problem.kv_heads) * static_cast<double>(current.key_count) * elements *
              std::max(static_cast<double>(size_of(problem.key_dtype())), flops / flops_per_byte);
    }
  }
  return work;
}

int threads_for(double work, std::int64_t units) {
  return work < 2 * task_bytes ? 1 : static_cast<int>(std::clamp<std::int64_t>(units, 1, get_threads()));
}

}  // namespace

bool is_decoded(const Problem& problem, std::int64_t queries, std::int64_t keys) {
  return problem.pass == Pass::forward && problem.heads > 0 && queries > 0 &&
         queries <= decode_kernel_for(problem).most_queries && keys >= least_keys;
}

Decoded decoded_sequences(const Problem& problem) {
  if (!problem.lengths_vary()) {
    const bool decoded = problem.batch > 0 && is_decoded(problem, problem.query_len, problem.key_len);
    return {decoded, decoded};
  }
  Decoded result{false, true};
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const Sequence current = sequence(problem, b);
    const bool decoded = is_decoded(problem, current.query_count, current.key_count);
    result = {result.some || decoded, result.all && decoded};
  }
  return {result.some, result.some && result.all};
}

void describe_decode(const Problem& problem, Plan& plan) {
  const Heads heads(problem, decode_kernel_for(problem));
  plan.query_block = heads.first().rows();
  plan.key_block = heads.first().chunk_keys;
  plan.tasks = heads.units();
  plan.threads = threads_for(work_of(problem), plan.tasks);
  plan.scratch_bytes =
      static_cast<double>(heads.scratch_bytes()) * plan.threads + static_cast<double>(heads.partial_bytes());
  plan.kernel = "few queries, chunks of keys merged by lse";
}

void decode(const ForwardProblem& problem) {
  const DecodeKernel& kernel = decode_kernel_for(problem);
  const Heads heads(problem, kernel);
  const double work = work_of(problem);
  const int threads = threads_for(work, heads.units());
  const std::int64_t group =
      units_in_task(heads.units(), work * flops_per_byte / static_cast<double>(heads.units()), threads);
  const std::int64_t tasks = ceil_div(heads.units(), group);
  CallScratch call_scratch;
  auto* partials = static_cast<char*>(call_scratch.at_least(heads.partial_bytes()));

  SharedProgress progress(problem.operation, problem.progress, problem.weights ? 2 * tasks : tasks);
  const auto each_unit = [&](const auto& run) {
    parallel_for(tasks, threads, [&](std::int64_t task, int worker) {
      TaskScratch task_scratch;
      auto* scratch = static_cast<char*>(task_scratch.at_least(heads.scratch_bytes()));
      DecodeArgs args[most_heads_in_turn];
      std::int64_t head = -1;
      const std::int64_t end = std::min((task + 1) * group, heads.units());
      const std::int64_t foreseen = threads == 1 ? heads.units() : end;
      Heads::Unit next = heads.unit(task * group);
      for (std::int64_t index = task * group; index < end; ++index) {
        const Heads::Unit unit = next;
        for (int n = 0; unit.head != head && n < unit.heads; ++n) {
          args[n] = heads.arguments(problem, unit.head, partials, scratch, n);
        }
        head = unit.head;
        args[0].next_key = nullptr;
        if (index + 1 < foreseen) {
          next = heads.unit(index + 1);
          args[0].next_key = heads.first_key(next);
        }
        run(args, unit.heads, unit.chunk, scratch + heads.argument_bytes());
      }
      progress.task_done(worker);
    });
  };
  each_unit([&](const DecodeArgs* args, int count, std::int64_t chunk, void* scratch) {
    count == 1 ? kernel.run(args[0], chunk, scratch) : kernel.run_in_turns(args, count, chunk, scratch);
  });
  const std::int64_t mergers = std::min<std::int64_t>(heads.count(), threads);
  parallel_for(mergers, threads, [&](std::int64_t task, int) {
    TaskScratch task_scratch;
    auto* scratch = static_cast<char*>(task_scratch.at_least(heads.argument_bytes()));
    for (std::int64_t head = task; head < heads.count(); head += mergers) {
      kernel.finish(heads.arguments(problem, head, partials, scratch));
    }
  });
  if (problem.weights) {
    each_unit([&](const DecodeArgs* args, int count, std::int64_t chunk, void* scratch) {
      for (int n = 0; n < count; ++n) {
        kernel.run_weights(args[n], chunk, scratch);
      }
    });
  }
  progress.finish();
}

}  // namespace headway::cpu
