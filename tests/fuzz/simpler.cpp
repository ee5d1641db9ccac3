// Making a failing case smaller.
#include <algorithm>
#include <set>

#include "fuzz/case.h"

namespace headway::test::fuzz {

namespace {

// Sizes go down to 1: 0 is another kind of case.
std::int64_t half(std::int64_t size) { return size > 1 ? size / 2 : size; }

}  // namespace

std::vector<Case> simpler(const Case& one) {
  std::vector<Case> list;
  std::set<std::string> lines{line_of(one)};
  const auto add = [&](const auto& change) {
    Case changed = one;
    change(changed);
    changed = legal(changed);
    if (cost(changed) <= cost(one) && lines.insert(line_of(changed)).second) list.push_back(changed);
  };
  const Case plain;
  const auto reset = [&](auto member) { add([&](Case& changed) { changed.*member = plain.*member; }); };
  add([&](Case& changed) { changed.h = changed.hkv = 1; });
  std::int64_t Case::*const sizes[] = {&Case::b,  &Case::h,   &Case::sq,    &Case::sk,      &Case::d,
                                       &Case::dv, &Case::hkv, &Case::model, &Case::key_dim, &Case::value_dim};
  for (auto member : sizes) reset(member);
  for (auto member : sizes) add([&](Case& changed) { changed.*member = half(changed.*member); });
  add([&](Case& changed) { changed.sq = half(changed.sq), changed.sk = half(changed.sk); });
  add([&](Case& changed) { changed.d = half(changed.d), changed.dv = half(changed.dv); });
  if (std::min(one.sq, one.sk) > 1) add([&](Case& changed) { changed.sq -= 1, changed.sk -= 1; });
  if (std::min(one.d, one.dv) > 1) add([&](Case& changed) { changed.d -= 1, changed.dv -= 1; });

  for (auto member : {&Case::mask, &Case::bias}) reset(member);
  for (auto member : {&Case::valid, &Case::queries}) reset(member);
  for (auto member : {&Case::alibi, &Case::sinks}) reset(member);
  reset(&Case::spans);
  reset(&Case::span_axes);
  reset(&Case::narrow_spans);
  for (auto member : {&Case::span_count, &Case::span_rows}) {
    reset(member);
    add([&](Case& changed) { changed.*member = half(changed.*member); });
  }
  for (auto member : {&Case::mask_axes, &Case::bias_axes}) reset(member);
  for (auto member : {&Case::trimmed, &Case::expanded, &Case::biased}) reset(member);
  for (auto member : {&Case::left, &Case::right}) reset(member);
  for (auto member :
       {&Case::dropout, &Case::softcap, &Case::scale, &Case::bias_size, &Case::alibi_size, &Case::sinks_size})
    reset(member);
  for (auto member : {&Case::page, &Case::first, &Case::slack}) reset(member);
  reset(&Case::stored);
  reset(&Case::rope);
  reset(&Case::causal);
  reset(&Case::bias_type);
  reset(&Case::form);
  reset(&Case::sharing);
  for (auto member : {&Case::mask, &Case::bias})
    if (one.*member != Pattern::none) add([&](Case& changed) { changed.*member = Pattern::full; });
  for (auto member :
       {&Case::q_layout, &Case::k_layout, &Case::v_layout, &Case::out_layout, &Case::grad_layout, &Case::option_layout})
    reset(member);
  for (std::size_t n = 0; n < one.plants.size(); ++n)
    add([&](Case& changed) { changed.plants.erase(changed.plants.begin() + static_cast<std::ptrdiff_t>(n)); });
  for (auto member : {&Case::q, &Case::k, &Case::v, &Case::grad}) {
    if (one.*member != Numbers::normal) add([&](Case& changed) { changed.*member = Numbers::constant; });
    reset(member);
  }
  for (auto member : {&Case::q_size, &Case::k_size, &Case::v_size, &Case::grad_size}) reset(member);
  for (auto member : sizes)
    if (one.*member > 1) add([&](Case& changed) { changed.*member -= 1; });
  if (one.seed > 3)
    for (std::uint64_t seed : {1, 2, 3}) add([&](Case& changed) { changed.seed = seed; });
  return list;
}

}  // namespace headway::test::fuzz
