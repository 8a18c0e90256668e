#!/usr/bin/env bash
# Prepares a release, as .github/workflows/release.yml does:
#   release.sh check v0.2.0     compares the tag with every place that holds the version
#   release.sh notes v0.2.0     prints the section of CHANGELOG.md
#   release.sh chart DIRECTORY [REGISTRY [PART=DIGEST ...]]  writes the packaged chart there, the same bytes for the same files; its images are
#                               those of REGISTRY with these digests (parts: gateway, engine-cpu, engine-cuda) unless values say otherwise;
#                               and the list of its parts (SBOM) beside it. CHART is another folder with a chart
#   release.sh publish REGISTRY [DIRECTORY]  pushes the images REGISTRY/yardstick-* that images.sh has built, for VARIANTS="cpu" (or "cpu cuda"),
#                               and the chart with their digests to oci://REGISTRY/charts. HELM is the command of Helm; PLAIN_HTTP=1 is for a
#                               registry without TLS; DIRECTORY (dist) keeps the chart
#   release.sh modules [URL] [SHA256]  puts FlashInfer's compiled modules (see flashinfer_wheel.py) into wheels/, for the CUDA image
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version_of() { sed -n "s/^$1 *[=:] *\"\\{0,1\\}\\([^\"]*\\)\"\\{0,1\\}\$/\\1/p" "$2" | head -n 1; }

check() {
  local expected=${1#v} wrong=0 place found
  for place in version:pyproject.toml version:helm/Chart.yaml appVersion:helm/Chart.yaml; do
    found=$(version_of "${place%%:*}" "${place#*:}")
    if [ "$found" != "$expected" ]; then
      echo "release: ${place#*:} has ${place%%:*} $found, and the tag is $1" >&2
      wrong=1
    fi
  done
  if [ -z "$(notes "$1")" ]; then
    echo "release: CHANGELOG.md has no section ## $expected" >&2
    wrong=1
  fi
  return "$wrong"
}

notes() { awk -v head="## ${1#v}" '/^## /{inside = $0 == head; next} inside' CHANGELOG.md; }

chart() {
  local folder=$1 registry=${2:-} copy values part digests=''
  shift $(($# < 2 ? $# : 2))
  for part in "$@"; do
    [[ $part =~ ^(gateway|engine-cpu|engine-cuda)=sha256:[0-9a-f]{64}$ ]] || { echo "release: $part is no PART=DIGEST" >&2; return 2; }
    digests+="${digests:+, }${part/=/: }"
  done
  mkdir -p "$folder"
  copy=$(mktemp -d)
  cp -R "${CHART:-helm}" "$copy/yardstick"
  values=$copy/yardstick/values.yaml
  if [ -n "$registry" ]; then
    sed -i "s|^  registry: localhost\$|  registry: $registry|; s|^  digests: {}\$|  digests: {$digests}|" "$values"
    grep -q "^  registry: $registry\$" "$values"
    grep -q "^  digests: {$digests}\$" "$values"
  fi
  tar --create --gzip --file "$folder/yardstick-$(version_of version helm/Chart.yaml).tgz" --sort=name --mtime=@0 --owner=0 --group=0 \
    --numeric-owner --mode=go=rX,u+rw --directory "$copy" yardstick
  rm -r "$copy"
  python3 scripts/chart_sbom.py ${registry:+"$registry"} >"$folder/yardstick-$(version_of version helm/Chart.yaml).tgz.cdx.json"
}

push() { # push IMAGE: its digest in the registry
  docker push "$1" >&2
  docker image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$1" | sed -n "s,^${1%:*}@,,p" | grep -m 1 .
}

publish() {
  local registry=${1%/} folder=${2:-dist} release variant digests=()
  release=$(version_of version helm/Chart.yaml)
  digests+=("gateway=$(push "$registry/yardstick-gateway:$release")")
  for variant in ${VARIANTS:-cpu}; do
    digests+=("engine-$variant=$(push "$registry/yardstick-engine:$release$([ "$variant" = cpu ] || echo "-$variant")")")
  done
  chart "$folder" "$registry" "${digests[@]}"
  ${HELM:-helm} push "$folder/yardstick-$release.tgz" "oci://$registry/charts" ${PLAIN_HTTP:+--plain-http}
  echo "Install it with: helm install yardstick oci://$registry/charts/yardstick --version $release --namespace yardstick --create-namespace"
}

modules() {
  if [ -z "$1" ]; then
    echo "release: FLASHINFER_ZIP_URL is not set; engines of the CUDA image use Triton's attention" >&2
    return
  fi
  local folder
  folder=$(mktemp -d)
  curl --fail --silent --show-error --location --output "$folder/${1##*/}" "$1"
  echo "${2:?FLASHINFER_ZIP_SHA256 is not set}  $folder/${1##*/}" | sha256sum --check --quiet >&2
  python3 scripts/flashinfer_wheel.py "$folder/${1##*/}" wheels
  rm -r "$folder"
}

case "${1:-}" in
  modules) modules "${2:-}" "${3:-}" ;;
  check | notes | chart | publish) "$1" "${2:?}" "${@:3}" ;;
  *) sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
