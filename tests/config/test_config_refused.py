"""A wrong policy is refused with the line, the value and what is right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aion.config.model import GONE
from tests.policy_files import refused, write


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("memory: {budgt: 1MiB}", "memory.budgt: unknown key; did you mean memory.budget? "
         "allowed here: budget, bucket_limit, moderate, scarce, victim"),
        ("memroy: {budget: 1MiB}", "memroy: unknown key; did you mean memory? "
         "allowed here: state, memory, destage, prestage, io, blocks, distribution, execution, apply, lateness"),
        ("budget: 1MiB", "budget: unknown key; did you mean memory.budget?"),
        ("memory.budget: 1MiB", "memory.budget: unknown key; write it as memory: {budget: ...}"),
        ("memory: {budget_bytes: 1MiB}", "memory.budget_bytes: unknown key; did you mean memory.budget?"),
        ("state: {1: 2}", "state.1: unknown key; allowed here: backend"),
        ("? [state]\n: {}", "?: unknown key"),
        ("memory: 512MiB", "memory: '512MiB' is not a section; write these keys below it: budget, bucket_limit"),
        ("memory: {budget: 2 parsec}", "memory.budget: '2 parsec' has the unknown unit 'parsec'; units"),
        ("memory: {budget: 0%}", "memory.budget: '0%' is out of range; a share is above 0% and at most 100%"),
        ("memory: {budget: 101%}", "memory.budget: '101%' is out of range; a share is above 0% and at most 100%"),
        ("memory: {budget: 0.25}", "memory.budget: 0.25 is not a size; write it as a share, '25%'"),
        ("memory: {budget: 1e2%}", "memory.budget: '1e2%' is not a size; write e.g. '64MiB'"),
        ("memory: {bucket_limit: 25%}", "memory.bucket_limit: '25%' is not a size; write e.g. '64MiB'"),
        ("memory: {moderate: 75}", "memory.moderate: 75 is not a share; write a number from 0 to 1, "
         "e.g. 0.75, or '75%'"),
        ("memory: {moderate: -0.1}", "memory.moderate: -0.1 is not a share; write a number from 0 to 1"),
        ("memory: {moderate: .nan}", "memory.moderate: nan is not a share; write a number from 0 to 1"),
        ("memory: {moderate: true}", "memory.moderate: true is not a share; write a number from 0 to 1"),
        ("memory: {moderate: 0}", "memory.moderate: 0 is out of range; write a share above 0, e.g. 0.75, or '75%'"),
        ("memory: {scarce: 0%}", "memory.scarce: '0%' is out of range; write a share above 0"),
        ("memory: {moderate: a lot}", "memory.moderate: 'a lot' is not a share; write a number from 0 to 1"),
        *(
            (f"{section}: {{{key}: 1}}", f"{section}.{key}: this key is gone; remove it: {why}")
            for (section, key), why in GONE.items()
        ),
        ("memory: {moderate: 95%, scarce: 0.9}", "memory.scarce: 0.9 is below memory.moderate, 0.95; set it to at "
         "least that"),
        ("memory: {victim: oldest}", "memory.victim: 'oldest' is not possible; write 'largest' or 'slowest'"),
        ("destage: {keep_fraction: 2}", "destage.keep_fraction: 2 is not a share; write a number from 0 to 1"),
        ("destage: {idle_after: 3}", "destage.idle_after: 3 has no unit; write e.g. '3 seconds'; or a multiple of the "
         "median time of an execution, e.g. '3x'; or null"),
        ("destage: {idle_after: 0}", "destage.idle_after: 0 is not an idle time; write a duration above 0"),
        ("destage: {idle_after: 0x}", "destage.idle_after: '0x' is out of range; write a multiple above 0, e.g. '3x'"),
        ("destage: {idle_after: -2s}", "destage.idle_after: '-2s' is negative"),
        ("destage: {idle_after: soon}", "destage.idle_after: 'soon' is not a duration; write e.g. '20 seconds' or "
         "'5m'; or a multiple"),
        ("destage: {class: mine}", "destage.class: 'mine' is not a class; write package.module:Class, or null"),
        ("destage: {class: 'my-module:Mine'}", "destage.class: 'my-module:Mine' is not a class"),
        ("destage: {class: mine:Mine, arguments: 5}", "destage.arguments: 5 is not a mapping; write names and values"),
        ("destage: {class: mine:Mine, arguments: {two words: 5}}", "destage.arguments: 'two words' is not an "
         "argument name; write e.g. 'limit: 5'"),
        ("destage: {class: mine:Mine, arguments: {at: 2024-01-01}}", "cannot be sent to executors"),
        ("destage: {class: mine:Mine, arguments: {x: .inf}}", "cannot be sent to executors"),
        ("destage: {arguments: {x: 5}}", "destage.arguments: given without a class; set class too, or remove "
         "arguments; destage.class is from the defaults"),
        ("prestage: {arguments: {x: 5}}", "prestage.arguments: given without a class"),
        ("prestage: {mode: }", "prestage.mode: null is not possible; write 'predictive', 'on_late_event' or 'none'"),
        ("prestage: {mode: none, class: mine:Plan}", "prestage.mode: none does not use class; set mode to predictive"),
        ("io: {codec_threads: -1}", "io.codec_threads: -1 is not a number of threads; write an integer "
         "from 0 to 1,024"),
        ("io: {codec_threads: 1.5}", "io.codec_threads: 1.5 is not a number of threads"),
        ("io: {codec_threads: true}", "io.codec_threads: true is not a number of threads"),
        ("stateful: {enabled: maybe}", "stateful.enabled: 'maybe' is not a switch; write true or false"),
        ("io: {threads: 0}", "io.threads: 0 is not a number of threads; write an integer from 1 to 1,024"),
        ("io: {rate_limit: 0}", "io.rate_limit: 0 is out of range; a size is at least 1 byte"),
        ("io: {rate_limit: fast}", "io.rate_limit: 'fast' is not a size; write e.g. '64MiB'"),
        ("memory: {budget: -1}", "memory.budget: -1 is out of range; a size is at least 1 byte"),
        ("memory: {budget: }", "memory.budget: null is not a size"),
        ("memory: {budget: {a: 1}}", "memory.budget: {'a': 1} is not a size"),
        ("blocks: {target: 2GiB}", "blocks.target: 2GiB is too large for a Spark row; write at most"),
        ("lateness: {initial_bound: -5m}", "lateness.initial_bound: '-5m' is negative; write 0 or more"),
        ("lateness: {initial_bound: -1}", "lateness.initial_bound: -1 has no unit; write e.g. '-1 seconds'"),
        ("lateness: {initial_bound: 10}", "lateness.initial_bound: 10 has no unit; write e.g. '10 seconds'"),
        ("lateness: {initial_bound: 5 moons}", "lateness.initial_bound: '5 moons' has the unknown unit"),
        ("lateness: {initial_bound: 1.5}", "lateness.initial_bound: 1.5 has no unit; write e.g. '1.5 seconds'"),
        ("lateness: {initial_bound: 9999999 days}", "is too long; write at most '3652500 days'"),
        ("lateness: {initial_bound: " + "9" * 400 + ".5 days}", "does not fit into 64 bits of microseconds"),
        ("state: {backend: rockdb}", "state.backend: 'rockdb' is not possible; "
         "write 'tiered', 'memory' or 'rocksdb'"),
        ("state: {compression: off}", "state.compression: false is not possible; write 'none', 'lz4' or"),
        ("state: {codec: pickle}", "state.codec: 'pickle' is not possible; write 'arrow' or 'json'"),
        ("state: {shards: 0}", "state.shards: 0 is not a number of shards; write 'auto' or an integer from 1"),
        ("state: {shards: 1000000}", "state.shards: 1000000 is not a number of shards; write 'auto' or an integer "
         "from 1 to 32,768"),
        ("state: {shards: true}", "state.shards: true is not a number of shards"),
        ("state: {dir: 5}", "state.dir: 5 is not a location; write a path"),
        ("state: {dir: 'ftp://host/x'}", "state.dir: 'ftp://host/x': pyarrow cannot open such a file system"),
        ("state: {dir: 'dbfs:/x'}", "state.dir: 'dbfs:/x': pyarrow cannot open such a file system; use one of file"),
        ("state: {dir: 's3:/bucket'}", "state.dir: 's3:/bucket' is not a URI; write s3://..."),
        (
            "trigger: {kind: hourly}",
            "trigger.kind: 'hourly' is not possible; write 'staleness', 'interval', 'count' or 'every_batch'",
        ),
        ("trigger: {bound: 0}", "trigger.bound: 0 is out of range; write a share above 0 and below 1, e.g. 0.05"),
        ("trigger: {executions: 0}", "0 is not a number of executions; write an integer from 1, or null"),
        ("trigger: {interval: 0}", "trigger.interval: 0 is not an interval; write a duration above 0, e.g. '1m'"),
        ("trigger: {early: soon}", "trigger.early: 'soon' is not a duration; write e.g. '20 seconds' or "),
        ("trigger: {early: 5}", "trigger.early: 5 has no unit; write e.g. '5 seconds'; or 'batch'; or null"),
        ("trigger: {count: 1.5}", "trigger.count: 1.5 is not a number of events; write an integer from 1"),
        ("memory: {budget: 1MiB, bucket_limit: 2MiB}", "memory.bucket_limit: 2MiB is larger than "
         "memory.budget, 1MiB; set bucket_limit to at most '1MiB'"),
        ("memory: {bucket_limit: 1GiB}", "memory.bucket_limit: 1GiB is larger than memory.budget, 512MiB; "
         "set bucket_limit to at most '512MiB'; memory.budget is from the defaults"),
        ("memory: {budget: 2024-13-45}", "this cannot be read as YAML: month must be in 1..12"),
        ("memory: [", "this cannot be read as YAML"),
        ("\tmemory: {}", "this cannot be read as YAML"),
        ("state: !!python/object/apply:os.getcwd []", "this cannot be read as YAML: could not determine"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_the_line_the_value_and_what_is_right(
    tmp_path: Path, line: str, says: str
) -> None:
    file = write(tmp_path, "# first line\n\n" + line)
    message = refused(file)
    assert message.startswith(f"{file}:3: "), message
    assert says in message
    assert "\n" not in message


def test_all_errors_of_a_file_are_told_in_the_order_of_their_lines(tmp_path: Path) -> None:
    text = "lateness:\n  initial_bound: -5m\nmemory:\n  budget: lots\n  budget: more\nstate:\n  backend: redis\n"
    lines = refused(write(tmp_path, text)).splitlines()
    places = [re.sub(r"^.*mine.yaml:(\d+): ([a-z_.]+): .*", r"\1 \2", line) for line in lines]
    assert places[0] == "2 lateness.initial_bound"
    assert "5 memory.budget" in places
    assert places[-1] == "7 state.backend"


def test_all_contradictions_of_a_section_are_told(tmp_path: Path) -> None:
    text = "memory: {budget: 1MiB, bucket_limit: 2MiB}\n"
    file = write(tmp_path, text + "destage: {arguments: {a: 1}}\nprestage: {class: 'a:B', mode: none}\n")
    overrides: dict[str, object] = {"memory": {"moderate": 0.9, "scarce": 0.5}}
    lines = refused(file, overrides).splitlines()
    assert [re.sub(r"^(?:.*mine.yaml:\d+|keyword memory): (\S+): .*", r"\1", line) for line in lines] == [
        "memory.bucket_limit", "destage.arguments", "prestage.mode", "memory.scarce",
    ]  # fmt: skip


def test_a_key_written_twice_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "state:\n  backend: memory\n  backend: tiered\nstate: {}\n")
    assert refused(file).splitlines() == [
        f"{file}:3: state.backend: written twice, first in {file}:2; keep one",
        f"{file}:4: state: written twice, first in {file}:1; keep one",
    ]


@pytest.mark.parametrize("text", ["- a list", "just words", "5"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    assert "is not a policy; write sections: state, memory" in refused(write(tmp_path, text))


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"\xe9: 1", b"state: \x00", b"a: &a {b: *a}", b"a: 1\n---\nb: 1"])
def test_a_file_that_is_no_plain_yaml_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "mine.yaml").write_bytes(data)
    assert "mine.yaml" in refused(tmp_path / "mine.yaml")


@pytest.mark.parametrize("source", ["standrd", "", "/no/such/file.yaml", Path("nowhere"), "\0", "x" * 5000])
def test_neither_a_preset_nor_a_file(source: str | Path) -> None:
    message = refused(source)
    assert "is not a preset and cannot be read as a file" in message
    assert "presets are demo, disk_only, low_latency, low_memory, memory_only, standard" in message
    assert ("did you mean standard?" in message) == (source == "standrd")


def test_a_folder_is_no_policy(tmp_path: Path) -> None:
    assert "Is a directory" in refused(tmp_path)


@pytest.mark.parametrize("source", [5, None, ["standard"], b"standard"])
def test_what_cannot_be_a_policy_at_all(source: object) -> None:
    assert "give a preset (demo, disk_only" in refused(source)


def test_a_huge_value_is_shown_in_part() -> None:
    assert len(refused({"state": {"backend": "x" * 10_000}})) < 300
