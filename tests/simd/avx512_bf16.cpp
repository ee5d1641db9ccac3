#include "engines/cpu/simd/avx512_bf16.h"

#include "simd/checks.h"
#include "simd/pair_checks.h"

namespace headway::cpu {

namespace {

// All 256 numbers of a type, in order and in pairs of two rows, and the first few of a row.
template <class Byte>
void check_bytes(const CheckReport& report, const char* operation) {
  using Bytes = Operands<BF16>::Bytes<Byte>;
  constexpr int count = Bytes::count, half = count / 2;
  const Bytes bytes;
  for (int first = 0; first < 256; first += count) {
    Byte row[count], other[count];
    for (int n = 0; n < count; ++n) {
      row[n].bits = static_cast<decltype(Byte::bits)>(first + n);
      other[n].bits = static_cast<decltype(Byte::bits)>(first + n + 77);
    }
    const auto expect = [&](int n, const bfloat16& found, const Byte& number) {
      alignas(64) float as_float[F32::lanes], expected[F32::lanes];
      F32::store(as_float, F32::load_first(&found, 1));
      F32::store(expected, F32::load_first(&number, 1));
      report.compared(operation, n, same(as_float[0], expected[0]), static_cast<double>(as_float[0]),
                      static_cast<double>(expected[0]));
    };
    __m512i parts[2];
    bytes.convert(Bytes::load(row), parts[0], parts[1]);
    bfloat16 found[count];
    std::memcpy(found, parts, sizeof(parts));
    for (int n = 0; n < half; ++n) {
      expect(n, found[n], row[Bytes::place(n)]);
      expect(n, found[half + n], row[Bytes::place(n) + 8]);
    }
    __m512i pairs[4];
    bytes.convert_pairs(Bytes::load(row), Bytes::load(other), pairs);
    bfloat16 halves[4][32];
    std::memcpy(halves, pairs, sizeof(pairs));
    __m512 sums[4];
    for (int v = 0; v < 4; ++v) {
      alignas(64) float places[16];
      for (int l = 0; l < 16; ++l) {
        const int place = 16 * (l / 4) + 4 * v + l % 4;
        expect(place, halves[v][2 * l], row[place]);
        expect(place, halves[v][2 * l + 1], other[place]);
        places[l] = static_cast<float>(place);
      }
      sums[v] = F32::load(places);
    }
    Bytes::sort(sums);
    alignas(64) float sorted[count];
    std::memcpy(sorted, sums, sizeof(sums));
    for (int n = 0; n < count; ++n) {
      report.compared("sort of sums", n, sorted[n] == static_cast<float>(n), static_cast<double>(sorted[n]), n);
    }
  }
  for (int n = 0; n <= count; ++n) {
    Byte* row = reinterpret_cast<Byte*>(report.page_end) - n;
    for (int c = 0; c < n; ++c) {
      row[c].bits = static_cast<decltype(Byte::bits)>(c + 1);
    }
    std::uint8_t found[count];
    const __m512i loaded = Bytes::load_first(row, n);
    std::memcpy(found, &loaded, sizeof(found));
    for (int c = 0; c < count; ++c) {
      report.compared("load_first of bytes", c, found[c] == (c < n ? c + 1 : 0), found[c], c < n ? c + 1 : 0);
    }
  }
}

}  // namespace

void check_avx512_bf16(const CheckReport& report) {
  PairChecks<BF16>(report).run();
  check_bytes<int8>(report, "int8 as bf16");
  check_bytes<float8>(report, "float8 as bf16");
}

}  // namespace headway::cpu
