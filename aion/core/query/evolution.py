"""Definitions that change between two starts of a query (docs/operate/restarts.md). Pure.

A definition of windows is known by its name. It keeps its number, by which snapshots call it, as long as the query
lives. One that is added begins with windows from the *change* on, an instant that no event which is kept has reached.
One that is removed, or means something else now, finishes the windows that begin before the change. So each window is
computed from all its events, or is not there. A column that needs partials that earlier blocks do not have is null in
windows that begin before the change.

What blocks hold, and how they are cut, also changes. Each change is a *step*. A snapshot says how many steps it knows,
and from which block on blocks are as a step left them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from aion.aggregates.groups import Groups
from aion.aggregates.partial import Partial, Rows, States, needs_all
from aion.base.arrow_types import arrow_type
from aion.base.identity import family
from aion.base.numbers import NEVER
from aion.core.calendars import Steps, ZoneRules
from aion.core.packing import untable
from aion.core.periodic import is_periodic, periodic_of
from aion.core.query.history import EVOLUTION, OVER, Evolution, Kept, Step, StoredColumns, layouts_of
from aion.core.query.plan import DROP, FINISH, SLICE, Plan
from aion.core.slicing.aligned import AlignedWindows
from aion.core.windows import ALIGNED, Aligned
from aion.errors import AionError, ForeignState
from state_backends.format.definitions import BEFORE, COMPUTED, FOLLOWS, NOT_COMPARED, WORDS, digest


class Version(NamedTuple):
    """A version of a shard: the definition that it was made with, and its snapshot."""

    definition: Mapping[str, Any]
    snapshot: Mapping[str, Any]


class Change(NamedTuple):
    """What a start changes. ``at_us``: the change, or None if nothing is kept yet. ``columns``: result columns that
    begin.

    ``added``, ``removed``: names of windows. ``drops``: those that are removed go at once.
    """

    evolution: Evolution
    at_us: int | None
    added: tuple[str, ...]
    removed: tuple[str, ...]
    columns: tuple[str, ...]
    removed_columns: tuple[str, ...]
    drops: bool


def settled(
    found: dict[str, Any], batch: int | None, newest: Callable[[Sequence[str]], Sequence[Version]]
) -> dict[str, Any]:
    """Returns the definition that the state had after a batch, the last one that has ended. It is the stored one,
    unless the first batch after a change failed, or the checkpoint was set back.

    ``newest``: returns the newest versions up to then with definitions of these digests, those of the last batch first.
    """
    before = found.get(BEFORE, {"batch": None, "definition": None})
    earlier: dict[str, Any] | None = before["definition"]
    if earlier is None or (batch is not None and (before["batch"] is None or before["batch"] < batch)):
        return found
    if before["batch"] != batch:
        kept = [version.definition for version in newest(found[FOLLOWS])]
        return next((dict(each) for each in kept if digest(each) in found[FOLLOWS]), earlier)
    return earlier


def same(found: Mapping[str, Any], plan: Plan) -> bool:
    """Returns whether a stored definition is what the plan asks for."""
    if EVOLUTION not in found and [name for name, _ in found["windows"]] != list(plan.windows):
        return False  # what is kept calls them by their numbers
    return not _retyped(found, plan) and _asked(found) == _asked(plan.definition)


def _asked(definition: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a definition asks for now, whatever it was before."""
    asked = {name: value for name, value in definition.items() if name not in (*NOT_COMPARED, EVOLUTION, FOLLOWS)}
    if EVOLUTION in definition:
        asked["windows"] = [[kept.name, kept.spec] for kept in Evolution.of(definition).windows if kept.is_current]
    asked["windows"] = sorted(asked["windows"], key=lambda pair: str(pair[0]))
    asked["block"] = [column for column in asked["block"] if column[0] != SLICE]
    return asked


