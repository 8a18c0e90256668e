#!/usr/bin/env bash
# Runs the cluster tests on a cluster of its own on this machine: starts the cluster that the script CLUSTER can start (up, load-image
# NAME, kubeconfig, down), builds the images, runs `make test-cluster`, or TARGET=test-cluster-all, and stops what it has started.
# As root, on Debian. Needs .venv for the images only, and waits up to 30 minutes for the file WAIT_FOR, if it is given, before it builds
# them. The exit status is 3, and the last line of stderr the reason, where this machine can run no cluster; images that cannot be built
# and tests that fail have other ones.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
CLUSTER=${CLUSTER:?name the script that starts a cluster}
RELEASE=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
LOG=${LOG:-/var/log/yardstick-cluster.log}
DOCKER_PID=${DOCKER_PID:-/var/run/docker.pid}

# cannot WHAT [FILE]: this machine lacks what a cluster needs; the end of FILE says more.
cannot() {
  if [ -s "${2:-}" ]; then tail -n 5 "$2" >&2; fi
  echo "No cluster can run on this machine: $1." >&2
  exit 3
}

[ "$(id -u)" -eq 0 ] || cannot "it takes root"
: >"$LOG"
missing=()
for package in docker.io:dockerd containerd:containerd debootstrap:debootstrap iptables:iptables iproute2:ip openssl:openssl curl:curl \
  kubernetes-client:kubectl docker-registry:docker-registry; do
  command -v "${package#*:}" >/dev/null || missing+=("${package%:*}")
done
if [ ${#missing[@]} -gt 0 ]; then
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } \
    >"$LOG" 2>&1 || cannot "${missing[*]} cannot be installed" "$LOG"
fi

# A node whose disk is almost full starts no pod. Images, built, pushed and pulled, and what pods write take 10.4 GB.
room=$(df --output=avail --block-size=GB / | tail -1 | tr -dc 0-9)
[ "$room" -ge 12 ] || cannot "$room GB of its disk are free, and it takes 12"

dockerd= cluster=
stop() {
  if [ -n "$cluster" ]; then "$CLUSTER" down || true; fi
  if [ -n "$dockerd" ]; then kill "$dockerd" && wait "$dockerd" || true; fi
}
trap stop EXIT

# An earlier dockerd that is ending answers no more, and until it has ended no other one starts.
still_ending() { ! docker info >/dev/null 2>&1 && kill -0 "$(cat "$DOCKER_PID" 2>/dev/null)" 2>/dev/null; }
for _ in $(seq 60); do
  still_ending || break
  sleep 0.5
done

# It has no say in the firewall: as it is, it would have nothing forwarded but what is its own, and the builds need no network.
if ! docker info >/dev/null 2>&1; then
  setsid dockerd --iptables=false >>"$LOG" 2>&1 &
  dockerd=$!
  for _ in $(seq 60); do
    if docker info >/dev/null 2>&1; then break; fi
    kill -0 "$dockerd" 2>/dev/null || { dockerd=; break; }
    sleep 0.5
  done
  docker info >/dev/null 2>&1 || cannot "dockerd does not start" "$LOG"
fi

cluster=started
timeout 180 "$CLUSTER" up >>"$LOG" 2>&1 || cannot "\`$CLUSTER up\` fails" "$LOG"
KUBECONFIG=$("$CLUSTER" kubeconfig)
export KUBECONFIG

# Debian's Redis stands in under the name of the image that the chart names. It is the first pod too, which shows whether there can be
# any: without overlay file systems or the right to mount, the node looks ready all the same.
tests/cluster/base_image.sh || cannot "the base image cannot be made"
redis=$(sed -n 's/^  image: \(.*redis.*\)/\1/p' helm/values.yaml)
docker tag localhost/redis:bookworm "$redis"
"$CLUSTER" load-image "$redis" >>"$LOG" 2>&1 || cannot "its node takes no image" "$LOG"
for _ in $(seq 60); do
  kubectl get serviceaccount default >/dev/null 2>&1 && break
  sleep 0.5
done
kubectl run first --image="$redis" --image-pull-policy=Never --restart=Never >>"$LOG"
kubectl wait pod/first --for=condition=Ready --timeout=60s >>"$LOG" 2>&1 || {
  kubectl get events --field-selector involvedObject.name=first --output 'jsonpath={range .items[*]}{.message}{"\n"}{end}' >>"$LOG"
  cannot "pods do not start" "$LOG"
}
api=$(kubectl get service kubernetes --output 'jsonpath={.spec.clusterIP}')
curl --silent --insecure --output /dev/null --max-time 5 --retry 10 --retry-delay 1 --retry-all-errors "https://$api/readyz" ||
  cannot "Services cannot be reached; kube-proxy cannot write iptables' rules, perhaps"
kubectl delete pod first --wait=false >>"$LOG"

for _ in $(seq 3600); do
  if [ -e "${WAIT_FOR:-.}" ]; then break; fi
  sleep 0.5
done

make --no-print-directory wheels images BASE=localhost/yardstick-base:bookworm OFFLINE=1
for title in gateway engine build; do # what earlier builds left, and the stages of this one
  docker image prune --force --filter "label=org.opencontainers.image.title=yardstick-$title" >>"$LOG"
done
for image in "localhost/yardstick-gateway:$RELEASE" "localhost/yardstick-engine:$RELEASE"; do
  "$CLUSTER" load-image "$image"
done
# One node that does everything may be late: tests that fail get one more go. Other tests may run meanwhile; each part has a cache of its
# own.
export PYTEST_ADDOPTS="-o cache_dir=.pytest_cache/cluster"
make --no-print-directory "${TARGET:-test-cluster}" || {
  df -h /
  kubectl describe nodes | sed -n '/^Conditions:/,/^Addresses:/p' || true
  .venv/bin/python -m pytest -q -m cluster --last-failed --last-failed-no-failures none tests/cluster
}
