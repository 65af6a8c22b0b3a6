#!/usr/bin/env bash
# All that is proved and measured on a GPU, part by part, with the seconds of each.
#
# evidence.sh TESTS BENCH RINGCTL [PART...]: binaries of `cargo test --release -p ringfence-cuda --test gpu
# --bench gpu --no-run` and `cargo build --release --bin ringctl`, stripped or not. Run it in the
# repository's root: models/ and the golden vectors are read from there. Parts: machine tests memcheck
# racecheck initcheck bench ring; all of them by default. The exit status is the number of parts that failed.
set -uo pipefail
tests=$1 bench=$2 ringctl=$3
shift 3
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(machine tests memcheck racecheck initcheck bench ring)
failed=0

machine() {
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    nproc
    compute-sanitizer --version | tail -1
    ls -l "$tests" "$bench" | awk '{ print $5, $9 }'
    if grep -q 'layers.0.ffn.gate.tid2eid' "$tests" "$bench"; then
        echo "a binary has the model in it"
        return 1
    fi
}

# racecheck takes long: what it has not seen after ten minutes is not checked, and the part counts as failed.
sanitizer() { timeout 600 compute-sanitizer --error-exitcode 9 --tool "$@" 2>&1; }

ring() {
    local status=0 device
    for device in cpu,cuda:0,cpu cuda:0,cpu,cuda:0 cuda:0; do
        for mode in pipelined plain; do
            echo "demo --device $device --mode $mode"
            "$ringctl" demo --device "$device" --mode "$mode" --max-new 96 | grep -E '^(tokens per|time to|acceptance length|ids equal)'
            status=$((status + PIPESTATUS[0]))
        done
    done
    echo "stage --inventory: lines, bytes held, the first line"
    "$ringctl" stage --range 4:7 --device cuda:0 --inventory >"${TMPDIR:-/tmp}/inventory" || status=1
    sed 's/.*"bytes":\([0-9]*\).*/\1/' "${TMPDIR:-/tmp}/inventory" | awk '{ n += $1 } END { print NR, n }'
    head -1 "${TMPDIR:-/tmp}/inventory"
    echo "a device that is not there"
    "$ringctl" stage --range 0:3 --device cuda:99 && status=1
    return "$status"
}

for part in "${parts[@]}"; do
    echo "== $part"
    begun=$SECONDS
    case $part in
        machine) machine ;;
        tests) "$tests" ;;
        memcheck | initcheck) sanitizer "$part" "$tests" kernels engine_parts ;;
        racecheck) sanitizer "$part" "$tests" kernels ;;
        bench) "$bench" ;;
        bench:*) "$bench" ${part#bench:} ;;
        ring) ring ;;
        *) echo "no such part" && false ;;
    esac
    status=$?
    [ "$status" = 0 ] || failed=$((failed + 1))
    echo "== $part: $((SECONDS - begun)) s, status $status"
done
exit "$failed"
