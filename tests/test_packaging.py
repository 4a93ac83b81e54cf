"""The four linked folders are importable only as parts of solgen, however solgen is installed."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("engine", "kernels", "parallel", "presets")


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("folder", FOLDERS)
def test_root_folders_are_links_without_init(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()
    link = ROOT / "solgen" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder


def test_an_installed_kernels_package_is_not_shadowed(tmp_path: Path) -> None:
    """With the root as working directory, `import kernels` finds the package on the path, not our folder."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("OWNER = 'hugging face'\n")
    program = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.OWNER)"
    assert run(sys.executable, "-c", program).stdout.strip() == "hugging face"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of the tree, and the wheel built from that sdist."""
    pytest.importorskip("build", reason="the dev extra brings `build`")
    source, target = tmp_path_factory.mktemp("source") / "solgen", tmp_path_factory.mktemp("dist")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout
    if not listed:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.split("\0")):
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        original = ROOT / name
        if original.is_symlink():
            copy.symlink_to(original.readlink())
        elif original.exists():
            copy.write_bytes(original.read_bytes())
    result = run(sys.executable, "-m", "build", "--outdir", str(target), str(source))
    assert result.returncode == 0, result.stdout + result.stderr
    return target


def test_wheel_holds_solgen_alone_and_all_of_it(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"solgen"}
    code = {name for name in names if ".dist-info/" not in name}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".toml"):
                assert f"solgen/{path.relative_to(ROOT)}" in code
    assert "solgen/__main__.py" in code


def test_sdist_holds_the_code_and_the_licence(distributions: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "solgen/cli.py", "solgen/presets/demo.toml"} <= names


def test_the_wheel_runs_outside_the_tree(distributions: Path, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); from solgen.__main__ import main; main()"
    result = run(sys.executable, "-P", "-c", program, "presets", "list", cwd=tmp_path)
    # `-c` leaves the program's own arguments in sys.argv[1:].
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("demo ")


def test_module_and_torchrun_start_the_command_line() -> None:
    module = run(sys.executable, "-m", "solgen", "presets", "list")
    assert module.returncode == 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    torchrun = run(*launcher, "-m", "solgen", "presets", "list")
    assert torchrun.returncode == 0, torchrun.stderr
    assert torchrun.stdout == module.stdout
