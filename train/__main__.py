"""``python -m train``: the ``lightning`` command under a name that no other package uses."""

from train.cli.lightning_command import main

if __name__ == "__main__":
    main()
