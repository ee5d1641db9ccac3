// The .npy format: a magic text, a version, a header that is a Python dictionary as text, and the elements.
#include "io/npy_format.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <string>

#include "io/bytes.h"
#include "io/tensor_bytes.h"
#include "io/text_checks.h"

namespace headway::io {
namespace {

using namespace std::string_view_literals;

constexpr std::string_view magic = "\x93NUMPY";
constexpr TypeName npy_types[] = {{"<f4", DType::f32}, {"<f8", DType::f64}, {"<f2", DType::f16},
                                  {"|b1", DType::b8},  {"<i4", DType::i32}, {"<i8", DType::i64}};

// Parses {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), } and no other Python.
class HeaderParser {
 public:
  HeaderParser(std::string_view header, const FileContext& context) : rest_(header), context_(context) {}

  NpyHeader parse() {
    expect('{');
    while (!accept('}')) {
      parse_entry();
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_spaces();
    if (!rest_.empty()) {
      fail("the end of the header");
    }
    if (!dtype_ || !fortran_order_ || !sizes_) {
      const char* missing = !dtype_ ? "descr" : !fortran_order_ ? "fortran_order" : "shape";
      context_.fail("expected a header with descr, fortran_order and shape, found one without ", missing);
    }
    return {*dtype_, *fortran_order_, *sizes_};
  }

 private:
  [[noreturn]] void fail(std::string_view expected) const {
    context_.fail("expected ", expected, " in the header, found ", shown(rest_));
  }

  void skip_spaces() { rest_.remove_prefix(std::min(rest_.find_first_not_of(" \t\r\n"), rest_.size())); }

  bool accept(std::string_view token) {
    skip_spaces();
    const bool found = rest_.starts_with(token);
    rest_.remove_prefix(found ? token.size() : 0);
    return found;
  }
  bool accept(char token) { return accept(std::string_view(&token, 1)); }

  void expect(char token) {
    if (!accept(token)) {
      fail(std::string{'\'', token, '\''});
    }
  }

  std::string_view parse_string() {
    skip_spaces();
    const char quote = rest_.empty() ? '\0' : rest_.front();
    const std::size_t end = quote == '\'' || quote == '"' ? rest_.find(quote, 1) : std::string_view::npos;
    if (end == std::string_view::npos) {
      fail("a string");
    }
    const std::string_view result = rest_.substr(1, end - 1);
    rest_.remove_prefix(end + 1);
    return result;
  }

  void parse_entry() {
    const std::string_view key = parse_string();
    expect(':');
    if (key == "descr" && !dtype_) {
      dtype_ = parse_dtype();
    } else if (key == "fortran_order" && !fortran_order_) {
      fortran_order_ = parse_bool();
    } else if (key == "shape" && !sizes_) {
      sizes_ = parse_shape();
    } else {
      context_.fail("expected descr, fortran_order and shape once each in the header, found another ", shown(key));
    }
  }

  DType parse_dtype() {
    skip_spaces();
    if (rest_.starts_with('[') || rest_.starts_with('(')) {
      context_.fail("expected an element type of ", listed(npy_types), ", found the structured type ", shown(rest_));
    }
    const std::string_view found = parse_string();
    const TypeName* type = find_type(npy_types, found);
    if (type == nullptr) {
      const std::string_view remark = found.find('O') != found.npos ? " (Python objects are never unpickled)"
                                      : found.starts_with('>')      ? " (big-endian)"
                                                                    : "";
      context_.fail("expected an element type of ", listed(npy_types), ", found ", shown(found), remark);
    }
    return type->dtype;
  }

  bool parse_bool() {
    if (accept("True"sv)) {
      return true;
    }
    if (!accept("False"sv)) {
      fail("True or False");
    }
    return false;
  }

  Dims parse_shape() {
    Dims sizes;
    expect('(');
    while (!accept(')')) {
      append_size(sizes, parse_size(), context_);
      // (3) is a number in Python, not a tuple, so it is not a shape.
      if (!accept(',')) {
        if (sizes.size() < 2) {
          fail("','");
        }
        expect(')');
        break;
      }
    }
    return sizes;
  }

  std::uint64_t parse_size() {
    skip_spaces();
    std::uint64_t size = 0;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), size);
    if (error != std::errc{}) {
      fail("a size from 0 to 2^63 - 1");
    }
    rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
    return size;
  }

