"""The Makefile, the pins, CI's script, and what that script starts where it can."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helm.chart import helm
from tests.parts import PARTS, need

ROOT = Path(__file__).parents[1]


def make(*arguments: str, directory: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run make with an environment that has nothing of the make that may have started the tests."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "PYTHON"}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=directory, env=clean | environment, capture_output=True, text=True, timeout=60, check=False)


def serve_line(*arguments: str, **environment: str) -> str:
    (line,) = [line for line in make("-n", "serve", *arguments, **environment).stdout.splitlines() if "yardstick serve" in line]
    return " ".join(line.split())


def test_a_gpu_run_is_as_make_is_told() -> None:
    def line(*arguments: str) -> str:
        return " ".join(make("-n", "gpu", "PYTHON=python", "READY=none", *arguments).stdout.replace("\\\n", "").split())

    assert line() == "python -m benchmarks gpu --run a --out gpu-run"
    told = line("RUN=b", "OUT=/tmp/run", "CONTINUE=1", "LIMIT=200", "ARCHIVE=run.tar.gz")
    assert told == "python -m benchmarks gpu --run b --out /tmp/run --continue --limit 200 --archive run.tar.gz"


def test_help_lists_every_target() -> None:
    listed = set(re.findall(r"^  make ([a-z-]+) ", make("help").stdout, flags=re.M))
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.M)
    assert phony
    assert listed == set(phony[1].split())


def test_serve_passes_on_what_was_given() -> None:
    assert serve_line() == ".venv/bin/yardstick serve"
    assert serve_line("PORT=9000", "MODEL=Qwen/Qwen3-0.6B") == ".venv/bin/yardstick serve --model Qwen/Qwen3-0.6B --port 9000"
    assert serve_line("FLAGS=--max-total-tokens 5") == ".venv/bin/yardstick serve --max-total-tokens 5"


def test_serve_takes_no_host_from_the_shell() -> None:
    assert serve_line(HOST="laptop", PORT="1") == ".venv/bin/yardstick serve"


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


def test_a_second_start_installs_nothing(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".ready").touch()
    assert "pip install" not in make("-n", "serve", directory=tmp_path).stdout
    (tmp_path / "constraints.txt").touch()
    os.utime(tmp_path / ".venv" / ".ready", (0, 0))
    assert "pip install" in make("-n", "serve", directory=tmp_path).stdout, "new pins are installed"


def test_constraints_pin_every_dependency_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    direct = [Requirement(line) for line in [*project["dependencies"], *(line for extra in extras for line in extra)]]
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


def test_ci_runs_what_everybody_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    (parts,) = re.findall(r"^check: (.*) ##", (ROOT / "Makefile").read_text(), flags=re.M)
    ran = re.findall(r"^ *(?:\w+=\S+ |on_bare_machine )*make (.*?)(?: \|\| status=.*)?$", script.read_text(), flags=re.M)
    assert set(" ".join(ran).split()) == {"setup", "test", *parts.split()}
    checks = make("-n", "check").stdout
    for tool in ("ruff check", "ruff format --check", "mypy", "lint-imports", "scripts/test.sh"):
        assert tool in checks


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
            assert f">={python}" == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]


def release(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPTS / "release.sh", *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_a_release_has_one_version_everywhere(tmp_path: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert release("check", f"v{version}").returncode == 0
    wrong = release("check", "v99.0.0")
    assert wrong.returncode == 1
    for place in ("pyproject.toml has version", "Chart.yaml has version", "Chart.yaml has appVersion", "## 99.0.0"):
        assert place in wrong.stderr
    assert release("notes", f"v{version}").stdout.startswith("\n### ")
    packages = []
    for name in ("one", "two"):
        assert release("chart", str(tmp_path / name)).returncode == 0
        packages.append(tmp_path / name / f"yardstick-{version}.tgz")
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


def test_a_release_builds_both_images_for_their_machines() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    built = {(each["part"], each["variant"]): each for each in jobs["images"]["strategy"]["matrix"]["include"]}
    assert set(built) == {("gateway", "cpu"), ("engine", "cpu"), ("engine", "cuda")}
    for (part, variant), each in built.items():
        assert (ROOT / part / "Dockerfile").exists()
        assert each["suffix"] == ("-cuda" if variant == "cuda" else ""), "as the chart names them"
        assert ("linux/arm64" in each["platforms"]) == (variant == "cpu")


@pytest.mark.parametrize(
    ("workflow", "inputs", "asked"),
    [
        ("ci", "", [".ci/run"]),
        ("soak", "", ["make soak SOAK_SECONDS=600"]),
        ("soak", "3600", ["make soak SOAK_SECONDS=3600"]),
    ],
)
def test_the_steps_of_workflows_run_what_everybody_runs(machine: Path, workflow: str, inputs: str, asked: list[str]) -> None:
    """Each step runs in a shell as on GitHub, with programs that only log how they are called."""
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text())["jobs"].values()
    (machine.parent / ".ci").mkdir()
    for program in (machine / "make", machine.parent / ".ci" / "run"):
        name = program.relative_to(machine.parent).as_posix().removeprefix("bin/")
        pretend(program.parent, program.name, f'echo "{name} $*" >>"$LOG"')
    for step in job["steps"]:
        if "run" in step:
            given = {
                name: re.sub(r"\$\{\{ inputs\.\w+ \|\| '(\w*)' \}\}", inputs or r"\1", value)
                for name, value in step.get("env", {}).items()
            }
            assert "${{" not in "".join([step["run"], *given.values()]), (
                "the only expressions are inputs with defaults, in variables"
            )
            environment = given | {"PATH": f"{machine}:{os.environ['PATH']}", "LOG": str(machine / "log")}
            command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
            subprocess.run(command, cwd=machine.parent, env=environment, check=True, timeout=60)
    assert [line.strip() for line in (machine / "log").read_text().splitlines()] == asked


def zipped(name: str) -> bytes:
    """A zip file with one file."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as modules:
        modules.writestr(name, "code")
    return content.getvalue()


