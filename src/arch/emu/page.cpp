// Writes the page about recorded launches: one HTML file with inline pictures, which is also well-formed XML.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "machine.hpp"
#include "recording.hpp"

namespace hopwell::arch::emu {

namespace {

constexpr const char* kHead = R"(<!DOCTYPE html>
<html xmlns="http://www.w3.org/1999/xhtml" lang="en"><head><meta charset="utf-8"/><title>Launches on the emulator</title><style>
:root { color-scheme: light dark; --text: #1b1f24; --page: #ffffff; --faint: #8886; --busy: #3b6fb5; --wait: #e7b24c; --product: #7b4fb0;
  --copy: #2f9075; --phase: #9aa4b1; --even: #c9d0d9; --held: #8882; --load: #d1603d; --store: #c98a10; }
@media (prefers-color-scheme: dark) { :root { --text: #dfe3e8; --page: #15181c; --even: #4a525c; --phase: #78828e; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--text); background: var(--page); margin: 2em auto; max-width: 1280px; padding: 0 1em; }
table { border-collapse: collapse; margin: 0.6em 0; } th, td { padding: 2px 10px; text-align: right; border-bottom: 1px solid var(--faint); }
th:first-child, td:first-child { text-align: left; } td.left { text-align: left; } h2 { margin-top: 2em; } pre { overflow-x: auto; }
svg { display: block; width: 100%; height: auto; background: var(--page); } svg text { font: 10px system-ui, sans-serif; fill: var(--text); } .strong { font-weight: 600; }
.busy { fill: var(--busy); } .wait { fill: var(--wait); opacity: 0.55; } .product { fill: var(--product); } .copy { fill: var(--copy); }
.phase { fill: var(--phase); } .even { fill: var(--even); } .held { fill: var(--held); stroke: var(--faint); } .read { fill: var(--load); }
.stored { fill: var(--store); } .operand { fill: var(--copy); } .axis { stroke: var(--faint); stroke-width: 0.5; }
</style></head><body>
<h1>Launches on the emulator</h1>
)";

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  return out;
}

std::string count(uint64_t n) {  // 12,345
  std::string digits = std::to_string(n);
  for (size_t i = digits.size(); i > 3; i -= 3) digits.insert(i - 3, ",");
  return digits;
}

std::string count(double n) { return count(uint64_t(std::llround(n))); }

class HtmlTable {
 public:
  explicit HtmlTable(const std::vector<std::string>& head) { row("th", head); }
  void add(const std::vector<std::string>& cells) { row("td", cells); }
  std::string text() const { return "<table>\n" + rows_ + "</table>\n"; }

 private:
  void row(const char* cell, const std::vector<std::string>& cells) {
    rows_ += "<tr>";
    for (const std::string& c : cells) rows_ += format("<%s>", cell) + escaped(c) + format("</%s>", cell);
    rows_ += "</tr>\n";
  }
  std::string rows_;
};

// ---- pictures -------------------------------------------------------------------------------------------------------

class Picture {
 public:
  explicit Picture(double end) : scale_(kWidth / std::max(end, 1.0)) { ticks(end); }

  void heading(const std::string& text) {
    y_ += 8;
    label(0, text, "strong");
    y_ += 14;
  }
  /// Writes the label of the next row.
  void name(const std::string& text) { label(12, text, ""); }
  void spans(const std::vector<Span>& spans, const char* style, const char* every_other = nullptr) {
    for (size_t i = 0; i < spans.size();) {
      // Spans closer than a third of a pixel become one rectangle.
      size_t next = i + 1;
      double end = spans[i].end;
      while (next < spans.size() && !every_other && (spans[next].end - spans[i].begin) * scale_ < kPixel)
        end = std::max(end, spans[next++].end);
      std::string title = next - i > 1 ? format("%zu pieces, the first: ", next - i) : "";
      title += spans[i].what + format(": %.0f to %.0f", spans[i].begin, end);
      rectangle(spans[i].begin, end, y_, kRow - 2, every_other && i % 2 ? every_other : style, title);
      i = next;
    }
  }
  void next_row() { y_ += kRow; }

  /// Columns of tensor memory from top to bottom, 2 per pixel.
  void tensor_memory(const std::vector<TensorMemoryUse>& uses, uint32_t rank) {
    constexpr const char* kStyles[] = {"held", "product", "operand", "stored", "read"};
    constexpr const char* kWords[] = {"allocated", "written by the tensor core", "read by the tensor core",
                                      "stored by warps", "read by warps"};
    using enum TensorMemoryUse::Kind;
    const auto same_columns = [&](size_t i, size_t j) {
      return j < uses.size() && uses[i].rank == uses[j].rank && uses[i].first_column == uses[j].first_column &&
             uses[i].columns == uses[j].columns;
    };
    for (const int layer : {0, 1, 2})  // back to front: allocations, writes, and reads, which are narrower
      for (size_t i = 0; i < uses.size(); ++i) {
        const TensorMemoryUse& use = uses[i];
        const bool reads = use.kind == operand || use.kind == read;
        if (use.rank != rank || (use.kind == allocated ? 0 : reads ? 2 : 1) != layer) continue;
        if (use.kind == operand && same_columns(i, i + 1) && uses[i + 1].kind == product) continue;  // it accumulates
        double end = use.end;  // a use that follows immediately in the same columns extends the rectangle
        while (layer > 0 && same_columns(i, i + 1) && uses[i + 1].kind == use.kind &&
               (uses[i + 1].begin - end) * scale_ < kPixel && uses[i + 1].begin >= use.begin)
          end = std::max(end, uses[++i].end);
        const double height = use.columns / 2.0;
        rectangle(use.begin, end, y_ + use.first_column / 2.0 + (reads ? height / 4 : 0), reads ? height / 2 : height,
                  kStyles[size_t(use.kind)],
                  format("columns %u to %u %s", use.first_column, use.first_column + use.columns - 1,
                         kWords[size_t(use.kind)]) +
                      format(": %.0f to %.0f", use.begin, end));
      }
    for (uint32_t column = 0; column <= kTmemColumns; column += 128) {
      shapes_ += format("<text x=\"%.0f\" y=\"%.1f\" text-anchor=\"end\">%u</text>\n", kLeft - 6, y_ + column / 2.0 + 3,
                        column);
      shapes_ += format("<line class=\"axis\" x1=\"%.0f\" x2=\"%.0f\" y1=\"%.1f\" y2=\"%.1f\"/>\n", kLeft,
                        kLeft + kWidth, y_ + column / 2.0, y_ + column / 2.0);
    }
    y_ += kTmemColumns / 2.0 + 8;
  }

  std::string text() const {
    return format("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" role=\"img\">\n",
                  kLeft + kWidth + 20, y_ + 6) +
           shapes_ + "</svg>\n";
  }

 private:
  static constexpr double kLeft = 190, kWidth = 1000, kRow = 13, kPixel = 0.33;

  void label(double x, const std::string& text, const char* style) {
    shapes_ += format("<text class=\"%s\" x=\"%.0f\" y=\"%.1f\">", style, x, y_ + 9) + escaped(text) + "</text>\n";
  }
  void rectangle(double begin, double end, double y, double height, const char* style, const std::string& title) {
    shapes_ += format("<rect class=\"%s\" x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\"><title>", style,
                      kLeft + begin * scale_, y, std::max((end - begin) * scale_, kPixel), height) +
               escaped(title) + "</title></rect>\n";
  }
  void ticks(double end) {
    double step = 1;
    for (const double factor : {2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000})
      if (end / step > 10) step = factor;
    if (end / step > 10) step = end / 10;
    for (int tick = 0; tick * step <= end; ++tick)
      shapes_ += format("<text x=\"%.2f\" y=\"10\" text-anchor=\"middle\">", kLeft + tick * step * scale_) +
                 count(tick * step) + "</text>\n";
    y_ = 14;
  }

  double scale_, y_ = 0;
  std::string shapes_;
};

// ---- texts ----------------------------------------------------------------------------------------------------------

std::string warps_of(const Role& role) {
  return role.first_warp == role.last_warp ? format("warp %zu", role.first_warp)
                                           : format("warps %zu to %zu", role.first_warp, role.last_warp);
}

// The two units that a role uses most: "copies, exponentials". Without shared memory, which nearly every role uses.
std::string name_of(const Role& role) {
  std::vector<Demand> busiest;
  for (const Demand& demand : role.demands)
    if (demand.cycles > 0 && demand.unit != std::string("issue slots")) busiest.push_back(demand);
  if (busiest.size() > 1)
    std::erase_if(busiest, [](const Demand& d) { return d.unit == std::string("shared memory"); });
  std::sort(busiest.begin(), busiest.end(), [](const Demand& a, const Demand& b) { return a.cycles > b.cycles; });
  std::string name;
  for (size_t i = 0; i < std::min<size_t>(2, busiest.size()); ++i)
    name += (i ? ", " : "") + std::string(busiest[i].unit == std::string("tensor pipe") ? "products"
                                          : busiest[i].unit == std::string("gather")    ? "copies"
                                                                                        : busiest[i].unit);
  return name.empty() ? "instructions" : name;
}

std::string timeline(const LaunchRecord& launch) {
  Picture picture(launch.end);
  constexpr uint32_t kMostCtas = 2;
  const uint32_t ranks = std::min(launch.shape.cluster.volume(), kMostCtas);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const std::string cta = ranks > 1 ? format("CTA %u, ", rank) : "";
    std::vector<const TimelineRow*> warps;
    for (const TimelineRow& row : launch.rows)
      if (row.rank == rank) warps.push_back(&row);
    for (const Role& role : launch.roles) {
      if (role.rank != rank) continue;
      picture.heading(cta + warps_of(role) + ": " + name_of(role));
      for (size_t warp = role.first_warp; warp <= role.last_warp; ++warp) {
        picture.name(warps[warp]->name);
        picture.spans(warps[warp]->waits, "wait");
        picture.spans(warps[warp]->busy, "busy");
        picture.next_row();
      }
    }
    if (warps.size() > launch.warps_a_cta) picture.heading(cta + "engines");
    for (size_t i = launch.warps_a_cta; i < warps.size(); ++i) {
      picture.name(warps[i]->name);
      picture.spans(warps[i]->busy, warps[i]->name.starts_with("copies") ? "copy" : "product");
      picture.next_row();
    }
    picture.heading(cta + "barriers, phase by phase");
    for (const BarrierRow& barrier : launch.barriers) {
      if (barrier.rank != rank) continue;
      picture.name(barrier.name);
      picture.spans(barrier.phases, "phase", "even");
      picture.next_row();
    }
    const auto in_rank = [&](const TensorMemoryUse& use) { return use.rank == rank; };
    if (std::none_of(launch.tensor_memory.begin(), launch.tensor_memory.end(), in_rank)) continue;
    picture.heading(cta + "tensor memory, by column");
    picture.tensor_memory(launch.tensor_memory, rank);
  }
  std::string text = picture.text();
  if (launch.shape.cluster.volume() > ranks)
    text += format("<p>The other %u CTAs of the cluster are not drawn.</p>\n", launch.shape.cluster.volume() - ranks);
  return text;
}

std::string bytes_table(const LaunchRecord& launch) {
  const Work& w = launch.total;
  HtmlTable table({"bytes", "all CTAs", "a CTA"});
  const std::pair<const char*, uint64_t> rows[] = {
      {"copied from global to shared memory", w.copied_bytes},
      {"shared memory: read by products", w.operand_bytes},
      {"shared memory: read and written by all else", w.shared_bytes},
      {"global memory: read and written by threads", w.global_bytes},
      {"global memory: added to", w.added_bytes + w.added_scalars},
      {"tensor memory: read by warps", w.tmem_loaded},
      {"tensor memory: stored by warps", w.tmem_stored},
      {"tensor memory: copied from shared memory", w.tmem_copied},
      {"HBM, each sector once", launch.memory_bytes},
  };
  for (const auto& [what, bytes] : rows)
    if (bytes) table.add({what, count(bytes), count(double(bytes) / double(launch.ctas))});
  return table.text();
}

std::string units_table(const LaunchRecord& launch) {
  HtmlTable table({"unit", "cycles a CTA"});
  for (const Demand& unit : launch.units)
    if (unit.cycles > 0) table.add({unit.unit, count(unit.cycles)});
  return table.text();
}

std::string instruction_table(const LaunchRecord& launch) {
  std::vector<std::string> head = {"instructions of warps", "all"};
  for (const Role& role : launch.roles)
    head.push_back((launch.shape.cluster.volume() > 1 ? format("CTA %zu, ", role.rank) : "") + warps_of(role));
  HtmlTable table(head);
  for (const InstructionCount& instruction : launch.instructions) {
    std::vector<std::string> cells = {instruction.name, count(instruction.total())};
    for (const Role& role : launch.roles) {
      uint64_t of_role = 0;
      for (size_t warp = role.first_warp; warp <= role.last_warp; ++warp)
        of_role += instruction.of_warp[role.rank * launch.warps_a_cta + warp];
      cells.push_back(of_role ? count(of_role) : "");
    }
    table.add(cells);
  }
  return table.text();
}

std::string shared_table(const LaunchRecord& launch) {
  HtmlTable table({"accesses of warps to shared memory", "line", "accesses", "bytes", "wavefronts", "conflicts"});
  for (const SharedLine& line : launch.shared)
    table.add({line.instruction, to_string(line.where), count(line.accesses), count(line.bytes), count(line.wavefronts),
               count(line.conflicts)});
  return table.text();
}

std::string extent(const Extent& e) { return format("%u × %u × %u", e.x, e.y, e.z); }

std::string section(const LaunchRecord& launch, const Rates& rates, size_t number) {
  std::string text =
      format("<h2>%zu. ", number) + escaped(launch.kernel.empty() ? "a kernel in an unknown file" : launch.kernel) +
      "</h2>\n<p>" +
      escaped(format("Grid %s of CTAs, %s threads, cluster %s, %s bytes of shared memory.",
                     extent(launch.shape.grid).c_str(), extent(launch.shape.block).c_str(),
                     extent(launch.shape.cluster).c_str(), count(uint64_t(launch.shape.shared_bytes)).c_str())) +
      "</p>\n";
  if (launch.findings != "no findings\n") text += "<pre>" + escaped(launch.findings) + "</pre>\n";
  text += timeline(launch);
  text += format("<p>The first cluster, in cycles of the model (%s).</p>\n", rates.chip);
  text += units_table(launch) + bytes_table(launch);
  text +=
      "<p>" + count(launch.total.products) + " products, " + count(launch.bank_conflicts()) + " bank conflicts.</p>\n";
  return text + instruction_table(launch) + (launch.shared.empty() ? "" : shared_table(launch));
}

}  // namespace

std::string launch_page(const std::vector<LaunchRecord>& launches, const Rates& rates, size_t left_out) {
  std::string text = kHead;
  text +=
      "<p>Recorded by Hopwell's emulator. Times are the model's, not a GPU's: what waits goes on when the last of what "
      "it "
      "waits for is there; a thread takes a cycle an instruction or access to shared memory, products, copies and "
      "tensor "
      "memory what their unit needs; no latency, no arithmetic, nothing shared between warps. Counts are of the whole "
      "grid.</p>\n<p><svg viewBox=\"0 0 1100 16\">";
  const std::pair<const char*, const char*> legend[] = {{"busy", "a warp is busy"},
                                                        {"wait", "waits"},
                                                        {"copy", "copies; operands in tensor memory"},
                                                        {"product", "products; tensor memory written"},
                                                        {"stored", "tensor memory stored"},
                                                        {"read", "tensor memory read"},
                                                        {"phase", "phases of a barrier"}};
  double x = 0;
  for (const auto& [style, words] : legend) {
    text +=
        format("<rect class=\"%s\" x=\"%.0f\" y=\"3\" width=\"10\" height=\"10\"/><text x=\"%.0f\" y=\"12\">%s</text>",
               style, x, x + 14, words);
    x += 40 + 5.2 * double(std::strlen(words));
  }
  text += "</svg></p>\n";
  for (size_t i = 0; i < launches.size(); ++i) text += section(launches[i], rates, i + 1);
  if (left_out) text += format("<p>%zu launches after these were not recorded.</p>\n", left_out);
  return text + "</body></html>\n";
}

// Writes to a file beside the target, then renames it. A target that is not a plain file, such as a pipe or a device,
// is written directly.
void write_launch_page(const std::string& path, const std::vector<LaunchRecord>& launches, const Rates& rates,
                       size_t left_out) {
  const std::string text = launch_page(launches, rates, left_out);
  std::error_code none;
  const std::filesystem::file_status status = std::filesystem::status(path, none);
  const bool directly = std::filesystem::exists(status) && !std::filesystem::is_regular_file(status);
  const std::string place = directly ? path : path + ".part";
  std::FILE* file = std::fopen(place.c_str(), "wb");
  bool written = file && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  int reason = errno;
  if (file && std::fclose(file) != 0 && written) written = false, reason = errno;
  if (written && !directly && std::rename(place.c_str(), path.c_str()) != 0) written = false, reason = errno;
  if (written) return;
  if (file && !directly) std::remove(place.c_str());
  throw std::runtime_error("report of launches: cannot write " + path + ": " + std::strerror(reason));
}

void Recording::write_html(const std::string& path) const { write_launch_page(path, launches, rates); }

}  // namespace hopwell::arch::emu
