#include "describe.hpp"
#include "commands.hpp"

#include <CLI/CLI.hpp>
#include <cctype>
#include <stdexcept>

#include "table.hpp"

namespace hopwell::cli {
namespace {

using Strings = std::vector<std::string>;

struct Argument {
  Strings names;  // "--json", "-h"; for a positional argument "OP"
  bool positional, required, many;
  std::string value;  // placeholder of an option's value: "TEXT", "FILE"; "": the option is a flag
  Strings choices;    // allowed values, if restricted
  std::string meaning;
};

struct Command {
  std::string name, meaning;  // name "": the options before a command
  std::vector<Argument> arguments;
};

std::string spaced(const Strings& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

// CLI11 writes the type of an option with a fixed list of values as TEXT:{a,b}.
Argument read(const CLI::Option& option) {
  Argument argument{};
  for (const std::string& name : option.get_lnames()) argument.names.push_back("--" + name);
  for (const std::string& name : option.get_snames()) argument.names.push_back("-" + name);
  argument.positional = argument.names.empty();
  if (argument.positional) argument.names.push_back(option.get_name(true));
  argument.required = option.get_required();
  argument.many = option.get_items_expected_max() > 1;
  argument.meaning = option.get_description();
  if (option.get_items_expected_max() == 0) return argument;
  const std::string type = option.get_type_name();
  argument.value = type.substr(0, type.find(':'));
  const std::size_t open = type.find('{'), close = type.find('}');
  if (open != std::string::npos && close != std::string::npos)
    argument.choices = CLI::detail::split(type.substr(open + 1, close - open - 1), ',');
  return argument;
}

Command read(const CLI::App& app, const std::string& name) {
  Command command{name, app.get_description(), {}};
  for (const CLI::Option* option : app.get_options()) command.arguments.push_back(read(*option));
  return command;
}

std::vector<Command> commands_of(const CLI::App& app) {
  std::vector<Command> commands;
  for (const CLI::App* command : app.get_subcommands({})) commands.push_back(read(*command, command->get_name()));
  return commands;
}

Strings names_of(const std::vector<Command>& commands) {
  Strings names;
  for (const Command& command : commands) names.push_back(command.name);
  return names;
}

// All words that may appear where no option expects a value.
Strings words_of(const Command& command) {
  Strings words;
  for (const Argument& argument : command.arguments) {
    const Strings& some = argument.positional ? argument.choices : argument.names;
    words.insert(words.end(), some.begin(), some.end());
  }
  return words;
}

// ---- bash --------------------------------------------------------------------------------------------------------

// Splits the line at blanks only. bash itself also splits emu:sm90 and --backend=cpu, and replaces only the text after
// its own last split, so the script removes the part before that split again.
constexpr const char* kBash = R"(# bash completion for hopwell, by `hopwell completion bash`
_hopwell() {
  local line=${COMP_LINE:0:COMP_POINT} words current previous command choices
  read -ra words <<<"$line"
  [[ $line == *[[:space:]] ]] && words+=("")
  current=${words[-1]} previous=${words[-2]} command=${words[1]}
  ((${#words[@]} > 2)) || command=
  [[ $current == --*=* ]] && previous=${current%%=*} current=${current#*=}
  case "$command $previous" in
@CASES@    *) choices="@COMMANDS@" ;;
  esac
  COMPREPLY=($(compgen -W "$choices" -- "$current"))
  [[ $COMP_WORDBREAKS == *:* ]] && COMPREPLY=("${COMPREPLY[@]#"${current%"${current##*:}"}"}")
}
complete -F _hopwell hopwell
)";

std::string bash(const CLI::App& app) {
  const std::vector<Command> commands = commands_of(app);
  std::string cases;
  for (const Command& command : commands) {
    for (const Argument& argument : command.arguments) {
      if (argument.positional || argument.value.empty()) continue;
      for (const std::string& name : argument.names) {
        cases += "    \"" + command.name + " " + name + "\") ";
        if (argument.value == "FILE")
          cases += R"(compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$current"); return ;;)";
        else
          cases += "choices=\"" + spaced(argument.choices) + "\" ;;";
        cases += "\n";
      }
    }
    cases += "    \"" + command.name + " \"*) choices=\"" + spaced(words_of(command)) + "\" ;;\n";
  }
  Strings first = names_of(commands);
  for (const std::string& word : words_of(read(app, ""))) first.push_back(word);
  return replaced(replaced(kBash, "@CASES@", cases), "@COMMANDS@", spaced(first));
}

// ---- zsh ---------------------------------------------------------------------------------------------------------

constexpr const char* kZsh = R"(#compdef hopwell
# zsh completion for hopwell, by `hopwell completion zsh`
_hopwell() {
  local curcontext=$curcontext state
  local -a commands=(@COMMANDS@)
  _arguments -C @OPTIONS@ '1:command:->command' '*::argument:->argument'
  case $state in
    command) _describe command commands ;;
    argument)
      case $words[1] in
@CASES@      esac ;;
  esac
}
if [ "$funcstack[1]" = _hopwell ]; then _hopwell "$@"; else compdef _hopwell hopwell; fi
)";

