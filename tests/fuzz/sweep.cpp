#include "fuzz/sweep.h"

#include <stdexcept>

#include "fuzz/materials.h"

namespace headway::test::fuzz {
namespace {

std::vector<std::string> layouts(const std::string& tensor, bool input) {
  std::vector<std::string> levels{""};
  for (const char* one : {"heads_inside", "gaps", "reversed", "misaligned"})
    levels.push_back(tensor + "_layout=" + one);
  for (const char* one : {"repeated", "repeated_heads", "repeated_rows", "repeated_columns"})
    if (input) levels.push_back(tensor + "_layout=" + one);
  return levels;
}

int factor_number(const std::string& name) {
  const auto& factors = sweep_factors();
  for (std::size_t n = 0; n < factors.size(); ++n)
    if (factors[n].name == name) return static_cast<int>(n);
  throw std::logic_error("no factor " + name);
}

const std::string& level_name(int factor, int level) {
  return sweep_factors()[static_cast<std::size_t>(factor)].levels[static_cast<std::size_t>(level)];
}

bool is_live(const Case& one) {
  if (one.dropout == 1) return false;
  const Materials materials(one);
  const bool one_at_most =
      one.sk == 1 || (one.left == 0 && one.right == 0) || (one.sq == 1 && one.causal == Causal::top_left);
  const Spec spec = materials.call.spec();
  for (std::int64_t b = 0; b < spec.batch(); ++b)
    for (std::int64_t h = 0; h < spec.heads(); ++h)
      for (std::int64_t i = 0; i < spec.q.size(2); ++i) {
        int keys = 0;
        for (std::int64_t j = 0; j < spec.k.size(2); ++j) keys += allowed(spec, b, h, i, j);
        if (keys >= (one_at_most ? 1 : 2)) return true;
      }
  return false;
}

}  // namespace

const std::vector<Factor>& sweep_factors() {
  static const std::vector<Factor> factors{
      {"type", {"", "type=f64", "type=bf16", "type=f16"}},
      {"form", {"", "form=bsd", "form=sd", "form=packed"}},
      {"batch", {"", "b=3"}},
      {"heads", {"", "h=2 hkv=2", "h=4 hkv=2", "h=3 hkv=1", "h=6 hkv=2"}},
      {"lengths",
       {"sq=16 sk=16", "sq=5 sk=23", "sq=19 sk=7", "sq=13 sk=33", "sk=17", "sq=9", "", "sq=67 sk=131", "sq=66 sk=261",
        "sq=2 sk=540"}},
      {"widths", {"d=8 dv=8", "d=64 dv=64", "d=16 dv=5", "d=5 dv=12", "", "d=80 dv=3", "d=128 dv=128"}},
      {"mask",
       {"", "mask=random", "mask=random mask_axes=ij trimmed=yes", "mask=random mask_axes=bj",
        "mask=random mask_axes=hi", "mask=rows"},
       true},
      {"bias",
       {"", "bias=full", "bias=full bias_axes=hij", "bias=full bias_axes=i bias_type=f64", "bias=random bias_axes=bj",
        "bias=full bias_axes=j bias_type=bf16", "bias=full bias_axes=j expanded=yes"},
       true},
      {"causal", {"", "causal=square", "causal=top_left", "causal=bottom_right"}, true},
      {"window", {"", "left=3 right=0", "left=2 right=4", "left=1", "right=2", "left=0 right=0"}, true},
      {"spans",
       {"", "spans=random", "spans=random span_count=5 span_rows=16 span_axes=h", "spans=prefix span_axes=b",
        "spans=first narrow_spans=yes", "spans=documents span_axes=-", "spans=blocks span_rows=64 span_count=3",
        "spans=hostile span_count=7"},
       true},
      {"valid", {"", "valid=item", "valid=item32", "valid=row", "valid=row32"}, true},
      {"queries", {"", "queries=item", "queries=item32"}, true},
      {"scale", {"", "scale=0.3", "scale=-0.7", "scale=0"}},
      {"softcap", {"", "softcap=5", "softcap=0.7"}},
      {"alibi", {"", "alibi=f32", "alibi=f64", "alibi=f16"}},
      {"sinks", {"", "sinks=f32", "sinks=f64", "sinks=bf16"}},
      {"dropout", {"", "dropout=0.3", "dropout=0.9", "dropout=1"}, true},
      {"query layout", layouts("q", true)},
      {"key layout", layouts("k", true)},
      {"value layout", layouts("v", true)},
      {"out layout", layouts("out", false)},
      {"gradient layout", layouts("grad", true)},
      {"option layout", layouts("option", false)},
  };
  return factors;
}

bool sweep_compatible(int factor_a, int level_a, int factor_b, int level_b) {
  const auto is = [&](const char* factor, const char* level) {
    const int number = factor_number(factor);
    return (factor_a == number && level_name(number, level_a) == level) ||
           (factor_b == number && level_name(number, level_b) == level);
  };
  const auto about = [&](const char* factor) {
    return factor_a == factor_number(factor) || factor_b == factor_number(factor);
  };
  const bool one_head = is("form", "form=bsd") || is("form", "form=sd");
  if (one_head && about("heads") && !is("heads", "")) return false;
  if (is("form", "form=sd") && is("batch", "b=3")) return false;
  if (is("causal", "causal=square") && about("lengths")) return is("lengths", "sq=16 sk=16") || is("lengths", "");
  return true;
}

SweepCase sweep_case(const Assignment& levels, std::uint64_t first_seed) {
  std::string line;
  for (std::size_t factor = 0; factor < levels.size(); ++factor)
    line.append(level_name(static_cast<int>(factor), levels[factor])).append(" ");
  Case one = case_of(line);
  for (one.seed = first_seed; one.seed < first_seed + 20; ++one.seed)
    if (is_live(one)) return {one, true};
  return {one, false};
}

}  // namespace headway::test::fuzz
