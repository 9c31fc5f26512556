#!/usr/bin/env bash
# Runs end-to-end test files with the Python of .venv:  run.sh BIN-DIRECTORY FILE...
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$here/../../.venv/bin/python
if ! [ -x "$python" ]; then
    echo "e2e: .venv is missing; make it with deploy/deps.sh --tests" >&2
    exit 1
fi
export TANDEM_BIN=$1
shift
exec "$python" -m pytest -q -p no:cacheprovider --rootdir "$here" "${@/#/$here/}" </dev/null
