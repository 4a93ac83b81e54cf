"""Several clips from one command: their seeds, names and overrides."""

import json
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


def test_lines_keep_the_names_that_they_give() -> None:
    lines = ('{"prompt": "a", "output": "a.mp4"}', '{"prompt": "b", "output": "b.mp4"}', '{"prompt": "c"}')
    Path("p.jsonl").write_text("\n".join(lines))
    assert names(jobs(Options(preset="demo"), "p.jsonl")) == ["a.mp4", "b.mp4", "solgen-demo-40.mp4"]
    assert names(jobs(Options(preset="demo", output="c.mp4"), "p.jsonl")) == ["a.mp4", "b.mp4", "c.mp4"]
    assert names(jobs(Options(preset="demo", output="./a.mp4"), "p.jsonl")) == ["a-0000.mp4", "b.mp4", "a-0001.mp4"]
    numbered = jobs(Options(preset="demo", output="c.mp4"), "p.jsonl", num_outputs=2)
    assert names(numbered) == [f"{name}-000{index}.mp4" for name in "abc" for index in (0, 1)]
    assert [job.request.seed for job in numbered] == [40, 41] * 3


def test_two_clips_never_share_a_name() -> None:
    lines = [f'{{"prompt": "x", "output": "{name}.mp4"}}' for name in ("a", "a", "a-0001")]
    Path("p.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match="p.jsonl line 3: a-0001.mp4 is the name of two clips"):
        jobs(Options(preset="demo"), "p.jsonl")


def test_home_is_spelled_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    home = tmp_path / "home"
    home.mkdir()
    (home / "c.toml").write_text('preset = "demo"\n')
    (home / "p.txt").write_text("a\n")
    (home / "a.png").write_bytes(b"x")
    found = jobs(Options(output="~/a.mp4", config=Path("~/c.toml")), "~/p.txt")
    assert names(found) == [str(home / "a.mp4")]
    (job,) = jobs(Options(prompt="x", preset="demo", reference=("image:~/a.png",)))
    assert job.request.references[0].path == home / "a.png"
    Path("p.jsonl").write_text('{"prompt": "a", "reference": ["image:~/a.png"]}\n')
    (job,) = jobs(Options(preset="demo"), "p.jsonl")
    assert job.request.references[0].path == home / "a.png"


def test_media_start_from_the_place_that_names_them() -> None:
    Path("rows").mkdir()
    for folder in (Path(), Path("rows")):
        (folder / "a.png").write_bytes(b"x")
    Path("rows/p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "reference": ["image:a.png"]}\n')
    first, second = jobs(Options(preset="demo", reference=("image:a.png",)), "rows/p.jsonl")
    assert first.request.references[0].path == Path("a.png")
    assert second.request.references[0].path == Path("rows/a.png")


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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "b", "width": 33}', "width 33"),
        ('{"prompt": "b", "seconds": 3}', "--seconds 3 is outside"),
        ('{"prompt": "b", "seed": -1}', "seed: .*got -1"),
        ('{"prompt": "b", "seed": true}', "seed: .*got true"),
        (f'{{"prompt": "b", "seed": {2**63}}}', "seed: .*less than"),
        (f'{{"prompt": "b", "seed": {"9" * 5000}}}', "is not JSON: Exceeds the limit"),
        ('{"prompt": "b", "reference": "image:a.png"}', "reference: expected a list, got 'image:a.png'"),
        (r'{"prompt": "\ud800"}', "the prompt is not valid Unicode"),
        (r'{"prompt": "b", "output": "\ud800.mp4"}', "is not valid Unicode"),
        (r'{"prompt": "b", "output": "\u0000.mp4"}', "has a NUL in it"),
        ('{"prompt": "b", "image": ""}', "--image is empty"),
        ('{"prompt": "b", "image": "a.png"}', "cannot read image 'a.png'"),
        ('{"prompt": "b", "output": "b.mov"}', "ending in .mp4"),
        ('{"prompt": "b", "output": "nowhere/b.mp4"}', "output folder nowhere does not exist"),
    ],
)
def test_what_is_wrong_in_a_line_names_file_and_line(line: str, message: str) -> None:
    Path("p.JSONL").write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(InputError, match=f"^p.JSONL line 2:? .*{message}") as refusal:
        jobs(Options(preset="demo"), "p.JSONL")
    assert str(refusal.value).count("p.JSONL") == 1
    assert "\n" not in str(refusal.value)


def test_a_lines_length_replaces_the_commands() -> None:
    Path("p.jsonl").write_text('{"prompt": "a", "seconds": 12}\n{"prompt": "b", "num_frames": 141}\n')
    for given in (Options(preset="demo", num_frames=362), Options(preset="demo", seconds=10)):
        first, second = jobs(given, "p.jsonl")
        assert first.request.preset.canvas.num_frames == 294
        assert second.request.preset.canvas.num_frames == 141
        assert [note for note in second.request.notes if "frames" in note] == []