MODULES = zipped("aot/page/page.so")
MODULES_URL = "https://example.org/modules/flashinfer-0.6.6-aot-sm90a-cu130.zip"
WHEEL = "yardstick_flashinfer_modules-0.6.6+sm90a.cu130-py3-none-manylinux_2_28_x86_64.whl"
DOWNLOAD = 'echo "${@: -1}" >>"$LOG"; while [ "$1" != --output ]; do shift; done; cp "$ZIP" "$2"'
"""Stands for curl: logs the URL, and copies the file ``$ZIP``."""
EXPRESSIONS = {
    "matrix.part": "engine",
    "github.token": "a-token",
    "steps.build.outputs.digest": "sha256:0a",
    "vars.FLASHINFER_ZIP_URL": MODULES_URL,
    "vars.FLASHINFER_ZIP_SHA256": hashlib.sha256(MODULES).hexdigest(),
}
"""Values of the expressions in variables of the release's steps."""


def test_the_steps_of_a_release(machine: Path) -> None:
    """Each step runs as on GitHub, whose shell ends at an error but not at one within a pipe."""
    root, version = machine.parent, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name in ("scripts", "helm"):
        shutil.copytree(ROOT / name, root / name)
    for name in ("CHANGELOG.md", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    (root / ".ci").mkdir()
    pretend(root / ".ci", "run", 'echo ".ci/run" >>"$LOG"')
    for name in ("cosign", "gh"):
        pretend(machine, name, f'echo "{name} $*" >>"$LOG"')
    pretend(machine, "helm", 'echo "helm $*" >>"$LOG"; echo "Digest: sha256:0b" >&2')
    pretend(machine, "curl", DOWNLOAD)
    (root / "modules.zip").write_bytes(MODULES)
    pretend(machine, "python", 'echo "python $*" >>"$LOG"; mkdir -p dist; touch dist/yardstick_llm.whl')
    variables = {"GITHUB_REF_NAME": f"v{version}", "GITHUB_REPOSITORY_OWNER": "Example-Org", "GITHUB_ACTOR": "someone"}
    for job in yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"].values():
        shutil.rmtree(root / "dist", ignore_errors=True)
        added, of_job = root / "added", job.get("env", {})
        added.write_text("")
        for step in job["steps"]:
            told = of_job | step.get("env", {})
            given = {
                name: re.sub(r"\$\{\{ ([\w.]+) \}\}", lambda found: EXPRESSIONS[found[1]], value) for name, value in told.items()
            }
            given |= dict(line.split("=", 1) for line in added.read_text().splitlines())
            environment = variables | given | {"PATH": f"{machine}:{os.environ['PATH']}", "LOG": str(root / "log")}
            assert "${{" not in step.get("run", ""), "expressions are in variables only"
            command = ["bash", "--noprofile", "--norc", "-e", "-c", step.get("run", "")]
            subprocess.run(
                command, cwd=root, env=environment | {"GITHUB_ENV": str(added), "ZIP": "modules.zip"}, check=True, timeout=60
            )
    package, wheel = f"dist/yardstick-{version}.tgz", "dist/yardstick_llm.whl"
    torch, extras = "--extra-index-url https://download.pytorch.org/whl/cpu", "engine,parquet,tracing"
    written, files = f"--output-file {wheel}.cdx.json", f"dist/SHA256SUMS {package} {package}.cdx.json {wheel}"
    assert (root / "log").read_text().splitlines() == [
        ".ci/run",
        MODULES_URL,
        "cosign sign --yes ghcr.io/example-org/yardstick-engine@sha256:0a",
        "helm registry login ghcr.io --username someone --password-stdin",
        "cosign login ghcr.io --username someone --password-stdin",
        f"helm push {package} oci://ghcr.io/example-org/charts",
        "cosign sign --yes ghcr.io/example-org/charts/yardstick@sha256:0b",
        "python -m pip wheel --no-deps --wheel-dir dist .",
        "python -m venv --without-pip parts",
        f"python -m pip --python parts install --quiet --constraint constraints.txt {torch} dist/yardstick_llm.whl[{extras}]",
        "python -m pip install --quiet cyclonedx-bom==7.5.0",
        f"python -m cyclonedx_py environment parts --pyproject pyproject.toml --output-reproducible {written}",
        f"gh release create v{version} --title v{version} --notes-file notes.md {files}",
    ]
    assert [path.name for path in (root / "wheels").iterdir()] == [WHEEL]
    sums = dict(reversed(line.split()) for line in (root / "dist" / "SHA256SUMS").read_text().splitlines())
    assert sums == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (root / "dist").glob("y*")}
    assert (root / "notes.md").read_text().lstrip().startswith("### ")
    rendered = helm().Chart.load(root / package).render({}, name="yardstick", namespace="apps", is_install=True)
    images = set(re.findall(r"image: (\S*yardstick-\w+\S*)", "".join(rendered.values())))
    assert images == {f"ghcr.io/example-org/yardstick-{part}:{version}" for part in ("engine", "gateway")}
    parts = json.loads((root / f"{package}.cdx.json").read_text())["components"]
    assert images < {part["bom-ref"] for part in parts}


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
    ("url", "content", "digest", "says"),
    [
        ("", MODULES, "", "FLASHINFER_ZIP_URL is not set"),
        (MODULES_URL, MODULES, "", "FLASHINFER_ZIP_SHA256 is not set"),
        (MODULES_URL, MODULES, "0" * 64, "checksum did NOT match"),
        (MODULES_URL, zipped("setup.py"), None, "is no module"),
        (MODULES_URL, MODULES, None, ""),
    ],
)
def test_the_modules_of_a_release_are_those_that_it_names(
    machine: Path, url: str, content: bytes, digest: str | None, says: str
) -> None:
    """Without a URL, the image has none; what has another digest or other files is refused."""
    root = machine.parent
    shutil.copytree(SCRIPTS, root / "scripts")
    pretend(machine, "curl", DOWNLOAD)
    (root / "modules.zip").write_bytes(content)
    done = subprocess.run(
        [root / "scripts" / "release.sh", "modules", url, hashlib.sha256(content).hexdigest() if digest is None else digest],
        env={"PATH": f"{machine}:{os.environ['PATH']}", "LOG": str(root / "log"), "ZIP": str(root / "modules.zip")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode == 0) == (not says or not url), done.stderr
    assert says in done.stderr
    wheels = root / "wheels"
    assert (wheels / WHEEL).exists() == (not says)


def test_a_release_s_image_of_cuda_gets_the_modules_before_it_is_built() -> None:
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]["images"]["steps"]
    (place,) = [place for place, step in enumerate(steps) if "release.sh modules" in step.get("run", "")]
    (build,) = [place for place, step in enumerate(steps) if "build-push-action" in step.get("uses", "")]
    assert steps[place]["if"] == "matrix.variant == 'cuda'"
    assert place < build
    assert "wheel[s]" in (ROOT / "engine" / "Dockerfile").read_text()


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


