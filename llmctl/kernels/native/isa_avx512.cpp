#include "simd/avx512.hpp"
//
#include "isa.inl.hpp"
