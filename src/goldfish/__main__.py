"""The program ``goldfish``, which ``python -m goldfish`` is too."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C may come while it is imported."""
    try:
        from goldfish.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        sys.exit(130)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, which Python puts before all that is installed
    main()
