#include "encode.inl.hpp"
