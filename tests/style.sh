#!/usr/bin/env bash
# Checks the layout of every C file against .clang-format.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
format=$(command -v clang-format-14) || {
    echo "style: clang-format-14 is missing; install it with deploy/deps.sh --tests" >&2
    exit 1
}
find engine kernels router attn_node ffn_node tests -name '*.[ch]' -print0 |
    xargs -0 "$format" --dry-run -Werror
