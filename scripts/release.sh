#!/usr/bin/env bash
# Collects a release in dist/: the files that wheel.sh wrote, their checksums, and this version's section of CHANGELOG.md.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^project(hopwell VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
cd dist
sha256sum "hopwell-$version"*.whl "hopwell-$version".tar.gz | tee SHA256SUMS
awk -v "section=## $version" 'index($0, "## ") == 1 { inside = index($0, section) == 1 } inside' ../CHANGELOG.md >"CHANGELOG-$version.md"
[ -s "CHANGELOG-$version.md" ] || { echo "release: CHANGELOG.md has no section '## $version'" >&2; exit 1; }
