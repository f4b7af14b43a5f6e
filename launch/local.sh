#!/usr/bin/env bash
# Decode a prompt with the demo model on this machine, speculatively and plainly, and compare.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/local.sh ["prompt"] [options of `spec-jax generate`]

Sets up .venv on the first run, then decodes the prompt with SmolLM2-135M-Instruct and prompt
lookup. Later options win, for example:

  launch/local.sh "Tell me about the sea." --temperature 0.7 --seed 1
  launch/local.sh --prompt-file letter.txt --num-speculative-tokens 8
  launch/local.sh --help            this text
  .venv/bin/spec-jax generate --help   all options
TEXT
}

case "${1-}" in -h | --help)
  usage
  exit
  ;;
esac

prompt=(--prompt "Explain speculative decoding to a child.")
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  prompt=(--prompt "$1")
  shift
fi
# The default prompt must not stand beside one that the caller names in another way.
for arg in "$@"; do
  case "$arg" in --prompt | --prompt=* | --prompt-file | --prompt-file=*) prompt=() ;; esac
done

# shellcheck source=launch/_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
ensure_env

# Compiled programs are kept between runs, so that only the first one waits for the compiler.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/spec-jax/xla}"

exec "$VENV/bin/spec-jax" generate --target "$ROOT/checkpoints/smollm2-135m-instruct.toml" \
  --method prompt_lookup --chat --compare ${prompt[@]+"${prompt[@]}"} "$@"
