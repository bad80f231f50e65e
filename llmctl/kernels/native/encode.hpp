// Rows of plain numbers to blocks of the GGUF formats: the codes that llama.cpp chooses, bit for bit.
//
// What llama.cpp computes for one block is a chain of float operations in a fixed order. Here a lane of a vector is a row, so
// every lane goes through that chain as it stands, whatever the width of the vectors: results are the same on every
// instruction set, and equal to formats/codecs.py, the definition.
#pragma once

#include <cstdint>
#include <string>

#include "thread_pool.hpp"

namespace llmctl {

enum class PlainType { F32, F16, BF16 };

// rows x columns numbers and where their blocks go. Rows lie `stride` bytes apart, any alignment; blocks side by side.
// importance: [columns] weights of the squared errors, or null. columns: a multiple of the format's block.
struct EncodeTask {
  PlainType type;
  const uint8_t* values;
  int64_t stride, rows, columns;
  const float* importance;
  uint8_t* blocks;
  int64_t row_bytes;
};

// Encodes rows first .. last - 1. Returns the first that holds NaN or infinity or needs a scale beyond float16 (its blocks are
// of no use), or `last`.
using EncodeRows = int64_t (*)(const EncodeTask& task, int64_t first, int64_t last);

struct Encoder {
  const char* format;
  int64_t elements_per_block, bytes_per_block;
  EncodeRows encode;
};

// The encoder of a format for an instruction set as cpu.hpp names them; throws std::invalid_argument where there is none.
const Encoder& encoder_named(const std::string& format, const std::string& isa);

// All rows, shared among the threads; returns the first that cannot be encoded, or `rows`.
int64_t encode_all(const Encoder& encoder, const EncodeTask& task, ThreadPool& pool);

}  // namespace llmctl
