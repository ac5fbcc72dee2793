#!/usr/bin/env bash
# Tries a wheel in the root file system of a Debian that has only Python: no compiler, no library of this machine.
# clean_system.sh WHEEL [SUITE]; needs root and debootstrap.
. "$(dirname "$0")/proofs.sh"
wheel=$(realpath "${1:?the wheel}")
case ${wheel##*/} in
  *-cp311-cp311-*) suite=${2:-bookworm} ;;  # with Python 3.11; this wheel needs that version
  *) suite=${2:-trixie} ;;                  # with Python 3.13
esac
name="clean system ($suite)"

[ "$(id -u)" = 0 ] || { skipped "$name" "not root"; exit 0; }
command -v debootstrap >/dev/null || { skipped "$name" "no debootstrap"; exit 0; }
say "debootstrap $suite"
debootstrap --variant=minbase --include=python3,python3-venv "$suite" "$place/root" >"$place/log" 2>&1 ||
  { tail -5 "$place/log" >&2; skipped "$name" "debootstrap could not make it"; exit 0; }
mount -t proc proc "$place/root/proc"  # the loader needs it to find files next to a program
trap 'umount "$place/root/proc"; rm -rf --one-file-system "$place"' EXIT
inside() { env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root chroot "$place/root" "$@"; }

for tool in gcc cc g++ c++ clang nvcc make cmake; do
  ! inside sh -c "command -v $tool" || { echo "the clean system has $tool" >&2; exit 1; }
done
# This machine downloads the packages, because the new system has no network, and pip uses no index.
version=$(inside python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
mkdir "$place/root/wheels"
python3 -m pip download --quiet --disable-pip-version-check --dest "$place/root/wheels" --only-binary :all: \
  --python-version "$version" --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 \
  'numpy>=2.0' 'ml-dtypes>=0.5' 2>"$place/pip.log" || { cat "$place/pip.log" >&2; exit 1; }
cp "$wheel" "$place/root/wheels/"
inside python3 -m venv /venv
began=$(date +%s)
inside /venv/bin/pip install --quiet --no-index --find-links /wheels hopwell
inside /venv/bin/hopwell info
inside /venv/bin/hopwell check --quick
echo "Python $version: from pip install to the end of the check: $(($(date +%s) - began)) s"
inside /venv/bin/python -c "$call"
passed "$name"
