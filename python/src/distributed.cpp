// Distributed attention for Python: shards and plans, and the calls over a transport implemented in Python.
#include "headway/distributed.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "functions.h"
#include "method.h"
#include "options.h"
#include "output.h"
#include "released.h"
#include "shapes.h"

namespace headway::python {
namespace {

using distributed::Cluster;
using distributed::Estimate;
using distributed::Packing;
using distributed::Scheme;
using distributed::Sharding;
using distributed::Sizes;

// ---- Shards: (queries, keys), each a list of ranks, each a list of (begin, end) ----

using Ranges = std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>>;

std::vector<distributed::Shard> shards_of(const Ranges& ranges) {
  std::vector<distributed::Shard> shards;
  for (const auto& of_rank : ranges) {
    distributed::Shard shard;
    for (const auto& [begin, end] : of_rank) {
      shard.push_back({begin, end});
    }
    shards.push_back(std::move(shard));
  }
  return shards;
}

Ranges ranges_of(const std::vector<distributed::Shard>& shards) {
  Ranges ranges;
  for (const distributed::Shard& shard : shards) {
    ranges.emplace_back();
    for (const distributed::Rows& rows : shard) {
      ranges.back().emplace_back(rows.begin, rows.end);
    }
  }
  return ranges;
}

std::pair<Ranges, Ranges> as_python(const Sharding& sharding) {
  return {ranges_of(sharding.queries), ranges_of(sharding.keys)};
}

Sharding read_sharding(const Argument& argument) {
  std::pair<Ranges, Ranges> ranges;
  if (!nb::try_cast(argument.object, ranges)) {
    refuse<TypeMismatch>(argument, "is a ", class_name(argument.object),
                         ", expected a headway.distributed.Sharding: (queries, keys), each with a list of (begin, end) "
                         "for every rank");
  }
  return {shards_of(ranges.first), shards_of(ranges.second)};
}

// ---- Other arguments ----

Scheme read_scheme(const Argument& argument) {
  if (is_absent(argument)) {
    return Scheme::automatic;
  }
  std::string found;
  if (!nb::try_cast(argument.object, found)) {
    refuse<TypeMismatch>(argument, "is a ", class_name(argument.object), ", expected a string");
  }
  for (const Scheme scheme :
       {Scheme::automatic, Scheme::ring, Scheme::all_gather, Scheme::heads, Scheme::pass_query, Scheme::hybrid}) {
    if (found == name(scheme)) {
      return scheme;
    }
  }
  refuse<InvalidArgument>(argument, "is '", found,
                          "', expected 'automatic', 'ring', 'all_gather', 'heads', 'pass_query' or 'hybrid'");
}

// A tuple of the numbers of headway.distributed.Cluster, in its order.
Cluster read_cluster(const Argument& argument) {
  if (is_absent(argument)) {
    return {};
  }
  std::vector<double> numbers;
  if (!nb::try_cast(argument.object, numbers) || numbers.size() != 8) {
    refuse<TypeMismatch>(argument, "is a ", class_name(argument.object), ", expected a headway.distributed.Cluster");
  }
  for (std::size_t n = 0; n < numbers.size(); ++n) {
    const bool may_be_zero = n == 3 || n >= 5;  // latencies, the cost of a call and of a byte
    if (!(numbers[n] > 0 || (may_be_zero && numbers[n] == 0))) {
      refuse<InvalidArgument>(argument, "has ", numbers[n], " as its number ", n, ", expected one above 0");
    }
  }
  return {
      static_cast<int>(numbers[0]), numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6], numbers[7]};
}

// (batch, heads, kv_heads, queries, keys, head_dim, value_dim, bytes of an element)
Sizes read_sizes(const Argument& argument) {
  std::vector<std::int64_t> numbers;
  if (!nb::try_cast(argument.object, numbers) || numbers.size() != 8) {
    refuse<TypeMismatch>(argument, "is a ", class_name(argument.object), ", expected a tuple of 8 whole numbers");
  }
  const DType dtype = numbers[7] == 8 ? DType::f64 : numbers[7] == 4 ? DType::f32 : DType::bf16;
  return {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6], dtype};
}

// The bounds of packed sequences, where they are given.
class Bounds {
 public:
  Bounds(const Argument& queries, const Argument& keys) {
    if (is_absent(queries) != is_absent(keys)) {
      refuse<InvalidArgument>(queries, "and cu_seqlens_k go together, found one of them");
    }
    if (!is_absent(queries)) {
      packing = Packing{read_integers(queries, queries_), read_integers(keys, keys_)};
    }
  }
  std::optional<Packing> packing;

