"""What a user types and sees: help, errors in one line, exit codes, nothing written."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.main import get_command

from solgen import __version__
from solgen.__main__ import FOREIGN_OPTIONS
from solgen.cli import app
from solgen.presets.demo import demo_model_path
from tests.command_line import solgen

HEAVY = ("torch", "diffusers", "transformers", "triton", "numpy")


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["--version"], ["presets", "list"]])
def test_light_commands_import_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom solgen.__main__ import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.rstrip().endswith("HEAVY []")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert solgen("--version") == 0
    assert capsys.readouterr().out == f"solgen {__version__}\n"


def test_every_option_is_explained() -> None:
    for name, command in get_command(app).commands.items():
        for parameter in getattr(command, "params", []):
            if parameter.name != "help" and parameter.opts[0].startswith("-"):
                assert parameter.help, f"solgen {name} {parameter.opts}"


def test_presets_show_prints_what_json_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert solgen("presets", "show", "1080p15", "--json") == 0
    table = json.loads(capsys.readouterr().out)
    assert (table["canvas"], table["output"]["crop"]) == (
        {"width": 1920, "height": 1088, "num_frames": 362},
        1080,
    )
    assert solgen("presets", "show", "1080p15") == 0
    assert "attention.epsilon = 0.2127\n" in capsys.readouterr().out


@pytest.mark.parametrize("option", sorted(FOREIGN_OPTIONS))
def test_options_of_other_tools_name_ours(option: str, refused) -> None:
    ours = FOREIGN_OPTIONS[option].split()[0]
    assert ours in refused(option, "1")
    assert any(ours in parameter.opts for parameter in get_command(app).commands["generate"].params)


DEMO = ("--preset", "demo", "-p", "a ball")

BAD = {
    "no prompt": (["--preset", "demo"], "no prompt"),
    "empty prompt": (["--preset", "demo", "-p", ""], "the prompt is empty"),
    "blank prompt": (["--preset", "demo", "-p", " \n\t"], "the prompt is empty"),
    "long prompt": (["--preset", "demo", "-p", "x" * 7001], "7,001 characters; the limit is 7,000"),
    "both prompts": ([*DEMO, "--prompt-file", "p.txt"], "--prompt and --prompt-file"),
    "missing prompt file": (
        ["--preset", "demo", "--prompt-file", "p.txt"],
        "cannot read --prompt-file p.txt",
    ),
    "width": ([*DEMO, "--width", "300"], "width 300 is not a multiple of 32; use 288 or 320"),
    "height": ([*DEMO, "--height", "1000"], "height 1000 is not a multiple of 32; use 992 or 1024"),
    "aspect": ([*DEMO, "--width", "1280", "--height", "256"], "1:4 to 4:1"),
    "frames": ([*DEMO, "--num-frames", "130"], "the nearest are 124 or 141"),
    "few frames": ([*DEMO, "--num-frames", "107"], "124"),
    "many frames": ([*DEMO, "--num-frames", "379"], "345 or 362"),
    "short": ([*DEMO, "--seconds", "4.9"], "outside 5 to 15.1"),
    "long": ([*DEMO, "--seconds", "15.2"], "outside 5 to 15.1"),
    "both lengths": ([*DEMO, "--seconds", "5", "--num-frames", "124"], "give one"),
    "missing image": ([*DEMO, "--image", "a.png"], "cannot read image 'a.png'"),
    "missing reference": ([*DEMO, "--reference", "video:a.mp4"], "a.mp4"),
    "reference form": ([*DEMO, "--reference", "a.png"], "expected TYPE:PATH"),
    "sound alone": ([*DEMO, "--reference", "audio:a.wav"], "sound cannot be the only reference"),
    "image and reference": ([*DEMO, "--image", "a.png", "--reference", "image:b.png"], "different tasks"),
    "task without media": ([*DEMO, "--task", "fl2va"], "takes --image or --last-image"),
    "unknown task": ([*DEMO, "--task", "i2v"], "unknown task 'i2v'"),
    "unknown preset": (["--preset", "1080p", "-p", "x"], "did you mean '1080p15'?"),
    "unknown key": ([*DEMO, "--set", "attention.epsilom=1"], "did you mean 'attention.epsilon'?"),
    "bad value": ([*DEMO, "--set", "attention.offset=9"], "attention.offset"),
    "bad set": ([*DEMO, "--set", "attention"], "expected table.key=value"),
    "lora mode": ([*DEMO, "--lora-mode", "fuse"], "lora.mode: Input should be 'merge' or 'branch', got 'fuse'"),
    "missing adapter": ([*DEMO, "--lora", "a.safetensors:0.5"], "--lora 'a.safetensors:0.5': no such file"),
    "unknown backend": ([*DEMO, "--attention", "flash"], "'sol-attn2', 'sol-attn1', 'block-sparse', 'fp8' or 'dense'"),
    "two thresholds": ([*DEMO, "--epsilon", "0.5", "--density", "0.1"], "give one"),
    "density": ([*DEMO, "--density", "1.5"], "attention.density"),
    "steps": ([*DEMO, "--steps", "0"], "sampler.steps"),
    "no such folder": ([*DEMO, "-o", "nowhere/clip.mp4"], "output folder nowhere does not exist"),
    "suffix": ([*DEMO, "-o", "clip.mov"], "ending in .mp4"),
    "text preset with image": (["--preset", "5s", "-p", "x", "--image", "a.png"], "hyperflow-5s"),
    "outputs": ([*DEMO, "--num-outputs", "0"], "expected 1 or more"),
    "no such model": ([*DEMO, "--model", "./nowhere"], "no such folder"),
    "kernels that need a GPU": ([*DEMO, "--set", "attention.impl=triton"], "attention.impl triton runs on a CUDA GPU"),
    "a block beyond the model": ([*DEMO, "--set", "attention.dense_blocks=6"], "the model has blocks 0-5"),
    "blocks that do not exist": ([*DEMO, "--set", "attention.dense_blocks=x"], "attention.dense_blocks"),
    "not an option": (["--frobnicate"], "--frobnicate"),
    "not a number": ([*DEMO, "--steps", "four"], "'--steps': Input should be a valid integer"),
    "config": ([*DEMO, "--config", "missing.toml"], "cannot read missing.toml"),
    "a crop beyond the canvas": (
        [*DEMO, "--width", "64", "--height", "64", "--set", "output.crop=66"],
        "output.crop 66 is beyond the canvas height 64; add --set output.crop=off",
    ),
    "a crop of a taller preset": (
        ["--preset", "hyperflow-1080p15", "-p", "x", "--height", "736"],
        "output.crop 1080 is beyond the canvas height 736; add --set output.crop=off",
    ),
    "no crop": ([*DEMO, "--set", "output.crop=0"], "output.crop: Input should be greater than 0"),
    "no density": ([*DEMO, "--density", "0"], "attention.density: Input should be greater than 0, got 0.0"),
    "epsilon nan": ([*DEMO, "--epsilon", "nan"], "command line: attention.epsilon: expected a finite number"),
    "epsilon inf": ([*DEMO, "--set", "attention.epsilon=-inf"], "attention.density=1 keeps every block"),
    "seconds nan": ([*DEMO, "--seconds", "nan"], "outside 5 to 15.1"),
    "two shares": (
        [*DEMO, "--density", "0.1", "--set", "attention.top_k=0.1"],
        "density and top_k both set the share of kept blocks; give one",
    ),
    "a large seed": ([*DEMO, "--seed", str(2**63)], f"seed {2**63} is outside 0 to {2**63 - 1}"),
    "a large last seed": ([*DEMO, "--seed", str(2**63 - 1), "--num-outputs", "2"], f"seed {2**63} is outside"),
    "a key below a value": (
        [*DEMO, "--set", "canvas=3", "--set", "canvas.width=64"],
        "--set 'canvas.width=64': canvas is set to '3' already",
    ),
    "a value for a table": ([*DEMO, "--set", "sampler=3"], "--set: sampler: expected a table, got '3'"),
    "a value for a table that an adapter reads": (["-p", "x", "--set", "sampler=3"], "sampler: expected a table"),
    "a prompt in Latin-1": (["--preset", "demo", "-p", "caf\udce9"], "the prompt is not valid Unicode at character 4"),
    "an output in Latin-1": ([*DEMO, "-o", "caf\udce9.mp4"], "--output 'caf\\udce9.mp4' is not valid Unicode"),
    "an image in Latin-1": ([*DEMO, "--image", "caf\udce9.png"], "--image 'caf\\udce9.png' is not valid Unicode"),
    "a model in Latin-1": ([*DEMO, "--model", "caf\udce9"], "--model 'caf\\udce9' is not valid Unicode"),
    "an empty output": ([*DEMO, "-o", ""], "--output is empty"),
    "an empty image": ([*DEMO, "--image", ""], "--image is empty"),
    "a name beyond the file system": ([*DEMO, "-o", "x" * 251 + ".mp4"], "File name too long"),
    "calls that the preset fixes": (
        ["--preset", "hyperflow-5s", "-p", "x", "--set", "adapter=off", "--steps", "4"],
        "command line: sampler: positions holds 9 levels; 4 steps need 5; presets/hyperflow-5s.toml fixes the calls, "
        "--set sampler.positions=off frees them",
    ),
    "an empty level": ([*DEMO, "--set", "sampler.positions=1,,0"], "--set: sampler.positions.1: "),
    "a task of the preset": ([*DEMO, "--set", "tasks=x"], "--set: tasks.0: "),
    "half an adapter": ([*DEMO, "--set", "adapter.repo=x"], "--set: adapter.file: is missing; set it too"),
    "no file to resume": ([*DEMO, "--resume"], "--resume needs --seed, or an --output whose record names it"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line(case: str, refused) -> None:
    arguments, expected = BAD[case]
    assert expected in refused(*arguments)


def test_a_name_as_long_as_the_file_system_allows_is_accepted(tmp_path: Path, refused) -> None:
    assert "no such folder" in refused(*DEMO, "--model", "./nowhere", "-o", "x" * 250 + ".mp4")
    assert "File name too long" in refused(*DEMO, "-o", "é" * 126 + ".mp4")


@pytest.mark.parametrize(
    "arguments",
    [["--width", "300"], ["--image", "a.png"], ["--reference", "video:a.mp4"], ["-o", "nowhere/clip.mp4"]],
    ids=" ".join,
)
def test_refusals_come_fast_and_load_no_weights(arguments: list[str], tmp_path: Path) -> None:
    program = (
        "import sys\nfrom solgen.__main__ import main\n"
        f"try:\n    main(['generate', '--preset', 'demo', '-p', 'x', *{arguments!r}])\n"
        "except SystemExit as stop:\n    assert stop.code == 2\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.png", b""), ("a.png", b"not a picture"), ("a.jpg", b"\xff\xd8\xff\xe0broken")],
    ids=["empty", "text", "cut"],
)
def test_undecodable_keyframes_are_refused(name: str, content: bytes, tmp_path: Path, refused) -> None:
    (tmp_path / name).write_bytes(content)
    assert f"cannot read image '{name}'" in refused(*DEMO, "--image", name)


def test_too_many_references_are_refused(refused) -> None:
    ten = [part for _ in range(10) for part in ("--reference", "image:a.png")]
    assert "10 image references; the limit is 9" in refused(*DEMO, *ten)
    four = [part for _ in range(4) for part in ("--reference", "audio:a.wav")]
    assert "4 audio references; the limit is 3" in refused(*DEMO, "--reference", "image:a.png", *four)


def test_existing_files_are_refused_and_kept(tmp_path: Path, refused) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"mine")
    assert "clip.mp4 exists" in refused(*DEMO, "-o", "clip.mp4")
    (tmp_path / "other.json").write_text("{}")
    assert "other.json exists" in refused(*DEMO, "-o", "other.mp4")
    (tmp_path / "dangling.mp4").symlink_to("nowhere")
    assert "dangling.mp4 exists" in refused(*DEMO, "-o", "dangling.mp4")


@pytest.mark.parametrize("suffix", [".mp4", ".json"])
def test_a_folder_in_the_way_is_refused(suffix: str, tmp_path: Path, refused) -> None:
    (tmp_path / f"clip{suffix}").mkdir()
    for flags in ([], ["--overwrite"], ["--resume"]):
        assert f"clip{suffix} is a folder" in refused(*DEMO, "-o", "clip.mp4", *flags)


def test_an_unwritable_folder_is_refused(tmp_path: Path, refused) -> None:
    # /proc is read-only even for root, whom permission bits do not stop.
    assert "cannot write to output folder /proc" in refused(*DEMO, "-o", "/proc/clip.mp4")
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot write to output folder loop" in refused(*DEMO, "-o", "loop/clip.mp4")
    (tmp_path / "file").touch()
    assert "cannot write to output folder file" in refused(*DEMO, "-o", "file/clip.mp4")


@pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not stop root")
def test_a_locked_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from solgen.engine.naming import check_name
    from solgen.errors import InputError

    (tmp_path / "locked").mkdir(mode=0)
    with pytest.raises(InputError, match="Permission denied"):
        check_name(tmp_path / "locked" / "clip.mp4", overwrite=False, resume=False)


def test_prompt_files_that_cannot_be_read_are_refused(tmp_path: Path, refused) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "not UTF-8" in refused("--preset", "demo", "--prompt-file", "latin.txt")
    (tmp_path / "empty.txt").write_text("\n \r\n")
    assert "holds no prompt" in refused("--preset", "demo", "--prompt-file", "empty.txt")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "colour": "red"}\n')
    assert "line 2: unknown key 'colour'" in refused("--preset", "demo", "--prompt-file", "rows.jsonl")
    (tmp_path / "types.jsonl").write_text('{"prompt": "a", "steps": "many"}\n')
    assert "line 1: steps" in refused("--preset", "demo", "--prompt-file", "types.jsonl")


@pytest.mark.parametrize("preset", ["5s", "base-5s", "hyperflow-1080p15"])
def test_a_gpu_preset_without_a_gpu_says_so(preset: str, refused) -> None:
    assert "no CUDA GPU found" in (line := refused("--preset", preset, "-p", "x", code=1))
    assert "--preset demo" in line


def test_a_preset_whose_adapter_cannot_be_found_is_refused(refused) -> None:
    adapter = ["--set", "adapter.repo=./somewhere", "--set", "adapter.file=a.safetensors"]
    assert "adapter ./somewhere/a.safetensors: no such local file" in refused(*DEMO, *adapter)


def test_a_prompt_beyond_the_conditioners_context_is_counted_and_refused(refused, tmp_path: Path) -> None:
    """The limit is the model's own, read from its files before its weights are."""
    model = shutil.copytree(demo_model_path(), tmp_path / "model")
    path = model / "text_encoder" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["max_position_embeddings"] = 3
    path.write_text(json.dumps(config))
    line = refused("--preset", "demo", "--model", str(model), "-p", "one two three four five six seven eight nine")
    assert "reads 3. Shorten it" in line


