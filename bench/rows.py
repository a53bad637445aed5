"""``python -m bench.rows``: time of one pass of the default model by rows and context, milliseconds, medians."""

from __future__ import annotations

import os
import statistics
import sys
import time

from services.model.forward import BLOCK_SIZE, ForwardPass, SequenceRows
from services.model.loading import LoadSettings, load
from services.model.store import prepare

ROWS = (1, 2, 4, 5, 8, 16, 32)
CONTEXTS = (16, 512, 1500)
REPEATS = 30


def one(forward: ForwardPass, context: int, rows: int) -> float:
    """Milliseconds of a pass of ``rows`` rows behind ``context`` cached tokens."""
    blocks = range(-(-(context + rows) // BLOCK_SIZE))
    batch = [SequenceRows([100 + i for i in range(rows)], context, blocks, rows)]
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        forward.run(batch)
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def main() -> int:
    forward = load(prepare("default"), LoadSettings(threads=os.cpu_count() or 1, cache_tokens=2048)).forward_pass
    forward.allocate_cache(2048 // BLOCK_SIZE)
    print("context", *(f"{rows:>3} rows" for rows in ROWS), sep="  ")
    for context in CONTEXTS:
        print(f"{context:>7}", *(f"{one(forward, context, rows):8.2f}" for rows in ROWS), sep="  ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