 private:
  std::optional<Array> queries_, keys_;
};

// ---- Plans ----

nb::object call_balanced(const Arguments& arguments) {
  const Options options(arguments);
  const Bounds bounds(arguments.own(0), arguments.own(1));
  const Sizes sizes = read_sizes(arguments.leading(0));
  const int ranks = nb::cast<int>(arguments.leading(1).object);
  return nb::cast(as_python(distributed::balanced(distributed::seen(sizes, options.values, bounds.packing), ranks)));
}

// The text of explain, and the simulator's numbers.
nb::object call_explain_distributed(const Arguments& arguments) {
  const Options options(arguments);
  const Bounds bounds(arguments.own(0), arguments.own(1));
  const Sizes sizes = read_sizes(arguments.leading(0));
  const Sharding sharding = read_sharding(arguments.leading(1));
  Scheme scheme = read_scheme(arguments.own(2));
  const Cluster cluster = read_cluster(arguments.own(3));
  const bool backward = is_true(arguments.own(4));
  const bool with_text = is_true(arguments.own(5));
  const distributed::Seen seen = distributed::seen(sizes, options.values, bounds.packing);
  std::string explained;
  Estimate estimate;
  {
    const Released released;
    if (with_text) {
      explained = distributed::explain(scheme, sizes, seen, sharding, cluster, backward);
    }
    const distributed::Schedule plan = distributed::plan(scheme, sizes, seen, sharding, cluster, backward);
    scheme = plan.scheme;
    estimate = distributed::simulate(plan, cluster);
  }
  return nb::make_tuple(explained, name(scheme), estimate.seconds, estimate.efficiency, estimate.imbalance,
                        estimate.bytes, estimate.most_bytes, estimate.waiting);
}

// The work of one rank: (steps, [(step, from, to, begin, end, is a result)] of the transfers that it takes part in,
// [(step, (query begin, query end), (key begin, key end))] of its tiles). For programs that run the schedule
// themselves.
nb::object call_schedule(const Arguments& arguments) {
  const Options options(arguments);
  const Sizes sizes = read_sizes(arguments.leading(0));
  const Sharding sharding = read_sharding(arguments.leading(1));
  const int rank = nb::cast<int>(arguments.leading(2).object);
  const distributed::Schedule schedule =
      distributed::schedule(read_scheme(arguments.own(0)), sizes, distributed::seen(sizes, options.values), sharding,
                            is_true(arguments.own(1)));
  nb::list transfers, tiles;
  for (const distributed::Transfer& one : schedule.transfers) {
    if (one.from == rank || one.to == rank) {
      transfers.append(nb::make_tuple(one.step, one.from, one.to, one.rows.begin, one.rows.end, one.result));
    }
  }
  for (const distributed::Tile& tile : schedule.tiles(rank)) {
    tiles.append(nb::make_tuple(tile.step, nb::make_tuple(tile.queries.begin, tile.queries.end),
                                nb::make_tuple(tile.keys.begin, tile.keys.end)));
  }
  return nb::make_tuple(schedule.steps, transfers, tiles);
}

// ---- One part ----

// query, key, value, offset -> (out, lse) for these keys only
nb::object call_part(const Arguments& arguments) {
  const Array query(arguments.leading(0)), key(arguments.leading(1)), value(arguments.leading(2));
  const std::int64_t offset = nb::cast<std::int64_t>(arguments.leading(3).object);
  Options options(arguments);
  const ConstTensorView views[] = {query.view(), key.view(), value.view()};
  Output out(arguments.made("out"), query, views[0].dtype(), out_sizes(views[0].sizes(), views[2].sizes()));
  Output lse(arguments.made("lse"), query, statistics_type(views[0].dtype()), lse_sizes(views[0].sizes(), false));
  {
    const Released released(options.values);
    distributed::attention_part(views[0], views[1], views[2], out.view(), offset, options.values, {.lse = lse.view()});
  }
  return nb::make_tuple(out.finish(), lse.finish());
}