def test_the_soak_takes_its_seconds() -> None:
    (line,) = [line for line in make("-n", "soak", "SOAK_SECONDS=3600").stdout.splitlines() if "pytest" in line]
    assert line.startswith("SOAK_SECONDS=3600 ")


def test_the_commit_hooks_run_the_tools_of_the_environment() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    programs = {hook["entry"].split()[0] for hook in repository["hooks"]}
    assert programs == {".venv/bin/ruff", ".venv/bin/mypy", ".venv/bin/lint-imports"}
    assert all(hook["language"] == "system" for hook in repository["hooks"])


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Programs in the place of those that change a machine; all of them do nothing, and succeed."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("make", "docker", "dockerd", "containerd", "debootstrap", "iptables", "ip", "openssl", "curl", "kubectl", "sleep"):
        pretend(tools, name, "")
    pretend(tools, "apt-get", "echo nothing is installed >&2; exit 1")
    pretend(tools, "id", "echo 0")
    pretend(tools, "cluster", TOLD)
    return tools


def pretend(tools: Path, name: str, script: str) -> None:
    (tools / name).write_text(f"#!/bin/bash\n{script}\n")
    (tools / name).chmod(0o755)


def on(tools: Path, script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {"PATH": f"{tools}:{os.environ['PATH']}", "LOG": f"{tools}/log", "DONE": f"{tools}/done", **environment}
    return subprocess.run([script], env=given, capture_output=True, text=True, timeout=60, check=False)


SCRIPTS = ROOT / "scripts"


def test_the_makefile_is_short() -> None:
    assert len((ROOT / "Makefile").read_text().splitlines()) < 80


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda script: script.name)
def test_scripts_are_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[1].startswith("# ")


