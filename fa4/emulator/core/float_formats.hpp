// Floating-point formats narrower than 32 bits, and conversions among them.
// PTX ISA 5.2.3 (formats), 9.7.9.21 (cvt: rounding, .satfinite, .relu).
#pragma once

#include <cstddef>
#include <cstdint>

namespace fa4 {

enum class Round : uint8_t { NearestEven, Zero, Down, Up, NearestAway };

float f16_to_float(uint16_t);
float bf16_to_float(uint16_t);
float tf32_to_float(uint32_t);      // the low 13 bits are ignored
float e4m3_to_float(uint8_t);       // 0x7F: NaN; no infinity
float e5m2_to_float(uint8_t);
float e2m1_to_float(uint8_t);       // low 4 bits
float e2m3_to_float(uint8_t);       // low 6 bits
float e3m2_to_float(uint8_t);       // low 6 bits
float ue8m0_to_float(uint8_t);      // 2^(x - 127), 0xFF: NaN

uint16_t float_to_f16(float, Round = Round::NearestEven, bool satfinite = false);
uint16_t float_to_bf16(float, Round = Round::NearestEven, bool satfinite = false);
uint32_t float_to_tf32(float, Round = Round::NearestEven, bool satfinite = false);
uint8_t float_to_e4m3(float);       // narrow formats saturate: satfinite is mandatory in PTX
uint8_t float_to_e5m2(float);
uint8_t float_to_e2m1(float);
uint8_t float_to_e2m3(float);
uint8_t float_to_e3m2(float);
uint8_t float_to_ue8m0(float, Round);   // Zero or Up

// Bulk conversion, for whole matrix operands.
void f16_to_float(const uint16_t* source, float* destination, size_t count);
void bf16_to_float(const uint16_t* source, float* destination, size_t count);

}  // namespace fa4
