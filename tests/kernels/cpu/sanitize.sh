#!/usr/bin/env bash
# Run the native code under the compiler's sanitizers, for each kind of processor that this one can
# be: addresses and undefined behaviour, then races between threads.
#
#   tests/kernels/cpu/sanitize.sh             (two minutes a kind; needs g++ or clang++ and .venv)
#   tests/kernels/cpu/sanitize.sh --kinds     the kinds, one a line
#   tests/kernels/cpu/sanitize.sh KIND        one kind alone
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
root="$here/../../.."
compiler="${CXX:-c++}"

case "$(uname -m)" in
  x86_64) kinds=(-march=x86-64 -march=x86-64-v3 -march=native)
    grep -qw avx512bw /proc/cpuinfo && kinds+=(-march=x86-64-v4)
    grep -qw avx_vnni /proc/cpuinfo && kinds+=("-march=x86-64-v3 -mavxvnni") ;;
  *) kinds=(-O1) ;;
esac
case "${1-}" in
  "") ;;
  --kinds) printf '%s\n' "${kinds[@]}"; exit ;;
  *) kinds=("$1") ;;
esac

include="$("$root/.venv/bin/python" -c 'import jax; print(jax.ffi.include_dir())')"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

for kind in "${kinds[@]}"; do
  read -ra flags <<<"$kind"
  for sanitizer in address,undefined thread; do
    for name in products attention norm gate warp draw blocks; do
      # Undefined behaviour ends the program too.
      "$compiler" -std=c++17 -O1 -g "${flags[@]}" -Wno-psabi -ffp-contract=fast "-isystem$include" \
        "-fsanitize=$sanitizer" -fno-sanitize-recover=all \
        "$here/${name}_check.cpp" -o "$work/$name" -lpthread
      printf '%s, %s: ' "$kind" "$sanitizer"
      "$work/$name"
    done
  done
done
