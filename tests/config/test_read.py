"""What load_config accepts as a source, and how broken sources are reported."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.config import load_config, parse_json, read_source
from shardcore.errors import ConfigError

COMMENTED = """
// written by hand
{
    "train_batch_size": 8,  # samples
    "optimizer": {"type": "SGD", "params": {"lr": 0.1,},},  /* a block
    over two lines, with "quotes" and a , in it */
    "x-note": "// no comment, /* nor this */ # nor this, ]",
}
"""


def test_comments_and_trailing_commas_are_accepted_and_strings_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(COMMENTED, encoding="utf-8")
    for source in (path, str(path)):
        config = load_config(source, data_world=2)
        assert config.batch.train_batch_size == 8
        assert config.optimizer is not None
        assert config.optimizer.params == {"lr": 0.1}
    assert read_source(path)[0]["x-note"] == "// no comment, /* nor this */ # nor this, ]"


TEXT = st.text('ab/*#,"\\{}[] \nÿ', max_size=8)  # what the reader must not take for its own
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(TEXT, json_values, max_size=4))
def test_plain_json_is_read_as_the_standard_library_reads_it(tree: dict[str, Any]) -> None:
    text = json.dumps(tree)
    assert parse_json(text, "text") == json.loads(text)


@given(st.dictionaries(TEXT, json_values, max_size=4))
def test_comments_between_tokens_change_nothing(tree: dict[str, Any]) -> None:
    text = json.dumps(tree, indent=1)
    commented = "".join(line + ' // } ] , "\n' for line in text.split("\n"))
    assert parse_json(commented, "text") == json.loads(text)


def test_duplicate_keys_are_refused_with_their_paths() -> None:
    text = '{"fp16": {"enabled": true, "enabled": false}, "list": [{"a": 1, "a": 2}], "fp16": {}}'
    with pytest.raises(ConfigError) as caught:
        parse_json(text, "ds_config.json")
    message = str(caught.value)
    assert "ds_config.json" in message
    assert all(path in message for path in ("fp16.enabled", "list[0].a", ", fp16;"))


def test_a_syntax_error_has_the_line_and_column_of_the_original() -> None:
    text = '{\n  /* two\n  lines */ "a": 1,\n  "b" 2\n}'
    with pytest.raises(ConfigError, match=r"ds_config.json: not valid JSON at line 4, column 7"):
        parse_json(text, "ds_config.json")


def test_the_top_level_must_be_an_object() -> None:
    with pytest.raises(ConfigError, match="expected a JSON object at the top level, got list"):
        parse_json("[1]", "text")


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_base64_of_a_json_object_is_accepted(encode: Any) -> None:
    tree = {"train_batch_size": 8, "x-odd": "ÿþ??>>~~"}
    text = encode(json.dumps(tree, ensure_ascii=False).encode()).decode()
    assert load_config(text, data_world=2).batch.train_batch_size == 8
    assert read_source(text)[0] == tree


def test_a_long_base64_text_is_no_file_name() -> None:
    text = base64.b64encode(json.dumps({"train_batch_size": 8, "x-long": "y" * 10_000}).encode()).decode()
    assert load_config(text).batch.train_batch_size == 8


@pytest.mark.parametrize("source", ["no_such_file.json", "dsconfig", "", "a" * 300])
def test_a_string_that_is_neither_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="no such file, and not the base64 form of a JSON object"):
        load_config(source)


def test_json_text_is_pointed_to_the_dict() -> None:
    with pytest.raises(ConfigError, match=r"this string is JSON text; pass the dict"):
        load_config('{"train_batch_size": 8}')


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00bad"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "absent.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"absent\.json: cannot be read: "):
        load_config(path)


@pytest.mark.parametrize("source", [3, None, ["train_batch_size"], b"{}"])
def test_other_types_are_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="expected a dict, a path or a base64 string, got"):
        load_config(source)


def test_the_callers_dict_is_never_modified_nor_kept() -> None:
    source: dict[str, Any] = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.95], "torch_adam": True}},
        "zero_optimization": {"reduce_bucket_size": "auto", "leaf_module": {"names": ["a"]}},
        "x-mine": [1, {"deep": [2]}],
    }
    source.pop("train_batch_size")
    before = copy.deepcopy(source)
    config = load_config(source, data_world=2, drop_in=True, accumulation_argument=2)
    assert source == before
    source["optimizer"]["params"]["betas"][0] = 0.0
    assert config.optimizer is not None
    assert config.optimizer.params["betas"] == (0.9, 0.95)


def test_nested_parameters_of_an_unknown_class_are_copied() -> None:
    milestones = [1, 2]
    source = {"train_batch_size": 2, "scheduler": {"type": "MultiStepLR", "params": {"milestones": milestones}}}
    config = load_config(source)
    milestones.append(3)
    assert config.scheduler is not None
    assert config.scheduler.params["milestones"] == [1, 2]


def test_keys_must_be_strings() -> None:
    with pytest.raises(ConfigError, match="1: expected a string as key, got 1"):
        load_config({"train_batch_size": 8, 1: 2})  # type: ignore[dict-item]
