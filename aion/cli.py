"""The command line.

``aion demo | diff | experiment | explain | fork | inspect | migrate | policy | rescale | rewind | top | tune``.

Each command imports what it needs.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from aion import __version__
from aion.errors import AionError, ConfigError, PolicyError, needs_extra
from aion.installation import check_experiments, has_experiments, require_extra

with needs_extra("cli", "the command aion"):
    import rich  # noqa: F401 (checked here because commands print with it)
    import typer
    from typer.core import TyperGroup


class _Aion(TyperGroup):
    """Prints an AionError, or what the system refused, as a message, and exits with code 2.

    Any other error is a bug and keeps its traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AionError as error:
            message = str(error)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of a pipe has ended, which typer handles
                raise
            message = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        _print_red(message, to_stderr=True)
        raise typer.Exit(2)


app = typer.Typer(
    cls=_Aion,
    help="Windowed aggregation for PySpark Structured Streaming that includes late events.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
policy_app = typer.Typer(help="Check and explain policies.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")
if has_experiments():
    # Imported by name: mypy checks what this module imports strictly, but not the experiments.
    app.add_typer(import_module("experiments").app, name="experiment")
else:

    @app.command(
        "experiment",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )
    def no_experiments() -> None:
        """Measure Aion: workloads, baselines, figures. Only in a checkout."""
        check_experiments("aion experiment")


TABLE_WIDTH = 136
PolicyFile = Annotated[
    str, typer.Argument(metavar="FILE", help="A policy file, or the name of a preset.", show_default=False)
]

JobState = Annotated[
    str | None,
    typer.Option(
        "--state", metavar="DIR", help="The state folder of the job: path or URI. Default: aion-state in this folder."
    ),
]
JobConf = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="KEY=VALUE", help="A setting of the Spark session that does the work."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"aion {__version__}")
        raise typer.Exit


@app.callback()
def _aion(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    flights: Annotated[int, typer.Option(min=0, help="Number of flights. 0: the default for the demo.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for panes and figure.", file_okay=False)] = Path("out"),
) -> None:
    """Stream real late flights through Spark, and compare the panes with a batch computation."""
    require_extra("demo", "the demo")
    raise typer.Exit(import_module("aion.demo.command").run(flights=flights, out=out))


@app.command("diff")
def diff_definitions(
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint of a query: path or URI.")],
    spec: Annotated[str, typer.Argument(metavar="MODULE:NAME", help="An aion.Spec, or a list of them, to start with.")],
    schema: Annotated[
        str, typer.Option(metavar="DDL", help="The columns of the input, e.g. 'k string, ts timestamp, v double'.")
    ],
    state: Annotated[
        str, typer.Option(metavar="DIR", help="The state folder (spark.aion.state.dir): path or URI.")
    ] = "aion-state",
) -> None:
    """Say what a query would do with its state if it were started again with other definitions. Changes nothing.

    Exit code 2: it could not go on, and the message says why.
    """
    from aion.config.values import location
    from aion.tools.diff import diff

    for line in diff(location(checkpoint), spec, schema=schema, state_dir=location(state)):
        typer.echo(line)


@app.command("explain")
def explain_batches(
    what: Annotated[
        str,
        typer.Argument(
            metavar="QUERY | STATE_DIR",
            help="The state folder (spark.aion.state.dir): path or URI. Or the id of a query, or an operator's name.",
        ),
    ],
    state: Annotated[
        str | None,
        typer.Option(metavar="STATE_DIR", help="For a query: the state folder. Default: aion-state in this folder."),
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="How many of the last batches to show.")] = 10,
) -> None:
    """Say what the last batches did, and why: executions, dropped events, bounds. Exit code 1: damaged."""
    from aion.config.values import location
    from aion.tools.explain import explain

    if not explain(location(what), state_dir=None if state is None else location(state), batches=batches):
        raise typer.Exit(1)


