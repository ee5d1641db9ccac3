// The interface between a test and its files that are compiled for each instruction set.
#pragma once

namespace headway::cpu {

// Where checks report what they compared. Nothing here is inline: it would be compiled for several instruction sets.
struct CheckReport {
  char* page_end;  // of memory behind which nothing may be read or written

  void compared(const char* operation, int lane, bool equal, double found, double expected) const;
};

// Each runs all checks of one vocabulary, on a machine that has its instructions.
void check_scalar(const CheckReport& report);
void check_avx2(const CheckReport& report);
void check_avx512(const CheckReport& report);
void check_avx512_bf16(const CheckReport& report);
void check_amx_emulated(const CheckReport& report);
void check_amx(const CheckReport& report);
void check_neon(const CheckReport& report);

}  // namespace headway::cpu
