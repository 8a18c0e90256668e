#!/usr/bin/env bash
# Runs the cluster tests on a cluster of its own on this machine: builds the images, starts the cluster that the script CLUSTER can
# start (up, load-image NAME, kubeconfig, down), runs `make test-cluster`, and takes the cluster down again. As root, on Debian.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
CLUSTER=${CLUSTER:?name the script that starts a cluster}
RELEASE=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

missing=()
for package in docker.io:dockerd containerd:containerd debootstrap:debootstrap iptables:iptables iproute2:ip openssl:openssl curl:curl; do
  command -v "${package#*:}" >/dev/null || missing+=("${package%:*}")
done
if [ ${#missing[@]} -gt 0 ]; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
docker info >/dev/null 2>&1 || { setsid nohup dockerd >/var/log/dockerd.log 2>&1 & }
for _ in $(seq 60); do docker info >/dev/null 2>&1 && break; sleep 0.5; done

tests/cluster/base_image.sh
make --no-print-directory wheels images BASE=localhost/yardstick-base:bookworm OFFLINE=1

# Debian's Redis stands in under the name of the image that the chart names.
redis=$(sed -n 's/^  image: \(.*redis.*\)/\1/p' helm/values.yaml)
docker tag localhost/redis:bookworm "$redis"

trap '"$CLUSTER" down' EXIT
"$CLUSTER" up
for image in "localhost/yardstick-gateway:$RELEASE" "localhost/yardstick-engine:$RELEASE" "$redis"; do
  "$CLUSTER" load-image "$image"
done
KUBECONFIG=$("$CLUSTER" kubeconfig) make --no-print-directory test-cluster