@app.command()
def inspect(
    state: Annotated[str, typer.Argument(metavar="DIR", help="The state folder (spark.aion.state.dir): path or URI.")],
    repair: Annotated[
        bool, typer.Option("--repair", help="Move damaged files aside, and go back to the newest whole versions.")
    ] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="With --repair: a query's Spark checkpoint. It is set back, and only its state is repaired."),
    ] = None,
    contents: Annotated[bool, typer.Option(help="Read every byte and verify all checksums.")] = True,
    windows: Annotated[
        int, typer.Option(min=0, help="How many windows of each operator to show, with bounds, reasons and due times.")
    ] = 20,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="""Instead: show what stateful processors keep for a key, such as '{"user": "anna"}'.""",
        ),
    ] = None,
    operator: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --key: only in the operator of this name.")
    ] = None,
    values: Annotated[
        int, typer.Option(min=0, help="With --key: how many elements of each list and map, and timers, to show.")
    ] = 20,
    lineages: Annotated[
        bool, typer.Option("--lineages", help="Instead: list the checkpoints that have state here.")
    ] = False,
    forget: Annotated[
        str | None,
        typer.Option(
            metavar="LINEAGE",
            help="Instead: delete the versions of a lineage whose checkpoint is gone. --gone: of all that are.",
        ),
    ] = None,
) -> None:
    """Verify a state folder, and show its versions, files, windows, tiers and lateness.

    Exit code 1: damaged, or nothing could be repaired. 2: there is no state, or another version of Aion wrote it.

    With --key, show instead what stateful processors keep for one key.
    """
    if repair + lineages + (forget is not None) + (key is not None) > 1:
        raise ConfigError("--key, --repair, --lineages and --forget exclude each other; give one of them")
    if checkpoint is not None and not repair:
        raise ConfigError("--checkpoint requires --repair; without it, nothing is changed")
    from aion.config.values import location

    state = location(state)
    if key is not None:
        from aion.tools.inspect.key import show_key

        return show_key(state, key, operator, values)
    if operator is not None:
        raise ConfigError("--operator requires --key")
    if lineages or forget is not None:
        from aion.tools.inspect.lineages import ALL_GONE, forget_gone, forget_lineage, show_lineages

        if forget is None:
            return show_lineages(state)
        return forget_gone(state) if forget == ALL_GONE else forget_lineage(state, forget)
    from aion.tools.inspect.state import inspect
    from state_backends.files.storage import local_path

    place = None if checkpoint is None else local_path(location(checkpoint))
    if checkpoint is not None and place is None:
        raise ConfigError(f"--checkpoint: {checkpoint} is not on this machine; --repair without it says what to move")
    if not inspect(state, repair=repair, checkpoint=place, contents=contents, windows=windows):
        raise typer.Exit(1)


@app.command()
def migrate(
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint of a stopped query of stock Spark: path or URI.")],
    new: Annotated[str, typer.Argument(help="The checkpoint to make. Nothing may be there yet.")],
    state: Annotated[
        str | None, typer.Option(metavar="DIR", help="The state folder of the job (spark.aion.state.dir): path or URI.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="FILE", help="The policy of the job: a file, or the name of a preset.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="NUMBER=NAME", help="The name of an operator, if the job does not use the default names."),
    ] = None,
    conf: JobConf = None,
) -> None:
    """Take the state of a stopped query with stateful processors over to Aion, so that its job goes on where it was."""
    from aion.spark.taking_over.migrate import migrate_alone

    names = {}
    for key, value in _pairs("--name", name):
        if not key.isdecimal():
            raise ConfigError(f"--name: {key!r} is not the number of an operator; give NUMBER=NAME")
        names[int(key)] = value
    done = migrate_alone(checkpoint, new, dict(_pairs("--conf", conf)), policy=policy, state_dir=state, names=names)
    for number, operator in sorted(done.names.items()):
        typer.echo(f"processor {number}: its state after batch {done.batch} is taken over, under the name {operator!r}")
    if done.unfinished:
        typer.echo(f"batch {done.batch + 1} had begun; it runs again, with the same input")
    typer.echo("Start the job on Aion with these settings, and it goes on:")
    typer.echo(f"  checkpointLocation    {new}")
    typer.echo(f"  spark.aion.state.dir  {done.state_dir}")


