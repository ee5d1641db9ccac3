// The frequencies of RoPE: the plain ones, and the scalings of Hugging Face's configs.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/out_of_memory.h"
#include "core/text.h"
#include "serving/rotation.h"

namespace headway {
namespace {

class Scaling {
 public:
  Scaling(const char* operation, std::int64_t head_dim, const RopeConfig& config)
      : operation_(operation), config_(config), dims_(config.dims.value_or(head_dim)) {
    if (dims_ < 0 || dims_ > head_dim || dims_ % 2 != 0) {
      refuse("expected dims even and at most the head_dim ", head_dim, ", found ", dims_);
    }
    require_positive("base", config.base);
  }

  RopeFrequencies run() const {
    switch (config_.scaling) {
      case RopeScaling::none: return {plain(config_.base), 1.0};
      case RopeScaling::linear: return linear();
      case RopeScaling::dynamic: return {plain(dynamic_base()), 1.0};
      case RopeScaling::yarn: return yarn();
      case RopeScaling::llama3: return llama3();
    }
    refuse("expected a scaling of this header, found ", static_cast<int>(config_.scaling));
  }

 private:
  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    throw InvalidArgument(text(operation_, ": ", parts...));
  }
  void require_positive(const char* name, double value) const {
    if (!(value > 0 && std::isfinite(value))) {
      refuse("expected a finite ", name, " above 0, found ", value);
    }
  }
  double original_length() const {
    if (!config_.original_length) {
      refuse("the scaling needs original_length (original_max_position_embeddings), found none");
    }
    const auto length = static_cast<double>(*config_.original_length);
    require_positive("original_length", length);
    return length;
  }

  std::vector<double> plain(double base) const {
    std::vector<double> result;
    result.reserve(static_cast<std::size_t>(dims_ / 2));  // what cannot be stored is refused before the work
    for (std::int64_t n = 0; n < dims_; n += 2) {
      result.push_back(std::pow(base, -static_cast<double>(n) / static_cast<double>(dims_)));
    }
    return result;
  }

  RopeFrequencies linear() const {
    require_positive("factor", config_.factor);
    RopeFrequencies result{plain(config_.base), 1.0};
    for (double& frequency : result.frequencies) {
      frequency /= config_.factor;
    }
    return result;
  }

  double dynamic_base() const {
    require_positive("factor", config_.factor);
    if (!config_.length) {
      refuse("dynamic scaling depends on the length of the text: expected length, found none");
    }
    if (dims_ == 2) {
      refuse("dynamic scaling needs dims of at least 4, found 2");
    }
    const double original = original_length();
    const double length = std::max(static_cast<double>(*config_.length), original);
    const double stretch = config_.factor * length / original - (config_.factor - 1);
    const auto dims = static_cast<double>(dims_);
    return dims_ == 0 ? config_.base : config_.base * std::pow(stretch, dims / (dims - 2));
  }

  // The index, as a fraction, of the pair that rotates this many times over the original length.
  double pair_with(double turns, double original) const {
    return static_cast<double>(dims_) * std::log(original / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(config_.base));
  }

  double yarn_attention_factor() const {
    const auto factor_of = [&](double mscale) {
      return config_.factor <= 1 ? 1.0 : 0.1 * mscale * std::log(config_.factor) + 1.0;
    };
    if (config_.attention_factor) {
      require_positive("attention_factor", *config_.attention_factor);
      return *config_.attention_factor;
    }
    if (config_.mscale.value_or(0) != 0 && config_.mscale_all_dim.value_or(0) != 0) {
      const double ratio = factor_of(*config_.mscale) / factor_of(*config_.mscale_all_dim);
      require_positive("attention factor from mscale and mscale_all_dim", ratio);
      return ratio;
    }
    return factor_of(1.0);
  }

  RopeFrequencies yarn() const {
    require_positive("factor", config_.factor);
    require_positive("beta_fast", config_.beta_fast);
    require_positive("beta_slow", config_.beta_slow);
    if (config_.base == 1) {
      refuse("yarn scaling needs a base other than 1");
    }
    const double original = original_length();
    double low = pair_with(config_.beta_fast, original), high = pair_with(config_.beta_slow, original);
    if (config_.truncate) {
      low = std::floor(low);
      high = std::ceil(high);
    }
    low = std::max(low, 0.0);
    high = std::min(high, static_cast<double>(dims_ - 1));
    if (low == high) {
      high += 0.001;  // a step, not a division by 0
    }
    RopeFrequencies result{plain(config_.base), yarn_attention_factor()};
    for (std::size_t n = 0; n < result.frequencies.size(); ++n) {
      const double divided = std::clamp((static_cast<double>(n) - low) / (high - low), 0.0, 1.0);
      result.frequencies[n] = result.frequencies[n] / config_.factor * divided + result.frequencies[n] * (1 - divided);
    }
    return result;
  }

  RopeFrequencies llama3() const {
    require_positive("factor", config_.factor);
    require_positive("low_freq_factor", config_.low_freq_factor);
    require_positive("high_freq_factor", config_.high_freq_factor);
    if (config_.high_freq_factor <= config_.low_freq_factor) {
      refuse("expected high_freq_factor above low_freq_factor ", config_.low_freq_factor, ", found ",
             config_.high_freq_factor);
    }
    const double original = original_length();
    RopeFrequencies result{plain(config_.base), 1.0};
    for (double& frequency : result.frequencies) {
      const double turns = original * frequency / (2 * std::numbers::pi);
      const double kept = std::clamp(
          (turns - config_.low_freq_factor) / (config_.high_freq_factor - config_.low_freq_factor), 0.0, 1.0);
      frequency = (1 - kept) * frequency / config_.factor + kept * frequency;
    }
    return result;
  }

  const char* operation_;
  const RopeConfig& config_;
  std::int64_t dims_;
};

}  // namespace

RopeFrequencies rope_frequencies(const char* operation, std::int64_t head_dim, const RopeConfig& config) {
  return Scaling(operation, head_dim, config).run();
}

template <class Number>
void RopePairs::turn(std::int64_t position, Number* cos_sin) const {
  for (std::int64_t n = 0; n < count(); ++n) {
    const double angle = static_cast<double>(position) * found_.frequencies[static_cast<std::size_t>(n)];
    cos_sin[n] = static_cast<Number>(found_.attention_factor * std::cos(angle));
    cos_sin[count() + n] = static_cast<Number>(found_.attention_factor * std::sin(angle));
  }
}

template void RopePairs::turn(std::int64_t position, float* cos_sin) const;
template void RopePairs::turn(std::int64_t position, double* cos_sin) const;

RopeFrequencies rope_frequencies(std::int64_t head_dim, const RopeConfig& config) try {
  return rope_frequencies("rope_frequencies", head_dim, config);
} catch (...) {
  throw_own_error("rope_frequencies");
}

}  // namespace headway
