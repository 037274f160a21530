"""``python -m goldfish`` is the command line."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, which Python puts before all that is installed
    from goldfish.cli import main

    main()
