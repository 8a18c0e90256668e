#!/usr/bin/env bash
# Builds both images with Docker (`make images`). Reads REGISTRY (a prefix of their names), VARIANT (cpu or cuda), BASE (another base image,
# such as the one that tests/cluster/base_image.sh makes if no registry can be reached) and OFFLINE (1: install only from wheels/, which
# `make wheels` fills), and for VARIANT=cuda FLASHINFER_ZIP (compiled modules of FlashInfer, see flashinfer_wheel.py). Without them,
# engines use Triton's attention.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

registry=${REGISTRY-localhost/} variant=${VARIANT:-cpu}
release=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
engine_tag=$release
if [ "$variant" = cuda ]; then engine_tag=$release-cuda; fi

revision=$(git describe --always --dirty --abbrev=40 --exclude='*' 2>/dev/null || echo unknown)
source=$({ git remote get-url origin 2>/dev/null || true; } | sed -E 's,^git@([^:]+):,https://\1/,; s,^(https?://)[^@/]*@,\1,; s,\.git$,,')
case $source in https://* | http://*) ;; *) source=unknown ;; esac # no path of this machine, and no password
labels=(--build-arg "VERSION=$release" --build-arg "REVISION=$revision" --build-arg "SOURCE=$source")
build() { docker build "${labels[@]}" ${BASE:+--build-arg "BASE=$BASE"} ${OFFLINE:+--build-arg PIP_NO_INDEX=1} "$@" .; }

build --file gateway/Dockerfile --tag "${registry}yardstick-gateway:$release"
rm -f wheels/yardstick_flashinfer_modules-*.whl
if [ "$variant" = cuda ]; then
  if [ -n "${FLASHINFER_ZIP:-}" ]; then
    python3 scripts/flashinfer_wheel.py "$FLASHINFER_ZIP" wheels
  else
    echo "images.sh: without FLASHINFER_ZIP the image has no compiled modules of FlashInfer; engines use Triton's attention." >&2
  fi
fi
build --build-arg "VARIANT=$variant" --file engine/Dockerfile --tag "${registry}yardstick-engine:$engine_tag"
