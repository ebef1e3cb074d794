// 64-bit hashes that are the same on every rank: to compare across ranks, never
// to store.
//
//   uint64_t all = composable::HashString("blocks.0");
//   all = composable::HashMix(all, layout.fingerprint());
#pragma once

#include <cstdint>
#include <string>

namespace composable {

// Depends on the order of its arguments.
inline uint64_t HashMix(uint64_t so_far, uint64_t next) {
  uint64_t z = so_far * 0x9e3779b97f4a7c15ULL + next + 0x632be59bd9b4e019ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

inline uint64_t HashString(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  }
  return hash;
}

}  // namespace composable
