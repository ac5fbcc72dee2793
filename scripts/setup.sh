#!/usr/bin/env bash
# Installs the tools that build the project; make calls it. Does nothing if everything is installed.
#   setup.sh packages      Debian packages: the named ones, otherwise packages.txt
#   setup.sh environment   the Python environment .venv (requirements.txt); needs the packages
#   setup.sh documents     additional Python packages for `make docs` (requirements-docs.txt)
set -euo pipefail
cd "$(dirname "$0")/.."

missing_packages() {
  local package
  for package in "$@"; do
    dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || printf '%s\n' "$package"
  done
}

packages() {
  local missing as_root=() wanted=("$@")
  [ $# -gt 0 ] || mapfile -t wanted < <(grep -v '^#' packages.txt)
  if ! command -v dpkg-query >/dev/null; then
    echo "setup: this is no Debian system; install the equivalents of: ${wanted[*]}" >&2
    return
  fi
  missing=$(missing_packages "${wanted[@]}" | tr '\n' ' ')
  [ -z "$missing" ] && return
  if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
      as_root=(sudo -n)
    else
      echo "setup: missing Debian packages, and no right to install them. Run:" >&2
      echo "  sudo apt-get update && sudo apt-get install -y $missing" >&2
      exit 1
    fi
  fi
  echo "setup: installing $missing"
  export DEBIAN_FRONTEND=noninteractive
  "${as_root[@]}" apt-get update -qq
  # shellcheck disable=SC2086  # a list of words
  "${as_root[@]}" apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

environment() {
  local wanted stamp=.venv/.installed
  wanted=$(sha256sum requirements.txt | cut -d' ' -f1)
  [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
  echo "setup: making .venv (torch and what else requirements.txt names)"
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: Python 3.11 or later is needed; python3 is $(python3 --version)" >&2
    exit 1
  }
  python3 -m venv .venv
  # Python compiles a module at its first import. Compiling all modules during the installation takes half of pip's time.
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --requirement requirements.txt
  echo "$wanted" >"$stamp"
}

documents() {
  local wanted stamp=.venv/.installed-docs
  wanted=$(sha256sum requirements-docs.txt | cut -d' ' -f1)
  [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
  echo "setup: adding Sphinx to .venv"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --requirement requirements-docs.txt
  echo "$wanted" >"$stamp"
}

case ${1:-} in
  packages | environment | documents) "$@" ;;
  *) echo "usage: $0 packages [NAME…] | environment | documents" >&2 && exit 2 ;;
esac
