"""The plain torch parts of the example: text, model, schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gpt
import text
import train_gpt


@pytest.fixture
def model() -> gpt.GPT:
    torch.manual_seed(0)
    return gpt.GPT(gpt.GPTConfig(dim=32, num_layers=2, num_heads=2, context=16))


def test_every_byte_is_predicted_once() -> None:
    windows = text.Windows(bytes(range(100)), 7)
    predicted = torch.cat([windows[index][1:] for index in range(len(windows))])
    assert predicted.tolist() == list(range(1, 1 + len(predicted)))
    assert len(predicted) == 99 // 7 * 7
    assert len(text.Windows(b"short", 7)) == 0


def test_a_folder_is_split_by_whole_files(tmp_path: Path) -> None:
    for number in range(200):
        path = tmp_path / f"{number % 3}" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(f"<{number}>".encode())
    (tmp_path / ".hidden").write_bytes(b"no")
    train, valid = text.load(tmp_path)
    assert len(train) + len(valid) == sum(len(f"<{number}>") for number in range(200))
    assert (train.count(b"<"), valid.count(b">")) == (train.count(b">"), valid.count(b"<"))
    assert 0 < valid.count(b"<") < 30
    assert text.load(tmp_path) == (train, valid)


def test_a_single_file_gives_its_end_to_validation(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(bytes(100))
    assert tuple(map(len, text.load(path))) == (95, 5)
    assert tuple(map(len, text.load(tmp_path))) == (95, 5)


def test_a_place_without_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=rf"no text in {tmp_path}"):
        text.load(tmp_path)


def test_the_default_text_is_on_every_machine() -> None:
    train, valid = text.load(None)
    assert len(train) > 5_000_000
    assert len(valid) > 200_000
    assert b"def __init__(self" in train


def test_the_model_never_looks_ahead(model: gpt.GPT) -> None:
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (tokens[0, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_an_untrained_model_knows_nothing(model: gpt.GPT) -> None:
    loss = train_gpt.next_token_loss(model, torch.randint(256, (8, 17)))
    assert loss.shape == (8,)
    assert loss.mean().item() == pytest.approx(5.545, abs=0.15)  # log 256


def test_the_named_sizes_are_the_sizes() -> None:
    with torch.device("meta"):
        found = {name: sum(p.numel() for p in gpt.GPT(config).parameters()) for name, config in gpt.PRESETS.items()}
    assert found["small"] < 1e6
    for name, numel in (("25m", 25e6), ("124m", 85e6), ("350m", 302e6), ("1.5b", 1.475e9)):
        assert found[name] == pytest.approx(numel, rel=0.03)


def test_every_parameter_is_in_one_group(model: gpt.GPT) -> None:
    groups = train_gpt.decay_groups(model)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    assert {p.ndim for p in groups[1]["params"]} == {1}
    assert groups[1]["weight_decay"] == 0


def test_the_rate_rises_and_falls() -> None:
    rates = [train_gpt.warmup_cosine(step, 200) for step in range(200)]
    peak = rates.index(max(rates))
    assert max(rates) == 1
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert 0.05 <= rates[-1] < 0.06
    assert all(0 < train_gpt.warmup_cosine(step, 3) <= 1 for step in range(3))


@pytest.mark.parametrize("option", ["steps", "batch", "accumulation", "seq", "log-every", "validate-every", "lr"])
@pytest.mark.parametrize("value", ["0", "-1", "x", "nan"])
def test_numbers_without_meaning_are_named(
    option: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train_gpt.py", f"--{option}", value])
    with pytest.raises(SystemExit):
        train_gpt.parse_arguments()
    assert f"--{option}: {value}: expected a" in capsys.readouterr().err


def test_an_empty_prompt_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train_gpt.py", "--prompt", ""])
    with pytest.raises(SystemExit):
        train_gpt.parse_arguments()
    assert "--prompt: expected at least one character" in capsys.readouterr().err


def test_what_the_model_writes_cannot_drive_the_terminal() -> None:
    class Escapes(torch.nn.Module):
        """Writes the byte that begins a terminal's commands."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.full_like(tokens, 27), 256) * 1e3

    assert (
        train_gpt.write_sample(Escapes(), "a\n", 8, 3, torch.device("cpu")) == "a\n" + 3 * "\N{REPLACEMENT CHARACTER}"
    )


def test_small_numbers_are_not_rounded_away() -> None:
    assert train_gpt.in_units(74_112, "parameters") == "74,112 parameters"
    assert train_gpt.in_units(9_500_000, "parameters") == "9.5M parameters"
