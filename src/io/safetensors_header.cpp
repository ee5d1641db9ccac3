// The header of a .safetensors file: JSON that names each tensor's type, shape and place.
#include "io/safetensors_header.h"

#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "io/json_text.h"
#include "io/tensor_bytes.h"
#include "io/text_checks.h"

namespace headway::io {
namespace {

using nlohmann::json;

constexpr TypeName safetensors_types[] = {{"F32", DType::f32}, {"F64", DType::f64}, {"BF16", DType::bf16},
                                          {"F16", DType::f16}, {"BOOL", DType::b8}, {"I32", DType::i32},
                                          {"I64", DType::i64}, {"I8", DType::i8},   {"F8_E4M3", DType::f8e4m3}};

// Parses JSON one token at a time. No tree is built, so a hostile header costs little more than its own size; nesting
// is refused at the first superfluous bracket; and a repeated key is noticed, which a tree would have merged.
class HeaderReader final : public json::json_sax_t {
 public:
  explicit HeaderReader(const FileContext& context) : context_(context) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool start_object(std::size_t) override {
    switch (place_) {
      case Place::outside: place_ = Place::file; return true;
      case Place::file_value: place_ = is_metadata_ ? Place::metadata : Place::tensor; return true;
      default: refuse("an object");
    }
  }

  bool end_object() override {
    if (place_ == Place::tensor) {
      finish_tensor();
    }
    place_ = place_ == Place::file ? Place::outside : Place::file;
    return true;
  }

  bool key(std::string& text) override {
    switch (place_) {
      case Place::file: start_value(text); break;
      case Place::metadata:
        metadata_name_ = text;
        place_ = Place::metadata_value;
        break;
      default: start_tensor_field(text); break;
    }
    return true;
  }

  bool string(std::string& text) override {
    if (place_ == Place::metadata_value) {
      if (!header_.metadata.emplace(std::move(metadata_name_), std::move(text)).second) {
        context_.fail("expected each metadata key once, found one again");
      }
      place_ = Place::metadata;
    } else if (place_ == Place::dtype) {
      dtype_ = parse_dtype(text);
      place_ = Place::tensor;
    } else {
      refuse("a string");
    }
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ == Place::shape && !sizes_) {
      sizes_.emplace();
    } else if (place_ == Place::offsets && !offsets_) {
      offsets_.emplace();
    } else {
      refuse("an array");
    }
    return true;
  }

  bool end_array() override {
    if (place_ == Place::offsets && offsets_->size() != 2) {
      tensor_fail("expected two data_offsets, found ", offsets_->size());
    }
    place_ = Place::tensor;
    return true;
  }

  bool number_unsigned(std::uint64_t value) override {
    if (place_ == Place::shape && sizes_) {
      append_size(*sizes_, value, context_.within(tensor()));
    } else if (place_ == Place::offsets && offsets_) {
      if (offsets_->size() == 2) {
        tensor_fail("expected two data_offsets, found more");
      }
      offsets_->push_back(value);
    } else {
      refuse("a number");
    }
    return true;
  }

  bool number_integer(std::int64_t) override { refuse("a negative number"); }
  bool number_float(double, const std::string&) override { refuse("a number that is no 64-bit integer"); }
  bool null() override { refuse("null"); }
  bool boolean(bool) override { refuse("a boolean"); }
  bool binary(json::binary_t&) override { refuse("binary data"); }

  bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
    context_.fail("expected JSON in the header, found an error at its byte ", position);
  }

 private:
  enum class Place { outside, file, file_value, metadata, metadata_value, tensor, dtype, shape, offsets };

  std::string tensor() const { return "tensor " + shown(name_); }

  template <class... Parts>
  [[noreturn]] void tensor_fail(const Parts&... parts) const {
    context_.within(tensor()).fail(parts...);
  }

