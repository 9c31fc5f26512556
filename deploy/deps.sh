#!/usr/bin/env bash
# Installs what Tandem needs on Debian 12 or Ubuntu 24.04; does nothing when all is there.
#   deploy/deps.sh           to build and run
#   deploy/deps.sh --tests   and to test: clang, clang-format, and .venv with openai and pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
    echo "deps: $*" >&2
    exit 1
}

packages=(gcc libc6-dev cmake ninja-build pkg-config libuv1-dev libcjson-dev libucx-dev
          libpcre2-dev libutf8proc-dev node-llhttp libcmocka-dev)
tests=0
case "${1-}" in
'') ;;
--tests)
    tests=1
    packages+=(clang-14 libclang-rt-14-dev clang-format-14 python3 python3-venv ca-certificates)
    ;;
*)
    echo "usage: deploy/deps.sh [--tests]" >&2
    exit 2
    ;;
esac

is_installed() {
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

install_packages() {
    local missing=() package log as_root=()
    for package in "${packages[@]}"; do
        is_installed "$package" || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null ||
        die "no apt-get here: install the equivalents of ${missing[*]} by hand"
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null ||
            die "needs root to install ${missing[*]}; run it as root, or install sudo"
        as_root=(sudo)
    fi
    echo "deps: installing ${missing[*]}"
    log=$(mktemp)
    local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300)
    "${apt[@]}" update >"$log" 2>&1 </dev/null || echo "deps: apt-get update: $(tail -n 1 "$log")" >&2
    for package in "${missing[@]}"; do
        [[ "$(LC_ALL=C apt-cache policy "$package")" == *"Candidate: "[^\(]* ]] ||
            die "package $package is not in this system's repositories (Debian 12 and Ubuntu 24.04 with universe have it)"
    done
    if ! "${apt[@]}" install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1 </dev/null; then
        tail -n 20 "$log" >&2
        die "apt-get could not install ${missing[*]}"
    fi
    rm -f "$log"
}

# The environment is made anew when the requirements or the system's Python change.
make_venv() {
    local stamp
    stamp="$(sha256sum tests/requirements.txt) $(python3 -V)"
    [ "$(cat .venv/stamp 2>/dev/null)" != "$stamp" ] || return 0
    echo "deps: creating .venv ($(grep -v '^#' tests/requirements.txt | tr '\n' ' '))"
    rm -rf .venv
    python3 -m venv .venv </dev/null || die "python3 -m venv failed; is python3-venv installed?"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        -r tests/requirements.txt </dev/null ||
        die "pip could not install tests/requirements.txt into .venv"
    echo "$stamp" >.venv/stamp
}

install_packages
if [ "$tests" = 1 ]; then
    make_venv
fi