@app.command("rewind")
def rewind_query(
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint of a stopped query: path or URI.")],
    to: Annotated[
        str, typer.Option(metavar="BATCH|TIME", help="A batch, or an instant: then the last batch that began by then.")
    ],
    state: JobState = None,
    leave_tables: Annotated[
        bool, typer.Option("--leave-tables", help="Go back even if there are tables that cannot.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would do, and change nothing.")] = False,
    conf: JobConf = None,
) -> None:
    """Set a stopped query back to the end of an earlier batch. It reads again what came since."""
    from aion.sinks.going_back import Tables
    from aion.spark.taking_over.rewind import rewind_alone

    settings = dict(_pairs("--conf", conf))
    done = rewind_alone(
        checkpoint, to, settings, tables_of=Tables, state_dir=state, leave_tables=leave_tables, dry_run=dry_run
    )
    for line in done.lines(would=dry_run):
        typer.echo(line)


@app.command("fork")
def fork_query(
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint of a query, which may run: path or URI.")],
    new_checkpoint: Annotated[str, typer.Argument(help="Where the new one is to be. It must not exist.")],
    state: JobState = None,
    new_state: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="The state folder of the copy. Default: that of the job, which both then use."
        ),
    ] = None,
    conf: JobConf = None,
) -> None:
    """Copy a query with its state: the copy goes on by itself, beside the original."""
    from aion.spark.taking_over.fork import fork_alone

    settings = dict(_pairs("--conf", conf))
    done = fork_alone(checkpoint, new_checkpoint, settings, state_dir=state, new_state_dir=new_state)
    for line in done.lines(new_checkpoint):
        typer.echo(line)


@app.command("rescale")
def rescale_query(
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint of a stopped query: path or URI.")],
    partitions: Annotated[int, typer.Argument(metavar="N", help="How many partitions it gets, up to its shards.")],
    state: JobState = None,
    conf: JobConf = None,
) -> None:
    """Give a stopped query another number of partitions: the tasks that work on its shards. State stays in place."""
    from aion.spark.api.rescale import rescale_alone

    done = rescale_alone(checkpoint, partitions, dict(_pairs("--conf", conf)), state_dir=state)
    typer.echo(done.line())


def _pairs(option: str, given: list[str] | None) -> list[tuple[str, str]]:
    """Splits KEY=VALUE."""
    pairs = []
    for text in given or ():
        key, separator, value = text.partition("=")
        if not key or not separator:
            raise ConfigError(f"{option}: {text!r} has no '='; give KEY=VALUE")
        pairs.append((key, value))
    return pairs


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print the metrics once and exit.")] = False,
    every: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds between two updates.")] = 1.0,
) -> None:
    """Show live metrics of this user's state servers on this host: events, windows, memory, I/O."""
    from aion.tools.top import top

    top(every_s=every, once=once)


