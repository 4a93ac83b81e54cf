"""Several clips from one command: their seeds, names and overrides."""

from pathlib import Path

import pytest

from solgen.engine.batch import Job, plan_jobs
from solgen.engine.request import Options, resolve
from solgen.errors import InputError


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def jobs(options: Options | None = None, prompt_file: str | None = None, **rest) -> list[Job]:
    given = {"num_outputs": 1, "seed": 40, "overwrite": False, "resume": False} | rest
    options = options or Options(prompt=None if prompt_file else "x", preset="demo")
    return plan_jobs(options, prompt_file=Path(prompt_file) if prompt_file else None, **given)


def names(found: list[Job]) -> list[str]:
    return [str(job.output) for job in found]


def test_default_names_take_the_next_free_number() -> None:
    assert names(jobs()) == ["solgen-demo-40.mp4"]
    Path("solgen-demo-40.mp4").touch()
    assert names(jobs()) == ["solgen-demo-40-2.mp4"]
    Path("solgen-demo-40-2.json").touch()
    assert names(jobs()) == ["solgen-demo-40-3.mp4"]
    assert names(jobs(overwrite=True)) == ["solgen-demo-40.mp4"]


def test_outputs_count_seeds_up() -> None:
    found = jobs(Options(prompt="x", preset="demo", seed=5), num_outputs=3)
    assert [job.request.seed for job in found] == [5, 6, 7]
    assert names(found) == ["solgen-demo-5.mp4", "solgen-demo-6.mp4", "solgen-demo-7.mp4"]


def test_a_chosen_seed_is_told() -> None:
    assert jobs()[0].request.notes == ("seed 40",)
    assert jobs(Options(prompt="x", preset="demo", seed=5))[0].request.notes == ()


def test_a_given_name_is_numbered_in_a_batch_alone() -> None:
    assert names(jobs(Options(prompt="x", preset="demo", output="a.mp4"))) == ["a.mp4"]
    numbered = jobs(Options(prompt="x", preset="demo", output="a.mp4"), num_outputs=2)
    assert names(numbered) == ["a-0000.mp4", "a-0001.mp4"]


def test_a_folder_takes_default_names() -> None:
    Path("clips").mkdir()
    assert names(jobs(Options(prompt="x", preset="demo", output="clips"))) == ["clips/solgen-demo-40.mp4"]
    with pytest.raises(InputError, match="output folder missing does not exist"):
        jobs(Options(prompt="x", preset="demo", output="missing/"))


def test_a_prompt_file_with_bom_and_crlf() -> None:
    Path("p.txt").write_bytes("\ufeffa red ball\r\n\r\n汉字 🎈\r\n".encode())
    assert [job.request.prompt for job in jobs(prompt_file="p.txt")] == ["a red ball", "汉字 🎈"]
    assert names(jobs(prompt_file="p.txt")) == ["solgen-demo-40.mp4", "solgen-demo-40-2.mp4"]


def test_jsonl_lines_override_the_command() -> None:
    Path("p.jsonl").write_text('{"prompt": "a", "seed": 3, "width": 320}\n{"prompt": "b", "steps": 2}\n')
    first, second = jobs(Options(preset="demo", width=64, height=256), prompt_file="p.jsonl")
    assert (first.request.seed, first.request.preset.canvas.width, first.request.preset.sampler.steps) == (
        3,
        320,
        4,
    )
    assert (second.request.seed, second.request.preset.canvas.width, second.request.preset.sampler.steps) == (
        40,
        64,
        2,
    )


def test_one_bad_line_refuses_the_batch() -> None:
    Path("p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "width": 33}\n')
    with pytest.raises(InputError, match="width 33"):
        jobs(Options(preset="demo"), prompt_file="p.jsonl")


def test_seconds_round_up_and_say_so() -> None:
    (job,) = jobs(Options(prompt="x", preset="demo", seconds=12.0, seed=1))
    assert job.request.preset.canvas.num_frames == 294
    assert job.request.notes == ("12 s -> 294 frames (12.25 s)",)
    for seconds, frames in ((5.0, 124), (15.0, 362), (15.1, 362)):
        (job,) = jobs(Options(prompt="x", preset="demo", seconds=seconds))
        assert job.request.preset.canvas.num_frames == frames


def test_command_line_beats_config_beats_preset() -> None:
    Path("c.toml").write_text(
        'preset = "demo"\nseed = 9\nsteps = 3\nprompt = "from file"\n[attention]\nepsilon = 0.3\noffset = 5\n'
    )
    request = resolve(Options(config=Path("c.toml")), seed=0)
    assert (request.prompt, request.seed, request.preset.sampler.steps) == ("from file", 9, 3)
    assert (request.preset.attention.epsilon, request.preset.attention.offset) == (0.3, 5)
    request = resolve(Options(config=Path("c.toml"), prompt="typed", epsilon=0.9, sets=("attention.offset=2",)), seed=0)
    assert (request.prompt, request.preset.attention.epsilon, request.preset.attention.offset) == (
        "typed",
        0.9,
        2,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz = 3", "c.toml: unknown key 'stepz'"),
        ('steps = "many"', "c.toml: steps: .*got 'many'"),
        ("[attention]\nepsilom = 1", "did you mean 'attention.epsilon'"),
        ("steps = ", "c.toml is not TOML"),
    ],
)
def test_config_errors_name_the_file(text: str, message: str) -> None:
    Path("c.toml").write_text(text)
    with pytest.raises(InputError, match=message):
        resolve(Options(prompt="x", preset="demo", config=Path("c.toml")), seed=0)


def test_epsilon_replaces_a_preset_density() -> None:
    request = resolve(Options(prompt="x", preset="demo", epsilon=1.0, sets=()), seed=0)
    assert request.preset.attention.density is None
    Path("c.toml").write_text("[attention]\ndensity = 0.1\n")
    request = resolve(Options(prompt="x", preset="demo", epsilon=1.0, config=Path("c.toml")), seed=0)
    assert (request.preset.attention.density, request.preset.attention.epsilon) == (None, 1.0)
