"""The command line: ``aion demo | experiment | policy``. Each command imports what it needs, when it runs."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from aion import __version__
from aion.errors import AionError, PolicyError

if TYPE_CHECKING:
    from aion.config import Policy

# The window of `aion policy explain`: one minute of an arbitrary day.
_START_US = 1_735_732_800_000_000
_END_US = _START_US + 60_000_000


class _Aion(TyperGroup):
    """Shows what Aion raises on purpose as a message; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AionError as error:
            _print_red(str(error), to_stderr=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Aion,
    help="PySpark windowed aggregation in which a late event is never a problem.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
policy_app = typer.Typer(help="Check and explain policies.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")
# By name, here and in `demo`: mypy is strict about what this module imports, and experiments are not of it.
app.add_typer(import_module("experiments").app, name="experiment")

PolicyFile = Annotated[
    str, typer.Argument(metavar="FILE", help="A policy file, or the name of a preset.", show_default=False)
]


def main() -> None:
    """The console script. Exit code 2 for an error of the user's, with one clear message."""
    app()


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
    flights: Annotated[int, typer.Option(min=0, help="How many flights; 0: as many as fit the demo.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for panes and figure.", file_okay=False)] = Path("out"),
) -> None:
    """Stream real late flights through Spark, and compare the panes with the truth."""
    raise typer.Exit(import_module("experiments.demo").run(flights=flights, out=out))


@policy_app.command()
def check(file: PolicyFile) -> None:
    """Say whether a policy is valid; if not, each error with its line and what would be right."""
    from aion.config import load_policy

    try:
        load_policy(file)
    except PolicyError as error:
        _print_red(str(error), to_stderr=False)
        raise typer.Exit(1) from None
    typer.echo(f"{file}: ok")


@policy_app.command()
def explain(file: PolicyFile) -> None:
    """Tell in words what will happen to a window under a policy."""
    from rich.console import Console
    from rich.table import Table

    from aion.config import load_policy

    table = Table(title=f"A window of one minute under the policy {file}", show_lines=True)
    table.add_column("when", ratio=2)
    table.add_column("what happens", ratio=3)
    for when, what in _life_of_a_window(load_policy(file)):
        table.add_row(when, what)
    Console(highlight=False, markup=False).print(table)


@policy_app.command()
def schema() -> None:
    """Print the JSON schema of policy files, for editors."""
    from aion.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


def _print_red(text: str, *, to_stderr: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    # One line stays one line, so that "file:line:" can be clicked and searched.
    Console(stderr=to_stderr, highlight=False).print(Text(text, style="red"), soft_wrap=True)


def _life_of_a_window(policy: Policy) -> list[tuple[str, str]]:
    """When, and what then: DESIGN section 4 with the numbers of a policy."""
    from aion.config import format_bytes
    from aion.time import format_duration, format_instant

    state, bound_us = policy.state, policy.lateness.initial_bound_us
    shards = "one shard per Spark partition" if state.shards == "auto" else f"{state.shards} shards"
    packing = "not compressed" if state.compression == "none" else f"compressed with {state.compression}"
    folder = state.dir or "a folder that is chosen when the query starts"
    target = format_bytes(policy.blocks.target_bytes)
    keep, read, expire, late = _backend_words(policy)

    start, end = format_instant(_START_US), format_instant(_END_US)
    gone = format_instant(_END_US + bound_us)
    bound = format_duration(bound_us)
    told = [
        (
            f"its events come, those from {start} on and before {end}",
            f"They are packed into {state.codec} blocks of about {target}, {packing}, and shuffled to {shards}. {keep}",
        ),
        ("each Spark batch ends", f"What is new of it is committed to {folder}."),
        (
            f"the watermark reaches {end}, its end",
            f"On-time execution: {read} One pane of kind on_time comes out. {expire}",
        ),
    ]
    if bound_us == 0:
        return [
            *told,
            (
                "at once, because the bound is 0",
                "Its state is purged. Every event that comes later is dropped: it comes out as a row of kind dropped.",
            ),
        ]
    return [
        *told,
        (
            f"events come after that: late, but within the bound of {bound}",
            f"{late} The window is executed again once in each batch that brought it late events; its pane "
            "of kind late replaces the earlier ones.",
        ),
        (
            f"the watermark reaches {gone}, its end plus the bound",
            "If events came since its last execution it is executed a last time, with a pane of kind final. "
            "Then its state is purged.",
        ),
        (f"events come later than {bound} after its end", "They come out as rows of kind dropped."),
    ]


def _backend_words(policy: Policy) -> tuple[str, str, str, str]:
    """How the backend keeps blocks, reads them, lets them go when the window expires, takes late ones."""
    from aion.config import format_bytes

    budget_bytes, limit_bytes = policy.memory.budget_bytes, policy.memory.bucket_limit_bytes
    budget, limit = format_bytes(budget_bytes), format_bytes(limit_bytes)
    match policy.state.backend:
        case "memory":
            return (
                f"All of them stay in memory, however many: neither the budget of {budget} nor the limit of "
                f"{limit} for a bucket binds the backend memory.",
                "it is read from memory.",
                "It stays in memory.",
                "They are kept in memory too.",
            )
        case "rocksdb":
            return (
                f"All of them go to RocksDB; only those on their way there are in memory, within {budget} "
                "for all windows of a host.",
                "it is read from RocksDB.",
                "It stays on disk.",
                "They go to RocksDB too.",
            )
        case "tiered":
            full = budget_bytes // limit_bytes
            windows = "one such window fits" if full == 1 else f"{full:,} such windows fit"
            return (
                f"They stay in memory until its m-bucket has {limit}, or all m-buckets of the host {budget} "
                f"({windows} at a time); what is beyond goes to its p-bucket in RocksDB.",
                "it is read from memory first, then from RocksDB.",
                "Then it leaves memory for RocksDB.",
                "They go straight to its p-bucket in RocksDB.",
            )


if __name__ == "__main__":
    main()
