#!/usr/bin/env bash
# Prepares a release, as .github/workflows/release.yml does:
#   release.sh check v0.2.0     compares the tag with every place that holds the version
#   release.sh notes v0.2.0     prints the section of CHANGELOG.md
#   release.sh chart DIRECTORY [REGISTRY]  writes the packaged chart there, the same bytes for the same files; its images are those of
#                               REGISTRY unless values say otherwise; and the list of its parts (SBOM) beside it
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
  local copy
  mkdir -p "$1"
  copy=$(mktemp -d)
  cp -R helm "$copy/yardstick"
  if [ -n "${2:-}" ]; then
    sed -i "s,^  registry: localhost\$,  registry: $2," "$copy/yardstick/values.yaml"
    grep -q "^  registry: $2\$" "$copy/yardstick/values.yaml"
  fi
  tar --create --gzip --file "$1/yardstick-$(version_of version helm/Chart.yaml).tgz" --sort=name --mtime=@0 --owner=0 --group=0 \
    --numeric-owner --mode=go=rX,u+rw --directory "$copy" yardstick
  rm -r "$copy"
  python3 scripts/chart_sbom.py ${2:+"$2"} >"$1/yardstick-$(version_of version helm/Chart.yaml).tgz.cdx.json"
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
  check | notes | chart) "$1" "${2:?}" "${3:-}" ;;
  *) sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
