// The CPU engine's backward pass. kernel/backward_args.h says which tasks there are and what each may read; here they
// are numbered and run. If the keys of a sequence make one chunk, one task does a whole kv head in the thread's own
// scratch. Longer sequences run phase by phase on all threads, with the lse, delta and dQ partials of their rows in
// memory of the call. A sequence's bits are the same either way. Where many query rows share a kv head, their heads are
// shared out to several tasks, so that few kv heads occupy many threads.
#include "engines/cpu/backward.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/elements.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "engines/cpu/arguments.h"
#include "engines/cpu/kernels.h"
#include "engines/cpu/scratch.h"
#include "engines/cpu/tasks.h"
#include "headway/threads.h"

namespace headway::cpu {
namespace {

constexpr std::int64_t row_numbers = 3;      // that are prepared for a row: its reference, lse and delta
constexpr std::int64_t prepared_rows = 256;  // rows of one partial sum of a sink's gradient, and of a task

constexpr std::int64_t tasks_of_kv_head = 16;  // that its heads are shared out to, with its chunks of keys
constexpr double part_flops = 2.5e8;           // of a task: some milliseconds of one core
constexpr double part_pairs = 2048;            // of each key, beside which its parts of dk and dv cost little

// How many parts of dk and dv each chunk of a kv head's keys has. Bits depend on them, so they follow from what is the
// sequence's own; `pairs` of queries and keys are those of a head. They take no more memory than dq's partials.
int head_parts(const BackwardArgs& shape, int chunks, double pairs) {
  const double keys = static_cast<double>(std::max<std::int64_t>(shape.ranges.keys, 1));
  const double group = static_cast<double>(shape.head_count);
  const double flops = 5 * group * pairs * static_cast<double>(shape.head_dim + shape.value_dim);
  const double most =
      std::min({group, static_cast<double>(ceil_div(tasks_of_kv_head, chunks)), flops / (chunks * part_flops),
                group * pairs / keys / part_pairs, group * static_cast<double>(shape.queries) / keys});
  return std::max(1, static_cast<int>(most));
}

const BackwardKernel& backward_kernel_for(const Problem& problem) {
  return chosen_kernels().backward[static_cast<int>(storage_of(problem.dtype()))];
}

class BackwardRun {
 public:
  BackwardRun(const BackwardProblem& problem, const Plan& plan)
      : problem_(problem),
        kernel_(backward_kernel_for(problem)),
        threads_(plan.threads),
        group_(problem.kv_heads > 0 ? problem.heads / problem.kv_heads : 0),
        bytes_(static_cast<std::int64_t>(size_of(problem.dtype()))),
        padded_dim_(ceil_div(problem.head_dim, kernel_.lanes) * kernel_.lanes),
        sums_bias_(problem.dbias && has_summed_axis()) {
    place_sequences();
  }

  void run() {
    if (problem_.heads == 0) {
      clear_all();
      return;
    }
    if (problem_.dbias && !sums_bias_ && problem_.packed()) {
      clear(problem_.dbias);
    }
    prepare();
    const std::int64_t grouped = whole_per_task();
    const auto tasks = ceil_div(static_cast<std::int64_t>(chunks_.size()), grouped);
    SharedProgress progress(problem_.operation, problem_.progress, tasks);
    parallel_for(tasks, threads_, [&](std::int64_t task, int worker) {
      const auto all = static_cast<std::int64_t>(chunks_.size());
      const std::int64_t end = std::min<std::int64_t>((task + 1) * grouped, all);
      const std::int64_t foreseen = threads_ == 1 ? all : end;
      Args args;
      TaskScratch scratch;
      for (std::int64_t c = task * grouped; c < end; ++c) {
        differentiate(args, scratch, chunks_[static_cast<std::size_t>(c)],
                      c + 1 < foreseen ? &chunks_[static_cast<std::size_t>(c) + 1] : nullptr);
      }
      progress.task_done(worker);
    });
    sum_queries();
    sum_keys();
    if (sums_bias_) {
      sum_bias();
    }
    store_sinks();
    progress.finish();
  }

