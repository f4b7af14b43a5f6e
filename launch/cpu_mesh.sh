#!/usr/bin/env bash
# Decode on N emulated devices, in one process on this machine's CPU.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/cpu_mesh.sh [--dry-run] N COMMAND [options of `spec-jax COMMAND`]

Runs spec-jax on N emulated devices, laid out as sharding/cpu-N.toml says: the program that N chips
would run, to see that it is right, never that it is fast. Commands take the demo model unless told
otherwise; later options win, for example:

  launch/cpu_mesh.sh 8 generate "Hello"
  launch/cpu_mesh.sh 4 generate "Hello" --target DIRECTORY --max-tokens 32
  launch/cpu_mesh.sh --dry-run ...  print the commands, run nothing
  launch/cpu_mesh.sh --help         this text
TEXT
}

# shellcheck source=launch/_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

layout="$(layout cpu- "${1-}")"
shift
model=(--target "$ROOT/checkpoints/smollm2-135m-instruct.toml" --layout "$layout")
case "${1-}" in
  generate | chat | plan | serve) set -- "$1" "${model[@]}" "${@:2}" ;;
  convert) set -- "$1" --layout "$layout" "${@:2}" ;;
esac

ensure_env
finish env JAX_PLATFORMS=cpu "$CACHE" "$VENV/bin/spec-jax" "$@"
