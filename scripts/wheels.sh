#!/usr/bin/env bash
# Collects in wheels/ the wheels that the images install if a build has no index (`make wheels`, then `make images OFFLINE=1`).
# Reads PYTHON (an interpreter with pip), TORCH (the requirement of torch), TORCH_INDEX (an index in addition to PyPI, or empty) and IMAGE_PYTHON
# (the version of the images' Python), and VARIANT: cuda, with an empty TORCH_INDEX, collects those for GPUs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${PYTHON:?}" "${TORCH:?}" "${IMAGE_PYTHON:?}"

# redis needs async-timeout on Python before 3.11.3; pip evaluates that marker for the running interpreter, not for the images'.
also=(async-timeout)

download() { "$PYTHON" -m pip download --quiet --dest wheels --only-binary=:all: --python-version "$IMAGE_PYTHON" "$@"; }

rm -rf wheels
download --no-deps --retries 1 ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$TORCH"
"$PYTHON" scripts/requirements.py engine tracing | download --find-links wheels --constraint constraints.txt --requirement /dev/stdin "${also[@]}"
if [ "${VARIANT:-cpu}" = cuda ]; then
  "$PYTHON" scripts/requirements.py gpu | download --no-deps --find-links wheels --constraint constraints.txt --requirement /dev/stdin
fi

# Those of more than 30 MB are for engines only, and a build of the gateway does not copy this folder.
mkdir wheels/engine
find wheels -maxdepth 1 -name '*.whl' -size +30M -exec mv --target-directory wheels/engine {} +