 private:
  // One batch item or packed sequence, and the offsets of its rows in the call's memory.
  struct Place {
    Sequence sequence;
    std::int64_t sink_parts;  // first of its partial sums, by (head, block of rows)
    std::int64_t prepared;    // first of its scalars; -1 for a sequence that is done in one task a kv head
    std::int64_t partials;
    std::int64_t key_parts;  // first of the parts of dk and dv
    KeyChunks chunks;
    int parts;             // of a chunk's heads
    std::int64_t scratch;  // bytes of a task, and of preparing rows
    bool has_partials;     // of dq
    bool keeps_lost;       // of those
  };
  struct Chunk {
    std::int64_t b, g;
    int chunk;     // -1: the whole sequence
    int part;      // of its heads
    double pairs;  // of queries and keys, about; 0 for a whole sequence
  };

  bool has_summed_axis() const {
    const Dims full = {problem_.batch, problem_.heads, problem_.query_len, problem_.key_len};
    return problem_.dbias->sizes() != full;
  }

  void place_sequences() {
    std::int64_t scalars = 0;
    std::int64_t sink_parts = 0;
    for (std::int64_t b = 0; b < problem_.batch; ++b) {
      Place place{sequence(problem_, b), sink_parts, -1, 0, 0, {}, 1, 0, false, false};
      const std::int64_t rows = place.sequence.query_count;
      sink_parts += problem_.heads * ceil_div(rows, prepared_rows);
      BackwardArgs shape = backward_args(problem_, place.sequence, b);
      shape.head_count = group_;
      if (problem_.heads > 0) {
        shape.ranges.spans = span_lists(problem_, place.sequence, b, 0);
      }
      place.chunks = kernel_.cut(shape);
      place.scratch = std::max(kernel_.scratch_bytes(shape), kernel_.prepare_scratch_bytes(shape));
      place.has_partials = problem_.dq && !kernel_.is_short(shape);
      place.keeps_lost = place.has_partials && bytes_ >= 4 && longest(place.chunks) > compensated_keys;
      place.parts = kernel_.is_short(shape) ? 1 : head_parts(shape, place.chunks.count, pairs_of(place));
      const bool whole = place.chunks.count == 1 && place.parts == 1 && !sums_bias_;
      if (!whole) {
        place.prepared = scalars;
        scalars += ceil_div(row_numbers * problem_.heads * rows, kernel_.lanes) * kernel_.lanes;
        place.partials = scalars;
        scalars += problem_.heads * head_partials(place);
        place.key_parts = scalars;
        const std::int64_t parts = place.parts > 1 ? problem_.kv_heads * place.parts : 0;
        scalars += ceil_div(parts * part_scalars(place), kernel_.lanes) * kernel_.lanes;
      }
      for (std::int64_t g = 0; g < problem_.kv_heads; ++g) {
        for (int chunk = whole ? -1 : 0; chunk < (whole ? 0 : place.chunks.count); ++chunk) {
          const double pairs = whole ? 0 : place.chunks.count == 1 ? pairs_of(place) : place.chunks.pairs[chunk];
          for (int part = 0; part < place.parts; ++part) {
            chunks_.push_back({b, g, chunk, part, pairs / place.parts});
          }
        }
      }
      places_.push_back(place);
    }
    // The longest first, so that threads end at the same time; whole sequences stay in their order. A single thread
    // works head by head, since the chunks of a head read the same queries.
    if (threads_ > 1) {
      std::stable_sort(chunks_.begin(), chunks_.end(),
                       [](const Chunk& a, const Chunk& b) { return a.pairs > b.pairs; });
    }
    sink_parts_.assign(problem_.sinks ? static_cast<std::size_t>(sink_parts) : 0, 0.0);
    memory_.at_least(scalars * kernel_.scalar_bytes);
  }

  // Of queries and keys in a head, about.
  static double pairs_of(const Place& place) {
    if (place.chunks.count == 1) {
      return static_cast<double>(place.sequence.query_count) * static_cast<double>(place.sequence.key_count);
    }
    return std::accumulate(place.chunks.pairs, place.chunks.pairs + place.chunks.count, 0.0);
  }

  static std::int64_t longest(const KeyChunks& chunks) {
    std::int64_t keys = 0;
    for (int c = 0; c < chunks.count; ++c) {
      keys = std::max(keys, chunks.begin[c + 1] - chunks.begin[c]);
    }
    return keys;
  }

