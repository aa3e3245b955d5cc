"""Makes one fault at a time in the core and the store, and says whether the quick tests find it.

``python -m tests.mutants`` tries all of them, ``python -m tests.mutants join ledger`` those with such a word in their
name or file. First the nearest quick tests run. If they pass, the tests of ``TINY`` in the Makefile run with tiny
thresholds, and then all quick tests that need no Spark; not so with ``--nearest``. It takes long, so ``make test`` does
not run it.

A survivor shows a gap, which needs a test, or it has no effect, so replace it. Choose places whose fault a user would
feel: a bound, an order, a deletion, a field of a snapshot, a checksum.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WITH_SPARK = ("spark", "connect", "experiments", "chaos")
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "out")
_FOUND = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)

TABLE = r"""
= line-of-side aion/core/join/arrivals.py core/join/test_join.py
-too_late = timed & (at < line_us)
+too_late = timed & (at <= line_us)
= line-goes-back aion/core/join/join.py core/join/test_join.py
-max(self._lines[side], to_us - bound.bound_for_new_window())
+to_us - bound.bound_for_new_window()
= equal-times aion/core/join/results.py core/join/test_join.py
-newer[had] = _exceeds(keys[1], keys[0])
+newer[had] = _exceeds(keys[0], keys[1])
= gone-row-returns aion/core/join/rows.py core/join/test_inputs_that_change.py
-hashes.among(read, also_gone=True)
+hashes.among(read)
= promise-not-restored aion/core/keyed/in_memory.py core/keyed/test_keyed_index.py
-Closing(state["closed_us"], state["promised"])
+Closing(state["closed_us"])
= lost-session-not-retracted aion/core/keyed/windows.py core/keyed/test_keyed_index.py
-        yield from self._retract_closed()
+        pass
= first-due-not-restored aion/core/keyed/page_store.py core/keyed/test_keyed_index.py
-            self.first = dict(zip(self.first, snapshot["first"], strict=True))
+            pass
= purged-window-returns aion/core/timed/windows.py core/operator/test_operator_bounds.py
-                gone |= new & self._gone.contains(covering.definition, covering.start_us, covering.end_us)
+                pass
= waiting-final-purged aion/core/timed/windows.py core/operator/test_late_work.py
-over &= windows["owed"][:late] == 0
+over &= windows["owed"][:late] >= 0
= runs-joined aion/core/timed/purged.py core/operator/test_operator_bounds.py
-            self._lasts[i - 1] = self._lasts[i]
+            pass
= filled-not-restored aion/core/timed/filled.py local/test_filled.py
-known = {} if snapshot is None else snapshot.get("filled", {})
+known = {}
= waiting-not-counted aion/core/life/late_work.py core/operator/test_late_work.py
-        windows["owed"][owed[~run]] += 1
+        pass
= early-not-restored aion/core/life/rules.py core/operator/test_early_and_final.py
-EarlyClock(rules.early_us, last.get(number))
+EarlyClock(rules.early_us)
= dropped-counted-twice aion/core/life/arrival.py core/operator/test_operator_bounds.py,core/operator/test_dropped.py
-most[block] = max(most.get(block, 0), events)
+most[block] = most.get(block, 0) + events
= runs-not-forgotten aion/core/life/segments.py core/operator/test_operator_bounds.py
-            self.compaction.forget(free)
+            pass
= room-not-restored aion/core/lateness/bound.py core/lateness
-            self._room_us = snapshot["room_us"]
+            pass
= old-forecast aion/core/trigger/staleness.py core/trigger
-            self._known.clear()
+            pass
= changed-window aion/core/slicing/aligned.py core/slicing,execute/test_evolution.py
-            full &= (starts >= since) & (starts < before)
+            full &= (starts >= since) & (starts <= before)
= divided-page-stays aion/core/paged_rows.py core/join
-(self._page(name, page, chunk), None, None) for page in emptied
+(self._page(name, page, chunk), None, None) for page in ()
= column-narrowed aion/core/query/evolution.py execute/test_evolution.py
-        return bool(new.bit_width >= old.bit_width)
+        return True
= step-forgotten aion/core/query/evolution.py execute/test_evolution.py
-min(first, kept["steps"], *(layout.step for layout in layouts_of(kept)))
+min(first, kept["steps"])
= over-too-early aion/core/query/evolution.py execute/test_evolution.py
-kept.until_us + length_us(kept.spec) + max(bound_us, own_us.get(number, 0))
+kept.until_us + max(bound_us, own_us.get(number, 0))
= reached-not-restored aion/core/operator/operator.py execute/test_evolution.py,core/operator/test_operator.py
-            self.reached_us = snapshot["reached_us"]
+            pass
= clock-strikes-on aion/core/operator/operator.py core/operator/test_early_and_final.py
-        self._rules.end_batch()
+        pass
= silent-keys-stay aion/core/operator/filled_keys.py local/test_filled.py
-            self._prune(stacked(over))
+            pass
= deleted-key-returns state_backends/store/map/merging.py stores/test_map_policies.py,versions/test_map.py
-oldest=not begin
+oldest=True
= undone-values-stay state_backends/store/map/store.py stores/test_map_policies.py,versions/test_map.py
-self._cache.clear()  # it may have values of these runs
+pass
= late-stays state_backends/store/eviction.py stores/test_memory.py,stores/test_bucket_limit.py
-if late or left < self._spare_bytes
+if left < self._spare_bytes
= soonest-leaves state_backends/store/eviction.py server/test_staged_stays.py,stores/test_prestaging.py
-in reversed(list(self._due)[self._next if first is None else first :]):
+in list(self._due)[self._next if first is None else first :]:
= room-not-given-back state_backends/store/prestaging.py stores/test_reserving.py,stores/test_prestaging.py
-        if prestage is not None:
-            self._budget.give_back(prestage.reserved_bytes)
+        if prestage is not None:
= span-begins state_backends/store/ledger.py stores/test_ledger.py,stores/test_reading.py
-if after < entry.arrival <= until
+if after <= entry.arrival <= until
= hash-of-edge state_backends/store/ledger.py stores/test_ledger.py,stores/test_reading.py
-ranges[last][1] >= compacted.low
+ranges[last][1] > compacted.low
= order-of-arrival state_backends/store/ledger.py stores/test_ledger.py,stores/test_reading.py
-sorted(self._slices.get(s, ()), key=_ARRIVAL_ORDER)
+self._slices.get(s, ())
= manifest-first state_backends/versions/shard.py versions/test_commits.py
-        self.storage.publish(making.published, [f.name for f in files])
-        making.may_be_saved = True
-        self.storage.save(manifest.token, dump(manifest))
+        making.may_be_saved = True
+        self.storage.save(manifest.token, dump(manifest))
+        self.storage.publish(making.published, [f.name for f in files])
= version-too-few state_backends/versions/shard.py versions/test_retention.py
-self._keep = retain + 1
+self._keep = retain
= manifest-unchecked state_backends/versions/manifest.py versions/test_refusals.py
-if trailer != b"\n%08x\n" % crc32(body):
+if len(trailer) != 10:
= same-batch-deleted state_backends/versions/retention.py versions/test_retention.py
-self._floor < its_batch < batch
+self._floor < its_batch <= batch
= batch-at-work state_backends/versions/lineage.py versions/test_refusals.py,versions/test_copies.py
-if its < batch or batch < 0
+if its <= batch or batch < 0
= claimed-twice state_backends/files/remote.py files/test_storage.py
-                return self.read(at)
+                self.read(at)
= other-stage state_backends/server/attempts.py server/test_attempts.py
-known[0] == place[0] and known[1] != place[1]
+known[1] != place[1]
= body-unchecked state_backends/format/block.py format
-if crc32(body) != block.header.crc:
+if len(body) != block.header.body_bytes:
= pressure-flutters policies/destage.py policies
-pressure >= self.moderate or (self.pressed and pressure > self.resume)
+pressure >= self.moderate
= bound-short-by-one policies/cleanup.py core/lateness/test_cleanup.py
-    bound_us = int(known.edges_us[first]) + 1
+    bound_us = int(known.edges_us[first])
= needed-in-time policies/destage.py policies,stores/test_map_policies.py
-<= expected_ms:
+< expected_ms:
"""


class Mutant(NamedTuple):
    """``old`` is replaced by ``new`` in ``file``. ``near``: the tests next to it."""

    name: str
    file: str
    old: str
    new: str
    near: tuple[str, ...]


def mutants() -> Iterator[Mutant]:
    """Yields the mutants of the table: a line with name, file and nearest tests, then the text, then another one."""
    for entry in re.split(r"^= ", TABLE, flags=re.MULTILINE)[1:]:
        head, *lines = entry.splitlines()
        name, file, near = head.split()
        old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        yield Mutant(name, file, old, new, tuple(f"tests/{name}" for name in near.split(",")))


def tiny() -> list[str]:
    """Returns the tests that the Makefile also runs with tiny thresholds."""
    found = re.search(r"^TINY := \$\(addprefix tests/, (.*?)\)$", (ROOT / "Makefile").read_text(), re.M | re.S)
    assert found is not None, "the Makefile says in TINY what runs with tiny thresholds"
    return [f"tests/{name}" for name in found[1].replace("\\", " ").split()]


def run(tree: Path, tests: Sequence[str], **environment: str) -> str | None:
    """Runs quick tests of a copy. Returns the first that failed, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "--timeout", "120", "-p", "no:cacheprovider"]
    command += ["-m", "not proof and not slow", *tests]
    environment |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(command, cwd=tree, env=os.environ | environment, capture_output=True, text=True, check=False)
    if not done.returncode:
        return None
    found = _FOUND.search(done.stdout)
    return found[1] if found else f"pytest ended with {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"


