"""An adapter's terms become the preset's; a flag that contradicts them is refused in one sentence with both values."""

import subprocess
import sys
from pathlib import Path

import pytest

from solgen.engine.adapters.contract import read_contract
from solgen.engine.adapters.known import KNOWN, find_known
from solgen.engine.adapters.source import Source
from solgen.engine.request import Options, resolve
from solgen.errors import InputError
from solgen.presets.schema import load_preset

INSIST = ("lora.ignore_contract=true",)


def resolved(*loras: Path | str, preset: str = "demo", sets: tuple[str, ...] = (), **options):
    given = Options(prompt="x", preset=preset, lora=tuple(map(str, loras)), sets=sets, **options)
    return resolve(given, seed=0)


def test_a_header_sets_calls_levels_and_shifts(hyperflow) -> None:
    request = resolved(hyperflow())
    sampler = request.preset.sampler
    assert (sampler.steps, sampler.positions) == (3, (1.0, 0.6, 0.25, 0.0))
    assert (sampler.video_shift, sampler.audio_shift) == (10.0, 2.0)
    assert any("3 denoiser calls, video shift 10, audio shift 2, t2va/fl2va/ref2va" in n for n in request.notes)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"steps": 8}, "sampler.steps 3, command line says 8"),
        ({"sets": ("sampler.video_shift=6",)}, "sampler.video_shift 10, --set says 6"),
        ({"sets": ("sampler.positions=1,0.5,0.2,0",)}, "sampler.positions 1, 0.6, 0.25, 0, --set says 1, 0.5, 0.2, 0"),
        ({"sets": ("sampler.video_sigmas=1,0.5,0.2,0",)}, "sampler.video_sigmas off, --set says 1, 0.5, 0.2, 0"),
    ],
)
def test_a_flag_that_contradicts_is_refused_with_both_values(options, expected: str, hyperflow) -> None:
    with pytest.raises(InputError, match=expected) as refusal:
        resolved(hyperflow(), **options)
    assert "lora.ignore_contract=true" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_config_file_is_a_flag_too(hyperflow, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[sampler]\nsteps = 5\n")
    with pytest.raises(InputError, match="mine.toml says 5"):
        resolved(hyperflow(), config=tmp_path / "mine.toml")


def test_flags_that_agree_are_welcome(hyperflow) -> None:
    request = resolved(hyperflow(), steps=3, sets=("sampler.positions=1.0,0.6,0.25,0", "sampler.video_shift=10"))
    assert request.preset.sampler.positions == (1.0, 0.6, 0.25, 0.0)


def test_insisting_lets_the_flag_win_and_keeps_the_rest(hyperflow) -> None:
    sampler = resolved(hyperflow(), steps=8, sets=INSIST).preset.sampler
    assert (sampler.steps, sampler.positions, sampler.video_shift) == (8, None, 10.0)
    sampler = resolved(hyperflow(), sets=(*INSIST, "sampler.video_shift=6")).preset.sampler
    assert (sampler.steps, sampler.positions, sampler.video_shift) == (3, (1.0, 0.6, 0.25, 0.0), 6.0)


def test_the_presets_own_adapter_binds_too() -> None:
    with pytest.raises(InputError, match=r"FastVideo.* was made for sampler.steps 4, command line says 8"):
        resolved(preset="5s", steps=8)
    assert resolved(preset="5s", steps=8, sets=INSIST).preset.sampler.positions is None
    assert resolved(preset="5s", steps=8, sets=("adapter=off", "sampler.positions=off")).preset.adapter is None


def test_adapters_that_disagree_are_refused(hyperflow) -> None:
    with pytest.raises(InputError, match=r"FastVideo/.* was made for sampler.steps 4, .*hyperflow.safetensors for 3"):
        resolved(hyperflow(), preset="5s")
    resolved(hyperflow(), preset="5s", sets=INSIST)


def test_strength_zero_has_no_terms(hyperflow) -> None:
    assert resolved(f"{hyperflow()}:0").preset == resolved().preset


def test_a_plain_adapter_has_no_terms(write) -> None:
    assert resolved(write(), steps=2).preset.sampler.steps == 2


def test_a_task_outside_the_contract_is_refused(hyperflow, opened) -> None:
    opened(hyperflow(), task="ref2va")
    path = hyperflow("text.safetensors", tasks='["t2va"]')
    with pytest.raises(InputError, match=r"text.safetensors was made for t2va, these inputs are fl2va"):
        opened(path, task="fl2va")
    opened(path, task="fl2va", ignore_contract=True)


def test_tensors_named_after_the_reference_partition_are_for_ref2va(write, opened) -> None:
    def change(tensors) -> None:
        for key in list(tensors):
            tensors[key.replace("transformer.", "transformer_ref.", 1)] = tensors.pop(key)

    path = write(change=change)
    assert opened(path, task="ref2va").adapters
    with pytest.raises(InputError, match="made for ref2va"):
        opened(path)


@pytest.mark.parametrize("name", ["5s", "12s", "1080p15", "hyperflow-5s", "hyperflow-12s", "hyperflow-1080p15"])
def test_presets_keep_the_terms_of_their_adapters(name: str) -> None:
    preset = load_preset(name)
    assert preset.adapter is not None
    source = Source("", repo=preset.adapter.repo, file=preset.adapter.file)
    contract = read_contract("", None, find_known(source, None))
    assert (contract.steps, contract.positions) == (preset.sampler.steps, preset.sampler.positions)
    assert (contract.video_shift, contract.audio_shift) == (preset.sampler.video_shift, preset.sampler.audio_shift)
    assert contract.tasks == preset.tasks


@pytest.mark.parametrize(
    ("file", "alpha", "shift", "steps", "tasks"),
    [
        ("minimax_h3_fl2v_turbo_4step_v0.1.safetensors", 8, 12, 4, ("t2va", "fl2va")),
        ("minimax_h3_fl2v_turbo_4step_v1.0_768p_comfyui_bf16.safetensors", 128, 6, 4, ("t2va", "fl2va")),
        ("minimax_h3_fl2v_turbo_4step_v1.2_768p_bf16.safetensors", 8, 6, 4, ("t2va", "fl2va")),
        ("minimax_h3_fl2v_turbo_8step_v1.0_bf16.safetensors", 8, 12, 8, ("t2va", "fl2va")),
        ("minimax_h3_fl2v_turbo_8step_v1.0_768p_bf16.safetensors", 8, 6, 8, ("t2va", "fl2va")),
        ("minimax_h3_ref2v_turbo_4step_v0.1_bf16.safetensors", 8, 12, 4, ("ref2va",)),
        ("minimax_h3_ref2v_turbo_8step_v1.0_768p_bf16.safetensors", 8, 6, 8, ("ref2va",)),
    ],
)
def test_published_turbo_files_are_known_by_name(file: str, alpha, shift, steps, tasks) -> None:
    known = find_known(Source("", repo="lightx2v/Minimax-h3-Turbo", file=file), None)
    assert known is not None
    assert (known.alpha, known.rank, known.video_shift, known.audio_shift) == (alpha, 128, shift, 3)
    assert (known.steps, known.positions, known.tasks) == (steps, None, tasks)
    assert sum(known == other for other in KNOWN) == 1


def test_terms_are_found_without_torch(hyperflow, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom solgen.engine.request import Options, resolve\n"
        f"resolve(Options(prompt='x', preset='demo', lora=({str(hyperflow())!r},)), seed=0)\n"
        "print([name for name in ('torch', 'diffusers', 'safetensors') if name in sys.modules])"
    )
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