std::string zsh_quoted(const std::string& text) { return "'" + replaced(text, "'", "'\\''") + "'"; }

std::string zsh_escaped(std::string text) {
  for (const char* special : {"\\", ":", "[", "]"}) text = replaced(text, special, std::string("\\") + special);
  return text;
}

// An action of _arguments: a word list, or a completion function of zsh.
std::string zsh_action(const Argument& argument) {
  if (argument.value == "FILE") return "_files";
  Strings words;
  for (const std::string& choice : argument.choices) words.push_back(zsh_escaped(choice));
  return words.empty() ? " " : "(" + spaced(words) + ")";
}

std::string zsh_arguments(const Command& command) {
  Strings specs;
  for (const Argument& argument : command.arguments) {
    const std::string count = argument.many ? "*" : "";
    if (argument.positional) {
      specs.push_back(zsh_quoted(count + ":" + argument.names.front() + ":" + zsh_action(argument)));
      continue;
    }
    for (const std::string& name : argument.names) {
      std::string spec = count + name;
      if (!argument.value.empty()) spec += name.starts_with("--") ? "=" : "+";
      spec += "[" + zsh_escaped(argument.meaning) + "]";
      if (!argument.value.empty()) spec += ":" + zsh_escaped(argument.value) + ":" + zsh_action(argument);
      specs.push_back(zsh_quoted(spec));
    }
  }
  return spaced(specs);
}

std::string zsh(const CLI::App& app) {
  Strings described;
  std::string cases;
  for (const Command& command : commands_of(app)) {
    described.push_back(zsh_quoted(command.name + ":" + zsh_escaped(command.meaning)));
    cases += "        " + command.name + ") _arguments " + zsh_arguments(command) + " ;;\n";
  }
  std::string text = replaced(kZsh, "@COMMANDS@", spaced(described));
  return replaced(replaced(text, "@OPTIONS@", zsh_arguments(read(app, ""))), "@CASES@", cases);
}

// ---- fish --------------------------------------------------------------------------------------------------------

std::string fish_quoted(const std::string& text) {
  return "'" + replaced(replaced(text, "\\", "\\\\"), "'", "\\'") + "'";
}

std::string fish_arguments(const Command& command) {
  const std::string where =
      "complete -c hopwell -n '" +
      (command.name.empty() ? "__fish_use_subcommand" : "__fish_seen_subcommand_from " + command.name) + "'";
  std::string text;
  for (const Argument& argument : command.arguments) {
    text += where;
    if (!argument.positional)
      for (const std::string& name : argument.names)
        text += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
    if (argument.value == "FILE")
      text += " -r -F";
    else if (!argument.value.empty() && !argument.positional)
      text += " -x";
    if (!argument.choices.empty()) text += " -a " + fish_quoted(spaced(argument.choices));
    text += " -d " + fish_quoted(argument.meaning) + "\n";
  }
  return text;
}