@pytest.mark.parametrize(("ends", "ended"), [("exit 0", 0), ('case "$*" in *"not alone"*) exit 1;; esac', 1)])
def test_the_tests_that_measure_run_alone_and_after_the_others(machine: Path, ends: str, ended: int) -> None:
    pretend(machine, "python", f'echo "$*" >>"$LOG"; {ends}')
    done = subprocess.run([SCRIPTS / "test.sh", "not slow"], env=os.environ | tools_of(machine, "python"), timeout=60, check=False)
    assert done.returncode == ended
    first, second, third = (machine / "log").read_text().splitlines()
    cores = os.sysconf("SC_NPROCESSORS_ONLN")
    assert f"-n {min(8, 2 * cores)} " in first
    assert "--dist worksteal" in first
    assert first.endswith("-m not alone and not slow")
    assert " -n 2 --dist worksteal " in second
    assert second.endswith("-m waits and not slow")
    assert " -n " not in third
    assert third.endswith("-m alone and not waits and not slow")


@pytest.mark.parametrize(
    ("part", "expression"),
    [("parallel", "not alone and not gpu"), ("waiting", "waits and not gpu"), ("alone", "alone and not waits and not gpu")],
)
def test_each_part_of_the_tests_runs_by_itself(machine: Path, part: str, expression: str) -> None:
    pretend(machine, "python", 'echo "$*" >>"$LOG"')
    environment = os.environ | tools_of(machine, "python") | {"PART": part}
    subprocess.run([SCRIPTS / "test.sh", "not gpu"], env=environment, timeout=60, check=True)
    (line,) = (machine / "log").read_text().splitlines()
    assert line.endswith(f"-m {expression}")


