#include "examples/support/xml_text.h"

#include <array>
#include <cstddef>
#include <cstdint>

namespace examples {
namespace {

struct Character {
  size_t bytes = 0;  // 0: no valid one
  uint32_t code = 0;
};

// The UTF-8 character that `text` starts with.
Character FirstCharacter(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  if (first < 0x80) return {1, first};
  const size_t bytes = first >= 0xf0   ? 4
                       : first >= 0xe0 ? 3
                       : first >= 0xc0 ? 2
                                       : 0;
  if (bytes == 0 || first > 0xf4 || text.size() < bytes) return {};
  uint32_t code = first & (0x7fU >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0U) != 0x80) return {};
    code = (code << 6U) | (byte(i) & 0x3fU);
  }
  constexpr std::array<uint32_t, 5> kLeast = {0, 0, 0x80, 0x800, 0x10000};
  if (code < kLeast[bytes] || code > 0x10ffff) return {};
  return {bytes, code};
}

// The production Char of XML 1.0.
bool AllowedInXml(uint32_t code) {
  if (code < 0x20) return code == '\t' || code == '\n' || code == '\r';
  return code < 0xd800 || (code > 0xdfff && code != 0xfffe && code != 0xffff);
}

}  // namespace

std::string XmlText(std::string_view text) {
  constexpr std::string_view kReplacement = "\xef\xbf\xbd";
  std::string escaped;
  while (!text.empty()) {
    const Character character = FirstCharacter(text);
    const size_t bytes = character.bytes > 0 ? character.bytes : 1;
    if (character.bytes == 0 || !AllowedInXml(character.code)) {
      escaped += kReplacement;
    } else if (character.code == '&') {
      escaped += "&amp;";
    } else if (character.code == '<') {
      escaped += "&lt;";
    } else if (character.code == '>') {
      escaped += "&gt;";
    } else if (character.code == '"') {
      escaped += "&quot;";
    } else if (character.code == '\'') {
      escaped += "&#39;";
    } else {
      escaped += text.substr(0, bytes);
    }
    text.remove_prefix(bytes);
  }
  return escaped;
}

}  // namespace examples
