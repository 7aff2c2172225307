"""``python -m train`` is the ``lightning`` command under a name nothing else claims."""

from train.cli.lightning_command import main

if __name__ == "__main__":
    main()
