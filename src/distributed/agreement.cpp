#include "distributed/agreement.h"

#include <bit>
#include <sstream>

#include "core/elements.h"

namespace headway::distributed {
namespace {

class Fnv {
 public:
  void add(std::uint64_t word) {
    for (int byte = 0; byte < 8; ++byte) {
      hash_ = (hash_ ^ (word >> (8 * byte) & 0xff)) * 0x100000001b3U;
    }
  }
  std::string text() const {
    std::ostringstream stream;
    stream << '#' << std::hex << hash_;
    return std::move(stream).str();
  }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325U;
};

void add_elements(const ConstTensorView& view, Fnv& hash) {
  if (view.rank() == 0) {
    const bool whole = is_integer(view.dtype());
    hash.add(whole ? static_cast<std::uint64_t>(load_integer(view, 0))
                   : std::bit_cast<std::uint64_t>(load_float(view, 0)));
    return;
  }
  for (std::int64_t i = 0; i < view.size(0); ++i) {
    add_elements(view.select(0, i), hash);
  }
}

// Lines of "name=value"; a value holds no line break of its own.
std::string one_line(std::string value) {
  for (char& c : value) {
    c = c == '\n' ? ' ' : c;
  }
  return value;
}

std::vector<std::pair<std::string, std::string>> lines_of(const std::string& text) {
  std::vector<std::pair<std::string, std::string>> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    const std::size_t equals = line.find('=');
    lines.emplace_back(line.substr(0, equals), equals == std::string::npos ? "" : line.substr(equals + 1));
  }
  return lines;
}

}  // namespace

std::string digest(const std::optional<ConstTensorView>& view) {
  if (!view) {
    return "none";
  }
  if (!(view->device() == Device{}) || (!is_float(view->dtype()) && !is_integer(view->dtype()))) {
    return text(view->dtype(), " ", view->sizes());
  }
  Fnv hash;
  add_elements(*view, hash);
  return text(view->sizes(), " ", hash.text());
}

std::string digest(const std::optional<Sharding>& sharding) {
  if (!sharding) {
    return "contiguous";
  }
  Fnv hash;
  for (const auto* side : {&sharding->queries, &sharding->keys}) {
    for (const Shard& shard : *side) {
      hash.add(shard.size());
      for (const Rows& rows : shard) {
        hash.add(static_cast<std::uint64_t>(rows.begin));
        hash.add(static_cast<std::uint64_t>(rows.end));
      }
    }
  }
  return text("of ", sharding->queries.size(), " ranks ", hash.text());
}

void Agreement::attempt(const std::function<void()>& check) {
  if (!error_.empty()) {
    return;
  }
  try {
    check();
    return;
  } catch (const TypeMismatch& error) {
    error_kind_ = "type";
    error_ = error.what();
  } catch (const Unsupported& error) {
    error_kind_ = "unsupported";
    error_ = error.what();
  } catch (const std::exception& error) {
    error_kind_ = "value";
    error_ = error.what();
  }
}

std::string Agreement::serialized() const {
  std::string lines;
  if (!error_.empty()) {
    return text("error ", error_kind_, "=", one_line(error_), "\n");
  }
  for (const Field& field : shared_) {
    lines += text(field.name, "=", one_line(field.value), "\n");
  }
  for (const std::int64_t number : own_) {
    lines += text("own=", number, "\n");
  }
  return lines;
}

void Agreement::throw_error(std::size_t rank, const std::string& kind, const std::string& error) const {
  const std::size_t colon = error.find(": ");  // the text begins with the operation already
  const std::string message =
      text(operation_, ": rank ", rank, colon == std::string::npos ? ": " + error : error.substr(colon));
  if (kind == "error type") {
    throw TypeMismatch(message);
  }
  if (kind == "error unsupported") {
    throw Unsupported(message);
  }
  throw InvalidArgument(message);
}

std::vector<std::vector<std::int64_t>> Agreement::reach() {
  const std::vector<std::string> texts = transport_.all_gather(serialized());
  std::vector<std::vector<std::pair<std::string, std::string>>> ranks;
  for (const std::string& one : texts) {
    ranks.push_back(lines_of(one));
  }
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (!ranks[rank].empty() && ranks[rank][0].first.starts_with("error ")) {
      throw_error(rank, ranks[rank][0].first, ranks[rank][0].second);
    }
  }
  std::vector<std::vector<std::int64_t>> numbers(ranks.size());
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (std::size_t n = 0; n < ranks[rank].size(); ++n) {
      const auto& [name, value] = ranks[rank][n];
      if (name == "own") {
        numbers[rank].push_back(std::stoll(value));
      } else if (n >= ranks[0].size() || ranks[0][n].first != name) {
        throw InvalidArgument(text(operation_, ": rank ", rank, " made another call than rank 0"));
      } else if (ranks[0][n].second != value) {
        throw InvalidArgument(text(operation_, ": ", name, " is ", ranks[0][n].second, " on rank 0 and ", value,
                                   " on rank ", rank, ", expected the same on all ranks"));
      }
    }
  }
  return numbers;
}

}  // namespace headway::distributed
