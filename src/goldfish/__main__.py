"""The program ``goldfish``, which ``python -m goldfish`` is too."""

import os
import sys

SPINS = "1000"
"""How often a thread looks whether it may go on, before it sleeps: for some ten microseconds."""


def main() -> None:
    """Run the command line; Ctrl-C may come while it is imported.

    Where something else runs on the machine, threads of PyTorch wait for those of theirs that it
    holds up. By default they keep their cores busy meanwhile, which holds them up further
    (docs/performance.md): they are told to sleep sooner, unless the environment says how to wait.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when PyTorch is imported
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
