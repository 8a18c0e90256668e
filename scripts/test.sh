#!/usr/bin/env bash
# Runs the tests that EXPRESSION (of pytest's -m) selects, with more options of pytest: test.sh EXPRESSION [OPTION ...]. First those that
# are not marked `alone`, in two processes for each core, because tests wait part of their time; then those marked `waits`, two at a
# time; then the others, which measure time, one by one. Fails where one of them fails, and says at the end why tests were left out. Reads
# PYTHON, the interpreter, PART: `parallel`, `waiting` or `alone` runs only that part, WORKERS, the number of parallel processes,
# OUTCOMES, a file for the outcomes of the tests, EXCEPT, such a file of another run, whose tests do not run again, and CRASHED, a file to
# make where pytest itself fails.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The tests start some hundred Python processes, each of which would compile the project anew.
unset PYTHONDONTWRITEBYTECODE
part=${PART:-} workers=${WORKERS:-$(($(getconf _NPROCESSORS_ONLN) * 2))} outcomes=${OUTCOMES:-} except=${EXCEPT:-} crashed=${CRASHED:-}
unset PART WORKERS OUTCOMES EXCEPT CRASHED # which tests of this script would inherit
case $part in '' | parallel | waiting | alone) ;; *) echo "PART must be parallel, waiting or alone, and is $part." >&2 && exit 2 ;; esac
if [ -z "$outcomes" ]; then
  outcomes=$(mktemp)
  trap 'rm "$outcomes"' EXIT
fi
status=0
run() { # run EXPRESSION OPTION ...
  "${PYTHON:?}" -m pytest -q -rfE "${@:2}" --outcomes="$outcomes" ${except:+--except="$except"} -m "$1" || {
    local code=$?
    if [ $code != 5 ] || [ -z "$except" ]; then status=$code; fi # 5: all tests of this part have run before
    case $code in 1 | 5) ;; *) [ -z "$crashed" ] || touch "$crashed" ;; esac
  }
}
if [ "${part:-parallel}" = parallel ]; then
  OMP_NUM_THREADS=1 run "not alone and $1" -n "$((workers > 8 ? 8 : workers))" --dist worksteal "${@:2}"
fi
if [ "${part:-waiting}" = waiting ]; then
  OMP_NUM_THREADS=1 run "waits and $1" -n 2 --dist worksteal "${@:2}"
fi
if [ "${part:-alone}" = alone ]; then
  run "alone and not waits and $1" "${@:2}"
fi
sed -n 's/^skipped\t//p' "$outcomes" | sort | uniq -c | sort -rn | sed 's/^ *\([0-9]*\) /Left out (\1 tests): /'
exit $status
