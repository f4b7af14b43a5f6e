#!/usr/bin/env bash
# Decode a prompt with the demo model on this machine, speculatively and plainly, and compare.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/local.sh [--dry-run] [--pair qwen2.5-coder] ["prompt"] [options of `spec-jax generate`]

Sets up .venv on the first run, then decodes the prompt with SmolLM2-135M-Instruct, with the blocks
of its GGUF file as they are, and drafts by prompt lookup. With --pair qwen2.5-coder it fetches
Qwen2.5-Coder-1.5B-Instruct and the 0.5B that drafts for it, 1.6 GB. Later options win, for example:

  launch/local.sh "Tell me about the sea." --temperature 0.7 --seed 1
  launch/local.sh --pair qwen2.5-coder "Write a function that merges two sorted lists."
  launch/local.sh --prompt-file letter.txt --num-speculative-tokens 6
  launch/local.sh "Write a sonnet." --draft smollm2-135m-instruct-draft --num-speculative-tokens 1
  launch/local.sh --dry-run ...     print the commands, run nothing
  launch/local.sh --help            this text
  .venv/bin/spec-jax generate --help   all options
TEXT
}

# shellcheck source=launch/_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

target=smollm2-135m-instruct
# With 4-bit weights on a CPU this gains more than the draft model (benchmarks/log/2026-methods.md, 2026-11-25).
drafter=(--method prompt_lookup --num-speculative-tokens 2)
if [ "${1-}" = --pair ]; then
  [ "${2-}" = qwen2.5-coder ] || die "--pair is '${2-}'; the pair is qwen2.5-coder"
  shift 2
  target=qwen2.5-coder-1.5b-instruct
  drafter=(--draft "$ROOT/checkpoints/qwen2.5-coder-0.5b-instruct.toml")
fi
prompt=(--prompt "Explain speculative decoding to a child.")
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  prompt=(--prompt "$1")
  shift
fi
# Leave out the default prompt and drafter if the caller names them in another way.
for arg in "$@"; do
  case "$arg" in
    --prompt | --prompt=* | --prompt-file | --prompt-file=*) prompt=() ;;
    --draft | --draft=* | --method | --method=*) drafter=() ;;
  esac
done

ensure_env
finish env "$CACHE" "$VENV/bin/spec-jax" generate \
  --target "$ROOT/checkpoints/$target.toml" --chat --compare \
  ${drafter[@]+"${drafter[@]}"} ${prompt[@]+"${prompt[@]}"} "$@"
