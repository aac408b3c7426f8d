"""Blocks of JSONL and Parquet files: every row once, with its number, and problems of single rows."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from serve_app.batch_prediction.blocks import BatchInputError, open_input, read_block, split_blocks
from serve_app.batch_prediction.rows import BatchRow


def read_all(path: Path, size: int, column: str | None = None) -> list[BatchRow]:
    blocks = list(split_blocks(open_input(str(path), {}), size, {}))
    assert [block.index for block in blocks] == list(range(len(blocks)))
    assert all(block.rows <= size for block in blocks)
    return [row for block in blocks for row in read_block(block, column, {})]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("end", ["", "\n"])
def test_each_line_is_read_once_with_its_number(tmp_path: Path, size: int, end: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": "é"}\n\n[1]\n"text"' + end)
    rows = read_all(file, size)
    assert [(row.number, json.loads(row.body)) for row in rows] == [(1, {"a": "é"}), (3, [1]), (4, "text")]
    assert {row.content_type for row in rows} == {"application/json"}


def test_a_malformed_line_has_its_number_and_the_cause(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text": "one"}\n{broken\n\xff\xfe\n{"other": 1}\n{"text": null}\n{"text": [2]}\n')
    whole = read_all(file, 2)
    assert [row.number for row in whole if row.problem] == [2, 3]
    assert whole[1].problem.startswith("line 2 is not JSON: ")
    column = read_all(file, 2, "text")
    assert [row.number for row in column if row.problem] == [2, 3, 4, 5]
    assert column[3].problem == "line 4 has no value 'text'"
    assert (column[0].body, column[0].content_type) == (b"one", "text/plain")
    assert (column[5].body, column[5].content_type) == (b"[2]", "application/json")


def write_table(file: Path, rows: int, row_group_size: int, **columns: list[Any]) -> None:
    table = pyarrow.table({"id": list(range(rows)), **columns})
    parquet.write_table(table, file, row_group_size=row_group_size)


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_each_row_of_parquet_is_read_once(tmp_path: Path, size: int) -> None:
    write_table(tmp_path / "rows.parquet", 10, 4)
    rows = read_all(tmp_path / "rows.parquet", size)
    assert [(row.number, json.loads(row.body)) for row in rows] == [(n, {"id": n}) for n in range(10)]


def test_columns_of_parquet_become_texts_bytes_and_json(tmp_path: Path) -> None:
    day = datetime.date(2026, 1, 2)
    write_table(tmp_path / "rows.parquet", 2, 2, text=["a", None], image=[b"\x00", b"\x01"], day=[day, day])
    file = tmp_path / "rows.parquet"
    texts, images = read_all(file, 5, "text"), read_all(file, 5, "image")
    assert (texts[0].body, texts[0].content_type) == (b"a", "text/plain")
    assert texts[1].problem == "row 1 has no value 'text'"
    assert [(row.body, row.content_type) for row in images] == [
        (b"\x00", "application/octet-stream"),
        (b"\x01", "application/octet-stream"),
    ]
    whole = json.loads(read_all(file, 5)[0].body)
    assert whole == {"id": 0, "text": "a", "image": "AA==", "day": "2026-01-02"}
    with pytest.raises(BatchInputError, match=r"there is no column 'nothing'; it has id, text, image, day"):
        read_all(file, 5, "nothing")


def test_a_folder_and_a_pattern_are_several_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        (tmp_path / name).write_text(f'"{name}"\n')
    for path in (tmp_path, tmp_path / "*.jsonl"):
        source = open_input(str(path), {})
        assert [Path(file).name for file in source.files] == ["a.jsonl", "b.jsonl"]
        assert [json.loads(row.body) for row in read_all(path, 5)] == ["a.jsonl", "b.jsonl"]
    before = open_input(str(tmp_path), {}).identity
    (tmp_path / "b.jsonl").write_text('"changed"\n')
    after = open_input(str(tmp_path), {}).identity
    assert before[0] == after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("missing", None, "no file is there"),
        ("rows.csv", "a,b", r"must all end in \.jsonl"),
        ("rows.parquet", "text", "no Parquet file"),
    ],
)
def test_an_input_without_rows_is_an_error(
    tmp_path: Path, name: str, content: str | None, expected: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(BatchInputError, match=expected):
        read_all(tmp_path / name, 5)
