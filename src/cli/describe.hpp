// Describes the command line for other programs. All information comes from the CLI11 application.
#pragma once

#include <CLI/App.hpp>
#include <string>
#include <vector>

namespace hopwell::cli {

const std::vector<std::string>& shells();  // shells that `completion` supports

// A completion script for commands, options, operators and backends. The user sources it or installs it in the shell's
// folder.
std::string completion(const CLI::App& app, const std::string& shell);

// The manual page, in roff with the macros of man(7). `day` is a date such as 2026-01-31.
std::string manual_page(const CLI::App& app, const std::string& version, const std::string& day);

}  // namespace hopwell::cli
