#!/usr/bin/env bash
# Makes the two images that the cluster tests cannot download where no registry is reachable, from Debian's packages alone:
#   localhost/yardstick-base:bookworm   Debian with Python, the BASE of `make images`
#   localhost/redis:bookworm            the same with redis-server
# Needs root, debootstrap, docker, and a mirror of Debian's packages (MIRROR=).
set -euo pipefail
MIRROR=${MIRROR:-http://deb.debian.org/debian}

if ! docker image inspect localhost/yardstick-base:bookworm >/dev/null 2>&1; then
  root=$(mktemp -d)
  trap 'rm -rf "$root"' EXIT
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" "$MIRROR" >"$root.log" || {
    tail -5 "$root.log" >&2
    exit 1
  }
  rm -rf "$root.log" "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  tar -C "$root" -c . | docker import - localhost/yardstick-base:bookworm >/dev/null
fi

docker image inspect localhost/redis:bookworm >/dev/null 2>&1 || docker build -q --network host -t localhost/redis:bookworm - >/dev/null <<'DOCKERFILE'
FROM localhost/yardstick-base:bookworm
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/*
USER 10001:10001
CMD ["redis-server"]
DOCKERFILE
