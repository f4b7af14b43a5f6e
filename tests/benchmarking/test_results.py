"""Files of results: what is written is read, and damage is named."""

import json

import pytest

from spec_jax.benchmarking import results as files
from spec_jax.errors import BenchmarkError
from tests.benchmarking.handmade import PLAIN, costs, drafting, header, results, run


def written(path):
    writer = files.Writer(path, header())
    for line in (costs(), run(PLAIN, 0, 8.0, 4.0), run(drafting(1), 0, 4.0, 2.0)):
        writer.add(line)
    return writer


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "r.jsonl"
    own = written(path).results
    read = files.read(path)
    assert (read.header, read.runs, read.costs) == (own.header, own.runs, own.costs)
    assert path.read_text().count("\n") == 4


def test_a_file_is_resumed_only_by_the_same_measurement(tmp_path):
    path = tmp_path / "r.jsonl"
    written(path)
    with pytest.raises(BenchmarkError, match="give --resume"):
        files.Writer(path, header())
    again = header(command="another", created="later")
    assert len(files.Writer(path, again, resume=True).results.runs) == 2
    with pytest.raises(BenchmarkError, match="seed is 0 there and 1 here"):
        files.Writer(path, header(seed=1), resume=True)


def test_a_line_that_was_cut_off_is_measured_again(tmp_path):
    path = tmp_path / "r.jsonl"
    written(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(BenchmarkError, match=r"line 4 is damaged.*--resume"):
        files.read(path)
    writer = files.Writer(path, header(), resume=True)
    assert len(writer.results.runs) == 1
    writer.add(run(drafting(1), 0, 4.0, 2.0))
    assert path.read_bytes() == whole


def change(name, value):
    def apply(line):
        found = json.loads(line)
        found[name] = value
        return json.dumps(found)

    return apply


@pytest.mark.parametrize(
    ("number", "damage", "said"),
    [
        (3, lambda line: line[:30], "line 3 is damaged: Invalid JSON"),
        (3, change("seconds", "soon"), "seconds is 'soon'; it should be a valid number"),
        (3, change("seconds", -1.0), "seconds is -1.0; it should be at least 0"),
        (3, change("requests", []), "requests is []"),
        (3, change("kind", "jump"), "line 3 is damaged"),
        (3, change("strange", 1), "strange is 1"),
        (3, change("system", "other"), "line 3 names 'other', which line 1 does not"),
        (3, change("prompts", "other"), "line 3 names 'other', which line 1 does not"),
        (1, change("version", 2), "line 1 is damaged"),
        (1, change("systems", []), "line 1 is damaged: header.systems"),
        (1, lambda line: "", "line 1 is not the header"),
    ],
)
def test_damage_is_named(tmp_path, number, damage, said):
    path = tmp_path / "r.jsonl"
    written(path)
    lines = path.read_text().splitlines()
    lines[number - 1] = damage(lines[number - 1])
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(BenchmarkError) as caught:
        files.read(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_a_run_comes_once(tmp_path):
    path = tmp_path / "r.jsonl"
    written(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[2]]) + "\n")
    with pytest.raises(BenchmarkError, match="line 5 comes twice"):
        files.read(path)


def test_names_of_families():
    assert drafting(3).family == drafting(1).family == "draft_model"
    both = drafting(2).model_copy(update={"verification": "block", "scoring": "prefix_batch"})
    assert both.family == "draft_model, block verification, prefix_batch"
    assert results().header.systems[3].family == "transformers, plain"
