"""`solgen profile` as a user types and sees it."""

import json
from pathlib import Path

import pytest

from tests.command_line import solgen

DEMO = ("--preset", "demo", "-p", "a ball")
PROFILE = ("profile", "--preset", "demo", "--width", "64", "--height", "64", "--steps", "1", "--dummy-weights")


def test_profile_shows_a_table_and_json_alone_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("--attention", "stock,dense,sol-attn2", "--text-rows", "5", "--runs", "1")
    assert solgen(*PROFILE, *arguments) == 0
    shown = capsys.readouterr().out
    assert all(
        word in shown for word in ("stock", "QKV and out projections", "unattributed", "peak memory", "rows 567")
    )
    assert solgen(*PROFILE, *arguments, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [arm["name"] for arm in report["arms"]] == ["stock", "dense", "sol-attn2"]
    assert all(row["name"] in shown for row in report["arms"][0]["modules"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("generate", [*DEMO, "--dummy-weights"], "no option --dummy-weights; it belongs to solgen profile"),
        ("profile", ["--preset", "demo", "--attention", "dense,dense"], "lists 'dense' twice"),
        ("profile", ["--preset", "demo", "--text-rows", "4"], "goes with --dummy-weights"),
        ("profile", ["--preset", "demo", "--dummy-weights", "--lora", "a/b/c"], "leave --lora out"),
        ("profile", ["--preset", "demo", "--dummy-weights", "--set", "attention.dense=cudnn"], "needs cuDNN"),
        ("profile", ["--preset", "demo", "--attention", ""], "got ''"),
        (
            "profile",
            ["--preset", "demo", "--dummy-weights", "--trace", "."],
            "--trace . cannot be written: it is a folder",
        ),
        ("profile", ["--preset", "demo", "--plot", "x.foo"], "--plot x.foo: unknown kind of picture"),
        (
            "profile",
            ["--preset", "demo", "--dummy-weights", "--plot", "/dev/null/a.png"],
            "cannot be written: not a dir",
        ),
    ],
)
def test_profile_refuses_in_one_line(command: str, arguments: list[str], message: str, refused) -> None:
    code = 1 if "cuDNN" in message else 2
    assert message in refused(*arguments, command=command, code=code)
