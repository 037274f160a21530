"""``python -m goldfish`` is the command line."""

from goldfish.cli import main

if __name__ == "__main__":
    main()
