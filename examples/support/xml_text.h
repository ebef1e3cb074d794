// Any bytes as the text of an XML element or attribute.
//
//   svg += "<text>" + XmlText("loss < 1") + "</text>";   // loss &lt; 1
#pragma once

#include <string>
#include <string_view>

namespace examples {

// `text` with &, <, > and quotes escaped. Bytes that are no UTF-8, and
// characters that XML 1.0 does not allow, become U+FFFD each.
std::string XmlText(std::string_view text);

}  // namespace examples
