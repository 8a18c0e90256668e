# Functions of the scenarios, which source this file. They use kubectl with the cluster that KUBECONFIG names.
#
#   NAMESPACE   of the release and of the load           (the context's own)
#   RELEASE     of helm                                  (yardstick)
#   POOL        of engines, where the release has several (default)
#   IMAGE       name:tag of the gateway's image          (as in loadgen/deploy)
#   RATE        requests a second, 10 items each         (2)
#   DURATION    seconds of load                          (90)
#   SETTLE      seconds of load before the change        (10)
#   OBJECTIVES  a TOML list                              (["failures == 0"])
#   LOGS        folder for the load's log, from which `yardstick load report -` creates the page
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
scenario=$(basename "$0" .sh)
: "${RELEASE:=yardstick}" "${RATE:=2}" "${DURATION:=90}" "${SETTLE:=10}" "${OBJECTIVES:=[\"failures == 0\"]}"
job=job/yardstick-load
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

k() { kubectl ${NAMESPACE:+--namespace "$NAMESPACE"} "$@"; }
say() { printf '%s  %s: %s\n' "$(date +%T)" "$scenario" "$*" >&2; }
fail() { say "FAIL: $*"; exit 1; }
# of COMPONENT: labels of its objects; of engines, those of one pool.
of() {
  printf 'app.kubernetes.io/instance=%s,app.kubernetes.io/component=%s' "$RELEASE" "$1"
  [ "$1" != engine ] || printf ',yardstick/pool=%s' "${POOL:-default}"
}

# name COMPONENT KIND: the release's StatefulSet or Deployment.
name() {
  local found
  found=$(k get "$2" --selector "$(of "$1")" --output name | sed -n 1p)
  [ -n "$found" ] || fail "the release $RELEASE has no $2 with the labels $(of "$1"); set RELEASE, NAMESPACE and POOL"
  printf '%s' "$found"
}

# scale_to COUNT: scales to COUNT engines and waits until all are ready.
scale_to() {
  local engines
  engines=$(name engine statefulset)
  say "scaling $engines to $1"
  k scale "$engines" --replicas "$1" >/dev/null
  k rollout status "$engines" --timeout 300s >/dev/null || fail "$engines did not become ready with $1 pods"
}

# begin_load: starts the Job and returns when requests have been sent for a while.
begin_load() {
  cp "$here"/../deploy/* "$folder"
  if [ -n "${IMAGE:-}" ]; then
    sed -i.old "s|newName:.*|newName: ${IMAGE%:*}|; s|newTag:.*|newTag: \"${IMAGE##*:}\"|" "$folder/kustomization.yaml"
    rm "$folder/kustomization.yaml.old"
  fi
  cat >"$folder/scenario.toml" <<EOF
name = "$scenario"
duration_s = $DURATION
objectives = $OBJECTIVES
[target]
url = "http://$(k get service --selector "$(of gateway)" --output 'jsonpath={.items[0].metadata.name}')"
timeout_s = 60
keep_alive = ${KEEP_ALIVE:-true}
cache = false # each run sends the same requests: from the second on, the result cache would answer, and no engine be asked
[arrivals]
kind = "poisson"
rate = $RATE
[[workloads]]
kind = "score"
EOF
  k delete "$job" --ignore-not-found --wait >/dev/null
  k apply --kustomize "$folder" >/dev/null
  for _ in $(seq 120); do
    if k logs "$job" 2>/dev/null | grep '^sending to' >/dev/null; then
      say "load is on: $RATE requests/s for $DURATION s"
      sleep "$SETTLE"
      return
    fi
    sleep 1
  done
  fail "the load did not begin within two minutes; look at: kubectl describe $job"
}

# state: numbers of the Job's pods that have succeeded/failed; empty while the Job runs or the API is unavailable.
state() { k get "$job" --output 'jsonpath={.status.succeeded}/{.status.failed}' 2>/dev/null | grep -E '[0-9]' || true; }

# acted WHAT: checks that the load was still running when the change of the cluster was complete.
acted() {
  [ -z "$(state)" ] || fail "the load ended before this was complete: $*; raise DURATION"
  say "$*"
}

# end_load: waits for the Job, shows its report, and exits by its verdict.
end_load() {
  local ended=
  for _ in $(seq $((DURATION + 180))); do
    ended=$(state)
    [ -z "$ended" ] || break
    sleep 1
  done
  [ -n "$ended" ] || fail "the load did not end"
  k logs "$job" --tail -1 >"$folder/log"
  [ -z "${LOGS:-}" ] || { mkdir -p "$LOGS" && cp "$folder/log" "$LOGS/$scenario.log"; }
  grep -v '^yardstick-load-records ' "$folder/log"
  case $ended in
    1/) say PASS ;;
    *) fail "an objective was not met" ;;
  esac
}
