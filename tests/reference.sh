#!/usr/bin/env bash
# Checks that the configuration reference in README.md is what the binary prints; --write renews it.
#   reference.sh [--write] TANDEM-BINARY
set -euo pipefail
write=0
if [ "$1" = --write ]; then
    write=1
    shift
fi
tandem=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
renewed=$(mktemp)
trap 'rm -f "$renewed"' EXIT
{
    sed '/<!-- config reference -->/q' README.md
    "$tandem" config --markdown
    sed -n '/<!-- end of config reference -->/,$p' README.md
} >"$renewed"
if [ "$write" = 1 ]; then
    cat "$renewed" >README.md
elif ! diff -u README.md "$renewed"; then
    echo "README.md: the configuration reference is old; run tests/reference.sh --write build/bin/tandem" >&2
    exit 1
fi