def test_an_unknown_part_of_the_tests_is_an_error(machine: Path) -> None:
    environment = os.environ | tools_of(machine, "python") | {"PART": "both"}
    done = subprocess.run([SCRIPTS / "test.sh", "not slow"], env=environment, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, b"PART must be parallel, waiting or alone, and is both.\n")


def tools_of(machine: Path, python: str) -> dict[str, str]:
    return {"PYTHON": str(machine / python), "LOG": str(machine / "log"), "PATH": f"{machine}:{os.environ['PATH']}"}


def test_images_are_built_as_make_is_told(machine: Path) -> None:
    pretend(machine, "docker", 'echo "$*" >>"$LOG"')
    (machine / "make").unlink()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    environment = tools_of(machine, "python")
    assert make("images", **environment).returncode == 0
    assert make("images", "VARIANT=cuda", "REGISTRY=", "BASE=some/base", "OFFLINE=1", **environment).returncode == 0
    revision = r"(unknown|[0-9a-f]{40}(-dirty)?)"
    labels = re.compile(rf" --build-arg VERSION={re.escape(version)} --build-arg REVISION={revision} --build-arg SOURCE=\S+(?= )")
    built, labelled = labels.subn("", (machine / "log").read_text())
    assert labelled == 4
    plain_gateway, plain_engine, gateway, engine = built.splitlines()
    assert plain_gateway == f"build --file gateway/Dockerfile --tag localhost/yardstick-gateway:{version} ."
    assert plain_engine == f"build --build-arg VARIANT=cpu --file engine/Dockerfile --tag localhost/yardstick-engine:{version} ."
    given = "build --build-arg BASE=some/base --build-arg PIP_NO_INDEX=1"
    assert gateway == f"{given} --file gateway/Dockerfile --tag yardstick-gateway:{version} ."
    assert engine == f"{given} --build-arg VARIANT=cuda --file engine/Dockerfile --tag yardstick-engine:{version}-cuda ."