def change(
    found: dict[str, Any],
    plan: Plan,
    *,
    at_us: int | None,
    batch: int | None,
    finished: Container[int] = (),
    on_removed: str = FINISH,
    oldest: Sequence[Version] | None = None,
) -> Change:
    """Returns how a stored definition becomes what the plan asks for. Raises ForeignState if it cannot.

    ``at_us``: the change. ``batch``: the last batch that has ended. ``finished``: numbers of definitions that have no
    window any more. ``oldest``: the oldest versions that are kept, of each shard and lineage. What none of them needs
    is forgotten, because no later one does, either. It is None if they are not known.
    """
    now = plan.definition
    _check_key(found, plan)
    for what, hint in _FIXED.items():
        if found.get(what) != now.get(what):
            raise ForeignState(f"{what} was {_shown(found.get(what))} and is {_shown(now.get(what))}; {hint}")
    if retyped := _retyped(found, plan):
        raise ForeignState(f"column {retyped[0]}, and what came before is known by its values; {_BESIDE}")
    if bool(found["partials"]) != bool(now["partials"]):
        raise ForeignState(f"apply= keeps events, aggregates= does not, and one became the other; {_BESIDE}")
    if ("event_rows" in found) != ("event_rows" in now):
        raise ForeignState(
            "windows of keys that keep each event (counts, windows per record, punctuated windows, sessions by a "
            "column) came or went beside other windows, and what is kept for them differs; " + _BESIDE
        )
    check_same_case(
        *([name for name, _ in (*d["block"], *d.get(COMPUTED, {}).get("columns", ()))] for d in (found, now))
    )
    before = Evolution.of(found)
    known_over = _known_over(before, oldest)
    drops = on_removed == DROP
    windows, added, removed = _windows(before, plan, at_us, finished, known_over, drops=drops)
    since, columns = _since(before, found, plan, at_us)
    _check_columns(found, plan)
    for then in _stored_columns(found):
        then.widths()  # raises ForeignState if it is unclear which columns belong to which partial
    first, follows = _needed(before, (*before.follows, digest(found)), oldest)
    steps = (*before.steps, Step(_edges(before), _stored_columns(found)))[first - before.forgotten :]
    gone = {name for name, _ in found.get(WORDS, {}).get("aggregates", [])}
    gone -= {name for name, _ in now[WORDS]["aggregates"]}
    kept = {**found, BEFORE: {"batch": None, "definition": None}} if EVOLUTION in found else found
    keys = before.keys or tuple(type_ for _, type_ in found["key"])
    evolution = Evolution(windows, since, steps, keys, follows, batch, kept, first)
    return Change(evolution, at_us, added, removed, columns, tuple(sorted(gone)), drops)


def _needed(before: Evolution, follows: Sequence[str], oldest: Sequence[Version] | None) -> tuple[int, tuple[str, ...]]:
    """Returns the first step, and those of the digests of earlier definitions, that versions need."""
    known = list(dict.fromkeys(follows))
    digests = {digest(version.definition) for version in oldest or ()}
    if not oldest or not digests <= set(known):
        return before.forgotten, tuple(known)
    first = before.changes
    for version in oldest:
        kept = version.snapshot.get(EVOLUTION, {"steps": 0, "layouts": []})
        # A later version may have blocks that are as they were before any of the steps that this one does not know.
        first = min(first, kept["steps"], *(layout.step for layout in layouts_of(kept)))
    return max(first, before.forgotten), tuple(known[min(map(known.index, digests)) :])


def _known_over(before: Evolution, oldest: Sequence[Version] | None) -> set[int]:
    """Returns the numbers of definitions that versions know to be over, so that nobody needs to know what they were."""
    known = [Evolution.of(version.definition).windows for version in oldest or ()]
    return {n for n in range(len(before.windows)) if known and all(n < len(w) and w[n].over for w in known)}


