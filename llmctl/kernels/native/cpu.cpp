#include "cpu.hpp"

#include <cstdlib>
#include <stdexcept>

#include "bind_isa.hpp"
#include "kernels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace llmctl {

#define LLMCTL_DECLARE(isa) \
  namespace isa {           \
  extern const Kernels kKernels; \
  }
LLMCTL_DECLARE(generic)
#if defined(__x86_64__)
LLMCTL_DECLARE(avx2)
LLMCTL_DECLARE(avxvnni)
LLMCTL_DECLARE(avx512)
namespace avx512bf16 {
extern const AttentionKernels dot_attention;
}
namespace amx {
extern const AttentionKernels tile_attention;
void linear(const TileRange&, const Activations&, float* y, int64_t stride);
}
#elif defined(__aarch64__)
LLMCTL_DECLARE(neon)
#endif

namespace {

#if defined(__x86_64__)
struct Features {
  bool avx2 = false, avxvnni = false, avx512 = false, avx512bf16 = false, amx = false;
};

// The register sets that the operating system saves (XCR0). xgetbv by hand: its intrinsic needs a flag of its own.
uint64_t saved_registers() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

// Linux hands out the tiles' state (component 18 of XSAVE) to processes that ask for it (ARCH_REQ_XCOMP_PERM).
bool tiles_are_granted() {
#if defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

bool all(uint64_t word, uint64_t bits) { return (word & bits) == bits; }
constexpr uint64_t bit(int n) { return uint64_t(1) << n; }

// Intel's manual, volume 2A, CPUID: leaf 1, leaf 7 with subleaves 0 and 1.
Features detect() {
  Features found;
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const uint32_t leaf1 = c;
  if (!all(leaf1, bit(27))) return found;   // OSXSAVE
  const uint64_t saved = saved_registers();
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  const uint32_t leaf7_b = b, leaf7_c = c, leaf7_d = d, last = a;
  const bool fma_f16c = all(leaf1, bit(12) | bit(28) | bit(29));                    // FMA, AVX, F16C
  found.avx2 = fma_f16c && all(leaf7_b, bit(5)) && all(saved, 0x6);                 // SSE and AVX state
  found.avx512 = found.avx2 && all(leaf7_b, bit(16) | bit(17) | bit(30) | bit(31))  // F, DQ, BW, VL
                 && all(leaf7_c, bit(11)) && all(saved, 0xE6);                      // VNNI; masks and the upper halves
  found.amx = found.avx512 && all(leaf7_d, bit(22) | bit(24) | bit(25))             // AMX-BF16, AMX-TILE, AMX-INT8
              && all(saved, bit(17) | bit(18)) && tiles_are_granted();
  if (last < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) a = 0;
  found.avxvnni = found.avx2 && all(a, bit(4));
  found.avx512bf16 = found.avx512 && all(a, bit(5));
  found.amx = found.amx && found.avx512bf16;
  return found;
}

const Features& features() {
  static const Features found = detect();
  return found;
}
#elif defined(__aarch64__)
bool has_dot_product() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;   // HWCAP_ASIMDDP
#else
  return true;   // every 64-bit Apple machine
#endif
}
#endif

struct Isa {
  const char* name;
  const Kernels* (*kernels)();
};
const Isa kIsas[] = {   // best first
    {"amx", amx_kernels},         {"avx512bf16", avx512bf16_kernels}, {"avx512", avx512_kernels},
    {"avxvnni", avxvnni_kernels}, {"avx2", avx2_kernels},             {"neon", neon_kernels},
    {"generic", generic_kernels},
};

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

const Kernels* choose() {
  const char* forced = std::getenv("LLMCTL_ISA");
  return forced && *forced ? &kernels_named(forced) : &kernels_named(available_isas().front());
}

}  // namespace

const Kernels* generic_kernels() { return &generic::kKernels; }
#if defined(__x86_64__)
const Kernels* avx2_kernels() { return features().avx2 ? &avx2::kKernels : nullptr; }
const Kernels* avxvnni_kernels() { return features().avxvnni ? &avxvnni::kKernels : nullptr; }
const Kernels* avx512_kernels() { return features().avx512 ? &avx512::kKernels : nullptr; }
const Kernels* avx512bf16_kernels() {
  static const Kernels table = [] {
    Kernels kernels = avx512::kKernels;
    kernels.name = "avx512bf16";
    kernels.attention = &avx512bf16::dot_attention;
    return kernels;
  }();
  return features().avx512bf16 ? &table : nullptr;
}
const Kernels* amx_kernels() {
  static const Kernels table = [] {
    Kernels kernels = avx512::kKernels;
    kernels.name = "amx";
    kernels.linear = amx::linear;
    kernels.attention = &amx::tile_attention;
    return kernels;
  }();
  return features().amx ? &table : nullptr;
}
#else
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avxvnni_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }
const Kernels* avx512bf16_kernels() { return nullptr; }
const Kernels* amx_kernels() { return nullptr; }
#endif
#if defined(__aarch64__)
const Kernels* neon_kernels() { return has_dot_product() ? &neon::kKernels : nullptr; }
#else
const Kernels* neon_kernels() { return nullptr; }
#endif

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas)
    if (isa.kernels()) names.push_back(isa.name);
  return names;
}

const Kernels& kernels_named(const std::string& name) {
  for (const Isa& isa : kIsas) {
    if (name != isa.name) continue;
    if (const Kernels* found = isa.kernels()) return *found;
    throw std::invalid_argument("this machine has no " + name + " kernels; available: " + join(available_isas()));
  }
  throw std::invalid_argument("there is no instruction set called '" + name + "'; available: " + join(available_isas()));
}

const Kernels* active_kernels() {
  static const Kernels* const chosen = choose();
  return chosen;
}

}  // namespace llmctl