// grad_out, query, key, value, out, lse, offset -> (dq, dk, dv, dbias or None): the contributions of these pairs
nb::object call_part_backward(const Arguments& arguments) {
  const Array grad_out(arguments.leading(0)), query(arguments.leading(1)), key(arguments.leading(2)),
      value(arguments.leading(3)), out(arguments.leading(4)), lse(arguments.leading(5));
  const std::int64_t offset = nb::cast<std::int64_t>(arguments.leading(6).object);
  Options options(arguments);
  Output dq(arguments.made("dq"), query, query.view().dtype(), query.view().sizes());
  Output dk(arguments.made("dk"), key, key.view().dtype(), key.view().sizes());
  Output dv(arguments.made("dv"), value, value.view().dtype(), value.view().sizes());
  std::optional<Output> dbias;
  if (is_true(arguments.own(0)) && options.bias()) {
    const ConstTensorView bias = options.bias()->view();
    dbias.emplace(arguments.made("dbias"), *options.bias(), bias.dtype(), bias.sizes());
  }
  {
    const ConstTensorView views[] = {grad_out.view(), query.view(), key.view(), value.view(), out.view()};
    const ConstTensorView of_rows = lse.view("f32 or f64");
    AttentionGradients gradients{.dq = dq.view(), .dk = dk.view(), .dv = dv.view()};
    if (dbias) {
      gradients.dbias = dbias->view();
    }
    const Released released(options.values);
    distributed::attention_part_backward(views[0], views[1], views[2], views[3], views[4], of_rows, gradients, offset,
                                         options.values);
  }
  return nb::make_tuple(dq.finish(), dk.finish(), dv.finish(), dbias ? dbias->finish() : nb::none());
}

// ---- The calls ----

// A transport with Python's methods: rank, ranks, begin(sends, receives), wait(), all_gather(bytes). A message is
// (peer, memoryview, capsule that keeps its memory). Called without the GIL.
class PythonTransport : public distributed::Transport {
 public:
  explicit PythonTransport(nb::handle object)
      : object_(object), rank_(nb::cast<int>(object.attr("rank"))), ranks_(nb::cast<int>(object.attr("ranks"))) {}

  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }
  void begin(std::span<const Message> sends, std::span<const Message> receives) override {
    const nb::gil_scoped_acquire held;
    object_.attr("begin")(messages(sends), messages(receives));
  }
  void wait() override {
    const nb::gil_scoped_acquire held;
    object_.attr("wait")();
  }
  std::vector<std::string> all_gather(const std::string& text) override {
    const nb::gil_scoped_acquire held;
    std::vector<std::string> texts;
    for (const nb::handle one : object_.attr("all_gather")(nb::bytes(text.data(), text.size()))) {
      const auto bytes = nb::cast<nb::bytes>(one);
      texts.emplace_back(bytes.c_str(), bytes.size());
    }
    return texts;
  }

 private:
  static nb::list messages(std::span<const Message> all) {
    nb::list result;
    for (const Message& message : all) {
      if (message.bytes == 0) {
        continue;
      }
      const nb::object view = checked(PyMemoryView_FromMemory(static_cast<char*>(message.data),
                                                              static_cast<Py_ssize_t>(message.bytes), PyBUF_WRITE));
      auto keeper = std::make_unique<std::shared_ptr<const void>>(message.memory);
      const nb::capsule keep(keeper.get(),
                             [](void* held) noexcept { delete static_cast<std::shared_ptr<const void>*>(held); });
      keeper.release();
      result.append(nb::make_tuple(message.peer, view, keep));
    }
    return result;
  }

  nb::handle object_;
  int rank_, ranks_;
};

// The arguments of both calls besides attention's options.
struct DistributedOptions {
  explicit DistributedOptions(const Arguments& arguments)
      : attention(arguments), bounds(arguments.own(0), arguments.own(1)) {
    values.scheme = read_scheme(arguments.own(2));
    values.cluster = read_cluster(arguments.own(3));
    if (!is_absent(arguments.own(4))) {
      values.sharding = read_sharding(arguments.own(4));
    }
    values.packing = bounds.packing;
  }

  Options attention;
  Bounds bounds;
  distributed::Options values;
};

// transport, query, key, value -> (out, lse)
nb::object call_attention(const Arguments& arguments) {
  PythonTransport transport(arguments.leading(0).object);
  const Array query(arguments.leading(1)), key(arguments.leading(2)), value(arguments.leading(3));
  DistributedOptions options(arguments);
  const ConstTensorView views[] = {query.view(), key.view(), value.view()};
  Output out(arguments.made("out"), query, views[0].dtype(), out_sizes(views[0].sizes(), views[2].sizes()));
  Output lse(arguments.made("lse"), query, statistics_type(views[0].dtype()),
             lse_sizes(views[0].sizes(), options.bounds.packing.has_value()));
  {
    const Released released(options.attention.values);
    options.values.attention = options.attention.values;
    distributed::attention(views[0], views[1], views[2], out.view(), transport, options.values, {.lse = lse.view()});
  }
  return nb::make_tuple(out.finish(), lse.finish());
}

