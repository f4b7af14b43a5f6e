# shellcheck shell=bash
# Sourced by the scripts beside it, under `set -euo pipefail`. `ensure_env` leaves a working .venv
# in the checkout, whatever was there before: a first run installs, later runs only check and need
# no network. `bash launch/_env.sh [cuda|tpu]` does this and nothing else. Sets ROOT (the checkout),
# VENV and CACHE. The variable PYTHON, if set, names the Python to build on.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
STAMP="$VENV/.installed"       # what the environment was built from; written last
UNFINISHED="$VENV/.installing" # present from before the first package until after the last
EXTRAS="test"                  # small beside JAX, so one environment serves every script
DRY_RUN=""                     # a script that is asked for a dry run sets it

# Compiled programs are kept between runs, so that only the first one waits for the compiler. Not
# exported, as the tests have a separate cache.
# shellcheck disable=SC2034 # the scripts use it
CACHE="JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME-}/.cache}/spec-jax/xla}"

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0 # a user's pip.conf may ask for --user
unset PYTHONHOME

say() { printf 'spec-jax: %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 1
}

# Prints a command as one line that can be pasted into a shell.
show() {
  local line
  printf -v line '%q ' "$@"
  printf '%s\n' "${line% }"
}

# Runs a command; in a dry run only prints it.
run() { if [ -n "$DRY_RUN" ]; then show "$@"; else "$@"; fi; }

# The same for the last command, which takes the script's place.
finish() { if [ -n "$DRY_RUN" ]; then show "$@"; else exec "$@"; fi; }

need() { # VARIABLE WHAT-IT-IS
  [ -n "${!1-}" ] || die "the variable $1 is not set; it names $2 (--help shows an example)"
}

# Prints the path of sharding/PREFIX-N-SUFFIX.toml, without the dashes.
layout() { # PREFIX N [SUFFIX]
  local file n known=""
  for file in "$ROOT/sharding/$1"*"${3-}.toml"; do
    n="${file#"$ROOT/sharding/$1"}"
    n="${n%"${3-}.toml"}"
    case "$n" in '' | *[!0-9]*) continue ;; esac
    known="$known $n"
    if [ "$n" = "$2" ]; then
      printf '%s\n' "$file"
      return
    fi
  done
  die "no layout for N = '$2': there is sharding/$1N${3-}.toml for N =$known"
}

# A candidate must run and have a supported version: a version manager's shims can exist and fail.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
    if "$candidate" -I -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
      2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "no Python 3.11, 3.12 or 3.13 found. On Debian 12 or later: apt-get install python3 python3-venv"
}

# Prints "HASH VERSION PLACE". Another version or place means that the environment's scripts point
# elsewhere and it must be rebuilt; another hash, that it lacks packages. Fails if it cannot run.
fingerprint() {
  "$VENV/bin/python" -I - "$ROOT" "$EXTRAS" 2>/dev/null <<'PY'
import hashlib, pathlib, sys

root, extras = pathlib.Path(sys.argv[1]), sys.argv[2]
if pathlib.Path(sys.prefix).resolve() != (root / ".venv").resolve():
    sys.exit("this Python is not the environment's own")
built_from = [(root / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
digest = hashlib.sha256(b"\0".join([*built_from, extras.encode()])).hexdigest()
print(digest, "%d.%d" % sys.version_info[:2], sys.prefix)
PY
}

make_venv() {
  local python version
  python="$(find_python)" || exit 1
  version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  say "making .venv with Python $version"
  "$python" -m venv "$VENV" >/dev/null 2>&1 && return
  # Debian keeps ensurepip in a separate package, so pip has to come another way.
  rm -rf "$VENV"
  "$python" -m venv --without-pip "$VENV" &&
    "$python" -m pip --python "$VENV/bin/python" install --quiet pip 2>/dev/null && return
  rm -rf "$VENV"
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing python$version-venv, which Debian's Python comes without"
    { apt-get -qq update && apt-get -qq install -y "python$version-venv"; } >&2 &&
      "$python" -m venv "$VENV" >/dev/null && return
    rm -rf "$VENV"
  fi
  die "this Python has neither ensurepip nor pip. On Debian: apt-get install python$version-venv"
}

# Shows the large downloads, which take the time, and keeps everything else in a log.
install() {
  local line log="$VENV/install.log"
  : >"$log"
  if ! (cd "$ROOT" && "$VENV/bin/python" -m pip install --progress-bar off "$@" 2>&1) |
    while IFS= read -r line; do
      printf '%s\n' "$line" >>"$log"
      if [[ $line =~ Downloading\ ([^-]+)-([^-]+)-.*\(([0-9.]+\ MB)\) ]]; then
        say "  ${BASH_REMATCH[1]} ${BASH_REMATCH[2]}, ${BASH_REMATCH[3]}"
      fi
    done; then
    tail -n 15 "$log" >&2
    die "the installation failed (it needs a network); all of its output is in $log"
  fi
}

add_extra() { case ",$EXTRAS," in *",$1,"*) ;; *) EXTRAS="$EXTRAS,$1" ;; esac; }

# Looks for the same compilers as spec_jax/kernels/native.py.
has_compiler() {
  local name
  for name in ${CXX:+"$CXX"} c++ g++ clang++; do
    command -v "$name" >/dev/null && return
  done
  return 1
}

# Succeeds if there is a virtual environment that packages can be added to.
usable() { # FINGERPRINT-NOW FINGERPRINT-BUILT
  [ -n "$1" ] && [ ! -e "$UNFINISHED" ] && { [ -z "$2" ] || [ "${1#* }" = "${2#* }" ]; } &&
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1
}

ensure_env() { # [EXTRA]
  local now built
  if [ -n "$DRY_RUN" ]; then
    show bash "$ROOT/launch/_env.sh" ${1+"$1"}
    return
  fi
  # Two scripts started together must not install into one directory at once.
  if command -v flock >/dev/null; then
    exec 9>"$ROOT/.venv.lock"
    flock --nonblock 9 || { say "waiting for another script to set up .venv" && flock 9; }
  fi
  # Extras are only added: otherwise scripts that need different ones would reinstall in turns.
  [ ! -f "$VENV/.extras" ] || EXTRAS="$(cat "$VENV/.extras")"
  add_extra "${1-test}"
  # Native code for CPUs is compiled here, with zig from PyPI where there is no other compiler.
  [ -n "${1-}" ] || has_compiler || add_extra compiler
  now="$(fingerprint)" || now=""
  built="$(cat "$STAMP" 2>/dev/null)" || built=""
  if [ -z "$now" ] || [ "$now" != "$built" ] || [ ! -x "$VENV/bin/spec-jax" ]; then
    if [ -e "$VENV" ] || [ -L "$VENV" ]; then
      if ! usable "$now" "$built"; then
        say ".venv was moved, broken or left half-made: starting over"
        rm -rf "$VENV"
      fi
    fi
    [ -e "$VENV" ] || make_venv
    : >"$UNFINISHED"
    rm -f "$STAMP"
    say "installing spec-jax and what it needs (once; a minute or two)"
    install -c constraints.txt -e ".[$EXTRAS]"
    printf '%s\n' "$EXTRAS" >"$VENV/.extras"
    fingerprint >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    rm -f "$UNFINISHED"
  fi
  exec 9>&- # or the lock would be held for as long as the command that follows runs
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  ensure_env "$@"
else # what every script takes as its first argument; it has defined `usage` by now
  case "${1-}" in
    -h | --help)
      usage
      exit
      ;;
    --dry-run)
      DRY_RUN=yes
      shift
      ;;
  esac
fi
