"""``slipstream serve``: the three processes on this machine until Ctrl-C."""

from __future__ import annotations

import signal
import sys

import click

from cli.processes import Supervisor, runtime_folder, show_prefixed, the_three

START_TIMEOUT_S = 600


@click.command("serve")
def command() -> None:
    """Run draft, target and gateway until Ctrl-C; each is started again if it dies.

    Settings are those of the services, by environment: see `python -m services.target --help` and its siblings.
    """
    supervisor = Supervisor(the_three(runtime_folder()), show_prefixed)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: supervisor.request_stop())
    supervisor.start()
    if supervisor.wait_until_serving(START_TIMEOUT_S):
        click.echo('ready: slipstream generate "Why is the sky blue?"')
        supervisor.wait()
    failed = not supervisor.asked_to_stop
    supervisor.stop()
    sys.exit(1 if failed else 0)
