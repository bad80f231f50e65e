#include "simd/avx2.hpp"
//
#include "isa.inl.hpp"