  // Scalars of one head's dq partials, and of what they lose.
  std::int64_t head_partials(const Place& place) const {
    const std::int64_t parts = place.has_partials ? (place.keeps_lost ? 2 : 1) : 0;
    return parts * place.chunks.count * place.sequence.query_count * padded_dim_;
  }

  // Scalars of one part of a kv head's dk and dv.
  std::int64_t part_scalars(const Place& place) const {
    return place.sequence.key_count * (problem_.head_dim + problem_.value_dim);
  }

  char* memory_at(std::int64_t scalars) { return static_cast<char*>(memory_.data()) + scalars * kernel_.scalar_bytes; }

  // ---- Arguments ----

  // A kv head of a sequence with its query heads. lse, delta and partials lie in the call's memory, or in `own`.
  struct Args {
    BackwardArgs sequence;
    std::vector<BackwardHead> heads;
    std::int64_t b = -1, g = 0;
  };

  // Between kv heads of a sequence only addresses and per-head options change.
  void fill(Args& args, std::int64_t b, std::int64_t g, char* own) {
    const Place& place = places_[static_cast<std::size_t>(b)];
    const std::int64_t rows = place.sequence.query_count;
    if (b != args.b) {
      args.b = b;
      args.heads.assign(static_cast<std::size_t>(group_), {});
      args.sequence = backward_args(problem_, place.sequence, b);
      args.sequence.heads = args.heads.data();
      args.sequence.head_count = group_;
      args.sequence.chunks = place.chunks;
    }
    args.g = g;
    set_kv_head(problem_, place.sequence, b, g, args.sequence);
    const std::int64_t bytes = kernel_.scalar_bytes;
    for (std::int64_t n = 0; n < group_; ++n) {
      const std::int64_t h = g * group_ + n;
      BackwardHead& head = args.heads[static_cast<std::size_t>(n)];
      set_head(problem_, place.sequence, b, h, sums_bias_, head);
      const std::int64_t index = own != nullptr ? n : h;
      char* prepared = own != nullptr ? own : memory_at(place.prepared);
      char* partials = own != nullptr ? own + own_prepared_bytes(rows) : memory_at(place.partials);
      head.references = prepared + row_numbers * index * rows * bytes;
      head.prepared_lse = prepared + (row_numbers * index + 1) * rows * bytes;
      head.delta = prepared + (row_numbers * index + 2) * rows * bytes;
      head.dq_partials = place.has_partials ? partials + index * head_partials(place) * bytes : nullptr;
      head.dq_lost = place.keeps_lost ? partials + (2 * index + 1) * head_partials(place) / 2 * bytes : nullptr;
    }
  }

  std::int64_t own_prepared_bytes(std::int64_t rows) const {
    return ceil_div(row_numbers * group_ * rows * kernel_.scalar_bytes, 64) * 64;
  }

  // ---- Phases ----

  void prepare_rows(const Args& args, std::int64_t b, std::int64_t h, std::int64_t block, void* scratch) {
    const std::int64_t rows = args.sequence.queries;
    const double sink = kernel_.prepare(args.sequence, args.heads[static_cast<std::size_t>(h - args.g * group_)],
                                        block * prepared_rows, std::min(rows, (block + 1) * prepared_rows), scratch);
    if (problem_.sinks) {
      const Place& place = places_[static_cast<std::size_t>(b)];
      sink_parts_[static_cast<std::size_t>(place.sink_parts + h * ceil_div(rows, prepared_rows) + block)] = sink;
    }
  }

  // Runs work(args, b, h, block) for each block of rows of each head that was not done in one task.
  template <class Work>
  void for_row_blocks(const Work& work) {
    struct Block {
      std::int64_t b, h, block;
    };
    std::vector<Block> blocks;
    for (std::int64_t b = 0; b < problem_.batch; ++b) {
      const Place& place = places_[static_cast<std::size_t>(b)];
      for (std::int64_t h = 0; place.prepared >= 0 && h < problem_.heads; ++h) {
        for (std::int64_t block = 0; block * prepared_rows < place.sequence.query_count; ++block) {
          blocks.push_back({b, h, block});
        }
      }
    }
    parallel_for(static_cast<std::int64_t>(blocks.size()), threads_, [&](std::int64_t task, int) {
      const Block& at = blocks[static_cast<std::size_t>(task)];
      Args args;
      fill(args, at.b, at.h / group_, nullptr);
      work(args, at.b, at.h, at.block);
    });
  }

