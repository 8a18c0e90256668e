#!/usr/bin/env bash
# Runs the tests that EXPRESSION (of pytest's -m) selects, with more options of pytest: test.sh EXPRESSION [OPTION ...]. First those that
# are not marked `alone`, in two processes for each core, because tests wait half of their time; then those marked
# `waits`, two at a time; then the others, which measure time, one by one. Fails where one of them fails. Reads
# PYTHON, the interpreter, PART: `parallel`, `waiting` or `alone` runs only that part, and WORKERS, the number of parallel processes.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The tests start some hundred Python processes, each of which would compile the project anew.
unset PYTHONDONTWRITEBYTECODE
part=${PART:-} workers=${WORKERS:-}
unset PART WORKERS # which tests of this script would inherit
case $part in '' | parallel | waiting | alone) ;; *) echo "PART must be parallel, waiting or alone, and is $part." >&2 && exit 2 ;; esac
status=0
if [ "${part:-parallel}" = parallel ]; then
  workers=${workers:-$(($(getconf _NPROCESSORS_ONLN) * 2))}
  OMP_NUM_THREADS=1 "${PYTHON:?}" -m pytest -q -n "$((workers > 8 ? 8 : workers))" --dist worksteal -m "not alone and $1" "${@:2}" || status=$?
fi
if [ "${part:-waiting}" = waiting ]; then
  OMP_NUM_THREADS=1 "${PYTHON:?}" -m pytest -q -n 2 --dist worksteal -m "waits and $1" "${@:2}" || status=$?
fi
if [ "${part:-alone}" = alone ]; then
  "${PYTHON:?}" -m pytest -q -m "alone and not waits and $1" "${@:2}" || status=$?
fi
exit $status