def test_odd_prompts_never_reach_a_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from solgen.engine.batch import plan_jobs
    from solgen.engine.request import Options

    monkeypatch.chdir(tmp_path)
    for prompt in ("汉" * 120, "🎈🎈", "a/b\nc", "-rf ..", "x" * 7000):
        (job,) = plan_jobs(
            Options(prompt=prompt, preset="demo"),
            prompt_file=None,
            num_outputs=1,
            seed=5,
            overwrite=False,
            resume=False,
        )
        assert job.output == Path("solgen-demo-5.mp4")
        assert job.request.prompt == prompt


def test_start_up_imports_little() -> None:
    program = "import json, sys, solgen.cli; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"pydantic", "PIL", "imageio_ffmpeg", "huggingface_hub"} & set(json.loads(result.stdout))


def test_keyframes_choose_the_canvas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from solgen.engine.request import Options, resolve

    picture = tmp_path / "tall.png"
    Image.fromarray(np.zeros((320, 180, 3), dtype=np.uint8)).save(picture)
    request = resolve(Options(prompt="x", preset="hyperflow-5s", image=str(picture), seed=0), seed=0)
    assert (request.preset.canvas.width, request.preset.canvas.height) == (736, 1312)
    assert request.notes == ("canvas 736x1312 from tall.png (180x320)",)
    fixed = resolve(Options(prompt="x", preset="hyperflow-5s", image=str(picture), width=768, height=768), seed=0)
    assert (fixed.preset.canvas.width, fixed.preset.canvas.height) == (768, 768)
    sets = ("canvas.width=768", "canvas.height=768")
    assert resolve(Options(prompt="x", preset="hyperflow-5s", image=str(picture), sets=sets), seed=0) == fixed


