"""``slipstream``: one command a file, imported when it is called."""

from __future__ import annotations

import importlib

import click

COMMANDS = {
    "generate": "Stream an answer from a running gateway.",
    "serve": "Run draft, target and gateway on this machine until Ctrl-C.",
    "demo": "Start all three, stream one answer with its tag, stop them.",
}


class Lazy(click.Group):
    """Finds ``cli.NAME.command`` only when NAME is asked for: `slipstream generate` starts without what others need."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found = importlib.import_module(f"cli.{cmd_name}").command
        assert isinstance(found, click.Command)
        return found


@click.group(cls=Lazy)
@click.version_option(package_name="slipstream")
def main() -> None:
    """Slipstream serves large language models faster, and says honestly what it did."""


if __name__ == "__main__":
    main()
