#!/usr/bin/env bash
# Run the tests, real weights included.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/test.sh [--dry-run] [--slow] [pytest arguments]

Sets up .venv on the first run, fetches the demo model's weights and runs the tests. With --slow
also the grids of real weights, meshes and lost processes, which take hours. The rest, and tests that
need torch or libtpu: CONTRIBUTING.md.

  launch/test.sh tests/decoding -k verify
  launch/test.sh --dry-run ...  print the commands, run nothing
  launch/test.sh --help         this text
TEXT
}

# shellcheck source=launch/_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

select=()
if [ "${1-}" = --slow ]; then
  select=(-m "not exhaustive and not torch and not tpu and not gemma")
  shift
fi

ensure_env
run cd "$ROOT"
run "$VENV/bin/python" -m spec_jax.checkpoints fetch checkpoints/smollm2-135m-instruct.toml
# The tests of a file share the programs that they compile. Files keep the order of conftest.py.
finish "$VENV/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
  ${select[@]+"${select[@]}"} "$@"
