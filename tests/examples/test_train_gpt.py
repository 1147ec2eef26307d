"""The example as a user starts it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpt

REPO = Path(__file__).parents[2]
SCRIPT = REPO / "examples" / "train_gpt.py"
SHORT = ["--steps", "12", "--batch", "4", "--seq", "32", "--log-every", "4", "--validate-every", "6"]


def run(out: Path, *options: str, world: int = 1, status: int = 0, timeout: int = 110) -> list[str]:
    """Lines that training prints."""
    launcher = Path(sys.executable).with_name("shardcore-launch")
    program = [sys.executable] if world == 1 else [launcher, "--nproc-per-node", str(world)]
    result = subprocess.run(
        [*program, SCRIPT, "--out", out, *options], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert result.returncode == status, result.stdout + result.stderr
    return (result.stdout + result.stderr * bool(status)).splitlines()


def losses(lines: list[str]) -> list[float]:
    """The losses of the progress lines and the validations, in order."""
    return [float(match.group(1)) for line in lines if (match := re.search(r"/\d+  (?:val )?loss ([\d.]+)", line))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A short run of one process: where it left its results, and what it printed."""
    out = tmp_path_factory.mktemp("alone")
    return out, run(out, *SHORT, "--accumulation", "2")


def test_a_run_shows_what_it_does(alone: tuple[Path, list[str]]) -> None:
    out, lines = alone
    line = r"step +\d+/12  loss \d\.\d{3}  lr [\d.e+-]+  grad norm +[\d.]+  [\d,]+ tokens/s  memory [\d,]+ MiB per rank"
    assert len([text for text in lines if re.fullmatch(line, text)]) == 4
    assert len([text for text in lines if re.fullmatch(r"step +\d+/12  val loss \d\.\d{3}", text)]) == 2
    assert re.fullmatch(r"val loss \d\.\d\d", lines[-1])
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_saved_weights_are_an_ordinary_models(alone: tuple[Path, list[str]]) -> None:
    out, lines = alone
    model = gpt.GPT(gpt.PRESETS["small"])
    model.load_state_dict(torch.load(out / "model.pt", weights_only=True))
    untrained = gpt.GPT(gpt.PRESETS["small"])
    tokens = torch.tensor([list(b"    def __init__(self):\n        self")])
    loss = [torch.nn.functional.cross_entropy(m(tokens[:, :-1])[0], tokens[0, 1:]).item() for m in (model, untrained)]
    assert loss[0] < loss[1]
    assert losses(lines)[-1] < 5.3


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.full), 2, 3]
)
def test_ranks_and_stages_change_nothing(alone: tuple[Path, list[str]], tmp_path: Path, stage: int) -> None:
    out, lines = alone
    together = run(tmp_path, *SHORT, "--stage", str(stage), world=2)
    # Printed to three digits; the ranks sum the same numbers in another order.
    assert losses(together) == pytest.approx(losses(lines), abs=2e-3)
    saved = [torch.load(folder / "model.pt", weights_only=True) for folder in (out, tmp_path)]
    assert saved[0].keys() == saved[1].keys()
    for name, weight in saved[0].items():
        torch.testing.assert_close(saved[1][name], weight, rtol=0, atol=2e-4)


def test_the_engine_gives_what_the_loop_gives(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    lines = run(tmp_path, *SHORT[:2], *SHORT[4:], "--config", str(tmp_path / "ds.json"), world=2)
    assert re.fullmatch(r"val loss \d\.\d\d", lines[-1])
    assert losses(lines)[-1] < 5.3


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_quantised_travel_costs_less_than_a_percent_of_the_loss(tmp_path: Path) -> None:
    """200 steps of the main job at stage 3, in full and quantised: int8 gathers and int4 reductions."""
    config = json.loads((REPO / "examples" / "zero2.json").read_text())
    config["scheduler"]["params"]["total_num_steps"] = 200
    found = {}
    for name, keys in (
        ("full", {}),
        ("quantised", {"zero_quantized_weights": True, "zero_quantized_gradients": True}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps({**config, "zero_optimization": {"stage": 3, **keys}}))
        options = ["--steps", "200", "--validate-every", "100", "--config", str(tmp_path / f"{name}.json")]
        found[name] = losses(run(tmp_path / name, *options, world=2, timeout=900))
    assert found["quantised"] != found["full"]
    assert found["quantised"][-1] == pytest.approx(found["full"][-1], rel=0.01)


def test_the_readmes_configuration_is_one(tmp_path: Path) -> None:
    lines = run(tmp_path, "--steps", "2", "--seq", "32", "--config", str(REPO / "examples" / "zero2.json"))
    assert re.fullmatch(r"val loss \d\.\d\d", lines[-1])


LAMA, T5 = '{"model_type": "lama"}', '{"model_type": "t5", "num_layers": 1, "d_model": 8, "vocab_size": 256}'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "3", "--accumulation", "2"], "choose a multiple of 2"),
        (["--stage", "4"], "invalid choice"),
        (["--text", "no/such/place"], "no text in no/such/place"),
        (["--seq", "1000"], "longer than the model's context of 128"),
        (["--text", "examples/gpt.py", "--batch", "4096"], "too few for one batch"),
        (["--config", "ds.json", "--stage", "1"], "--stage and --config both given"),
        (["--config", "ds.json"], "--config ds.json: no such file"),
        (["--text", "tiny.txt"], "0 bytes for validation"),
        (["--hf", "nope.json"], "--hf nope.json: cannot be read: No such file"),
        (["--hf", "untyped.json"], 'expected a JSON object with "model_type"'),
        (["--hf", "tiny.txt"], "not valid JSON"),
        (["--hf", "list.json"], 'expected a JSON object with "model_type"'),
        (["--hf", "lama.json"], "Unrecognized model identifier: lama"),
        (["--hf", "t5.json"], "no model that continues text for model_type 't5'"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: list[str], message: str) -> None:
    files = {"tiny.txt": "a = 1\n", "untyped.json": "{}", "list.json": "[]", "lama.json": LAMA, "t5.json": T5}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    options = [str(tmp_path / option) if (tmp_path / option).exists() else option for option in options]
    command = [sys.executable, SCRIPT, "--out", tmp_path, *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPO)
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_hf_without_transformers_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    code = (
        "import runpy, sys; sys.modules['transformers'] = None; sys.path.insert(0, sys.argv[1]); sys.argv[:2] = ['x']; "
        "runpy.run_path(sys.path[0] + '/train_gpt.py', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, SCRIPT.parent, "--hf", tmp_path / "config.json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "pip install transformers" in result.stderr
    assert "Traceback" not in result.stderr


def test_hf_models_train_by_their_configuration(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 256, "num_key_value_heads": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    lines = run(tmp_path, *SHORT, "--hf", str(tmp_path / "config.json"), "--stage", "3", world=2)
    assert losses(lines)[-1] < losses(lines)[0]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_default_run_learns(tmp_path: Path) -> None:
    launcher = Path(sys.executable).with_name("shardcore-launch")
    command = [launcher, "--nproc-per-node", "2", SCRIPT, "--out", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=390, check=True)
    assert float(result.stdout.splitlines()[-1].removeprefix("val loss ")) < 1.85