@pytest.fixture
def copy(machine: Path) -> Path:
    """A checkout whose interpreter runs the project's scripts and logs what pip is asked for."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, machine.parent)
    shutil.copytree(SCRIPTS, machine.parent / "scripts")
    pip = 'echo "$*" >>"$LOG"; mkdir -p wheels wheelhouse; case "$*" in *requirement*) cat >>"$LOG";; esac'
    pretend(machine, "python", f'case "$1" in -m) {pip};; *) exec {sys.executable} "$@";; esac')
    return machine.parent


def test_wheels_for_the_images(machine: Path, copy: Path) -> None:
    given = {"TORCH": "torch==1.0", "TORCH_INDEX": "https://index.example.com", "IMAGE_PYTHON": "3.11"}
    subprocess.run([copy / "scripts" / "wheels.sh"], env=os.environ | tools_of(machine, "python") | given, timeout=60, check=True)
    torch, rest, *asked = (machine / "log").read_text().splitlines()
    download = "-m pip download --quiet --dest wheels --only-binary=:all: --python-version 3.11"
    assert torch == f"{download} --no-deps --retries 1 --extra-index-url https://index.example.com torch==1.0"
    assert rest == f"{download} --find-links wheels --constraint constraints.txt --requirement /dev/stdin async-timeout"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert asked == [*project["dependencies"], *extras["engine"], *extras["tracing"]]


def test_wheels_for_a_gpu_host(machine: Path, copy: Path) -> None:
    subprocess.run([copy / "scripts" / "wheelhouse.sh"], env=os.environ | tools_of(machine, "python"), timeout=60, check=True)
    lines = (machine / "log").read_text().splitlines()
    second = max(place for place, line in enumerate(lines) if line.startswith("-m pip"))
    names = {Requirement(line).name for line in lines[1:second]}
    assert {"litestar", "pytest", "pyzmq"} <= names
    assert not {"torch", "triton", "transformers", "ruff", "flashinfer-python"} & names
    assert "--no-deps" in lines[second]
    assert {Requirement(line).name for line in lines[second + 1 :]} >= {"flashinfer-python", "apache-tvm-ffi"}


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


LOCAL = ROOT / "tests" / "cluster" / "local.sh"
TOLD = 'echo "$1" >>"$DONE"'
REFUSES = 'then echo "operation not permitted" >&2; exit 1; fi'
CANNOT = {
    "it takes root": {"id": "echo 1000"},
    "dockerd does not start": {"docker": "exit 1", "dockerd": f"if true; {REFUSES}"},
    "cluster up` fails": {"cluster": f'{TOLD}; if [ "$1" = up ]; {REFUSES}'},
    "its node takes no image": {"cluster": f'{TOLD}; if [ "$1" = load-image ]; {REFUSES}'},
    "pods do not start": {"kubectl": f'if [ "$1" = wait ]; {REFUSES}'},
    "Services cannot be reached": {"curl": "exit 7"},
}


@pytest.mark.parametrize("reason", CANNOT)
def test_a_machine_that_can_run_no_cluster_is_no_failure_but_a_reason(machine: Path, reason: str) -> None:
    for name, script in CANNOT[reason].items():
        pretend(machine, name, script)
    done = on(machine, LOCAL, CLUSTER=str(machine / "cluster"))
    assert done.returncode == 3, done.stderr
    *said, last = done.stderr.splitlines()
    assert last.startswith("No cluster can run on this machine: ")
    assert reason in last
    assert ("operation not permitted" in said) == any(REFUSES in script for script in CANNOT[reason].values())
    calls = (machine / "done").read_text().split() if (machine / "done").exists() else []
    assert calls[-1:] == ["down"] * ("up" in calls), "what was started is stopped"


def test_a_dockerd_that_is_ending_is_waited_for(machine: Path) -> None:
    """It answers no more, and another one starts once its process is gone; here that of its number is the test's."""
    ending = machine / "docker.pid"
    ending.write_text(str(os.getpid()))
    pretend(machine, "docker", f"[ -e {machine}/started ]")
    pretend(machine, "sleep", f"rm -f {ending}")
    pretend(machine, "dockerd", f"[ ! -e {ending} ] && touch {machine}/started && exec tail -f /dev/null")
    done = on(machine, LOCAL, CLUSTER=str(machine / "cluster"), DOCKER_PID=str(ending))
    assert done.returncode == 0, done.stderr
    assert (machine / "started").exists()


def test_images_that_cannot_be_built_and_tests_that_fail_are_failures(machine: Path) -> None:
    pretend(machine, "make", "exit 2")
    done = on(machine, LOCAL, CLUSTER=str(machine / "cluster"))
    assert done.returncode == 2
    assert "No cluster" not in done.stderr
    assert (machine / "done").read_text().split() == ["up", "kubeconfig", "load-image", "down"]


