"""`PATH|REPO/FILE[@REVISION][:STRENGTH]`, and files of the Hub without a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from solgen.engine.adapters.source import Source, parse_sources

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owner/repo/a.safetensors", ("owner/repo", "a.safetensors", None, 1.0)),
        ("owner/repo/sub/a.safetensors:0.5", ("owner/repo", "sub/a.safetensors", None, 0.5)),
        ("owner/repo/a.safetensors@v1.0:-1", ("owner/repo", "a.safetensors", "v1.0", -1.0)),
        ("owner/repo/a.safetensors@refs/pr/3", ("owner/repo", "a.safetensors", "refs/pr/3", 1.0)),
    ],
)
def test_names_of_the_hub(text: str, expected: tuple) -> None:
    (source,) = parse_sources((text,))
    assert (source.repo, source.file, source.revision, source.strength) == expected
    assert source.path is None


def test_local_files_win_and_may_hold_colons_and_ats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    odd = tmp_path / "owner" / "repo" / "a:b@c.safetensors"
    odd.parent.mkdir(parents=True)
    odd.touch()
    for text, strength in (("owner/repo/a:b@c.safetensors", 1.0), ("owner/repo/a:b@c.safetensors:0.25", 0.25)):
        assert parse_sources((text,)) == (
            Source("owner/repo/a:b@c.safetensors", strength, path=Path("owner/repo/a:b@c.safetensors")),
        )
    assert parse_sources(("owner/repo",))[0].path == Path("owner/repo/a:b@c.safetensors")


def fetch(text: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the Hub's library reads its environment once."""
    program = (
        "import sys\nfrom solgen.engine.adapters.source import fetch, parse_sources\n"
        "from solgen.errors import SolgenError\n"
        "try:\n    print(fetch(parse_sources((sys.argv[1],))[0]))\n"
        "except SolgenError as error:\n    sys.exit(f'{error.exit_code}: {error}')\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cache), "HF_HUB_CACHE": str(cache / "hub")}
    command = [sys.executable, "-c", program, text]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def test_offline_a_cached_file_is_found_and_a_missing_one_says_so(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--somebody--adapters" / "snapshots" / ("0" * 40)
    (snapshot.parents[1] / "refs").mkdir(parents=True)
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    (snapshot / "sub").mkdir(parents=True)
    (snapshot / "sub" / "a.safetensors").touch()
    assert fetch("somebody/adapters/sub/a.safetensors:0.5", tmp_path).stdout.strip() == str(
        snapshot / "sub" / "a.safetensors"
    )
    missing = fetch("somebody/adapters/b.safetensors", tmp_path)
    assert missing.stderr.startswith("1: adapter somebody/adapters/b.safetensors is not in the Hub cache")
    assert missing.stderr.count("\n") == 1
