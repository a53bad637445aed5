"""``python -m services.model.kernels build``: builds the pass, or says why it cannot run here."""

from __future__ import annotations

import sys
import time

from services.model.kernels import build


def main(arguments: list[str]) -> int:
    if arguments != ["build"]:
        print("usage: python -m services.model.kernels build", file=sys.stderr)
        return 2
    reason = build.why_not_here()
    if reason is not None:
        print(f"kernels: no fast pass on this machine ({reason}); models run on the reference path", flush=True)
        return 0
    print("kernels: building the fast pass (half a minute, once) ...", flush=True)
    started = time.monotonic()
    try:
        build.load()
    except build.BuildError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 1
    print(f"kernels: ready in {time.monotonic() - started:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
