#!/usr/bin/env bash
# Builds the emulation of the CUDA driver and compiler: `build.sh FOLDER`, which LD_LIBRARY_PATH then names.
set -euo pipefail
if [ $# -ne 1 ]; then
    echo "usage: $0 FOLDER" >&2
    exit 2
fi
if ! command -v g++ >/dev/null; then
    echo "the emulation of CUDA needs g++, which is not on this machine" >&2
    exit 1
fi
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")"
flags=(-std=c++17 -O2 -Wall -Wextra -Werror -fPIC -fvisibility=hidden -shared -pthread)
g++ "${flags[@]}" nvrtc.cpp -o "$out/libnvrtc.so.13"
g++ "${flags[@]}" driver.cpp -o "$out/libcuda.so.1" -ldl
