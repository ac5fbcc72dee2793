#include "runtime/backend.hpp"

#include <hopwell/hopwell.h>

#include <algorithm>
#include <new>

#include "runtime/check.hpp"
#include "runtime/device.hpp"

namespace hopwell {
namespace runtime {

const std::vector<KnownBackend>& known_backends() {
  static const std::vector<KnownBackend> known = {
      {"sm100", "an NVIDIA Blackwell data-centre GPU (compute capability 10.x)", false, 100, 109, true},
      {"sm90", "an NVIDIA Hopper GPU (compute capability 9.0)", false, 90, 90, true},
      {"sm80", "an NVIDIA GPU of compute capability 8.0 or later", false, 80, 999, true},
      {"cpu", "nothing", true, 0, 0, true},
      {"emu:sm80", "nothing", true, 0, 0, false},
      {"emu:sm90", "nothing", true, 0, 0, false},
      {"emu:sm100", "nothing", true, 0, 0, false},
  };
  return known;
}

std::set<std::string>& built_backends() {
  static std::set<std::string> names;
  return names;
}

std::map<std::string, std::set<std::string> (*)(), std::less<>>& operators() {
  static std::map<std::string, std::set<std::string> (*)(), std::less<>> all;
  return all;
}

const KnownBackend& known_backend(std::string_view operator_name, std::string_view name) {
  std::string names;
  for (const KnownBackend& known : known_backends()) {
    if (name == known.name) return known;
    names += std::string(names.empty() ? "" : ", ") + known.name;
  }
  throw Error(HOPWELL_INVALID_ARGUMENT,
              std::string(operator_name) + ": backend must be one of " + names + "; got " + std::string(name));
}

std::string missing_on_machine(const KnownBackend& known) {
  if (known.host) return "";
  const auto& devices = cuda_devices();
  const bool found = std::any_of(devices.begin(), devices.end(), [&](const CudaDevice& found) {
    return found.device.capability >= known.min_capability && found.device.capability <= known.max_capability;
  });
  return found ? "" : "no such device";
}

std::string missing_on_device(const KnownBackend& known, const DLDevice& device) {
  if (std::string missing = missing_on_machine(known); !missing.empty()) return missing;
  if (known.host != (device.device_type == kDLCPU)) return "the tensors are on " + to_string(device);
  if (known.host) return "";
  const auto& devices = cuda_devices();
  const auto index = static_cast<std::size_t>(device.device_id);
  if (device.device_id < 0 || index >= devices.size()) return "no such device";
  const int capability = devices[index].device.capability;
  if (capability >= known.min_capability && capability <= known.max_capability) return "";
  return to_string(device) + " has compute capability " + std::to_string(capability / 10) + "." +
         std::to_string(capability % 10);
}

Device device_of(const KnownBackend& known, const DLDevice& location) {
  return known.host ? host_device(location) : cuda_devices().at(static_cast<std::size_t>(location.device_id)).device;
}

std::string explain_rows(const Survey& rows) {
  std::string text;
  const char* chosen = nullptr;
  for (const auto& [known, reason] : rows) {
    text += std::string(text.empty() ? "" : "\n") + known->name + ": ";
    if (!reason.empty()) {
      text += reason;
    } else if (!known->automatic) {
      text += "runs only when asked for by name";
    } else if (chosen != nullptr) {
      text += std::string("slower than ") + chosen;
    } else {
      chosen = known->name;
      text += "chosen";
    }
  }
  return text;
}

void fail_unsupported(std::string_view operator_name, const std::string& reasons) {
  throw Error(HOPWELL_UNSUPPORTED, std::string(operator_name) + ": no backend runs this (" + reasons + ")");
}

static std::string& last_error() {
  thread_local std::string message;
  return message;
}

static void keep_message(const char* message) noexcept {
  try {
    last_error() = message;
  } catch (const std::bad_alloc&) {
    last_error() = "out of memory";  // so short that a string holds it in itself
  }
}

hopwell_status guard(void (*function)(void* context), void* context) noexcept {
  try {
    function(context);
    return HOPWELL_OK;
  } catch (const Error& error) {
    keep_message(error.what());
    return error.status();
  } catch (const std::bad_alloc&) {
    keep_message("out of memory");
    return HOPWELL_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    keep_message(error.what());
    return HOPWELL_INTERNAL;
  }
}

}  // namespace runtime

std::vector<std::string> backends() {
  std::vector<std::string> names;
  for (const BackendInfo& info : backend_info())
    if (info.missing.empty()) names.push_back(info.name);
  return names;
}

std::vector<std::string> backends(std::string_view operator_name) {
  const auto found = runtime::operators().find(operator_name);
  if (found == runtime::operators().end()) {
    std::string good;
    for (const auto& [name, built] : runtime::operators()) good += (good.empty() ? "" : ", ") + name;
    throw Error(HOPWELL_INVALID_ARGUMENT,
                "backends: operator must be one of " + good + "; got " + std::string(operator_name));
  }
  std::vector<std::string> names = backends();
  std::erase_if(names, [built = found->second()](const std::string& name) { return !built.contains(name); });
  return names;
}

namespace {
std::string not_in_this_build(const runtime::KnownBackend& known) {
  return std::string("not in this build (cmake ") +
         (known.host ? "-DHOPWELL_EMULATOR=ON" : "-DHOPWELL_CUDA=ON, with nvcc") + ")";
}
}  // namespace

std::vector<BackendInfo> backend_info() {
  std::vector<BackendInfo> infos;
  for (const runtime::KnownBackend& known : runtime::known_backends()) {
    const bool built = runtime::built_backends().contains(known.name);
    infos.push_back({known.name, known.needs, built ? runtime::missing_on_machine(known) : not_in_this_build(known)});
  }
  return infos;
}

std::vector<DeviceInfo> cuda_devices() {
  std::vector<DeviceInfo> infos;
  for (const runtime::CudaDevice& found : runtime::cuda_devices()) infos.push_back(found.info);
  return infos;
}

std::string version() { return HOPWELL_VERSION; }

}  // namespace hopwell

extern "C" const char* hopwell_last_error(void) { return hopwell::runtime::last_error().c_str(); }
extern "C" const char* hopwell_version(void) { return HOPWELL_VERSION; }
