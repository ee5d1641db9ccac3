// A cache as a .safetensors file: its config as text in the metadata, the pages that sequences hold, renumbered from 0,
// and for each sequence its id, length and table. Slots that hold no token are written as 0. A file is treated as
// hostile: its tables are checked against its pages before a cache is made of them.
#include <mutex>

#include "core/out_of_memory.h"
#include "headway/io.h"
#include "io/metadata_reader.h"
#include "serving/cache_state.h"

namespace headway {
namespace {

constexpr const char* cache_kind = "headway.KVCache";
constexpr const char* cache_kind_key = "cache";

// ---- The config: one list of its fields, which saving and loading share ----

template <class Config, class Visit>
void for_each_field(Config& config, const Visit& visit) {
  visit("pages", config.pages);
  visit("page_size", config.page_size);
  visit("kv_heads", config.kv_heads);
  visit("head_dim", config.head_dim);
  visit("value_dim", config.value_dim);
  visit("first", config.first);
  visit("slack", config.slack);
  visit("value_in_key", config.value_in_key);
}

template <class Config, class Visit>
void for_each_rope_field(Config& rope, const Visit& visit) {
  visit("rope.base", rope.base);
  visit("rope.dims", rope.dims);
  visit("rope.factor", rope.factor);
  visit("rope.original_length", rope.original_length);
  visit("rope.beta_fast", rope.beta_fast);
  visit("rope.beta_slow", rope.beta_slow);
  visit("rope.attention_factor", rope.attention_factor);
  visit("rope.mscale", rope.mscale);
  visit("rope.mscale_all_dim", rope.mscale_all_dim);
  visit("rope.low_freq_factor", rope.low_freq_factor);
  visit("rope.high_freq_factor", rope.high_freq_factor);
}

const char* name(RopeScaling scaling) {
  switch (scaling) {
    case RopeScaling::none: return "none";
    case RopeScaling::linear: return "linear";
    case RopeScaling::dynamic: return "dynamic";
    case RopeScaling::yarn: return "yarn";
    case RopeScaling::llama3: return "llama3";
  }
  return "unknown";
}

// Names for MetadataReader::choice, which finds them by argument-dependent lookup.
struct ScalingChoice {
  RopeScaling scaling;
};
const char* name(ScalingChoice choice) { return name(choice.scaling); }

// Writes fields as text; those of absent optionals are left out.
struct FieldWriter {
  Metadata& metadata;

  template <class Number>
  void operator()(const char* key, const Number& number) const {
    char digits[32];
    const auto [end, error] = std::to_chars(std::begin(digits), std::end(digits), number);
    metadata[key] = std::string(std::begin(digits), end);
  }
  template <class Number>
  void operator()(const char* key, const std::optional<Number>& number) const {
    if (number) {
      (*this)(key, *number);
    }
  }
};

struct FieldReader {
  const MetadataReader& reader;

