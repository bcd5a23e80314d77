"""`python -m twinstep`: the same command as `twinstep`."""

from twinstep.cli import main

if __name__ == "__main__":
    main()
