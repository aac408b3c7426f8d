"""The folder of results: parts that are done, the identity of a job, both formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyarrow import parquet

from serve_app.batch_prediction.results import JOB_FILE, BatchOutputError, ResultFolder
from serve_app.batch_prediction.rows import RowResult, decode_body

RESULTS = [RowResult(1, {"label": "é"}), RowResult(2, reason="invalid_input", message="line 2 is not JSON")]


def test_parts_are_the_blocks_that_are_done(tmp_path: Path) -> None:
    folder = ResultFolder(str(tmp_path / "out"), "jsonl", {})
    assert folder.open({"model": "m"}) == set()
    folder.write_part(3, "rows.jsonl", RESULTS)
    assert ResultFolder(str(tmp_path / "out"), "jsonl", {}).open({"model": "m"}) == {3}
    lines = (tmp_path / "out" / "part-00003.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"file": "rows.jsonl", "row": 1, "prediction": {"label": "é"}},
        {
            "file": "rows.jsonl",
            "row": 2,
            "error": {"reason": "invalid_input", "message": "line 2 is not JSON"},
        },
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [JOB_FILE, "part-00003.jsonl"]


def test_parquet_has_one_schema_with_predictions_as_json(tmp_path: Path) -> None:
    folder = ResultFolder(str(tmp_path / "out"), "parquet", {})
    folder.open({})
    folder.write_part(0, "rows.parquet", RESULTS)
    table = parquet.read_table(tmp_path / "out" / "part-00000.parquet")
    assert [json.loads(text) if text else None for text in table["prediction"].to_pylist()] == [
        {"label": "é"},
        None,
    ]
    assert table["error_reason"].to_pylist() == [None, "invalid_input"]
    assert table["row"].to_pylist() == [1, 2]


def test_results_of_another_job_are_not_mixed(tmp_path: Path) -> None:
    folder = ResultFolder(str(tmp_path), "jsonl", {})
    folder.open({"model": "m", "column": None})
    folder.write_part(0, "rows.jsonl", RESULTS)
    with pytest.raises(BatchOutputError, match=r"results of another job \(other column\)"):
        folder.open({"model": "m", "column": "text"})
    assert folder.open({"model": "m", "column": "text"}, overwrite=True) == set()
    assert not list(tmp_path.glob("part-*"))


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(BatchOutputError, match="is not empty"):
        ResultFolder(str(tmp_path), "jsonl", {}).open({})
    with pytest.raises(BatchOutputError, match="is not empty"):
        ResultFolder(str(tmp_path), "jsonl", {}).open({}, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("body", "value"), [(b'{"a": 1}', {"a": 1}), (b"word", "word"), (b"\xff", {"base64": "/w=="})]
)
def test_the_value_of_a_response(body: bytes, value: object) -> None:
    assert decode_body(body) == value