std::string fish(const CLI::App& app) {
  std::string text = "# fish completion for hopwell, by `hopwell completion fish`\ncomplete -c hopwell -f\n";
  text += fish_arguments(read(app, ""));
  for (const Command& command : commands_of(app)) {
    text += "complete -c hopwell -n __fish_use_subcommand -a " + command.name + " -d " + fish_quoted(command.meaning);
    text += "\n" + fish_arguments(command);
  }
  return text;
}

// ---- the manual page ---------------------------------------------------------------------------------------------

std::string roff(const std::string& text) {
  const std::string escaped = replaced(replaced(text, "\\", "\\e"), "-", "\\-");
  return escaped.starts_with(".") || escaped.starts_with("'") ? "\\&" + escaped : escaped;
}

std::string sentence(std::string text) {
  if (!text.empty()) text.front() = static_cast<char>(std::toupper(static_cast<unsigned char>(text.front())));
  return text.empty() || text.ends_with(".") ? text : text + ".";
}

std::string manual_arguments(const Command& command) {
  std::string text;
  for (const Argument& argument : command.arguments) {
    if (!command.name.empty() && argument.names.front() == "--help") continue;  // described once, for all commands
    std::string head;
    for (const std::string& name : argument.names)
      head += (head.empty() ? "" : ", ") + std::string(argument.positional ? "\\fI" : "\\fB") + roff(name) + "\\fR";
    if (!argument.positional && !argument.value.empty()) head += " \\fI" + roff(argument.value) + "\\fR";
    text += ".TP\n" + head + "\n" + roff(sentence(argument.meaning)) + "\n";
    if (!argument.choices.empty()) text += "One of: " + roff(joined(argument.choices)) + ".\n";
  }
  return text;
}

std::string usage(const Command& command) {
  std::string text = "\\fBhopwell " + roff(command.name) + "\\fR";
  for (const Argument& argument : command.arguments) {
    if (!argument.positional) continue;
    const std::string name = "\\fI" + roff(argument.names.front()) + "\\fR" + (argument.many ? " ..." : "");
    text += argument.required ? " " + name : " [" + name + "]";
  }
  return text + " [\\fIoption\\fR ...]";
}

}  // namespace

const Strings& shells() {
  static const Strings names = {"bash", "zsh", "fish"};
  return names;
}

std::string completion(const CLI::App& app, const std::string& shell) {
  if (shell == "bash") return bash(app);
  if (shell == "zsh") return zsh(app);
  if (shell == "fish") return fish(app);
  throw UsageError("completion: SHELL must be one of " + joined(shells()) + "; got " + shell);
}

std::string manual_page(const CLI::App& app, const std::string& version, const std::string& day) {
  std::string text = ".\\\" by `hopwell man`\n.TH HOPWELL 1 " + day + " \"hopwell " + roff(version) + "\"\n";
  const std::string what = app.get_description();
  text += ".SH NAME\nhopwell \\- " + roff(what.substr(0, what.find(':'))) + "\n.SH SYNOPSIS\n";
  const std::vector<Command> commands = commands_of(app);
  for (const Command& command : commands) text += usage(command) + "\n.br\n";
  text += "\\fBhopwell\\fR [\\fIoption\\fR]\n.SH DESCRIPTION\n" + roff(sentence(what)) + "\n.SH OPTIONS\n";
  text += manual_arguments(read(app, "")) + ".SH COMMANDS\n";
  for (const Command& command : commands)
    text += ".SS " + roff(command.name) + "\n" + roff(sentence(command.meaning)) + "\n" + manual_arguments(command);
  text +=
      ".SH ENVIRONMENT\n.TP\n.B HOPWELL_NUM_THREADS\nHow many threads an operator on the CPU may use.\n"
      ".SH EXIT STATUS\n.TP\n.B 0\nAll held.\n.TP\n.B 1\nA check failed, or something could not be run or written.\n"
      ".TP\n.B 2\nThe command line was wrong.\n";
  return text;
}

}  // namespace hopwell::cli
