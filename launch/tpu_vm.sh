#!/usr/bin/env bash
# Decode on all hosts of a Cloud TPU slice, through gcloud.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: TPU_NAME=NAME ZONE=ZONE [PROJECT=ID] launch/tpu_vm.sh [--dry-run] COMMAND [options]
       QUEUED_RESOURCE=NAME ZONE=ZONE ...   on all slices of a queued resource

Copies the last commit of this checkout to every host of a TPU slice, installs it there (a first run
takes minutes) and runs `spec-jax COMMAND` on all of them in ~/spec-jax. Name the layout of the
slice, for example:

  export TPU_NAME=my-slice ZONE=us-west4-a
  launch/tpu_vm.sh generate "Hello" --target org/name --layout sharding/tpu-v5e-16.toml
  launch/tpu_vm.sh --dry-run ...  print the commands, run nothing
  launch/tpu_vm.sh --help         this text

Process 0 alone keeps compiled programs, so that other hosts compile again in the next run unless
JAX_COMPILATION_CACHE_DIR names a folder that all hosts see, such as a bucket mounted on each.
If HF_TOKEN is set, the hosts read gated models with it; it lies on them only until they start.
To reach several hosts gcloud needs its key in the agent: ssh-add ~/.ssh/google_compute_engine.
Ctrl-C ends the connection but not the work of the hosts; end that with

  gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all --command='pkill -x spec-jax'

or, for a queued resource, with `queued-resources ssh NAME --node=all` in place of `tpu-vm ssh NAME`.
TEXT
}

# shellcheck source=launch/_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

if [ -n "${QUEUED_RESOURCE-}" ]; then
  [ -z "${TPU_NAME-}" ] || die "TPU_NAME and QUEUED_RESOURCE are both set; unset one of them"
  kind=queued-resources name="$QUEUED_RESOURCE" every=(--node=all --worker=all)
else
  need TPU_NAME "the TPU VM"
  kind=tpu-vm name="$TPU_NAME" every=(--worker=all)
fi
need ZONE "its zone"
[ $# -gt 0 ] || die "no command given; --help shows an example"
slice=("${every[@]}" --zone="$ZONE" ${PROJECT:+--project="$PROJECT"})
archive="$ROOT/.cache/spec-jax.tgz"
token="$ROOT/.cache/spec-jax.token" # a file, as everybody on a machine can see arguments

# Runs on each host. Its image may have an older Python; uv installs one that is new enough.
# shellcheck disable=SC2016 # the host expands it
remote='set -e
if [ -f spec-jax.token ]; then
  export HF_TOKEN="$(cat spec-jax.token)"
  rm spec-jax.token
fi
mkdir -p spec-jax
tar -xzf spec-jax.tgz -C spec-jax
cd spec-jax
if ! python3 -c "import sys; sys.exit(sys.version_info < (3, 11))"; then
  python3 -m pip install --quiet --user uv
  python3 -m uv python install --quiet 3.12
  export PYTHON="$(python3 -m uv python find 3.12)"
fi
bash launch/_env.sh tpu
export JAX_COMPILATION_CACHE_DIR='"$(printf %q "${JAX_COMPILATION_CACHE_DIR-}")"'
: "${JAX_COMPILATION_CACHE_DIR:=$HOME/.cache/spec-jax/xla}"
export SPEC_JAX_JOIN_SECONDS='"$(printf %q "${SPEC_JAX_JOIN_SECONDS:-600}")"'
exec .venv/bin/spec-jax'"$(printf ' %q' "$@")"' </dev/null'

run mkdir -p "$ROOT/.cache"
run git -C "$ROOT" archive --format=tar.gz --output="$archive" HEAD
copied=("$archive")
if [ -n "${HF_TOKEN-}" ]; then
  copied+=("$token")
  trap 'rm -f "$token"' EXIT
  [ -n "$DRY_RUN" ] || (umask 077 && rm -f "$token" && printf '%s\n' "$HF_TOKEN" >"$token")
fi
run gcloud compute tpus "$kind" scp "${copied[@]}" "$name:" "${slice[@]}"
rm -f "$token" # what follows takes the place of this script
finish gcloud compute tpus "$kind" ssh "$name" "${slice[@]}" --command="$remote"
