// Where one head of a language model looks in one sentence: as a map in the terminal, and as pages for a browser.
//
//   example_sentence DATA [PAGES]     the folder examples/data, and the folder to write the pages to
//
// The queries, keys and values are those of layer 3 of a sentence model, from examples/data/sentence.py.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <numeric>
#include <string>
#include <vector>

#include "headway/headway.h"

using namespace headway;

namespace {

constexpr std::int64_t shown_head = 1;
const std::string asked_about = "it";

struct Sentence {
  std::vector<std::string> tokens;
  Tensor rows;  // [3,heads,tokens,width]: query, key, value

  ConstTensorView query() const { return rows.view().select(0, 0); }
  ConstTensorView key() const { return rows.view().select(0, 1); }
  ConstTensorView value() const { return rows.view().select(0, 2); }
};

Sentence read_sentence(const std::filesystem::path& folder) {
  Sentence sentence{.tokens = {}, .rows = convert(load_npy(folder / "sentence.npy"), DType::f32)};
  std::ifstream file(folder / "sentence.txt");
  for (std::string token; std::getline(file, token);) {
    sentence.tokens.push_back(token);
  }
  return sentence;
}

bool terminal_has_blocks() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    if (const char* value = std::getenv(name); value != nullptr && *value != '\0') {
      const std::string text = value;
      return text.find("UTF-8") != std::string::npos || text.find("utf8") != std::string::npos;
    }
  }
  return false;
}

// A cell of the map, darker for a larger weight.
std::string shade(float weight, bool blocks) {
  const std::vector<std::string> shades =
      blocks ? std::vector<std::string>{" ", "░", "▒", "▓", "█"} : std::vector<std::string>{" ", ".", "-", "+", "#"};
  const std::size_t level = weight < 0.02f ? 0 : weight < 0.08f ? 1 : weight < 0.2f ? 2 : weight < 0.45f ? 3 : 4;
  std::string cell;
  for (int column = 0; column < 5; ++column) {
    cell += shades[level];
  }
  return cell;
}

// weights [tokens,tokens]
void draw_map(const std::vector<std::string>& tokens, ConstTensorView weights) {
  const bool blocks = terminal_has_blocks();
  std::cout << std::setw(8) << "";
  for (const std::string& token : tokens) {
    std::cout << ' ' << std::left << std::setw(5) << token.substr(0, 5);
  }
  std::cout << '\n';
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    std::cout << std::right << std::setw(8) << tokens[i].substr(0, 8);
    std::string line;
    for (std::size_t j = 0; j < tokens.size(); ++j) {
      line += ' ' + shade(weights.at<float>({std::int64_t(i), std::int64_t(j)}), blocks);
    }
    std::cout << line.substr(0, line.find_last_not_of(' ') + 1) << '\n';
  }
}

// "it" looks at animal 69 %, [CLS] 10 %, it 6 %
void name_strongest(const std::vector<std::string>& tokens, ConstTensorView weights) {
  const auto row = std::find(tokens.begin(), tokens.end(), asked_about) - tokens.begin();
  const float* share = weights.select(0, row).as<float>();
  std::vector<std::size_t> order(tokens.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return share[a] > share[b]; });
  std::cout << '"' << asked_about << "\" looks at ";
  for (std::size_t n = 0; n < 3; ++n) {
    std::cout << (n > 0 ? ", " : "") << tokens[order[n]] << ' ' << std::lround(100 * share[order[n]]) << " %";
  }
  std::cout << '\n';
}

// The whole layer to look at, and one head of it step by step.
void write_pages(const std::filesystem::path& folder, const Sentence& sentence) {
  std::filesystem::create_directories(folder);
  ViewRequest view;
  view.title = "One layer reads a sentence";
  view.key_tokens = sentence.tokens;
  view.overwrite = true;
  write_view(folder / "attention.html", sentence.query(), sentence.key(), {}, view);
  TraceRequest steps;
  steps.title = "One head reads a sentence, step by step";
  steps.key_tokens = sentence.tokens;
  const auto head = [](ConstTensorView rows) { return rows.select(0, shown_head); };
  write_trace(folder / "trace.html",
              trace(head(sentence.query()), head(sentence.key()), head(sentence.value()), {}, steps), true);
  std::cout << "\nopen in a browser: " << (folder / "attention.html").string() << " (this layer, all its heads)\n"
            << "                   " << (folder / "trace.html").string() << " (this head, step by step)\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: example_sentence DATA [PAGES]\n";
    return 2;
  }
  const Sentence sentence = read_sentence(argv[1]);
  const auto count = static_cast<std::int64_t>(sentence.tokens.size());
  Tensor weights({sentence.rows.size(1), count, count});
  attention_scores(sentence.query().unsqueeze(0), sentence.key().unsqueeze(0), weights.view().unsqueeze(0));
  const ConstTensorView head = std::as_const(weights).view().select(0, shown_head);
  std::cout << "Where one head of a language model looks, from each word down to each word across:\n\n";
  draw_map(sentence.tokens, head);
  name_strongest(sentence.tokens, head);
  if (argc > 2) {
    try {
      write_pages(argv[2], sentence);
    } catch (const Unsupported& error) {
      std::cout << "\nno pages: " << error.what() << '\n';
    }
  }
  const auto it = std::find(sentence.tokens.begin(), sentence.tokens.end(), asked_about) - sentence.tokens.begin();
  const auto animal = std::find(sentence.tokens.begin(), sentence.tokens.end(), "animal") - sentence.tokens.begin();
  return head.at<float>({it, animal}) > 0.5f ? 0 : 1;
}