// transport, grad_out, query, key, value, out, lse -> (dq, dk, dv, dbias or None, dsinks or None)
nb::object call_attention_backward(const Arguments& arguments) {
  PythonTransport transport(arguments.leading(0).object);
  const Array grad_out(arguments.leading(1)), query(arguments.leading(2)), key(arguments.leading(3)),
      value(arguments.leading(4)), out(arguments.leading(5)), lse(arguments.leading(6));
  DistributedOptions options(arguments);
  const auto like = [&](const char* name, const Array& array) {
    const ConstTensorView view = array.view();
    return std::make_unique<Output>(arguments.made(name), array, view.dtype(), view.sizes());
  };
  const auto dq = like("dq", query), dk = like("dk", key), dv = like("dv", value);
  const bool wants_dbias = is_true(arguments.own(5)) && options.attention.bias();
  const auto dbias = wants_dbias ? like("dbias", *options.attention.bias()) : nullptr;
  const auto dsinks = options.attention.sinks() ? like("dsinks", *options.attention.sinks()) : nullptr;
  {
    const ConstTensorView views[] = {grad_out.view(), query.view(), key.view(), value.view(), out.view()};
    AttentionGradients gradients{.dq = dq->view(), .dk = dk->view(), .dv = dv->view()};
    if (dbias) {
      gradients.dbias = dbias->view();
    }
    if (dsinks) {
      gradients.dsinks = dsinks->view();
    }
    const ConstTensorView of_rows = lse.view("f32 or f64");
    const Released released(options.attention.values);
    options.values.attention = options.attention.values;
    distributed::attention_backward(views[0], views[1], views[2], views[3], views[4], of_rows, gradients, transport,
                                    options.values);
  }
  return nb::make_tuple(dq->finish(), dk->finish(), dv->finish(), dbias ? dbias->finish() : nb::none(),
                        dsinks ? dsinks->finish() : nb::none());
}

}  // namespace

void add_distributed(nb::module_& module) {
  module.def("distributed_contiguous",
             [](const std::vector<std::int64_t>& queries, const std::vector<std::int64_t>& keys) {
               return as_python(distributed::contiguous(queries, keys));
             });
  module.def("distributed_even", [](std::int64_t queries, std::int64_t keys, int ranks) {
    return as_python(distributed::contiguous(queries, keys, ranks));
  });
  module.def("distributed_zigzag", [](std::int64_t queries, std::int64_t keys, int ranks) {
    return as_python(distributed::zigzag(queries, keys, ranks));
  });
  const std::vector<Parameter> bounds = {{"cu_seqlens_q"}, {"cu_seqlens_k"}};
  const auto with = [&](std::initializer_list<Parameter> more) {
    std::vector<Parameter> all = bounds;
    all.insert(all.end(), more);
    return all;
  };
  add_method<call_balanced>(module, {"distributed_balanced", {{"sizes"}, {"ranks"}}, bounds},
                            "For headway.distributed.");
  add_method<call_explain_distributed>(module,
                                       {"distributed_explain",
                                        {{"sizes"}, {"sharding"}},
                                        with({{"scheme"}, {"cluster"}, {"backward", "False"}, {"with_text", "False"}})},
                                       "For headway.distributed.");
  add_method<call_schedule>(
      module, {"distributed_schedule", {{"sizes"}, {"sharding"}, {"rank"}}, {{"scheme"}, {"backward", "False"}}},
      "For headway.torch.distributed.");
  add_method<call_part>(module, {"distributed_part", {{"query"}, {"key"}, {"value"}, {"offset"}}, {}},
                        "For headway.torch.distributed.");
  add_method<call_part_backward>(module,
                                 {"distributed_part_backward",
                                  {{"grad_out"}, {"query"}, {"key"}, {"value"}, {"out"}, {"lse"}, {"offset"}},
                                  {{"wants_dbias", "False"}}},
                                 "For headway.torch.distributed.");
  add_method<call_attention>(module,
                             {"distributed_attention",
                              {{"transport"}, {"query"}, {"key"}, {"value"}},
                              with({{"scheme"}, {"cluster"}, {"sharding"}})},
                             "For headway.torch.distributed.");
  add_method<call_attention_backward>(module,
                                      {"distributed_attention_backward",
                                       {{"transport"}, {"grad_out"}, {"query"}, {"key"}, {"value"}, {"out"}, {"lse"}},
                                       with({{"scheme"}, {"cluster"}, {"sharding"}, {"wants_dbias", "False"}})},
                                      "For headway.torch.distributed.");
}

}  // namespace headway::python