  [[noreturn]] void refuse(const char* found) const {
    switch (place_) {
      case Place::outside:
      case Place::file: context_.fail("expected the header to be an object, found ", found);
      case Place::metadata:
      case Place::metadata_value: context_.fail("expected metadata to be texts by name, found ", found);
      case Place::dtype: tensor_fail("expected dtype to be a string, found ", found);
      case Place::shape: tensor_fail("expected shape to be an array of sizes, found ", found);
      case Place::offsets: tensor_fail("expected data_offsets to be an array of two offsets, found ", found);
      default: context_.fail("expected ", shown(name_), " to be an object, found ", found);
    }
  }

  void start_value(const std::string& name) {
    if (!names_.insert(name).second) {
      context_.fail("expected each name once, found ", shown(name), " again");
    }
    name_ = name;
    is_metadata_ = name == metadata_key;
    place_ = Place::file_value;
    dtype_.reset();
    sizes_.reset();
    offsets_.reset();
  }

  void start_tensor_field(const std::string& field) {
    if (field == "dtype" && !dtype_) {
      place_ = Place::dtype;
    } else if (field == "shape" && !sizes_) {
      place_ = Place::shape;
    } else if (field == "data_offsets" && !offsets_) {
      place_ = Place::offsets;
    } else {
      tensor_fail("expected dtype, shape and data_offsets once each, found another ", shown(field));
    }
  }

  DType parse_dtype(const std::string& text) const {
    const TypeName* type = find_type(safetensors_types, text);
    if (type == nullptr) {
      tensor_fail("expected an element type of ", listed(safetensors_types), ", found ", shown(text));
    }
    return type->dtype;
  }

  void finish_tensor() {
    if (!dtype_ || !sizes_ || !offsets_) {
      tensor_fail("expected dtype, shape and data_offsets, found no ", !dtype_   ? "dtype"
                                                                       : !sizes_ ? "shape"
                                                                                 : "data_offsets");
    }
    header_.entries.push_back({name_, *dtype_, *sizes_, (*offsets_)[0], (*offsets_)[1]});
  }

  const FileContext& context_;
  SafetensorsHeader header_;
  std::set<std::string> names_;
  Place place_ = Place::outside;
  bool is_metadata_ = false;
  std::string name_;  // of the tensor that is being read
  std::string metadata_name_;
  std::optional<DType> dtype_;
  std::optional<Dims> sizes_;
  std::optional<std::vector<std::uint64_t>> offsets_;
};

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view header, const FileContext& context) {
  // White space may follow the object, to align the data, but not precede it.
  if (!header.starts_with('{')) {
    context.fail("expected the header to start with '{', found ", shown(header.substr(0, 8)));
  }
  // The parser stops at a zero byte, and would miss what a file hides behind it.
  if (const std::size_t zero = header.find('\0'); zero != std::string_view::npos) {
    context.fail("expected JSON in the header, found a zero byte at its byte ", zero);
  }
  HeaderReader reader(context);
  json::sax_parse(header, &reader);
  return reader.take();
}

std::string write_safetensors_header(const SafetensorsHeader& header) {
  JsonObject object;
  if (!header.metadata.empty()) {
    JsonObject metadata;
    for (const auto& [key, value] : header.metadata) {
      metadata.set(key, value);
    }
    object.add(metadata_key, metadata.text());
  }
  for (const SafetensorsEntry& entry : header.entries) {
    JsonObject tensor;
    tensor.set("dtype", find_type(safetensors_types, entry.dtype)->name);
    tensor.add("shape", json_array(entry.sizes));
    tensor.add("data_offsets", json_array(std::array{entry.begin, entry.end}));
    object.add(entry.name, tensor.text());
  }
  std::string result = object.text();
  constexpr std::size_t alignment = 8;  // of the data that follows; the length before the header has 8 bytes too
  result.append((alignment - result.size() % alignment) % alignment, ' ');
  return result;
}

}  // namespace headway::io