  template <class Number>
  void operator()(const char* key, Number& number) const {
    number = reader.number<Number>(key);
  }
  template <class Number>
  void operator()(const char* key, std::optional<Number>& number) const {
    if (reader.has(key)) {
      number = reader.number<Number>(key);
    }
  }
};

Metadata metadata_of(const KVCacheConfig& config, std::int64_t next_id) {
  Metadata metadata = {
      {cache_kind_key, cache_kind}, {"dtype", name(config.dtype)}, {"quantize", name(config.quantize)}};
  const FieldWriter write{metadata};
  for_each_field(config, write);
  write("next_id", next_id);
  metadata["window"] = config.window ? "true" : "false";
  if (config.window) {
    write("window.left", config.window->left);
    write("window.right", config.window->right);
  }
  metadata["rope"] = config.rope ? "true" : "false";
  if (config.rope) {
    for_each_rope_field(*config.rope, write);
    metadata["rope.scaling"] = name(config.rope->scaling);
    metadata["rope.interleaved"] = config.rope->interleaved ? "true" : "false";
    metadata["rope.truncate"] = config.rope->truncate ? "true" : "false";
  }
  return metadata;
}

bool read_flag(const MetadataReader& reader, const char* key) {
  return reader.choice(key, {YesNo::no, YesNo::yes}) == YesNo::yes;
}

RopeConfig read_rope(const MetadataReader& reader) {
  RopeConfig rope;
  for_each_rope_field(rope, FieldReader{reader});
  rope.scaling =
      reader
          .choice<ScalingChoice>(
              "rope.scaling", {{RopeScaling::none}, {RopeScaling::linear}, {RopeScaling::yarn}, {RopeScaling::llama3}})
          .scaling;
  rope.interleaved = read_flag(reader, "rope.interleaved");
  rope.truncate = read_flag(reader, "rope.truncate");
  return rope;
}

KVCacheConfig read_config(const MetadataReader& reader, Device device) {
  if (reader.value(cache_kind_key) != cache_kind) {
    reader.refuse("expected ", cache_kind_key, " to be ", cache_kind, ", found \"",
                  MetadataReader::shortened(reader.value(cache_kind_key)), "\"");
  }
  KVCacheConfig config;
  config.device = device;
  const FieldReader read{reader};
  for_each_field(config, read);
  config.dtype = reader.choice("dtype", {DType::f32, DType::f64, DType::bf16, DType::f16});
  config.quantize = reader.choice("quantize", {CacheFormat::plain, CacheFormat::int8, CacheFormat::fp8});
  if (read_flag(reader, "window")) {
    config.window.emplace();
    read("window.left", config.window->left);
    read("window.right", config.window->right);
  }
  if (read_flag(reader, "rope")) {
    config.rope = read_rope(reader);
  }
  try {
    return resolved(config);
  } catch (const Error& error) {
    reader.refuse(error.what());
  }
}

// ---- Pages ----

// The pages that sequences use, in ascending order, and the number of used slots of each.
std::map<std::int32_t, std::int64_t> held_pages(const PageBook& book) {
  std::map<std::int32_t, std::int64_t> held;
  for (const auto& [id, sequence] : book.sequences()) {
    for (std::size_t n = 0; n < sequence.pages.size(); ++n) {
      if (sequence.pages[n] != no_page) {
        std::int64_t& slots = held[sequence.pages[n]];
        const std::int64_t begin = static_cast<std::int64_t>(n) * book.page_size();
        slots = std::max(slots, std::min(book.page_size(), sequence.length - begin));
      }
    }
  }
  return held;
}

// The used ones of `pages` [pages, page_size, ...], as [held, page_size, ...].
Tensor packed_pages(const Tensor& pages, const std::map<std::int32_t, std::int64_t>& held) {
  Dims sizes = pages.sizes();
  sizes[0] = static_cast<std::int64_t>(held.size());
  Tensor packed(sizes, pages.dtype());
  std::int64_t at = 0;
  for (const auto& [page, slots] : held) {
    copy(pages.view().select(0, page).slice(0, 0, slots), packed.view().select(0, at++).slice(0, 0, slots));
  }
  return packed;
}

void add_store(const std::string& name, const PageStore& store, const std::map<std::int32_t, std::int64_t>& held,
               NamedTensors& tensors) {
  tensors[name + "_pages"] = packed_pages(store.data, held);
  if (store.scales) {
    tensors[name + "_scales"] = packed_pages(*store.scales, held);
  }
}

NamedTensors tensors_of(const CacheState& state) {
  const std::map<std::int32_t, std::int64_t> held = held_pages(state.book);
  std::map<std::int32_t, std::int32_t> numbers;  // in the file
  for (const auto& [page, slots] : held) {
    numbers.emplace(page, static_cast<std::int32_t>(numbers.size()));
  }
  std::vector<std::int64_t> ids, lengths, freed;
  std::vector<std::int32_t> tables;
  for (const auto& [id, sequence] : state.book.sequences()) {
    ids.push_back(id);
    lengths.push_back(sequence.length);
    freed.push_back(sequence.freed);
    for (const std::int32_t page : sequence.pages) {
      tables.push_back(page == no_page ? no_page : numbers.at(page));
    }
  }
  NamedTensors tensors;
  const auto count = static_cast<std::int64_t>(ids.size());
  tensors["ids"] = Tensor::of({count}, ids);
  tensors["lengths"] = Tensor::of({count}, lengths);
  tensors["freed"] = Tensor::of({count}, freed);
  tensors["tables"] = Tensor::of({static_cast<std::int64_t>(tables.size())}, tables);
  add_store("key", state.key, held, tensors);
  if (state.value) {
    add_store("value", *state.value, held, tensors);
  }
  return tensors;
}

// ---- Loading ----

// Reads pages from the file into a store; returns their number.
void load_store(const MetadataReader& reader, const std::string& name, std::int64_t count, NamedTensors& tensors,
                PageStore& store) {
  const auto load = [&](const std::string& tensor_name, Tensor& pages) {
    Dims sizes = pages.sizes();
    sizes[0] = count;
    const Tensor found = take_tensor(reader, tensors, tensor_name, sizes, pages.dtype());
    copy(found, pages.view().slice(0, 0, count));
  };
  load(name + "_pages", store.data);
  if (store.scales) {
    load(name + "_scales", *store.scales);
  }
}

// One sequence of the file, whose table entries are `table`, or an error.
PagedSequence checked_sequence(const MetadataReader& reader, const PageBook& book, std::int64_t id, std::int64_t length,
                               std::int64_t freed, std::span<const std::int32_t> table, std::int64_t held) {
  const KeptKeys& kept = book.kept();
  if (freed < 0 || freed > length || (freed > 0 && (!kept.left || freed <= kept.first))) {
    reader.refuse("expected freed of sequence ", id, " to be 0 or within its window's reach, found ", freed);
  }
  for (std::size_t n = 0; n < table.size(); ++n) {
    const std::int64_t begin = static_cast<std::int64_t>(n) * book.page_size(), end = begin + book.page_size();
    const bool is_freed = begin >= kept.first && end <= freed;
    // truncate may end a sequence inside a page that was freed: the next append takes a new one.
    const bool ends_inside_freed = begin >= kept.first && length <= freed && table[n] == no_page;
    if (is_freed ? table[n] != no_page : !ends_inside_freed && (table[n] < 0 || table[n] >= held)) {
      reader.refuse("expected page ", n, " of sequence ", id, " to be ", is_freed ? "freed" : "one of the file's ",
                    is_freed ? "" : text(held), ", found ", table[n]);
    }
  }
  return {.length = length, .freed = freed, .pages = {table.begin(), table.end()}};
}

void load_sequences(const MetadataReader& reader, std::int64_t held, NamedTensors& tensors, PageBook& book) {
  const std::int64_t count = tensors.at("ids").elements();
  const Tensor ids = take_tensor(reader, tensors, "ids", {count}, DType::i64);
  const Tensor lengths = take_tensor(reader, tensors, "lengths", {count}, DType::i64);
  const Tensor freed = take_tensor(reader, tensors, "freed", {count}, DType::i64);
  const Tensor tables = take_tensor(reader, tensors, "tables", {tensors.at("tables").elements()}, DType::i32);
  const auto entries = std::span(tables.as<std::int32_t>(), static_cast<std::size_t>(tables.elements()));
  const auto next_id = reader.number<std::int64_t>("next_id");
  std::size_t at = 0;
  std::int64_t last_id = -1;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t id = ids.as<std::int64_t>()[i], length = lengths.as<std::int64_t>()[i];
    if (id <= last_id || id >= next_id) {
      reader.refuse("expected ids that go up and stay below next_id ", next_id, ", found ", id);
    }
    last_id = id;
    const std::int64_t pages = length < 0 ? -1 : length / book.page_size() + (length % book.page_size() != 0);
    if (pages < 0 || static_cast<std::size_t>(pages) > entries.size() - at) {
      reader.refuse("expected tables for the ", length, " tokens of sequence ", id, ", found ", entries.size() - at,
                    " entries");
    }
    const auto table = entries.subspan(at, static_cast<std::size_t>(pages));
    book.restore(id, checked_sequence(reader, book, id, length, freed.as<std::int64_t>()[i], table, held));
    at += static_cast<std::size_t>(pages);
  }
  if (at != entries.size() || next_id < 0) {
    reader.refuse("expected ", at, " entries in tables and a next_id of 0 or more, found ", entries.size(), " and ",
                  next_id);
  }
  book.finish_restoring(next_id);
}

}  // namespace

