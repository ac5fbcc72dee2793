// What the command line takes, as files for other programs: all of it read off the CLI11 application itself.
#pragma once

#include <CLI/App.hpp>
#include <string>
#include <vector>

namespace hopwell::cli {

const std::vector<std::string>& shells();  // that `completion` writes for

// A script which, sourced or installed where the shell looks, completes commands, options, operators and backends.
std::string completion(const CLI::App& app, const std::string& shell);

// The manual page, in roff with the macros of man(7), of a day such as 2026-01-31.
std::string manual_page(const CLI::App& app, const std::string& version, const std::string& day);

}  // namespace hopwell::cli
