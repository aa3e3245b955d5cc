"""A wrong policy is refused with the line, the value and what is right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aion.config import describe
from aion.config.model import GONE
from tests.policy_files import refused, write

A_SIZE = "write a size above 0, such as 64MiB, 1GiB or 10MB, or a number of bytes"
A_SIZE_OR_SHARE = f"{A_SIZE}, or a share of the host's memory, above 0% and up to 100%, such as 25%"
FROM_0 = "write a duration in us, ms, s, m, h, d or w, such as 90s or 10m, from 0 to 3652500 days"
ABOVE_0 = "write a duration in us, ms, s, m, h, d or w, such as 90s or 10m, above 0 and up to 3652500 days"
IDLE = f"{ABOVE_0}, or a multiple above 0 of the median execution time, such as 3x, or null"
ABOVE_0_TO_1 = "write a share above 0 and up to 1, such as 0.75, or 75%"


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
        ("memory: {budget: 2 parsec}", f"memory.budget: '2 parsec' is not possible: the unit 'parsec' is unknown; "
         f"units are B, KiB MiB GiB TiB (1024) and KB MB GB TB (1000); {A_SIZE}"),
        ("memory: {budget: 0%}", f"memory.budget: '0%' is not possible; {A_SIZE_OR_SHARE}"),
        ("memory: {budget: 101%}", f"memory.budget: '101%' is not possible; {A_SIZE_OR_SHARE}"),
        ("memory: {budget: 0.25}", f"memory.budget: 0.25 is not possible: as a share it is '25%'; {A_SIZE_OR_SHARE}"),
        ("memory: {budget: 1e2%}", f"memory.budget: '1e2%' is not possible; {A_SIZE_OR_SHARE}"),
        ("memory: {bucket_limit: 25%}", f"memory.bucket_limit: '25%' is not possible; {A_SIZE}"),
        ("memory: {moderate: 75}", f"memory.moderate: 75 is not possible; {ABOVE_0_TO_1}"),
        ("memory: {moderate: -0.1}", f"memory.moderate: -0.1 is not possible; {ABOVE_0_TO_1}"),
        ("memory: {moderate: .nan}", f"memory.moderate: nan is not possible; {ABOVE_0_TO_1}"),
        ("memory: {moderate: true}", f"memory.moderate: true is not possible; {ABOVE_0_TO_1}"),
        ("memory: {moderate: 0}", f"memory.moderate: 0 is not possible; {ABOVE_0_TO_1}"),
        ("memory: {scarce: 0%}", f"memory.scarce: '0%' is not possible; {ABOVE_0_TO_1}"),
        ("memory: {moderate: a lot}", f"memory.moderate: 'a lot' is not possible; {ABOVE_0_TO_1}"),
        *(
            (f"{section}: {{{key}: 1}}", f"{section}.{key}: this key is gone; remove it: {why}")
            for (section, key), why in GONE.items()
        ),
        ("memory: {moderate: 95%, scarce: 0.9}", "memory.scarce: 0.9 is below memory.moderate, 0.95; set it to at "
         "least that"),
        ("memory: {victim: oldest}", "memory.victim: 'oldest' is not possible; write 'largest' or 'slowest'"),
        ("destage: {keep_fraction: 2}", "destage.keep_fraction: 2 is not possible; write a share from 0 to 1, such as "
         "0.75, or 75%"),
        ("destage: {idle_after: 3}", f"destage.idle_after: 3 is not possible; {IDLE}"),
        ("destage: {idle_after: 0}", f"destage.idle_after: 0 is not possible; {IDLE}"),
        ("destage: {idle_after: 0x}", f"destage.idle_after: '0x' is not possible; {IDLE}"),
        ("destage: {idle_after: -2s}", f"destage.idle_after: '-2s' is not possible; {IDLE}"),
        ("destage: {idle_after: soon}", f"destage.idle_after: 'soon' is not possible; {IDLE}"),
        ("destage: {class: mine}", "destage.class: 'mine' is not possible; write package.module:Class, or null"),
        ("destage: {class: 'my-module:Mine'}", "destage.class: 'my-module:Mine' is not possible; write "
         "package.module:Class, or null"),
        ("destage: {class: mine:Mine, arguments: 5}", "destage.arguments: 5 is not possible; write a mapping of names "
         "to values, such as {limit: 5}"),
        ("destage: {class: mine:Mine, arguments: {two words: 5}}", "destage.arguments: 'two words' is not an "
         "argument name; write e.g. 'limit: 5'"),
        ("destage: {class: mine:Mine, arguments: {at: 2024-01-01}}", "cannot be sent to executors"),
        ("destage: {class: mine:Mine, arguments: {x: .inf}}", "cannot be sent to executors"),
        ("destage: {arguments: {x: 5}}", "destage.arguments: given without a class; set class too, or remove "
         "arguments; destage.class is from the defaults"),
        ("prestage: {arguments: {x: 5}}", "prestage.arguments: given without a class"),
        ("prestage: {mode: }", "prestage.mode: null is not possible; write 'predictive', 'on_late_event' or 'none'"),
        ("prestage: {mode: none, class: mine:Plan}", "prestage.mode: none does not use class; set mode to predictive"),
        ("io: {codec_threads: -1}", "io.codec_threads: -1 is not possible; write an integer from 0 to 1,024"),
        ("io: {codec_threads: 1.5}", "io.codec_threads: 1.5 is not possible; write an integer from 0 to 1,024"),
        ("io: {codec_threads: true}", "io.codec_threads: true is not possible; write an integer from 0 to 1,024"),
        ("stateful: {enabled: maybe}", "stateful.enabled: 'maybe' is not possible; write true or false"),
        ("io: {rate_limit: 0}", f"io.rate_limit: 0 is not possible; {A_SIZE}, or null"),
        ("io: {rate_limit: fast}", f"io.rate_limit: 'fast' is not possible; {A_SIZE}, or null"),
        ("memory: {budget: -1}", f"memory.budget: -1 is not possible; {A_SIZE_OR_SHARE}"),
        ("memory: {budget: }", f"memory.budget: null is not possible; {A_SIZE_OR_SHARE}"),
        ("memory: {budget: {a: 1}}", f"memory.budget: {{'a': 1}} is not possible; {A_SIZE_OR_SHARE}"),
        ("blocks: {target: 2GiB}", f"blocks.target: '2GiB' is not possible; {A_SIZE}, at most 1GiB"),
        ("lateness: {initial_bound: -5m}", f"lateness.initial_bound: '-5m' is not possible; {FROM_0}"),
        ("lateness: {initial_bound: -1}", f"lateness.initial_bound: -1 is not possible; {FROM_0}"),
        ("lateness: {initial_bound: 10}", f"lateness.initial_bound: 10 is not possible; {FROM_0}"),
        ("lateness: {initial_bound: 5 moons}", f"lateness.initial_bound: '5 moons' is not possible; {FROM_0}"),
        ("lateness: {initial_bound: 1.5}", f"lateness.initial_bound: 1.5 is not possible; {FROM_0}"),
        ("lateness: {initial_bound: 9999999 days}", f"lateness.initial_bound: '9999999 days' is not possible; "
         f"{FROM_0}"),
        ("lateness: {initial_bound: " + "9" * 400 + ".5 days}", f".5 days' is not possible; {FROM_0}"),
        ("state: {backend: rockdb}", "state.backend: 'rockdb' is not possible; "
         "write 'tiered', 'memory' or 'rocksdb'"),
        ("state: {compression: off}", "state.compression: false is not possible; write 'none', 'lz4' or"),
        ("state: {codec: pickle}", "state.codec: 'pickle' is not possible; write 'arrow' or 'json'"),
        ("state: {shards: 0}", "state.shards: 0 is not possible; write auto, or an integer from 1 to 32,768"),
        ("state: {shards: 1000000}", "state.shards: 1000000 is not possible; write auto, or an integer from 1 to "
         "32,768"),
        ("state: {shards: true}", "state.shards: true is not possible; write auto, or an integer from 1 to 32,768"),
        ("state: {dir: 5}", "state.dir: 5 is not possible; write a path, a URI, or null"),
        ("state: {dir: 'ftp://host/x'}", "state.dir: 'ftp://host/x': pyarrow cannot open such a file system"),
        ("state: {dir: 'dbfs:/x'}", "state.dir: 'dbfs:/x': pyarrow cannot open such a file system; use one of file"),
        ("state: {dir: 's3:/bucket'}", "state.dir: 's3:/bucket' is not a URI; write s3://..."),
        (
            "trigger: {kind: hourly}",
            "trigger.kind: 'hourly' is not possible; write 'staleness', 'interval', 'count' or 'every_batch'",
        ),
        ("trigger: {bound: 0}", "trigger.bound: 0 is not possible; write a share above 0 and below 1, such as 0.05, "
         "or 5%"),
        ("trigger: {executions: 0}", "trigger.executions: 0 is not possible; write an integer from 1, or null"),
        ("trigger: {interval: 0}", f"trigger.interval: 0 is not possible; {ABOVE_0}"),
        ("trigger: {early: soon}", f"trigger.early: 'soon' is not possible; {ABOVE_0}, or batch, or null"),
        ("trigger: {early: 5}", f"trigger.early: 5 is not possible; {ABOVE_0}, or batch, or null"),
        ("trigger: {count: 1.5}", "trigger.count: 1.5 is not possible; write an integer from 1"),
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


@pytest.mark.slow
def test_what_to_write_instead_is_what_the_reference_says() -> None:
    for doc in describe():
        message = refused("standard", {doc.key: [5]})
        if " | " in doc.type:
            assert all(f"'{choice}'" in message for choice in doc.type.split(" | "))
        else:
            assert message == f"keyword {doc.key}: {doc.key}: [5] is not possible; write {doc.type}"


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