def test_a_keyframes_canvas_has_no_crop_but_its_own(tmp_path: Path) -> None:
    from solgen.engine.request import Options, resolve

    picture = tmp_path / "tall.png"
    Image.fromarray(np.zeros((320, 180, 3), dtype=np.uint8)).save(picture)
    given = {"prompt": "x", "preset": "hyperflow-1080p15", "image": str(picture), "seed": 0}
    preset = resolve(Options(**given), seed=0).preset
    assert (preset.canvas.height, preset.output.crop) == (1920, None)
    assert resolve(Options(**given, sets=("output.crop=1900",)), seed=0).preset.output.crop == 1900


def test_a_keyframe_wants_both_sides_or_none(tmp_path: Path, refused) -> None:
    Image.fromarray(np.zeros((64, 64, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    for side in ("width", "height"):
        line = refused(*DEMO, "--image", "a.png", f"--{side}", "256")
        assert f"{side} alone beside a keyframe; give --width and --height, or neither" in line


@pytest.mark.parametrize("size", [[], ["--width", "256", "--height", "256"]])
@pytest.mark.parametrize("option", ["--image", "--last-image"])
def test_keyframes_beyond_the_aspect_ratios_are_refused(option: str, size: list[str], tmp_path: Path, refused) -> None:
    Image.fromarray(np.zeros((50, 201, 3), dtype=np.uint8)).save(tmp_path / "wide.png")
    assert "wide.png is 201x50; keyframes lie within" in refused(*DEMO, option, "wide.png", *size)


def test_every_option_is_one_that_a_config_takes_or_refuses_by_name() -> None:
    from solgen.engine.asked import COMMAND_ONLY, NAMES

    options = {parameter.name for parameter in get_command(app).commands["generate"].params} - {"help"}
    spelled = {"set_keys": "set", "as_json": "json"}
    assert {spelled.get(name, name) for name in options} == set(NAMES) | set(COMMAND_ONLY)
