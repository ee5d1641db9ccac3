// Section 1 of docs/contract.md, one step for each of its lines.
#include "trace/attention_steps.h"

#include <cmath>
#include <optional>

#include "core/elements.h"
#include "core/key_range.h"
#include "core/spans.h"
#include "core/text.h"
#include "engines/reference/head.h"

namespace headway::tracing {
namespace {

using reference::infinity;
using reference::Sum;

const Axes matrix{.row = "query", .column = "key"};
const Axes list{.row = "query"};

// "0.5, 0.25", or the first few.
std::string list_text(ConstTensorView numbers) {
  constexpr std::int64_t most = 8;
  std::string result;
  for (std::int64_t n = 0; n < std::min(numbers.size(0), most); ++n) {
    result += text(n == 0 ? "" : ", ", load_float(numbers, n * numbers.stride(0)));
  }
  return numbers.size(0) > most ? result + ", ..." : result;
}

class AttentionSteps {
 public:
  AttentionSteps(Builder& builder, const Problem& problem) : builder_(builder), problem_(problem) {
    sizes_ = {problem.batch, problem.heads, problem.query_len, problem.key_len};
  }

  std::size_t run(std::size_t query, std::size_t key, std::size_t value) {
    builder_.check("scores", matrix, sizes_);
    const Extent out{problem_.batch, problem_.heads, problem_.query_len, problem_.value_dim};
    builder_.check("weighted sums", {.row = "query", .column = "dim"}, out);
    add_given_matrices();
    add_scores(query, key);
    add_modifiers();
    add_masks();
    add_softmax();
    add_dropout();
    return add_output(value, out);
  }

 private:
  using Index = std::int64_t;

  // ---- What is given ----

  void add_given_matrices() {
    if (problem_.bias) {
      const ConstTensorView bias = *problem_.bias;
      bias_ = builder_.add({"bias", "bias", "bias[i,j]", "It is added to the scores as it is; -inf forbids a key.",
                            TraceKind::given, matrix},
                           Grid::filled(sizes_, [&](Index b, Index h, Index i, Index j) {
                             return load_float(bias, row_offset(bias, b, h, i) + j * bias.stride(3));
                           }));
    }
    if (problem_.mask) {
      const ConstTensorView mask = *problem_.mask;
      masks_.push_back(
          builder_.add({"mask", "mask", "mask[i,j]", "1 where query i may attend to key j, 0 where it may not.",
                        TraceKind::given, matrix},
                       Grid::filled(sizes_, [&](Index b, Index h, Index i, Index j) {
                         return load_bool(mask, row_offset(mask, b, h, i) + j * mask.stride(3)) ? 1.0 : 0.0;
                       })));
    }
  }

  // ---- Scores ----

  void add_scores(std::size_t query, std::size_t key) {
    const Grid &q = builder_.grid(query), &k = builder_.grid(key);
    scores_ = builder_.add(
        {"scores", "S", "S[i,j] = sum over d of Q[i,d] * K[j,d]",
         "The dot product of a query and a key: large where the two point the same way.", TraceKind::product, matrix},
        Grid::filled(sizes_,
                     [&](Index b, Index h, Index i, Index j) {
                       double dot = 0;
                       for (Index d = 0; d < problem_.head_dim; ++d) {
                         dot += q(b, h, i, d) * k(b, problem_.kv_head(h), j, d);
                       }
                       return dot;
                     }),
        {{query, TracePart::row}, {key, TracePart::other_row}});
    const double usual = 1.0 / std::sqrt(static_cast<double>(problem_.head_dim));
    const bool by_width = problem_.head_dim > 0 && problem_.scale == usual;
    modify("scaled scores",
           by_width ? text("S[i,j] = S[i,j] / sqrt(", problem_.head_dim, ")")
                    : text("S[i,j] = ", problem_.scale, " * S[i,j]"),
           by_width ? "A sum of D products grows with sqrt(D); divided by it, scores keep one size whatever D is."
                    : "The scale that was asked for takes the place of 1 / sqrt(D).",
           [&](double score, Index, Index, Index, Index) { return problem_.scale * score; });
  }