@pytest.fixture
def ci(machine: Path) -> Path:
    """CI's script in a checkout of which nothing else is real."""
    root = machine.parent
    for directory in (".ci", ".venv/bin", "tests/cluster"):
        (root / directory).mkdir(parents=True)
    for name in ("redis-server", "chromium", "promtool", "git", "gcc", "python3"):
        pretend(machine, name, "")
    (root / "scripts").mkdir()
    pretend(root / "scripts", "bare_path.sh", f'ln -s {machine}/make {shutil.which("grep")} "$1"')
    pretend(root / "tests" / "cluster", "local.sh", "")
    pretend(root / ".venv" / "bin", "python", 'echo "$*" >>"$LOG"')
    return Path(shutil.copy(ROOT / ".ci" / "run", root / ".ci"))


@pytest.mark.parametrize(("status", "words"), [(0, ""), (3, "left out, because no cluster can run"), (2, "CLUSTER TESTS FAILED")])
def test_ci_tells_what_became_of_the_cluster_tests(machine: Path, ci: Path, status: int, words: str) -> None:
    pretend(machine.parent / "tests" / "cluster", "local.sh", f"exit {status}")
    pretend(machine, "make", '[ -z "$YARDSTICK_CLUSTER" ]')
    done = on(machine, ci, YARDSTICK_CLUSTER=str(machine / "cluster"))
    assert done.returncode == (0 if status == 3 else status), done.stderr
    assert words in done.stdout
    assert ("left out" in done.stdout, "FAILED" in done.stdout) == (status == 3, status == 2)


@pytest.mark.parametrize("again", [0, 2])
def test_ci_runs_cluster_tests_that_fail_once_more_with_nothing_beside_them(machine: Path, ci: Path, again: int) -> None:
    pretend(machine, "make", 'echo "$PART" >>"$LOG"')
    second = f'if grep -q cluster "$LOG"; then echo again >>"$LOG"; exit {again}; fi'
    pretend(machine.parent / "tests" / "cluster", "local.sh", f'{second}; echo cluster >>"$LOG"; exit 2')
    done = on(machine, ci, YARDSTICK_CLUSTER=str(machine / "cluster"))
    assert done.returncode == again, done.stderr
    assert (machine / "log").read_text().split()[-2:] == ["alone", "again"]


def test_ci_runs_the_cluster_tests_beside_the_others_but_not_beside_those_that_measure(machine: Path, ci: Path) -> None:
    pretend(machine, "make", 'echo "$PART $*" >>"$LOG"')
    pretend(
        machine.parent / "tests" / "cluster",
        "local.sh",
        'while ! grep -q parallel "$LOG"; do /bin/sleep 0.02; done; echo cluster >>"$LOG"',
    )
    done = on(machine, ci, YARDSTICK_CLUSTER=str(machine / "cluster"))
    assert done.returncode == 0, done.stderr
    setup, *beside, cluster, bare, alone = (machine / "log").read_text().splitlines()
    assert (setup, set(beside[:3])) == (" setup", {"waiting test", "waiting test-all", " lint types imports"})
    assert set(beside[3:]) | {cluster} == {"parallel test", "parallel test-all", "cluster"}
    assert (bare, alone) == ("alone test", "alone test-all")


@pytest.mark.parametrize(
    ("part", "target", "again"),
    [
        ("waiting", "test", 0),
        ("waiting", "test-all", 1),
        ("parallel", "test", 1),
        ("parallel", "test-all", 0),
        ("alone", "test", 1),
        ("alone", "test-all", 0),
    ],
)
def test_ci_runs_tests_that_fail_once_more(machine: Path, ci: Path, part: str, target: str, again: int) -> None:
    """With the parts that they had."""
    pretend(machine, "make", f'[ "$PART $*" != "{part} {target}" ]')
    pretend(machine.parent / ".venv" / "bin", "python", f'echo "$PATH|$REQUIRE|$PYTEST_ADDOPTS|$*" >>"$LOG"; exit {again}')
    assert on(machine, ci).returncode == again
    (line,) = (machine / "log").read_text().splitlines()
    path, require, options, arguments = line.split("|")
    assert "--last-failed --last-failed-no-failures none" in arguments
    if target == "test":
        assert (require, options) == ("", "-o cache_dir=.pytest_cache/bare")
        assert str(machine) not in path
    else:
        assert "redis" in require.split(",")
        assert (path.split(":")[0], options) == (str(machine), "")


