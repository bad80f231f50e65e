#include "simd/generic.hpp"
//
#include "isa.inl.hpp"
