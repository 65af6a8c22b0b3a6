#!/usr/bin/env bash
# Breaks the code on purpose, one patch at a time, and requires that the tests named by the patch
# turn red. Usage: tests/mutants/run.sh [NAME…]; without names, every patch. With MUTANTS_BUDGET set to
# seconds, no further one is begun after that time: the first one then moves on with every commit, so
# that each gets its turn, and those that were not run are named.
#
# A patch starts with two lines, `mutant: WHAT IT BREAKS` and `test: ARGUMENTS OF cargo test`, and is
# a unified diff against the working tree. The tree itself is not touched: each patch is applied to a
# copy of the tracked files. A patch that does not apply or does not compile is an error, too.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
repo=$(git -C "$here" rev-parse --show-toplevel)
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$repo/target}
# They are built once and run once: quick to build counts.
export CARGO_PROFILE_DEV_DEBUG=false
# Always the same folder, so that a second run finds what the first one built.
scratch=$CARGO_TARGET_DIR/mutants
rm -rf "$scratch"
mkdir -p "$scratch"
trap 'rm -rf "$scratch"' EXIT

if [ $# -eq 0 ]; then
    set -- $(cd "$here" && ls ./*.patch | sed 's|^\./||; s|\.patch$||')
    if [ -n "${MUTANTS_BUDGET:-}" ]; then
        first=$(($(git -C "$repo" rev-list --count HEAD 2>/dev/null || echo 0) % $#))
        set -- "${@:first+1}" "${@:1:first}"
    fi
fi

(cd "$repo" && git ls-files -z | tar --null -T - -cf -) | tar -C "$scratch" -xf -
# A repository of its own: a patch is then applied here, and not to the tree above.
git -C "$scratch" init --quiet
survived=0
skipped=()
for name in "$@"; do
    if [ -n "${MUTANTS_BUDGET:-}" ] && [ "$SECONDS" -gt "$MUTANTS_BUDGET" ]; then
        skipped+=("$name")
        continue
    fi
    patch=$here/$name.patch
    what=$(sed -n '1s/^mutant: //p' "$patch")
    read -r -a test <<<"$(sed -n '2s/^test: //p' "$patch")"
    if [ -z "$what" ] || [ ${#test[@]} -eq 0 ]; then
        echo "$name: the patch lacks its 'mutant:' or 'test:' line" >&2
        exit 2
    fi
    (cd "$scratch" && git apply <(sed 1,3d "$patch")) || {
        echo "$name: the patch does not apply; make it anew against the code as it stands" >&2
        exit 2
    }
    (cd "$scratch" && cargo test --quiet "${test[@]}" --no-run) >"$scratch/.log" 2>&1 || {
        cat "$scratch/.log" >&2
        echo "$name: the mutant does not compile, so it shows nothing" >&2
        exit 2
    }
    if (cd "$scratch" && RUST_BACKTRACE=0 cargo test --quiet "${test[@]}") >"$scratch/.log" 2>&1; then
        echo "SURVIVED $name: $what (cargo test ${test[*]})"
        survived=$((survived + 1))
    else
        red=$(grep -c '^    [a-z_:0-9]*$' "$scratch/.log" || true)
        echo "killed   $name: $what ($red tests red)"
    fi
    (cd "$scratch" && git apply -R <(sed 1,3d "$patch"))
done
if [ ${#skipped[@]} -ne 0 ]; then
    echo "not run, for want of time: ${skipped[*]}"
fi
if [ "$survived" -ne 0 ]; then
    echo "$survived mutants survived: a test is missing" >&2
    exit 1
fi
