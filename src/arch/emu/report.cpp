#include "report.hpp"

#include <algorithm>

#if HOPWELL_HAS_BACKTRACE
#include <backtrace.h>
#endif

namespace hopwell::arch::emu {

const char* name(Kind kind) {
  constexpr const char* names[] = {"race",       "proxy",       "uninitialized", "bounds",
                                   "barrier",    "transaction", "tensor memory", "descriptor",
                                   "divergence", "pending",     "deadlock",      "unsupported"};
  return names[size_t(kind)];
}

std::string to_string(const CallSite& site) {
  if (site.file.empty()) return "an unknown place";
  const size_t slash = site.file.find_last_of('/');
  return (slash == std::string::npos ? site.file : site.file.substr(slash + 1)) + ":" + std::to_string(site.line);
}

bool Report::has(Kind kind) const {
  return std::any_of(findings.begin(), findings.end(), [&](const Finding& f) { return f.kind == kind; });
}

std::string Report::text() const {
  if (findings.empty()) return "no findings\n";
  std::string out;
  for (const Finding& f : findings) {
    out += std::string("[") + name(f.kind) + "] " + (f.where.file.empty() ? "" : to_string(f.where) + ": ") + f.text;
    if (f.count > 1) out += " (" + std::to_string(f.count) + " times)";
    out += "\n";
  }
  return out;
}

SiteId SiteTable::find(uintptr_t key, const Place& place) {
  const auto [it, added] = index_.try_emplace(place, SiteId(places_.size()));
  if (added) {
    if (places_.size() == 0xffff) return it->second = 0;  // more places than numbers: "unknown"
    places_.push_back(place);
  }
  recent(key) = {key, it->second};
  return it->second;
}

CallSite SiteTable::resolve(SiteId id) {
  const Place& place = places_[id];
  if (place.file) return {place.file, place.line, place.column};
  CallSite found;
#if HOPWELL_HAS_BACKTRACE
  // Inlined frames come innermost first: the first one outside of system headers is the line that a reader wants.
  static backtrace_state* state = backtrace_create_state(nullptr, 1, [](void*, const char*, int) {}, nullptr);
  if (!place.address || !state) return found;
  backtrace_pcinfo(
      state, place.address - 1,
      [](void* data, uintptr_t, const char* file, int line, const char*) {
        CallSite& site = *static_cast<CallSite*>(data);
        if (!file || line <= 0) return 0;
        const std::string path = file;
        const bool helper = path.starts_with("/usr/") || path.ends_with("arch/platform.hpp");
        if (site.file.empty() || !helper) site = {path, uint32_t(line), 0};
        return helper ? 0 : 1;
      },
      [](void*, const char*, int) {}, &found);
#endif
  return found;
}

}  // namespace hopwell::arch::emu