  std::string_view rest_;
  const FileContext& context_;
  std::optional<DType> dtype_;
  std::optional<bool> fortran_order_;
  std::optional<Dims> sizes_;
};

template <class Integer>
std::uint64_t read_integer(ByteSource& source) {
  std::array<std::byte, sizeof(Integer)> bytes;
  source.read(bytes);
  return load_integer<Integer>(bytes);
}

// The version determines the width of the header's length field.
std::uint64_t read_header_length(ByteSource& source, const FileContext& context) {
  std::array<std::byte, magic.size() + 2> start;
  if (source.remaining() < start.size()) {
    context.fail("expected a .npy array, found ", source.remaining(), " bytes");
  }
  source.read(start);
  const std::string_view found = text_of(start);
  if (!found.starts_with(magic)) {
    context.fail("expected a .npy array, which starts with ", shown(magic), ", found ",
                 shown(found.substr(0, magic.size())));
  }
  const int major = std::to_integer<int>(start[magic.size()]);
  const int minor = std::to_integer<int>(start[magic.size() + 1]);
  if (major < 1 || major > 3 || minor != 0) {
    context.fail("expected .npy version 1.0, 2.0 or 3.0, found ", major, ".", minor);
  }
  const std::size_t width = major == 1 ? sizeof(std::uint16_t) : sizeof(std::uint32_t);
  if (source.remaining() < width) {
    context.fail("expected ", width, " bytes for the header's length, found ", source.remaining());
  }
  return major == 1 ? read_integer<std::uint16_t>(source) : read_integer<std::uint32_t>(source);
}

NpyHeader read_header(ByteSource& source, const FileContext& context, const ReadLimits& limits) {
  const std::uint64_t length = read_header_length(source, context);
  if (length > limits.header_bytes) {
    context.fail("expected a header of at most ", limits.header_bytes, " bytes, found ", length);
  }
  if (length > source.remaining()) {
    context.fail("expected a header of ", length, " bytes, found ", source.remaining());
  }
  std::string header(length, '\0');
  source.read(std::as_writable_bytes(std::span(header)));
  return HeaderParser(header, context).parse();
}

Dims reversed(const Dims& dims) {
  Dims result;
  for (int axis = dims.size() - 1; axis >= 0; --axis) {
    result.push_back(dims[axis]);
  }
  return result;
}

// The same elements with the first axis last.
ConstTensorView with_axes_reversed(ConstTensorView view) {
  return {view.data(), view.dtype(), reversed(view.sizes()), reversed(view.strides())};
}

}  // namespace

Dims NpyHeader::stored_sizes() const { return fortran_order ? reversed(sizes) : sizes; }

Tensor NpyHeader::as_meant(Tensor stored) const {
  return fortran_order ? convert(with_axes_reversed(stored), dtype) : std::move(stored);
}

NpyHeader read_npy_header(ByteSource& source, const FileContext& context, const ReadLimits& limits) {
  const NpyHeader header = read_header(source, context, limits);
  const std::uint64_t bytes = checked_bytes(header.sizes, header.dtype, limits, context);
  if (bytes != source.remaining()) {
    context.fail("expected ", bytes, " bytes of elements (", header.dtype, " of shape ", header.sizes, "), found ",
                 source.remaining());
  }
  return header;
}

Tensor read_npy(ByteSource& source, const FileContext& context, const ReadLimits& limits) {
  const NpyHeader header = read_npy_header(source, context, limits);
  return header.as_meant(read_elements(source, header.stored_sizes(), header.dtype));
}

// With everything before it, padded as the format requires: the elements start at a multiple of 64 bytes.
std::string npy_header(const Dims& sizes, DType dtype) {
  constexpr std::size_t alignment = 64;
  std::string shape;
  for (const std::int64_t size : sizes) {
    shape += text(size, sizes.size() == 1 ? "," : ", ");
  }
  if (sizes.size() > 1) {
    shape.resize(shape.size() - 2);
  }
  std::string dictionary =
      text("{'descr': '", find_type(npy_types, dtype)->name, "', 'fortran_order': False, 'shape': (", shape, "), }");
  const std::size_t fixed = magic.size() + 2 + sizeof(std::uint16_t);
  const std::size_t unpadded = fixed + dictionary.size() + 1;
  dictionary.append((alignment - unpadded % alignment) % alignment, ' ');
  dictionary += '\n';

  Bytes length;
  append_integer(length, static_cast<std::uint16_t>(dictionary.size()));
  return text(magic, "\x01\x00"sv, text_of(length), dictionary);
}

void require_npy(const char* operation, std::string_view name, ConstTensorView view) {
  require_host(operation, name, view);
  if (find_type(npy_types, view.dtype()) == nullptr) {
    throw TypeMismatch(text(operation, ": expected an element type that .npy has, found ", view.dtype(),
                            for_tensor(name), "; save it as .safetensors or convert it"));
  }
}

std::uint64_t npy_bytes(ConstTensorView view) {
  return npy_header(view.sizes(), view.dtype()).size() +
         static_cast<std::uint64_t>(view.elements()) * size_of(view.dtype());
}

void write_npy(const ByteSink& sink, ConstTensorView view) {
  sink(bytes_of(npy_header(view.sizes(), view.dtype())));
  write_elements(sink, view);
}

}  // namespace headway::io
