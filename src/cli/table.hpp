// Output of the commands: tables, progress, files.
#pragma once

#include <string>
#include <vector>

namespace hopwell::cli {

// A table with columns as wide as their widest cell.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  [[nodiscard]] std::string text() const;  // columns of numbers are right-aligned, others left-aligned

 private:
  std::vector<std::vector<std::string>> rows_;
};

std::string format(const char* pattern, double value);  // `pattern`: printf format of one double

// A status line that is overwritten as work proceeds. Prints nothing if standard error is not a terminal.
class Progress {
 public:
  void show(const std::string& line);
  ~Progress();

 private:
  bool shown_ = false;
};

std::string joined(const std::vector<std::string>& words);  // "a, b, c"
// The names that take the fewest insertions, deletions and replacements of letters to become `word`; at most 8, joined.
std::string nearest(std::vector<std::string> names, const std::string& word);

// Writes a file atomically: to a file beside it, then renamed. A target that is not a plain file, such as a pipe or a
// device, is written directly. Throws std::runtime_error.
void write_file(const std::string& path, const std::string& content);
std::string obstacle_to_writing(const std::string& path);  // why write_file would fail, as far as can be known; else ""

std::string today();  // 2026-01-31

}  // namespace hopwell::cli
