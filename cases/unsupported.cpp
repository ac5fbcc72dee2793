#include "unsupported.hpp"

#include <algorithm>

namespace hopwell::cases {
namespace {

bool any_word(std::string_view words, const auto& is_wanted) {
  while (!words.empty()) {
    const std::size_t end = std::min(words.find(' '), words.size());
    if (is_wanted(words.substr(0, end))) return true;
    words.remove_prefix(std::min(end + 1, words.size()));
  }
  return false;
}

}  // namespace

bool matches(std::string_view name, std::string_view pattern) {
  std::size_t letter = 0, at = 0, star = std::string_view::npos, star_end = 0;
  while (letter < name.size()) {
    if (at < pattern.size() && pattern[at] == '*') {
      star = at++, star_end = letter;
    } else if (at < pattern.size() && (pattern[at] == '?' || pattern[at] == name[letter])) {
      ++at, ++letter;
    } else if (star != std::string_view::npos) {
      at = star + 1, letter = ++star_end;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', at) == std::string_view::npos;
}

std::string reason_of(const std::vector<Unsupported>& rows, const std::string& name, const std::string& target) {
  const auto is_target = [&](std::string_view word) { return word == target; };
  const auto is_name = [&](std::string_view pattern) { return matches(name, pattern); };
  for (const Unsupported& row : rows)
    if (any_word(row.targets, is_target) && any_word(row.cases, is_name)) return std::string(row.reason);
  return {};
}

}  // namespace hopwell::cases
