"""The legs ``open`` and ``due`` of ``aion experiment joins``: each payment finds its open order, and each order whose
payment did not come comes out, however many are filled at once.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# In a process of its own: a state server lives as long as the process that asked for it.
SCRIPT = """
import sys
from pathlib import Path
from experiments.joins import open_rows
open_rows.FILLED_AT_ONCE = 200
rows = open_rows.OpenRows(500, 64, Path(sys.argv[1]))
print([rows.batch(100)[1] for _ in range(2)])
rows.close()
rows = open_rows.OpenRows(500, 64, Path(sys.argv[1]) / "due", fetches=True)
assert sum(rows.due(100)[1] for _ in range(5)) == 500
rows.close()
"""


def test_each_payment_finds_its_order(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("[100, 100]", 0), done.stderr