  void prepare() {
    for_row_blocks([&](const Args& args, std::int64_t b, std::int64_t h, std::int64_t block) {
      TaskScratch scratch;
      prepare_rows(args, b, h, block, scratch.at_least(kernel_.prepare_scratch_bytes(args.sequence)));
    });
  }

  void sum_queries() {
    if (!problem_.dq) {
      return;
    }
    for_row_blocks([&](const Args& args, std::int64_t b, std::int64_t h, std::int64_t block) {
      if (places_[static_cast<std::size_t>(b)].has_partials) {
        kernel_.sum_queries(args.sequence, args.heads[static_cast<std::size_t>(h % group_)], block * prepared_rows,
                            std::min(args.sequence.queries, (block + 1) * prepared_rows));
      }
    });
  }

  // The parts of dk of a kv head, [parts][Sk][D]; those of dv come after them.
  char* key_parts(const Place& place, std::int64_t g) {
    return memory_at(place.key_parts + g * place.parts * part_scalars(place));
  }
  char* value_parts(const Place& place, std::int64_t g) {
    return key_parts(place, g) + place.parts * place.sequence.key_count * problem_.head_dim * kernel_.scalar_bytes;
  }

  // The arguments of the task that does one part of a chunk's heads.
  BackwardArgs part_of(const Args& args, const Place& place, int part) {
    BackwardArgs some = args.sequence;
    const std::int64_t first = part * group_ / place.parts, keys = place.sequence.key_count;
    some.heads += first;
    some.head_count = (part + 1) * group_ / place.parts - first;
    some.span_planes = std::min(some.span_planes, some.head_count);
    some.stores_part = true;
    const auto target = [&](WritableMatrix& matrix, char* parts, std::int64_t columns) {
      if (matrix.data != nullptr) {
        matrix = {parts + part * keys * columns * kernel_.scalar_bytes, columns, 1};
      }
    };
    target(some.dk, key_parts(place, args.g), problem_.head_dim);
    target(some.dv, value_parts(place, args.g), problem_.value_dim);
    return some;
  }

  void sum_keys() {
    struct Block {
      std::int64_t b, g, key;
    };
    std::vector<Block> blocks;
    for (std::int64_t b = 0; b < problem_.batch; ++b) {
      const Place& place = places_[static_cast<std::size_t>(b)];
      for (std::int64_t g = 0; place.parts > 1 && g < problem_.kv_heads; ++g) {
        for (std::int64_t key = 0; key < place.sequence.key_count; key += prepared_rows) {
          blocks.push_back({b, g, key});
        }
      }
    }
    parallel_for(static_cast<std::int64_t>(blocks.size()), threads_, [&](std::int64_t task, int) {
      const Block& at = blocks[static_cast<std::size_t>(task)];
      const Place& place = places_[static_cast<std::size_t>(at.b)];
      BackwardArgs args = backward_args(problem_, place.sequence, at.b);
      set_kv_head(problem_, place.sequence, at.b, at.g, args);
      args.dk_parts = key_parts(place, at.g);
      args.dv_parts = value_parts(place, at.g);
      args.key_parts = place.parts;
      kernel_.sum_keys(args, at.key, std::min(at.key + prepared_rows, place.sequence.key_count));
    });
  }

