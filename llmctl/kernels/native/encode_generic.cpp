#include "encode.inl.hpp"
#include "feedback.inl.hpp"
