#!/usr/bin/env bash
# Lints, type-checks and tests. Arguments go to pytest, for example
#   ./test.sh tests/verify -k block
# With --all, also the tests that are marked as slow, as CI does; with --nightly,
# also those that are marked as nightly.
# pytest runs last and whatever came before it; the exit status is that of the
# first step that failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=.ci/environment.sh
source .ci/environment.sh

environment test
# Ahead of a TPU or GPU that may be there.
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
# Most of the time goes to compiling what an earlier run compiled too.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.3
# No line numbers in what is compiled: nobody reads them, and they take a tenth.
export JAX_TRACEBACK_IN_LOCATIONS_LIMIT="${JAX_TRACEBACK_IN_LOCATIONS_LIMIT:-0}"
# Left out of that: what makes the executables fast, less than half remains.
unoptimised=(
  --xla_backend_optimization_level=0
  --xla_llvm_disable_expensive_passes=true
  --xla_cpu_use_fusion_emitters=false
  --xla_cpu_parallel_codegen_split_count=1
)
export XLA_FLAGS="${XLA_FLAGS-${unoptimised[*]}}"

status=0
failed=''

step() {
  local name="$1" code=0
  shift
  say "$name"
  "$PYTHON_IN_VENV" -m "$@" || code=$?
  if ((code)); then
    failed+="${failed:+, }$name"
    if ((!status)); then status=$code; fi
  fi
}

step 'lint (ruff check)' ruff check --output-format=concise .
step 'format (ruff format --check)' ruff format --check \
  --output-format=concise .
step 'types (mypy)' mypy
if ((status)); then
  say "FAILED: $failed; the tests run, and the exit status will be $status"
fi
# Two processes, each of which takes whole files: what the tests of a file share
# is compiled once.
step 'tests (pytest)' pytest -n 2 --dist loadscope --no-loadscope-reorder "$@"
exit "$status"