def test_a_line_beats_set() -> None:
    Path("p.jsonl").write_text('{"prompt": "a", "steps": 2}\n{"prompt": "b"}\n')
    found = jobs(Options(preset="demo", sets=("sampler.steps=3",)), "p.jsonl")
    assert [job.request.preset.sampler.steps for job in found] == [2, 3]


def record(path: str, seed: object) -> None:
    Path(path).write_text(json.dumps({"request": {"seed": seed}}))


def test_resuming_takes_the_seed_of_the_record() -> None:
    unseeded = Options(prompt="x", preset="demo", output="a.mp4")
    assert jobs(unseeded, resume=True)[0].request.seed == 40
    record("a.json", 7)
    assert jobs(unseeded, resume=True)[0].request.seed == 7
    assert jobs(Options(prompt="x", preset="demo", output="a.mp4", seed=3), resume=True)[0].request.seed == 3
    record("a-0001.json", 9)
    assert [job.request.seed for job in jobs(unseeded, resume=True, num_outputs=3)] == [8, 9, 10]
    for damaged in (None, True, -4, "7"):
        record("a.json", damaged)
        assert jobs(unseeded, resume=True)[0].request.seed == 40
    Path("a.json").write_text("[")
    assert jobs(unseeded, resume=True)[0].request.seed == 40


def test_resuming_a_prompt_file_goes_on_with_the_seed_of_its_run() -> None:
    Path("p.txt").write_text("one\ntwo\n")
    record("a-0000.json", 7)
    found = jobs(Options(preset="demo", output="a.mp4"), "p.txt", resume=True)
    assert [job.request.seed for job in found] == [7, 7]


def test_resuming_default_names_needs_a_seed() -> None:
    Path("clips").mkdir()
    for output in (None, "clips", "clips/"):
        with pytest.raises(InputError, match="--resume needs --seed, or an --output whose record names it"):
            jobs(Options(prompt="x", preset="demo", output=output), resume=True)
        jobs(Options(prompt="x", preset="demo", output=output, seed=1), resume=True)
    Path("p.jsonl").write_text('{"prompt": "a", "seed": 3}\n')
    jobs(Options(preset="demo"), "p.jsonl", resume=True)


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
        ("stepz = 3", "c.toml: unknown key 'stepz'; did you mean 'steps'"),
        ('promt = "a"', "c.toml: unknown key 'promt'; did you mean 'prompt'"),
        ("num_outputs = 2", "c.toml: num_outputs works on the command line alone, as --num-outputs"),
        ("seed = -1", "c.toml: seed: .*got -1"),
        ("seed = true", "c.toml: seed: .*got true"),
        ("steps = 0", "c.toml: sampler.steps: .*got 0"),
        ("epsilon = nan", "c.toml: attention.epsilon: expected a finite number"),
        ("seconds = 3", "c.toml: --seconds 3 is outside"),
        ("canvas = 3", "c.toml: canvas: expected a table, got 3"),
        ('steps = "many"', "c.toml: steps: .*got 'many'"),
        ("[attention]\nepsilom = 1", "did you mean 'attention.epsilon'"),
        ("steps = ", "c.toml is not TOML"),
    ],
)
def test_config_errors_name_the_file(text: str, message: str) -> None:
    Path("c.toml").write_text(text)
    with pytest.raises(InputError, match=message):
        resolve(Options(prompt="x", preset="demo", config=Path("c.toml")), seed=0)


def test_an_unknown_key_is_told_before_the_prompt_that_it_may_have_meant() -> None:
    Path("c.toml").write_text('promt = "a"\n')
    with pytest.raises(InputError, match="did you mean 'prompt'"):
        resolve(Options(config=Path("c.toml")), seed=0)


def test_a_config_gives_every_option_of_a_clip() -> None:
    Path("rows").mkdir()
    Path("a.png").write_bytes(b"x")
    Path("c.toml").write_text(
        'prompt = "x"\npreset = "demo"\noutput = "a.mp4"\nseconds = 12\nseed = 3\nreference = ["image:a.png"]\n'
    )
    (job,) = jobs(Options(config=Path("c.toml")))
    assert (job.output, job.request.seed, job.request.preset.canvas.num_frames) == (Path("a.mp4"), 3, 294)
    (job,) = jobs(Options(config=Path("c.toml"), output="b.mp4", num_frames=141))
    assert (job.output, job.request.preset.canvas.num_frames) == (Path("b.mp4"), 141)
    Path("rows/p.txt").write_text("from the file\n")
    (job,) = jobs(Options(config=Path("c.toml")), "rows/p.txt")
    assert (job.output, job.request.prompt) == (Path("a.mp4"), "from the file")
    assert job.request.references[0].path == Path("a.png")


def test_epsilon_replaces_a_preset_density() -> None:
    request = resolve(Options(prompt="x", preset="demo", epsilon=1.0, sets=()), seed=0)
    assert request.preset.attention.density is None
    Path("c.toml").write_text("[attention]\ndensity = 0.1\n")
    request = resolve(Options(prompt="x", preset="demo", epsilon=1.0, config=Path("c.toml")), seed=0)
    assert (request.preset.attention.density, request.preset.attention.epsilon) == (None, 1.0)