_BESIDE = "start it as another query with a checkpoint of its own, and let this one run until it is not needed"
_FIXED = {
    "time": "events are kept by their time, so its column stays; " + _BESIDE,
    "emit": "what has been shown of live windows depends on it; " + _BESIDE,
    "unique": "which events have come is kept by these columns; " + _BESIDE,
    "updates": "which event replaces another is kept by these columns; " + _BESIDE,
}


def _check_key(found: Mapping[str, Any], plan: Plan) -> None:
    """Raises ForeignState if the key is another one. A column may get a wider type if only blocks have it."""
    now = plan.definition["key"]
    if found["key"] == now:
        return
    names = [name for name, _ in found["key"]]
    narrow = [arrow_type(type_) for _, type_ in found["key"]]
    wide = [plan.schema.field(name).type for name in plan.key]
    why = "each key has its shard and its rows by its columns, so they stay"
    if names == list(plan.key) and all(map(widens_or_is, narrow, wide)):
        in_pages = {
            "windows of keys": any(not isinstance(window, Aligned) for window in plan.windows.values()),
            "windows of windows": plan.updates is not None,
            "windows with a fill": bool(plan.fills) or any("fill" in kept.spec for kept in Evolution.of(found).windows),
        }
        if not (users := [what for what, is_so in in_pages.items() if is_so]):
            return
        why = f"{', '.join(users)} keep keys with their types"
    raise ForeignState(f"key was {_shown(found['key'])} and is {_shown(now)}; {why}; {_BESIDE}")


def _retyped(found: Mapping[str, Any], plan: Plan) -> list[str]:
    """Says which columns tell events apart, and have types now by which what came before is not recognised."""
    known = dict([*found["block"], *found.get(COMPUTED, {}).get("columns", ())])
    now = {name: plan.schema.field(name).type for name in (plan.time, *plan.unique) if name in known}
    differ = [name for name, type_ in now.items() if family(arrow_type(known[name])) != family(type_)]
    return [f"{name} was {known[name]} and is {now[name]}" for name in differ]


def widens_or_is(old: pa.DataType, new: pa.DataType) -> bool:
    """Returns whether a column of a type can hold all values of another one."""
    return bool(old == new or _widens(old, new))


def _shown(value: Any) -> str:
    if value is None:
        return "not given"
    if isinstance(value, list):
        return ", ".join(f"{v[0]} ({v[1]})" if isinstance(v, list) else str(v) for v in value) or "none"
    return str(value)


def _windows(
    before: Evolution,
    plan: Plan,
    at_us: int | None,
    finished: Container[int],
    known_over: Container[int],
    *,
    drops: bool,
) -> tuple[tuple[Kept, ...], tuple[str, ...], tuple[str, ...]]:
    asked = {name: window.spec() for name, window in plan.windows.items()}
    stays = {old.name for old in before.windows if old.is_current and asked.get(old.name) == old.spec}
    added = [name for name in asked if name not in stays]
    begins: dict[str, int | None] = {
        name: None if at_us is None else AlignedWindows({0: window}).first_from(0, at_us)
        for name, window in plan.windows.items()
        if name in added and isinstance(window, Aligned)
    }
    # Windows of a name go on until others of that name begin, so that no time is left out.
    ends = {} if drops else begins
    kept: list[Kept] = []
    removed: list[str] = []
    for number, old in enumerate(before.windows):
        if old.is_current and old.name in stays:
            pass
        elif old.is_current:
            if old.spec["type"] not in ALIGNED:
                raise ForeignState(f"windows: {_of_keys(old.name, 'changed or went')}")
            removed.append(old.name)
            since = -NEVER if old.since_us is None else old.since_us
            never = at_us is None or since >= at_us or drops
            old = old._replace(until_us=ends.get(old.name, at_us), over=never)
            _check_calendar(old, plan)
        elif number in known_over:
            old = OVER
        elif number in finished or drops:
            old = old._replace(over=True)
        elif at_us is not None and old.until_us is not None and old.until_us > at_us:
            old = old._replace(until_us=begins.get(old.name, old.until_us if old.name in asked else at_us))
        kept.append(old)
    of_keys = any(not isinstance(window, Aligned) for window in plan.windows.values())
    for name in added:
        if not isinstance(plan.windows[name], Aligned):
            raise ForeignState(f"windows: {_of_keys(name, 'is new')}")
        kept.append(Kept(name, asked[name], begins[name]))
    if of_keys and (added or removed):
        raise ForeignState(
            f"windows: {', '.join([*added, *removed])} came or went beside windows of keys, whose rows are counted by "
            f"the slices of all windows; {_BESIDE}"
        )
    return tuple(kept), tuple(added), tuple(removed)