@app.command()
def tune(
    trace: Annotated[
        Path | None,
        typer.Option(help="A trace file, or the folder of trace.folder of the policy.", show_default=False),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(help="Instead of a trace: average, bigrams, stock or linear-road.", show_default=False),
    ] = None,
    memory: Annotated[str, typer.Option(help="The most memory for blocks.")] = "512MiB",
    staleness: Annotated[float, typer.Option(help="The largest staleness, as a mean over windows.")] = 0.05,
    coverage: Annotated[float, typer.Option(help="The share of late events that must not be dropped.")] = 0.99,
    policy: Annotated[str, typer.Option(help="The policy to start from: a file, or a preset.")] = "standard",
    out: Annotated[Path, typer.Option(help="The policy file to write.", dir_okay=False)] = Path("out/tuned.yaml"),
    evaluations: Annotated[int, typer.Option(min=5, help="The approximate number of policies to replay.")] = 120,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the search, and of a workload.")] = 1,
    machine: Annotated[
        Path | None,
        typer.Option(
            help="A file with the speed of the disk. If it does not exist, it is measured and written.",
            show_default=False,
            dir_okay=False,
        ),
    ] = None,
    scale: Annotated[float, typer.Option(min=0.001, max=1, help="For a workload: scales its rate and windows.")] = 0.1,
    batches: Annotated[int, typer.Option(min=2, help="For a workload: the number of batches.")] = 40,
    past_windows: Annotated[
        int, typer.Option(min=1, help="For a workload: the number of past windows that get late events.")
    ] = 5,
) -> None:
    """Find a policy for a stream: replay its trace under many policies, and write the best one to a file."""
    from rich.console import Console

    from aion.config import size_bytes
    from aion.execute.record.trace import read_trace
    from aion.tools.tune.command import machine_of
    from aion.tools.tune.command import tune as run
    from aion.tools.tune.search import Goal

    if (trace is None) == (workload is None):
        raise ConfigError("give either --trace or --workload")
    for name, share in (("staleness", staleness), ("coverage", coverage)):
        if not 0 < share < 1:
            raise ConfigError(f"--{name}: {share:g} is not a share above 0 and below 1")
    console = Console(markup=False)
    if console.width < TABLE_WIDTH:
        console = Console(markup=False, width=TABLE_WIDTH)
    if trace is not None:
        found, source = read_trace(trace), str(trace)
    else:
        check_experiments("--workload")
        with console.status(f"generating events of {workload}"):
            trace_of = import_module("experiments").trace_of
            found = trace_of(workload, scale=scale, batches=batches, past_windows=past_windows, seed=seed)
        source = f"the workload {workload} at scale {scale:g}"
    goal = Goal(size_bytes(memory, what="--memory"), staleness, coverage)
    run(
        found,
        goal,
        machine_of(machine, console, durable=found.definition.commits),
        source=source,
        policy=policy,
        out=out,
        evaluations=evaluations,
        seed=seed,
        console=console,
    )


@policy_app.command()
def check(file: PolicyFile) -> None:
    """Check a policy. Prints each error with its line and what would be right. Exit code 1: invalid."""
    from aion.config import load_policy

    with _invalid_policies():
        load_policy(file)
    typer.echo(f"{file}: ok")


@policy_app.command()
def explain(file: PolicyFile) -> None:
    """Describe in words what will happen to a window under a policy. Exit code 1: invalid."""
    from rich.console import Console
    from rich.table import Table

    from aion.config import life_of_a_window, load_policy
    from state_backends.server.machine import memory_limit_bytes

    with _invalid_policies():
        policy = load_policy(file)
    table = Table(title=f"A window of one minute under the policy {file}", show_lines=True)
    table.add_column("when", ratio=2)
    table.add_column("what happens", ratio=3)
    for when, what in life_of_a_window(policy, memory_limit_bytes()):
        table.add_row(when, what)
    Console(highlight=False, markup=False).print(table)


@policy_app.command()
def show(file: PolicyFile) -> None:
    """Print a whole policy as a YAML file: all keys, with what each does and when to change it.

    Exit code 1: invalid.
    """
    from aion.config import policy_file

    with _invalid_policies():
        typer.echo(policy_file(file), nl=False)


@policy_app.command()
def schema() -> None:
    """Print the JSON schema of policy files, for editors."""
    from aion.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@policy_app.command()
def docs() -> None:
    """Print the reference of all keys and presets, as Markdown."""
    from aion.config import policy_docs

    typer.echo(policy_docs(), nl=False)


@contextmanager
def _invalid_policies() -> Iterator[None]:
    """Prints what is wrong with a policy, and exits with code 1."""
    try:
        yield
    except PolicyError as error:
        _print_red(str(error), to_stderr=False)
        raise typer.Exit(1) from None


def _print_red(text: str, *, to_stderr: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    # Do not wrap lines, so that "file:line:" can be clicked and searched.
    Console(stderr=to_stderr, highlight=False).print(Text(text, style="red"), soft_wrap=True)


if __name__ == "__main__":
    app()
