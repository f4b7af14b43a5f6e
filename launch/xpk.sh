#!/usr/bin/env bash
# Decode on a TPU slice of a GKE cluster, as a workload of xpk.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: CLUSTER=NAME IMAGE=IMAGE [VARIABLE=VALUE ...] launch/xpk.sh [--dry-run] COMMAND [options]

Submits `spec-jax COMMAND` to run on all hosts of a TPU slice. Variables:

  CLUSTER   the cluster, made by `xpk cluster create`
  IMAGE     a container image of this checkout; see the head of launch/gke_jobset.yaml
  WORKLOAD  the workload's name (spec-jax); each name can be used only once
  TPU_TYPE  the kind of slice as xpk names it (v5litepod-16); for another one give its layout too
  NUM_SLICES  how many slices (1); for several give a layout of as many, such as tpu-v5e-2x16
  PROJECT, ZONE  where the cluster is, if not as `gcloud config` says
  JAX_COMPILATION_CACHE_DIR  where compiled programs are kept (/tmp/spec-jax/xla in the container)
  SPEC_JAX_JOIN_SECONDS  how long hosts wait for each other (600)
  HF_TOKEN  reads gated models of the hub; whoever may see the workload in the cluster sees it

For example:

  CLUSTER=my-cluster IMAGE=gcr.io/my-project/spec-jax launch/xpk.sh generate "Hello" --target org/name
  TPU_TYPE=v6e-8 ... launch/xpk.sh generate ... --layout sharding/tpu-v6e-8.toml
  launch/xpk.sh --dry-run ...  print the command, run nothing
  launch/xpk.sh --help         this text
TEXT
}

# shellcheck source=launch/_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

need CLUSTER "the GKE cluster"
need IMAGE "a container image of this checkout"
[ $# -gt 0 ] || die "no command given; --help shows an example"
layout=sharding/tpu-v5e-16.toml # in the image
case "$1" in generate | chat | convert | plan | serve) set -- "$1" --layout "$layout" "${@:2}" ;; esac

environment=("JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-/tmp/spec-jax/xla}"
  "SPEC_JAX_JOIN_SECONDS=${SPEC_JAX_JOIN_SECONDS:-600}")
given=("${environment[@]/#/--env=}")
file="$ROOT/.cache/spec-jax.env" # everybody on a machine can see arguments
if [ -n "${HF_TOKEN-}" ]; then
  given=(--env-file="$file")
  trap 'rm -f "$file"' EXIT
  [ -n "$DRY_RUN" ] || (
    umask 077
    mkdir -p "$ROOT/.cache"
    rm -f "$file"
    printf '%s\n' "${environment[@]}" "HF_TOKEN=$HF_TOKEN" >"$file"
  )
fi

printf -v command ' %q' "$@"
run xpk workload create --cluster="$CLUSTER" --workload="${WORKLOAD:-spec-jax}" \
  --tpu-type="${TPU_TYPE:-v5litepod-16}" --docker-image="$IMAGE" \
  ${NUM_SLICES:+--num-slices="$NUM_SLICES"} \
  ${PROJECT:+--project="$PROJECT"} ${ZONE:+--zone="$ZONE"} \
  "${given[@]}" --command="spec-jax$command"