def look_for(mutant: Mutant, *, nearest: bool) -> str | None:
    """Returns the test that finds a mutant, and how, or None."""
    with tempfile.TemporaryDirectory(prefix="aion-mutant-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=_LEFT_OUT)
        changed = tree / mutant.file
        changed.write_text(changed.read_text().replace(mutant.old, mutant.new))
        if (found := run(tree, mutant.near)) is not None or nearest:
            return found
        if (found := run(tree, tiny(), AION_THRESHOLDS="tiny")) is not None:
            return f"{found} (tiny thresholds)"
        without = [f"--ignore=tests/{folder}" for folder in WITH_SPARK]
        return run(tree, [*without, "tests"])


def main() -> int:
    """Prints for each mutant what found it. Returns 1 if one survived."""
    parser = argparse.ArgumentParser(description="Says whether the quick tests find faults.")
    parser.add_argument("words", nargs="*", help="only mutants with one of these in their name or file")
    parser.add_argument("--nearest", action="store_true", help="run only the tests next to a mutant")
    asked = parser.parse_args()
    table = [*mutants()]
    if odd := [m.name for m in table if (ROOT / m.file).read_text().count(m.old) != 1]:
        parser.error(f"the text to replace must be there exactly once: {', '.join(odd)}")
    chosen = [m for m in table if not asked.words or any(word in f"{m.name} {m.file}" for word in asked.words)]
    survived = 0
    for mutant in chosen:
        began = time.monotonic()
        found = look_for(mutant, nearest=asked.nearest)
        survived += found is None
        how = "SURVIVED" if found is None else f"found by {found}"
        print(f"{mutant.name} ({mutant.file}): {how}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} found, {survived} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