void KVCache::save(const std::filesystem::path& path, bool overwrite) const try {
  NamedTensors tensors;
  Metadata metadata;
  {
    const std::shared_lock lock(state_->mutex);
    tensors = tensors_of(*state_);
    metadata = metadata_of(state_->config, state_->book.next_id());
  }
  save_safetensors(path, {tensors.begin(), tensors.end()}, metadata, {.overwrite = overwrite});
} catch (...) {
  throw_own_error("KVCache::save");
}

KVCache KVCache::load(const std::filesystem::path& path, Device device) try {
  SafetensorsFile file = load_safetensors(path);
  const MetadataReader reader("KVCache::load", path, file.metadata);
  const KVCacheConfig config = read_config(reader, device);
  for (const char* name : {"ids", "tables", "key_pages"}) {
    if (file.tensors.count(name) == 0) {
      reader.refuse("expected a tensor ", name, ", found none");
    }
  }
  const Tensor& keys = file.tensors.at("key_pages");
  const std::int64_t held = keys.rank() == 4 ? keys.size(0) : 0;
  if (held > config.pages) {
    reader.refuse("expected at most the ", config.pages, " pages of the cache, found ", held);
  }
  auto state = std::make_unique<State>(config);
  load_sequences(reader, held, file.tensors, state->book);
  load_store(reader, "key", held, file.tensors, state->key);
  if (state->value) {
    load_store(reader, "value", held, file.tensors, *state->value);
  }
  if (!file.tensors.empty()) {
    reader.refuse("found an unexpected tensor \"", MetadataReader::shortened(file.tensors.begin()->first), "\"");
  }
  return KVCache(std::move(state));
} catch (...) {
  throw_own_error("KVCache::load");
}

}  // namespace headway