  // `next` is the thread's next task, if known.
  void differentiate(Args& args, TaskScratch& scratch, const Chunk& chunk, const Chunk* next) {
    const Place& place = places_[static_cast<std::size_t>(chunk.b)];
    if (chunk.chunk >= 0) {
      fill(args, chunk.b, chunk.g, nullptr);
      kernel_.gradients(place.parts > 1 ? part_of(args, place, chunk.part) : args.sequence, chunk.chunk,
                        scratch.at_least(place.scratch));
      return;
    }
    const std::int64_t rows = place.sequence.query_count;
    const std::int64_t own = own_prepared_bytes(rows) + group_ * head_partials(place) * kernel_.scalar_bytes;
    const std::int64_t rounded = ceil_div(own, 64) * 64;
    char* memory = static_cast<char*>(scratch.at_least(rounded + place.scratch));
    fill(args, chunk.b, chunk.g, memory);
    announce(args.sequence, next);
    for (std::int64_t h = chunk.g * group_; h < (chunk.g + 1) * group_; ++h) {
      for (std::int64_t block = 0; block * prepared_rows < rows; ++block) {
        prepare_rows(args, chunk.b, h, block, memory + rounded);
      }
    }
    kernel_.gradients(args.sequence, 0, memory + rounded);
    for (const BackwardHead& head : args.heads) {
      if (place.has_partials) {
        kernel_.sum_queries(args.sequence, head, 0, rows);
      }
    }
  }

  // Gives a sequence the addresses that the next one reads.
  void announce(BackwardArgs& args, const Chunk* next) const {
    if (next == nullptr || next->chunk >= 0) {
      args.next_key = args.next_value = args.next_query = args.next_grad_out = args.next_out = nullptr;
      return;
    }
    const Sequence& after = places_[static_cast<std::size_t>(next->b)].sequence;
    const std::int64_t h = next->g * group_;
    args.next_key = row_address(problem_.key, bytes_, next->b, next->g, after.key_begin);
    args.next_value = row_address(problem_.value, bytes_, next->b, next->g, after.key_begin);
    args.next_query = row_address(problem_.query, bytes_, next->b, h, after.query_begin);
    args.next_grad_out = row_address(problem_.grad_out, bytes_, next->b, h, after.query_begin);
    args.next_out = row_address(problem_.out, bytes_, next->b, h, after.query_begin);
  }

  // How many chunks make a task: several short sequences, but only one of a longer one.
  std::int64_t whole_per_task() const {
    const double flops = 10.0 * static_cast<double>(group_ * problem_.query_len) *
                         static_cast<double>(problem_.key_len) *
                         static_cast<double>(problem_.head_dim + problem_.value_dim) / 2;
    return units_in_task(static_cast<std::int64_t>(chunks_.size()), flops, threads_);
  }

  // Writes zeros where no task writes: after the end of a shorter sequence, or everywhere if there is nothing to sum.
  static void clear(const std::optional<TensorView>& target) {
    const float zero = 0;
    if (target) {
      copy(ConstTensorView(&zero, {1}).expand(target->sizes()), *target);
    }
  }

  // Without query heads no pair adds to a gradient.
  void clear_all() const {
    for (const std::optional<TensorView>& target : {problem_.dk, problem_.dv, problem_.dbias}) {
      clear(target);
    }
  }

  // ---- Sums over the call ----

  void sum_bias() {
    if (problem_.batch == 0 || problem_.kv_heads == 0) {
      clear(problem_.dbias);
      return;
    }
    std::vector<Args> sequences(static_cast<std::size_t>(problem_.batch * problem_.kv_heads));
    std::vector<BackwardArgs> bare;
    for (std::int64_t b = 0; b < problem_.batch; ++b) {
      for (std::int64_t g = 0; g < problem_.kv_heads; ++g) {
        Args& args = sequences[static_cast<std::size_t>(b * problem_.kv_heads + g)];
        fill(args, b, g, nullptr);
        bare.push_back(args.sequence);
      }
    }
    const std::vector<BiasRegion> regions = bias_regions(bare);
    parallel_for(static_cast<std::int64_t>(regions.size()), threads_, [&](std::int64_t task, int) {
      const BiasRegion& region = regions[static_cast<std::size_t>(task)];
      TaskScratch scratch;
      kernel_.bias(region, scratch.at_least(kernel_.bias_scratch_bytes(region)));
    });
  }

