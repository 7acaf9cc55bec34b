"""A benchmark finds out whether its files can be written before it runs, and shows its result in any case."""

from pathlib import Path

import pytest

from hookline.core.bench import command
from hookline.core.errors import ConfigError


@pytest.mark.parametrize("key", ["result", "records"])
def test_a_place_that_cannot_be_written_to_is_named_before_anything_runs(tmp_path: Path, key: str) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "below"

    def measure(tree, host):
        raise AssertionError("nothing must run")

    with pytest.raises(ConfigError, match=f"{key}=.*below cannot be"):
        command.execute({key: str(place)}, None, measure)


def test_a_folder_in_the_place_of_a_record_is_named_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"records=.*requests.jsonl is a folder"):
        command.execute({"records": str(tmp_path)}, None, lambda tree, host: pytest.fail("nothing must run"))


def test_files_may_lie_in_the_home_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(command, "print_result", lambda record: None)
    monkeypatch.setattr("hookline.core.bench.files.write_recording", lambda recording, folder: written.append(folder))
    written: list[Path] = []
    command.execute({"result": "~/a.jsonl", "records": "~/steps"}, None, lambda tree, host: ({"metrics": {}}, None))
    assert written == [tmp_path / "steps"] and {one.name for one in tmp_path.iterdir()} == {"a.jsonl", "steps"}


def test_the_result_is_shown_although_its_file_cannot_be_written(tmp_path: Path, monkeypatch) -> None:
    shown = []
    monkeypatch.setattr(command, "print_result", shown.append)
    path = tmp_path / "results.jsonl"

    def measure(tree, host):
        path.mkdir()  # whatever happens meanwhile
        return {"metrics": {}}, None

    with pytest.raises(ConfigError, match=r"results.jsonl cannot be written"):
        command.execute({"result": str(path)}, None, measure)
    assert shown == [{"metrics": {}}]
