#include "descent.inl.hpp"
#include "encode.inl.hpp"