def _of_keys(name: str, what: str) -> str:
    return (
        f"{name!r} {what}, and its windows depend on all events of a key, also on those that were not kept for it; "
        f"{_BESIDE}"
    )


def _check_calendar(kept: Kept, plan: Plan) -> None:
    if kept.over or kept.spec["type"] != "calendar" or kept.spec["zone"] in rules_of(plan):
        return
    raise ForeignState(
        f"windows: {kept.name!r} went, and with it the rules of {kept.spec['zone']}, by which its windows would "
        "finish; keep it, or say on_removed='drop'"
    )


def rules_of(plan: Plan) -> dict[str, ZoneRules]:
    return {window.zone: window.edges.rules for window in plan.calendars.values()}


def _since(
    before: Evolution, found: Mapping[str, Any], plan: Plan, at_us: int | None
) -> tuple[tuple[tuple[Any, int], ...], tuple[str, ...]]:
    """Returns from when on windows have partials that blocks did not have, and the columns that need new ones."""
    if plan.layout is None:
        return (), ()
    had = [spec for columns in _stored_columns(found) for spec in columns.partials]
    has = [spec for each in plan.plans if each.layout is not None for spec in each.layout.spec()]
    since = [(spec, us) for spec, us in before.since if spec in has and spec in had]
    new = [spec for spec in has if spec not in had]
    columns = [
        bound.name
        for bound in plan.layout.bound
        if any(partial.spec() in new for partial in plan.layout.kept_for(bound))
    ]
    told = dict(plan.definition[WORDS]["aggregates"])
    for name, what in found.get(WORDS, {}).get("aggregates", []):
        if name in columns and told[name] == what:
            raise ForeignState(
                f"aggregates: {name!r} is what it was, but another aggregate of its column came or went, and now it is "
                f"computed from that one's values, which earlier blocks do not have; {_BESIDE}"
            )
    if at_us is None:
        return tuple(since), ()
    known = {name for partial, names in plan.layout.partials.items() if partial.spec() in had for name in names}
    try:
        nothing(plan, 1, known)
    except AionError as error:
        raise ForeignState(
            f"aggregates: what is kept has no {', '.join(columns)}, and a value of its own for events without values "
            f"cannot be made: {error}; {_BESIDE}"
        ) from None
    return (*since, *((spec, at_us) for spec in new)), tuple(columns)


def _stored_columns(definition: Mapping[str, Any]) -> list[StoredColumns]:
    inner = definition.get("event_rows")
    return [StoredColumns(d["block"], d["partials"]) for d in (definition, *([inner] if inner is not None else []))]


def _edges(before: Evolution) -> list[tuple[int, dict[str, Any]]]:
    return [(n, kept.spec) for n, kept in enumerate(before.windows) if not kept.over and kept.spec["type"] in ALIGNED]


def check_same_case(was: Sequence[str], now: Sequence[str]) -> None:
    """Raises ForeignState if a column has its name in another case: it would be another one, without old values."""
    new = {name.lower(): name for name in now if name not in was}
    for name in was:
        if name not in now and (called := new.get(name.lower())):
            raise ForeignState(
                f"column {name} is called {called} now, and would be null in what is kept; call it {name}"
            )


