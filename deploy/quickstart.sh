#!/usr/bin/env bash
# Installs what is needed, builds, serves the demo model and asks it one question.
#   deploy/quickstart.sh          serves on until Ctrl-C
#   deploy/quickstart.sh --exit   stops after the answer; the exit status is that of the whole
# Other arguments go to `tandem serve`, for example --set router.port=9000.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

question="What is 12 plus 30?"
exit_after=0
arguments=()
for argument in "$@"; do
    case $argument in
    --exit) exit_after=1 ;;
    -h | --help)
        sed -n '2,5s/^# *//p' "$0"
        exit 0
        ;;
    *) arguments+=("$argument") ;;
    esac
done

deploy/deps.sh
echo "quickstart: building"
mkdir -p build
if ! { cmake -S . -B build -G Ninja -DCMAKE_C_COMPILER=gcc &&
    ninja -C build tandem tandem-attn tandem-ffn; } >build/quickstart.log 2>&1 </dev/null; then
    tail -n 40 build/quickstart.log >&2
    echo "quickstart: the build failed; all of it is in build/quickstart.log" >&2
    exit 1
fi

output=$(mktemp)
# Its own session, so that Ctrl-C reaches this script alone, which then lets the bundle drain.
setsid build/bin/tandem serve config/demo.json "${arguments[@]}" >"$output" </dev/null &
server=$!

stop() { # ends the bundle; its exit status
    local status=0
    trap '' INT TERM HUP
    kill -TERM "$server" 2>/dev/null || true
    wait "$server" || status=$?
    rm -f "$output"
    return "$status"
}
trap 'stop; exit' INT TERM HUP

url=
while [ -z "$url" ]; do
    if ! kill -0 "$server" 2>/dev/null; then
        status=0
        wait "$server" || status=$?
        rm -f "$output"
        echo "quickstart: the bundle ended before it was ready (status $status); its reason is above" >&2
        exit 1
    fi
    url=$(sed -n 's/^tandem: ready at //p' "$output")
    sleep 0.1
done

echo
echo "> $question"
status=0
build/bin/tandem chat --url "$url" "$question" </dev/null || status=$?

if [ "$exit_after" = 1 ] || [ "$status" != 0 ]; then
    stop || status=$?
    exit "$status"
fi
cat <<MORE

Serving at $url. More questions, from another terminal:

  build/bin/tandem chat --url $url "Sort 31, 7 and 19."

  curl $url/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "What is 40 minus 13?"}]}'

Ctrl-C stops.
MORE
status=0
wait "$server" || status=$?
rm -f "$output"
exit "$status"
