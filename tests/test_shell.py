"""The Makefile, the pins, the scripts, and the workflow of a release."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helm.chart import helm
from tests.parts import need
from tests.test_wheelhouse import zipped

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]


def make(*arguments: str, directory: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run make with an environment that has nothing of the make that may have started the tests."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "PYTHON"}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=directory, env=clean | environment, capture_output=True, text=True, timeout=60, check=False)


def serve_line(*arguments: str, **environment: str) -> str:
    (line,) = [line for line in make("-n", "serve", *arguments, **environment).stdout.splitlines() if "yardstick serve" in line]
    return " ".join(line.split())


def test_help_lists_every_target() -> None:
    listed = set(re.findall(r"^  make ([a-z-]+) ", make("help").stdout, flags=re.M))
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.M)
    assert phony
    assert listed == set(phony[1].split())


def test_serve_passes_on_what_was_given() -> None:
    assert serve_line() == ".venv/bin/yardstick serve"
    assert serve_line("PORT=9000", "MODEL=Qwen/Qwen3-0.6B") == ".venv/bin/yardstick serve --model Qwen/Qwen3-0.6B --port 9000"
    assert serve_line("FLAGS=--max-total-tokens 5") == ".venv/bin/yardstick serve --max-total-tokens 5"
    assert serve_line(HOST="laptop", PORT="1") == ".venv/bin/yardstick serve", "a shell's own HOST is no option"


@pytest.mark.parametrize(("version", "found"), [("(3, 10)", "3.10.4"), (None, "missing")])
def test_a_python_too_old_is_one_line(tmp_path: Path, version: str | None, found: str) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    if version is not None:
        python.write_text(f'#!/bin/sh\ncase "$2" in *print*) echo {found};; *) exit 1;; esac\n')
        python.chmod(0o755)
    done = make("setup", f"PYTHON={python}", directory=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert f"needs Python 3.11 or newer, and {python} is {found}" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_constraints_pin_every_dependency_within_its_range() -> None:
    extras = PROJECT["optional-dependencies"].values()
    direct = [Requirement(line) for line in [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    torch = [requirement for requirement in direct if requirement.name == "torch"]
    assert [str(requirement.specifier)[:2] for requirement in torch] == ["=="], (
        "its build depends on the machine, so it has no constraint"
    )
    assert "torch" not in pinned
    for requirement in direct:
        if requirement.name != "torch":
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement
            assert "<" in str(requirement.specifier), f"{requirement} has no upper bound"
    assert all(re.fullmatch(r"[\w.]+", version) for version in pinned.values())
    assert "+" not in (ROOT / "constraints.txt").read_text(), "a local version cannot be installed elsewhere"


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


MAY_WRITE = {"release": {"contents", "packages", "id-token", "attestations"}}
"""Rights of single jobs of a workflow. No workflow has rights to write as a whole."""


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_use_the_oldest_python_and_may_change_nothing(workflow: Path) -> None:
    parsed = yaml.safe_load(workflow.read_text())
    assert parsed["permissions"] == {"contents": "read"}
    for job in parsed["jobs"].values():
        writes = {right for right, value in job.get("permissions", {}).items() if value == "write"}
        assert writes <= MAY_WRITE.get(workflow.stem, set())
        assert job["timeout-minutes"] <= 120
        for python in [step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", "")]:
            assert f">={python}" == PROJECT["requires-python"]


def release(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPTS / "release.sh", *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_a_release_has_one_version_everywhere(tmp_path: Path) -> None:
    assert release("check", f"v{VERSION}").returncode == 0
    wrong = release("check", "v99.0.0")
    assert wrong.returncode == 1
    for place in ("pyproject.toml has version", "Chart.yaml has version", "Chart.yaml has appVersion", "## 99.0.0"):
        assert place in wrong.stderr
    assert release("notes", f"v{VERSION}").stdout.startswith("\n### ")
    packages = []
    for name in ("one", "two"):
        assert release("chart", str(tmp_path / name)).returncode == 0
        packages.append(tmp_path / name / f"yardstick-{VERSION}.tgz")
    assert packages[0].read_bytes() == packages[1].read_bytes()
    packed = helm().Chart.load(packages[0]).render({}, name="yardstick", namespace="apps", is_install=True)
    direct = helm().Chart.load(ROOT / "helm").render({}, name="yardstick", namespace="apps", is_install=True)
    assert packed.keys() == direct.keys()
    gateway = next(path for path in packed if path.endswith("gateway.yaml"))
    assert packed[gateway] == direct[gateway]
    parts = json.loads(packages[0].with_name(f"{packages[0].name}.cdx.json").read_text())
    images = {part["bom-ref"] for part in parts["components"]}
    gpu = {"engine": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}
    rendered = [direct, helm().Chart.load(ROOT / "helm").render(gpu, name="yardstick", namespace="apps", is_install=True)]
    assert images == {image for found in rendered for text in found.values() for image in re.findall(r"image: (\S+:\S+)", text)}
    (redis,) = [part for part in parts["components"] if "redis" in part["name"]]
    tag = redis["version"]
    assert redis["purl"] == f"pkg:oci/redis?repository_url=docker.io%2Flibrary%2Fredis&tag={tag}"


PUSHED = """\
echo "$*" >>"$LOG"
image=${@: -1}
[ "$1 $2" != "image inspect" ] || echo "${image%:*}@sha256:$(printf %s "$image" | sha256sum | cut -c -64)"
"""
"""Stands for docker: logs its arguments; the digest of an image is the hash of its name."""


def test_make_release_pushes_what_it_built_and_a_chart_with_its_digests(machine: Path) -> None:
    """tests/cluster/chart/test_release.py pushes to a real registry."""
    root = machine.parent
    for name in ("scripts", "helm"):
        shutil.copytree(ROOT / name, root / name)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    pretend(machine, "docker", PUSHED)
    pretend(machine, "helm", 'echo "helm $*" >>"$LOG"')
    environment = {"PATH": f"{machine}:{os.environ['PATH']}", "LOG": str(root / "log")}
    assert "name a registry" in make("release", directory=root, **environment).stderr
    registry = "registry.example.com/ai"
    done = make("release", f"REGISTRY={registry}", "VARIANTS=cpu cuda", directory=root, **environment)
    assert done.returncode == 0, done.stderr
    images = [f"{registry}/yardstick-{part}" for part in (f"gateway:{VERSION}", f"engine:{VERSION}", f"engine:{VERSION}-cuda")]
    lines = (root / "log").read_text().splitlines()
    built = {line.partition("--tag ")[2].split()[0] for line in lines if line.startswith("build ")}
    assert built == set(images) == {line.removeprefix("push ") for line in lines if line.startswith("push ")}
    assert lines[-1] == f"helm push dist/yardstick-{VERSION}.tgz oci://{registry}/charts"
    chart = helm().Chart.load(root / "dist" / f"yardstick-{VERSION}.tgz")
    gpu = {"engine": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}
    texts = [text for values in ({}, gpu) for text in chart.render(values, name="a", namespace="b", is_install=True).values()]
    named = {image for text in texts for image in re.findall(rf"image: ({registry}/\S+)", text)}
    assert named == {f"{image}@sha256:{hashlib.sha256(image.encode()).hexdigest()}" for image in images}
    assert release("chart", str(root / "other"), registry, "gateway=sha256:1").returncode == 2


MODULES_URL = "https://example.org/modules/flashinfer-0.6.6-aot-sm90a-cu130.zip"
WHEEL = "yardstick_flashinfer_modules-0.6.6+sm90a.cu130-py3-none-manylinux_2_28_x86_64.whl"
DOWNLOAD = 'echo "${@: -1}" >>"$LOG"; while [ "$1" != --output ]; do shift; done; cp "$ZIP" "$2"'
"""Stands for curl: logs the URL, and copies the file ``$ZIP``."""


@pytest.mark.parametrize(
    ("origin", "label"),
    [
        ("git@example.org:team/yardstick.git", "https://example.org/team/yardstick"),
        ("https://me:secret@example.org/team/yardstick.git", "https://example.org/team/yardstick"),
        ("/srv/yardstick", "unknown"),
        (None, "unknown"),
    ],
)
def test_images_name_their_source_and_no_password(machine: Path, origin: str | None, label: str) -> None:
    root = machine.parent
    shutil.copytree(SCRIPTS, root / "scripts")
    shutil.copy(ROOT / "pyproject.toml", root)
    pretend(machine, "docker", 'echo "$*" >>"$LOG"')
    environment = {"PATH": f"{machine}:{os.environ['PATH']}", "LOG": str(root / "log"), "GIT_CEILING_DIRECTORIES": str(root.parent)}
    git = need("git")
    subprocess.run([git, "init", "--quiet", "."], cwd=root, check=True, timeout=60)
    if origin is not None:
        subprocess.run([git, "remote", "add", "origin", origin], cwd=root, check=True, timeout=60)
    subprocess.run([root / "scripts" / "images.sh"], env=environment, capture_output=True, check=True, timeout=60)
    lines = (root / "log").read_text().splitlines()
    assert len(lines) == 2
    assert all(f"--build-arg SOURCE={label} " in f"{line} " for line in lines)


@pytest.mark.parametrize(
    ("url", "digest", "says"),
    [
        ("", "", "FLASHINFER_ZIP_URL is not set"),
        (MODULES_URL, "", "FLASHINFER_ZIP_SHA256 is not set"),
        (MODULES_URL, "0" * 64, "checksum did NOT match"),
        (MODULES_URL, None, ""),
    ],
)
def test_the_modules_of_a_release_are_those_that_it_names(machine: Path, url: str, digest: str | None, says: str) -> None:
    """Without a URL, the image has none; what has another digest is refused."""
    root = machine.parent
    shutil.copytree(SCRIPTS, root / "scripts")
    pretend(machine, "curl", DOWNLOAD)
    modules = zipped(root, "aot/page/page.so")
    real = hashlib.sha256(modules.read_bytes()).hexdigest()
    done = subprocess.run(
        [root / "scripts" / "release.sh", "modules", url, real if digest is None else digest],
        env={"PATH": f"{machine}:{os.environ['PATH']}", "LOG": str(root / "log"), "ZIP": str(modules)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode == 0) == (not says or not url), done.stderr
    assert says in done.stderr
    assert (root / "wheels" / WHEEL).exists() == (not says)


def test_a_chart_that_was_not_pushed_is_not_signed(machine: Path) -> None:
    pretend(machine, "helm", "echo no such registry >&2; exit 1")
    pretend(machine, "cosign", 'echo "$*" >>"$LOG"')
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]["chart"]["steps"]
    (text,) = [step["run"] for step in steps if "helm push" in step.get("run", "")]
    text = text.partition("cosign login")[2].partition("\n")[2]  # from the push on
    environment = {"PATH": f"{machine}:{os.environ['PATH']}", "LOG": str(machine / "log"), "charts": "ghcr.io/a/charts"}
    done = subprocess.run(["bash", "-e", "-c", text], cwd=machine, env=environment, capture_output=True, timeout=60)
    assert done.returncode != 0
    assert not (machine / "log").exists()


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Programs in the place of those that change a machine; all of them do nothing, and succeed."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("docker", "curl"):
        pretend(tools, name, "")
    return tools


def pretend(tools: Path, name: str, script: str) -> None:
    (tools / name).write_text(f"#!/bin/bash\n{script}\n")
    (tools / name).chmod(0o755)


def tools_of(machine: Path, python: str) -> dict[str, str]:
    return {"PYTHON": str(machine / python), "LOG": str(machine / "log"), "PATH": f"{machine}:{os.environ['PATH']}"}


def test_images_are_built_as_make_is_told(machine: Path) -> None:
    pretend(machine, "docker", 'echo "$*" >>"$LOG"')
    environment = tools_of(machine, "python")
    assert make("images", **environment).returncode == 0
    assert make("images", "VARIANT=cuda", "REGISTRY=", "BASE=some/base", "OFFLINE=1", **environment).returncode == 0
    revision = r"(unknown|[0-9a-f]{40}(-dirty)?)"
    labels = re.compile(rf" --build-arg VERSION={re.escape(VERSION)} --build-arg REVISION={revision} --build-arg SOURCE=\S+(?= )")
    built, labelled = labels.subn("", (machine / "log").read_text())
    assert labelled == 4
    plain_gateway, plain_engine, gateway, engine = built.splitlines()
    assert plain_gateway == f"build --file gateway/Dockerfile --tag localhost/yardstick-gateway:{VERSION} ."
    assert plain_engine == f"build --build-arg VARIANT=cpu --file engine/Dockerfile --tag localhost/yardstick-engine:{VERSION} ."
    given = "build --build-arg BASE=some/base --build-arg PIP_NO_INDEX=1"
    assert gateway == f"{given} --file gateway/Dockerfile --tag yardstick-gateway:{VERSION} ."
    assert engine == f"{given} --build-arg VARIANT=cuda --file engine/Dockerfile --tag yardstick-engine:{VERSION}-cuda ."


@pytest.fixture
def copy(machine: Path) -> Path:
    """A checkout whose interpreter runs the project's scripts and logs what pip is asked for."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, machine.parent)
    shutil.copytree(SCRIPTS, machine.parent / "scripts")
    pip = 'echo "$*" >>"$LOG"; mkdir -p wheels wheelhouse; case "$*" in *requirement*) cat >>"$LOG";; esac'
    pretend(machine, "python", f'case "$1" in -m) {pip};; *) exec {sys.executable} "$@";; esac')
    return machine.parent


def test_wheels_that_a_gpu_host_has_are_left_out(machine: Path, copy: Path) -> None:
    wheels = [f"wheelhouse/{name}-1.0-py3-none-any.whl" for name in ("huggingface_hub", "numpy", "redis")]
    pip = f"mkdir -p wheelhouse; touch {' '.join(wheels)}; cat >/dev/null"
    pretend(machine, "python", f'case "$1" in -m) {pip};; *) exec {sys.executable} "$@";; esac')

    def collect(has: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | tools_of(machine, "python") | {"HOST_HAS": has}
        script = [copy / "scripts" / "wheelhouse.sh"]
        return subprocess.run(script, env=environment, timeout=60, capture_output=True, text=True, check=False)

    assert collect("huggingface-hub numpy").returncode == 0
    assert [path.name for path in (copy / "wheelhouse").glob("*.whl")] == ["redis-1.0-py3-none-any.whl"]
    assert (copy / "wheelhouse" / "requirements.txt").read_text().split() == ["redis==1.0", "huggingface-hub", "numpy"]
    done = collect("numpi")
    assert (done.returncode, done.stderr) == (1, "wheelhouse.sh: HOST_HAS names numpi, of which there is no wheel\n")
