#!/usr/bin/env bash
# Decode on the GPUs of this machine, in one process.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/gpu_local.sh [--dry-run] COMMAND [options of `spec-jax COMMAND`]

Runs spec-jax on all GPUs of this machine, laid out as sharding/gpu-N.toml says for their number N.
CUDA_VISIBLE_DEVICES chooses fewer. The first run downloads CUDA 12, which is large; the machine has
to bring the driver alone, version 525 or newer. Later options win, for example:

  launch/gpu_local.sh generate "Hello" --target org/name
  CUDA_VISIBLE_DEVICES=0,1 launch/gpu_local.sh generate "Hello" --target org/name
  launch/gpu_local.sh --dry-run ...  print the commands, run nothing
  launch/gpu_local.sh --help         this text
TEXT
}

# shellcheck source=launch/_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
  IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
  count=${#gpus[@]}
  found="CUDA_VISIBLE_DEVICES is '$CUDA_VISIBLE_DEVICES'"
else
  count="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')" || count=0
  found="nvidia-smi -L lists none"
fi
if [ "$count" = 0 ] && [ -n "$DRY_RUN" ]; then
  say "no GPU: $found; this is what one would run"
  count=1
fi
[ "$count" -gt 0 ] || die "no GPU: $found; launch/local.sh runs on the CPU"
layout="$(layout gpu- "$count")"
case "${1-}" in generate | chat | convert | plan | serve) set -- "$1" --layout "$layout" "${@:2}" ;; esac

ensure_env cuda
# Without JAX_PLATFORMS a GPU that cannot be used would be replaced by the CPU.
finish env JAX_PLATFORMS=cuda,cpu "$CACHE" "$VENV/bin/spec-jax" "$@"