  // A step that changes each score in place.
  template <class Change>
  void modify(const char* name, const std::string& formula, const std::string& why, const Change& change,
              const std::vector<TraceSource>& more = {}) {
    const Grid& before = builder_.grid(scores_);
    std::vector<TraceSource> sources = {{scores_, TracePart::cell}};
    sources.insert(sources.end(), more.begin(), more.end());
    Grid after = Grid::filled(
        sizes_, [&](Index b, Index h, Index i, Index j) { return change(before(b, h, i, j), b, h, i, j); });
    scores_ = builder_.add({name, "S", formula, why, TraceKind::elementwise, matrix}, std::move(after), sources);
  }

  void add_modifiers() {
    if (const auto cap = problem_.softcap) {
      modify("capped scores", text("S[i,j] = ", *cap, " * tanh(S[i,j] / ", *cap, ")"),
             text("No score passes ", *cap, " on either side, and small ones stay as they are."),
             [&](double score, Index, Index, Index, Index) { return *cap * std::tanh(score / *cap); });
    }
    if (bias_) {
      const Grid& bias = builder_.grid(*bias_);
      modify("biased scores", "S[i,j] = S[i,j] + bias[i,j]",
             "What is known about a pair besides its content is added to its score.",
             [&](double score, Index b, Index h, Index i, Index j) {
               return bias(b, h, i, j) == -infinity ? -infinity : score + bias(b, h, i, j);
             },
             {{*bias_, TracePart::cell}});
    }
    if (problem_.alibi_slopes) {
      const ConstTensorView slopes = *problem_.alibi_slopes;
      modify("scores with distance", text("S[i,j] = S[i,j] - slope[h] * |i + offset - j|, slope = ", list_text(slopes)),
             "Far keys cost more, by a slope that each head has of its own.",
             [&](double score, Index b, Index h, Index i, Index j) {
               const double slope = load_float(slopes, h * slopes.stride(0));
               return score + -slope * std::fabs(static_cast<double>(i + offset(b) - j));
             });
    }
  }

  // ---- Masks ----

  Index offset(Index b) const { return sequence(problem_, b).offset; }

  std::string offset_text() const {
    std::string result;
    for (Index b = 0; b < problem_.batch; ++b) {
      const std::string one = text(offset(b));
      if (b == 0) {
        result = one;
      } else if (one != result) {
        return "its batch item's offset";
      }
    }
    return result;
  }

  // A mask that is the same for all heads, and for all batch items unless stated otherwise.
  template <class Allows>
  void add_mask(const char* name, bool by_item, const std::string& formula, const std::string& why,
                const Allows& allows) {
    const Extent extent{by_item ? sizes_.batch : 1, 1, sizes_.rows, sizes_.columns};
    const Axes axes{.batch = by_item, .head = false, .row = "query", .column = "key"};
    masks_.push_back(builder_.add(
        {name, "allowed", formula, why, TraceKind::allowed, axes},
        Grid::filled(extent, [&](Index b, Index, Index i, Index j) { return allows(b, i, j) ? 1.0 : 0.0; })));
  }

  // The offset depends on the lengths of an item.
  bool offset_by_item() const {
    return problem_.causal == Causal::bottom_right && (problem_.valid_lens || problem_.query_lens);
  }

  void add_masks() {
    if (problem_.causal != Causal::none) {
      const bool shifted = problem_.causal == Causal::bottom_right;
      add_mask("causal mask", offset_by_item(),
               shifted ? text("allowed[i,j] = j <= i + offset, offset = ", offset_text()) : "allowed[i,j] = j <= i",
               shifted ? "A query sees no key after its own position; the last query stands at the last key."
                       : "A query sees no key after its own position.",
               [&](Index b, Index i, Index j) { return j <= i + offset(b); });
    }
    if (problem_.window_left || problem_.window_right) {
      add_window();
    }
    if (problem_.valid_lens) {
      const ConstTensorView lens = *problem_.valid_lens;
      add_mask("valid lengths", true,
               problem_.valid_lens_per_batch ? "allowed[i,j] = j < valid_lens[b]" : "allowed[i,j] = j < valid_lens[i]",
               "Keys from there on are padding: they fill the array and mean nothing.", [&](Index b, Index i, Index j) {
                 return j < load_integer(lens, b * lens.stride(0) + i * lens.stride(1));
               });
    }
    if (problem_.query_lens) {
      add_mask("query lengths", true, "allowed[i,j] = i < query_lens[b]",
               "Queries from there on are padding and see nothing.",
               [&](Index b, Index i, Index) { return i < sequence(problem_, b).real_queries; });
    }
    if (problem_.spans) {
      add_spans();
    }
    decide_what_is_allowed();
    if (!masks_.empty()) {
      std::vector<TraceSource> sources;
      for (const std::size_t mask : masks_) {
        sources.push_back({mask, TracePart::cell});
      }
      modify(
          "masked scores",
          masks_.size() == 1 ? "S[i,j] = S[i,j] where allowed, else -inf"
                             : "S[i,j] = S[i,j] where all allow it, else -inf",
          "exp(-inf) is 0: a forbidden key gets no weight at all.",
          [&](double score, Index b, Index h, Index i, Index j) {
            return allowed_(b, h, i, j) != 0 ? score : -infinity;
          },
          sources);
    }
  }

