"""The program ``goldfish``, which ``python -m goldfish`` is too."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C may come before it is imported."""
    from goldfish.signals import end_quietly_while_importing

    end_quietly_while_importing()
    from goldfish.cli import main as run

    run()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, which Python puts before all that is installed
    main()
