// Cases that once failed, each on every engine and instruction set.
#include <gtest/gtest.h>

#include <algorithm>

#include "fuzz/runner.h"
#include "support/inputs.h"

namespace headway::test::fuzz {
namespace {

struct Finding {
  const char* name;
  const char* line;
  bool open_on_cuda = false;  // docs/reliability.md
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

// In this process: a device does not survive a fork.
class FindingsOnDevice : public Findings {};

TEST_P(FindingsOnDevice, stay_mended) {
  if (std::ranges::count(tested_engines(), Engine::cuda) == 0) GTEST_SKIP() << "there is no GPU";
  if (GetParam().open_on_cuda) GTEST_SKIP() << "open on CUDA: docs/reliability.md";
  const Prepared prepared(case_of(GetParam().line));
  ASSERT_EQ(prepared.rejected, "");
  try {
    const auto failure = check(prepared, Engine::cuda);
    EXPECT_FALSE(failure) << failure->check << ": " << failure->text;
  } catch (const Unsupported& refusal) {
    GTEST_SKIP() << refusal.what();
  }
}

constexpr bool open_on_cuda = true;

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
    // Products that round alike and a large one: 9 units of the score, two more in lse (open, docs/reliability.md).
    {"equal_products_beside_a_large_one",
     "b=3 sq=3 d=71 bias=full scale=0.001 q=constant q_size=297.71948080405281 k=constant k_size=297.71948080405281 "
     "plants=key:large seed=9599619295661894599"},
    // bf16 dot products of small multiples of one number: 16 units (open).
    {"multiples_of_equal_half_products",
     "type=bf16 d=219 dv=219 sharing=all k=integers k_size=14.80346978246985 seed=15074069161174026157", open_on_cuda},
    // Ten products below 2^-126, each rounded to a quantum: the judge allowed four quanta for the sum.
    {"gradients_of_a_layer_below_the_normal_numbers",
     "subject=layer sq=10 q_layout=repeated_heads grad_layout=repeated_heads sinks=f64 q_size=9.9999999999999995e-21 "
     "v_size=9.9999999999999995e-21"},
    {"gradients_of_keys_of_a_layer_below_the_normal_numbers",
     "subject=layer sk=30 d=7 dv=7 key_dim=4 k_size=9.9999999999999995e-21 v_size=9.9999999999999995e-21 "
     "seed=14592356839703495335"},
    // A sequence cut inside a page that its window had freed: the file of its cache was refused.
    {"a_saved_sequence_that_ends_inside_a_freed_page",
     "subject=cache type=f64 sk=26 d=2 dv=129 left=0 k=integers seed=1075361505092426056"},
    // A bias with one column: of a sequence with one key dbias came from another kernel than in a pack.
    {"a_sequence_of_one_key_and_its_bias",
     "type=bf16 form=packed b=2 sq=2 sk=3 dv=6 bias=full bias_axes=bi grad=wide seed=5888277855176523385"},
    // The same for products that vanish: -0 alone, and 0 as the sum in a pack.
    {"a_sequence_of_one_key_and_its_bias_of_0",
     "form=packed b=4 sq=2 sk=8 bias=full bias_axes=bi v_size=1.0000000000000001e-37 grad_size=1.0000000000000001e-37 "
     "seed=4585537954527224850"},
    // lse is 1e39 in float64: the judge of 8-bit pages made it infinite, where a finite one is stored as finite.
    {"infinite_queries_of_a_softcap_beyond_a_float",
     "type=bf16 b=2 softcap=9.9999999999999994e+38 plants=query:minus_inf seed=1379382990326804037"},
    // The quotient of scale and softcap is infinite, and its product with a score of 0 was NaN.
    {"gradients_of_a_scale_far_beyond_the_softcap",
     "type=f64 sq=5 sk=7 d=16 dv=3 scale=1e300 softcap=1e-30 q=constant q_size=0 k=constant k_size=0"},
    // A sink's weight below 2^-1022, times a delta of 5: the judge did not count what rounding the weight loses.
    {"sinks_that_weigh_less_than_the_normal_numbers",
     "type=f64 h=6 sq=7 sk=7 d=100 dv=25 v_layout=repeated_rows sinks=f32 sinks_size=300 seed=3361774229169892548"},
    // exp(s - lse) of a rounded lse was infinite, 7 or 2981 in weights_in and mean_weights, and 0 beside a lse of NaN.
    {"weights_from_the_lse_of_large_scores",
     "d=32 q_size=2336037961817.3604 k_size=84097366625424.969 seed=2592782155952709418"},
    {"weights_from_the_lse_of_negative_scores",
     "b=2 d=47 dv=47 q_layout=repeated_columns k_layout=repeated_columns v_layout=repeated_columns sharing=all "
     "scale=-10.845415453837658 k_size=412.27229370877717 seed=2140418860208246813"},
    {"weights_from_the_lse_of_infinite_slopes", "sq=2 alibi=f16 alibi_size=10000000000"},
    // Products that cancel: lse is small, and far from the scores as another kernel rounds them.
    {"weights_from_the_lse_of_large_products",
     "sk=32 d=3 q=integers q_size=77276.244782110603 k=constant k_size=3510.8599305599614 seed=14336535442742292483"},
    {"weights_from_the_lse_of_huge_products",
     "d=62 q=integers q_size=2715007001504.0469 k=constant k_size=2715007001504.0469 seed=12133805955837078930"},
    {"mean_weights_of_no_heads", "h=0"},
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
    {"infinite_sinks_of_infinite_keys", "type=bf16 sq=70 right=0 alibi=f32 sinks=f16 sinks_size=1e+30 plants=key:inf"},
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
    // On CUDA a sink of +inf made its rows NaN, and its own gradient: exp(sink - lse) of two infinities.
    {"infinite_sinks_beside_forbidden_values",
     "form=packed h=8 d=192 dv=128 k_layout=gaps v_layout=gaps out_layout=gaps grad_layout=misaligned sharing=columns "
     "bias=full bias_type=f64 trimmed=yes valid=item32 sinks=f32 q=constant k=signed_zeros v=wide "
     "plants=key:tiny,hidden_value:nan,sink:inf seed=14171568319599940667"},
    {"infinite_sinks_of_many_f64_rows",
     "type=f64 sq=143 sk=5 d=2 k_layout=gaps v_layout=gaps grad_layout=misaligned sharing=columns bias=full "
     "bias_type=f64 bias_size=10000000000 scale=0 sinks=f16 sinks_size=1e+30 q_size=1e-10 v=integers v_size=100 "
     "seed=17032178938260898317"},
    {"infinite_sinks_have_no_gradient",
     "type=f64 form=sd sq=7 left=3 right=0 valid=row32 sinks=f16 sinks_size=1e+30 "
     "seed=14589781317120557952"},
    {"infinite_sinks_of_half_rows_have_no_gradient",
     "type=bf16 b=2 sq=23 sk=4 d=38 dv=3 q_layout=repeated_columns k_layout=reversed v_layout=reversed out_layout=gaps "
     "grad_layout=heads_inside left=0 right=2 queries=item sinks=f16 sinks_size=1e+30 v=signed_zeros "
     "seed=11650409330235711400"},
    {"sinks_of_rows_without_keys_have_no_gradient",
     "form=packed b=2 h=3 d=47 q_layout=repeated_rows v_layout=gaps out_layout=gaps grad_layout=misaligned "
     "mask=one_key "
     "mask_axes=bhj causal=top_left valid=row queries=item scale=1 sinks=f64 sinks_size=1e+30 k=signed_zeros "
     "plants=hidden_grad:nan,key:nan,sink:minus_inf seed=5110292260621535979"},
    {"nan_sinks_of_rows_without_keys_have_no_gradient",
     "type=bf16 form=packed b=2 sk=14 d=72 dv=72 out_layout=heads_inside mask=full mask_axes=bh bias=empty "
     "bias_axes=ij "
     "trimmed=yes causal=bottom_right valid=item32 sinks=f16 plants=value:tiny,sink:nan seed=3613235392163493586"},
    // Scores of -inf beside a sink: NaN, where every weight is 0.
    {"sinks_beside_scores_of_minus_infinity",
     "type=bf16 sq=12 d=8 dv=39 v_layout=heads_inside out_layout=reversed valid=row scale=1.0000000000000001e-30 "
     "sinks=f16 plants=query:tiny,key:inf seed=6195778184205721033"},
    // An allowed score of -inf was taken for a forbidden pair: 0, where the row or the product with it is NaN.
    {"weights_of_infinite_keys", "dv=40 k_layout=gaps grad_layout=gaps plants=key:inf seed=11653483428966101901"},
    {"weights_of_infinite_half_queries",
     "type=bf16 b=2 sq=15 d=3 dv=3 out_layout=heads_inside q=integers grad_size=100 plants=query:minus_inf,bias:nan "
     "seed=5070986864552225294"},
    {"weights_of_infinite_keys_beside_nan",
     "type=f64 sk=97 out_layout=misaligned v=wide v_size=0.0001 plants=key:inf,key:nan,hidden_grad:tiny "
     "seed=6463102745693561017"},
    {"infinite_keys_under_a_mask",
     "b=4 h=3 hkv=3 d=31 dv=2 v_layout=gaps out_layout=heads_inside mask=random trimmed=yes causal=square queries=item "
     "k=integers grad_size=1.0000000000000001e-37 plants=value:nan,key:inf,query:nan seed=12765539027120553487"},
    {"infinite_half_keys_under_a_bias",
     "type=f16 b=3 h=3 hkv=3 d=192 dv=128 k_layout=misaligned out_layout=gaps bias=random bias_axes=bj bias_type=f16 "
     "expanded=yes spans=prefix span_axes=h span_count=3 q=channel q_size=23.148148148148149 k_size=30000 "
     "plants=key:inf seed=18111978630332441679"},
    {"infinite_values_that_weigh_nothing",
     "b=2 sq=3 sk=5 d=16 sharing=columns valid=item32 k=integers plants=value:inf,value:nan seed=15552711678830638094"},
    {"infinite_half_values_that_weigh_nothing",
     "type=bf16 form=packed sq=65 sk=65 d=127 dv=127 q_layout=reversed k_layout=reversed v_layout=reversed "
     "grad_layout=misaligned sharing=all sinks=f32 k=apart v=channel "
     "plants=value:minus_inf,hidden_key:nan,hidden_grad:nan seed=2665665543853628049"},
    {"infinite_f64_values_that_weigh_nothing",
     "type=f64 sq=22 sk=17 d=8 dv=8 q_layout=heads_inside k_layout=heads_inside v_layout=heads_inside "
     "out_layout=misaligned grad_layout=heads_inside sharing=kv mask=random mask_axes=j valid=row32 sinks=f16 "
     "q=channel "
     "plants=grad:nan,value:minus_inf,value:inf seed=14116216081024198253"},
    {"gradients_of_infinite_half_keys",
     "type=f16 h=4 sk=24 d=2 dv=5 out_layout=heads_inside bias=full bias_type=f64 k=integers plants=key:minus_inf "
     "seed=17461921404420779959"},
    {"gradients_of_infinite_half_keys_beside_nan",
     "type=f16 sk=10 d=8 dv=10 q_layout=misaligned v_layout=misaligned mask=rows mask_axes=bij bias=full bias_axes=hi "
     "bias_type=f16 expanded=yes q=equal plants=key:minus_inf,grad:nan seed=9235093745028694397"},
    {"gradients_of_infinite_queries",
     "form=packed sq=39 sk=162 dv=4 q_layout=misaligned k_layout=misaligned v_layout=misaligned out_layout=gaps "
     "grad_layout=misaligned spans=random span_count=9 narrow_spans=yes q=denormal plants=query:minus_inf,bias:nan "
     "seed=3313428482674628372"},
    {"gradients_of_infinite_f64_queries",
     "type=f64 form=packed sk=29 d=72 q_layout=reversed k_layout=reversed v_layout=reversed grad_layout=reversed "
     "q=signed_zeros plants=query:inf,hidden_bias:nan,value:nan seed=15622676503843593846"},
    {"gradients_of_infinite_half_queries",
     "type=bf16 form=packed b=4 d=2 dv=32 k_layout=repeated_heads causal=bottom_right v=denormal "
     "plants=query:minus_inf seed=1616700192811346023"},
    // Keys of -inf without a modifier: the pair was taken for a forbidden one, and an element of dq was finite.
    {"gradients_of_infinite_half_keys_without_a_modifier",
     "type=bf16 h=8 hkv=2 sk=25 d=31 dv=8 queries=item q=channel v=apart plants=query:nan,key:minus_inf "
     "seed=7887445035836846517"},
    {"gradients_of_infinite_half_keys_beside_finite_ones", "type=bf16 sq=3 sk=5 d=8 plants=key:minus_inf seed=5"},
    // Sums of half products beyond a float, of ordinary scores, in one block for all keys.
    {"short_gradients_of_products_beyond_a_float",
     "type=bf16 sq=5 sk=9 d=16 scale=1e-19 q_size=1e19 k_size=1e20 seed=3", open_on_cuda},
    // lse is rounded by more than 1 there, and dbias had other sums of products than the row's statistics.
    {"gradients_of_an_f64_bias_of_large_scores", "type=f64 sq=5 sk=7 d=40 bias=full q_size=1e9 k_size=1e9 seed=9"},
    {"gradients_of_an_f64_bias_of_larger_scores", "type=f64 sq=5 sk=7 d=90 bias=full q_size=1e15 k_size=1e15 seed=9"},
    // A grad_out of 0 beside an infinite value that weighs nothing: the row of a large lse was left out.
    {"gradients_of_0_beside_infinite_values",
     "type=f16 form=bsd dv=10 k_layout=reversed out_layout=gaps bias=random causal=top_left left=14 sinks=bf16 "
     "grad_size=1.0000000000000001e-30 plants=key:large,sink:large,value:minus_inf seed=8461817192559802369"},
    {"infinite_slopes_of_many_f64_rows",
     "type=f64 form=packed b=3 sq=114 d=8 dv=16 q_layout=misaligned out_layout=misaligned mask=random "
     "left=4611686018427387904 softcap=9.9999999999999994e+38 alibi=f16 alibi_size=10000000000 k=integers "
     "seed=2682078905737036840"},
    {"infinite_slopes_beside_a_bias",
     "type=bf16 b=2 h=8 hkv=2 sk=4 d=17 dv=40 q_layout=gaps k_layout=gaps v_layout=gaps out_layout=gaps "
     "grad_layout=gaps bias=random bias_type=bf16 causal=bottom_right left=4 alibi=f16 alibi_size=10000000000 "
     "v_size=100 seed=8604540374575105706"},
    {"weights_of_infinite_slopes",
     "form=sd sq=5 sk=5 d=63 dv=63 k_layout=reversed v_layout=gaps out_layout=misaligned spans=random span_axes=- "
     "span_count=1 narrow_spans=yes valid=row scale=-0.69999999999999996 softcap=9.9999999999999994e+38 alibi=f16 "
     "alibi_size=9.9999999999999995e+32 v_size=1e-10 plants=hidden_grad:nan,hidden_grad:nan,sink:tiny "
     "seed=18381424675779389260"},
    // Sums of products beyond a float, of ordinary scores: NaN and infinities.
    {"weights_of_products_beyond_a_float",
     "h=8 sk=27 d=8 dv=8 k_layout=gaps v_layout=repeated spans=prefix span_axes=- scale=0 softcap=5 alibi=f32 q=equal "
     "q_size=7.1358336729046e+19 k=apart k_size=1.8427907033967548e+19 grad=integers seed=2494075688087256731"},
    {"weights_of_half_products_beyond_a_float",
     "type=bf16 b=4 h=3 sq=12 sk=12 d=7 dv=64 k_layout=gaps out_layout=gaps scale=-4.6841489194934979e-14 "
     "dropout=9.9999999999999998e-13 q=integers q_size=39186251045761280 k=constant k_size=1.8051117172336294e+25 "
     "seed=12156876747067495327"},
    {"scores_of_products_beyond_a_float",
     "sk=9 d=12 dv=4 mask=empty causal=bottom_right left=2147483648 spans=documents span_rows=16 narrow_spans=yes "
     "scale=2.8064538034432777e-24 softcap=0.69999999999999996 dropout=0.29999999999999999 q=channel "
     "q_size=6.4788253575504186e+25 k_size=8.3965576633853433e+28 seed=8271357737962713982"},
    {"scores_of_half_products_beyond_a_float",
     "type=bf16 sk=14 d=3 k_layout=gaps out_layout=gaps causal=bottom_right spans=random span_axes=b queries=item32 "
     "scale=3.5666529200838825e-19 softcap=30 sinks=f16 q=constant q_size=2368512440459758.5 k=constant "
     "k_size=7.2123651427895247e+32 grad=wide seed=3902418239897379153"},
    {"gradients_of_products_beyond_a_float",
     "form=packed h=2 hkv=2 d=399 dv=399 q_layout=reversed k_layout=reversed v_layout=reversed grad_layout=reversed "
     "sharing=columns spans=blocks span_axes=h span_count=1 narrow_spans=yes valid=row32 queries=item32 "
     "scale=-4.022484650226995e-34 dropout=0.99999999900000003 q=integers q_size=7.6232416754795847e+33 k=wide "
     "k_size=2.7824804155292499e+24 grad=denormal seed=9172751878988203115"},
    {"gradients_of_products_beyond_a_float_and_a_scale_of_0",
     "form=packed sk=3 d=10 out_layout=reversed causal=bottom_right valid=row scale=0 dropout=0.99999999900000003 "
     "q=channel q_size=2.3219128513164943e+19 k_size=3.009199055306177e+22 seed=1921664208022577879"},
    // Split sequences: a part whose only score is -inf, and sinks beside what is not finite.
    {"a_part_of_a_row_whose_score_is_minus_infinity",
     "type=bf16 sq=2 sk=2 q=denormal plants=key:inf seed=13090241757630556565"},
    {"split_gradient_of_an_infinite_sink", "type=f16 sinks=bf16 plants=sink:inf,grad:nan"},
    {"split_gradient_of_a_nan_sink_without_keys",
     "type=f64 form=packed sk=49 d=63 out_layout=heads_inside causal=bottom_right spans=hostile span_axes=- "
     "span_count=0 scale=1 softcap=9.9999999999999994e+38 sinks=f16 sinks_size=0 "
     "plants=hidden_key:nan,sink:nan,hidden_grad:nan seed=13943226561969542110"},
    {"split_gradient_of_a_sink_with_all_of_the_weight",
     "b=2 sq=19 sk=24 d=111 grad_layout=gaps causal=top_left sinks=bf16 sinks_size=300 grad=integers "
     "plants=grad:nan,hidden_value:nan seed=14905664361918019633"},
    {"split_gradient_of_a_sink_beside_outputs_of_0",
     "type=f16 sq=9 d=46 dv=16 k_layout=reversed v_layout=gaps bias=random bias_type=f16 causal=bottom_right sinks=f16 "
     "sinks_size=20 plants=grad:inf,hidden_key:nan seed=2209995915168423591"},
    {"split_gradient_of_a_sink_that_f32_does_not_have", "type=bf16 sinks=f64 sinks_size=1e+30"},
    // Which rows have keys was asked with the plan of a backward pass: a write past the end of its scratch.
    {"split_gradient_of_a_sink_beside_a_term_that_is_not_finite",
     "type=f64 sq=121 valid=item sinks=f64 plants=hidden_grad:nan seed=2"},
    // 13 equal products are added to a large one, and round it alike.
    {"equal_products_behind_a_large_one",
     "d=14 dv=14 sharing=kv bias=full q=constant q_size=7266.005562081169 k=constant k_size=90.131413954430656 "
     "plants=value:large seed=2"},
};

std::string name_of(const testing::TestParamInfo<Finding>& finding) { return finding.param.name; }

INSTANTIATE_TEST_SUITE_P(Cases, Findings, testing::ValuesIn(findings), name_of);
INSTANTIATE_TEST_SUITE_P(Cases, FindingsOnDevice, testing::ValuesIn(findings), name_of);

}  // namespace
}  // namespace headway::test::fuzz