  void add_spans() {
    const bool by_item = problem_.spans->stride(0) != 0, by_head = problem_.spans->stride(1) != 0;
    Grid grid(Extent{by_item ? sizes_.batch : 1, by_head ? sizes_.heads : 1, sizes_.rows, sizes_.columns});
    for (Index b = 0; b < grid.extent.batch; ++b) {
      for (Index h = 0; h < grid.extent.heads; ++h) {
        for (Index i = 0; i < sizes_.rows; ++i) {
          for_spans_inside(problem_, b, h, i / problem_.span_rows, {0, sizes_.columns}, [&](const KeyRange& span) {
            for (Index j = span.begin; j < span.end; ++j) {
              grid(b, h, i, j) = 1.0;
            }
          });
        }
      }
    }
    const Axes axes{.batch = by_item, .head = by_head, .row = "query", .column = "key"};
    masks_.push_back(builder_.add({"spans", "allowed", "allowed[i,j] = begin <= j < end for a span of i",
                                   "A query sees the keys inside its spans.", TraceKind::allowed, axes},
                                  std::move(grid)));
  }

  void add_window() {
    const auto left = problem_.window_left, right = problem_.window_right;
    const std::string formula = text("allowed[i,j] = ", left ? text("i + offset - ", *left, " <= ") : "", "j",
                                     right ? text(" <= i + offset + ", *right) : "", ", offset = ", offset_text());
    add_mask("window", offset_by_item(), formula, "A query sees the keys near its own position only.",
             [&](Index b, Index i, Index j) {
               const Index position = i + offset(b);
               return (!left || position - *left <= j) && (!right || j <= position + *right);
             });
  }

  void decide_what_is_allowed() {
    allowed_ = Grid::filled(sizes_, [&](Index b, Index h, Index i, Index j) {
      bool allowed = !bias_ || builder_.grid(*bias_)(b, h, i, j) != -infinity;
      for (const std::size_t mask : masks_) {
        const Grid& one = builder_.grid(mask);
        allowed = allowed && one(one.extent.batch == 1 ? 0 : b, one.extent.heads == 1 ? 0 : h, i, j) != 0;
      }
      return allowed ? 1.0 : 0.0;
    });
  }

  // ---- Softmax ----

  std::optional<double> sink(Index b, Index h, Index i) const {
    if (!problem_.sinks || i >= sequence(problem_, b).real_queries) {
      return std::nullopt;
    }
    return load_float(*problem_.sinks, h * problem_.sinks->stride(0));
  }

