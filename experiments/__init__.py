"""The experiments that measure Aion. Each is one command of ``aion experiment``.

The command line of Aion looks them up by the name of this package, if they are there: ``app`` has the commands, and
``trace_of`` makes the trace of a workload for ``aion tune``.
"""

from __future__ import annotations

import typer

from aion.installation import require_extra
from experiments.chaos import chaos
from experiments.cleanup import cleanup
from experiments.completeness import completeness
from experiments.hosts import hosts
from experiments.ingest import ingest
from experiments.joins import joins
from experiments.late_keys import late_keys
from experiments.latency import latency
from experiments.limits import limits
from experiments.memory_pressure.command import compare, memory_pressure
from experiments.network import network
from experiments.nexmark import nexmark
from experiments.overhead import overhead
from experiments.planned import planned
from experiments.prestage import prestage
from experiments.restart import restart
from experiments.restore import restore
from experiments.sessions import sessions
from experiments.sinks import sinks
from experiments.slicing import slicing
from experiments.staleness import staleness
from experiments.stateful import stateful
from experiments.store import store
from experiments.tune_check import tune_check
from experiments.tune_check.traces import trace_of
from experiments.windows import windows

__all__ = ["app", "trace_of"]

app = typer.Typer(help="Measure Aion: workloads, baselines, figures.", no_args_is_help=True)


# Without a callback, typer would turn a single command into the app itself.
@app.callback()
def _experiments() -> None:
    """Measure Aion: workloads, baselines, figures."""
    require_extra("experiments", "an experiment")


# One line per experiment. Their modules import nothing heavy at module level.
app.command("cleanup")(cleanup)
app.command("chaos")(chaos)
app.command("hosts")(hosts)
app.command("ingest")(ingest)
app.command("joins")(joins)
app.command("latency")(latency)
app.command("completeness")(completeness)
app.command("compare")(compare)
app.command("late-keys")(late_keys)
app.command("limits")(limits)
app.command("memory-pressure")(memory_pressure)
app.command("nexmark")(nexmark)
app.command("overhead")(overhead)
app.command("planned")(planned)
app.command("prestage")(prestage)
app.command("restart")(restart)
app.command("restore")(restore)
app.command("sessions")(sessions)
app.command("sinks")(sinks)
app.command("store")(store)
app.command("stateful")(stateful)
app.command("staleness")(staleness)
app.command("slicing")(slicing)
app.command("network")(network)
app.command("tune-check")(tune_check)
app.command("windows")(windows)
