#include "simd/neon.hpp"
//
#include "isa.inl.hpp"
