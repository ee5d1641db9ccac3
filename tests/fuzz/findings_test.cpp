// Cases that once failed, each on every engine and instruction set.
#include <gtest/gtest.h>

#include "fuzz/runner.h"

namespace headway::test::fuzz {
namespace {

struct Finding {
  const char* name;
  const char* line;
};

void PrintTo(const Finding& finding, std::ostream* stream) { *stream << finding.line; }

class Findings : public testing::TestWithParam<Finding> {};

TEST_P(Findings, stay_mended) {
  const Prepared prepared(case_of(GetParam().line));
  ASSERT_EQ(prepared.rejected, "");
  for (const Target& target : targets()) {
    const Verdict verdict = judge(prepared, target);
    EXPECT_FALSE(verdict.failed) << name(target) << ", " << verdict.failure.check << ": " << verdict.failure.text;
  }
}

constexpr Finding findings[] = {
    // Chains of 31 equal products: lse 1.4 times its bound, dv of f64 1.004 times.
    {"equal_products_of_narrow_heads",
     "sq=3 sk=384 d=31 q=constant q_size=56.192504181984475 k=constant k_size=56.192504181984475"},
    {"equal_products_of_narrow_heads_in_f64_gradients",
     "type=f64 h=8 hkv=8 sq=3 sk=3 d=31 dv=31 sharing=all alibi=f16 k=constant k_size=649.17335680729718 "
     "seed=12322707637345376528"},
    // 32 chains of them: lse 1.4 times its bound.
    {"equal_products_of_wide_heads", "sq=70 sk=70 d=512 q=constant q_size=17.3 k=constant k_size=33.7"},
    {"equal_products_of_wide_heads_in_few_rows", "sq=20 sk=20 d=520 q=constant q_size=17.3 k=constant k_size=33.7"},
    // A reference that rises by 2^140 after a weight was found.
    {"weights_before_a_rows_highest_score",
     "type=bf16 form=bsd sq=484 sk=484 d=2 dv=2 sharing=all k=apart seed=18261938594801349286"},
    // A sum that cancels to -0, before keys that count for nothing.
    {"zeros_beside_forbidden_values",
     "type=bf16 b=2 sq=37 sk=22 dv=31 mask=random mask_axes=bhi causal=bottom_right softcap=1e-30 dropout=0.1 "
     "v=denormal seed=6330020470511539808"},
    // The slope of a softcap that a float cannot invert.
    {"softcaps_below_the_smallest_normal_float",
     "sq=38 sk=6 d=12 mask=random scale=1e-30 softcap=1e-40 q_size=1e-10 seed=4468233018211693671"},
    // Products of 112 equal numbers, which round alike: lse 1.03 times its bound (open, docs/reliability.md).
    {"equal_products_of_usual_heads",
     "sq=9 sk=53 d=112 k_layout=repeated_columns alibi=f32 q=constant q_size=455801.01311310916 "
     "k_size=16408836.472071929 seed=6533415480697191585"},
    // 12 chains of 16 of them: lse 1.4 times its bound (open, docs/reliability.md).
    {"equal_products_of_many_chains",
     "d=192 q=constant q_size=2.7557946806613203e+17 k=constant k_size=2.7557946806613203e+17"},
    {"equal_products_of_queries_without_heads",
     "form=sd sq=6 d=100 q_layout=repeated_heads bias=full q_size=28.105411830248379 k=constant "
     "k_size=1011.7948258889415 seed=11850334710133039228"},
    {"equal_products_beside_a_sink",
     "sq=18 d=31 q_layout=repeated_columns sinks=bf16 q=channel q_size=24.565414059588967 k=constant "
     "k_size=884.3549061452029 seed=2"},
    {"equal_products_of_wide_heads_beside_a_sink",
     "d=128 q_layout=repeated_columns k_layout=repeated_columns scale=-0.69999999999999996 sinks=f32"},
    // bf16 dot products take denormals for 0: NaN where infinity times one is infinite, and the softcap of that finite.
    {"infinite_queries_of_denormal_keys",
     "type=bf16 sq=2 d=48 causal=bottom_right softcap=50 k=denormal plants=query:minus_inf seed=13083772813389186048"},
    {"infinite_queries_of_denormal_keys_in_many_rows",
     "type=bf16 sq=70 sk=40 d=48 softcap=50 k=denormal plants=query:minus_inf seed=13083772813389186048"},
    // Products that cancel to a rounding, which is more than the softcap: its slope is anything from 0 to 1.
    {"softcaps_below_the_rounding_of_scores",
     "d=2 softcap=1.0000000000000001e-30 sinks=f64 q=constant q_size=71.663191377355076 k=integers "
     "k_size=160.29165216297969 seed=16220480698517597443"},
    // Times its part of the scale, the query was 0.
    {"infinite_keys_of_tiny_queries",
     "scale=1.0000000000000001e-30 softcap=1.0000000000000001e-30 q_size=9.9999999999999995e-21 plants=key:minus_inf"},
    {"infinite_keys_of_many_tiny_queries",
     "sq=40 sk=70 scale=1.0000000000000001e-30 softcap=1.0000000000000001e-30 q_size=9.9999999999999995e-21 "
     "plants=key:minus_inf"},
    // Times its part of the scale, the key was 0.
    {"infinite_queries_of_tiny_keys", "scale=1e-30 softcap=10000 plants=query:minus_inf,key:tiny"},
    // Products below 2^-126 in a saved output, times a grad_out of 1e17: the oracle did not count them.
    {"gradients_of_outputs_below_the_normal_numbers",
     "form=packed b=2 sq=13 sk=8 grad_layout=repeated dropout=0.90000000000000002 q_size=8 v=denormal grad_size=1e+17 "
     "plants=hidden_grad:large seed=14403157513025587654"},
    // Rows before the first key saw nothing beside a sequence whose window leaves a gap behind the first keys.
    {"more_queries_than_keys_in_a_cache_with_first_keys",
     "subject=cache h=2 sq=3 sk=41 d=8 page=1 first=10 left=0 right=4 alibi=f32 seed=571109354320528872"},
    {"more_queries_than_keys_in_an_8_bit_cache_with_first_keys",
     "subject=cache type=bf16 h=4 hkv=2 sq=5 sk=31 d=24 dv=4 page=64 first=4 slack=9 stored=int8 rope=whole left=1 "
     "seed=488421994831679490"},
    // A sink of +inf has all weight, one of NaN makes the rows that see a key NaN, one of -inf is none.
    {"infinite_sinks", "type=f64 sinks=f16 sinks_size=1e+30"},
    {"infinite_sinks_of_many_rows",
     "b=4 h=2 sq=65 spans=blocks span_rows=128 narrow_spans=yes queries=item32 sinks=f16 sinks_size=1e+30 k=equal "
     "seed=6299228241569644077"},
    {"nan_sinks_of_rows_without_keys", "type=f16 mask=one_key sinks=f64 plants=sink:nan"},
    {"nan_sinks_of_infinite_keys", "type=bf16 sinks=f16 plants=sink:nan,key:inf seed=3"},
    {"sinks_of_minus_infinity_beside_nan", "type=f64 sk=12 sinks=f64 plants=sink:minus_inf,key:nan"},
    // lse is +inf there, which times log2 e or 1, and what rounding that loses, was NaN.
    {"infinite_sinks_of_infinite_queries",
     "alibi=bf16 sinks=f64 plants=sink:inf,query:minus_inf seed=15114130037120684647"},
    {"infinite_sinks_of_infinite_keys_that_are_values",
     "sharing=columns alibi=f16 sinks=f64 plants=sink:inf,value:minus_inf"},
    {"infinite_sinks_of_infinite_keys",
     "type=bf16 sq=70 right=0 alibi=f32 sinks=f16 sinks_size=1e+30 plants=key:inf"},
    {"infinite_sinks_of_infinite_queries_in_f64", "type=f64 sk=3 sinks=f64 plants=sink:inf,query:minus_inf"},
    // exp(sink - lse) was infinite beside a rounded lse, times a delta of 0.
    {"sinks_far_above_scores_of_0", "type=bf16 d=0 dv=0 sinks=f64 sinks_size=1e+30"},
    {"sinks_far_above_integers", "sinks=f64 sinks_size=1e+30 q=integers"},
    // One large channel of a score, planted as a value where keys are values: the judge did not see it.
    {"large_values_that_are_keys", "type=f64 sq=7 d=31 dv=3 sharing=columns plants=value:large"},
    {"large_values_that_are_keys_in_bf16",
     "type=bf16 b=2 sq=25 d=100 dv=100 sharing=kv plants=value:large seed=12343383550761263897"},
    // Values past 1e18 times a grad_out of 1e17 pass what a float holds, before dropout makes 0 of them: not promised.
    {"dropped_gradients_beyond_a_float",
     "type=bf16 sq=4 sharing=kv dropout=0.99999999900000003 k_size=2.9717305570080189e+21 grad_size=1e+17"},
    // +inf, where the sum of a NaN and a bias of +inf is NaN.
    {"infinite_biases_of_nan",
     "form=bsd sq=3 sk=18 dv=5 bias=random bias_type=f16 bias_size=1e+36 valid=row32 k=equal plants=query:nan "
     "seed=3267341283780762036"},
    // Slopes that are infinite: the definition's NaN and -inf, and a bias of -inf still forbids.
    {"infinite_slopes", "type=bf16 sq=2 alibi=f16 alibi_size=10000000000"},
    {"infinite_slopes_of_forbidden_keys", "type=bf16 mask=one_key alibi=f16 alibi_size=10000000000"},
    {"infinite_slopes_of_nan", "type=bf16 sk=2 alibi=f16 alibi_size=9.9999999999999995e+32 plants=query:nan"},
};

INSTANTIATE_TEST_SUITE_P(Cases, Findings, testing::ValuesIn(findings),
                         [](const testing::TestParamInfo<Finding>& finding) { return finding.param.name; });

}  // namespace
}  // namespace headway::test::fuzz