  void add_softmax() {
    const Grid& s = builder_.grid(scores_);
    const Extent rows{sizes_.batch, sizes_.heads, sizes_.rows, 1};
    const bool sinks = problem_.sinks.has_value();
    const std::string sink_list = sinks ? text(", sink = ", list_text(*problem_.sinks)) : "";
    const std::size_t highest = builder_.add(
        {"row maxima", "m",
         sinks ? "m[i] = the largest of S[i,j] over all j, and of sink[h]" + sink_list
               : "m[i] = the largest of S[i,j] over all j",
         "exp of a large score would overflow, so each row's largest is subtracted first.", TraceKind::reduced, list},
        Grid::filled(rows,
                     [&](Index b, Index h, Index i, Index) {
                       double largest = sink(b, h, i).value_or(-infinity);
                       for (Index j = 0; j < sizes_.columns; ++j) {
                         if (allowed_(b, h, i, j) != 0) {
                           largest = std::fmax(largest, s(b, h, i, j));  // a NaN shows in the sum
                         }
                       }
                       return largest;
                     }),
        {{scores_, TracePart::row}});
    const Grid& m = builder_.grid(highest);
    const std::size_t exponentials =
        builder_.add({"exponentials", "E", "E[i,j] = exp(S[i,j] - m[i])",
                      "The largest becomes 1 and the others less; what was subtracted cancels in the division below.",
                      TraceKind::elementwise, matrix},
                     Grid::filled(sizes_,
                                  [&](Index b, Index h, Index i, Index j) {
                                    return allowed_(b, h, i, j) != 0 ? std::exp(s(b, h, i, j) - m(b, h, i, 0)) : 0.0;
                                  }),
                     {{scores_, TracePart::cell}, {highest, TracePart::row_entry}});
    const Grid& e = builder_.grid(exponentials);
    const std::size_t sums = builder_.add(
        {"row sums", "z", sinks ? "z[i] = sum over j of E[i,j] + exp(sink[h] - m[i])" : "z[i] = sum over j of E[i,j]",
         sinks ? "The sink takes a share of each row, with no value behind it."
               : "What a row has to be divided by to sum to 1.",
         TraceKind::reduced, list},
        Grid::filled(rows,
                     [&](Index b, Index h, Index i, Index) {
                       Sum sum;
                       for (Index j = 0; j < sizes_.columns; ++j) {
                         sum.add(e(b, h, i, j));
                       }
                       if (const auto one = sink(b, h, i)) {
                         sum.add(std::exp(*one - m(b, h, i, 0)));
                       }
                       return sum.value();
                     }),
        {{exponentials, TracePart::row}});
    const Grid& z = builder_.grid(sums);
    Grid weights = Grid::filled(sizes_, [&](Index b, Index h, Index i, Index j) {
      return allowed_(b, h, i, j) != 0 ? e(b, h, i, j) / z(b, h, i, 0) : 0.0;
    });
    weights_ = builder_.add({"weights", "P", "P[i,j] = E[i,j] / z[i]",
                             "How much of each key's value query i takes; a query that sees no key takes nothing.",
                             TraceKind::elementwise, matrix},
                            std::move(weights), {{exponentials, TracePart::cell}, {sums, TracePart::row_entry}});
  }

  void add_dropout() {
    if (!problem_.dropout.active()) {
      return;
    }
    const Grid& p = builder_.grid(weights_);
    Grid dropped = Grid::filled(sizes_, [&](Index b, Index h, Index i, Index j) {
      const double weight = p(b, h, i, j);
      return weight == 0 ? 0.0 : weight * problem_.dropout.factor(b, h, i, j);
    });
    weights_ = builder_.add(
        {"weights after dropout", "P", text("P[i,j] = P[i,j] * ", problem_.dropout.kept_scale, " where kept, else 0"),
         "Training leaves weights out at random, so that no query relies on a single key.", TraceKind::elementwise,
         matrix},
        std::move(dropped), {{weights_, TracePart::cell}});
  }

  // ---- The weighted sum ----

  std::size_t add_output(std::size_t value, const Extent& sizes) {
    const Grid &p = builder_.grid(weights_), &v = builder_.grid(value);
    // Forbidden keys are skipped, not multiplied by 0: what they hold, NaN included, must not show.
    Grid out = Grid::filled(sizes, [&](Index b, Index h, Index i, Index d) {
      Sum sum;
      for (Index j = 0; j < sizes_.columns; ++j) {
        if (allowed_(b, h, i, j) != 0) {
          sum.add(p(b, h, i, j) * v(b, problem_.kv_head(h), j, d));
        }
      }
      return sum.value();
    });
    return builder_.add({"weighted sums",
                         "O",
                         "O[i,d] = sum over j of P[i,j] * V[j,d]",
                         "The values of the keys, mixed in the proportions of the weights.",
                         TraceKind::product,
                         {.row = "query", .column = "dim"}},
                        std::move(out), {{weights_, TracePart::row}, {value, TracePart::column}});
  }

  Builder& builder_;
  const Problem& problem_;
  Extent sizes_;  // of the score matrix
  std::optional<std::size_t> bias_;
  std::vector<std::size_t> masks_;  // steps of 1 and 0
  std::size_t scores_ = 0, weights_ = 0;
  Grid allowed_;
};

}  // namespace

std::size_t add_attention(Builder& builder, const Problem& problem, std::size_t query, std::size_t key,
                          std::size_t value) {
  return AttentionSteps(builder, problem).run(query, key, value);
}

}  // namespace headway::tracing