def _check_columns(found: Mapping[str, Any], plan: Plan) -> None:
    """Raises ForeignState if columns of blocks cannot be read as what they are now."""
    for was, new in zip(_stored_columns(found), _stored_columns(plan.definition), strict=True):
        lacking = [name for name, _ in new.block if name not in [name for name, _ in was.block]]
        if plan.updates is not None and lacking:
            raise ForeignState(f"the panes that are kept have no {', '.join(lacking)}; {_BESIDE}")
        types = dict(new.block)
        for name, type_ in was.block:
            try:
                old = arrow_type(type_)
            except ValueError as error:
                raise ForeignState(
                    f"column {name}: {error}, so what is kept cannot be read any more; {_BESIDE}"
                ) from None
            if new.partials or name not in types or types[name] == type_:
                continue
            if not _widens(old, arrow_type(types[name])):
                raise ForeignState(
                    f"column {name} was {type_} and is {types[name]}, which does not hold all that is kept; cast it "
                    f"to {type_}, or {_BESIDE}"
                )


def _widens(old: pa.DataType, new: pa.DataType) -> bool:
    t = pa.types
    if t.is_signed_integer(old) and t.is_signed_integer(new):
        return bool(new.bit_width >= old.bit_width)
    return bool(t.is_floating(old) and t.is_floating(new) and new.bit_width >= old.bit_width)


def nothing(plan: Plan, rows: int, known: Container[str]) -> dict[str, pa.Array]:
    """Returns the states that are not known: those of an event whose columns are null, once for each row."""
    assert plan.layout is not None
    event = {field.name: pa.nulls(1, field.type) for field in plan.schema}
    lifted = Rows(event, Groups(np.zeros(1, np.int64), 1))
    done: dict[Partial, States] = {}
    found: dict[str, pa.Array] = {}
    each = pa.array(np.zeros(rows, np.int64))
    for partial, names in plan.layout.partials.items():
        if any(name not in known for name in names):
            for needed in needs_all([partial]):
                if needed not in done:
                    done[needed] = needed.lift(lifted, done)
            found |= {name: state.take(each) for name, state in zip(names, done[partial], strict=True)}
    return found


def reached_us(snapshot: Mapping[str, Any]) -> int | None:
    """Returns an instant after all events that a shard has ever seen, and not before its watermark.

    Returns None if it has seen nothing.
    """
    return max((us for us in (snapshot["reached_us"], snapshot["watermark_us"]) if us is not None), default=None)


def finished(snapshots: Sequence[Mapping[str, Any]], definition: Mapping[str, Any], bound_us: int) -> set[int]:
    """Returns the numbers of the definitions that have no window any more. ``snapshots``: of all shards.

    ``bound_us``: how long a window is kept at most, if its definition does not say so itself.
    """
    own_us = {int(n): us for s in snapshots for n, us in s["own_bounds_us"].items()}
    watermarks = [s["watermark_us"] for s in snapshots if s["watermark_us"] is not None]
    live = {n for s in snapshots for n in untable(s["windows"])["definition"]}
    return {
        number
        for number, kept in enumerate(Evolution.of(definition).windows)
        if kept.until_us is not None
        and not kept.over
        and number not in live
        and kept.until_us + length_us(kept.spec) + max(bound_us, own_us.get(number, 0))
        <= max(watermarks, default=-NEVER)
    }


def length_us(spec: Mapping[str, Any]) -> int:
    """Returns the length of the longest window of an aligned definition."""
    if is_periodic(spec):
        return periodic_of(spec).reach_us
    return Steps.of(spec["every"], spec.get("start")).longest_us


def segment_us(spec: Mapping[str, Any]) -> int:
    """Returns how long a segment is at most if the windows of an aligned definition are the shortest ones."""
    return periodic_of(spec).shortest_us if is_periodic(spec) else length_us(spec)
