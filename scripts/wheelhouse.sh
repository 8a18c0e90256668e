#!/usr/bin/env bash
# Collects in wheelhouse/ the wheels that a GPU host without internet needs beside torch and triton (`make wheelhouse`). Reads PYTHON, an
# interpreter with pip; HOST_PYTHON, the host's version of Python (3.12); HOST_HAS, packages that the host has in a version that will do,
# whose wheels are left out; and FLASHINFER_ZIP, compiled modules of FlashInfer to pack as a wheel (see flashinfer_wheel.py), or empty:
# then FlashInfer is used only after its kernel was compiled on the host.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${PYTHON:?}"

host_python=${HOST_PYTHON:-3.12}
# transformers and what it shares with the engine: the host's own versions are kept.
host_may_have=(numpy tokenizers safetensors huggingface-hub packaging requests tqdm click filelock fsspec markupsafe typing-extensions)
not_needed='torch|triton|transformers|mypy|ruff|import-linter|flashinfer-python|apache-tvm-ffi'
# For loops on a CPU, whose place PyTorch takes; for tests that need no GPU, for plots, and for a gateway in Kubernetes.
not_needed+='|numba|axe-playwright-python|helm-python-sdk|jsonschema|kubernetes|kubernetes-validate|matplotlib|openai|opentelemetry-exporter-otlp-proto-http'
not_needed+='|opentelemetry-sdk|peft|playwright|pyarrow|rotel|testcontainers'
# What `import flashinfer` and its attention need beside the extra gpu. Its other dependencies take gigabytes, and one is torch.
flashinfer_needs=(click packaging requests tqdm)

platforms=(--platform manylinux2014_x86_64)
for glibc in 2_35 2_34 2_31 2_28 2_27 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
download() {
  "$PYTHON" -m pip download --quiet --dest wheelhouse --only-binary=:all: --python-version "$host_python" "${platforms[@]}" \
    --constraint constraints.txt "$@"
}

rm -rf wheelhouse
"$PYTHON" scripts/requirements.py engine dev | grep -Ev "^($not_needed)\\b" | download --requirement /dev/stdin "${flashinfer_needs[@]}"
"$PYTHON" scripts/requirements.py gpu | grep -v '^kubernetes' | download --no-deps --requirement /dev/stdin
rm -f wheelhouse/hf_xet-*.whl # makes downloads from the hub faster
for name in ${HOST_HAS:-}; do
  compgen -G "wheelhouse/${name//-/_}-*.whl" >/dev/null || { echo "wheelhouse.sh: HOST_HAS names $name, of which there is no wheel" >&2; exit 1; }
  rm wheelhouse/"${name//-/_}"-*.whl
done
if [ -n "${FLASHINFER_ZIP:-}" ]; then "$PYTHON" scripts/flashinfer_wheel.py "$FLASHINFER_ZIP" wheelhouse; fi
if compgen -G 'wheelhouse/torch-*' || compgen -G 'wheelhouse/nvidia_c*'; then
  echo "wheelhouse.sh: a dependency would replace the host's torch" >&2
  exit 1
fi

# Exact versions, but any of what the host may have.
for wheel in wheelhouse/*.whl; do
  name=${wheel##*/} version=${wheel##*/}
  name=${name%%-*} version=${version#*-}
  case " ${host_may_have[*]//-/_} " in
    *" ${name//-/_} "*) echo "$name" ;;
    *) echo "$name==${version%%-*}" ;;
  esac
done >wheelhouse/requirements.txt
for name in ${HOST_HAS:-}; do echo "$name"; done >>wheelhouse/requirements.txt # pip says at once which of them the host lacks
du -sh --apparent-size wheelhouse
echo "On the GPU host, here: python$host_python -m pip install --no-index --no-deps --find-links wheelhouse --requirement wheelhouse/requirements.txt"