def test_ci_runs_each_test_once(machine: Path, ci: Path) -> None:
    """`make test-all` leaves out the tests that `make test` has run on the bare machine."""
    pretend(machine, "make", 'echo "$*|$PATH|$REQUIRE|$OUTCOMES|$EXCEPT" >>"$LOG"')
    assert on(machine, ci).returncode == 0
    lines = [line.split("|") for line in (machine / "log").read_text().splitlines()]
    bare, rest = ([line for line in lines if line[0] == target] for target in ("test", "test-all"))
    assert len(bare) == len(rest) == 3
    ((path, require, ran, _),) = {tuple(line[1:]) for line in bare}
    assert (":" in path, require) == (False, "")
    assert {(line[3], line[4]) for line in rest} == {("", ran)}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The PATH of a machine with Python and make only."""
    if not shutil.which("dpkg-query"):
        pytest.skip("the list of such a machine's programs is Debian's")
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([SCRIPTS / "bare_path.sh", folder], check=True, timeout=60)
    return folder


def test_a_bare_machine_has_make_and_python_and_nothing_that_tests_need(bare: Path) -> None:
    names = {path.name for path in bare.iterdir() if path.exists()}
    assert {"bash", "sh", "env", "sed", "awk", "true", "[", "make", "python3"} <= names
    assert not names & {name for _, programs in PARTS.values() for name in programs}
    assert make("help", PATH=str(bare)).returncode == 0


@pytest.mark.slow
def test_what_a_machine_lacks_is_left_out_and_named(bare: Path, tmp_path: Path) -> None:
    """Another run repeats nothing, and fails where what it requires is missing."""
    tests = {"bare": "pass", "first": "need('redis')", "second": "need('redis')"}
    lines = [f"def test_{name}(): {body}" for name, body in tests.items()]
    (tmp_path / "test_some.py").write_text("\n".join(["from tests.parts import need", *lines]))
    given = {"PART": "parallel", "PYTHON": sys.executable, "PATH": str(bare), "OUTCOMES": str(tmp_path / "ran"), "REQUIRE": ""}

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        command = [SCRIPTS / "test.sh", "not slow", "-n0", "-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir=."]
        whole = os.environ | given | environment
        return subprocess.run([*command, tmp_path], env=whole, capture_output=True, text=True, timeout=100, check=False)

    first = run()
    assert (first.returncode, first.stdout.splitlines()[-1]) == (0, "Left out (2 tests): needs redis: apt-get install redis-server")
    assert "1 passed, 2 skipped" in first.stdout
    second = run(OUTCOMES="", EXCEPT=given["OUTCOMES"], REQUIRE="redis,curl")
    assert second.returncode == 1
    assert "2 failed, 1 deselected" in second.stdout
    assert "needs redis: apt-get install redis-server (REQUIRE=redis,curl)" in second.stdout
    third = run(REQUIRE="radis")
    assert third.returncode != 0
    assert "REQUIRE names radis; the parts are redis, browser" in third.stderr


def test_a_failed_check_of_style_ends_ci(machine: Path, ci: Path) -> None:
    """And the tests that run beside it."""
    waiting = 'echo begun >>"$LOG"; /bin/sleep 60'
    failing = 'while ! grep -q begun "$LOG"; do /bin/sleep 0.02; done; exit 1'
    pretend(machine, "make", f'case "$PART $*" in *setup) touch "$LOG";; waiting*) {waiting};; *) {failing};; esac')
    assert on(machine, ci).returncode != 0
    assert (machine / "log").read_text() == "begun\n"  # and this script has ended, for which the other had to end
