#!/usr/bin/env bash
# Run the tests, real weights included.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/test.sh [--slow] [pytest arguments]

Sets up .venv on the first run, fetches the demo model's weights and runs the tests. With --slow
also the identity grid on real weights, which takes an hour or more. Tests that compare with
PyTorch need torch: CONTRIBUTING.md.
TEXT
}

case "${1-}" in -h | --help)
  usage
  exit
  ;;
esac

select=()
if [ "${1-}" = --slow ]; then
  select=(-m "not torch and not tpu")
  shift
fi

# shellcheck source=launch/_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
ensure_env
cd "$ROOT"
"$VENV/bin/python" -m spec_jax.checkpoints fetch checkpoints/smollm2-135m-instruct.toml >&2
exec "$VENV/bin/python" -m pytest -n 2 ${select[@]+"${select[@]}"} "$@"
