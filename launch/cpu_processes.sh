#!/usr/bin/env bash
# Decode in N processes on this machine's CPU that work together like the N hosts of a pod.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/cpu_processes.sh [--dry-run] N COMMAND [options of `spec-jax COMMAND`]

Runs N processes of spec-jax with two emulated devices each, laid out as sharding/cpu-Nx2.toml says.
Process 0 prints the results. What is piped in goes to every process; at a terminal process 0 alone
reads. If one fails, all end and the exit code is not 0. Commands take the demo model unless told
otherwise; later options win, for example:

  launch/cpu_processes.sh 2 generate "Hello"
  launch/cpu_processes.sh 2 generate --prompt-file prompts.jsonl --max-tokens 32
  launch/cpu_processes.sh --dry-run ...  print the commands, run nothing
  launch/cpu_processes.sh --help         this text
TEXT
}

# shellcheck source=launch/_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

layout="$(layout cpu- "${1-}" x2)"
processes=$1
shift
model=(--target "$ROOT/checkpoints/smollm2-135m-instruct.toml" --layout "$layout")
case "${1-}" in
  generate | chat | plan | serve) set -- "$1" "${model[@]}" "${@:2}" ;;
  convert) set -- "$1" --layout "$layout" "${@:2}" ;;
esac

# A port that nobody listens on, below those that the system assigns.
while port=$((20000 + RANDOM % 10000)) && (: >"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do :; done
# If available, setpriv ends the processes even if this script is killed with SIGKILL.
tie=(env)
command -v setpriv >/dev/null && tie=(setpriv --pdeathsig KILL env)
# The address to bind keeps the port closed to other machines.
common=("${tie[@]}" JAX_PLATFORMS=cpu "$CACHE" "JAX_COORDINATOR_ADDRESS=127.0.0.1:$port"
  "JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:$port" "JAX_NUM_PROCESSES=$processes")

ensure_env
if [ -n "$DRY_RUN" ]; then
  for ((i = 1; i < processes; i++)); do
    printf '%s </dev/null >/dev/null &\n' \
      "$(show "${common[@]}" "JAX_PROCESS_ID=$i" "$VENV/bin/spec-jax" "$@")"
  done
  show "${common[@]}" JAX_PROCESS_ID=0 "$VENV/bin/spec-jax" "$@"
  exit
fi

GRACE=20 # seconds in which a process notices that another has died, reports it and ends
work="$(mktemp -d)"
pids=() codes=() copier=""

# SIGKILL for a process that does not heed SIGTERM.
end_all() {
  trap '' INT TERM HUP
  set -- ${pids[@]+"${pids[@]}"} ${copier:+"$copier"}
  kill "$@" 2>/dev/null || true
  for _ in {1..20}; do
    kill -0 "$@" 2>/dev/null || break
    sleep 0.1
  done
  kill -KILL "$@" 2>/dev/null || true
  rm -rf "$work"
}
trap end_all EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

{ : <&0; } 2>/dev/null || exec </dev/null # standard input may be closed
[ -t 0 ] || for ((i = 0; i < processes; i++)); do mkfifo "$work/$i"; done
start() { # PROCESS ARGUMENTS
  if [ -p "$work/$1" ]; then exec <"$work/$1"; elif [ "$1" != 0 ]; then exec </dev/null; fi
  [ "$1" = 0 ] || exec >/dev/null
  exec "${common[@]}" "JAX_PROCESS_ID=$1" "$VENV/bin/spec-jax" "${@:2}"
}
for ((i = 0; i < processes; i++)); do
  start "$i" "$@" <&0 &
  pids+=($!)
done
if [ ! -t 0 ]; then
  "${tie[@]}" tee "$work"/* <&0 >/dev/null &
  copier=$!
fi

# Bash before 4.3 cannot wait for whichever process ends first.
left=$processes deadline=""
while [ "$left" -gt 0 ]; do
  sleep 0.1
  for i in "${!pids[@]}"; do
    if [ -n "${codes[i]-}" ] || kill -0 "${pids[i]}" 2>/dev/null; then continue; fi
    codes[i]=0
    wait "${pids[i]}" 2>/dev/null || codes[i]=$?
    left=$((left - 1))
    [ "${codes[i]}" -le 128 ] || say "process $i was ended by signal $((codes[i] - 128))"
    if [ "$i" = 0 ] || [ "${codes[i]}" != 0 ]; then deadline=${deadline:-$((SECONDS + GRACE))}; fi
  done
  if [ "$left" -gt 0 ] && [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ]; then
    say "ending $left of $processes processes, which went on for $GRACE s without the others"
    exit "$([ "${codes[0]:-0}" = 0 ] && echo 1 || echo "${codes[0]}")"
  fi
done
for code in "${codes[@]}"; do [ "$code" = 0 ] || exit "$code"; done
