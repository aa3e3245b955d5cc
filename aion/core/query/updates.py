"""Events that replace earlier ones: panes of windows, for the windows behind them. Pure.

A later pane of a window replaces an earlier one, and a retracted pane takes it away. So windows of windows keep all
panes that come, and are computed from the newest pane of each key and window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from aion.core.query.plan import Plan, Updates
from aion.core.windows import Aligned
from aion.errors import ConfigError, SchemaError, WindowError

ORDER, RETRACTED, DROPPED = "__aion_order", "__aion_retracted", "__aion_dropped"
"""Columns of the events that the user does not see: the number of the pane, which all of its rows share and later panes
exceed; whether the event only takes an earlier one away; and, if earlier windows dropped it, what they said, as JSON.
"""
_HIDDEN = pa.schema([(RETRACTED, pa.bool_()), (DROPPED, pa.string()), (ORDER, pa.int64())])


def of_updates(plan: Plan, schema: pa.Schema, identity: Sequence[str]) -> Plan:
    """Returns the plan for events that replace earlier ones. ``schema``: of the input.

    ``identity``: an event replaces an earlier one with the same values in these columns. The key must be among them,
    and the time must follow from them. Raises WindowError, SchemaError, ConfigError.
    """
    for name, window in plan.windows.items():
        if not isinstance(window, Aligned):
            raise WindowError(
                f"windows: {name!r} belongs to single keys, and the results that it would be made of are replaced by "
                "later ones; give the windows or the join before it emit='final', so that each result is the only one"
            )
        if window.fill is not None:
            raise WindowError(
                f"windows: {name!r} has fill={window.fill.value!r}, and the results that it would be made of are "
                "replaced by later ones; give the windows or the join before it emit='final', so that each result is "
                "the only one, or leave fill and fill_for out"
            )
    if plan.completeness:
        raise ConfigError("completeness: it counts events, and panes are replaced by later ones; leave it out")
    if plan.unique:
        raise ConfigError("unique: panes of a window replace each other in any case; leave it out")
    for name in _HIDDEN.names:
        if name in schema.names:
            raise SchemaError(f"column {name!r} has a name that Aion needs; rename it")
    names = dict.fromkeys((*plan.schema.names, *identity))
    events = pa.schema([*(schema.field(name) for name in names), *_HIDDEN])
    return replace(
        plan,
        schema=events,
        layout=None,
        blocking=True,
        own=None,
        updates=Updates(tuple(identity), plan.layout),
    )


def visible(plan: Plan) -> list[str]:
    """Returns the columns of the events that the user knows."""
    return [name for name in plan.schema.names if plan.updates is None or name not in _HIDDEN.names]
