"""``python -m stepfence``: the command line."""

from stepfence.cli.main import main

if __name__ == "__main__":
    main()
