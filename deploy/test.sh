#!/usr/bin/env bash
# Installs what is needed, builds, and runs every test.
#   deploy/test.sh           a clang build with AddressSanitizer, UndefinedBehaviorSanitizer and
#                            the fuzz targets; then the gcc build with the whole suite
#   deploy/test.sh --quick   the gcc build and its suite alone
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

quick=0
case "${1-}" in
'') ;;
--quick) quick=1 ;;
*)
    echo "usage: deploy/test.sh [--quick]" >&2
    exit 2
    ;;
esac
jobs=$(nproc)
failed=()

# stage NAME COMMAND...: runs one stage; a failed one is remembered and the next still runs.
stage() {
    local name=$1 started=$SECONDS
    shift
    echo "==== $name"
    if "$@"; then
        echo "==== $name: passed in $((SECONDS - started)) s"
    else
        echo "==== $name: FAILED after $((SECONDS - started)) s"
        failed+=("$name")
    fi
}

build() { # DIRECTORY CMAKE-OPTIONS...
    local dir=$1
    shift
    mkdir -p "$dir"
    cmake -S . -B "$dir" -G Ninja "$@" >"$dir/build.log" 2>&1 </dev/null || {
        tail -n 60 "$dir/build.log"
        return 1
    }
    ninja -C "$dir" -j "$jobs" >"$dir/build.log" 2>&1 </dev/null || {
        grep -v '^\[' "$dir/build.log" | head -n 60
        return 1
    }
}

# AddressSanitizer of clang 14 finds its shadow memory taken where the kernel spreads addresses over
# 32 bits, as Ubuntu 24.04 does; a container may forbid the change and then goes without it.
fixed_addresses() {
    if setarch --addr-no-randomize true 2>/dev/null; then
        setarch --addr-no-randomize "$@"
    else
        "$@"
    fi
}

suite() { # DIRECTORY CTEST-OPTIONS...
    local dir=$1
    shift
    (cd "$dir" && fixed_addresses ctest --output-on-failure -j "$jobs" "$@" </dev/null 2>&1) | tee "$dir/suite.log"
}

# The cases inside the programs of the suite that did not run, for example for want of a GPU.
skipped() {
    local pattern='^\[  SKIPPED \] [a-z_]|^SKIPPED '
    local log=build/Testing/Temporary/LastTest.log
    echo "==== skipped: $(grep -c -E "$pattern" "$log" || true)"
    grep -h -E "$pattern" "$log" | sort | uniq -c || true
}

deploy/deps.sh --tests
if [ "$quick" = 0 ]; then
    stage "build with clang and sanitizers" build build-asan -DCMAKE_C_COMPILER=clang-14 \
        -DTANDEM_SANITIZE=address,undefined -DTANDEM_FUZZ=ON
    stage "tests with sanitizers" suite build-asan -LE release
fi
stage "build with gcc" build build -DCMAKE_C_COMPILER=gcc
stage "all tests" suite build
skipped
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}"
fi
grep -A 20 -E 'tests passed' build/suite.log || echo "the suite did not run"
[ ${#failed[@]} -eq 0 ]