  std::vector<BiasRegion> bias_regions(const std::vector<BackwardArgs>& sequences) const {
    const TensorView& dbias = *problem_.dbias;
    std::vector<BiasRegion> regions;
    BiasRegion region;
    region.sequences = sequences.data();
    region.kv_heads = problem_.kv_heads;
    region.sum_rows = dbias.size(2) != problem_.query_len;
    region.sum_keys = dbias.size(3) != problem_.key_len;
    region.dbias_storage = storage_of(dbias.dtype());
    for (std::int64_t b = 0; b < dbias.size(0); ++b) {
      for (std::int64_t h = 0; h < dbias.size(1); ++h) {
        const bool all_batch = dbias.size(0) != problem_.batch, all_heads = dbias.size(1) != problem_.heads;
        region.batch_begin = all_batch ? 0 : b;
        region.batch_end = all_batch ? problem_.batch : b + 1;
        region.head_begin = all_heads ? 0 : h;
        region.head_end = all_heads ? problem_.heads : h + 1;
        region.dbias = writable_matrix(dbias, b, h);
        add_regions(region, regions);
      }
    }
    return regions;
  }

  void add_regions(BiasRegion region, std::vector<BiasRegion>& regions) const {
    const std::int64_t row_step = region.sum_rows ? std::max<std::int64_t>(1, problem_.query_len) : kernel_.region_rows;
    const std::int64_t key_step = region.sum_keys ? std::max<std::int64_t>(1, problem_.key_len) : kernel_.region_keys;
    const std::int64_t rows = region.sum_rows ? std::max<std::int64_t>(1, problem_.query_len) : problem_.query_len;
    const std::int64_t keys = region.sum_keys ? std::max<std::int64_t>(1, problem_.key_len) : problem_.key_len;
    for (std::int64_t row = 0; row < rows; row += row_step) {
      for (std::int64_t key = 0; key < keys; key += key_step) {
        region.row_begin = row;
        region.row_end = std::min(row + row_step, problem_.query_len);
        region.key_begin = key;
        region.key_end = std::min(key + key_step, problem_.key_len);
        regions.push_back(region);
      }
    }
  }

  void store_sinks() {
    if (!problem_.dsinks) {
      return;
    }
    for (std::int64_t h = 0; h < problem_.heads; ++h) {
      long double sum = 0;  // one type wider than any gradient
      for (const Place& place : places_) {
        const std::int64_t blocks = ceil_div(place.sequence.query_count, prepared_rows);
        for (std::int64_t block = 0; block < blocks; ++block) {
          sum += sink_parts_[static_cast<std::size_t>(place.sink_parts + h * blocks + block)];
        }
      }
      store_float(*problem_.dsinks, h * problem_.dsinks->stride(0), static_cast<double>(sum));
    }
  }

  const BackwardProblem& problem_;
  const BackwardKernel& kernel_;
  int threads_;
  std::int64_t group_;
  std::int64_t bytes_;  // of an element
  std::int64_t padded_dim_;
  bool sums_bias_;
  std::vector<Place> places_;
  std::vector<Chunk> chunks_;
  std::vector<double> sink_parts_;
  CallScratch memory_;
};

}  // namespace

void describe_backward(const Problem& problem, Plan& plan) {
  const BackwardKernel& kernel = backward_kernel_for(problem);
  BackwardArgs shape;
  shape.queries = problem.query_len;
  shape.ranges.keys = problem.key_len;
  shape.head_dim = problem.head_dim;
  shape.value_dim = problem.value_dim;
  shape.head_count = problem.kv_heads > 0 ? problem.heads / problem.kv_heads : 0;
  plan.kernel = kernel.is_short(shape) ? "panels of keys in lanes, all queries and keys at once"
                                       : "panels of keys in lanes, dQ partials per chunk of keys";
  plan.query_block = kernel.region_rows;
  plan.key_block = kernel.region_keys;
  const int chunks = kernel.chunk_count(problem.key_len);
  const double pairs = plan.pairs / std::max(1.0, static_cast<double>(problem.batch * problem.heads));
  plan.tasks =
      problem.batch * problem.kv_heads * chunks * (kernel.is_short(shape) ? 1 : head_parts(shape, chunks, pairs));
  plan.threads = plan.flops < task_flops ? 1 : get_threads();
  const double rows = static_cast<double>(problem.query_rows()) * static_cast<double>(problem.heads);
  plan.scratch_bytes =
      chunks > 1 ? rows * (row_numbers + chunks * static_cast<double>(problem.head_dim)) * kernel.scalar_bytes : 0;
}

void backward(const BackwardProblem& problem, const Plan& plan) { BackwardRun(problem, plan).run(); }

}  // namespace headway::cpu
