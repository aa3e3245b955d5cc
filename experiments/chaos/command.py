"""Kill processes and cause faults at random moments of real queries, and check that not one row differs.

A round writes files with late events and runs the queries of a workload over them in a separate process
(``query``): two with windows (``windows``), or two with a stateful processor (``stateful``). A seed
chooses the faults and their moments (``faults``). Often two to five follow each other, and the later ones hit a
recovery that is under way. After a JVM was killed, the queries restart from their checkpoints. Half-way, the
checkpoints are copied. From then on the copy runs in an application of its own next to the original, on the same state
folder. After the copy's first batch, the original continues with another number of partitions. It may not before: Spark
keeps only two batches here, and a copy must begin while its versions are kept. Where root may make network namespaces,
both run on a cluster of two hosts (``host_cluster``), and executors and whole hosts die too.

In the end the same queries run over the same files without faults, in one process. Every batch is compared, and what
follows from the events alone: the last panes of windows, or the rows of the processor in each batch.

With ``--rewinds`` and ``--forks``, queries go back or are forked between kills (``going_back``), and have tables, which
are compared, too.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.chaos.child import STARTING_S, ChaosError, Child, start
from experiments.chaos.going_back import ENOUGH_FILES, FORK, REWIND, compared_tables, files_of, fork, go_back, targets
from experiments.chaos.places import STORES, Bucket, FolderPlace, Place
from experiments.chaos.result import Fault, Result, Settings, cause, resumed, summary
from experiments.chaos.workloads import WORKLOADS, workload_of
from experiments.shared.host_cluster import Cluster, cluster, is_possible
from state_backends.files.names import HANDED, MERGED, SST

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.chaos.data import Event
    from experiments.chaos.faults import Done

MOMENTS = 4
"""For this many moments a rewind waits until there are batches to go back to."""
PACKAGES = ("aion", "pyspark", "pyarrow", "rocksdict")


def chaos(
    kills: Annotated[int, typer.Option(min=1, help="Processes to kill; other faults come on top.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the events, the faults and their moments.")] = 0,
    events: Annotated[int, typer.Option(min=10, help="Events in a batch.")] = 150,
    payload: Annotated[int, typer.Option(min=0, help="Random bytes in each event.")] = 400,
    hosts: Annotated[
        int | None,
        typer.Option(min=0, max=8, help="Hosts with executors; 0: none. Default: 2 where root can make them."),
    ] = None,
    workload: Annotated[str, typer.Option(help=f"What the queries do: {' or '.join(WORKLOADS)}.")] = "windows",
    store: Annotated[str, typer.Option(help=f"Where their state is: {' or '.join(STORES)}.")] = "folder",
    rewinds: Annotated[int, typer.Option(min=0, help="Times that a query goes back, with its table.")] = 0,
    forks: Annotated[int, typer.Option(min=0, help="Times that the queries are forked, with their tables.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue after the last complete round.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for results and temporary files.", file_okay=False)] = Path(
        "out/chaos"
    ),
) -> None:
    """Kill servers, workers and JVMs, fill disks, and compare every row with an undisturbed run and the events."""
    from experiments.shared import bench
    from experiments.shared.bench import wide_console

    if workload not in WORKLOADS:
        raise typer.BadParameter(f"--workload: {workload!r} is none; use {' or '.join(WORKLOADS)}")
    if store not in STORES:
        raise typer.BadParameter(f"--store: {store!r} is none; use {' or '.join(STORES)}")
    console = wide_console()
    if hosts is None:
        hosts = 2 if is_possible() and store == "folder" else 0
    elif hosts and store != "folder":
        raise typer.BadParameter("--store s3 needs --hosts 0: its server is only on this host's loopback interface")
    elif hosts and not is_possible():
        raise typer.BadParameter("--hosts: this user may not make network namespaces; use --hosts 0")
    settings = Settings(
        kills, seed, events_of_a_file=events, payload_bytes=payload, hosts=hosts, workload=workload, store=store,
        rewinds=rewinds, forks=forks,
    )  # fmt: skip
    record = {
        "experiment": "chaos",
        "settings": asdict(settings),
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
    }
    result, before_s = resumed(settings, out) if resume else (Result(), 0.0)
    if result.rounds:
        console.print(f"continuing after round {result.rounds - 1}: {result.kills} kills so far", highlight=False)
    begin = time.monotonic()

    def note() -> None:
        """Writes the result so far, from which an interrupted run can continue."""
        seconds = before_s + time.monotonic() - begin
        bench.write_json(out / "chaos.json", {**record, "seconds": seconds, "result": asdict(result)})

    run(settings, out, result, console, note)
    for line in summary(result):
        console.print(line, highlight=False)
    if result.differences:
        raise typer.Exit(1)


def run(
    settings: Settings, out: Path, result: Result, console: Console, note: Callable[[], None] = lambda: None
) -> None:
    """Runs rounds until there are enough kills. Calls ``note`` after each. Raises ChaosError."""
    from experiments.chaos.query import CLASSES

    kinds = iter(settings.kinds)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="classes-", dir=out) as classes:
        while result.kills < settings.kills:
            work = Path(tempfile.mkdtemp(prefix="work-", dir=out)).absolute()
            rng = random.Random(f"{settings.seed} {result.rounds}")
            of_round = copy.deepcopy(result)
            number, archive = result.rounds, Path(classes) / CLASSES
            try:
                Round(settings, number, work, rng, kinds, of_round, console, archive).run()
            except BaseException:
                console.print(f"failed; its files are left in {work}", highlight=False)
                raise
            of_round.rounds += 1
            vars(result).update(vars(of_round))
            note()
            # State servers of applications that have just ended still delete their own files.
            shutil.rmtree(work, ignore_errors=True)


class Round:
    """One round: some kills, on queries of its own. Adds its findings to ``result``.

    ``classes``: the JVM's archive of classes. The first round writes it.
    """

    def __init__(
        self,
        settings: Settings,
        number: int,
        work: Path,
        rng: random.Random,
        kinds: Iterator[str],
        result: Result,
        console: Console,
        classes: Path,
    ) -> None:
        self.settings, self.number, self.work, self.rng = settings, number, work, rng
        self.kinds, self.result, self.console = kinds, result, console
        self.kills = min(settings.kills_of_a_round, settings.kills - result.kills)
        self.files = int(settings.files_of_a_kill * self.kills) + settings.more_files
        self._seen: dict[str, set[str]] = {f"{MERGED}{SST}": set(), HANDED: set()}
        self._before = result.merged_files, result.handed_files
        self._places: Cluster | None = None
        self._workload = workload_of(settings.workload)
        self._classes = classes
        self._may_go_back = settings.rewinds + settings.forks > 0
        self._floors = dict.fromkeys(self._workload.queries, 0)
        """The batches before which the queries do not go back: their checkpoints have been repartitioned since."""
        self._forked: list[Path] = []

    def run(self) -> None:
        from experiments.chaos.data import batches_of, composition, differences, unread, write_batches, write_files
        from experiments.chaos.query import CLASSES, GOING_BACK, UNDISTURBED

        queries = self._workload.queries
        if self._classes.exists():
            os.link(self._classes, self.work / CLASSES)
        disturbed, calm, copied = self.work / "disturbed", self.work / "calm", self.work / "copied"
        for folder in (disturbed, calm, copied):
            folder.mkdir()
            if self._may_go_back:
                (folder / GOING_BACK).touch()
        seed = self.settings.seed * 1000 + self.number
        events = write_files(
            self.work / "all", seed, self.files, self.settings.events_of_a_file, self.settings.payload_bytes
        )
        shown = self.work / "input"
        shown.mkdir()
        for folder in (disturbed, copied):
            for query in queries:
                (folder / f"input-{query}").symlink_to(shown)
        with self._cluster() as self._places, self._store(disturbed / "state") as state:
            self._disturbed(disturbed, copied, state)
        batches = {query: composition(disturbed, query) for query in queries}
        for query, names in batches.items():
            write_batches(self.work / "all", calm / f"input-{query}", names)
        self._print("the same batches without faults ...")
        begin = time.monotonic()
        (calm / UNDISTURBED).touch()
        with self._child(calm, FolderPlace(calm / "state"), None) as child:
            if (code := self._wait_for_end(child)) != 0:
                raise ChaosError(f"the undisturbed run ended with {code}: {child.last_words()}")
            child.wait_for_jvm()
        if (self.work / CLASSES).exists() and not self._classes.exists():  # not every JVM writes one
            os.link(self.work / CLASSES, self._classes)
        self._print(f"... took {time.monotonic() - begin:.0f} s")
        found: list[str] = []
        for query in queries:
            got, twin, other = (batches_of(folder / query) for folder in (disturbed, copied, calm))
            names, of_copy = batches[query], composition(copied, query)
            found += unread(query, events, names) + unread(f"the copy: {query}", events, of_copy)
            found += differences(self._workload, query, got, other, _input(events, names))
            # Spark may form other batches of the files for the copy. Then only the events say what must come out.
            differ = differences(
                self._workload, query, twin, other if of_copy == names else twin, _input(events, of_copy)
            )
            found += [f"the copy: {difference}" for difference in differ]
            for folder in (disturbed, copied, calm, *self._forked):
                twice = sorted(path.name for path in (folder / query).glob("*.differs-*"))
                found += [f"{query}: a batch came out twice, with other rows: {name}" for name in twice]
            if self._may_go_back:
                found += compared_tables(self._workload, query, disturbed, calm, self._forked)
            for new in self._forked:
                names = composition(new, query)
                wrong = self._workload.wrong(query, batches_of(new / query), _input(events, names))
                found += [f"{new.name}: {each}" for each in (*unread(query, events, names), *wrong)]
            self.result.batches += len(got) + len(twin)
            self.result.batches_again += len(list((disturbed / query).glob("*.again-*")))
            self.result.rows += sum(map(len, got.values()))
        self.result.events += sum(map(len, events.values()))
        self.result.too_late += self._workload.too_late(_input(events, batches[queries[0]]))
        self.result.differences += [f"round {self.number}: {difference}" for difference in found]
        if found:
            keep = self.work.with_name(f"differences-{self.settings.seed}-{self.number}")
            shutil.copytree(self.work, keep, dirs_exist_ok=True)
        self._print(
            f"round {self.number}: {self.result.kills} kills so far, {len(self.result.differences)} differences"
        )

    @contextmanager
    def _store(self, folder: Path) -> Iterator[Place]:
        if self.settings.store == "folder":
            yield FolderPlace(folder)
            return
        bucket = Bucket()
        try:
            yield bucket
        finally:
            bucket.close()

    def _disturbed(self, disturbed: Path, copied: Path, state: Place) -> None:
        """Runs the queries with faults, and from half-way on also the copy."""
        half = self.files // 2
        self._print(f"round {self.number}: {self.files} files, {self.kills} kills to come")
        self._show(range(half))
        self._disturb(disturbed, state, self.kills // 2, half)
        for query in self._workload.queries:
            for name in (query, f"checkpoint-{query}"):
                shutil.copytree(disturbed / name, copied / name)
        self.result.copies += len(self._workload.queries)
        self._repartition(disturbed, state)
        self._show(range(half, self.files))
        with self._child(copied, state, self._places) as beside, ExitStack() as self._others:
            beside.wait_for_first_batches()
            copies = [beside]
            self._disturb(disturbed, state, self.kills - self.kills // 2, self.files, copies)
            self._note_files(state)
            for each in copies:
                if (code := self._wait_for_end(each)) != 0:
                    raise ChaosError(f"a copy ended with {code}: {each.last_words()}")

    @contextmanager
    def _cluster(self) -> Iterator[Cluster | None]:
        if not self.settings.hosts:
            yield None
            return
        from experiments.chaos.query import jvm_options

        (self.work / "hosts").mkdir()
        options = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": jvm_options(self.work)}
        # Otherwise the master gives an application up whose executors died ten times in a row.
        options["SPARK_MASTER_OPTS"] = "-Dspark.deploy.maxExecutorRetries=-1"
        hosts, cores = self.settings.hosts, 2  # of an executor of the query, and of one of its copy
        with cluster(hosts, self.work / "hosts", cores=cores, memory_mib=2048, environment=options) as places:
            yield places

    def _show(self, files: Iterable[int]) -> None:
        """Links files into the queries' input folder. Links keep the modification times."""
        for file in files:
            name = f"{file:06d}.parquet"
            os.link(self.work / "all" / name, self.work / "input" / name)

    def _repartition(self, folder: Path, state: Place) -> None:
        partitions = self.rng.choice((1, 3, 4))
        with (folder / "repartition.log").open("w+b") as log:
            code = start(folder, state, log, self._places, self.settings.workload, str(partitions)).wait(STARTING_S)
            if code != 0:
                log.seek(0)
                raise ChaosError(f"the checkpoints were not repartitioned: {log.read().decode()[-3000:]}")
        self.result.repartitions += len(list(folder.glob("checkpoint-*")))
        for query in self._workload.queries:
            self._floors[query] = 1 + max(int(path.stem) for path in (folder / query).glob("*.offset"))
        self._print(f"copied the checkpoints; those of the original now have {partitions} partitions")

    def _note_files(self, state: Place) -> None:
        """Counts files that versions in a folder name. A handed-over file has a link in each of its shards."""
        if state.folder is None:
            return
        for end, names in self._seen.items():
            names |= {path.name for path in state.folder.glob(f"*/*/shard-*/**/*{end}")}
        merged, handed = (was + len(names) for was, names in zip(self._before, self._seen.values(), strict=True))
        self.result.merged_files, self.result.handed_files = merged, handed

    # -- the child ----------------------------------------------------------------------------------------

    @contextmanager
    def _child(self, folder: Path, state: Place, places: Cluster | None) -> Iterator[Child]:
        child = Child(folder, state, places, self.settings.workload)
        try:
            yield child
        finally:
            child.end()

    def _disturb(self, folder: Path, state: Place, kills: int, files: int, copies: list[Child] | None = None) -> None:
        """Causes faults until there are ``kills`` kills, then lets the queries finish.

        Starts the process again as often as needed. ``files``: how many input files there are so far. ``copies``: gets
        the processes of queries that are forked; None: they are not.
        """
        kills_before = self.result.kills
        unexpected = 0
        next_stop: Callable[[], None] | None = None
        while True:
            if next_stop is not None:
                next_stop()
                next_stop = None
            with self._child(folder, state, self._places) as child:
                child.wait_until_started()
                while self.result.kills - kills_before < kills and self._wait_for_moment(child, files):
                    if (next_stop := self._next_stop(child, state, files, copies)) is not None:
                        break
                    self._burst(child, kills_before + kills)
                    self._note_files(state)
                    if child.is_lost:
                        break
                if next_stop is not None:
                    continue
                code = self._wait_for_end(child)
                if code == 0:
                    return
                if not child.is_lost:
                    unexpected += 1
                    self._print(f"the child ended with {code}: {child.last_words()[-500:]}")
                    if unexpected > 3:
                        raise ChaosError("the child ended by itself more than 3 times")

    def _next_stop(
        self, child: Child, state: Place, files: int, copies: list[Child] | None
    ) -> Callable[[], None] | None:
        """What is to be done now to queries that are stopped, if something is. A fork may also be made as they run."""
        queries, of_all, folder = self._workload.queries, self.settings.kills, child.folder
        if copies is not None and self.result.is_due(FORK, self.settings.forks, of_all):
            if self.rng.random() < 0.5 or self.files - max(files_of(folder, query) for query in queries) < ENOUGH_FILES:
                return lambda: self._fork(folder, state, copies)
            self._fork(folder, state, copies)
        if self.result.is_due(REWIND, self.settings.rewinds, of_all):
            query = self.rng.choice(queries)
            for _ in range(MOMENTS):
                if targets(folder, query, self.files, self._floors[query]):
                    return lambda: self._go_back(folder, query, state)
                if not self._wait_for_moment(child, files):
                    break
        return None

    def _go_back(self, folder: Path, query: str, state: Place) -> None:
        note = go_back(folder, query, self.files, self._floors[query], state.uri, self.rng)
        self._add(REWIND, note, [files_of(folder, query)])

    def _fork(self, folder: Path, state: Place, copies: list[Child]) -> None:
        """Forks the queries. The forks go on beside them, and have tables of their own."""
        new, queries = self.work / f"fork-{len(self._forked)}", self._workload.queries
        note = fork(folder, new, queries, list(self._workload.tables), state.uri, self.files)
        if note is not None:
            self._forked.append(new)
            copies.append(self._others.enter_context(self._child(new, state, None)))
        self._add(FORK, note or "too late", [files_of(folder, query) for query in queries])

    def _add(self, kind: str, note: str, batches: list[int]) -> None:
        fault = Fault(kind, self.number, None, 0, note, batches)
        self.result.faults.append(fault)
        self._print(self._line(fault, ""))

    def _wait_for_moment(self, child: Child, files: int) -> bool:
        """Waits for some batches and part of another. False if there are no more batches."""
        from experiments.chaos.data import FLUSHES

        wanted = child.batches() + self.rng.randint(0, 2)
        moment_s = self.rng.random()
        while child.batches() < wanted:
            enough = len(self._workload.queries) * (files - FLUSHES)
            if child.process.poll() is not None or child.batches() >= enough:
                return False
            child.note_progress()
            time.sleep(0.01)
        time.sleep(moment_s * child.batch_s)
        return child.process.poll() is None

    def _burst(self, child: Child, kills: int) -> None:
        """Causes one fault or a few in a row, until there are ``kills`` kills. Then waits for the next batch."""
        from experiments.chaos import faults as chaos_faults

        seen, fault = child.seen(), None
        for left in reversed(range(chaos_faults.burst(self.rng))):
            fault = self._cause_fault(child)
            if fault is None or child.is_lost or self.result.kills >= kills:
                break
            if left:
                self._print(self._line(fault, "the next one follows"))
                time.sleep(self.rng.random() * child.batch_s)
        if fault is not None:
            self._watch(child, fault, seen)

    def _cause_fault(self, child: Child) -> Fault | None:
        from experiments.chaos import faults as chaos_faults

        kind = next(self.kinds, None)
        if kind is None:
            if self.rng.random() < chaos_faults.FAULT_SHARE:
                kind = chaos_faults.fault_kind(self.rng, child.state.bucket is not None)
            else:
                kind = chaos_faults.kill_kind(self.rng, self._places is not None)
        before = child.by_query()
        done: Done | None = None
        deadline = time.monotonic() + STARTING_S
        moment = ""
        kills = chaos_faults.KILLS | chaos_faults.KILLS_OF_HOSTS
        if kind in kills:
            moment = chaos_faults.wait_for_moment(
                child.application, child.state.folder, self._workload.moments, self.rng
            )
        while done is None and time.monotonic() < deadline and child.process.poll() is None:
            done = chaos_faults.do(kind, child.application, self.rng)
            if done is None:
                time.sleep(0.02)  # a server or a worker may just be starting
        if done is None:
            return None
        child.is_lost = kind == "JVM"
        is_kill = kind in kills and "NOT" not in done.note
        number = self.result.kills + 1 if is_kill else None
        fault = Fault(kind, self.number, number, done.pid, ", ".join(filter(None, (moment, done.note))), before)
        self.result.faults.append(fault)
        return fault

    def _watch(self, child: Child, fault: Fault, seen: dict[str, int]) -> None:
        """Waits for the next batch after the last fault of a burst. ``seen``: the counts before the first one."""
        begin, behind = time.monotonic(), child.by_query()
        while child.process.poll() is None and not child.is_lost:
            child.note_progress()
            came = [now - then for now, then in zip(child.by_query(), behind, strict=True)]
            if min(came) > 0 or max(came) > 1:  # one query may have finished already
                break
            time.sleep(0.01)
        fault.next_batch_s = time.monotonic() - begin
        after = child.seen()
        # A host that loses its disk loses its logs.
        fault.tasks_lost, fault.turns = (max(0, after[name] - seen[name]) for name in ("lost", "turns"))
        failures = child.failures()[seen["failures"] :]
        fault.query_failures = len(failures)
        self.result.failures += failures
        effect = "the queries restart"
        if not child.is_lost:
            effect = f"next batch after {fault.next_batch_s:.1f} s, {fault.tasks_lost} lost, {fault.turns} continued"
        if failures:
            effect += f"; query failed: {cause(failures[-1])}"
        self._print(self._line(fault, effect))

    def _line(self, fault: Fault, effect: str) -> str:
        place = f"{fault.kill}/{self.settings.kills}" if fault.kill is not None else "-"
        note = f" ({fault.note})" if fault.note else ""
        where = "/".join(map(str, fault.batches))
        return f"{place:>8}  {fault.kind:<14} pid {fault.pid:<7} in batch {where:<8}{note} {effect}"

    def _wait_for_end(self, child: Child) -> int:
        while child.process.poll() is None:
            child.note_progress()
            if child.is_lost and time.monotonic() > child.lost_at + 30.0:
                child.process.kill()  # it has not noticed that its JVM is gone
            time.sleep(0.05)
        return int(child.process.returncode)

    def _print(self, text: str) -> None:
        self.console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, markup=False, soft_wrap=True)


def _input(events: Mapping[str, list[Event]], batches: Iterable[Iterable[str]]) -> list[list[Event]]:
    """The events of each batch. ``batches``: the names of the files of each."""
    return [[event for name in names for event in events[name]] for names in batches]
